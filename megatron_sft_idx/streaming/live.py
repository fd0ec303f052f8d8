"""What a live catalog is to its consumers, whatever its items are stored as."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Indexed", "LiveLimits", "LiveShards", "OpenPacks", "Stopped", "Waiter"]


class Stopped(Exception):  # noqa: N818
    """A wait was given up because the consumer closes; nobody but the consumer's own thread sees it."""


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@dataclass(frozen=True)
class Waiter:
    """Who waits.

    Attributes:
        who: such as ``rank 3``, for the log.
        pause: sleeps so many seconds and returns False, or True as soon as the waiter is to stop; an event's ``wait``.
        speaks: False for those of several workers of one rank that leave the log to another.
    """

    who: str
    pause: Callable[[float], bool] = _sleep
    speaks: bool = True

    def pause_or_stop(self, seconds: float) -> None:
        """Sleep so many seconds; Stopped as soon as the waiter is to stop."""
        if self.pause(seconds):
            raise Stopped


@dataclass(frozen=True)
class LiveLimits:
    """What every shard of a catalog keeps to, known before the first one is there.

    Attributes:
        capacity: most token positions of a pack.
        most_sequences: most sequences of a pack.
        sequence_multiple: each sequence rounded up to this still fits the capacity.
        pad_id: the tokenizer's, None where unknown.
        max_ahead_shards: most shards that are published and not complete; None where the producer never waits.
        needs_acks: whether the producer waits for acknowledgements, or frees by them.
    """

    capacity: int
    most_sequences: int
    sequence_multiple: int = 1
    pad_id: int | None = None
    max_ahead_shards: int | None = None
    needs_acks: bool = False


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


@runtime_checkable
class Indexed(Protocol):
    """``OpenPacks`` that are all there: the packs of several such shards are found in one call.

    Attributes:
        index: offsets of sequences and of tokens by pack, starts of sequences, and how many tokens there are.
    """

    index: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32], int]


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

    def wait(self, number: int, waiter: Waiter, uncommitted: Callable[[], int] = lambda: 0) -> bool:
        """Wait until shard ``number`` is published: True; or until it is known that it never will be: False.

        Args:
            number: of the shard.
            waiter: who waits.
            uncommitted: asked where there is something to wait for: how many shards before this one the consumer has
                not acknowledged, for which a producer may be waiting in its turn.

        Raises:
            SFTIndexError: it will not come, or not in time; the message says which and why.
            Stopped: the waiter is to stop.
        """
        ...

    def numbers(self) -> list[int]:
        """The shards that are there now, ascending."""
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
