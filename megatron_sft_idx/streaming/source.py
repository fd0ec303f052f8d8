"""``LiveSource``: the shards that a rank has open, as a source of packs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.streaming.live import Indexed, LiveLimits, LiveShards, OpenPacks, Waiter
from megatron_sft_idx.training import Segments, interleaved

__all__ = ["LiveSource"]

logger = logging.getLogger("megatron_sft_idx.streaming")
_PACK_BITS = 40


class LiveSource:
    """A ``PackSource`` whose shards come and go.

    An open shard has a slot, which is used again once it is closed; a pack is a slot and its number inside the shard.

    Args:
        shards: of the catalog.
        limits: that they keep to.
        waiter: for whom the log says what was opened.
    """

    def __init__(self, shards: LiveShards, limits: LiveLimits, waiter: Waiter) -> None:
        self._shards, self._waiter = shards, waiter
        self.num_packs = 0  # how many will come nobody knows
        self.capacity = limits.capacity
        self.sequence_multiple = limits.sequence_multiple
        self.most_sequences = limits.most_sequences
        self.pad_id = limits.pad_id
        self._limits = limits.capacity, limits.sequence_multiple, limits.most_sequences
        self.fingerprint = ""
        self._slot_of: dict[int, int] = {}
        self._slots: list[OpenPacks | None] = []
        self._indexes: list[Any] = []  # of each slot, where its shard has one at hand

    def open(self, shards: Iterable[int]) -> None:
        """Open shards ahead of their packs, so that the kernel reads them in the background."""
        for shard in shards:
            self._slot(shard)

    def close_all_but(self, shards: Sequence[int]) -> None:
        """Close what is open beside these."""
        for shard in set(self._slot_of).difference(shards):
            slot = self._slot_of.pop(shard)
            self._slots[slot] = self._indexes[slot] = None

    def place(self, shards: NDArray[np.int64], packs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The packs of shards, as ``segments`` takes them; int64, one for each. Opens what is not open."""
        slots = np.array([self._slot(shard) for shard in shards.tolist()], np.int64)
        placed: NDArray[np.int64] = (slots << _PACK_BITS) | packs
        return placed

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Where the sequences of packs lie that ``place`` gave; see ``PackSource``."""
        slots, local = packs >> _PACK_BITS, packs & ((1 << _PACK_BITS) - 1)
        used = sorted(set(slots.tolist()))
        indexes = [self._indexes[slot] if slot in used else None for slot in range(used[-1] + 1 if used else 0)]
        if all(indexes[slot] for slot in used):
            # One call for all shards. Where it finds something wrong, the shard that is asked by itself says what.
            with contextlib.suppress(ValueError):
                return Segments(*_native.pack_segments(indexes, slots, local, self._limits))

        def ask(slot: int, rows: NDArray[np.int64]) -> Segments:
            offsets, starts, lengths = self._open(slot).segments(local[rows])
            return Segments(offsets, np.full(len(starts), slot, np.int32), starts, lengths)

        return interleaved(slots, ask)

    def arrays(self, shard: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Tokens and label-aligned loss mask of a slot."""
        return self._open(shard).arrays()

    def _open(self, slot: int) -> OpenPacks:
        opened = self._slots[slot]
        assert opened is not None
        return opened

    def _slot(self, shard: int) -> int:
        slot = self._slot_of.get(shard)
        if slot is None:
            opened = self._shards.open(shard)
            self._say(shard, opened)
            if None not in self._slots:
                self._slots.append(None)
                self._indexes.append(None)
            slot = self._slot_of[shard] = self._slots.index(None)
            self._slots[slot] = opened
            self._indexes[slot] = opened.index if isinstance(opened, Indexed) else None
        return slot

    def _say(self, shard: int, opened: OpenPacks) -> None:
        if self._waiter.speaks:
            tokens = "" if opened.num_tokens is None else f", {opened.num_tokens:,} tokens"
            logger.info(
                "%s: %s, %s packs%s", self._waiter.who, self._shards.name(shard), f"{opened.num_packs:,}", tokens
            )
