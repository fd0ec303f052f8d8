"""Blocks of files in the memory of this process, read by pread ahead of their use: the backend ``process``.

Where files cannot be mapped, or mapping is slow, every read waits for the file system. A cache that is told which
packs come next (``schedule``) reads them in the background, inside a budget that is exact: all blocks lie in one piece
of memory of that size, those under way included, and what is handed out are copies.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.storage.local import CopiedArray

__all__ = [
    "BLOCK_NBYTES",
    "NEVER",
    "BlockCache",
    "BlockMemory",
    "CachedArray",
    "UsePlan",
    "block_keys",
    "block_of",
    "file_of",
    "key_of",
]


# After every use: a Python int, which compares fast.
NEVER = 1 << 62
# Blocks are named by one number, for numpy to sort them: the file above, the block in it below.
_FILE_SHIFT = 40


def key_of(file: int, block: int) -> int:
    """The name of a block of a file."""
    return file << _FILE_SHIFT | block


def file_of(key: int) -> int:
    """The file of a block."""
    return key >> _FILE_SHIFT


def block_of(key: int) -> int:
    """The number of a block in its file."""
    return key & (1 << _FILE_SHIFT) - 1


def block_keys(
    files: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64], block_nbytes: int
) -> NDArray[np.int64]:
    """The blocks that ranges of bytes ``[begin, end)`` of files touch, range by range in their order."""
    some = ends > begins
    first = begins[some] // block_nbytes
    counts = (ends[some] - 1) // block_nbytes - first + 1
    names = (files[some] << _FILE_SHIFT) + first
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    keys: NDArray[np.int64] = np.repeat(names, counts) + within
    return keys


class UsePlan:
    """Blocks in the order of their use.

    Args:
        keys: int64 [uses], the block of each use.
        begin: the number of the first use, which the others follow.

    Attributes:
        begin: as given.
        end: the number after that of the last use.
    """

    def __init__(self, keys: NDArray[np.int64], begin: int = 0) -> None:
        self.begin, self.end = begin, begin + len(keys)
        self._keys = keys
        order = np.argsort(keys, kind="stable")
        self._sorted, self._order = keys[order], order + begin
        again = np.full(len(keys), NEVER)
        same = self._sorted[1:] == self._sorted[:-1]
        again[order[:-1][same]] = self._order[1:][same]
        self._items, self._again = keys.data, again.data  # give Python ints

    def followed_by(self, keys: NDArray[np.int64], since: int) -> UsePlan:
        """The uses from ``since`` on, and these behind them."""
        return UsePlan(np.concatenate([self._keys[since - self.begin :], keys]), since)

    def key(self, use: int) -> int:
        """The block of a use."""
        return self._items[use - self.begin]

    def next_use(self, use: int) -> int:
        """The use of the same block after this one; NEVER where there is none."""
        return self._again[use - self.begin]

    def first_uses(self, keys: Sequence[int]) -> list[int]:
        """The first use of each of some blocks; NEVER for one that has none."""
        if not len(self._keys):
            return [NEVER] * len(keys)
        wanted = np.array(keys, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._keys) - 1)
        uses: list[int] = np.where(self._sorted[at] == wanted, self._order[at], NEVER).tolist()
        return uses

    def first_use(self, key: int, since: int) -> int:
        """The first use of a block that is not before ``since``; NEVER where there is none."""
        first, last = np.searchsorted(self._sorted, [key, key + 1])
        uses = self._order[first:last]
        at = int(np.searchsorted(uses, since))
        return int(uses[at]) if at < len(uses) else NEVER


# This part of all blocks may be ones that were read ahead and wait for their use: more of them would be read earlier
# than need be, and take the place of blocks that are used again.
_AHEAD_SHARE = 4
# Uses that are looked at before readers get their turn again.
_STEPS = 4096
# A thread that nobody could tell of the end looks by itself.
_PATIENCE_SECONDS = 1.0
# Of linux/mman.h, which Python does not name: a forked process has blocks of its own and must not keep these in memory.
_MADV_WIPEONFORK = 18


@dataclass(slots=True, eq=False)
class _Block:
    """One block in memory, or on its way there.

    Attributes:
        key: which block of which file.
        slot: where it lies.
        due: its next use in the plan; NEVER where none is announced.
        ready: whether it is there.
        ahead: whether it was read ahead and waits for its use.
    """

    key: int
    slot: int
    due: int
    ready: bool = False
    ahead: bool = False


class BlockMemory:
    """The blocks that one process holds, and the threads that fetch more; every method is called under ``changed``.

    Args:
        sources: the files, by number; they may become more.
        slots: blocks that there is room for.
        block_nbytes: of each; those at the end of a file may have less in them.
        huge_pages: ask for huge pages.

    Raises:
        OSError: there are not as many addresses.
    """

    def __init__(self, sources: Mapping[int, CopiedArray], slots: int, block_nbytes: int, huge_pages: bool) -> None:
        lock = threading.Lock()
        self.changed = threading.Condition(lock)  # a block came, or did not
        self.room = threading.Condition(lock)  # for reading ahead
        self.sources, self.slots, self.block_nbytes = sources, slots, block_nbytes
        # Private: what mmap gives by itself would be shared with forked processes. Untouched pages take no memory.
        try:
            self.map = mmap.mmap(-1, slots * block_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            what = f"a cache of {slots * block_nbytes} bytes; give it less (cache_bytes)"
            raise OSError(error.errno, f"{error.strerror}: {what}") from None
        with suppress(OSError):  # Linux before 4.14
            self.map.madvise(_MADV_WIPEONFORK)
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
        # What is read ahead takes the place of what is kept to be used again, so it is a part.
        self.ahead, self.most_ahead = 0, max(slots // _AHEAD_SHARE, 1)
        self.threads, self.waiting, self.stopped = 0, 0, False
        self.reads = 0

    # ---- what is known of coming uses ----

    def take_plan(self, keys: NDArray[np.int64], more: bool) -> None:
        """Go by these uses from now on, or after those that are still to come."""
        if more:
            self._extend_plan(keys)
            return
        self.plan = UsePlan(keys)
        self.used = self.looked = self.swept = 0
        for block, use in zip(self.blocks.values(), self.plan.first_uses(list(self.blocks)), strict=True):
            self._count(block, False)
            block.due = use
        self._sort()

    def _extend_plan(self, keys: NDArray[np.int64]) -> None:
        """Takes as long as there are new uses, not as there are blocks: batches are announced one by one."""
        end = self.plan.end
        self.plan = self.plan.followed_by(keys, self.used)
        fresh, first = np.unique(keys, return_index=True)
        for key, use in zip(fresh.tolist(), (first + end).tolist(), strict=True):
            block = self.blocks.get(key)
            if block is not None and block.due == NEVER:
                block.due = use
                if block.ready:
                    del self.idle[key]
                    self._settle(block)

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
                self._count(block, False)
                block.due = self.plan.first_use(block.key, self.used)
        self._sort()
        return True

    def _touch(self, block: _Block) -> None:
        """A block is being used."""
        use = block.due
        self._count(block, False)
        if use == NEVER:
            self.idle.move_to_end(block.key)
        elif self._pass(use):
            skipped = use < self.plan.begin
            block.due = self.plan.first_use(block.key, self.used) if skipped else self.plan.next_use(use)
            self._settle(block)

    def _pass(self, use: int) -> bool:
        """A use is over, and those before it; False where it is so far off that somebody else reads here."""
        if use >= max(self.looked, self.used) + self.slots:
            return False
        self.used = max(self.used, use + 1)
        if self.waiting:
            self.room.notify()
        return True

    def _count(self, block: _Block, ahead: bool) -> None:
        self.ahead += ahead - block.ahead
        block.ahead = ahead

    def _settle(self, block: _Block) -> None:
        if block.due == NEVER:
            self.idle[block.key] = None
        else:
            heapq.heappush(self.due, (-block.due, block.key))
            if len(self.due) > 2 * self.slots:  # mostly uses that are over
                self._sort()

    # ---- room ----

    def _claim(self, key: int, due: int) -> _Block | None:
        """A place for a block that is used at ``due``; None where all there are serve sooner."""
        if self.free:
            slot = self.free.pop()
        elif self.idle:
            slot = self._give_up(self.idle.popitem(last=False)[0])
        elif (farthest := self._farthest()) is not None and farthest.due > due:
            heapq.heappop(self.due)
            slot = self._give_up(farthest.key)
        else:
            return None
        block = self.blocks[key] = _Block(key, slot, due)
        return block

    def _give_up(self, key: int) -> int:
        """Let go of a block; its slot."""
        block = self.blocks.pop(key)
        self._count(block, False)
        return block.slot

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
                use = self.plan.first_use(key, self.used)
                block = self._claim(key, use)
                if block is None:
                    self._pass(use)
                    return None
                self._fill(block)
            if block.ready:
                self._touch(block)
                return block.slot * self.block_nbytes
            self.changed.wait()

    def _fill(self, block: _Block) -> None:
        """Read a block, others having their turn meanwhile; one that cannot be read is none."""
        offset = block_of(block.key) * self.block_nbytes
        source, begin = self.sources[file_of(block.key)], block.slot * self.block_nbytes
        out = self.bytes[begin : begin + min(self.block_nbytes, source.nbytes - offset)]
        self.reads += 1
        came = False
        self.changed.release()
        try:
            source.read_bytes(offset, out)
            came = True
        finally:
            self.changed.acquire()
            block.ready = came  # with the lock: from here on it may give way
            if came:
                self._settle(block)
            else:
                self.free.append(self._give_up(block.key))
            self.changed.notify_all()  # those who wait for it, who try by themselves where it did not come

    # ---- reading ahead ----

    def read_ahead(self) -> None:
        """What a thread does, until the plan is at its end."""
        with self.changed:
            try:
                while not self.stopped:
                    block = self._next()
                    if block is not None:
                        with suppress(Exception):  # whoever needs the block reads it again, and is told
                            self._fill(block)
                    elif self.looked >= self.plan.end:
                        break
                    elif not self._sweep():
                        self.waiting += 1
                        self.room.wait(_PATIENCE_SECONDS)
                        self.waiting -= 1
            finally:
                self.threads -= 1

    def _next(self) -> _Block | None:
        """The next block that is to be read ahead; None where there is no room yet, or nothing to read."""
        self.looked = max(self.looked, self.used)
        while self.looked < self.plan.end:
            key = self.plan.key(self.looked)
            if key not in self.blocks:
                block = self._claim(key, self.looked) if self.ahead < self.most_ahead else None
                if block is not None:
                    self._count(block, True)
                    self.looked += 1
                return block
            self.looked += 1
            if self.looked % _STEPS == 0:
                self.changed.release()
                self.changed.acquire()
        return None

    def forget(self, first: int, last: int) -> None:
        """Let go of the blocks of these names, ``last`` not among them, that are there."""
        for key in [key for key, block in self.blocks.items() if first <= key < last and block.ready]:
            self.free.append(self._give_up(key))
            self.idle.pop(key, None)

    def stop(self) -> None:
        """Let the threads end. Called without the lock, or by chance with it: where the cache is collected."""
        self.stopped = True
        if self.room.acquire(blocking=False):
            self.room.notify_all()
            self.room.release()


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
