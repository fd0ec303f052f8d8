"""How long work is watched: the layers above show it, this one only says how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

__all__ = ["Advance", "Watch", "unwatched"]

# Takes the units done since the last call.
Advance: TypeAlias = Callable[[int], None]
# Takes what is done, as a verb, and how many units there are.
Watch: TypeAlias = Callable[[str, int], AbstractContextManager[Advance]]


@contextmanager
def unwatched(_what: str, _total: int) -> Iterator[Advance]:
    """Nobody looks."""
    yield lambda _done: None
