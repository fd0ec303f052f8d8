"""Single fields of rows: their types, and which of several names has a value."""

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
    """The type of a value in JSON's words, for error messages; RowError where it is undecoded."""
    if isinstance(value, Undecoded):
        raise value.error()
    return _JSON_NAMES.get(type(value), type(value).__name__)


def is_filled(value: Any) -> bool:
    """Whether a value is neither null nor an empty string, list or object."""
    return value is not None and not (isinstance(value, (str, Sequence, Mapping)) and len(value) == 0)


def first_filled(data: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first of these keys whose value is neither null nor empty."""
    return next((name for name in names if is_filled(data.get(name))), None)


def first_given(data: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first of these keys whose value is not null."""
    for name in names:  # a generator takes twice as long, and this is called several times a row
        if data.get(name) is not None:
            return name
    return None


def without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose value is not null: a table has a null for every key that only other rows have."""
    return {key: value for key, value in data.items() if value is not None}


def typed(value: Any, kind: type[_Kind], what: str, expected: str = "") -> _Kind:
    """The value, if it is of a type (a string, a list or an object); else RowError."""
    if isinstance(value, Undecoded):
        raise value.error(expected or _JSON_NAMES[kind])
    if not isinstance(value, kind):
        raise RowError(f"{what} is {kind_of(value)}, expected {expected or _JSON_NAMES[kind]}")
    return value


def json_of(value: Any, what: str) -> Any:
    """A value as it is, but a string parsed as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode())
    except ValueError as error:
        raise RowError(f"{what} is a string that is {clause_of(error)}") from None


def text_under(data: dict[str, Any], names: Iterable[str]) -> str:
    """The text under the first of these keys whose value is not null; empty where there is none."""
    key = first_given(data, names)
    return "" if key is None else typed(data[key], str, key)


def pair_keys(turn: Mapping[str, Any]) -> tuple[str, str] | None:
    """The keys of the question and the answer in a turn that is both; None for any other turn."""
    if turn.get("role") is not None or turn.get("from") is not None:
        return None
    for asks, answers in PAIRS:
        ask, answer = first_given(turn, asks), first_given(turn, answers)
        if ask is not None and answer is not None:
            return ask, answer
    return None
