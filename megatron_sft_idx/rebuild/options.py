"""What the user knows of a shard whose files do not say it any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

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
        eod_id: the id that every sequence ends with.
    """

    token_dtype: np.dtype[Any] | None = None
    mask_dtype: np.dtype[Any] | None = None
    capacity: int | None = None
    sequence_multiple: int | None = None
    pad_id: int | None = None
    eod_id: int | None = None
