"""Where the tokens of a batch's sequences are in memory: in the maps of their shards, read for it, or fetched.

A request to an object store takes tens of milliseconds, whatever its size, so a batch that asks for one sequence after
another waits longer than it trains. Here all that a batch needs is known when it is planned: ranges that lie close
together become one, all of them are requested at once, for several batches ahead, and they come to lie end to end in
arrays no larger than what was asked for. The kernels that fill batches then read these as they read a mapped shard,
with the first token of each sequence counted from where it came to lie.
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

from megatron_sft_idx.storage import Extents, announce, read_extents
from megatron_sft_idx.storage.remote import RemoteArray
from megatron_sft_idx.storage.remote.transport import request_pool
from megatron_sft_idx.training.sources import Arrays, Segments

# ---- in maps, or read for one batch ----


class Placed(NamedTuple):
    """The sequences of ``Segments`` in arrays.

    Attributes:
        arrays: tokens, label-aligned loss mask, and columns that have a row a token, together.
        slots: int32 [segments], in which of these each sequence lies.
        starts: int64 [segments], its first token there.
    """

    arrays: list[tuple[NDArray[Any], ...]]
    slots: NDArray[np.int32]
    starts: NDArray[np.int64]


def place(shards: Sequence[Arrays], slots: NDArray[np.int32], segments: Segments) -> Placed:
    """These sequences in memory: in the arrays of their shards where all are mapped, else read.

    What is read lies in arrays for each dtype of masks, with the runs that have it end to end.

    Args:
        shards: tokens, loss mask and the columns of tokens of each shard that is used.
        slots: int32 [segments], which of them each sequence lies in.
        segments: the sequences.

    Raises:
        ValueError: a sequence that does not lie within its shard.
        FormatError: a shard is another one by now.
    """
    if all(isinstance(array, np.ndarray) for arrays in shards for array in arrays):
        return Placed(list(shards), slots, segments.starts)  # type: ignore[arg-type]
    run_slots, run_starts, run_counts, run = _runs(segments, slots)
    of_run = [shards[slot] for slot in run_slots.tolist()]
    kinds = list(dict.fromkeys(arrays[1].dtype for arrays in shards))
    kind_of_run = np.array([kinds.index(arrays[1].dtype) for arrays in of_run], np.int32)
    placed, places = [], np.empty(len(of_run), np.int64)
    for kind in range(len(kinds)):
        mine = np.flatnonzero(kind_of_run == kind)
        starts, counts = run_starts[mine], run_counts[mine]
        places[mine] = np.cumsum(counts) - counts
        together: list[NDArray[Any]] = []
        for arrays in zip(*(of_run[run] for run in mine.tolist()), strict=True):
            together.append(np.empty(max(int(counts.sum()), 0), arrays[0].dtype))
            read_extents(arrays, starts, counts, together[-1])
        placed.append(tuple(together))
    return Placed(placed, kind_of_run[run], places[run] + segments.starts - run_starts[run])


def advise(shards: Sequence[Arrays], slots: NDArray[np.int32], segments: Segments) -> None:
    """Have these sequences read from disk in the background; arguments as of ``place``.

    Batches are announced in the order in which they will be read, and within one come tokens, then masks: as ``place``
    reads them.
    """
    if not shards:  # an empty batch
        return
    slots, starts, counts, _ = _runs(segments, slots)
    arrays, kinds = [array for column in zip(*shards, strict=True) for array in column], len(shards[0])
    slots = np.concatenate([slots + kind * len(shards) for kind in range(kinds)])
    announce(Extents(arrays, slots, np.tile(starts, kinds), np.tile(counts, kinds)))


def _runs(segments: Segments, slots: NDArray[np.int32]) -> tuple[NDArray[Any], ...]:
    """Sequences that lie behind one another in one shard, such as those of a stored pack, taken together.

    Returns:
        Of each run which shard it lies in, int32, its first token there and its tokens, int64 [runs]; and the run of
        each sequence, int64 [segments].
    """
    starts, stops = segments.starts, segments.starts + segments.lengths
    begins = np.ones(len(starts), np.bool_)
    begins[1:] = (slots[1:] != slots[:-1]) | (starts[1:] != stops[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(starts)) - 1
    return slots[first], starts[first], stops[last] - starts[first], np.cumsum(begins) - 1


# ---- fetched from object stores ----


BUDGET_NBYTES = 256 << 20
# Tokens between two sequences that are rather fetched and thrown away than asked for apart, and tokens of one request:
# at 50 to 100 MB/s a connection, 64 KiB cost less than another request and 8 MiB are worth sharing among connections.
_GAP, _MOST = 16 << 10, 2 << 20


class Ranges(NamedTuple):
    """Ranges that cover some sequences, end to end in one array.

    Attributes:
        begins: int64 [ranges], the first token of each, ascending.
        ends: int64 [ranges], where each ends.
        places: int64 [sequences], where each sequence begins in the array of all ranges.
        tokens: in all ranges.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    places: NDArray[np.int64]
    tokens: int


def coalesce(starts: NDArray[np.int64], lengths: NDArray[np.int64], gap: int = _GAP, most: int = _MOST) -> Ranges:
    """Few ranges that cover sequences, int64 first tokens and lengths, which may come in any order and overlap.

    Sequences at most ``gap`` tokens apart share a range. None has more than ``most``, but where one sequence, or
    several that overlap, are longer.
    """
    order = np.argsort(starts, kind="stable")
    begins: list[int] = []
    ends: list[int] = []
    owners = np.empty(len(starts), np.int64)
    for sequence, start, length in zip(order, starts[order].tolist(), lengths[order].tolist(), strict=True):
        end = start + length
        if begins and start - ends[-1] <= gap and (end - begins[-1] <= most or start < ends[-1]):
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(start)
            ends.append(end)
        owners[sequence] = len(begins) - 1
    first, last = np.array(begins, np.int64), np.array(ends, np.int64)
    behind = np.cumsum(last - first)
    places = starts - first[owners] + (behind - (last - first))[owners]
    return Ranges(first, last, places, int(behind[-1]))


class _Ahead:
    """What one batch needs, which is fetched once ``start`` is called.

    Attributes:
        segments: as they were planned.
        found: the same ones where they come to lie, and what they lie in.
        nbytes: of what is fetched.
        requests: under way; None until they are made.
    """

    def __init__(self, segments: Segments, slots: NDArray[np.int32], shards: Sequence[Arrays]) -> None:
        self.segments = segments
        self.requests: list[Future[None]] | None = None
        self._reads: list[tuple[RemoteArray, Ranges, NDArray[Any]]] = []
        starts, arrays = segments.starts.copy(), list(shards)  # the remote ones are replaced
        for shard, mine in enumerate(shards):
            if not isinstance(mine[0], RemoteArray):
                continue
            here = np.flatnonzero(slots == shard)
            first, lengths = segments.starts[here], segments.lengths[here]
            if first.min() < 0 or lengths.min() < 0 or int((first + lengths).max()) > len(mine[0]):
                raise ValueError(f"sequences outside the {len(mine[0])} tokens of shard {shard}")
            ranges = coalesce(first, lengths)
            starts[here] = ranges.places
            remote = [array for array in mine if isinstance(array, RemoteArray)]
            reads = [(array, ranges, np.empty(ranges.tokens, array.dtype)) for array in remote]
            arrays[shard] = tuple(out for *_, out in reads)
            self._reads += reads
        self.found = replace(segments, starts=starts), arrays
        self.nbytes = sum(out.nbytes for *_, out in self._reads)

    def start(self) -> None:
        if self.requests is None:
            self.requests = [request for read in self._reads for request in self._request(*read)]

    @staticmethod
    def _request(array: RemoteArray, ranges: Ranges, out: NDArray[Any]) -> list[Future[None]]:
        """Ask for all ranges of an array; the last one to come holds them to be of one shard."""
        left = iter(range(len(ranges.begins))[::-1])  # what is next is asked for by one thread at a time

        def read(begin: int, end: int, at: int) -> None:
            out[at : at + end - begin] = array.fetch(begin, end)
            if next(left) == 0:
                array.confirm_unchanged()

        counts = ranges.ends - ranges.begins
        columns = (ranges.begins, ranges.ends, np.cumsum(counts) - counts)
        return [request_pool().submit(read, *one) for one in zip(*(column.tolist() for column in columns), strict=True)]

    def drop(self) -> None:
        for request in self.requests or ():
            request.cancel()


class Fetcher:
    """Fetches what batches need of remote shards, in the order in which they are announced.

    Batches are filled in that order too: one that is asked for lets those go that were announced before it. What is
    fetched ahead never exceeds the budget, in bytes; beside it lies the batch that is being filled. ``batches`` are
    those that are announced and not filled yet, in order.
    """

    def __init__(self, budget: int = BUDGET_NBYTES) -> None:
        self.budget = budget
        self._pid, self._lock, self.batches = os.getpid(), Lock(), deque[_Ahead]()

    def __reduce__(self) -> tuple[type[Fetcher], tuple[int]]:
        return Fetcher, (self.budget,)

    def _locked(self) -> Lock:
        if self._pid != os.getpid():  # neither a lock nor requests survive a fork
            self._pid, self._lock, self.batches = os.getpid(), Lock(), deque()
        return self._lock

    def announce(self, segments: Segments, slots: NDArray[np.int32], shards: Sequence[Arrays]) -> None:
        """Fetch ahead what these segments need, when there is room; returns at once. Arguments as of ``place``."""
        batch = _Ahead(segments, slots, shards)
        with self._locked():
            self.batches.append(batch)
            self._start()

    def gather(
        self, segments: Segments, slots: NDArray[np.int32], shards: Sequence[Arrays]
    ) -> tuple[Segments, list[Arrays]]:
        """The segments as they lie in memory, and what they lie in; waits until all is there.

        Raises:
            FormatError: a shard was replaced since it was opened.
            StorageError: the store does not answer.
            ValueError: a sequence that reaches outside its shard.
        """
        with self._locked():
            if any(batch.segments is segments for batch in self.batches):
                while (found := self.batches.popleft()).segments is not segments:
                    found.drop()
            else:
                found = _Ahead(segments, slots, shards)
            found.start()
            self._start()
        try:
            for request in found.requests or ():
                request.result()
        except BaseException:
            found.drop()
            # Else all that is announced is asked of a store that does not answer, before the process may end.
            self.forget()
            raise
        return found.found

    def forget(self) -> None:
        """Let go what was announced."""
        with self._locked():
            while self.batches:
                self.batches.popleft().drop()

    def _start(self) -> None:
        """Make the requests of the first batches, as many as the budget has room for."""
        room = self.budget
        for batch in self.batches:
            room -= batch.nbytes
            if room < 0:
                return
            batch.start()
