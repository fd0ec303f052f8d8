"""Requests to object stores: results and errors of a transport, retries, and the threads that make requests.

A transport (``S3``, ``MultiStorage``) uses one library for one bucket. Each of its methods makes a single attempt and
raises a ``Failure``, whose text is a status or the name of an exception. A library's own message may quote request
headers and must not be passed on. Threads can share a transport, processes cannot.
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

# The metadata key for the xxh3_128 of an object's bytes, in hex.
CHECKSUM = "xxh3-128"


class ObjectInfo(NamedTuple):
    """A store's information about an object.

    Attributes:
        key: key in its bucket.
        nbytes: size in bytes.
        etag: differs for other content; without quotes.
        checksum: the hex xxh3_128 that its writer recorded; None in a listing, or if another program wrote it.
    """

    key: str
    nbytes: int
    etag: str
    checksum: str | None = None


class Failure(Exception):  # noqa: N818 - it never reaches a caller
    """The reason why one attempt at a request failed. Its text is a status or the name of an exception."""


class TemporaryFailure(Failure):
    """No response, or an incomplete one. The same request may succeed later."""


class NoSuchObject(Failure):
    """The object or the bucket does not exist."""


class AccessDenied(Failure):
    """There are no credentials, or they are rejected or do not allow the request."""


class EtagMismatch(Failure):
    """The object does not have the requested etag, or exists although it should not."""


class RangePastEnd(Failure):
    """The requested range begins after the object's end."""


class RequestRefused(Failure):
    """Any other rejection. The same request would be rejected again."""


# ---- retries ----

_T = TypeVar("_T")
_SECONDS = "SFT_IDX_STORAGE_SECONDS"


class RetryPolicy(NamedTuple):
    """Limits on the retries of a request: delays double, with jitter, up to a time limit for all attempts together.

    Attributes:
        total_seconds: no attempt begins later than this after the first one.
        first_delay: maximum delay before the second attempt, in seconds.
        longest_delay: maximum delay between two attempts, in seconds.
    """

    total_seconds: float = 120.0
    first_delay: float = 0.1
    longest_delay: float = 5.0

    @classmethod
    def from_environment(cls) -> RetryPolicy:
        """Return the default policy, with ``total_seconds`` from ``SFT_IDX_STORAGE_SECONDS`` if that is set."""
        if not (text := os.environ.get(_SECONDS, "")):
            return cls()
        with contextlib.suppress(ValueError):
            if 0 <= (seconds := float(text)) <= 1e9:  # libraries reject much larger values
                return cls(total_seconds=seconds)
        raise FormatError(f"{_SECONDS}={text!r}: expected a number of seconds, such as 120")

    def retry(self, attempt: Callable[[], _T]) -> _T:
        """Call ``attempt`` until it does not raise ``TemporaryFailure``, and return its result.

        Raises:
            TemporaryFailure: the last attempt's, with the number of attempts and the time they took.
            Failure: any other failure, at once.
        """
        begin, delay, attempts = time.monotonic(), self.first_delay, 0
        while True:
            attempts += 1
            # The interpreter waits for this thread before it exits.
            if _ending and threading.current_thread() is not threading.main_thread():
                raise TemporaryFailure("the process is ending")
            try:
                return attempt()
            except TemporaryFailure as failure:
                spent = time.monotonic() - begin
                # Random, so that many readers do not retry at the same moment.
                pause = delay * random.uniform(0.5, 1)
                if spent + pause > self.total_seconds:
                    raise TemporaryFailure(
                        f"{attempts} attempts in {spent:.1f} s, the last one failed with: {failure}"
                    ) from None
            time.sleep(pause)
            delay = min(2 * delay, self.longest_delay)


# Number of parallel requests. A request to S3 takes 10 to 100 ms for any size, so a fast network needs many.
CONNECTIONS = 64

_pool: tuple[int, ThreadPoolExecutor] | None = None
_ending = False


def request_pool() -> ThreadPoolExecutor:
    """Return the thread pool for requests, one per process. Its tasks must not wait for other tasks in the pool."""
    global _pool  # noqa: PLW0603
    pool = _pool
    # The threads of a pool do not exist in a fork of its process.
    if pool is None or pool[0] != os.getpid():
        pool = _pool = os.getpid(), ThreadPoolExecutor(CONNECTIONS, "storage")
    return pool[1]


def _end() -> None:
    """Drop requests that have not begun. Otherwise the interpreter would wait for all their retries."""
    global _ending  # noqa: PLW0603
    _ending = True
    if _pool is not None and _pool[0] == os.getpid():
        _pool[1].shutdown(wait=False, cancel_futures=True)


# Python calls this before it waits for the pool's threads. Functions of atexit are called only after that.
if register := getattr(threading, "_register_atexit", None):
    register(_end)
