"""Many requests at once: one pool of threads a process."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

__all__ = ["CONNECTIONS", "threads"]

# Requests under way at once. A request to S3 takes 10 to 100 ms whatever its size, so it takes many to fill a network.
CONNECTIONS = 64

_pool: tuple[int, ThreadPoolExecutor] | None = None


def threads() -> ThreadPoolExecutor:
    """The pool of this process; a fork makes its own, as threads stay behind in the parent.

    What runs in it must not wait for more that runs in it.
    """
    global _pool  # noqa: PLW0603
    pool = _pool
    if pool is None or pool[0] != os.getpid():
        pool = _pool = os.getpid(), ThreadPoolExecutor(CONNECTIONS, "storage")
    return pool[1]
