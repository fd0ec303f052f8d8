"""A legacy ``.npy`` as a source of packs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.formats.npy import read_legacy
from megatron_sft_idx.storage.hashing import StreamHash
from megatron_sft_idx.training.segments import Segments

__all__ = ["LegacySource"]


class LegacySource:
    """Packs of a legacy ``.npy``, all in memory: a ``PackSource``.

    Args:
        path: the file.
        capacity: most token positions a row may hold; None for those of the longest pack.
        pad_id: the tokenizer's padding id, which the file does not know.

    Raises:
        FormatError, SequenceError: see ``read_legacy``.
    """

    def __init__(self, path: str | os.PathLike[str], *, capacity: int | None = None, pad_id: int | None = None) -> None:
        self._packs = packs = read_legacy(path)
        self.num_packs = len(packs.token_offsets) - 1
        self.capacity = int(np.diff(packs.token_offsets).max(initial=0)) if capacity is None else capacity
        self.sequence_multiple = 1
        self.most_sequences = int(np.diff(packs.sequence_offsets).max(initial=0))
        self.pad_id = pad_id
        content = StreamHash()
        for array in (packs.tokens, packs.loss, packs.token_offsets, packs.sequence_offsets, packs.starts):
            content.update(array)
        self.fingerprint = content.hex()

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Where the sequences of these packs lie; see ``PackSource``."""
        held = self._packs
        index = held.sequence_offsets, held.token_offsets, held.starts, len(held.tokens)
        numbers = np.ascontiguousarray(packs, np.int64)
        return Segments(*_native.pack_segments([index], np.zeros(len(numbers), np.int64), numbers))

    def arrays(self, shard: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Tokens and label-aligned loss mask, whole."""
        return self._packs.tokens, self._packs.loss
