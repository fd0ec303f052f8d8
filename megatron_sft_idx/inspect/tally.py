"""Statistics in bounded memory: a shard may have a billion sequences, and a laptop must be able to inspect it.

Each class here gets the values of consecutive packs or sequences, window by window, and keeps none of the windows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_MAX_COUNTS, _MAX_HASHES = 1 << 17, 3 << 19


class Tally:
    """How often each value occurred.

    Args:
        max_value: the largest possible value. If it is large, several neighbouring values share a count.

    Attributes:
        step: number of neighbouring values that share a count.
        counts: int64; entry k counts the values from ``k * step`` on.
        total, sum, least, largest: number, sum, minimum and maximum of all values.
    """

    def __init__(self, max_value: int) -> None:
        self.step = 1 << max(0, (max_value // _MAX_COUNTS).bit_length())
        self.counts = np.zeros(max_value // self.step + 1, np.int64)
        self.total = self.sum = self.largest = 0
        self.least = max_value

    def add(self, values: NDArray[np.int64]) -> None:
        """Count values from 0 to ``max_value``, int64 [values]."""
        if not len(values):
            return
        counts = np.bincount(values // self.step if self.step > 1 else values)
        self.counts[: len(counts)] += counts
        self.total += len(values)
        self.sum += int(values.sum())
        self.least, self.largest = min(self.least, int(values.min())), max(self.largest, int(values.max()))

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same; True if there are none."""
        return self.least >= self.largest

    @property
    def mean(self) -> float:
        """The mean of all values; 0 if there are none."""
        return self.sum / self.total if self.total else 0.0

    def quantile(self, share: float) -> int:
        """Return the smallest value that at least ``share`` of all values do not exceed, exact to ``step``."""
        if not self.total:
            return 0
        at = int(np.searchsorted(np.cumsum(self.counts), max(1, share * self.total)))
        return min(max(at * self.step, self.least), self.largest)

    def histogram(self, bins: int, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return counts of values in about ``bins`` classes of equal width from ``low`` to ``high``, both included.

        Returns:
            edges, whole numbers, int64 [classes + 1]; counts, int64 [classes].
        """
        width = max(1, -(-(high + 1 - low) // bins))
        width = -(-width // self.step) * self.step
        low = low // self.step * self.step
        edges = np.arange(low, high + width + 1, width, dtype=np.int64)
        edges = edges[: int(np.searchsorted(edges, high, "right")) + 1]
        return edges, self._counts_between(edges)

    def logarithmic_histogram(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return counts of values in classes from the smallest to the largest value, which must be at least 1.

        The largest value of each class is about 1.41 times that of the class before, so two classes double it.

        Returns:
            edges, whole numbers, int64 [classes + 1]; counts, int64 [classes].
        """
        end = self.largest + 1
        num_classes = max(1, math.ceil(2 * math.log2(end / self.least)))
        edges = np.rint(end / 2 ** (np.arange(num_classes, -1, -1) / 2)).astype(np.int64)
        edges = -(-edges // self.step) * self.step
        edges = np.unique(np.maximum(edges, self.least))
        edges[0] = self.least
        return edges, self._counts_between(edges)

    def _counts_between(self, edges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return counts between edges. All edges except the first must be multiples of ``step``."""
        sums = np.concatenate([[0], np.cumsum(self.counts)])
        at = np.minimum(-(-edges // self.step), len(self.counts))
        at[0] = edges[0] // self.step
        return np.diff(sums[at])

    def describe(self) -> dict[str, Any]:
        """Return quantiles and the mean, as plain values."""
        if not self.total:
            return {"count": 0}
        quantiles = {f"p{round(100 * share)}": self.quantile(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)}
        return {"count": self.total, "min": self.least, **quantiles, "max": self.largest, "mean": round(self.mean, 3)}


class LargestValues:
    """The largest values, with the numbers of their packs or sequences; for booleans, the first true ones.

    Args:
        max_pairs: maximum number to keep.

    Attributes:
        pairs: value and number, largest value first, equal values in the order of numbers.
    """

    def __init__(self, max_pairs: int) -> None:
        self._max_pairs = max_pairs
        self.pairs: list[tuple[int, int]] = []

    def add(self, first: int, values: NDArray[Any]) -> None:
        """Add the values of the numbers from ``first`` on, [values]."""
        full = len(self.pairs) == self._max_pairs
        least = self.pairs[-1][0] if full else None
        at = np.arange(len(values)) if least is None else np.flatnonzero(values > least)
        if len(at) > self._max_pairs:
            at = at[np.argsort(-values[at].astype(np.int64), kind="stable")[: self._max_pairs]]
        self.pairs += [(int(values[i]), first + i) for i in at.tolist()]
        self.pairs.sort(key=lambda pair: (-pair[0], pair[1]))
        del self.pairs[self._max_pairs :]


class HashCounts(NamedTuple):
    """Hashes, uint64; for each the number of the first sequence with it, int64; and how often it occurred, int64."""

    hashes: NDArray[np.uint64]
    numbers: NDArray[np.int64]
    times: NDArray[np.int64]


class HashSample:
    """A sample of sequences by their hashes, which allows counting the copies of a sequence.

    A hash is kept if it is below a limit, which is halved when there are too many different hashes. So either all
    copies of a sequence are in the sample or none; the same holds for another shard with the same limit.

    Args:
        max_hashes: maximum number to keep, at least 2; 24 bytes each, and twice as much while they are merged.

    Attributes:
        bits: a hash is kept if its highest ``bits`` bits are 0.
    """

    def __init__(self, max_hashes: int = _MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._parts: list[HashCounts] = []
        self.bits = 0

    def add(self, hashes: NDArray[np.uint64], first: int) -> None:
        """Add the hashes of the sequences from number ``first`` on, uint64 [sequences]."""
        at = np.flatnonzero(self._below_limit(hashes))
        self._parts.append(HashCounts(hashes[at], at + first, np.ones(len(at), np.int64)))
        if sum(len(part.hashes) for part in self._parts) > self._max_hashes:
            while len(self.merged().hashes) > self._max_hashes * 3 // 4:
                self.thin(self.bits + 1)

    def thin(self, bits: int) -> None:
        """Keep only the hashes whose highest ``bits`` bits are 0."""
        self.bits = max(bits, self.bits)
        counted = self.merged()
        kept = self._below_limit(counted.hashes)
        self._parts = [HashCounts(counted.hashes[kept], counted.numbers[kept], counted.times[kept])]

    def _below_limit(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        is_below: NDArray[np.bool_] = hashes <= np.uint64((1 << 64 - self.bits) - 1)
        return is_below

    def merged(self) -> HashCounts:
        """Return the kept hashes, each once, ascending. The sample keeps them in this form from here on."""
        none = np.empty(0, np.int64)
        parts = [HashCounts(np.empty(0, np.uint64), none, none), *self._parts]
        hashes, numbers, times = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        unique, first, of = np.unique(hashes, return_index=True, return_inverse=True)
        # Numbers ascend among equal hashes, so the first is the smallest. Counts below 2^53 are exact.
        merged = HashCounts(unique, numbers[first], np.bincount(of, times, len(unique)).astype(np.int64))
        self._parts = [merged]
        return merged

    def most_repeated(self, max_hashes: int) -> list[tuple[int, int]]:
        """Return the most frequent repeated hashes: (3, 17) is sequence 17 with three copies."""
        counted = self.merged()
        again = np.flatnonzero(counted.times > 1)
        most = again[np.argsort(-counted.times[again], kind="stable")[:max_hashes]]
        return list(zip(counted.times[most].tolist(), counted.numbers[most].tolist(), strict=True))
