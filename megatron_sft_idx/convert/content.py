"""What packs say, as a few bytes that any two formats agree on: the same packs, the same content."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.formats.base import PackRun
from megatron_sft_idx.storage.hashing import StreamHash

__all__ = ["COLUMNS", "Content"]

# What is compared, and what people call it.
COLUMNS = {"tokens": "token ids", "masks": "loss masks", "sequences": "sequence lengths", "packs": "packs"}


class Content:
    """A running hash of packs, column by column, so that it does not matter in which runs they come.

    Values are brought to one form first: ids int32, masks float32, lengths and counts int64, all little-endian.

    Attributes:
        num_packs: packs so far.
        num_sequences: sequences so far.
        num_tokens: tokens so far.
        num_trained_tokens: positions trained on so far.
    """

    def __init__(self) -> None:
        self._hashes = {column: StreamHash() for column in COLUMNS}
        self.num_packs = self.num_sequences = self.num_tokens = self.num_trained_tokens = 0

    def add(self, run: PackRun) -> None:
        """The next packs."""
        self.num_packs += len(run.pack_lengths)
        self.num_sequences += len(run.seq_starts)
        self.num_tokens += len(run.tokens)
        self.num_trained_tokens += int(np.count_nonzero(run.loss_mask))
        self._update("tokens", run.tokens, "<i4")
        self._update("masks", run.loss_mask, "<f4")
        self._update("sequences", run.sequence_lengths(), "<i8")
        self._update("packs", run.pack_sequences, "<i8")

    def _update(self, column: str, values: NDArray[Any], dtype: str) -> None:
        self._hashes[column].update(np.ascontiguousarray(values, dtype))

    def differs(self, other: Content, ignored: Collection[str] = ()) -> list[str]:
        """Names of the columns that are not the same, but for those ignored."""
        return [
            name
            for column, name in COLUMNS.items()
            if column not in ignored and self._hashes[column].checksum() != other._hashes[column].checksum()
        ]
