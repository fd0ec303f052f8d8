"""Sequences that occur more than once, found by hashes of their ids."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Counted", "HashSample", "Repeat"]

_MOST = 3 << 19


class Repeat(NamedTuple):
    """Sequences of equal ids: how many times they occur, and the numbers of some among all of the shard."""

    times: int
    sequences: tuple[int, ...]


class Counted(NamedTuple):
    """Different hashes in ascending order: uint64; the first sequence of each, int64; how often each came, int64."""

    hashes: NDArray[np.uint64]
    first: NDArray[np.int64]
    times: NDArray[np.int64]


class HashSample:
    """Hashes of sequences and whose they are; copies are put together, and all thinned out, where room is short.

    What is kept depends on the hashes alone: those below a limit, which is halved again and again. So all copies of
    a sequence are kept, or none of them, here and in the sample of another shard with the same limit.

    Args:
        most: how many are kept at most, 2 or more; 24 bytes each.

    Attributes:
        bits: a hash is kept where its highest ``bits`` bits are 0.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._hashes = np.empty(most, np.uint64)
        self._numbers = np.empty(most, np.int64)
        self._times = np.empty(most, np.int64)
        self._used = self.bits = 0

    def add(self, hashes: NDArray[np.uint64], first: int) -> None:
        """The hashes of the sequences from number ``first`` on."""
        at = np.flatnonzero(self._kept(hashes))
        while len(at):
            room = len(self._hashes) - self._used
            some, at = at[:room], at[room:]
            new = slice(self._used, self._used + len(some))
            self._hashes[new], self._numbers[new], self._times[new] = hashes[some], some + first, 1
            self._used += len(some)
            if len(at):
                self._make_room()
                at = at[self._kept(hashes[at])]

    def _make_room(self) -> None:
        self._keep(self.counted())
        while self._used > len(self._hashes) * 3 // 4:
            self.thin(self.bits + 1)

    def thin(self, bits: int) -> None:
        """Keep only the hashes whose highest ``bits`` bits are 0."""
        if bits > self.bits:
            self.bits = bits
            used = slice(self._used)
            kept = self._kept(self._hashes[used])
            self._keep(Counted(self._hashes[used][kept], self._numbers[used][kept], self._times[used][kept]))

    def _keep(self, counted: Counted) -> None:
        self._used = len(counted.hashes)
        used = slice(self._used)
        self._hashes[used], self._numbers[used], self._times[used] = counted

    def _kept(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = hashes <= np.uint64((1 << 64 - self.bits) - 1)
        return kept

    def counted(self) -> Counted:
        """The different hashes that are kept."""
        used = slice(self._used)
        order = np.argsort(self._hashes[used], kind="stable")
        hashes = self._hashes[used][order]
        if not self._used:
            return Counted(hashes, self._numbers[used], self._times[used])
        begins = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
        hashes = hashes[begins]
        times = np.add.reduceat(self._times[used][order], begins)
        # The order is stable and numbers ascend among equal hashes: the first is the least.
        return Counted(hashes, self._numbers[used][order[begins]], times)

    def repeated(self, most: int, places: int = 4) -> tuple[int, list[Repeat]]:
        """How many kept sequences repeat another, and the ``most`` that occur most often."""
        counted = self.counted()
        again = np.flatnonzero(counted.times > 1)
        top = again[np.argsort(-counted.times[again], kind="stable")[:most]].tolist()
        groups = []
        for i in top:
            found = self._numbers[: self._used][self._hashes[: self._used] == counted.hashes[i]]
            groups.append(Repeat(int(counted.times[i]), tuple(np.sort(found)[:places].tolist())))
        return int(counted.times.sum()) - len(counted.hashes), groups
