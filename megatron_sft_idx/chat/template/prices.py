"""What methods, formatting and filters cost a template, and Jinja's filters paid for before they work.

The price is taken before the work is done, from the sizes of the arguments: a width, the number of occurrences that
are replaced, the lengths of what is joined. A method of a built-in type that is not in these tables cannot be called.
What a filter makes text of must have a text of its own. ``tojson`` does not escape HTML, as transformers has it, and
``random`` is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sized
from functools import partial, wraps
from typing import Any

from jinja2 import pass_environment, pass_eval_context
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Undefined
from markupsafe import Markup

from megatron_sft_idx.chat.template.allowance import ITEM, POINTER, Allowance, Overspent, text_bytes

__all__ = ["LINEAR", "call_method", "counted_filters", "price_of_percent", "spec_width"]

Filter = Callable[..., Any]

_FREE = ("abs", "attr", "count", "d", "default", "first", "items", "last", "length")
_SORTED = 256  # units of an item that is sorted, looked up and compared in Python
_PRETTY = 64  # times a value's weight: pprint goes through it many times
_MAX_DIGITS = 1 << 14
_MAX_PRECISION = 1 << 10
_SPACES = " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_PIECE = 64
_SHORT = 256
_CONVERSION = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d*))?[hlL]?(.)", re.DOTALL)

LINEAR = frozenset(
    {
        "capitalize", "casefold", "count", "encode", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
        "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
        "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rstrip",
        "startswith", "strip", "swapcase", "title", "upper",
    }
)  # fmt: skip
"""Methods of strings whose results are not larger than the string: case mapping and the like."""

_BUILT_IN: dict[type, frozenset[str]] = {
    tuple: frozenset({"count", "index"}),
    list: frozenset({"count", "index", "copy"}),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    range: frozenset({"count", "index"}),
    int: frozenset({"as_integer_ratio", "bit_count", "bit_length", "conjugate", "is_integer"}),
    float: frozenset({"as_integer_ratio", "conjugate", "hex", "is_integer"}),
    bytes: frozenset({"decode", "hex"}),
    type({}.keys()): frozenset({"isdisjoint"}),
    type({}.items()): frozenset({"isdisjoint"}),
}


# Methods of strings: the price of text.method(*args), from the arguments.


def _width(text: str, width: int, fill: str = " ") -> int:
    return max(len(text), width) * (1 if text.isascii() and fill.isascii() else 4)


def _replaced(text: str, old: str, new: str, count: int = -1) -> int:
    if len(text) <= _SHORT and len(new) <= len(old):
        return 4 * len(text)
    found = text.count(old)
    if type(count) is int and count >= 0:
        found = min(found, count)
    wide = 1 if text.isascii() and new.isascii() else 4
    return len(text) + wide * (len(text) + found * max(0, len(new) - len(old)))


def _split(text: str, sep: Any = None, maxsplit: int = -1) -> int:
    if len(text) <= _SHORT:
        return _PIECE * 4
    pieces = text.count(sep) if type(sep) is str and sep else sum(map(text.count, _SPACES))
    if type(maxsplit) is int and maxsplit >= 0:
        pieces = min(pieces, maxsplit)
    return text_bytes(text) + _PIECE * (pieces + 1)


def _splitlines(text: str, keepends: Any = False) -> int:
    return text_bytes(text) + _PIECE * (1 + sum(map(text.count, _BREAKS)))


def _expandtabs(text: str, tabsize: int = 8) -> int:
    return 4 * (len(text) + text.count("\t") * max(0, tabsize))


_STRING_PRICES: dict[str, Callable[..., int]] = {
    "center": _width,
    "ljust": _width,
    "rjust": _width,
    "zfill": _width,
    "replace": _replaced,
    "split": _split,
    "rsplit": _split,
    "splitlines": _splitlines,
    "expandtabs": _expandtabs,
}


def call_method(allowance: Allowance, value: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a plain value, having paid for it.

    Raises:
        Overspent: it costs too much, or is none that templates may call.
    """
    kind = type(value)
    if kind is str:
        if name in LINEAR:
            allowance.spend(text_bytes(value))
            return getattr(value, name)(*args, **kwargs)
        if name in _STRING_PRICES:
            allowance.spend(_STRING_PRICES[name](value, *args, **kwargs))
            return getattr(value, name)(*args, **kwargs)
        if name == "join" and len(args) == 1 and not kwargs:
            return allowance.joined_by(value, allowance.listed(args[0], ITEM), strict=True)
    elif isinstance(value, Markup):
        if name in LINEAR or name in _STRING_PRICES or name in ("join", "unescape", "striptags"):
            return _call_markup(allowance, value, name, args, kwargs)
    elif any(isinstance(value, known) and name in names for known, names in _BUILT_IN.items()):
        if name == "get":
            allowance.key(args[0] if args else None)
        elif name in ("count", "index", "copy", "isdisjoint"):
            allowance.weigh((value, args))
            allowance.spend(ITEM * len(value))
        elif isinstance(value, bytes):
            allowance.spend(4 * len(value))
        return getattr(value, name)(*args, **kwargs)
    raise Overspent(f"a chat template cannot call {kind.__name__}.{name}")


def _call_markup(allowance: Allowance, value: Markup, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Methods of Markup escape their arguments, which makes each six times as long at most."""
    for one in (*args, *kwargs.values()):
        allowance.written(one)
    text = str(value)
    if name in ("unescape", "striptags"):
        allowance.spend((len(text) + 1) * (8 + text.count("<!--")))
    elif name == "join":
        parts = [allowance.soft_text(part) for part in allowance.listed(args[0])]
        allowance.spend((text_bytes(text) + _PIECE) * len(parts) + 8 * sum(map(len, parts)))
        return value.join(parts)
    elif name in _STRING_PRICES:
        allowance.spend(6 * _STRING_PRICES[name](text, *args, **kwargs))
    else:
        allowance.spend(8 * text_bytes(text))
    return getattr(value, name)(*args, **kwargs)


# Formatting


def price_of_percent(allowance: Allowance, template: str, values: Any) -> None:
    """Pay for ``template % values``; refuse values without a text of their own."""
    allowance.written(values)
    parts = [*values] if isinstance(values, tuple) else [*values.values()] if isinstance(values, dict) else [values]
    stars = [part for part in parts if isinstance(part, int)]
    conversions = 0
    units = text_bytes(template)
    for match in _CONVERSION.finditer(template):
        conversions += 1
        for number in match.group(1, 2):
            if number == "*":
                units += 4 * max(map(abs, stars), default=0)
            elif number:
                units += 4 * _whole(number)
    allowance.spend(units)
    if conversions:
        before = allowance.left
        allowance.weigh(parts, per_character=4)
        # Any conversion may name any of the values.
        named = conversions if isinstance(values, dict) else 1
        allowance.spend(max(0, before - allowance.left) * (named - 1))


def _whole(digits: str) -> int:
    return int(digits) if len(digits) < 19 else 1 << 62


def spec_width(spec: str) -> int:
    """The characters that a format specification can ask for by itself."""
    return sum(4 * _whole(digits) for digits in re.findall(r"\d+", spec))


# Filters


def counted_filters(allowance: Allowance, filters: dict[str, Filter]) -> dict[str, Filter]:
    """Jinja's ``filters`` by their names, each of which takes off ``allowance`` what it costs."""
    made = {name: filters[name] for name in _FREE}
    for name, price in _PRICES.items():
        made[name] = _counted(filters[name], price, allowance)
    made.update(_own(allowance, filters))
    return made


def _counted(filter_: Filter, price: Filter, allowance: Allowance) -> Filter:
    """A filter whose price is taken first; ``price`` gives the value that it works on."""
    if hasattr(filter_, "jinja_pass_arg"):

        @wraps(filter_)
        def with_context(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return filter_(context, price(allowance, value, *args, **kwargs), *args, **kwargs)

        return with_context

    @wraps(filter_)
    def plain(value: Any, *args: Any, **kwargs: Any) -> Any:
        return filter_(price(allowance, value, *args, **kwargs), *args, **kwargs)

    return plain


def _own(allowance: Allowance, filters: dict[str, Filter]) -> dict[str, Filter]:
    """The filters that are written anew, because they are used much or cannot be paid for before."""

    def trim(value: Any, chars: str | None = None) -> str:
        if type(value) is not str:
            value = allowance.soft_text(value)
        units = len(value)
        allowance.left -= units if units <= 64 or value.isascii() else 4 * units
        if allowance.left < 0:
            allowance.overspent()
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
        return allowance.joined_by(d if type(d) is str else allowance.text(d), parts)

    @pass_environment
    def sum_(environment: Environment, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        parts = allowance.listed(iterable)
        if attribute is not None:
            parts = [*map(make_attrgetter(environment, attribute), parts)]
        if not isinstance(start, (list, tuple)):
            return allowance.number(sum(parts, start))
        for part in parts:
            allowance.spend(POINTER * len(start))
            start = allowance.made(start + part)
        return start

    def format_(value: Any, *args: Any, **kwargs: Any) -> str:
        if args and kwargs:
            return filters["format"](value, *args, **kwargs)  # type: ignore[no-any-return]
        text = allowance.soft_text(value)
        price_of_percent(allowance, text, kwargs or args)
        return text % (kwargs or args)

    return {
        "format": format_,
        "join": join,
        "list": allowance.listed,
        "random": _refuse_random,
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
    if allowance.nests:
        allowance.weigh(value, per_character=6)
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        text = _encode_json(value)  # the same text without building an encoder each time
        allowance.spend(len(text))
        return text
    step = len(indent) if isinstance(indent, str) else indent if isinstance(indent, int) else 0
    step += sum(map(len, separators)) if separators else 0
    if step > 1:
        allowance.spend(step * allowance.indents(value))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    allowance.spend(len(text))
    return text


_encode_json = json.JSONEncoder(ensure_ascii=False).encode


def _refuse_random(*_args: Any) -> Any:
    raise SecurityError("the random filter would make other text from the same row; take it out of the template")


# Prices. Each has the arguments of its filter, and gives the value that the filter is to work on.


def _linear(factor: int) -> Filter:
    """The price of a filter that makes ``factor`` times its text at most, whatever its arguments."""

    def price(allowance: Allowance, value: Any, *args: Any, **kwargs: Any) -> Any:
        allowance.weigh((args, kwargs))
        if not isinstance(value, str):
            value = allowance.text(value)
        allowance.spend(factor * text_bytes(value))
        return value

    return price


def _center(allowance: Allowance, value: Any, width: int = 80) -> Any:
    value = value if isinstance(value, str) else allowance.text(value)
    allowance.spend(_width(value, width))
    return value


def _indent(allowance: Allowance, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    if isinstance(s, str):
        step = text_bytes(width) if isinstance(width, str) else max(0, width)
        lines = _splitlines(s)
        wide = 1 if s.isascii() else 4
        allowance.spend(3 * lines + wide * step * (2 + lines // 64))
    return s


def _replace(allowance: Allowance, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
    s, old, new = (one if isinstance(one, str) else allowance.text(one) for one in (s, old, new))
    price = _replaced(s, old, new, -1 if count is None else count)
    allowance.spend(6 * price if Markup in (type(s), type(old), type(new)) else price)
    return s


def _truncate(allowance: Allowance, s: Any, *args: Any, **kwargs: Any) -> Any:
    allowance.weigh((s, args, kwargs))
    return s


def _wordwrap(
    allowance: Allowance,
    s: Any,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> Any:
    if isinstance(s, str):
        words = _split(s)
        longest = max(map(len, s.split()), default=0)
        lines = longest // max(1, width) if break_long_words else 0
        allowance.spend(64 * text_bytes(s) + words + lines * longest + len(s) * text_bytes(wrapstring or ""))
    return s


def _striptags(allowance: Allowance, value: Any) -> Any:
    value = value if isinstance(value, str) else allowance.text(value)
    allowance.spend((len(value) + 1) * (16 + value.count("<!--") + value.count("<")))
    return value


def _links(allowance: Allowance, value: Any, *args: Any, **kwargs: Any) -> Any:
    """A filter that may write its arguments beside every word."""
    size = _size(allowance, (args, kwargs))
    value = value if isinstance(value, str) else allowance.text(value)
    allowance.spend(text_bytes(value) * (64 + size))
    return value


def _pairs(allowance: Allowance, value: Any, *args: Any, **kwargs: Any) -> Any:
    allowance.written(value)
    allowance.weigh(value, per_character=32)
    return value


def _pretty(allowance: Allowance, value: Any) -> Any:
    allowance.written(value)
    allowance.spend(_PRETTY * _size(allowance, value))
    return value


def _size(allowance: Allowance, value: Any) -> int:
    """What a value weighs, which is spent."""
    before = allowance.left
    allowance.weigh(value)
    return max(0, before - allowance.left)


def _lazy(allowance: Allowance, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Filters that go through their value one by one, and look at arguments each time."""
    weight = 4 * ITEM + _size(allowance, (args, kwargs))
    if isinstance(value, Sized):
        allowance.spend(weight * len(value))
        return value
    return allowance.each(value, weight) if hasattr(value, "__iter__") else value


def _compared(allowance: Allowance, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Filters that compare all items of their value with each other, in some order."""
    if not isinstance(value, Sized):
        value = allowance.listed(value) if hasattr(value, "__iter__") else value
    if isinstance(value, Sized):
        allowance.spend(_SORTED * len(value))
    allowance.weigh(value, per_character=4)
    return value


def _unique(allowance: Allowance, value: Any, *args: Any, **kwargs: Any) -> Any:
    value = _compared(allowance, value)
    for item in value if isinstance(value, (list, tuple)) else ():
        allowance.key(item)
    return value


def _batch(allowance: Allowance, value: Any, linecount: int, fill_with: Any = None) -> Any:
    allowance.spend(POINTER * max(0, int(linecount)) if fill_with is not None else 0)
    return _lazy(allowance, value)


def _slice(allowance: Allowance, value: Any, slices: int, fill_with: Any = None) -> Any:
    allowance.spend(4 * ITEM * max(0, int(slices)))
    return allowance.listed(value)


def _reverse(allowance: Allowance, value: Any) -> Any:
    if isinstance(value, str):
        allowance.spend(text_bytes(value))
    elif isinstance(value, Sized):
        allowance.spend(POINTER * len(value))
    elif hasattr(value, "__iter__"):
        return allowance.listed(value)
    return value


def _number(allowance: Allowance, value: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise Overspent(f"a number of {len(value)} digits is too large for a chat template")
    return value


def _round(allowance: Allowance, value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > _MAX_PRECISION:
        raise Overspent(f"rounding to {precision} places is too much for a chat template")
    return value


_LINEAR = {
    "capitalize": 4,
    "e": 8,
    "escape": 8,
    "forceescape": 8,
    "lower": 4,
    "title": 64,
    "upper": 4,
    "wordcount": 32,
}

_PRICES: dict[str, Filter] = {
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort"), _compared),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _lazy),
    **dict.fromkeys(("filesizeformat", "float", "int"), _number),
    **dict.fromkeys(("urlencode", "xmlattr"), _pairs),
    **{name: _linear(factor) for name, factor in _LINEAR.items()},
    "batch": _batch,
    "center": _center,
    "indent": _indent,
    "pprint": _pretty,
    "replace": _replace,
    "reverse": _reverse,
    "round": _round,
    "safe": Allowance.soft_text,
    "slice": _slice,
    "striptags": _striptags,
    "truncate": _truncate,
    "unique": _unique,
    "urlize": _links,
    "wordwrap": _wordwrap,
}
