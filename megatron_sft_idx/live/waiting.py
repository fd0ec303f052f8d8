"""Wait for live data, and read files that another process is writing at the same time.

On a network file system, a single read may find an incomplete document, an outdated entry or a server error. Everything
that one side reads while the other side writes is read through ``patiently``.

Whether the other side is still working can only be inferred from how long nothing has changed. ``Unchanged`` measures
that, and ``Settling`` uses it to decide whether a file is complete.

The log of a wait has who waits, for how long and for what. Times are from a process's own monotonic clock. They are
never compared with clocks of other machines or times of files.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.lines import Shown, get_logger, shown_by_fields

logger = get_logger("megatron_sft_idx.live")

_T = TypeVar("_T")

# ---- waiting ----


class Stopped(Exception):  # noqa: N818
    """A wait was ended because the consumer closes. Only the consumer's own thread sees this."""


def looks(
    say: Callable[[float], object],
    *,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    quiet: float = 0.0,
    longest: float = 1.0,
) -> Iterator[float]:
    """Wait: yield each time the condition should be checked again, with the seconds waited so far.

    Args:
        say: called with the seconds waited, once they reach ``quiet`` and then once a minute.
        pause: sleeps for this many seconds. When it returns a true value, ``Stopped`` is raised.
        clock: seconds since any fixed time.
        quiet: how long a wait may last before it is logged.
        longest: the longest pause in seconds; pauses grow up to it.
    """
    begin, seconds, next_line = clock(), 0.05, quiet
    while True:
        waited = clock() - begin
        yield waited
        if waited >= next_line:
            say(waited)
            next_line = waited + 60.0
        if pause(seconds):
            raise Stopped
        seconds = min(2 * seconds, longest)


@shown_by_fields
@dataclass(frozen=True)
class Waiter:
    """How to wait: the name in log messages, and functions for pausing, logging and the time.

    Attributes:
        who: the name in log messages, such as ``rank 3``.
        pause: sleeps for this many seconds. Like ``Event.wait``, it returns a true value when the waiter must stop.
        say: takes log messages.
        clock: seconds since any fixed time.
    """

    who: str
    pause: Callable[[float], object] = time.sleep
    say: Callable[[str], object] = logger.info
    clock: Callable[[], float] = time.monotonic

    def looks(self, why: Callable[[], str]) -> Iterator[float]:
        """Wait like the function ``looks``. The log has the reason ``why()`` at once, and then once a minute."""
        return looks(
            lambda waited: self.say(f"{self.who} waits {waited:.0f} s for {why()}"), pause=self.pause, clock=self.clock
        )


class Stopwatch(Shown):
    """A clock that runs only inside ``with``. Several threads can read it.

    >>> seconds = iter([10.0, 13.0, 14.0])
    >>> watch = Stopwatch(clock=lambda: next(seconds))
    >>> with watch:
    ...     watch()
    3.0
    >>> watch()
    4.0

    Args:
        clock: seconds since any fixed time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The finished seconds, and the start time while it is running or None: one value, for other threads.
        self._state: tuple[float, float | None] = (0.0, None)

    def _shown(self) -> str:
        return f"{self():.1f} s"

    def __call__(self) -> float:
        """Return the seconds counted so far."""
        seconds, since = self._state
        return seconds if since is None else seconds + self._clock() - since

    def __enter__(self) -> None:
        self._state = self._state[0], self._clock()

    def __exit__(self, *_: object) -> None:
        self._state = self(), None


# ---- how long something has been unchanged ----


class Unchanged(Shown):
    """How long something has been unchanged, from the view of a process that checks from time to time.

    >>> times = iter([0.0, 1.0, 4.0, 6.0, 9.0])
    >>> beat = Unchanged(clock=lambda: next(times))
    >>> [beat.seconds(number) for number in (7, 7, 8, 8)]
    [0.0, 3.0, 0.0, 3.0]

    Args:
        clock: seconds since any fixed time.
        longest_gap: a longer time between two checks is not counted, because nothing was checked.

    Attributes:
        sight: the value at the last check; None before the first one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, longest_gap: float = math.inf) -> None:
        self._clock, self._longest_gap = clock, longest_gap
        self._since = self._looked = clock()
        self.sight: Any = None

    def _shown(self) -> str:
        return f"seen {self.sight!r}"

    def seconds(self, sight: Any) -> float:
        """Return for how many seconds it has been ``sight``: 0 if it was different at the last check."""
        now = self._clock()
        if now - self._looked > self._longest_gap:
            self._since += now - self._looked
        self._looked = now
        if sight != self.sight:
            self.sight, self._since = sight, now
        return now - self._since


class Settling(Shown):
    """Decides when the newest file of a writer without an end marker is complete: when it no longer changes.

    The writer may only have paused. So the caller must check the size of a file that was taken for this reason only,
    until the next file or an end shows that the writer is done with it.

    >>> now = 0.0
    >>> newest = Settling(5.0, clock=lambda: now)
    >>> status = os.stat_result([0o644, 1, 1, 1, 0, 0, 700, 0, 0, 0])  # 700 bytes
    >>> newest.is_whole("a.jsonl", status)
    False
    >>> now = 5.0
    >>> newest.is_whole("a.jsonl", status), newest.is_whole("b.jsonl", status)
    (True, False)

    Args:
        settle: number of seconds for which a file must have kept its size and its time.
        clock: seconds since any fixed time.

    Attributes:
        nbytes: the size of the file at the last check; 0 if it did not exist.
    """

    def __init__(self, settle: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle, self._unchanged = settle, Unchanged(clock)
        self.nbytes = 0

    def _shown(self) -> str:
        return f"{self.nbytes:,} bytes, complete after {self._settle} s without a change"

    def is_whole(self, name: str, status: os.stat_result | None) -> bool:
        """Record a file's status, None if it no longer exists. Return whether it is complete now."""
        self.nbytes = 0 if status is None else status.st_size
        sight = (name, None if status is None else (status.st_size, status.st_mtime_ns))
        return self._unchanged.seconds(sight) >= self._settle

    def seconds(self) -> float:
        """Return for how many seconds the file has had the size and time of the last check."""
        return self._unchanged.seconds(self._unchanged.sight)


# ---- reading files written by others ----

# Errors that a network file system may return temporarily, for example while its server is replaced.
PASSING_ERRORS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO, errno.EAGAIN, errno.EBUSY}
)
# A failure that lasts for this long, and for this many attempts, is an error.
_PATIENCE_SECONDS, _LEAST_LOOKS = 30.0, 3


class UnsettledError(FormatError):
    """The content may be incomplete. The next attempt may find it complete."""


def patiently(path: str, look: Callable[[], _T]) -> _T:
    """Return ``look()``, and retry if it fails in a way that may be temporary.

    A file counts as missing only if a second attempt confirms it. ``UnsettledError`` and ``PASSING_ERRORS`` are errors
    only after 30 seconds and at least three attempts.

    Args:
        path: the path, for messages.
        look: called once or more.

    Raises:
        SFTIndexError: one of ``PASSING_ERRORS`` persisted; the message has the path and the errno.
        UnsettledError: it persisted.
        OSError: any other error, such as FileNotFoundError.
    """
    last: UnsettledError | OSError | None = None

    def warn(waited: float) -> None:
        logger.warning("%s: reading has failed for %.0f s, trying again: %s", path, waited, last)

    waits = looks(warn, pause=time.sleep, clock=time.monotonic, quiet=1.0)
    for failures, waited in enumerate(waits):
        if last is not None and failures >= _LEAST_LOOKS and waited >= _PATIENCE_SECONDS:
            break
        try:
            try:
                return look()
            except (FileNotFoundError, NotADirectoryError):
                return look()
        except UnsettledError as error:
            last = error
        except OSError as error:
            if error.errno not in PASSING_ERRORS:
                raise
            last = error
    if isinstance(last, UnsettledError):
        raise last
    assert isinstance(last, OSError)
    name = errno.errorcode.get(last.errno or 0, "unknown error")
    raise SFTIndexError(
        f"{last.filename or path}: {last.strerror} ({name}, errno {last.errno}), {failures} attempts in {waited:.0f}"
        " s; check the file system, then run the same command again"
    ) from last


def status_of(path: str) -> os.stat_result | None:
    """Return the status of a file, read through ``patiently``; None if it does not exist."""
    try:
        return patiently(path, lambda: os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def listed(folder: str) -> list[str]:
    """Return the sorted names in a folder, read through ``patiently``; empty if the folder does not exist."""
    try:
        return sorted(patiently(folder, lambda: os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError):
        return []
