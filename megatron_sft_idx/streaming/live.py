"""What a live catalog is to its consumers, whatever its items are stored as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["LiveLimits", "LiveShards", "OpenPacks", "Stopped", "Waiter"]


class Stopped(Exception):  # noqa: N818
    """A wait was given up because the consumer closes; nobody but the consumer's own thread sees it."""


@dataclass(frozen=True)
class Waiter:
    """Who waits.

    Attributes:
        who: such as ``rank 3``, for the log.
        stopped: asked at least once a second during a wait; where it says True the wait raises ``Stopped``.
        speaks: False for those of several workers of one rank that leave the log to another.
    """

    who: str
    stopped: Callable[[], bool] = lambda: False
    speaks: bool = True


@dataclass(frozen=True)
class LiveLimits:
    """What every shard of a catalog keeps to, known before the first one is there.

    Attributes:
        capacity: most token positions of a pack.
        most_sequences: most sequences of a pack.
        sequence_multiple: each sequence rounded up to this still fits the capacity.
        pad_id: the tokenizer's, None where unknown.
        max_ahead_shards: shards that the producer publishes beyond those that are complete; None where it never waits.
        frees: whether it removes shards that are complete.
    """

    capacity: int
    most_sequences: int
    sequence_multiple: int = 1
    pad_id: int | None = None
    max_ahead_shards: int | None = None
    frees: bool = False


class OpenPacks(Protocol):
    """One shard, open. Used by one thread.

    Attributes:
        num_packs: in it.
        num_tokens: in all of them; None where that is not known without reading everything.
    """

    num_packs: int
    num_tokens: int | None

    def segments(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Where the sequences of some packs lie in ``arrays()``.

        Returns:
            CSR offsets of the sequences int64 [packs + 1]; the first token and the tokens of each, int64 [sequences].
        """
        ...

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Tokens (uint16 or int32) and label-aligned loss mask (uint8 or float32).

        They hold at least the packs that ``segments`` was last asked for: a shard may be read as it is needed.
        """
        ...


class LiveShards(Protocol):
    """A folder of numbered shards, some of which are not there yet. It pickles, for worker processes.

    Attributes:
        folder: its path.
    """

    folder: str

    def limits(self, waiter: Waiter) -> LiveLimits:
        """What its shards keep to; waits for a producer that says so."""
        ...

    def end(self) -> int | None:
        """How many shards there are in all, once that is known."""
        ...

    def wait(self, number: int, waiter: Waiter) -> bool:
        """Wait until shard ``number`` is published: True; or until it is known that it never will be: False.

        Raises:
            SFTIndexError: it will not come, or not in time; the message says which and why.
            Stopped: the waiter stopped.
        """
        ...

    def count(self, number: int) -> int | None:
        """Packs in a shard; None where it is not there: not yet, or not any more."""
        ...

    def open(self, number: int) -> OpenPacks:
        """Open a shard that is there, and ask the kernel for its pages."""
        ...

    def name(self, number: int) -> str:
        """What the log calls a shard, such as ``shard 8``."""
        ...

    def committed(self) -> None:
        """Called after an acknowledgement was written: the place for markers that are derived from these."""
        ...
