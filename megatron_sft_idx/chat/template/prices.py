"""What methods, formatting and filters cost a template, and Jinja's filters paid for before they work.

The price is taken before the work is done, from the sizes of the arguments: a width, the number of occurrences that
are replaced, the lengths of what is joined. A method of a built-in type that is not in these tables cannot be called.
What a filter makes text of must have a text of its own. ``tojson`` does not escape HTML, as transformers has it, and
``random`` is refused.

A price is right when it bounds both memory and time: at least one unit for each byte that is made, and one for every
few nanoseconds of work on a machine of today, so that a whole allowance is gone within seconds. A higher price than
that refuses ordinary rows sooner; a lower one lets a template hold more, or go on for longer, than its allowance says.
"""

from __future__ import annotations

import codecs
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

Filter = Callable[..., Any]

_FREE = ("abs", "attr", "count", "d", "default", "first", "items", "last", "length")

# Units for each byte of the text that is worked on, as `text_bytes` counts them: four for a character that may be wide.
_READ = 1  # it is looked through, and copied at most
_CASE = 4  # a character may become three, as in '\u0390'.upper(), each as wide as the widest of the text
_CODED = 4  # UTF-32 makes four bytes of one, and error handlers ten of a character
_ESCAPED = 8  # a quotation mark becomes five characters, and the text is gone through for each of five kinds
_COUNTED_WORDS = 32  # a match object for each word, which may be two characters with the space behind it
_TITLED_WORDS = 64  # Jinja's title runs Python code for each word, 50 times as long as str.title

# Units for each of the things that are worked on.
_PIECE = 96  # bytes of a short text beside its characters (80 if they are wide) and of its place in a list
_NO_CUT = 3  # pieces' worth of a text that is not cut at all: the one piece, and a list with its first twelve places
_SORTED = 256  # an item that is sorted, looked up and compared in Python
_NAMED = 128  # the most bytes that `encode` may write for a character: its Unicode name, and what is around it

_PRETTY = 64  # times a value's weight: pprint goes through it many times
_FEW_SPACES = 256  # characters: counting thirty kinds of spaces in so short a text takes longer than cutting it
_SLOW_CODECS = ("idna", "punycode")  # written in Python, by the square of the length
_MAX_DIGITS = 1 << 14
_MAX_PRECISION = 1 << 10
_SPACES = " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_CONVERSION = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d*))?[hlL]?(.)", re.DOTALL)

METHOD_FACTORS = {
    **dict.fromkeys(
        (
            "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
            "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lstrip",
            "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rstrip", "startswith",
            "strip",
        ),
        _READ,
    ),
    **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), _CASE),
}  # fmt: skip
"""Methods of strings whose price is a multiple of the string's bytes, with that factor.

It holds while their arguments are short, or not there; others are paid for as well (``call_method``).
"""

SHORT_ARGUMENT = 64
"""Characters: arguments of these methods that are shorter are not paid for."""

# These look at their argument anew for each character of the text: from the right no faster search is made.
_SEARCHED_ANEW = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})

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
    longer = len(new) - len(old)
    found = text.count(old) if longer > 0 else 0
    if type(count) is int and count >= 0:
        found = min(found, count)
    wide = 1 if text.isascii() and new.isascii() else 4
    return len(text) + wide * (len(text) + found * max(0, longer))


def _split(text: str, sep: Any = None, maxsplit: int = -1) -> int:
    if type(sep) is str and sep:
        cuts = text.count(sep)
    elif len(text) <= _FEW_SPACES:
        cuts = len(text) // 2  # there are no more: between two spaces is at least one character
    else:
        cuts = sum(map(text.count, _SPACES))
    if type(maxsplit) is int and maxsplit >= 0:
        cuts = min(cuts, maxsplit)
    return text_bytes(text) + _PIECE * (cuts + _NO_CUT)


def _splitlines(text: str, keepends: Any = False) -> int:
    return text_bytes(text) + _PIECE * (sum(map(text.count, _BREAKS)) + _NO_CUT)


def _encoded(text: str, encoding: str = "utf-8", errors: str = "strict") -> int:
    written = _NAMED * len(text) if errors == "namereplace" else _CODED * text_bytes(text)
    return written + _slow_codec(text, encoding)


def _slow_codec(text: str | bytes, encoding: str = "utf-8", errors: str = "strict") -> int:
    """Further units of encoding or decoding by a codec that takes the square of the length."""
    return len(text) ** 2 if codecs.lookup(encoding).name in _SLOW_CODECS else 0


_STRING_PRICES: dict[str, Callable[..., int]] = {
    "center": _width,
    "ljust": _width,
    "rjust": _width,
    "zfill": _width,
    "replace": _replaced,
    "split": _split,
    "rsplit": _split,
    "splitlines": _splitlines,
    "expandtabs": lambda text, tabsize=8: 4 * (len(text) + text.count("\t") * max(0, tabsize)),
    "encode": _encoded,
}


def _method_price(allowance: Allowance, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Units of ``text.name(*args, **kwargs)``; what comparing with a tuple's strings takes is spent here."""
    factor = METHOD_FACTORS.get(name)
    units = _STRING_PRICES[name](text, *args, **kwargs) if factor is None else factor * text_bytes(text)
    for one in (*args, *kwargs.values()):
        if isinstance(one, str):
            rounds = len(one) // SHORT_ARGUMENT
            units += rounds * (text_bytes(text) if name in _SEARCHED_ANEW else SHORT_ARGUMENT)
        elif isinstance(one, tuple):  # of startswith and endswith
            allowance.weigh(one)
    return units


def call_method(allowance: Allowance, value: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a plain value, having paid for it.

    Raises:
        Overspent: it costs too much, or is none that templates may call.
    """
    kind = type(value)
    if kind is str:
        if name in METHOD_FACTORS or name in _STRING_PRICES:
            allowance.spend(_method_price(allowance, value, name, args, kwargs))
            return getattr(value, name)(*args, **kwargs)
        if name == "join" and len(args) == 1 and not kwargs:
            return allowance.joined_by(value, allowance.listed(args[0], ITEM), strict=True)
    elif isinstance(value, Markup):
        if name in METHOD_FACTORS or name in _STRING_PRICES or name in ("join", "unescape", "striptags"):
            return _call_markup(allowance, value, name, args, kwargs)
    elif any(isinstance(value, known) and name in names for known, names in _BUILT_IN.items()):
        if name == "get":
            allowance.key(args[0] if args else None)
        elif name in ("count", "index", "copy", "isdisjoint"):
            allowance.weigh((value, args))
            allowance.spend(ITEM * len(value))
        elif isinstance(value, bytes):
            allowance.spend(_CODED * len(value))
            if name == "decode":
                allowance.spend(_slow_codec(value, *args, **kwargs))
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
    else:
        allowance.spend(_ESCAPED * _method_price(allowance, text, name, args, kwargs))
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
        weight = allowance.weigh(parts, per_character=4)
        if isinstance(values, dict):  # any conversion may name any of the values
            allowance.spend(weight * (conversions - 1))


def _whole(digits: str) -> int:
    return int(digits) if len(digits) < 19 else 1 << 62


def spec_width(spec: str) -> int:
    """The characters that a format specification can ask for by itself."""
    return sum(4 * _whole(digits) for digits in re.findall(r"\d+", spec))


# Filters


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


def counted_filters(allowance: Allowance, filters: dict[str, Filter]) -> dict[str, Filter]:
    """Jinja's ``filters`` by their names, each of which takes off ``allowance`` what it costs.

    Some are written anew, because they are used much or cannot be paid for before.
    """

    def trim(value: Any, chars: str | None = None) -> str:
        if type(value) is not str:
            value = allowance.soft_text(value)
        if chars is not None:
            allowance.spend(_method_price(allowance, value, "strip", (chars,), {}))
            return value.strip(chars)  # type: ignore[no-any-return]
        units = len(value)
        allowance.left -= units if units <= 64 or value.isascii() else 4 * units
        if allowance.left < 0:
            allowance.overspent()
        return value.strip()  # type: ignore[no-any-return]

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

    def random(*_args: Any) -> Any:
        raise SecurityError("the random filter would make other text from the same row; take it out of the template")

    return {
        **{name: filters[name] for name in _FREE},
        **{name: _counted(filters[name], price, allowance) for name, price in _PRICES.items()},
        "format": format_,
        "join": join,
        "list": allowance.listed,
        "random": random,
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


# Prices. Each has the arguments of its filter, and gives the value that the filter is to work on.


def _text_of(allowance: Allowance, value: Any) -> str:
    return value if isinstance(value, str) else allowance.text(value)


def _of_text(units: Callable[..., int]) -> Filter:
    """The price of a filter that makes text of its value first, by that text and the filter's arguments."""

    def price(allowance: Allowance, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = _text_of(allowance, value)
        allowance.spend(units(value, *args, **kwargs))
        return value

    return price


def _beside_arguments(units: Callable[[str, int], int]) -> Filter:
    """As ``_of_text``, by the text and the weight of the arguments, which is spent as well."""

    def price(allowance: Allowance, value: Any, *args: Any, **kwargs: Any) -> Any:
        weight = allowance.weigh((args, kwargs))
        return _of_text(lambda text: units(text, weight))(allowance, value)

    return price


def _per_byte(factor: int) -> Filter:
    return _beside_arguments(lambda text, _: factor * text_bytes(text))


def _center(text: str, width: int = 80) -> int:
    return _width(text, width)


def _striptags(text: str) -> int:
    return (len(text) + 1) * (16 + text.count("<!--") + text.count("<"))


def _indent(allowance: Allowance, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    if isinstance(s, str):
        step = text_bytes(width) if isinstance(width, str) else max(0, width)
        wide = 1 if s.isascii() else 4
        allowance.spend(3 * _splitlines(s) + wide * step * (sum(map(s.count, _BREAKS)) + 2))
    return s


def _replace(allowance: Allowance, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
    s, old, new = (_text_of(allowance, one) for one in (s, old, new))
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


def _pairs(allowance: Allowance, value: Any, *args: Any, **kwargs: Any) -> Any:
    allowance.written(value)
    allowance.weigh(value, per_character=32)
    return value


def _pretty(allowance: Allowance, value: Any) -> Any:
    allowance.written(value)
    allowance.spend(_PRETTY * allowance.weigh(value))
    return value


def _lazy(allowance: Allowance, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Filters that go through their value one by one, and look at arguments each time."""
    weight = 4 * ITEM + allowance.weigh((args, kwargs))
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


_FILTER_FACTORS = {
    **{name: METHOD_FACTORS[name] for name in ("capitalize", "lower", "upper")},  # the methods, and nothing more
    **dict.fromkeys(("e", "escape", "forceescape"), _ESCAPED),
    "title": _TITLED_WORDS,
    "wordcount": _COUNTED_WORDS,
}

_PRICES: dict[str, Filter] = {
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort"), _compared),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _lazy),
    **dict.fromkeys(("filesizeformat", "float", "int"), _number),
    **dict.fromkeys(("urlencode", "xmlattr"), _pairs),
    **{name: _per_byte(factor) for name, factor in _FILTER_FACTORS.items()},
    "batch": _batch,
    "center": _of_text(_center),
    "indent": _indent,
    "pprint": _pretty,
    "replace": _replace,
    "reverse": _reverse,
    "round": _round,
    "safe": Allowance.soft_text,
    "slice": _slice,
    "striptags": _of_text(_striptags),
    "truncate": _truncate,
    "unique": _unique,
    "urlize": _beside_arguments(lambda text, weight: text_bytes(text) * (64 + weight)),  # beside every word
    "wordwrap": _wordwrap,
}
