"""Select the cases of a large matrix, and the number of examples of a property test, that ``make test`` runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import settings


def _parameters(item: Any) -> set[tuple[str, str]]:
    """Return name and value of each parameter of a test."""
    callspec = getattr(item, "callspec", None)
    return {(name, repr(value)) for name, value in callspec.params.items()} if callspec else set()


def sample(items: Sequence[Any], count: int) -> Iterator[Any]:
    """Yield `count` of `items`. Each has as many new parameter values as possible; a hash of the name breaks ties."""
    left = sorted(items, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
    parameters = {item.nodeid: _parameters(item) for item in left}
    seen = set[tuple[str, str]]()
    for _ in range(min(count, len(left))):
        best = max(left, key=lambda item: len(parameters[item.nodeid] - seen))
        left.remove(best)
        seen |= parameters[best.nodeid]
        yield best


def with_fewer_examples(whole: settings) -> settings:
    """Return settings with a tenth of the examples, at least five if there are that many."""
    return settings(whole, max_examples=max(min(whole.max_examples, 5), whole.max_examples // 10))
