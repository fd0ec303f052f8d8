"""What was done to the store or to a copy while it ran, and how that ended: counted, and printed with the results."""

from __future__ import annotations

from collections import Counter

import pytest

__all__ = ["COUNTS", "Faults"]


class Faults:
    """Counts of faults and their ends."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, fault: str, end: str) -> None:
        """``fault`` was met, and ``end`` is what came of it; called once the test has looked at what is left."""
        self._counts[fault, end] += 1

    def lines(self) -> list[str]:
        """One a fault, and the sum."""
        lines = [f"fault: {fault}: {number} {end}" for (fault, end), number in sorted(self._counts.items())]
        total = sum(self._counts.values())
        return [*lines, f"faults: {total}, each looked at afterwards: a whole shard, or none"] if total else []


COUNTS = pytest.StashKey[Faults]()
