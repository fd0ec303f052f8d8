"""Requests to object stores: what a transport gives and raises, how often a request is retried, and by which threads.

A transport (``S3``, ``MultiStorage``) is what one library can do with one bucket. Each of its methods makes a single
attempt, and raises a ``Failure``, whose text is a status or the name of an exception. A library's own message may quote
request headers and must not be passed on. Threads may share a transport, processes may not.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from megatron_sft_idx.errors import FormatError

Chunks = Iterable["bytes | memoryview"]

# Under this name an object's metadata holds the xxh3_128 of its bytes, in hex.
CHECKSUM = "xxh3-128"


class ObjectInfo(NamedTuple):
    """What a store tells of an object.

    Attributes:
        key: inside its bucket.
        nbytes: its size.
        etag: another one for other content; without quotes.
        checksum: the hex xxh3_128 that its writer recorded; None in a listing, or if another program wrote it.
    """

    key: str
    nbytes: int
    etag: str
    checksum: str | None = None


class Failure(Exception):  # noqa: N818 - it never reaches a caller
    """Why one attempt at a request failed; its text is a status or the name of an exception."""


class TemporaryFailure(Failure):
    """No answer, or a part of one: the same request may succeed later."""


class NoSuchObject(Failure):
    """There is no such object, or no such bucket."""


class AccessDenied(Failure):
    """There are no credentials, or they are not accepted or do not allow the request."""


class EtagMismatch(Failure):
    """The object does not have the requested etag, or there is one although none should be."""


class RangePastEnd(Failure):
    """The requested range begins behind the object's end."""


class RequestRefused(Failure):
    """Any other refusal: the same request would get it again."""


# ---- retries ----

_T = TypeVar("_T")
_SECONDS = "SFT_IDX_STORAGE_SECONDS"


class RetryPolicy(NamedTuple):
    """How long a request is retried: delays double, with jitter, up to a limit for all attempts together.

    Attributes:
        total_seconds: no attempt begins later than this after the first one.
        first_delay: most seconds before the second attempt.
        longest_delay: most seconds between two attempts.
    """

    total_seconds: float = 120.0
    first_delay: float = 0.1
    longest_delay: float = 5.0

    @classmethod
    def from_environment(cls) -> RetryPolicy:
        """The default policy, with the ``total_seconds`` of ``SFT_IDX_STORAGE_SECONDS`` if that is set."""
        if not (text := os.environ.get(_SECONDS, "")):
            return cls()
        with contextlib.suppress(ValueError):
            if 0 <= (seconds := float(text)) <= 1e9:  # libraries refuse much more
                return cls(total_seconds=seconds)
        raise FormatError(f"{_SECONDS}={text!r}: expected seconds, such as 120")

    def retry(self, attempt: Callable[[], _T]) -> _T:
        """Call ``attempt`` until it does not raise ``TemporaryFailure``, and return what it returns.

        Raises:
            TemporaryFailure: of the last attempt, with the number of attempts and the time they took.
            Failure: any other kind, at once.
        """
        begin, delay, attempts = time.monotonic(), self.first_delay, 0
        while True:
            attempts += 1
            # The interpreter waits for this thread before it exits.
            if _ending and threading.current_thread() is not threading.main_thread():
                raise TemporaryFailure("the process ends")
            try:
                return attempt()
            except TemporaryFailure as failure:
                spent = time.monotonic() - begin
                # Random, so that many readers do not come back at the same moment.
                pause = delay * random.uniform(0.5, 1)
                if spent + pause > self.total_seconds:
                    raise TemporaryFailure(f"{attempts} attempts in {spent:.1f} s, the last one: {failure}") from None
            time.sleep(pause)
            delay = min(2 * delay, self.longest_delay)


# Requests at once. One to S3 takes 10 to 100 ms whatever its size, so a fast network needs many.
CONNECTIONS = 64

_pool: tuple[int, ThreadPoolExecutor] | None = None
_ending = False


def request_pool() -> ThreadPoolExecutor:
    """The threads that make requests, one pool a process. What runs in it may not wait for more that runs in it."""
    global _pool  # noqa: PLW0603
    pool = _pool
    # The threads of a pool do not exist in a fork of its process.
    if pool is None or pool[0] != os.getpid():
        pool = _pool = os.getpid(), ThreadPoolExecutor(CONNECTIONS, "storage")
    return pool[1]


def _end() -> None:
    """Drop requests that have not begun: the interpreter would wait until all retries of all of them are over."""
    global _ending  # noqa: PLW0603
    _ending = True
    if _pool is not None and _pool[0] == os.getpid():
        _pool[1].shutdown(wait=False, cancel_futures=True)


# Python calls this before it waits for the pool's threads, and functions of atexit only afterwards.
if register := getattr(threading, "_register_atexit", None):
    register(_end)
