"""The producer's state on disk: rewritten when it changes, and every two seconds to say that the producer lives."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from megatron_sft_idx.live import Catalog, ProducerState, State, looks

__all__ = ["StateKeeper", "ended"]

_SECONDS_BETWEEN_BEATS = 2.0
# Shorter waits are the normal course of things and nothing to tell.
_SECONDS_BEFORE_A_STATE = 0.5


def ended(state: ProducerState) -> ProducerState:
    """The state of a producer that has nothing left to do."""
    return dataclasses.replace(state, state="stopped", reason="the input has ended")


class StateKeeper:
    """Keeps ``_producer.json``. A context manager: a thread beats inside, and leaving it by an exception says so.

    Args:
        catalog: held by this producer.
        state: to begin with.
    """

    def __init__(self, catalog: Catalog, state: ProducerState) -> None:
        self._catalog = catalog
        self._state = state
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def state(self) -> ProducerState:
        """What is on disk."""
        return self._state

    def update(self, **changes: Any) -> None:
        """Replace fields of the state; they are on disk when this returns.

        Raises:
            OSError: the disk says no.
        """
        self._write(**changes)

    def __enter__(self) -> StateKeeper:
        self._write(state="running", reason=None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_beating()
        if error is None:
            return
        # A full disk must not hide what went wrong; consumers then notice that the producer is silent.
        with contextlib.suppress(OSError):
            if isinstance(error, Exception):
                self._write(state="failed", reason=str(error) or type(error).__name__)
            else:
                self._write(state="stopped", reason="interrupted")

    def waits(
        self, state: State, log: Callable[[str], None], why: Callable[[], str], *, longest: float = 1.0
    ) -> Generator[None, None, None]:
        """One wait: comes back each time it is time to look again; close it when it is over.

        Args:
            state: while it lasts, unless it is so short that there is nothing to tell.
            log: takes a line when the state is set, then one a minute.
            why: what is waited for, for the line.
            longest: seconds between two looks, once it has lasted for a while.
        """

        def say(waited: float) -> None:
            if self._state.state != state:
                self.update(state=state)
            log(f"{state} for {waited:.0f} s: {why()}")

        try:
            for _ in looks(say, quiet=_SECONDS_BEFORE_A_STATE, longest=longest):
                yield
        finally:
            if self._state.state == state:
                self.update(state="running")

    def end(self) -> None:
        """Say that the producer has nothing left to do; nothing is written after this, unless something fails."""
        self._stop_beating()
        self._state = ended(self._state)
        self.update()

    def _stop_beating(self) -> None:
        self._over.set()
        self._thread.join()

    def _write(self, **changes: Any) -> None:
        with self._lock:
            self._state = dataclasses.replace(self._state, beat=self._state.beat + 1, **changes)
            self._catalog.write_producer(self._state)

    def _beat(self) -> None:
        while not self._over.wait(_SECONDS_BETWEEN_BEATS):
            # A disk that is full now may have room at the next beat; work that needs it meets the error by itself.
            with contextlib.suppress(OSError):
                self._write()
