"""Blocks of files in the memory of this process, read by pread ahead of their use: the backend ``process``.

Where files cannot be mapped, or mapping is slow, every read waits for the file system. A cache that is told which
packs come next (``schedule``) reads them in the background, inside a budget that is exact: all blocks lie in one piece
of memory of that size, those under way included, and what is handed out are copies.

What gives way is the block whose next use is farthest off, as Belady showed to be best, and first of all those whose
use nobody announced, the least recently used before the others. A block that is read ahead never displaces one that is
used before it. Where nothing is announced this is a plain LRU cache.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.storage.block_plan import NEVER, UsePlan, block_keys, block_of, file_of, key_of
from megatron_sft_idx.storage.local import Source

__all__ = ["BLOCK_NBYTES", "BlockCache", "CachedArray"]

# Large enough that the file system's cost of a request is little beside its bytes, small enough that packs read at
# random do not bring much along that is not theirs.
BLOCK_NBYTES = 64 << 10
# Blocks that are read at a time: a disk behind a network answers several requests in the time of one.
READERS = 4
# Uses that are looked at before readers get their turn again.
_STEPS = 4096
# A thread that nobody could tell of the end looks by itself.
_PATIENCE_SECONDS = 1.0

# Forks between the first process and this one: cheaper to compare than the process id is to ask for.
_forks = 0


def _count_fork() -> None:
    global _forks  # noqa: PLW0603
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


@dataclass(slots=True, eq=False)
class _Block:
    """One block in memory, or on its way there.

    Attributes:
        key: which block of which file.
        slot: where it lies.
        due: its next use in the plan; NEVER where none is announced.
        ready: whether it is there.
        error: why it could not be read in the background; whoever comes for it raises this.
    """

    key: int
    slot: int
    due: int
    ready: bool = False
    error: BaseException | None = None


class _Memory:
    """The blocks that one process holds, and the threads that fetch more; every method is called under ``changed``.

    Args:
        sources: the files, by number; they may become more.
        slots: blocks that there is room for.
        block_nbytes: of each; those at the end of a file may have less in them.
        huge_pages: ask for huge pages.
    """

    def __init__(self, sources: Mapping[int, Source], slots: int, block_nbytes: int, huge_pages: bool) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.sources, self.slots, self.block_nbytes = sources, slots, block_nbytes
        # Private: what mmap gives by itself would be shared with forked processes. Untouched pages take no memory.
        self.map = mmap.mmap(-1, slots * block_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge_pages:
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.free = list(range(slots - 1, -1, -1))
        self.blocks: dict[int, _Block] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()  # ready, no use announced; least recently used first
        self.due: list[tuple[int, int]] = []  # heap of (-use, block), farthest first; may hold what is so no more
        self.plan = UsePlan(np.zeros(0, np.int64))
        self.used = 0  # uses of the plan that are over
        self.looked = 0  # uses that have been looked at for reading ahead
        self.swept = 0  # ``used`` when past uses were last looked for
        self.threads, self.waiting, self.stopped = 0, 0, False
        self.reads = 0

    # ---- what is known of coming uses ----

    def take_plan(self, keys: NDArray[np.int64]) -> None:
        """Go by these uses from now on."""
        self.plan = UsePlan(keys)
        self.used = self.looked = self.swept = 0
        self.blocks = {key: block for key, block in self.blocks.items() if block.error is None}
        for block, use in zip(self.blocks.values(), self.plan.first_uses(list(self.blocks)), strict=True):
            block.due = use
        self._sort()

    def _sort(self) -> None:
        """Sort the ready blocks by their next use anew."""
        ready = [block for block in self.blocks.values() if block.ready]
        self.due = [(-block.due, block.key) for block in ready if block.due != NEVER]
        heapq.heapify(self.due)
        known = [key for key in self.idle if key in self.blocks and self.blocks[key].due == NEVER]
        fresh = [block.key for block in ready if block.due == NEVER and block.key not in self.idle]
        self.idle = OrderedDict.fromkeys(known + fresh)

    def _sweep(self) -> bool:
        """Look for uses that were announced and skipped; False where there is no telling yet."""
        if self.used - self.swept < max(self.slots // 8, 1):
            return False
        self.swept = self.used
        for block in self.blocks.values():
            if block.due < self.used:
                block.due = self.plan.first_use(block.key, self.used)
        self._sort()
        return True

    def _touch(self, block: _Block) -> None:
        """A block is being used."""
        use = block.due
        if use == NEVER:
            self.idle.move_to_end(block.key)
        elif use < max(self.looked, self.used) + self.slots:
            # A use much farther off is still to come: somebody else reads here.
            self.used = max(self.used, use + 1)
            block.due = self.plan.next_use(use)
            self._settle(block)
            if self.waiting:
                self.changed.notify_all()

    def _settle(self, block: _Block) -> None:
        if block.due == NEVER:
            self.idle[block.key] = None
        else:
            heapq.heappush(self.due, (-block.due, block.key))

    # ---- room ----

    def _claim(self, key: int, due: int) -> _Block | None:
        """A place for a block that is used at ``due``; None where all there are serve sooner."""
        if self.free:
            slot = self.free.pop()
        elif self.idle:
            slot = self.blocks.pop(self.idle.popitem(last=False)[0]).slot
        elif (farthest := self._farthest()) is not None and farthest.due > due:
            heapq.heappop(self.due)
            slot = self.blocks.pop(farthest.key).slot
        else:
            return None
        block = self.blocks[key] = _Block(key, slot, due)
        return block

    def _farthest(self) -> _Block | None:
        while self.due:
            use, key = self.due[0]
            block = self.blocks.get(key)
            if block is not None and block.ready and block.due == -use:
                return block
            heapq.heappop(self.due)
        return None

    # ---- reading ----

    def need(self, key: int) -> int | None:
        """Where in ``bytes`` a block begins, once it is there; None where there is no room for it.

        Raises:
            CorruptShardError, OSError: it cannot be read.
        """
        while True:
            block = self.blocks.get(key)
            if block is None:
                block = self._claim(key, self.plan.first_use(key, self.used))
                if block is None:
                    return None
                self._fill(block)
            if block.error is not None:
                if self.blocks.get(key) is block:
                    del self.blocks[key]
                raise block.error
            if block.ready:
                self._touch(block)
                return block.slot * self.block_nbytes
            self.changed.wait()

    def _fill(self, block: _Block) -> None:
        """Read a block, others having their turn meanwhile; what goes wrong is left in it."""
        offset = block_of(block.key) * self.block_nbytes
        source, begin = self.sources[file_of(block.key)], block.slot * self.block_nbytes
        out = self.bytes[begin : begin + min(self.block_nbytes, source.nbytes - offset)]
        self.reads += 1
        self.changed.release()
        try:
            source.read_bytes(offset, out)
        except BaseException as error:  # whoever waits for the block must not wait for ever
            block.error = error
        finally:
            self.changed.acquire()
        if block.error is None:
            block.ready = True
            self._settle(block)
        else:
            self.free.append(block.slot)
            block.slot = -1
        self.changed.notify_all()

    # ---- reading ahead ----

    def read_ahead(self) -> None:
        """What a thread does, until the plan is at its end."""
        with self.changed:
            while not self.stopped:
                block = self._next()
                if block is not None:
                    self._fill(block)
                elif self.looked >= len(self.plan):
                    break
                elif not self._sweep():
                    self.waiting += 1
                    self.changed.wait(_PATIENCE_SECONDS)
                    self.waiting -= 1
            self.threads -= 1

    def _next(self) -> _Block | None:
        """The next block that is to be read ahead; None where there is no room yet, or nothing to read."""
        self.looked = max(self.looked, self.used)
        while self.looked < len(self.plan):
            key = self.plan.keys[self.looked]
            if key not in self.blocks:
                block = self._claim(key, self.looked)
                self.looked += block is not None
                return block
            self.looked += 1
            if self.looked % _STEPS == 0:
                self.changed.release()
                self.changed.acquire()
        return None

    def forget(self, first: int, last: int) -> None:
        """Let go of the blocks of these names, ``last`` not among them, that are there."""
        for key in [key for key, block in self.blocks.items() if first <= key < last and block.ready]:
            self.free.append(self.blocks.pop(key).slot)
            self.idle.pop(key, None)

    def stop(self) -> None:
        """Let the threads end. Called without the lock, or by chance with it: where the cache is collected."""
        self.stopped = True
        if self.changed.acquire(blocking=False):
            self.changed.notify_all()
            self.changed.release()


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
        self.nbytes, self._huge_pages, self._readers = nbytes, huge_pages, readers
        self.block_nbytes = min(block_nbytes, nbytes)
        self._sources: dict[int, Source] = {}
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._count = itertools.count()
        self._made: dict[int, _Memory] = {}  # one entry, by the process it is of

    def __reduce__(self) -> tuple[Any, ...]:
        return _renewed, (self.nbytes, self.block_nbytes, self._huge_pages, self._readers)

    @property
    def _memory(self) -> _Memory:
        made = self._made.get(_forks)
        return self._make() if made is None else made

    def _make(self) -> _Memory:
        """What this process reads into: neither a lock nor threads survive a fork."""
        slots, forks = self.nbytes // self.block_nbytes, _forks
        made = self._made.setdefault(forks, _Memory(self._sources, slots, self.block_nbytes, self._huge_pages))
        for other in [each for each in self._made if each != forks]:
            del self._made[other]
        weakref.finalize(self, made.stop).atexit = False
        return made

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All there is room for, ``nbytes`` at most; of which pages are taken as blocks come."""
        return self._memory.bytes

    @property
    def reads(self) -> int:
        """Blocks that were read so far in this process, in the background or not."""
        return self._memory.reads

    def array(self, source: Source, path: str, content: bytes) -> CachedArray:
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
            memory.take_plan(np.concatenate([memory.plan.array[memory.used :], keys]) if more else keys)
            missing = self._readers - memory.threads if len(keys) else 0
            memory.threads += missing
            memory.changed.notify_all()
        for _ in range(missing):
            threading.Thread(target=memory.read_ahead, name="blocks", daemon=True).start()

    def forget(self, file: int, begin: int, end: int) -> None:
        """Let go of the blocks that bytes ``[begin, end)`` of a file lie in."""
        memory = self._memory
        with memory.changed:
            memory.forget(key_of(file, begin // self.block_nbytes), key_of(file, -(-end // self.block_nbytes)))


def _renewed(nbytes: int, block_nbytes: int, huge_pages: bool, readers: int) -> BlockCache:
    return BlockCache(nbytes, block_nbytes=block_nbytes, huge_pages=huge_pages, readers=readers)


class CachedArray:
    """An array that is read through a cache: every slice is a fresh copy. ``BlockCache.array`` makes one.

    Attributes:
        cache: that it is read through.
        source: that the cache reads.
        file: its number there.
    """

    def __init__(self, cache: BlockCache, source: Source, file: int) -> None:
        self.cache, self.source, self.file = cache, source, file
        self.dtype = source.dtype

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, _ = index.indices(len(self.source))
        out = np.empty(max(stop - start, 0), self.dtype)
        self.read_bytes(start * self.dtype.itemsize, out.view(np.uint8))
        out.flags.writeable = False
        return out

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See ``Source``; errors as of ``BlockCache.read``."""
        self.cache.read(self.file, offset, out)
