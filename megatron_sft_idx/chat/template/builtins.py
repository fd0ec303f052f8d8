"""The allow-list: which of Jinja's filters, tests and globals, and of Python's methods, a chat template may call.

All pay one general charge: the bytes that go in, before they run, and the bytes that come out. It bounds memory and
time wherever a result is no longer than a few times what it is made of. Where an argument multiplies, such as a width,
a separator or a replacement, or where the time goes by a square, a *bound* on the work is computed from the arguments
and paid too, before any of it is done. ``{{ "".center(9000000000) }}`` would else take 9 GB by one call.

What is not on the list is refused by name. ``tojson`` does not escape HTML, as in transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from datetime import datetime
from functools import partial, wraps
from typing import Any

from jinja2 import TemplateError, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Undefined
from jinja2.utils import Namespace
from markupsafe import Markup

from megatron_sft_idx.chat.template.allowance import ITEM, POINTER, Allowance, Overspent, text_bytes
from megatron_sft_idx.chat.template.operators import Operators, sum_of_numbers
from megatron_sft_idx.errors import FormatError

MAX_MESSAGE = 2000
"""The longest message of ``raise_exception``, in characters."""

SHORT = 64
"""Characters: a shorter argument of a linear method costs nothing."""

Arguments = tuple[Any, ...]
Bound = Callable[[str, Arguments], int]
"""Bounds the work on a text, in units beyond its bytes, given the further arguments of the method or filter."""

_ESCAPED = 8  # units of a byte: a quotation mark becomes five characters, in five passes over the text
_WORD = 64  # units of a byte of text that is taken apart: a string object, and a pointer to it
_SORTED = 256  # units of an item that is sorted, looked up and compared in Python
_LOOKED_UP = 64  # units for each item and each character of an attribute's name: "a.b,c" asks for several attributes
_MAX_PRECISION = 4096


# Bounds


def _times(factor: int) -> Bound:
    return lambda text, arguments: factor * text_bytes(text)


def _padded(text: str, arguments: Arguments) -> int:
    """For what fills up to a width, which is 80 where no argument gives one."""
    return 4 * max(80, sum_of_numbers(arguments))


def _searched(text: str, arguments: Arguments) -> int:
    """For what may compare a whole argument at each character of the text, as searches from the right do."""
    return text_bytes(text) * sum(len(one) for one in arguments if isinstance(one, str)) // SHORT


def _split(text: str, arguments: Arguments) -> int:
    separator = next((one for one in arguments if isinstance(one, str) and one), None)
    pieces = len(text) if separator is None else text.count(separator)
    return _searched(text, arguments) + 2 * _WORD * (2 + pieces)


def _replaced(text: str, arguments: Arguments) -> int:
    old, new, *_ = *(one for one in arguments if isinstance(one, str)), "", ""
    if isinstance(text, Markup):  # anything may be escaped before it is looked for
        return _ESCAPED * len(text) // max(1, len(old)) * text_bytes(new)
    return text.count(old) * text_bytes(new)


def _multiplied(text: str, arguments: Arguments) -> int:
    """For what may write all arguments, or as many blanks as one says, next to each character."""
    return text_bytes(text) * (_WORD + sum_of_numbers(arguments) + _bytes_of(arguments))


def _squared(text: str, arguments: Arguments) -> int:
    """For what may copy the text once for each of its characters."""
    return _multiplied(text, arguments) + (text_bytes(text) ** 2 >> 6)


def _bytes_of(arguments: Arguments) -> int:
    return sum(text_bytes(one) for one in arguments if isinstance(one, str))


# Methods

LINEAR_METHODS = frozenset(
    {
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
        "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower",
        "partition", "removeprefix", "removesuffix", "startswith", "swapcase", "title", "upper",
    }
)  # fmt: skip
"""Methods of strings that pay the general charge alone."""

BOUNDED_METHODS: dict[str, Bound] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip"), _searched),
    **dict.fromkeys(("rsplit", "split", "splitlines"), _split),
    "expandtabs": _multiplied,
    "replace": _replaced,
}
"""Further methods of strings, and what bounds their work."""

_MARKUP_METHODS: dict[str, Bound] = dict.fromkeys(("striptags", "unescape"), _squared)

_OTHER_METHODS: dict[type, frozenset[str]] = {
    tuple: frozenset({"count", "index"}),
    list: frozenset({"count", "index", "copy"}),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    int: frozenset({"bit_count", "bit_length", "is_integer"}),
    float: frozenset({"hex", "is_integer"}),
}

LOOKED_UP: dict[type, frozenset[str]] = {
    str: frozenset({*LINEAR_METHODS, *BOUNDED_METHODS, "join"}),
    list: _OTHER_METHODS[list],
    dict: _OTHER_METHODS[dict],
}
"""Methods that the sandbox gives a template, by the type of their object."""


def call_method(operators: Operators, value: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Call method ``name`` of a value of a built-in type or of Markup, having paid for it.

    Raises:
        Overspent: the method costs more than remains, or templates may not call it.
        NotText: an argument of a method of Markup has no text of its own.
    """
    allowance = operators.allowance
    markup = isinstance(value, Markup)
    arguments = (*args, *kwargs.values())
    if name == "join" and isinstance(value, str) and len(args) == 1 and not kwargs:
        items = allowance.paid_list(args[0], ITEM)
        if not markup and all(isinstance(item, str) for item in items):
            return allowance.joined(items, value)
        if markup:
            allowance.spend(_ESCAPED * (allowance.weigh(items, _ESCAPED, written=True) + text_bytes(value) * len(items)))
        return value.join(items)
    bound = BOUNDED_METHODS.get(name) or (_MARKUP_METHODS.get(name) if markup else None)
    if isinstance(value, str) and (bound is not None or name in LINEAR_METHODS):
        if arguments:
            allowance.weigh(arguments, _ESCAPED if markup else 1, written=markup)
        work = text_bytes(value) + (bound(value, arguments) if bound is not None else 0)
        allowance.spend(_ESCAPED * work if markup else work)
    elif not any(isinstance(value, kind) and name in names for kind, names in _OTHER_METHODS.items()):
        raise Overspent(
            f"chat templates cannot call {type(value).__name__}.{name}; write the template without it, "
            "or put what it makes into the rows"
        )
    elif name == "get":
        operators.key(args[0] if args else None)
    elif name in ("count", "index", "copy"):
        allowance.weigh((value, args))
    return allowance.made(getattr(value, name)(*args, **kwargs))


# Filters

Filter = Callable[..., Any]
Payment = Callable[[Operators, Any, Arguments], Any]
"""Pays for a filter, given its value and further arguments; returns the value that the filter is to work on."""


def _text(bound: Bound | None = None, coerced: bool = True) -> Payment:
    """For filters of a text; ``coerced`` if they first make a text of a value that is none."""

    def payment(operators: Operators, value: Any, arguments: Arguments) -> Any:
        if arguments:
            operators.allowance.weigh(arguments, written=coerced)
        if coerced and not isinstance(value, str):
            value = operators.allowance.text(value)
        if isinstance(value, str):
            work = text_bytes(value) + (bound(value, arguments) if bound is not None else 0)
            operators.allowance.spend(_ESCAPED * work if isinstance(value, Markup) else work)
        return value

    return payment


def _free(operators: Operators, value: Any, arguments: Arguments) -> Any:
    """For filters that hardly look at their value."""
    return value


def _written(operators: Operators, value: Any, arguments: Arguments) -> Any:
    """For filters that write all of their value, and may go through it many times."""
    operators.allowance.spend(_WORD * operators.allowance.weigh(value, written=True))
    return value


def _rounded(operators: Operators, value: Any, arguments: Arguments) -> Any:
    if sum_of_numbers(arguments) > _MAX_PRECISION:
        raise Overspent(f"rounding to more than {_MAX_PRECISION:,} places")
    return value


def _lazy(operators: Operators, value: Any, arguments: Arguments) -> Any:
    """For filters that are iterators: they look at all arguments for each item of their value."""
    weight = 4 * ITEM + operators.allowance.weigh(arguments)
    if isinstance(value, Sized):
        operators.allowance.spend(weight * len(value))
        return value
    return operators.allowance.paid_items(value, weight) if isinstance(value, Iterable) else value


def _gathered(operators: Operators, value: Any, arguments: Arguments) -> Any:
    """For filters that make lists; a number among the arguments may say how many lists, or how long ones."""
    operators.allowance.spend(4 * ITEM * sum_of_numbers(arguments))
    if isinstance(value, str):
        operators.allowance.spend(text_bytes(value))
    elif isinstance(value, Iterable):
        value = operators.allowance.paid_list(value) if not isinstance(value, Sized) else _lazy(operators, value, ())
    return value


def _compared(operators: Operators, value: Any, arguments: Arguments) -> Any:
    """For filters that sort, or look items up in a dict."""
    value = _gathered(operators, value, ())
    if isinstance(value, Sized):
        attribute = operators.allowance.weigh(arguments, _LOOKED_UP) if arguments else 0
        operators.allowance.spend((_SORTED + attribute) * len(value))
    operators.allowance.weigh(value, 4)
    for item in value if isinstance(value, (list, tuple, range)) else ():
        operators.key(item)
    return value


_PAYMENTS: dict[str, Payment] = {
    **dict.fromkeys(("abs", "attr", "count", "d", "default", "first", "items", "last", "length"), _free),
    **dict.fromkeys(("capitalize", "lower", "upper"), _text()),
    **dict.fromkeys(("e", "escape", "forceescape"), _text(_times(_ESCAPED))),
    **dict.fromkeys(("filesizeformat", "float", "int", "truncate"), _text(coerced=False)),
    **dict.fromkeys(("title", "wordcount"), _text(_times(_WORD))),
    **dict.fromkeys(("striptags", "urlize"), _text(_squared)),
    **dict.fromkeys(("pprint", "urlencode", "xmlattr"), _written),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _lazy),
    **dict.fromkeys(("batch", "list", "reverse", "slice"), _gathered),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _compared),
    "center": _text(_padded),
    "indent": _text(_multiplied, coerced=False),
    "round": _rounded,
    "trim": _text(_searched),
    "wordwrap": _text(_squared, coerced=False),
}


def _paying(filter_: Filter, payment: Payment, operators: Operators) -> Filter:
    """A filter that pays before it works, and for what it has made."""
    made = operators.allowance.made
    if hasattr(filter_, "jinja_pass_arg"):

        @wraps(filter_)
        def with_context(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return made(filter_(context, payment(operators, value, (*args, *kwargs.values())), *args, **kwargs))

        return with_context

    @wraps(filter_)
    def plain(value: Any, *args: Any, **kwargs: Any) -> Any:
        return made(filter_(payment(operators, value, (*args, *kwargs.values())), *args, **kwargs))

    return plain


def filters_of(operators: Operators, filters: Mapping[str, Filter]) -> dict[str, Filter]:
    """Filters for templates, by name: Jinja's own, ``filters``, each of which pays.

    The functions below stand for filters that are used much, or whose work is known only while they work.
    """
    allowance = operators.allowance

    def string(value: Any) -> str:
        return value if type(value) is str else allowance.soft_text(value)

    @pass_eval_context
    def join(context: EvalContext, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        items = allowance.paid_list(value, ITEM)
        if attribute is not None:
            allowance.spend(allowance.weigh(attribute, _LOOKED_UP) * len(items))
            items = [*map(make_attrgetter(context.environment, attribute), items)]
        if context.autoescape:
            items = [allowance.soft_text(item) for item in items]
            allowance.spend(_ESCAPED * text_bytes(allowance.text(d)) * len(items))
            return filters["join"](context, items, d)  # type: ignore[no-any-return]
        items = [item if type(item) is str else allowance.text(item) for item in items]
        return allowance.joined(items, allowance.text(d))

    @pass_eval_context
    def replace(context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        s, old, new = (one if isinstance(one, str) else allowance.text(one) for one in (s, old, new))
        work = text_bytes(s) + _replaced(Markup(s) if context.autoescape else str(s), (old, new))
        allowance.spend(_ESCAPED * work if context.autoescape else work)
        return allowance.made(filters["replace"](context, s, old, new, count))  # type: ignore[no-any-return]

    @pass_eval_context
    def sum_(context: EvalContext, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        items = allowance.paid_list(iterable)
        weight = allowance.weigh((items, start))
        if isinstance(start, (list, tuple)):
            allowance.nests = True
            allowance.spend(weight * len(items))
        return allowance.made(filters["sum"](context.environment, items, attribute, start))

    def format_(value: Any, *args: Any, **kwargs: Any) -> str:
        text = allowance.soft_text(value)
        operators.pay_for_percent_format(text, (*args, *kwargs.values()))
        return filters["format"](text, *args, **kwargs)  # type: ignore[no-any-return]

    return {
        **{name: _refused(f"the {name} filter") for name in filters},
        **{name: _paying(filters[name], payment, operators) for name, payment in _PAYMENTS.items()},
        "format": format_,
        "join": join,
        "random": _refused("the random filter", "it would make other text from the same row"),
        "replace": replace,
        "safe": lambda value: Markup(allowance.soft_text(value)),
        "string": string,
        "sum": sum_,
        "tojson": partial(_to_json, allowance),
    }


def _refused(what: str, reason: str = "it is not among what a chat template may use") -> Callable[..., Any]:
    """Stands for a filter or function that no template may call."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise SecurityError(f"{what}: {reason}; take it out of the template")

    return refuse


def _to_json(
    allowance: Allowance,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, Undefined):
        raise TypeError(f"tojson: {value._undefined_message}")
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        if allowance.nests:  # else the text is hardly longer than the conversation, so it can be paid for afterwards
            allowance.weigh(value, 6)
        return allowance.made(_encode_json(value))  # type: ignore[no-any-return] # as below, with one encoder for all
    if isinstance(indent, int):
        allowance.spend(max(0, indent))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    chunks = []
    for chunk in encoder.iterencode(value):  # indentation grows with depth, so no bound can be known before
        allowance.spend(ITEM + len(chunk))
        chunks.append(chunk)
    return "".join(chunks)


_encode_json = json.JSONEncoder(ensure_ascii=False).encode


# Tests


_COMPARING_TESTS = frozenset(
    ["==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le"]
)


def tests_of(operators: Operators, tests: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Tests for templates, by name: Jinja's own, ``tests``, of which those that go through a value pay."""
    compared, soft_text = operators.compared, operators.allowance.soft_text

    def comparing(test: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: test(*map(compared, values))

    return {
        **tests,
        **{name: comparing(tests[name]) for name in _COMPARING_TESTS},
        "divisibleby": lambda value, num: operators.call_binop(None, "%", value, num) == 0,  # type: ignore[arg-type]
        "in": operators.contains,
        "lower": lambda value: tests["lower"](soft_text(value)),
        "upper": lambda value: tests["upper"](soft_text(value)),
    }


# Globals


class RaisedByTemplate(TemplateError):  # noqa: N818 - not an error of ours: the template's own words
    """What a template says through ``raise_exception``."""


class TemplateNamespace(Namespace):
    """A namespace without underscore names, which could reach Python's internals.

    Its names are plain attributes, unlike its parent's, because templates read them in every loop.
    """

    __getattribute__ = object.__getattribute__

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # leaves the name `self` to templates
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name[:1] == "_":
            raise SecurityError(f"templates cannot store underscore names such as {name!r} on a namespace")
        self.__dict__[name] = value

    def __repr__(self) -> str:
        return f"<Namespace {self.__dict__!r}>"


class TemplateDict:
    """``dict(...)`` for templates: makes dicts, and is not the class."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        allowance = self._operators.allowance
        if args and not isinstance(args[0], Mapping):
            pairs = allowance.paid_list(args[0])
            args = ([(self._operators.key(key), value) for key, value in pairs], *args[1:])
        for items in (*args, kwargs):
            allowance.spend(4 * POINTER * len(items))
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        """A dict with these keys, each with the same value."""
        return dict.fromkeys(map(self._operators.key, self._operators.allowance.paid_list(keys)), value)


def globals_of(operators: Operators, template_date: str | None) -> dict[str, Any]:
    """Functions for templates, by name, beyond or in place of Jinja's own.

    Raises:
        ValueError: ``template_date`` is not a date.
    """
    day = None if template_date is None else datetime.strptime(template_date, "%Y-%m-%d")

    def strftime_now(style: str) -> str:
        if day is None:
            raise FormatError(
                "the chat template asks for today's date, so its text would change from day to day; "
                "give the date it should see with --template-date YYYY-MM-DD"
            )
        if re.search(r"%[^a-zA-Z%]*[0-9]", style):  # the C library of some machines pads a field to this width
            raise Overspent("a date with the width of a field is too much for a chat template")
        operators.allowance.spend(256 * len(style))
        return day.strftime(style)

    def raise_exception(message: Any) -> None:
        said = operators.allowance.text(message)
        raise RaisedByTemplate(said if len(said) <= MAX_MESSAGE else f"{said[:MAX_MESSAGE]}...")

    return {
        "dict": TemplateDict(operators),
        "lipsum": _refused("lipsum()", "it would make other text from the same row"),
        "namespace": TemplateNamespace,
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }
