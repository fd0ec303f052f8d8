"""Reading packs as training does, with time, faults and bytes of the disk counted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.bench_read.counters import Counters

__all__ = ["Epoch", "Order", "Reader", "Sample", "read_epoch"]

Order = Literal["shuffled", "sequential"]


class Reader(Protocol):
    """An open data set whose packs are copied out, as into a batch."""

    def schedule(self, packs: NDArray[np.int64]) -> None:
        """These packs are read next, in this order."""

    def read(self, pack: int) -> int:
        """Copy a pack out; returns its bytes."""

    def huge_nbytes(self) -> int:
        """Bytes of the data set that are mapped by huge pages."""

    def close(self) -> None:
        """Let go of files, maps and caches."""


@dataclass(frozen=True)
class Sample:
    """Which packs are read: every ``step``-th from ``start`` on, below ``stop``.

    Attributes:
        order: of both epochs.
        seed: of the shuffles.
    """

    start: int
    stop: int
    step: int = 1
    order: Order = "shuffled"
    seed: int = 0

    def __len__(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def first(self) -> NDArray[np.int64]:
        """Packs of the first epoch, int64."""
        return self._ordered(np.arange(self.start, self.stop, self.step, dtype=np.int64), 1)

    def again(self, packs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Packs that were read, for the second epoch: in another order where shuffled."""
        return self._ordered(np.sort(packs), 2)

    def _ordered(self, packs: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        if self.order == "sequential":
            return packs
        return np.random.default_rng([self.seed, epoch]).permutation(packs)


@dataclass(frozen=True)
class Epoch:
    """What one pass over the sample took.

    Attributes:
        packs: how many were read; fewer than the sample has where time ran out.
        seconds: in all.
        nbytes: of the packs.
        counters: faults, and bytes that were read from the disk.
        median_us: microseconds to read a pack, the median.
        p99_us: 99 of 100 packs took at most this long.
    """

    packs: int
    seconds: float
    nbytes: int
    counters: Counters
    median_us: float
    p99_us: float

    @property
    def rate(self) -> float:
        """Packs a second."""
        return self.packs / self.seconds

    @property
    def amplification(self) -> float | None:
        """Bytes read from the disk for each byte of a pack; None where they are not counted."""
        disk = self.counters.disk_nbytes
        return None if disk is None else disk / max(self.nbytes, 1)


def read_epoch(reader: Reader, packs: NDArray[np.int64], *, scheduled: bool, most_seconds: float) -> Epoch:
    """Read packs in the order given until they, or the time, are at their end; at least one.

    Args:
        reader: what they are read by.
        packs: int64 [packs], at least one.
        scheduled: tell the reader what comes next.
        most_seconds: when no further pack is begun.
    """
    times = np.empty(len(packs))
    nbytes = done = 0
    clock = time.perf_counter
    before = Counters.now()
    begin = last = clock()
    if scheduled:
        reader.schedule(packs)
    for pack in packs.tolist():
        nbytes += reader.read(pack)
        now = clock()
        times[done] = now - last
        done, last = done + 1, now
        if now - begin > most_seconds:
            break
    counters = Counters.now().since(before)
    median, p99 = np.percentile(times[:done] * 1e6, [50, 99]).tolist()
    return Epoch(done, last - begin, nbytes, counters, median, p99)
