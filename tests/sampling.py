"""Which cases of a large matrix ``make test`` runs, and how many examples of a property test."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import settings


def _parameters(item: Any) -> set[tuple[str, str]]:
    """Name and value of each parameter of a test."""
    callspec = getattr(item, "callspec", None)
    return {(name, repr(value)) for name, value in callspec.params.items()} if callspec else set()


def sample(items: Sequence[Any], count: int) -> Iterator[Any]:
    """Yield `count` of `items`: whichever has the most values that no earlier one has; else by a hash of its name."""
    left = sorted(items, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
    parameters = {item.nodeid: _parameters(item) for item in left}
    seen = set[tuple[str, str]]()
    for _ in range(min(count, len(left))):
        best = max(left, key=lambda item: len(parameters[item.nodeid] - seen))
        left.remove(best)
        seen |= parameters[best.nodeid]
        yield best


def with_fewer_examples(whole: settings) -> settings:
    """A tenth of the examples of a property test, but at least five, or all if it has fewer."""
    return settings(whole, max_examples=max(min(whole.max_examples, 5), whole.max_examples // 10))
