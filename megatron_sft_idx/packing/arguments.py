"""What callers hand in, checked."""

from __future__ import annotations

import operator
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import SequenceError

__all__ = ["LARGEST_CAPACITY", "as_integer", "as_lengths", "misfit"]

LARGEST_CAPACITY: Final = 2**31 - 1  # boundaries are int32


def as_integer(name: str, value: Any, low: int, high: int) -> int:
    """The value of an option, checked: numpy integers pass, floats and booleans do not."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}, an integer is needed")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, an integer is needed") from None
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}, it must be {low} to {high}")
    return number


def as_lengths(lengths: ArrayLike) -> NDArray[np.int64]:
    """Any integer array or list as one contiguous int64 array."""
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths has {array.ndim} dimensions, one is needed")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"lengths are {array.dtype}, integers are needed")
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(2**63 - 1))  # too long for any pack either way
    return np.ascontiguousarray(array, dtype=np.int64)


def misfit(lengths: NDArray[np.int64], capacity: int, multiple: int, start: int = 0) -> SequenceError:
    """The error for lengths that no pack holds: which is the first, how many there are, and the longest.

    Args:
        lengths: at least one of them does not fit.
        capacity: as the caller gave it.
        multiple: as the caller gave it.
        start: what the first of the lengths is called in the message.
    """
    usable = capacity // multiple * multiple
    short = np.flatnonzero(lengths < 1)
    if len(short) > 0:
        first = int(short[0])
        found = f"length {int(lengths[first])}, a sequence has at least one token"
        reason = f"{found}; {len(short)} sequences are like it, drop them"
        return SequenceError("lengths", start + first, reason)
    overlong = np.flatnonzero(lengths > usable)
    first = int(overlong[0])
    rounded = f" rounded up to a multiple of {multiple}" if multiple > 1 else ""
    reason = (
        f"length {int(lengths[first])}{rounded} does not fit capacity {capacity}; overlong sequences: "
        f"{len(overlong)}, the longest has {int(lengths.max())} tokens; drop, truncate or split them, "
        "or raise the capacity"
    )
    return SequenceError("lengths", start + first, reason)
