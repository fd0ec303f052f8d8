"""The format's numbers: version, dtype codes, limits, alignment."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_sft_idx.errors import FormatError

__all__ = [
    "ARRAY_ALIGNMENT",
    "FORMAT_VERSION",
    "LABEL_ALIGNED",
    "MASK_DTYPES",
    "MAX_CAPACITY",
    "MAX_COUNT",
    "TOKEN_DTYPES",
    "align",
    "mask_dtype_of",
    "token_dtype_for_vocabulary",
    "token_dtype_of",
]

FORMAT_VERSION = 1

# Megatron's own dtype codes (megatron.core.datasets.indexed_dataset.DType), for what each file may hold.
TOKEN_DTYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
MASK_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 7: np.dtype("<f4")}

# loss_mask[j] says whether predicting token j + 1 of the same sequence counts. The only alignment on disk.
LABEL_ALIGNED = 1

# Lengths are int32 in .idx.
MAX_CAPACITY = 2**31 - 1
# Counts and byte sizes stay below this, so that no product or sum of a few of them overflows int64.
MAX_COUNT = 2**56

ARRAY_ALIGNMENT = 64

# Megatron writes uint16 for vocabularies below this (DType.optimal_dtype).
_UINT16_VOCABULARY = 65500


def align(offset: int, alignment: int = ARRAY_ALIGNMENT) -> int:
    """The first multiple of ``alignment`` at or after ``offset``, in bytes."""
    return -(-offset // alignment) * alignment


def token_dtype_for_vocabulary(vocab_size: int) -> np.dtype[Any]:
    """The token dtype Megatron itself would choose for a vocabulary: uint16 below 65500 ids, else int32."""
    return TOKEN_DTYPES[8] if vocab_size < _UINT16_VOCABULARY else TOKEN_DTYPES[4]


def token_dtype_of(dtype: Any) -> tuple[int, np.dtype[Any]]:
    """Code and little-endian dtype of the tokens; FormatError unless uint16 or int32."""
    return _lookup(dtype, TOKEN_DTYPES, "token dtype", "uint16 or int32")


def mask_dtype_of(dtype: Any) -> tuple[int, np.dtype[Any]]:
    """Code and little-endian dtype of the loss mask; FormatError unless uint8 or float32."""
    return _lookup(dtype, MASK_DTYPES, "mask dtype", "uint8 (0/1) or float32 (weights)")


def _lookup(dtype: Any, table: dict[int, np.dtype[Any]], what: str, allowed: str) -> tuple[int, np.dtype[Any]]:
    wanted = np.dtype(dtype)
    for code, candidate in table.items():
        if candidate == wanted:
            return code, candidate
    raise FormatError(f"{what} {wanted}: the format stores {allowed}; pass one of these")
