"""What methods and formatting cost a template.

The price is taken before the work is done, from the sizes of the arguments: a width, the number of occurrences that
are replaced, the lengths of what is joined. A method of a built-in type that is not in these tables cannot be called.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from megatron_sft_idx.chat.template.allowance import ITEM, Allowance, Overspent, text_bytes

__all__ = ["LINEAR", "call_method", "price_of_percent", "price_of_string_method", "spec_width"]

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


def _replace(text: str, old: str, new: str, count: int = -1) -> int:
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
    "replace": _replace,
    "split": _split,
    "rsplit": _split,
    "splitlines": _splitlines,
    "expandtabs": _expandtabs,
}


def price_of_string_method(name: str, text: str, *args: Any, **kwargs: Any) -> int:
    """Units of ``text.name(*args)``, for a method whose result depends on its arguments."""
    return _STRING_PRICES[name](text, *args, **kwargs)


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
            allowance.spend(price_of_string_method(name, value, *args, **kwargs))
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
                units += 4 * _number(number)
    allowance.spend(units)
    if conversions:
        before = allowance.left
        allowance.weigh(parts, per_character=4)
        # Any conversion may name any of the values.
        named = conversions if isinstance(values, dict) else 1
        allowance.spend(max(0, before - allowance.left) * (named - 1))


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 19 else 1 << 62


def spec_width(spec: str) -> int:
    """The characters that a format specification can ask for by itself."""
    return sum(4 * _number(digits) for digits in re.findall(r"\d+", spec))
