"""``HeldShards``: shards in memory, end to end, as if they were one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.layout import Header
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.reader import Pack

__all__ = ["HeldShards", "held_nbytes", "running_sums"]


def held_nbytes(headers: Sequence[Header]) -> int:
    """Bytes of memory that shards take: tokens, masks and index arrays."""
    return sum(sum(digest.nbytes for digest in header.digests[:2]) + header.index_nbytes for header in headers)


def running_sums(counts: Iterable[int]) -> NDArray[np.int64]:
    """What comes before each count, and the sum of all: int64 [counts + 1]."""
    return np.cumsum([0, *counts], dtype=np.int64)


class HeldShards:
    """The packs of many shards in arrays that run through all of them; each shard is read when it is first needed.

    Memory is taken as shards are read. A shard is held to every rule of its index then, so packs need no check of
    their own. Threads may share one: two that need a shard both read it, to the same place.

    Args:
        headers: of the shards, one or more, with one dtype of tokens and one of masks.
        open_shard: opens shard ``number`` with the backend ``reopen``.

    Attributes:
        tokens: of all packs.
        loss: label-aligned mask of all tokens.
        starts: uint32, where each sequence begins in its pack.
        sequence_offsets: int64 [packs + 1], CSR, through all shards.
        token_offsets: int64 [packs + 1], where each pack begins in ``tokens``.
        tokens_before: int64 [shards + 1], tokens in all shards before each one.
    """

    def __init__(self, headers: Sequence[Header], open_shard: Callable[[int], Shard]) -> None:
        self._open = open_shard
        self._packs_before = running_sums(header.num_packs for header in headers)
        self._sequences_before = running_sums(header.num_sequences for header in headers)
        self.tokens_before = running_sums(header.num_tokens for header in headers)
        packs, tokens = int(self._packs_before[-1]), int(self.tokens_before[-1])
        # Pages of an array that nobody has written to take no memory.
        self._own = (
            np.empty(tokens, headers[0].token_dtype),
            np.empty(tokens, headers[0].mask_dtype),
            np.empty(int(self._sequences_before[-1]), np.uint32),
            np.empty(packs + 1, np.int64),
            np.empty(packs + 1, np.int64),
        )
        self.tokens, self.loss, self.starts, self.sequence_offsets, self.token_offsets = map(_read_only, self._own)
        self._token_items, self._sequence_items = self.token_offsets.data, self.sequence_offsets.data
        self._is_here = bytearray(len(headers))

    def need(self, shards: Iterable[int]) -> None:
        """Read those of these shards that are not in memory yet. FormatError: one breaks a rule, or is another one."""
        for number in shards:
            if not self._is_here[number]:
                self._fill(number)

    def _fill(self, number: int) -> None:
        shard = self._open(number)
        shard.sequence_bounds()  # the rules
        own_tokens, own_loss, own_starts, own_sequences, own_offsets = self._own
        first, last = self._packs_before[number : number + 2]
        begin, end = self.tokens_before[number : number + 2]
        first_sequence, last_sequence = self._sequences_before[number : number + 2]
        own_tokens[begin:end] = shard.files.tokens[:]
        own_loss[begin:end] = shard.files.loss[:]
        own_starts[first_sequence:last_sequence] = shard.files.starts[:]
        np.add(shard.sequence_offsets, first_sequence, out=own_sequences[first : last + 1])
        np.add(shard.token_offsets, begin, out=own_offsets[first : last + 1])
        self._is_here[number] = 1

    def pack(self, shard: int, index: int) -> Pack:
        """Pack ``index``, counted through all shards, which lies in ``shard``: read-only views."""
        if not self._is_here[shard]:
            self._fill(shard)
        start, stop = self._token_items[index], self._token_items[index + 1]
        first, last = self._sequence_items[index], self._sequence_items[index + 1]
        boundaries = np.empty(last - first + 1, np.int32)
        boundaries[:-1] = self.starts[first:last]
        boundaries[-1] = stop - start
        return {"input_ids": self.tokens[start:stop], "loss_mask": self.loss[start:stop], "seq_boundaries": boundaries}


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
