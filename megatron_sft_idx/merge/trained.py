"""Counting what is trained on in masks that come in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["TrainedCount"]


class TrainedCount:
    """Counts trained positions, and packs without one.

    Args:
        lengths: tokens of the packs, int64 arrays one after another; asked for as the masks reach them.

    Attributes:
        num_trained_tokens: positions above zero so far.
        num_masked_packs: packs that ended so far without any.
    """

    def __init__(self, lengths: Iterable[NDArray[np.int64]]) -> None:
        self._lengths = iter(lengths)
        self._ends = np.empty(0, np.int64)  # of packs that have not ended yet, as far as they are known
        self._position = 0
        self._trained = False  # whether the pack at the position has a trained token before it
        self.num_trained_tokens = 0
        self.num_masked_packs = 0

    def add(self, mask: NDArray[Any]) -> None:
        """Count the next masks; a piece may begin and end anywhere."""
        self.num_trained_tokens += int(np.count_nonzero(mask))
        while len(mask):
            if not len(self._ends):
                self._ends = self._position + np.cumsum(next(self._lengths))
            known = int(self._ends[-1]) - self._position
            self._count_packs(mask[:known])
            mask = mask[known:]

    def _count_packs(self, mask: NDArray[Any]) -> None:
        """``mask`` reaches no further than the known ends."""
        ended = int(np.searchsorted(self._ends, self._position + len(mask), side="right"))
        starts = np.append(0, self._ends[:ended] - self._position)
        trained = np.maximum.reduceat(mask, starts[starts < len(mask)]) > 0
        trained[0] |= self._trained
        self.num_masked_packs += ended - int(np.count_nonzero(trained[:ended]))
        self._trained = bool(trained[ended:].any())
        self._ends = self._ends[ended:]
        self._position += len(mask)
