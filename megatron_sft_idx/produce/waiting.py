"""A wait of the producer: its state says so, one line at once, then one a minute."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_sft_idx.live import State
from megatron_sft_idx.produce.keeper import StateKeeper

__all__ = ["Waiting"]

_FIRST_PAUSE = 0.02
_SECONDS_BETWEEN_LINES = 60.0
# Shorter waits are the normal course of things and nothing to tell.
_SECONDS_BEFORE_A_STATE = 0.5


class Waiting:
    """Waits of one kind.

    Args:
        keeper: of the state.
        state: while it waits.
        log: takes lines for people.
        longest_pause: seconds between two looks, once it has waited for a while.
        pause: sleeps so many seconds.
        clock: seconds since some moment.
    """

    def __init__(
        self,
        keeper: StateKeeper,
        state: State,
        log: Callable[[str], None],
        *,
        longest_pause: float,
        pause: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keeper, self._state, self._log, self._pause, self._clock = keeper, state, log, pause, clock
        self._longest_pause = longest_pause
        self._since: float | None = None
        self._told_at: float | None = None
        self._seconds = _FIRST_PAUSE

    def go_on(self, why: Callable[[], str]) -> None:
        """Sleep a little, longer each time; ``why`` is asked when there is something to say."""
        now = self._clock()
        if self._since is None:
            self._since, self._seconds = now, _FIRST_PAUSE
        if self._told_at is None:
            due = now - self._since >= _SECONDS_BEFORE_A_STATE
        else:
            due = now - self._told_at >= _SECONDS_BETWEEN_LINES
        if due:
            if self._told_at is None:
                self._keeper.update(state=self._state)
            self._told_at = now
            self._log(f"{self._state} for {now - self._since:.0f} s: {why()}")
        self._pause(self._seconds)
        self._seconds = min(2 * self._seconds, self._longest_pause)

    def over(self) -> None:
        """What was waited for is there."""
        if self._told_at is not None:
            self._keeper.update(state="running")
        self._since = self._told_at = None
