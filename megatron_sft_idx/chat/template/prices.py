"""What a template pays for a method of a string or list and for a filter of Jinja's, and their calls, which pay first.

``{{ "".center(9000000000) }}`` would take 9 GB by one call, so a price is computed from the sizes of a value and its
arguments, and paid before any work is done. It is an upper bound on memory and time, often a loose one: at least one
unit for each byte that is made, and one for every few nanoseconds of work, so that a whole allowance lasts for seconds
at most. A method or filter that is not in these tables cannot be called at all. A value that a filter turns into text
must have a text of its own. ``tojson`` does not escape HTML, as in transformers. ``random`` is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sized
from functools import partial, wraps
from typing import Any

from jinja2 import pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Undefined
from markupsafe import Markup, escape

from megatron_sft_idx.chat.template.allowance import ITEM, Allowance, Overspent, sum_of_numbers, text_bytes

Filter = Callable[..., Any]
Arguments = tuple[Any, ...]
Price = Callable[[int, str, Arguments], int]
"""Gives the units of work on a text, from its bytes, the text, and the further arguments of the method or filter."""

Payment = Callable[[Allowance, Any, Arguments], Any]
"""Pays for a filter, given its value and further arguments; returns the value that the filter is to work on."""

SHORT_ARGUMENT = 64
"""Characters: the first argument of a method in ``METHOD_FACTORS`` is not paid for if it is shorter."""

METHOD_FACTORS = {
    **dict.fromkeys(
        (
            "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
            "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lstrip",
            "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rstrip", "startswith",
            "strip",
        ),
        1,
    ),
    **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), 4),
}  # fmt: skip
"""Methods of strings whose first argument is short, by name, and their units for each byte of the string.

In upper case one character may become three, as in '\u0390'.upper(), each as wide as the widest of the text.
"""

_SHORT_STRING = 96  # bytes of a short string object and of the pointer to it in a list, without its characters
_ESCAPED = 8  # units of a byte: a quotation mark becomes five characters, in five passes over the text
_SORTED = 256  # units of an item that is sorted, looked up and compared in Python
_LOOKED_UP = 64  # units for each item and each character of an attribute's name: "a.b,c" asks for several attributes
_PRETTY = 64  # units for each unit of a value's weight: pprint goes through it many times

_METHODS: dict[type, frozenset[str]] = {
    tuple: frozenset({"count", "index"}),
    list: frozenset({"count", "index", "copy"}),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    int: frozenset({"bit_count", "bit_length", "is_integer"}),
    float: frozenset({"hex", "is_integer"}),
}


# Prices


def _linear(factor: int) -> Price:
    return lambda size, text, arguments: factor * size


def _searched(size: int, text: str, arguments: Arguments) -> int:
    """For methods that may compare a whole argument at each character of the text, as searches from the right do."""
    return size * (1 + sum(len(one) for one in arguments if isinstance(one, str)) // SHORT_ARGUMENT)


def _padded(size: int, text: str, arguments: Arguments) -> int:
    """For methods that fill up to a width, which is 80 where no argument gives one."""
    return 4 * (size + max(80, sum_of_numbers(arguments)))


def _multiplied(size: int, text: str, arguments: Arguments) -> int:
    """For methods that may write all arguments, or as many blanks as one says, beside each character."""
    return size * (64 + sum_of_numbers(arguments) + sum(text_bytes(one) for one in arguments if isinstance(one, str)))


def _squared(size: int, text: str, arguments: Arguments) -> int:
    """For methods that may copy the text once for each of its characters."""
    return _multiplied(size, text, arguments) + (size * size >> 6)


def _replaced(size: int, text: str, arguments: Arguments) -> int:
    texts = [one for one in arguments if isinstance(one, str)]
    written = text.count(texts[0]) * len(texts[1]) if len(texts) == 2 else 0
    return 4 * (size + written)


def _replaced_in_markup(size: int, text: str, arguments: Arguments) -> int:
    """For ``replace`` where the text, or what is looked for in it, may be escaped first."""
    texts = [one for one in arguments if isinstance(one, str)]
    if len(texts) != 2:
        return 4 * size
    old, new = ((one, str(escape(one))) for one in texts)
    found = max(where.count(one) for where in (text, str(escape(text))) for one in old)
    return 4 * (size + found * len(new[1]))


def _split(size: int, text: str, arguments: Arguments) -> int:
    separator = next((one for one in arguments if isinstance(one, str) and one), None)
    separators = len(text) if separator is None else text.count(separator)
    return _searched(size, text, arguments) + _SHORT_STRING * (3 + separators)


_STRING_PRICES: dict[str, Price] = {
    **{name: _linear(factor) for name, factor in METHOD_FACTORS.items()},
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip"), _searched),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("rsplit", "split", "splitlines"), _split),
    "expandtabs": _multiplied,
    "replace": _replaced,
}
_MARKUP_PRICES: dict[str, Price] = {
    **_STRING_PRICES,
    "join": _multiplied,
    "replace": _replaced_in_markup,
    **dict.fromkeys(("striptags", "unescape"), _squared),
}


def call_method(allowance: Allowance, value: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Call method ``name`` of a value of a built-in type or of Markup, having paid for it.

    Raises:
        Overspent: the method costs more than remains, or templates may not call it.
        NotText: an argument of a method of Markup has no text of its own.
    """
    kind = type(value)
    arguments = (*args, *kwargs.values())
    if kind is str and name in _STRING_PRICES:
        if arguments:
            allowance.weigh(arguments)
        allowance.spend(_STRING_PRICES[name](text_bytes(value), value, arguments))
    elif kind is str and name == "join" and len(args) == 1 and not kwargs:
        items = allowance.paid_list(args[0], ITEM)
        return allowance.joined(items, value) if all(isinstance(item, str) for item in items) else value.join(items)
    elif isinstance(value, Markup) and name in _MARKUP_PRICES:
        args = tuple(map(allowance.paid_list, args)) if name == "join" else args
        weight = allowance.weigh((args, kwargs), _ESCAPED, written=True)
        arguments = (weight,) if name == "join" else arguments  # the separator stands between so many items at most
        allowance.spend(_ESCAPED * max(weight, _MARKUP_PRICES[name](text_bytes(value), str(value), arguments)))
    elif any(isinstance(value, type_) and name in names for type_, names in _METHODS.items()):
        if name == "get":
            allowance.checked_key(args[0] if args else None)
        elif name in ("count", "index", "copy"):
            allowance.weigh((value, args))
    else:
        raise Overspent(f"a chat template cannot call {kind.__name__}.{name}")
    return getattr(value, name)(*args, **kwargs)


# Payments for filters


def _of_text(price: Price, coerced: bool = True) -> Payment:
    """For filters of a text, at this price; ``coerced`` if they first make a text of a value that is none."""

    def payment(allowance: Allowance, value: Any, arguments: Arguments) -> Any:
        weight = allowance.weigh(arguments, written=coerced) if arguments else 0
        if coerced and not isinstance(value, str):
            value = allowance.text(value)
        if isinstance(value, str):
            allowance.spend(max(weight, price(text_bytes(value), value, arguments)))
        elif not coerced:
            allowance.spend(price(allowance.weigh(value), "", arguments))
        return value

    return payment


def _pretty(allowance: Allowance, value: Any, arguments: Arguments) -> Any:
    allowance.spend(_PRETTY * allowance.weigh(value, written=True))
    return value


def _lazy(allowance: Allowance, value: Any, arguments: Arguments) -> Any:
    """For filters that are iterators: they look at all arguments for each item of their value."""
    weight = 4 * ITEM + allowance.weigh(arguments)
    if isinstance(value, Sized):
        allowance.spend(weight * len(value))
        return value
    return allowance.paid_items(value, weight) if hasattr(value, "__iter__") else value


def _gathered(allowance: Allowance, value: Any, arguments: Arguments) -> Any:
    """For filters that make lists; a number among the arguments may say how many lists, or how long ones."""
    allowance.spend(4 * ITEM * sum_of_numbers(arguments))
    if isinstance(value, str):
        allowance.spend(text_bytes(value))
    elif hasattr(value, "__iter__"):
        value = allowance.paid_list(value) if not isinstance(value, Sized) else _lazy(allowance, value, ())
    return value


def _compared(allowance: Allowance, value: Any, arguments: Arguments) -> Any:
    """For filters that sort, or look items up in a dict."""
    value = _gathered(allowance, value, ())
    if isinstance(value, Sized):
        attribute = allowance.weigh(arguments, _LOOKED_UP) if arguments else 0
        allowance.spend((_SORTED + attribute) * len(value))
    allowance.weigh(value, 4)
    for item in value if isinstance(value, (list, tuple, range)) else ():
        allowance.checked_key(item)
    return value


_FREE = ("abs", "attr", "count", "d", "default", "first", "items", "last", "length")
_PAYMENTS: dict[str, Payment] = {
    **dict.fromkeys(("capitalize", "lower", "upper"), _of_text(_linear(4))),
    **dict.fromkeys(("e", "escape", "forceescape"), _of_text(_linear(_ESCAPED))),
    **dict.fromkeys(("title", "wordcount"), _of_text(_linear(64))),
    **dict.fromkeys(("filesizeformat", "float", "int"), _of_text(lambda size, text, _: size * size >> 6, False)),
    **dict.fromkeys(("round", "wordwrap"), _of_text(_squared, False)),
    **dict.fromkeys(("striptags", "urlize"), _of_text(_squared)),
    **dict.fromkeys(("pprint", "urlencode", "xmlattr"), _pretty),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _lazy),
    **dict.fromkeys(("batch", "reverse", "slice"), _gathered),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _compared),
    "center": _of_text(_padded),
    "indent": _of_text(_multiplied, False),
    "safe": lambda allowance, value, arguments: allowance.soft_text(value),
    "truncate": _of_text(_linear(4), False),
}


def _counted(filter_: Filter, payment: Payment, allowance: Allowance) -> Filter:
    """A filter that pays before it works."""
    if hasattr(filter_, "jinja_pass_arg"):

        @wraps(filter_)
        def with_context(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return filter_(context, payment(allowance, value, (*args, *kwargs.values())), *args, **kwargs)

        return with_context

    @wraps(filter_)
    def plain(value: Any, *args: Any, **kwargs: Any) -> Any:
        return filter_(payment(allowance, value, (*args, *kwargs.values())), *args, **kwargs)

    return plain


def counted_filters(allowance: Allowance, filters: dict[str, Filter]) -> dict[str, Filter]:
    """Filters for templates, by name: those of ``filters``, Jinja's own, each of which pays from ``allowance``.

    The functions below stand for filters that are used much, or whose price is known only while they work.
    """

    def trim(value: Any, chars: str | None = None) -> str:
        if type(value) is not str:
            value = allowance.soft_text(value)
        size = text_bytes(value)
        allowance.spend(size if chars is None else _searched(size, value, (chars,)))
        return value.strip(chars)  # type: ignore[no-any-return]

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
            allowance.spend(8 * text_bytes(allowance.text(d)) * len(items))
            return filters["join"](context, items, d)  # type: ignore[no-any-return]
        items = [item if type(item) is str else allowance.text(item) for item in items]
        return allowance.joined(items, d if type(d) is str else allowance.text(d))

    @pass_eval_context
    def replace(context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        s, old, new = (one if isinstance(one, str) else allowance.text(one) for one in (s, old, new))
        price = _replaced_in_markup if context.autoescape else _replaced
        allowance.spend(6 * price(text_bytes(s), s, (old, new)))
        return filters["replace"](context, s, old, new, count)  # type: ignore[no-any-return]

    @pass_eval_context
    def sum_(context: EvalContext, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        items = allowance.paid_list(iterable)
        weight = allowance.weigh((items, start))
        if isinstance(start, (list, tuple)):
            allowance.nests = True
            allowance.spend(weight * len(items))
        return allowance.checked_number(filters["sum"](context.environment, items, attribute, start))

    def format_(value: Any, *args: Any, **kwargs: Any) -> str:
        text = allowance.soft_text(value)
        allowance.pay_for_percent_format(text, (*args, *kwargs.values()))
        return filters["format"](text, *args, **kwargs)  # type: ignore[no-any-return]

    def random(*_args: Any) -> Any:
        raise SecurityError("the random filter would make other text from the same row; take it out of the template")

    return {
        **{name: filters[name] for name in _FREE},
        **{name: _counted(filters[name], payment, allowance) for name, payment in _PAYMENTS.items()},
        "format": format_,
        "join": join,
        "list": allowance.paid_list,
        "random": random,
        "replace": replace,
        "string": string,
        "sum": sum_,
        "tojson": partial(_to_json, allowance),
        "trim": trim,
    }


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
        text = _encode_json(value)  # as below, without building an encoder each time
        allowance.spend(len(text))
        return text
    if isinstance(indent, int):
        allowance.spend(max(0, indent))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    chunks = []
    for chunk in encoder.iterencode(value):  # indentation grows with depth, so no price can be known before
        allowance.spend(ITEM + len(chunk))
        chunks.append(chunk)
    return "".join(chunks)


_encode_json = json.JSONEncoder(ensure_ascii=False).encode
