"""Counts in bounded memory, whatever there is to count: distributions, the largest, what occurs again.

Each is fed with the values of consecutive places, window by window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_MOST_COUNTS, _MOST_HASHES = 1 << 17, 3 << 19


class Tally:
    """How often each value came.

    Args:
        most: the largest value there can be. Where it is large, a few neighbours share a count.

    Attributes:
        step: how many neighbours share one.
        counts: int64; entry k counts the values from ``k * step`` on.
        total, sum, least, largest: of all values.
    """

    def __init__(self, most: int) -> None:
        self.step = 1 << max(0, (most // _MOST_COUNTS).bit_length())
        self.counts = np.zeros(most // self.step + 1, np.int64)
        self.total = self.sum = self.largest = 0
        self.least = most

    def add(self, values: NDArray[np.int64]) -> None:
        """Count values from 0 to ``most``."""
        if not len(values):
            return
        found = np.bincount(values // self.step if self.step > 1 else values)
        self.counts[: len(found)] += found
        self.total += len(values)
        self.sum += int(values.sum())
        self.least, self.largest = min(self.least, int(values.min())), max(self.largest, int(values.max()))

    @property
    def alike(self) -> bool:
        """Whether all values are the same."""
        return self.least >= self.largest

    @property
    def mean(self) -> float:
        """Of all values; 0 of none."""
        return self.sum / self.total if self.total else 0.0

    def quantile(self, share: float) -> int:
        """The least value that so large a share of all do not exceed; to within ``step``."""
        if not self.total:
            return 0
        at = int(np.searchsorted(np.cumsum(self.counts), max(1, share * self.total)))
        return min(max(at * self.step, self.least), self.largest)

    def histogram(self, bins: int, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Counts of values in about ``bins`` classes of equal width from ``low`` to ``high``, both included.

        Returns:
            edges, whole numbers, int64 [classes + 1]; counts, int64 [classes].
        """
        width = max(1, -(-(high + 1 - low) // bins))
        width = -(-width // self.step) * self.step
        low = low // self.step * self.step
        edges = np.arange(low, high + width + 1, width, dtype=np.int64)
        edges = edges[: int(np.searchsorted(edges, high, "right")) + 1]
        sums = np.concatenate([[0], np.cumsum(self.counts)])
        at = np.minimum(-(-edges // self.step), len(self.counts))
        return edges, np.diff(sums[at])

    def describe(self) -> dict[str, Any]:
        """Quantiles and the mean, as plain values."""
        if not self.total:
            return {"count": 0}
        quantiles = {f"p{round(100 * share)}": self.quantile(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)}
        return {"count": self.total, "min": self.least, **quantiles, "max": self.largest, "mean": round(self.mean, 3)}


class Top:
    """The places of the largest values, ties in the order of places; of truth values, the first that are true.

    Attributes:
        found: pairs of value and place, largest value first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.found: list[tuple[int, int]] = []

    def add(self, first: int, values: NDArray[Any]) -> None:
        """The values of the places from ``first`` on."""
        full = len(self.found) == self._most
        least = self.found[-1][0] if full else None
        at = np.arange(len(values)) if least is None else np.flatnonzero(values > least)
        if len(at) > self._most:
            at = at[np.argsort(-values[at].astype(np.int64), kind="stable")[: self._most]]
        self.found += [(int(values[i]), first + i) for i in at.tolist()]
        self.found.sort(key=lambda pair: (-pair[0], pair[1]))
        del self.found[self._most :]


class Repeat(NamedTuple):
    """Sequences of equal ids: how many times they occur, and the numbers of some among all of the shard."""

    times: int
    sequences: tuple[int, ...]


class Counted(NamedTuple):
    """Different hashes in ascending order: uint64; the first sequence of each, int64; how often each came, int64."""

    hashes: NDArray[np.uint64]
    numbers: NDArray[np.int64]
    times: NDArray[np.int64]

    def some(self, which: Any) -> Counted:
        """Those that ``which`` selects from an array of all: a slice gives views."""
        return Counted(self.hashes[which], self.numbers[which], self.times[which])


class HashSample:
    """Hashes of sequences and whose they are; copies are put together, and all thinned out, where room is short.

    What is kept depends on the hashes alone: those below a limit, which is halved again and again. So all copies of
    a sequence are kept, or none of them, here and in the sample of another shard with the same limit.

    Args:
        most: how many are kept at most, 2 or more; 24 bytes each.

    Attributes:
        bits: a hash is kept where its highest ``bits`` bits are 0.
    """

    def __init__(self, most: int = _MOST_HASHES) -> None:
        self._columns = Counted(np.empty(most, np.uint64), np.empty(most, np.int64), np.empty(most, np.int64))
        self._used = self.bits = 0

    @property
    def _held(self) -> Counted:
        """What is kept, a number and its times for each time that a hash was added since copies were put together."""
        return self._columns.some(slice(self._used))

    def add(self, hashes: NDArray[np.uint64], first: int) -> None:
        """The hashes of the sequences from number ``first`` on."""
        at = np.flatnonzero(self._kept(hashes))
        while len(at):
            room = len(self._columns.hashes) - self._used
            some, at = at[:room], at[room:]
            self._used += len(some)
            new = self._held.some(slice(self._used - len(some), None))
            new.hashes[:], new.numbers[:], new.times[:] = hashes[some], some + first, 1
            if len(at):
                self._keep(self.counted())
                while self._used > len(self._columns.hashes) * 3 // 4:
                    self.thin(self.bits + 1)
                at = at[self._kept(hashes[at])]

    def thin(self, bits: int) -> None:
        """Keep only the hashes whose highest ``bits`` bits are 0."""
        if bits > self.bits:
            self.bits = bits
            self._keep(self._held.some(self._kept(self._held.hashes)))

    def _keep(self, counted: Counted) -> None:
        self._used = len(counted.hashes)
        held = self._held
        held.hashes[:], held.numbers[:], held.times[:] = counted

    def _kept(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = hashes <= np.uint64((1 << 64 - self.bits) - 1)
        return kept

    def counted(self) -> Counted:
        """The different hashes that are kept."""
        hashes, numbers, times = held = self._held.some(np.argsort(self._held.hashes, kind="stable"))
        if not len(hashes):
            return held
        begins = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
        # The order is stable and numbers ascend among equal hashes: the first is the least.
        return Counted(hashes[begins], numbers[begins], np.add.reduceat(times, begins))

    def repeated(self, most: int, places: int = 4) -> tuple[int, list[Repeat]]:
        """How many kept sequences repeat another, and the ``most`` that occur most often."""
        counted, held = self.counted(), self._held
        again = np.flatnonzero(counted.times > 1)
        groups = []
        for i in again[np.argsort(-counted.times[again], kind="stable")[:most]].tolist():
            numbers = np.sort(held.numbers[held.hashes == counted.hashes[i]])
            groups.append(Repeat(int(counted.times[i]), tuple(numbers[:places].tolist())))
        return int(counted.times.sum()) - len(counted.hashes), groups
