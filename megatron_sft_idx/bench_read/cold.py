"""A shard out of the page cache, as far as the system lets go of it."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable

import numpy as np

from megatron_sft_idx import _native
from megatron_sft_idx.storage import drop_cached

__all__ = ["cached_nbytes", "drop_cache"]


def drop_cache(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Ask the system to forget what it holds of files. Pages that some process maps stay; so does all of tmpfs."""
    for path in paths:
        # What is not on the disk yet is not forgotten; not every file system syncs.
        with open(path, "rb", buffering=0) as file, contextlib.suppress(OSError):
            os.fsync(file.fileno())
        drop_cached(path)


def cached_nbytes(paths: Iterable[str]) -> int | None:
    """Bytes of files that lie in the page cache; None where the system does not tell this user."""
    total = 0
    for path in paths:
        if os.stat(path).st_uid != os.geteuid() and not os.access(path, os.W_OK):
            return None
        with open(path, "rb", buffering=0) as file:
            if not (nbytes := os.fstat(file.fileno()).st_size):
                continue
            with mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ) as mapped:
                view = np.frombuffer(mapped, np.uint8)
                total += _native.resident_nbytes(view)
                del view
    return total
