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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.storage import Runs, announce, read_runs
from megatron_sft_idx.storage.remote import RemoteArray
from megatron_sft_idx.storage.remote.store import threads
from megatron_sft_idx.training.sources import Arrays, Segments

__all__ = ["BUDGET_NBYTES", "Fetcher", "Placed", "Ranges", "advise", "coalesce", "in_memory", "place"]

# ---- in maps, or read for one batch ----


_Arrays = tuple[NDArray[Any], ...]


class Placed(NamedTuple):
    """The sequences of ``Segments`` in arrays.

    Attributes:
        arrays: tokens, label-aligned loss mask, and columns that have a row a token, together.
        slots: int32 [segments], in which of these each sequence lies.
        starts: int64 [segments], its first token there.
    """

    arrays: list[_Arrays]
    slots: NDArray[np.int32]
    starts: NDArray[np.int64]


def in_memory(shards: Sequence[Arrays], slots: NDArray[np.int32], segments: Segments) -> Placed | None:
    """These sequences in the arrays of their shards; None where those are not all in memory or mapped.

    Args:
        shards: tokens, loss mask and the columns of tokens of each shard that is used.
        slots: int32 [segments], which of them each sequence lies in.
        segments: the sequences.
    """
    mapped = _mapped(shards)
    return Placed(mapped, slots, segments.starts) if len(mapped) == len(shards) else None


def place(shards: Sequence[Arrays], slots: NDArray[np.int32], segments: Segments) -> Placed:
    """These sequences in memory, read where they are not there; arguments as of ``in_memory``.

    Raises:
        ValueError: a sequence that does not lie within its shard.
        FormatError: a shard is another one by now.
    """
    return in_memory(shards, slots, segments) or _read(shards, slots, segments)


def advise(shards: Sequence[Arrays], slots: NDArray[np.int32], segments: Segments) -> None:
    """Have these sequences read from disk in the background; arguments as of ``in_memory``.

    Batches are announced in the order in which they will be read, and within one come tokens, then masks: as ``place``
    reads them.
    """
    if not shards:  # an empty batch
        return
    runs = Stretches.join(segments, slots)
    arrays, kinds = [array for column in zip(*shards, strict=True) for array in column], len(shards[0])
    slots = np.concatenate([runs.slots + kind * len(shards) for kind in range(kinds)])
    announce(Runs(arrays, slots, np.tile(runs.starts, kinds), np.tile(runs.counts, kinds)))


def _mapped(shards: Sequence[Arrays]) -> list[_Arrays]:
    return [arrays for arrays in shards if all(isinstance(array, np.ndarray) for array in arrays)]  # type: ignore[misc]


class Stretches(NamedTuple):
    """Sequences that lie behind one another in one shard, such as those of a stored pack, taken together.

    Attributes:
        slots: int32 [runs], which shard each run lies in.
        starts: int64 [runs], its first token there.
        counts: int64 [runs], its tokens.
        of: int64 [segments], the run of each sequence.
    """

    slots: NDArray[np.int32]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    of: NDArray[np.int64]

    @classmethod
    def join(cls, segments: Segments, slots: NDArray[np.int32]) -> Stretches:
        """The runs of sequences, whose shards are ``slots``."""
        starts, stops = segments.starts, segments.starts + segments.lengths
        begins = np.ones(len(starts), np.bool_)
        begins[1:] = (slots[1:] != slots[:-1]) | (starts[1:] != stops[:-1])
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(starts)) - 1
        return cls(slots[first], starts[first], stops[last] - starts[first], np.cumsum(begins) - 1)


def _read(shards: Sequence[Arrays], slots: NDArray[np.int32], segments: Segments) -> Placed:
    """Arrays for each dtype of masks, with the runs that have it end to end."""
    runs = Stretches.join(segments, slots)
    of_run = [shards[slot] for slot in runs.slots.tolist()]
    kinds = list(dict.fromkeys(arrays[1].dtype for arrays in shards))
    kind_of_run = np.array([kinds.index(arrays[1].dtype) for arrays in of_run], np.int32)
    placed, places = [], np.empty(len(of_run), np.int64)
    for kind in range(len(kinds)):
        mine = np.flatnonzero(kind_of_run == kind)
        starts, counts = runs.starts[mine], runs.counts[mine]
        places[mine] = np.cumsum(counts) - counts
        together, total = [], max(int(counts.sum()), 0)
        for arrays in zip(*(of_run[run] for run in mine.tolist()), strict=True):
            together.append(np.empty(total, arrays[0].dtype))
            read_runs(arrays, starts, counts, together[-1])
        placed.append(tuple(together))
    return Placed(placed, kind_of_run[runs.of], places[runs.of] + segments.starts - runs.starts[runs.of])


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
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    places: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """In all ranges."""
        return int((self.ends - self.begins).sum())


def coalesce(starts: NDArray[np.int64], lengths: NDArray[np.int64], gap: int = _GAP, most: int = _MOST) -> Ranges:
    """Few ranges that cover sequences, which may come in any order, repeat and overlap.

    Args:
        starts: int64 [sequences], first token of each.
        lengths: int64 [sequences], tokens of each.
        gap: sequences this many tokens apart or less share a range.
        most: tokens of a range; more only where one sequence, or several that overlap, are longer.
    """
    order = np.argsort(starts, kind="stable")
    begins: list[int] = []
    ends: list[int] = []
    owners = np.empty(len(starts), np.int64)
    for sequence, start, length in zip(order, starts[order].tolist(), lengths[order].tolist(), strict=True):
        end = start + length
        joins = begins and start - ends[-1] <= gap and (end - begins[-1] <= most or start < ends[-1])
        if joins:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(start)
            ends.append(end)
        owners[sequence] = len(begins) - 1
    first, last = np.array(begins, np.int64), np.array(ends, np.int64)
    bases = np.cumsum(last - first) - (last - first)
    return Ranges(first, last, starts - first[owners] + bases[owners])


class _Reading:
    """Ranges of one array on their way into memory."""

    def __init__(self, array: RemoteArray, ranges: Ranges) -> None:
        self.out: NDArray[Any] = np.empty(ranges.tokens, array.dtype)
        self._array, self._ranges = array, ranges
        self._left, self._lock = len(ranges.begins), Lock()

    def start(self) -> Iterator[Future[None]]:
        """Request them all."""
        place = 0
        for begin, end in zip(self._ranges.begins.tolist(), self._ranges.ends.tolist(), strict=True):
            yield threads().submit(self._read, begin, end, place)
            place += end - begin

    def _read(self, begin: int, end: int, place: int) -> None:
        self.out[place : place + end - begin] = self._array.fetch(begin, end)
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._array.confirm()


@dataclass(eq=False)
class _Batch:
    """What one batch needs.

    Attributes:
        segments: as they were planned.
        moved: the same ones, where they come to lie.
        arrays: what ``moved`` points into.
        readings: what fills the remote ones of them.
        requests: under way; None until they are made.
    """

    segments: Segments
    moved: Segments
    arrays: list[Arrays]
    readings: list[_Reading]
    requests: list[Future[None]] | None = None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(reading.out.nbytes for reading in self.readings)

    @classmethod
    def plan(cls, segments: Segments, slots: NDArray[np.int32], arrays: Sequence[Arrays]) -> _Batch:
        starts, readings = segments.starts.copy(), []
        found = list(arrays)  # the remote ones are replaced
        for shard, mine in enumerate(arrays):
            if not isinstance(mine[0], RemoteArray):
                continue
            here = np.flatnonzero(slots == shard)
            first, lengths = segments.starts[here], segments.lengths[here]
            if first.min() < 0 or lengths.min() < 0 or int((first + lengths).max()) > len(mine[0]):
                raise ValueError(f"sequences outside the {len(mine[0])} tokens of shard {shard}")
            ranges = coalesce(first, lengths)
            starts[here] = ranges.places
            begun = [_Reading(array, ranges) for array in mine if isinstance(array, RemoteArray)]
            found[shard] = tuple(reading.out for reading in begun)
            readings += begun
        return cls(segments, replace(segments, starts=starts), found, readings)

    def start(self) -> None:
        if self.requests is None:
            self.requests = [request for reading in self.readings for request in reading.start()]

    def wait(self) -> tuple[Segments, list[Arrays]]:
        self.start()
        try:
            for request in self.requests or ():
                request.result()
        except BaseException:
            self.drop()
            raise
        return self.moved, self.arrays

    def drop(self) -> None:
        for request in self.requests or ():
            request.cancel()


class _Line:
    """Batches of one process that were announced and not filled yet, in order."""

    def __init__(self) -> None:
        self.pid, self.lock = os.getpid(), Lock()
        self.batches: deque[_Batch] = deque()


class Fetcher:
    """Fetches what batches need of remote shards, in the order in which they are announced.

    Batches are filled in that order too: one that is asked for lets those go that were announced before it. What is
    fetched ahead never exceeds the budget; beside it lies the batch that is being filled.

    Args:
        budget: bytes that may be fetched ahead.
    """

    def __init__(self, budget: int = BUDGET_NBYTES) -> None:
        self.budget = budget
        self._made = _Line()

    def __reduce__(self) -> tuple[type[Fetcher], tuple[int]]:
        return Fetcher, (self.budget,)

    @property
    def _line(self) -> _Line:
        if self._made.pid != os.getpid():  # neither a lock nor requests survive a fork
            self._made = _Line()
        return self._made

    def announce(self, segments: Segments, slots: NDArray[np.int32], arrays: Sequence[Arrays]) -> None:
        """Fetch ahead what these segments need, when there is room; returns at once."""
        batch, line = _Batch.plan(segments, slots, arrays), self._line
        with line.lock:
            line.batches.append(batch)
            self._start(line)

    def gather(
        self, segments: Segments, slots: NDArray[np.int32], arrays: Sequence[Arrays]
    ) -> tuple[Segments, list[Arrays]]:
        """The segments as they lie in memory, and what they lie in; waits until all is there.

        Raises:
            FormatError: a shard was replaced since it was opened.
            StorageError: the store does not answer.
            ValueError: a sequence that reaches outside its shard.
        """
        line = self._line
        with line.lock:
            found = None
            if any(batch.segments is segments for batch in line.batches):
                while found is None:
                    batch = line.batches.popleft()
                    if batch.segments is segments:
                        found = batch
                    else:
                        batch.drop()
            else:
                found = _Batch.plan(segments, slots, arrays)
            found.start()
            self._start(line)
        try:
            return found.wait()
        except BaseException:
            # Else all that is announced is asked of a store that does not answer, before the process may end.
            self.forget()
            raise

    def forget(self) -> None:
        """Let go what was announced."""
        line = self._line
        with line.lock:
            while line.batches:
                line.batches.popleft().drop()

    def _start(self, line: _Line) -> None:
        """Make the requests of the first batches, as many as the budget has room for."""
        room = self.budget
        for batch in line.batches:
            room -= batch.nbytes
            if room < 0:
                return
            batch.start()
