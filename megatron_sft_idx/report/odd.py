"""Packs that somebody should look at: the largest of their kind, and those of kinds that are rarely meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["First", "Odd", "Place", "Top", "counted"]


class Place(NamedTuple):
    """A pack, or a sequence in it, counted from 0, and what is said of it."""

    pack: int
    sequence: int | None
    note: str


@dataclass(frozen=True, slots=True)
class Odd:
    """One kind of odd packs.

    Attributes:
        kind: in a few words.
        count: of all there are; None for the largest of something.
        unit: what is counted, in the singular.
        places: the first few, or the largest.
        exact: whether all of the shard was looked at for it.
    """

    kind: str
    count: int | None
    unit: str
    places: Sequence[Place]
    exact: bool = True

    @property
    def counted(self) -> str:
        """``3 packs``, ``none``, or nothing where nothing is counted."""
        if not self.count:
            return "" if self.count is None else "none"
        return counted(self.count, self.unit)


def counted(count: int, unit: str, plural: str | None = None) -> str:
    """``1 pack``, ``2,000 packs``, ``2 copies``."""
    if count == 1:
        return f"1 {unit}"
    return f"{count:,} {plural or (unit[:-1] + 'ies' if unit.endswith('y') else unit + 's')}"


class Top:
    """The places of the largest values, ties in the order of places.

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


class First:
    """How many places there are where something holds, and the first of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 0
        self.found: list[int] = []

    def add(self, first: int, holds: NDArray[np.bool_]) -> None:
        """Whether it does at the places from ``first`` on."""
        self.count += int(np.count_nonzero(holds))
        if len(self.found) < self._most:
            self.found += (first + np.flatnonzero(holds)[: self._most - len(self.found)]).tolist()
