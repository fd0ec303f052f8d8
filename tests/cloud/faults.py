"""Counts of faults caused to the store or to a running copy, with their outcomes; printed with the test results."""

from __future__ import annotations

from collections import Counter

import pytest

__all__ = ["COUNTS", "Faults"]


class Faults:
    """Counts of faults and their outcomes."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, fault: str, end: str) -> None:
        """Count a ``fault`` with its outcome ``end``. Tests call this after they have checked the result."""
        self._counts[fault, end] += 1

    def lines(self) -> list[str]:
        """Return one line per fault, and the total."""
        lines = [f"fault: {fault}: {number} {end}" for (fault, end), number in sorted(self._counts.items())]
        total = sum(self._counts.values())
        return [*lines, f"faults: {total}, each looked at afterwards: a whole shard, or none"] if total else []


COUNTS = pytest.StashKey[Faults]()
