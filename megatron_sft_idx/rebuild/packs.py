"""Packs from their parts: lengths from one file, sequence counts from the zeros of ``.seq.bin``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.rebuild.lengths import Lengths, OffsetLengths
from megatron_sft_idx.shard.index import PackChunk
from megatron_sft_idx.storage import Array, open_array

__all__ = ["Piece", "StartedPacks", "Starts", "StoredPacks", "pieces"]

_CHUNK = 1 << 16
_PIECE_TOKENS = 1 << 16


class Starts:
    """``.seq.bin``: every pack's first sequence starts at 0 and no other one does, so its zeros are the packs.

    Raises:
        CorruptShardError: a size that is not of uint32, a first start that is not 0, or one that is not above the one
            before it in its pack (rules F2, P2, P3).
    """

    def __init__(self, path: str) -> None:
        nbytes = os.stat(path).st_size
        if nbytes % 4:
            raise CorruptShardError(path, nbytes, "F2", f"file has {nbytes} bytes, starts have 4 each; restore it")
        self.path, self.num_sequences = path, nbytes // 4
        self.array: Array = open_array(path, np.dtype("<u4"), self.num_sequences, nbytes=nbytes, backend="pread")
        if self.num_sequences and (first := int(self.array[:1][0])) != 0:
            raise CorruptShardError(path, 0, "P2", f"the first start is {first}, expected 0; restore the file")
        self.num_packs = sum(self._packs_begun(first) for first in self._firsts())

    def _packs_begun(self, first: int) -> int:
        """Packs that begin in a chunk, each start of which is held against the one before it."""
        before = max(first - 1, 0)
        starts = self.array[before : first + _CHUNK]
        ends_early = (starts[1:] != 0) & (starts[1:] <= starts[:-1])
        if ends_early.any():
            at = 1 + int(np.argmax(ends_early))
            raise CorruptShardError(
                self.path,
                4 * (before + at),
                "P3",
                f"a start of {starts[at]} after {starts[at - 1]}, expected a larger one or 0; restore the file",
            )
        return int((starts[first - before :] == 0).sum())

    def _firsts(self) -> range:
        return range(0, self.num_sequences, _CHUNK)

    def counts(self) -> Iterator[NDArray[np.int64]]:
        """Sequences in each pack, in chunks of any size."""
        begun = np.empty(0, np.int64)  # where the pack begins that is not over yet
        for first in self._firsts():
            edges = np.concatenate([begun, np.flatnonzero(self.array[first : first + _CHUNK] == 0) + first])
            yield np.diff(edges)
            begun = edges[-1:]
        yield self.num_sequences - begun


class StartedPacks:
    """Lengths and sequence counts of all packs, in chunks; may be iterated again and again.

    Raises:
        CorruptShardError: the two sources have different numbers of packs.
    """

    def __init__(self, lengths: Lengths, starts: Starts) -> None:
        if lengths.num_packs != starts.num_packs:
            raise CorruptShardError(
                starts.path,
                0,
                "P2",
                f"{starts.num_packs} packs begin here (starts of 0), {lengths.num_packs} by {lengths.origin};"
                " one of the two is damaged or of another shard: restore it",
            )
        self.lengths, self.starts = lengths, starts

    def __iter__(self) -> Iterator[PackChunk]:
        counts, held = self.starts.counts(), np.empty(0, np.int64)
        for lengths in self.lengths:
            while len(held) < len(lengths):
                held = np.concatenate([held, next(counts)])
            yield PackChunk(lengths, held[: len(lengths)])
            held = held[len(lengths) :]


class StoredPacks:
    """The packs that the arrays of a ``.seq.idx`` under a good header say; may be iterated again and again.

    Raises:
        CorruptShardError: the arrays are damaged (rules O1, O2).
    """

    def __init__(self, path: str, header: Header) -> None:
        self._lengths = OffsetLengths(path, header.token_offsets_offset, header.num_packs)
        self._counts = OffsetLengths(path, header.nbytes, header.num_packs)

    def __iter__(self) -> Iterator[PackChunk]:
        return map(PackChunk, self._lengths, self._counts)


class Piece(NamedTuple):
    """Consecutive packs of some 64 thousand tokens, or one longer pack: where they are in the data files."""

    tokens: slice
    sequences: slice
    packs: PackChunk


def pieces(packs: Iterable[PackChunk]) -> Iterator[Piece]:
    """Packs in pieces small enough to read their tokens."""
    token = sequence = 0
    for chunk in packs:
        ends, first = np.cumsum(chunk.lengths), 0
        while first < len(ends):
            begin = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, begin + _PIECE_TOKENS, side="right")), first + 1)
            some = PackChunk(chunk.lengths[first:last], chunk.sequences[first:last])
            next_token, next_sequence = token + int(some.lengths.sum()), sequence + int(some.sequences.sum())
            yield Piece(slice(token, next_token), slice(sequence, next_sequence), some)
            token, sequence, first = next_token, next_sequence, last
