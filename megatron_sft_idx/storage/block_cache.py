"""Blocks of files in the memory of this process, read by pread ahead of their use: the backend ``process``.

Where files cannot be mapped, or mapping is slow, every read waits for the file system. A cache that is told which
packs come next (``schedule``) reads them in the background, inside a budget that is exact: all blocks lie in one piece
of memory of that size, those under way included, and what is handed out are copies.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.storage.block_memory import BlockMemory
from megatron_sft_idx.storage.block_plan import block_keys, key_of
from megatron_sft_idx.storage.local import CopiedArray

__all__ = ["BLOCK_NBYTES", "BlockCache", "CachedArray"]

logger = logging.getLogger(__name__)

# Large enough that the file system's cost of a request is little beside its bytes, small enough that packs read at
# random do not bring much along that is not theirs.
BLOCK_NBYTES = 64 << 10
# Blocks that are read at a time: a disk behind a network answers several requests in the time of one.
READERS = 4
# Forks between the first process and this one: cheaper to compare than the process id is to ask for.
_forks = 0


def _count_fork() -> None:
    global _forks  # noqa: PLW0603
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class BlockCache:
    """Memory for blocks of some files, one budget for all of them.

    Threads may share one. A forked process, and one that it is pickled to, begins with an empty cache.

    Args:
        nbytes: the budget.
        block_nbytes: of a block; less where the budget is.
        huge_pages: ask for huge pages for the blocks.
        readers: threads that read ahead; with none, what is announced only says which blocks are kept.
    """

    def __init__(
        self, nbytes: int, *, block_nbytes: int = BLOCK_NBYTES, huge_pages: bool = False, readers: int = READERS
    ) -> None:
        self._made: dict[int, BlockMemory] = {}  # one entry, by the process it is of
        self.nbytes, self._huge_pages, self._readers = nbytes, huge_pages, readers
        self.block_nbytes = min(block_nbytes, nbytes)
        self._sources: dict[int, CopiedArray] = {}
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._count = itertools.count()

    def __del__(self) -> None:
        for made in self._made.values():
            made.stop()

    def __reduce__(self) -> tuple[Any, ...]:
        return _renewed, (self.nbytes, self.block_nbytes, self._huge_pages, self._readers)

    @property
    def _memory(self) -> BlockMemory:
        made = self._made.get(_forks)
        return self._make() if made is None else made

    def _make(self) -> BlockMemory:
        """What this process reads into: neither a lock nor threads survive a fork."""
        slots, forks = self.nbytes // self.block_nbytes, _forks
        made = self._made.setdefault(forks, BlockMemory(self._sources, slots, self.block_nbytes, self._huge_pages))
        for other in set(self._made) - {forks}:
            self._made.pop(other, None)
        return made

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All there is room for, ``nbytes`` at most; of which pages are taken as blocks come."""
        return self._memory.bytes

    @property
    def reads(self) -> int:
        """Blocks that were read so far in this process, in the background or not."""
        return self._memory.reads

    def array(self, source: CopiedArray, path: str, content: bytes) -> CachedArray:
        """An array whose slices are copied out of blocks.

        Args:
            source: what the blocks are read from.
            path: of its file.
            content: where this and the path are those of an array before, its blocks serve this one too.
        """
        number = self._numbers.setdefault((path, content), next(self._count))
        self._sources[number] = source
        return CachedArray(self, source, number)

    def read(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        """Bytes of a file from ``offset`` on, which are there, into ``out``.

        Raises:
            CorruptShardError: the file ends before (rule F2).
            OSError: it cannot be read; with its path.
        """
        memory, size = self._memory, self.block_nbytes
        done, total = 0, len(out)
        with memory.changed:
            while done < total:
                block, within = divmod(offset + done, size)
                count = min(size - within, total - done)
                begin = memory.need(key_of(file, block))
                if begin is None:
                    # All room is for what is read before this comes again: it would do nobody good there.
                    memory.changed.release()
                    try:
                        self._sources[file].read_bytes(offset + done, out[done : done + count])
                    finally:
                        memory.changed.acquire()
                else:
                    begin += within
                    out[done : done + count] = memory.bytes[begin : begin + count]
                done += count

    def schedule(
        self, files: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64], *, more: bool = False
    ) -> None:
        """Say which bytes will be read, in order; returns at once, and they are read in the background.

        Args:
            files: int64 [ranges], the number of each range's file.
            begins: int64 [ranges], its first byte.
            ends: int64 [ranges], where it ends.
            more: after what was announced before and is not used yet, rather than instead of it.
        """
        memory = self._memory
        keys = block_keys(files, begins, ends, self.block_nbytes)
        with memory.changed:
            memory.take_plan(keys, more)
            missing = self._readers - memory.threads if len(keys) else 0
            memory.threads += missing
            memory.room.notify_all()
        for _ in range(missing):
            try:
                threading.Thread(target=memory.read_ahead, name="blocks", daemon=True).start()
            except RuntimeError as error:  # the limit of this user or container
                logger.warning("blocks are read when they are needed, not ahead: %s", error)
                with memory.changed:
                    memory.threads -= 1

    def withdraw(self) -> None:
        """Nothing of what was announced will be read."""
        none = np.zeros(0, np.int64)
        self.schedule(none, none, none)

    def forget(self, file: int, begin: int, end: int) -> None:
        """Let go of the blocks that bytes ``[begin, end)`` of a file lie in."""
        memory = self._memory
        with memory.changed:
            memory.forget(key_of(file, begin // self.block_nbytes), key_of(file, -(-end // self.block_nbytes)))


def _renewed(nbytes: int, block_nbytes: int, huge_pages: bool, readers: int) -> BlockCache:
    return BlockCache(nbytes, block_nbytes=block_nbytes, huge_pages=huge_pages, readers=readers)


class CachedArray(CopiedArray):
    """An array that is read through a cache: every slice is a fresh copy. ``BlockCache.array`` makes one.

    Attributes:
        cache: that it is read through.
        source: that the cache reads.
        file: its number there.
    """

    def __init__(self, cache: BlockCache, source: CopiedArray, file: int) -> None:
        super().__init__(source.dtype, len(source))
        self.cache, self.source, self.file = cache, source, file

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See ``CopiedArray``; errors as of ``BlockCache.read``."""
        self.cache.read(self.file, offset, out)
