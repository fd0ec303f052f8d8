"""Jinja's filters and tests for chat templates, with a cost for each call.

A filter pays like a method (``methods``): for the bytes that go in and come out, and for a bound on its work if that
can be larger. The input differs: one text, the items of a list, or everything inside a value. A value that a filter
converts to text must have a defined text. Filters not listed here are rejected by name. ``tojson`` does not escape
HTML, as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import partial, wraps
from typing import Any

from jinja2 import pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Undefined
from markupsafe import Markup

from megatron_sft_idx.chat.template.allowance import ITEM, Allowance, Overspent, text_bytes
from megatron_sft_idx.chat.template.methods import (
    ESCAPED,
    WORD,
    Arguments,
    Bound,
    multiplied,
    nothing,
    padded,
    pay_for_text,
    replaced,
    searched,
    squared,
)
from megatron_sft_idx.chat.template.operators import Operators, sum_of_numbers

Filter = Callable[..., Any]
Payment = Callable[[Operators, Any, Arguments], Any]
"""Pays for a filter, given its value and further arguments; returns the value that the filter is to work on."""

_SORTED = 256  # units for an item that is sorted: looked up and compared in Python
_LOOKED_UP = 64  # units of an attribute that is looked up
_MAX_PRECISION = 4096


def _times(factor: int) -> Bound:
    return lambda text, arguments: factor * text_bytes(text)


# Payments, by kind of input


def _attributes(arguments: Arguments) -> int:
    """Return the units for looking up the attributes in the arguments of each item: "a.b,c" has three."""
    return _LOOKED_UP * sum(one.count(".") + one.count(",") for one in arguments if isinstance(one, str))


def _of_text(bound: Bound, coerced: bool = True) -> Payment:
    """For filters of a text; ``coerced`` if they first convert other values to text."""

    def payment(operators: Operators, value: Any, arguments: Arguments) -> Any:
        if coerced and not isinstance(value, str):
            value = operators.allowance.text(value)
        if isinstance(value, str):
            pay_for_text(operators.allowance, value, bound, arguments, written=coerced)
        elif bound is not nothing:  # the filter would fail, but might first process its arguments
            raise TypeError(f"expected text, found a value of type {type(value).__name__}")
        return value

    return payment


def _lazy(operators: Operators, value: Any, arguments: Arguments) -> Any:
    """For filters that are iterators: they use all arguments for each item of their value."""
    weight = 4 * ITEM + operators.allowance.weigh(arguments) + _attributes(arguments)
    if isinstance(value, Sized):
        operators.allowance.spend(weight * len(value))
        return value
    return operators.allowance.paid_items(value, weight) if isinstance(value, Iterable) else value


def _gathered(operators: Operators, value: Any, arguments: Arguments) -> Any:
    """For filters that make lists; a number among the arguments may be the number or the length of the lists."""
    operators.allowance.spend(4 * ITEM * sum_of_numbers(arguments))
    if isinstance(value, Iterable) and not isinstance(value, Sized):
        return operators.allowance.paid_list(value)
    return _lazy(operators, value, ())


def _compared(operators: Operators, value: Any, arguments: Arguments) -> Any:
    """For filters that sort, or look items up in a dict."""
    value = _gathered(operators, value, ())
    if isinstance(value, Sized):
        operators.allowance.spend(
            (_SORTED + operators.allowance.weigh(arguments) + _attributes(arguments)) * len(value)
        )
    operators.allowance.weigh(value, 4)
    for item in value if isinstance(value, (list, tuple, range)) else ():
        operators.key(item)
    return value


def _summed(operators: Operators, value: Any, arguments: Arguments) -> Any:
    value = _compared(operators, value, arguments)
    if any(isinstance(one, (list, tuple)) for one in arguments):  # lists that are added copy all before them each time
        operators.allowance.nests = True
        operators.allowance.spend(operators.allowance.weigh((value, arguments)) * len(value))
    return value


def _written(operators: Operators, value: Any, arguments: Arguments) -> Any:
    """For filters that write their whole value, and may traverse it many times."""
    operators.allowance.spend(WORD * operators.allowance.weigh(value, written=True))
    return value


def _rounded(operators: Operators, value: Any, arguments: Arguments) -> Any:
    if sum_of_numbers(arguments) > _MAX_PRECISION:
        raise Overspent(f"it rounds to more than {_MAX_PRECISION:,} places")
    return value


def _formatted(operators: Operators, value: Any, arguments: Arguments) -> Any:
    text = operators.allowance.soft_text(value)
    operators.pay_for_percent_format(text, arguments)
    return text


_FREE = ("abs", "attr", "count", "d", "default", "first", "items", "last", "length")  # these hardly read their value
_PAYMENTS: dict[str, Payment] = {
    **dict.fromkeys(("capitalize", "lower", "upper"), _of_text(nothing)),
    **dict.fromkeys(("e", "escape", "forceescape"), _of_text(_times(ESCAPED))),
    **dict.fromkeys(("title", "wordcount"), _of_text(_times(WORD))),
    **dict.fromkeys(("striptags", "urlize"), _of_text(squared)),
    **dict.fromkeys(("filesizeformat", "float", "int", "truncate"), _of_text(nothing, coerced=False)),
    **dict.fromkeys(("safe", "string"), lambda operators, value, _: operators.allowance.soft_text(value)),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _lazy),
    **dict.fromkeys(("batch", "list", "reverse", "slice"), _gathered),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _compared),
    **dict.fromkeys(("pprint", "urlencode", "xmlattr"), _written),
    "center": _of_text(padded),
    "format": _formatted,
    "indent": _of_text(multiplied, coerced=False),
    "round": _rounded,
    "sum": _summed,
    "wordwrap": _of_text(squared, coerced=False),
}


def filters_of(operators: Operators, filters: Mapping[str, Filter]) -> dict[str, Filter]:
    """Return filters for templates, by name: Jinja's own, ``filters``, each with its payment.

    The functions below replace filters whose arguments must be distinguished, and ``trim``, the most frequent one.
    """
    allowance = operators.allowance

    @pass_eval_context
    def join(context: EvalContext, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        items = allowance.paid_list(value, ITEM)
        if attribute is not None:
            allowance.spend((allowance.weigh(attribute) + _attributes((attribute,))) * len(items))
            items = [*map(make_attrgetter(context.environment, attribute), items)]
        if context.autoescape:
            items = [allowance.soft_text(item) for item in items]
            allowance.spend(ESCAPED * text_bytes(allowance.text(d)) * len(items))
            return filters["join"](context, items, d)  # type: ignore[no-any-return]
        items = [item if type(item) is str else allowance.text(item) for item in items]
        return allowance.joined(items, allowance.text(d))

    @pass_eval_context
    def replace(context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        s, old, new = (one if isinstance(one, str) else allowance.text(one) for one in (s, old, new))
        pay_for_text(allowance, Markup(s) if context.autoescape else str(s), replaced, (old, new))
        return allowance.made(filters["replace"](context, s, old, new, count))  # type: ignore[no-any-return]

    def trim(value: Any, chars: str | None = None) -> str:
        if type(value) is not str or chars is not None:
            value = _of_text(searched)(operators, value, (chars,))
            return value.strip(chars)  # type: ignore[no-any-return]
        return allowance.made(value).strip()  # type: ignore[no-any-return]

    return {
        **{name: refused(f"the {name} filter") for name in filters},
        **{name: filters[name] for name in _FREE},
        **{name: _paying(filters[name], payment, operators) for name, payment in _PAYMENTS.items()},
        "join": join,
        "random": refused("the random filter", "it would give different text for the same row"),
        "replace": replace,
        "trim": trim,
        "tojson": partial(_to_json, allowance),
    }


def _paying(filter_: Filter, payment: Payment, operators: Operators) -> Filter:
    """Wrap a filter so that it pays before it works, and for its result."""
    made = operators.allowance.made
    at = 1 if hasattr(filter_, "jinja_pass_arg") else 0  # position of the value among the arguments

    @wraps(filter_)
    def paying(*args: Any, **kwargs: Any) -> Any:
        value = payment(operators, args[at], (*args[at + 1 :], *kwargs.values()))
        return made(filter_(*args[:at], value, *args[at + 1 :], **kwargs))

    return paying


def refused(what: str, reason: str = "chat templates are not allowed to use it") -> Callable[..., Any]:
    """Replacement for a filter or function that templates must not call."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise SecurityError(f"it calls {what}; {reason}, so take it out of the template")

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
        if allowance.nests:  # otherwise the text is hardly longer than the conversation, and can be paid for afterwards
            allowance.weigh(value, 6)
        return allowance.made(_encode_json(value))  # type: ignore[no-any-return] # as below, with one encoder for all
    if isinstance(indent, int):
        allowance.spend(max(0, indent))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    chunks = []
    for chunk in encoder.iterencode(value):  # indentation grows with depth, so there is no bound in advance
        allowance.spend(ITEM + len(chunk))
        chunks.append(chunk)
    return "".join(chunks)


_encode_json = json.JSONEncoder(ensure_ascii=False).encode


# Tests

_COMPARING_TESTS = (
    "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le",
)  # fmt: skip


def tests_of(operators: Operators, tests: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return Jinja's own ``tests`` for templates, by name. Tests that traverse a value pay for it."""

    def paying(test: Callable[..., Any], pay: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda *values: test(*map(pay, values))

    return {
        **tests,
        **{name: paying(tests[name], operators.compared) for name in _COMPARING_TESTS},
        **{name: paying(tests[name], operators.allowance.soft_text) for name in ("lower", "upper")},
        "divisibleby": lambda value, num: operators.call_binop(None, "%", value, num) == 0,  # type: ignore[arg-type]
        "in": operators.contains,
    }
