"""Many requests at once: one pool of threads a process."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["CONNECTIONS", "is_ending", "threads"]

# Requests under way at once. A request to S3 takes 10 to 100 ms whatever its size, so it takes many to fill a network.
CONNECTIONS = 64

_pool: tuple[int, ThreadPoolExecutor] | None = None
_ending = False


def threads() -> ThreadPoolExecutor:
    """The pool of this process; a fork makes its own, as threads stay behind in the parent.

    What runs in it must not wait for more that runs in it.
    """
    global _pool  # noqa: PLW0603
    pool = _pool
    if pool is None or pool[0] != os.getpid():
        pool = _pool = os.getpid(), ThreadPoolExecutor(CONNECTIONS, "storage")
    return pool[1]


def is_ending() -> bool:
    """Whether the interpreter waits for this thread before it exits, so that nothing is worth another attempt."""
    return _ending and threading.current_thread() is not threading.main_thread()


def _end() -> None:
    """Drop what is queued: else the interpreter exits once each request has been tried for as long as they may be."""
    global _ending  # noqa: PLW0603
    _ending = True
    if _pool is not None and _pool[0] == os.getpid():
        _pool[1].shutdown(wait=False, cancel_futures=True)


# What atexit calls comes after the interpreter has waited for the pool; this comes before, in Python 3.9 and later.
if register := getattr(threading, "_register_atexit", None):
    register(_end)
