"""Bring the sequences of a batch into memory: mapped from the shard, read from disk, or fetched from an object store.

A request to an object store takes tens of milliseconds, whatever its size, so sequences must not be requested one after
another. All sequences of a batch are known when it is planned. Ranges that are close together are merged, and all are
requested at once, for several batches ahead. The results are concatenated in arrays of the total size; the kernels that
fill batches read these like a mapped shard. The arrays of a shard have items of different sizes, 1 byte for a mask and
8 for some columns. Each array is requested with its own ranges, but sequences have the same positions in all arrays.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.lines import Shown, shown_by_fields
from megatron_sft_idx.storage import Extents, announce, read_extents
from megatron_sft_idx.storage.remote import RemoteArray
from megatron_sft_idx.storage.remote.transport import request_pool
from megatron_sft_idx.training.sources import Arrays, Segments

# ---- local shards: memory maps, or reads for one batch ----


@shown_by_fields
class Placed(NamedTuple):
    """The sequences of ``Segments`` in arrays.

    Attributes:
        arrays: sets of arrays: tokens, label-aligned loss mask, and columns of tokens.
        slots: int32 [segments], the set of each sequence.
        starts: int64 [segments], position of its first token in that set.
    """

    arrays: list[tuple[NDArray[Any], ...]]
    slots: NDArray[np.int32]
    starts: NDArray[np.int64]


def place(shards: Sequence[Arrays], slots: NDArray[np.int32], segments: Segments) -> Placed:
    """Place sequences in memory: if all shards are mapped, return their locations, else read them.

    Sequences that are read are concatenated in one set of arrays for all shards with the same dtypes.

    Args:
        shards: tokens, loss mask and columns of tokens of each shard that is used.
        slots: int32 [segments], the position in ``shards`` of the shard of each sequence.
        segments: the sequences.

    Raises:
        ValueError: a sequence is outside its shard.
        FormatError: a shard was replaced since it was opened.
    """
    if all(isinstance(array, np.ndarray) for arrays in shards for array in arrays):
        return Placed(list(shards), slots, segments.starts)  # type: ignore[arg-type]
    extent_slots, extent_starts, extent_counts, extent = _extents(segments, slots)
    shard_of = [shards[slot] for slot in extent_slots.tolist()]
    dtypes_of = [tuple(array.dtype for array in arrays) for arrays in shard_of]
    kinds = list(dict.fromkeys(dtypes_of))
    set_of = np.array(list(map(kinds.index, dtypes_of)), np.int32)
    sets, begins = [], np.empty(len(shard_of), np.int64)
    for number in range(len(kinds)):
        members = np.flatnonzero(set_of == number)
        starts, counts = extent_starts[members], extent_counts[members]
        begins[members] = np.cumsum(counts) - counts
        outs: list[NDArray[Any]] = []
        for arrays in zip(*(shard_of[member] for member in members.tolist()), strict=True):
            outs.append(np.empty(max(int(counts.sum()), 0), arrays[0].dtype))
            read_extents(arrays, starts, counts, outs[-1])
        sets.append(tuple(outs))
    return Placed(sets, set_of[extent], begins[extent] + segments.starts - extent_starts[extent])


def advise(shards: Sequence[Arrays], slots: NDArray[np.int32], segments: Segments) -> None:
    """Ask the kernel to read these sequences from disk in the background; for the arguments, see ``place``.

    The caller must call this for batches in the order in which they will be read. Within a batch, the order is that of
    ``place``: tokens, masks, columns.
    """
    if not shards:  # an empty batch
        return
    slots, starts, counts, _ = _extents(segments, slots)
    arrays, kinds = [array for column in zip(*shards, strict=True) for array in column], len(shards[0])
    slots = np.concatenate([slots + kind * len(shards) for kind in range(kinds)])
    announce(Extents(arrays, slots, np.tile(starts, kinds), np.tile(counts, kinds)))


def _extents(segments: Segments, slots: NDArray[np.int32]) -> tuple[NDArray[Any], ...]:
    """Join adjacent sequences of a shard, such as the sequences of a stored pack, to extents.

    Returns:
        For each extent its slot, int32, the position of its first token and its number of tokens, int64 [extents]; and
            for each sequence the number of its extent, int64 [segments].
    """
    starts, stops = segments.starts, segments.starts + segments.lengths
    begins = np.ones(len(starts), np.bool_)
    begins[1:] = (slots[1:] != slots[:-1]) | (starts[1:] != stops[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(starts)) - 1
    return slots[first], starts[first], stops[last] - starts[first], np.cumsum(begins) - 1


# ---- remote shards: fetched from object stores ----


BUDGET_NBYTES = 256 << 20
# The largest gap in bytes between two sequences that share a request, and the largest request. At 50 to 100 MB/s per
# connection, 64 KiB cost less than another request, and above 8 MiB several connections are faster.
_GAP_NBYTES, _MAX_NBYTES = 64 << 10, 8 << 20


@shown_by_fields
class Ranges(NamedTuple):
    """Ranges that cover some sequences, concatenated in one array.

    Attributes:
        begins: int64 [ranges], position of the first token of each, ascending.
        ends: int64 [ranges], position after the last token of each.
        places: int64 [sequences], position of the first token of each sequence in the array of all ranges.
        tokens: total number of tokens in all ranges.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    places: NDArray[np.int64]
    tokens: int


def coalesce(starts: NDArray[np.int64], lengths: NDArray[np.int64], gap: int, max_tokens: int) -> Ranges:
    """Cover sequences, given by int64 starts and lengths, with few ranges. Any order and overlaps are allowed.

    Sequences that are at most ``gap`` tokens apart share a range. A range has at most ``max_tokens`` tokens, unless a
    single sequence, or several overlapping sequences, are longer.
    """
    order = np.argsort(starts, kind="stable")
    begins: list[int] = []
    ends: list[int] = []
    owners = np.empty(len(starts), np.int64)
    for sequence, start, length in zip(order, starts[order].tolist(), lengths[order].tolist(), strict=True):
        end = start + length
        if begins and start - ends[-1] <= gap and (end - begins[-1] <= max_tokens or start < ends[-1]):
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(start)
            ends.append(end)
        owners[sequence] = len(begins) - 1
    first, last = np.array(begins, np.int64), np.array(ends, np.int64)
    behind = np.cumsum(last - first)
    places = starts - first[owners] + (behind - (last - first))[owners]
    return Ranges(first, last, places, int(behind[-1]))


class _ArrayRead(NamedTuple):
    """The read of one array of a remote shard for one batch.

    Attributes:
        array: the array.
        needed: the needed ranges.
        requested: the requested ranges, which include gaps between needed ranges.
        out: the needed items, concatenated; complete when all requests are answered.
    """

    array: RemoteArray
    needed: Ranges
    requested: Ranges
    out: NDArray[Any]

    @classmethod
    def of(cls, array: RemoteArray, needed: Ranges) -> _ArrayRead:
        """Plan the read of these ranges, with as few requests as the item size of the array allows."""
        size = array.dtype.itemsize
        counts = needed.ends - needed.begins
        requested = coalesce(needed.begins, counts, _GAP_NBYTES // size, _MAX_NBYTES // size)
        return cls(array, needed, requested, np.empty(needed.tokens, array.dtype))

    @property
    def nbytes(self) -> int:
        """Number of bytes that are requested."""
        return self.requested.tokens * self.array.dtype.itemsize

    def request(self) -> list[Future[None]]:
        """Request all ranges. The last request that completes checks that the shard was not replaced meanwhile."""
        begins, ends = self.requested.begins.tolist(), self.requested.ends.tolist()
        num_left = iter(range(len(begins))[::-1])  # next() of a range is atomic, so threads can share it
        counts = self.needed.ends - self.needed.begins
        columns = (self.needed.begins, counts, np.cumsum(counts) - counts)
        needed = list(zip(*(column.tolist() for column in columns), strict=True))
        # Needed ranges are in ascending order, so the needed ranges of one request are consecutive.
        firsts = np.searchsorted(self.needed.begins, self.requested.begins).tolist()

        def read(begin: int, end: int, inside: list[tuple[int, int, int]]) -> None:
            fetched = self.array.fetch(begin, end)
            for start, count, place in inside:
                self.out[place : place + count] = fetched[start - begin : start - begin + count]
            if next(num_left) == 0:
                self.array.confirm_unchanged()

        pool, lasts = request_pool(), [*firsts[1:], len(needed)]
        return [
            pool.submit(read, begin, end, needed[first:last])
            for begin, end, first, last in zip(begins, ends, firsts, lasts, strict=True)
        ]


class _Ahead:
    """The reads of remote shards for one batch; they are requested when ``start`` is called.

    Attributes:
        segments: the sequences as planned.
        in_memory: the sequences with their positions in memory, and for each shard its arrays in memory.
        nbytes: number of bytes to request.
        requests: the requests that were made; None before ``start``.
    """

    def __init__(self, segments: Segments, slots: NDArray[np.int32], shards: Sequence[Arrays]) -> None:
        self.segments = segments
        self.requests: list[Future[None]] | None = None
        self._reads: list[_ArrayRead] = []
        starts, arrays = segments.starts.copy(), list(shards)  # entries of remote shards are replaced below
        for shard, of_shard in enumerate(shards):
            if not isinstance(of_shard[0], RemoteArray):
                continue
            members = np.flatnonzero(slots == shard)
            first, lengths = segments.starts[members], segments.lengths[members]
            if first.min() < 0 or lengths.min() < 0 or int((first + lengths).max()) > len(of_shard[0]):
                raise ValueError(f"sequences outside the {len(of_shard[0])} tokens of shard {shard}")
            remote = [array for array in of_shard if isinstance(array, RemoteArray)]
            # A sequence has the same position in memory in all arrays; each array has its own requests. Every needed
            # range is short enough for one request, even in the array with the largest items.
            widest = max(array.dtype.itemsize for array in remote)
            needed = coalesce(first, lengths, 0, _MAX_NBYTES // widest)
            starts[members] = needed.places
            reads = [_ArrayRead.of(array, needed) for array in remote]
            arrays[shard] = tuple(read.out for read in reads)
            self._reads += reads
        self.in_memory = replace(segments, starts=starts), arrays
        self.nbytes = sum(read.nbytes for read in self._reads)

    def start(self) -> None:
        if self.requests is None:
            self.requests = [request for read in self._reads for request in read.request()]

    def drop(self) -> None:
        for request in self.requests or ():
            request.cancel()


class Fetcher(Shown):
    """Fetch the data of batches from remote shards, in the order in which the batches are announced.

    The caller must fill batches in the same order: ``gather`` drops all batches that were announced before its batch.
    At most ``budget`` bytes are fetched ahead, in addition to the batch that is being filled. ``batches`` are the
    batches that are announced and not yet filled, in order.
    """

    def __init__(self, budget: int = BUDGET_NBYTES) -> None:
        self.budget = budget
        self._pid, self._lock, self.batches = os.getpid(), Lock(), deque[_Ahead]()

    def _shown(self) -> str:
        return f"{len(self.batches)} batches ahead, up to {self.budget:,} bytes"

    def __reduce__(self) -> tuple[type[Fetcher], tuple[int]]:
        return Fetcher, (self.budget,)

    def _locked(self) -> Lock:
        if self._pid != os.getpid():  # neither a lock nor requests survive a fork
            self._pid, self._lock, self.batches = os.getpid(), Lock(), deque()
        return self._lock

    def announce(self, segments: Segments, slots: NDArray[np.int32], shards: Sequence[Arrays]) -> None:
        """Fetch these segments as soon as the budget allows; returns immediately. For the arguments, see ``place``."""
        batch = _Ahead(segments, slots, shards)
        with self._locked():
            self.batches.append(batch)
            self._start()

    def gather(
        self, segments: Segments, slots: NDArray[np.int32], shards: Sequence[Arrays]
    ) -> tuple[Segments, list[Arrays]]:
        """Wait until the segments are in memory; return them with their positions there, and the arrays of each shard.

        Raises:
            FormatError: a shard was replaced since it was opened.
            StorageError: the store does not answer.
            ValueError: a sequence extends outside its shard.
        """
        with self._locked():
            if any(announced.segments is segments for announced in self.batches):
                while (batch := self.batches.popleft()).segments is not segments:
                    batch.drop()
            else:
                batch = _Ahead(segments, slots, shards)
            batch.start()
            self._start()
        try:
            for request in batch.requests or ():
                request.result()
        except BaseException:
            batch.drop()
            # Requests to a store that does not answer would keep the process from ending.
            self.forget()
            raise
        return batch.in_memory

    def forget(self) -> None:
        """Drop all batches that were announced."""
        with self._locked():
            while self.batches:
                self.batches.popleft().drop()

    def _start(self) -> None:
        """Request the data of the first batches, as far as the budget allows. The caller must hold the lock."""
        room = self.budget
        for batch in self.batches:
            room -= batch.nbytes
            if room < 0:
                return
            batch.start()
