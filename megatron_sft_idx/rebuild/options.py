"""What the user knows of a shard whose files do not say it any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import mask_dtype_of, token_dtype_of
from megatron_sft_idx.layout.values import MAX_CAPACITY

__all__ = ["Known"]


@dataclass(frozen=True)
class Known:
    """Facts for a rebuild; None where nobody knows.

    Attributes:
        token_dtype: of ``.bin``; its size and that of ``.loss.bin`` tell, unless both are empty.
        mask_dtype: of ``.loss.bin``, likewise.
        capacity: most token positions a pack may hold; else the longest pack.
        sequence_multiple: packing counted each sequence as its length rounded up to this; else 1.
        pad_id: the tokenizer's padding id.
        eod_id: the id that every sequence ends with. Taken as a fact: what follows from it may be wrong where it is.

    Raises:
        FormatError: a value that no shard can have.
    """

    token_dtype: np.dtype[Any] | None = None
    mask_dtype: np.dtype[Any] | None = None
    capacity: int | None = None
    sequence_multiple: int | None = None
    pad_id: int | None = None
    eod_id: int | None = None

    def __post_init__(self) -> None:
        if self.token_dtype is not None:
            token_dtype_of(self.token_dtype)
        if self.mask_dtype is not None:
            mask_dtype_of(self.mask_dtype)
        for name, least in (("capacity", 1), ("sequence_multiple", 1), ("pad_id", 0), ("eod_id", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value <= MAX_CAPACITY:
                raise FormatError(f"{name} {value}: expected a whole number from {least} to {MAX_CAPACITY}")
