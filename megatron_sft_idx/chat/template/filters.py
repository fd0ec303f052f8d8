"""The filters of chat templates: Jinja's, each paid for before it works.

What a filter makes text of must have a text of its own. ``tojson`` does not escape HTML, as transformers has it, and
``random`` is refused.
"""

from __future__ import annotations

import json
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
from megatron_sft_idx.chat.template.prices import price_of_percent, price_of_string_method

__all__ = ["counted_filters"]

Filter = Callable[..., Any]

_FREE = ("abs", "attr", "count", "d", "default", "first", "items", "last", "length")
_SORTED = 256  # units of an item that is sorted, looked up and compared in Python
_PRETTY = 64  # times a value's weight: pprint goes through it many times
_MAX_DIGITS = 1 << 14
_MAX_PRECISION = 1 << 10


def counted_filters(allowance: Allowance, filters: dict[str, Filter]) -> dict[str, Filter]:
    """Jinja's ``filters`` by their names, each of which takes off ``allowance`` what it costs."""
    made = {name: filters[name] for name in _FREE}
    for name, price in _PRICES.items():
        made[name] = _counted(filters[name], price, allowance)
    for name, factor in _LINEAR.items():
        made[name] = _counted(filters[name], _linear(factor), allowance)
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
    allowance.spend(price_of_string_method("center", value, width))
    return value


def _indent(allowance: Allowance, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    if isinstance(s, str):
        step = text_bytes(width) if isinstance(width, str) else max(0, width)
        lines = price_of_string_method("splitlines", s)
        wide = 1 if s.isascii() else 4
        allowance.spend(3 * lines + wide * step * (2 + lines // 64))
    return s


def _replace(allowance: Allowance, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
    s, old, new = (one if isinstance(one, str) else allowance.text(one) for one in (s, old, new))
    price = price_of_string_method("replace", s, old, new, -1 if count is None else count)
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
        words = price_of_string_method("split", s)
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


def _safe(allowance: Allowance, value: Any) -> Any:
    return allowance.soft_text(value)


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
    "batch": _batch,
    "center": _center,
    "dictsort": _compared,
    "filesizeformat": _number,
    "float": _number,
    "groupby": _compared,
    "indent": _indent,
    "int": _number,
    "map": _lazy,
    "max": _compared,
    "min": _compared,
    "pprint": _pretty,
    "reject": _lazy,
    "rejectattr": _lazy,
    "replace": _replace,
    "reverse": _reverse,
    "round": _round,
    "safe": _safe,
    "select": _lazy,
    "selectattr": _lazy,
    "slice": _slice,
    "sort": _compared,
    "striptags": _striptags,
    "truncate": _truncate,
    "unique": _unique,
    "urlencode": _pairs,
    "urlize": _links,
    "wordwrap": _wordwrap,
    "xmlattr": _pairs,
}
