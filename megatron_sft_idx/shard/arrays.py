"""What callers hand in, as the arrays the kernels take: never cast before it is known to fit.

The functions raise ValueError with what is wrong; whoever calls them knows which argument of which pack it was.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["integer_array", "mask_array", "token_array"]

_TOKENS = tuple(map(np.dtype, (np.uint16, np.int32, np.int64)))
_POSITIONS = (np.dtype(np.int64),)
_FLAGS = tuple(map(np.dtype, (np.bool_, np.uint8, np.int64)))
_WEIGHTS = tuple(map(np.dtype, (np.float32, np.float64)))


def token_array(values: ArrayLike) -> NDArray[Any]:
    """Ids as uint16, int32 or int64, one-dimensional and contiguous."""
    return _native_form(values, _TOKENS, "iu", "integers")


def integer_array(values: ArrayLike) -> NDArray[np.int64]:
    """Positions as int64."""
    return _native_form(values, _POSITIONS, "iu", "integers")


def mask_array(values: ArrayLike) -> NDArray[Any]:
    """A mask as bool, uint8, int64, float32 or float64."""
    array = np.asarray(values)
    if array.dtype.kind == "f":
        return _native_form(array, _WEIGHTS, "f", "numbers")
    return _native_form(array, _FLAGS, "iub", "numbers or booleans")


def _native_form(values: ArrayLike, dtypes: tuple[np.dtype[Any], ...], kinds: str, what: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype in dtypes and array.ndim == 1 and array.flags.c_contiguous and array.flags.aligned:
        # A dtype may spell its byte order out, "<" for "=": all the same to numpy, but not to the kernels.
        return array if array.dtype.byteorder in "=|" else array.view(array.dtype.newbyteorder("="))
    if array.ndim != 1:
        raise ValueError(f"has shape {array.shape}; expected one dimension")
    if array.size == 0:
        return np.empty(0, dtypes[-1])
    if array.dtype.kind not in kinds:
        raise ValueError(f"has dtype {array.dtype}; expected {what}")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"holds {array.max()}, far outside any id, position or mask")
    return np.require(array, dtypes[-1], ("C", "ALIGNED"))
