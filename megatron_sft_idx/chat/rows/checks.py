"""What the readers of every kind of row share: the error and the checks of single values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_sft_idx.chat.inputs.json_value import parse_json

__all__ = [
    "RowError",
    "is_filled",
    "kind_of",
    "name_of",
    "parse_embedded",
    "read_flag",
    "read_weight",
    "require_string",
]

_MOST_WEIGHT = float(np.finfo(np.float32).max)  # masks are stored as float32
_JSON_NAMES = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "an object",
    type(None): "null",
}


class RowError(ValueError):
    """Why a row cannot be used; whoever knows the file and line makes a ``SequenceError`` of it."""


def kind_of(value: Any) -> str:
    """The value's type in JSON's words, for messages."""
    return _JSON_NAMES.get(type(value), type(value).__name__)


def name_of(value: Any) -> str:
    """A short quotation of a value for messages, however long it is."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def is_filled(value: Any) -> bool:
    """Whether a column says something: not null, and not an empty string, list or object."""
    return value is not None and not (isinstance(value, (str, Sequence, Mapping)) and len(value) == 0)


def require_string(value: Any, what: str) -> str:
    """The value, if it is a string."""
    if not isinstance(value, str):
        raise RowError(f"{what} is {kind_of(value)}, expected a string")
    return value


def parse_embedded(text: str, what: str) -> Any:
    """Parses JSON that a row holds as a string."""
    try:
        return parse_json(text.encode())
    except ValueError as error:
        raise RowError(f"{what} is a string that is {_as_clause(str(error))}") from None


def read_weight(value: Any, what: str) -> float:
    """A loss weight: a finite number >= 0; booleans count as 0 and 1."""
    if not isinstance(value, (int, float)) or not 0 <= value <= _MOST_WEIGHT:
        raise RowError(f"{what} is {name_of(value)}, expected a finite number >= 0")
    return float(value)


def read_flag(value: Any, what: str) -> bool:
    """A yes or no: true, false, 1 or 0."""
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise RowError(f"{what} is {name_of(value)}, expected true or false")
    return bool(value)


def _as_clause(reason: str) -> str:
    return reason if reason.startswith("not ") else f"not usable: {reason}"
