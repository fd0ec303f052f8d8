"""What callers hand in, as the arrays the kernels take: never cast before it is known to fit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx.errors import SequenceError

__all__ = ["integer_array", "mask_array", "token_array"]

_Source = tuple[str, int]


def token_array(values: ArrayLike, name: str, source: _Source) -> NDArray[Any]:
    """Ids as uint16, int32 or int64, one-dimensional and contiguous."""
    return _native_form(values, name, source, (np.uint16, np.int32, np.int64), "iu", "integers")


def integer_array(values: ArrayLike, name: str, source: _Source) -> NDArray[np.int64]:
    """Positions as int64."""
    return _native_form(values, name, source, (np.int64,), "iu", "integers")


def mask_array(values: ArrayLike, name: str, source: _Source) -> NDArray[Any]:
    """A mask as uint8, int64, float32 or float64; bool counts as uint8."""
    array = np.asarray(values)
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    if array.dtype.kind == "f":
        return _native_form(array, name, source, (np.float32, np.float64), "f", "numbers")
    return _native_form(array, name, source, (np.uint8, np.int64), "iu", "numbers")


def _native_form(
    values: ArrayLike, name: str, source: _Source, dtypes: tuple[Any, ...], kinds: str, what: str
) -> NDArray[Any]:
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, dtypes[-1])
    if array.ndim != 1:
        raise SequenceError(*source, f"{name} has shape {array.shape}; expected one dimension")
    if array.dtype.kind not in kinds:
        raise SequenceError(*source, f"{name} has dtype {array.dtype}; expected {what}")
    if array.dtype.newbyteorder("=") not in dtypes:
        widest = np.dtype(dtypes[-1])
        if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.max() > np.iinfo(np.int64).max:
            raise SequenceError(*source, f"{name} holds {array.max()}, which is far outside any id or length")
        array = array.astype(widest)
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
