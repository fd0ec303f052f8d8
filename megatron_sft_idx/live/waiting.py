"""How live data are waited for, and how files are read that another process writes at the same time.

On a network file system a single look may find half a document, an outdated entry or a server error. Everything that
one side reads while the other side writes is read through ``patiently``.

Whether the other side is still at work can only be told by how long nothing has changed: ``Unchanged`` says that of
anything, and ``Settling`` decides by it whether a file is whole.

A wait is logged with who waits, for how long and for what. Times are those of a process's own monotonic clock. Clocks
of other machines and times of files are never compared with it.
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
    """A wait was given up because the consumer closes; nobody but the consumer's own thread sees it."""


def looks(
    say: Callable[[float], object],
    *,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    quiet: float = 0.0,
    longest: float = 1.0,
) -> Iterator[float]:
    """A wait: yields whenever it is time to look again, each time the seconds waited so far.

    Args:
        say: called with the seconds waited, once they are ``quiet`` and then once a minute.
        pause: sleeps so many seconds. Once it returns something true, ``Stopped`` is raised.
        clock: seconds since some moment.
        quiet: how long a wait may last before it is worth a line in the log.
        longest: the longest pause, in seconds; pauses grow up to it.
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
    """Somebody who waits, and how.

    Attributes:
        who: the name in log messages, such as ``rank 3``.
        pause: sleeps so many seconds; it returns something true once the waiter is to stop, as ``Event.wait`` does.
        say: takes log messages.
        clock: seconds since some moment.
    """

    who: str
    pause: Callable[[float], object] = time.sleep
    say: Callable[[str], object] = logger.info
    clock: Callable[[], float] = time.monotonic

    def looks(self, why: Callable[[], str]) -> Iterator[float]:
        """As the function ``looks``; the log says at once, and then once a minute, what is waited for: ``why()``."""
        return looks(
            lambda waited: self.say(f"{self.who} waits {waited:.0f} s for {why()}"), pause=self.pause, clock=self.clock
        )


class Stopwatch(Shown):
    """A clock that goes on only inside ``with``; several threads may read it.

    >>> seconds = iter([10.0, 13.0, 14.0])
    >>> watch = Stopwatch(clock=lambda: next(seconds))
    >>> with watch:
    ...     watch()
    3.0
    >>> watch()
    4.0

    Args:
        clock: seconds since some moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The seconds that are over, and since when it is going on, None where it stands: one value, for other threads.
        self._state: tuple[float, float | None] = (0.0, None)

    def _shown(self) -> str:
        return f"{self():.1f} s"

    def __call__(self) -> float:
        """The seconds that were counted so far."""
        seconds, since = self._state
        return seconds if since is None else seconds + self._clock() - since

    def __enter__(self) -> None:
        self._state = self._state[0], self._clock()

    def __exit__(self, *_: object) -> None:
        self._state = self(), None


# ---- how long something has been the same ----


class Unchanged(Shown):
    """How long something has been the same, as somebody sees it who looks now and then.

    >>> times = iter([0.0, 1.0, 4.0, 6.0, 9.0])
    >>> beat = Unchanged(clock=lambda: next(times))
    >>> [beat.seconds(number) for number in (7, 7, 8, 8)]
    [0.0, 3.0, 0.0, 3.0]

    Args:
        clock: seconds since some moment.
        longest_gap: the time between two looks that are further apart is not counted, because nobody looked.

    Attributes:
        sight: what it was at the last look; None before the first one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, longest_gap: float = math.inf) -> None:
        self._clock, self._longest_gap = clock, longest_gap
        self._since = self._looked = clock()
        self.sight: Any = None

    def _shown(self) -> str:
        return f"seen {self.sight!r}"

    def seconds(self, sight: Any) -> float:
        """For how long it has been ``sight``, in seconds: 0 where it was something else at the last look."""
        now = self._clock()
        if now - self._looked > self._longest_gap:
            self._since += now - self._looked
        self._looked = now
        if sight != self.sight:
            self.sight, self._since = sight, now
        return now - self._since


class Settling(Shown):
    """The newest file of a writer who does not say when it is whole: it is taken as whole once it no longer changes.

    The writer may only have paused. So the caller must compare the size of a file that was taken for this reason alone,
    until the writer shows that it is done with it, by the next file or by an end.

    >>> now = 0.0
    >>> newest = Settling(5.0, clock=lambda: now)
    >>> status = os.stat_result([0o644, 1, 1, 1, 0, 0, 700, 0, 0, 0])  # 700 bytes
    >>> newest.is_whole("a.jsonl", status)
    False
    >>> now = 5.0
    >>> newest.is_whole("a.jsonl", status), newest.is_whole("b.jsonl", status)
    (True, False)

    Args:
        settle: for how many seconds a file must have kept its size and its time.
        clock: seconds since some moment.

    Attributes:
        nbytes: the size of the file at the last look; 0 where it was not there.
    """

    def __init__(self, settle: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle, self._unchanged = settle, Unchanged(clock)
        self.nbytes = 0

    def _shown(self) -> str:
        return f"{self.nbytes:,} bytes, whole after {self._settle} s without a change"

    def is_whole(self, name: str, status: os.stat_result | None) -> bool:
        """Take note of a file's status, None where it is not there any more; returns whether it is whole by now."""
        self.nbytes = 0 if status is None else status.st_size
        sight = (name, None if status is None else (status.st_size, status.st_mtime_ns))
        return self._unchanged.seconds(sight) >= self._settle

    def seconds(self) -> float:
        """For how long it has been the file of the last look, with its size and time then."""
        return self._unchanged.seconds(self._unchanged.sight)


# ---- looking at what others write ----

# Errors that a network file system may return for a while, for example while its server is replaced.
PASSING_ERRORS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO, errno.EAGAIN, errno.EBUSY}
)
# A failure that lasts for so long, and for so many looks, is an error.
_PATIENCE_SECONDS, _LEAST_LOOKS = 30.0, 3


class UnsettledError(FormatError):
    """What was found may be half written. The next look may find it whole."""


def patiently(path: str, look: Callable[[], _T]) -> _T:
    """Return ``look()``, and call it again where it fails in a way that may pass.

    A file counts as missing only if a second look confirms it. ``UnsettledError`` and ``PASSING_ERRORS`` are errors
    only after 30 seconds and at least three looks.

    Args:
        path: what is looked at, for messages.
        look: called once or more.

    Raises:
        SFTIndexError: one of ``PASSING_ERRORS`` lasted; the message has the path and the errno.
        UnsettledError: it lasted.
        OSError: any other error, such as FileNotFoundError.
    """
    last: UnsettledError | OSError | None = None

    def warn(waited: float) -> None:
        logger.warning("%s: failing for %.0f s, trying again: %s", path, waited, last)

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
        f"{last.filename or path}: {last.strerror} ({name}, errno {last.errno}), {failures} times in"
        f" {waited:.0f} s; check the file system, then run the same command again"
    ) from last


def status_of(path: str) -> os.stat_result | None:
    """The status of a file, which is looked at ``patiently``; None where it is not there."""
    try:
        return patiently(path, lambda: os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def listed(folder: str) -> list[str]:
    """The names in a folder, sorted; none where there is no such folder. Looks ``patiently``."""
    try:
        return sorted(patiently(folder, lambda: os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError):
        return []
