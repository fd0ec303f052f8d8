"""How every wait goes: pauses that grow, and a line at once, then one a minute."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Patience"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_SECONDS_BETWEEN_LINES = 60.0


class Patience:
    """One wait, which begins now.

    Args:
        pause: sleeps so many seconds; may raise to end the wait.
        clock: seconds since some moment.
    """

    def __init__(
        self, pause: Callable[[float], object] = time.sleep, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pause, self._clock = pause, clock
        self._begin = clock()
        self._next_line = 0.0
        self._seconds = _FIRST_PAUSE

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return self._clock() - self._begin

    def line_is_due(self) -> bool:
        """Whether it is time to tell people of the wait; whoever asks tells."""
        waited = self.waited
        if waited < self._next_line:
            return False
        self._next_line = waited + _SECONDS_BETWEEN_LINES
        return True

    def pause(self) -> None:
        """Sleep, longer each time."""
        self._pause(self._seconds)
        self._seconds = min(2 * self._seconds, _LONGEST_PAUSE)
