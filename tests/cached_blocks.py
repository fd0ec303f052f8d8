"""A file read through a cache of blocks, and threads that do it at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from megatron_sft_idx.storage import BlockCache, CachedArray, PreadArray

BLOCK = 4096
BYTES = np.random.default_rng(7).integers(0, 256, 40 * BLOCK + 123).astype(np.uint8)
PATIENCE_SECONDS = 60.0


def cached(path: str, room: int, **options: int) -> CachedArray:
    cache = BlockCache(room * BLOCK, block_nbytes=BLOCK, **options)
    return cache.array(PreadArray(path, BYTES.dtype, len(BYTES), 0), path, b"")


def announce(array: CachedArray, blocks: list[int], *, more: bool = False) -> None:
    begins = np.array(blocks, np.int64) * BLOCK
    files = np.full(len(blocks), array.file)
    array.cache.schedule(files, begins, np.minimum(begins + BLOCK, len(BYTES)), more=more)


def use(array: CachedArray, block: int) -> None:
    assert (array[block * BLOCK : (block + 1) * BLOCK] == BYTES[block * BLOCK : (block + 1) * BLOCK]).all()


def until(what: str, holds: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end, f"not within {PATIENCE_SECONDS} s: {what}"
        time.sleep(0.001)


def run(tasks: Sequence[Callable[[], None]]) -> None:
    """All at once, in threads; what goes wrong in one is raised."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
