"""Sequences that occur more than once, found by hashes of their ids."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["HashSample", "Repeat"]

_MOST = 1 << 22


class Repeat(NamedTuple):
    """Sequences of equal ids: how many times they occur, and the numbers of the first few among all of the shard."""

    times: int
    sequences: tuple[int, ...]


class HashSample:
    """Hashes of sequences and whose they are, thinned out where they become too many.

    What is kept depends on the hashes alone: those below a limit, which is halved whenever room is short. So all
    copies of a sequence are kept, or none of them, here and in the sample of another shard with the same limit.

    Args:
        most: how many are kept at most; 16 bytes each.

    Attributes:
        seen: how many were added.
        bits: a hash is kept where its highest ``bits`` bits are 0.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._hashes = np.empty(most, np.uint64)
        self._numbers = np.empty(most, np.int64)
        self._used = 0
        self.seen = self.bits = 0

    def __len__(self) -> int:
        return self._used

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """Those that were kept, in the order they came."""
        return self._hashes[: self._used]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Numbers of their sequences."""
        return self._numbers[: self._used]

    @property
    def share(self) -> float:
        """Of all different sequences, those that are kept; an expectation."""
        return 0.5**self.bits

    def add(self, hashes: NDArray[np.uint64], first: int) -> None:
        """The hashes of the sequences from number ``first`` on."""
        self.seen += len(hashes)
        at = np.flatnonzero(self._kept(hashes)) if self.bits else np.arange(len(hashes))
        while len(at):
            room = len(self._hashes) - self._used
            some, at = at[:room], at[room:]
            new = slice(self._used, self._used + len(some))
            self._hashes[new], self._numbers[new] = hashes[some], some + first
            self._used += len(some)
            if len(at):
                self.thin(self.bits + 1)
                at = at[self._kept(hashes[at])]

    def thin(self, bits: int) -> None:
        """Keep only the hashes whose highest ``bits`` bits are 0."""
        if bits <= self.bits:
            return
        self.bits = bits
        kept = self._kept(self.hashes)
        used = int(np.count_nonzero(kept))
        self._hashes[:used], self._numbers[:used] = self.hashes[kept], self.numbers[kept]
        self._used = used

    def _kept(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = hashes >> np.uint64(64 - self.bits) == 0
        return kept

    def repeated(self, most: int, places: int = 4) -> tuple[int, list[Repeat]]:
        """How many kept sequences repeat an earlier one, and the ``most`` that occur most often."""
        ordered = np.sort(self.hashes)
        begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(ordered) else self.numbers
        extra = len(ordered) - len(begins)
        if not extra:
            return 0, []
        counts = np.diff(begins, append=len(ordered))
        top = np.argsort(-counts, kind="stable")[:most]
        groups = [(ordered[begins[i]], int(counts[i])) for i in top.tolist() if counts[i] > 1]
        del ordered, begins, counts
        found = ((count, self.numbers[np.flatnonzero(self.hashes == value)[:places]]) for value, count in groups)
        return extra, [Repeat(count, tuple(numbers.tolist())) for count, numbers in found]
