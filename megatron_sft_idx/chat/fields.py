"""Single fields of rows: their types, and the first of several names that has a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from megatron_sft_idx.chat.field_names import PAIRS
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.chat.values import Undecoded, clause_of, parse_json

_Kind = TypeVar("_Kind", str, list[Any], dict[str, Any])

_JSON_NAMES: dict[type, str] = {
    **dict.fromkeys((int, float), "a number"),
    **{bool: "a boolean", str: "a string", list: "a list", dict: "an object", type(None): "null"},
}


def kind_of(value: Any) -> str:
    """Return the type of a value in JSON terms, for error messages. RowError: it is undecoded."""
    if isinstance(value, Undecoded):
        raise value.error()
    return _JSON_NAMES.get(type(value), type(value).__name__)


def is_filled(value: Any) -> bool:
    """Return whether a value is neither null nor an empty string, list or object."""
    return value is not None and not (isinstance(value, (str, Sequence, Mapping)) and len(value) == 0)


def first_filled(data: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the first of these keys whose value is neither null nor empty."""
    return next((name for name in names if is_filled(data.get(name))), None)


def first_given(data: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the first of these keys whose value is not null."""
    for name in names:  # a generator is twice as slow, and this runs several times per row
        if data.get(name) is not None:
            return name
    return None


def without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys with null values: a table has a null for every key that only other rows have."""
    return {key: value for key, value in data.items() if value is not None}


def typed(value: Any, kind: type[_Kind], what: str, expected: str = "") -> _Kind:
    """Return the value if it has this type (a string, a list or an object), else raise RowError."""
    if isinstance(value, Undecoded):
        raise value.error(expected or _JSON_NAMES[kind])
    if not isinstance(value, kind):
        raise RowError(f"{what} is {kind_of(value)}, expected {expected or _JSON_NAMES[kind]}")
    return value


def json_of(value: Any, what: str) -> Any:
    """Return a value unchanged, or parsed if it is a string of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode())
    except ValueError as error:
        raise RowError(f"{what} is a string that is {clause_of(error)}") from None


def text_under(data: dict[str, Any], names: Iterable[str]) -> str:
    """Return the text under the first of these keys with a value that is not null, or ""."""
    key = first_given(data, names)
    return "" if key is None else typed(data[key], str, key)


def pair_keys(turn: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the keys of question and answer in a turn that contains both; None for any other turn."""
    if turn.get("role") is not None or turn.get("from") is not None:
        return None
    for asks, answers in PAIRS:
        ask, answer = first_given(turn, asks), first_given(turn, answers)
        if ask is not None and answer is not None:
            return ask, answer
    return None
