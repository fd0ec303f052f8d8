"""Sequences of remote shards, fetched a batch at a time.

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

from megatron_sft_idx.storage.remote import RemoteArray
from megatron_sft_idx.storage.remote.store import threads
from megatron_sft_idx.training.segments import Pair, Segments

__all__ = ["BUDGET_NBYTES", "Fetcher", "Ranges", "coalesce"]

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
    arrays: list[Pair]
    readings: list[_Reading]
    requests: list[Future[None]] | None = None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(reading.out.nbytes for reading in self.readings)

    @classmethod
    def plan(cls, segments: Segments, slots: NDArray[np.int32], arrays: Sequence[Pair]) -> _Batch:
        starts, readings = segments.starts.copy(), []
        found = list(arrays)  # the remote ones are replaced
        for shard, pair in enumerate(arrays):
            if not isinstance(pair[0], RemoteArray):
                continue
            here = np.flatnonzero(slots == shard)
            first, lengths = segments.starts[here], segments.lengths[here]
            if first.min() < 0 or lengths.min() < 0 or int((first + lengths).max()) > len(pair[0]):
                raise ValueError(f"sequences outside the {len(pair[0])} tokens of shard {shard}")
            ranges = coalesce(first, lengths)
            starts[here] = ranges.places
            tokens, loss = (_Reading(array, ranges) for array in pair if isinstance(array, RemoteArray))
            found[shard] = tokens.out, loss.out
            readings += [tokens, loss]
        return cls(segments, replace(segments, starts=starts), found, readings)

    def start(self) -> None:
        if self.requests is None:
            self.requests = [request for reading in self.readings for request in reading.start()]

    def wait(self) -> tuple[Segments, list[Pair]]:
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

    def announce(self, segments: Segments, slots: NDArray[np.int32], arrays: Sequence[Pair]) -> None:
        """Fetch ahead what these segments need, when there is room; returns at once."""
        batch, line = _Batch.plan(segments, slots, arrays), self._line
        with line.lock:
            line.batches.append(batch)
            self._start(line)

    def gather(
        self, segments: Segments, slots: NDArray[np.int32], arrays: Sequence[Pair]
    ) -> tuple[Segments, list[Pair]]:
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
