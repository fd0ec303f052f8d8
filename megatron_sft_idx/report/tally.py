"""Distributions of whole numbers, in memory that depends neither on how many there are nor on how large."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Profile", "Tally"]

_MOST_COUNTS = 1 << 17


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


class Profile:
    """How a value is distributed by place, the places being put together in columns.

    Args:
        places: how many there are.
        columns: of how many at most.
        most: the largest value there can be.

    Attributes:
        width: places of a column; the last may have fewer.
        sums: of the values, by column.
        largest: of the values, by column.
    """

    _CLASSES = 256

    def __init__(self, places: int, columns: int, most: int) -> None:
        self.width = max(1, -(-places // columns))
        columns = -(-places // self.width)
        self.sums, self.largest = np.zeros(columns), np.zeros(columns)
        self._size = max(1, -(-(most + 1) // self._CLASSES))
        self._counts = np.zeros((columns, self._CLASSES), np.int64)

    def add(self, first: int, values: NDArray[np.int64]) -> None:
        """The values of the places from ``first`` on, each from 0 to ``most``."""
        column = np.arange(first, first + len(values)) // self.width
        starts = np.flatnonzero(np.diff(column, prepend=-1))
        at = column[starts]
        self.sums[at] += np.add.reduceat(values, starts)
        self.largest[at] = np.maximum(self.largest[at], np.maximum.reduceat(values, starts))
        np.add.at(self._counts, (column, values // self._size), 1)

    @property
    def means(self) -> NDArray[np.float64]:
        """By column."""
        means: NDArray[np.float64] = self.sums / np.maximum(self._counts.sum(axis=1), 1)
        return means

    def quantile(self, share: float) -> NDArray[np.float64]:
        """The value that so large a share of a column do not exceed, to within a 256th of ``most``, by column."""
        sums = np.cumsum(self._counts, axis=1)
        at = np.argmax(sums >= np.maximum(share * sums[:, -1:], 1), axis=1)
        values: NDArray[np.float64] = np.minimum((at + 0.5) * self._size, self.largest)
        return values
