"""What methods and filters cost a template, by classes, and Jinja's filters paid for before they work.

The price is taken before the work is done, from the sizes of what is worked on. It bounds memory and time, and need not
be near to either: at least one unit for each byte that is made, and one for every few nanoseconds of work, so that a
whole allowance is gone within seconds. Ordinary rows use a small part of theirs. A method of a built-in type that is
not in these tables cannot be called, and neither can a filter.

What a filter makes text of must have a text of its own. ``tojson`` does not escape HTML, as transformers has it, and
``random`` is refused.
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
from markupsafe import Markup

from megatron_sft_idx.chat.template.allowance import ITEM, Allowance, Overspent, sum_of_numbers, text_bytes

Filter = Callable[..., Any]
Values = tuple[Any, ...]

SHORT_ARGUMENT = 64
"""Characters: shorter arguments of the methods in ``METHOD_FACTORS`` are not paid for."""

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
"""Methods of strings whose price is a multiple of the string's bytes, with that factor, if their arguments are short.

A character may become three, as in '\u0390'.upper(), each as wide as the widest of the text.
"""

_PIECE = 96  # bytes of a short text beside its characters and of its place in a list
_ESCAPED = 8  # a quotation mark becomes five characters, and the text is gone through for each of five kinds
_SORTED = 256  # units of an item that is sorted, looked up and compared in Python
_PRETTY = 64  # times a value's weight: pprint goes through it many times

_METHODS: dict[type, frozenset[str]] = {
    tuple: frozenset({"count", "index"}),
    list: frozenset({"count", "index", "copy"}),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    int: frozenset({"bit_count", "bit_length", "is_integer"}),
    float: frozenset({"hex", "is_integer"}),
}


# Classes of prices: units for work on a text of that many bytes, with further arguments


def _linear(factor: int) -> Callable[[int, str, Values], int]:
    return lambda size, text, given: factor * size


def _searched(size: int, text: str, given: Values) -> int:
    """Arguments are looked at anew for each character: from the right no faster search is made."""
    return size * (1 + sum(len(one) for one in given if isinstance(one, str)) // SHORT_ARGUMENT)


def _padded(size: int, text: str, given: Values) -> int:
    """A width, in characters of any kind; 80 where none is given."""
    return 4 * (size + max(80, sum_of_numbers(given)))


def _multiplied(size: int, text: str, given: Values) -> int:
    """Something of the length of the arguments comes beside each character."""
    return size * (64 + sum_of_numbers(given) + sum(text_bytes(one) for one in given if isinstance(one, str)))


def _squared(size: int, text: str, given: Values) -> int:
    """The text is gone through, or copied, again and again."""
    return _multiplied(size, text, given) + (size * size >> 6)


def _replaced(size: int, text: str, given: Values) -> int:
    texts = [one for one in given if isinstance(one, str)]
    written = text.count(texts[0]) * len(texts[1]) if len(texts) == 2 else 0
    return 4 * (size + written)


def _split(size: int, text: str, given: Values) -> int:
    separator = next((one for one in given if isinstance(one, str) and one), None)
    pieces = len(text) if separator is None else text.count(separator)
    return _searched(size, text, given) + _PIECE * (3 + pieces)


_STRING_PRICES: dict[str, Callable[[int, str, Values], int]] = {
    **{name: _linear(factor) for name, factor in METHOD_FACTORS.items()},
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip"), _searched),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("rsplit", "split", "splitlines"), _split),
    "expandtabs": _multiplied,
    "replace": _replaced,
}
_MARKUP_PRICES = {**_STRING_PRICES, "join": _multiplied, "striptags": _squared, "unescape": _squared}


def call_method(allowance: Allowance, value: Any, name: str, args: Values, kwargs: dict[str, Any]) -> Any:
    """Call a method of a plain value, having paid for it.

    Raises:
        Overspent: it costs too much, or is none that templates may call.
    """
    kind = type(value)
    given = (*args, *kwargs.values())
    if kind is str and name in _STRING_PRICES:
        if given:
            allowance.weigh(given)
        allowance.spend(_STRING_PRICES[name](text_bytes(value), value, given))
    elif kind is str and name == "join" and len(args) == 1 and not kwargs:
        parts = allowance.listed(args[0], ITEM)
        return allowance.joined(parts, value) if all(isinstance(part, str) for part in parts) else value.join(parts)
    elif isinstance(value, Markup) and name in _MARKUP_PRICES:
        args = tuple(map(allowance.listed, args)) if name == "join" else args
        weight = allowance.weigh((args, kwargs), _ESCAPED, written=True)
        given = (weight,) if name == "join" else given  # the separator stands between so many parts at most
        allowance.spend(_ESCAPED * max(weight, _MARKUP_PRICES[name](text_bytes(value), str(value), given)))
    elif any(isinstance(value, known) and name in names for known, names in _METHODS.items()):
        if name == "get":
            allowance.key(args[0] if args else None)
        elif name in ("count", "index", "copy"):
            allowance.weigh((value, args))
    else:
        raise Overspent(f"a chat template cannot call {kind.__name__}.{name}")
    return getattr(value, name)(*args, **kwargs)


# Filters: each class pays, and gives the value that the filter is to work on


def _of_text(units: Callable[[int, str, Values], int], coerced: bool = True) -> Filter:
    """Filters of a text, most of which make one of their value first."""

    def price(allowance: Allowance, value: Any, given: Values) -> Any:
        weight = allowance.weigh(given, written=coerced) if given else 0
        if coerced and not isinstance(value, str):
            value = allowance.text(value)
        if isinstance(value, str):
            allowance.spend(max(weight, units(text_bytes(value), value, given)))
        elif not coerced:
            allowance.spend(units(allowance.weigh(value), "", given))
        return value

    return price


def _pretty(allowance: Allowance, value: Any, given: Values) -> Any:
    allowance.spend(_PRETTY * allowance.weigh(value, written=True))
    return value


def _lazy(allowance: Allowance, value: Any, given: Values) -> Any:
    """Filters that go through their value one by one, and look at arguments each time."""
    weight = 4 * ITEM + allowance.weigh(given)
    if isinstance(value, Sized):
        allowance.spend(weight * len(value))
        return value
    return allowance.each(value, weight) if hasattr(value, "__iter__") else value


def _gathered(allowance: Allowance, value: Any, given: Values) -> Any:
    """Filters that make lists, as many or as long as a number among the arguments says."""
    allowance.spend(4 * ITEM * sum_of_numbers(given))
    if isinstance(value, str):
        allowance.spend(text_bytes(value))
    elif hasattr(value, "__iter__"):
        value = allowance.listed(value) if not isinstance(value, Sized) else _lazy(allowance, value, ())
    return value


def _compared(allowance: Allowance, value: Any, given: Values) -> Any:
    """Filters that compare all items of their value with each other, in some order."""
    value = _gathered(allowance, value, ())
    if isinstance(value, Sized):
        allowance.spend(_SORTED * len(value))
    allowance.weigh(value, 4)
    for item in value if isinstance(value, (list, tuple)) else ():
        allowance.key(item)
    return value


_FREE = ("abs", "attr", "count", "d", "default", "first", "items", "last", "length")
_PRICES: dict[str, Filter] = {
    **dict.fromkeys(("capitalize", "lower", "upper"), _of_text(_linear(4))),
    **dict.fromkeys(("e", "escape", "forceescape"), _of_text(_linear(_ESCAPED))),
    **dict.fromkeys(("title", "wordcount"), _of_text(_linear(64))),
    **dict.fromkeys(("filesizeformat", "float", "int"), _of_text(lambda size, text, given: size * size >> 6, False)),
    **dict.fromkeys(("round", "wordwrap"), _of_text(_squared, False)),
    **dict.fromkeys(("striptags", "urlize"), _of_text(_squared)),
    **dict.fromkeys(("pprint", "urlencode", "xmlattr"), _pretty),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _lazy),
    **dict.fromkeys(("batch", "reverse", "slice"), _gathered),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _compared),
    "center": _of_text(_padded),
    "indent": _of_text(_multiplied, False),
    "safe": lambda allowance, value, given: allowance.soft_text(value),
    "truncate": _of_text(_linear(4), False),
}


def _counted(filter_: Filter, price: Filter, allowance: Allowance) -> Filter:
    """A filter whose price is taken first; ``price`` gives the value that it works on."""
    if hasattr(filter_, "jinja_pass_arg"):

        @wraps(filter_)
        def with_context(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return filter_(context, price(allowance, value, (*args, *kwargs.values())), *args, **kwargs)

        return with_context

    @wraps(filter_)
    def plain(value: Any, *args: Any, **kwargs: Any) -> Any:
        return filter_(price(allowance, value, (*args, *kwargs.values())), *args, **kwargs)

    return plain


def counted_filters(allowance: Allowance, filters: dict[str, Filter]) -> dict[str, Filter]:
    """Jinja's ``filters`` by their names, each of which takes off ``allowance`` what it costs.

    Some are written anew, because they are used much or cannot be paid for before.
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
        parts = allowance.listed(value, ITEM)
        if attribute is not None:
            parts = [*map(make_attrgetter(context.environment, attribute), parts)]
        if context.autoescape:
            parts = [allowance.soft_text(part) for part in parts]
            allowance.spend(8 * text_bytes(allowance.text(d)) * len(parts))
            return filters["join"](context, parts, d)  # type: ignore[no-any-return]
        parts = [part if type(part) is str else allowance.text(part) for part in parts]
        return allowance.joined(parts, d if type(d) is str else allowance.text(d))

    @pass_eval_context
    def replace(context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        s, old, new = (one if isinstance(one, str) else allowance.text(one) for one in (s, old, new))
        allowance.spend(6 * _replaced(text_bytes(s), s, (old, new)))  # Markup escapes
        return filters["replace"](context, s, old, new, count)  # type: ignore[no-any-return]

    @pass_eval_context
    def sum_(context: EvalContext, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        parts = allowance.listed(iterable)
        weight = allowance.weigh((parts, start))
        if isinstance(start, (list, tuple)):
            allowance.nests = True
            allowance.spend(weight * len(parts))
        return allowance.number(filters["sum"](context.environment, parts, attribute, start))

    def format_(value: Any, *args: Any, **kwargs: Any) -> str:
        text = allowance.soft_text(value)
        allowance.filled(text, (*args, *kwargs.values()))
        return filters["format"](text, *args, **kwargs)  # type: ignore[no-any-return]

    def random(*_args: Any) -> Any:
        raise SecurityError("the random filter would make other text from the same row; take it out of the template")

    return {
        **{name: filters[name] for name in _FREE},
        **{name: _counted(filters[name], price, allowance) for name, price in _PRICES.items()},
        "format": format_,
        "join": join,
        "list": allowance.listed,
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
        if allowance.nests:
            allowance.weigh(value, 6)
        text = _encode_json(value)  # the same text without building an encoder each time
        allowance.spend(len(text))
        return text
    if isinstance(indent, int):
        allowance.spend(max(0, indent))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts = []
    for part in encoder.iterencode(value):  # piece by piece: how deep it is tells how much indentation there is
        allowance.spend(ITEM + len(part))
        parts.append(part)
    return "".join(parts)


_encode_json = json.JSONEncoder(ensure_ascii=False).encode
