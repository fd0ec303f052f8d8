"""Row fields that become columns, with one value for each sequence of the row (``--keep-field``)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.chat.values import Undecoded
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout.column import COLUMN_DTYPES, number_of
from megatron_sft_idx.layout.files import check_column_name

_DTYPES = {dtype.name: dtype for dtype in COLUMN_DTYPES.values()}
# A dtype for all numbers that JSON usually has. It does not depend on the content of rows.
_DEFAULT = "float64"
# A number as in JSON, short enough for Python to accept.
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,99})(?:\.\d{1,99})?(?:[eE][-+]?\d{1,3})?")
# Column names that are already used by some kinds of rows, or by parts.
_TAKEN = ("source", "pair", "label", "content")
_RENAME = "rename the field in the rows (docs/columns.md shows how)"


def read_keep_fields(entries: Iterable[str]) -> dict[str, str]:
    """Return the dtypes of the fields to keep, by name.

    Args:
        entries: ``NAME`` or ``NAME=DTYPE``.

    Raises:
        FormatError: a column cannot have this name or dtype, or a field is kept twice.

    Example:
        >>> read_keep_fields(["score", "rank=int16"])
        {'rank': 'int16', 'score': 'float64'}
    """
    fields: dict[str, str] = {}
    for entry in entries:
        name, has_dtype, dtype = entry.partition("=")
        dtype = dtype if has_dtype else _DEFAULT
        try:
            check_column_name(name)
        except FormatError as error:
            raise FormatError(f"--keep-field {brief(entry)}: {error}; {_RENAME}") from None
        if name in _TAKEN:
            raise FormatError(f"--keep-field {entry}: preprocess writes a column with this name itself; {_RENAME}")
        if dtype not in _DTYPES:
            raise FormatError(f"--keep-field {brief(entry)}: unknown dtype; choose one of {', '.join(sorted(_DTYPES))}")
        if name in fields:
            raise FormatError(f"--keep-field {entry}: this field is given twice; remove one")
        fields[name] = dtype
    return dict(sorted(fields.items()))


def values_of(row: Mapping[str, Any], fields: Mapping[str, str]) -> tuple[int | float, ...]:
    """Return the values of a row's fields, in the order of ``fields``, as stored in their dtypes.

    Integers and booleans are stored exactly. Text of a number counts as that number. Fractions are rounded to the
    nearest value of a float dtype.

    Raises:
        RowError: a field is missing, or is not a finite number that fits its dtype.
    """
    return tuple(_value_of(row.get(name), name, dtype) for name, dtype in fields.items())


def _value_of(value: Any, name: str, dtype_name: str) -> int | float:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        raise RowError(f"the row has no value for {name}, which --keep-field stores")
    if isinstance(value, Undecoded):
        raise value.error("a number")
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):  # all values of a .csv file are text
        value = number_of(value.strip())
    dtype = _DTYPES[dtype_name]
    if not isinstance(value, (bool, int, float)) or not (isinstance(value, int) or math.isfinite(value)):
        remedy = (
            ": correct the value; if this field is text in all rows, give each text its own input file, and select"
            " with --where 'source == FILE'"
            if isinstance(value, str)
            else ""
        )
        raise RowError(f"{name} is {brief(value)}, expected a finite number to store as {dtype_name}{remedy}")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if value != int(value) or not limits.min <= value <= limits.max:
            raise RowError(
                f"{name} is {brief(value)}, which does not fit into {dtype_name}, a whole number from {limits.min} to"
                f" {limits.max}; choose another dtype (--keep-field {name}=DTYPE)"
            )
        return int(value)
    try:
        with np.errstate(over="ignore", under="ignore"):
            stored = float(dtype.type(value))
    except OverflowError:
        stored = math.inf
    is_rounded_whole = stored != value and value == int(value)
    if math.isinf(stored) or is_rounded_whole or (value and not stored):
        remedy = f"choose another dtype (--keep-field {name}=DTYPE)"
        raise RowError(
            f"{name} is {brief(value)}, which does not fit into {dtype_name}: it would become {stored}; {remedy}"
        )
    return stored


def arrays_of(
    rows: Sequence[Sequence[int | float]], fields: Mapping[str, str], repeats: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """Return columns of the fields by name: the value of each row, repeated for each of its sequences."""
    return {
        name: np.repeat(np.array([row[number] for row in rows], _DTYPES[dtype]), repeats)
        for number, (name, dtype) in enumerate(fields.items())
    }


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the storage dtype of this name."""
    return _DTYPES[name]
