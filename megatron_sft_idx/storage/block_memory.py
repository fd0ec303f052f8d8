"""The blocks that one process holds: which are kept, which give way, and the threads that read ahead.

What gives way is the block whose next use is farthest off, as Belady showed to be best, and first of all those whose
use nobody announced, the least recently used before the others. A block that is read ahead never displaces one that is
used before it. Where nothing is announced this is a plain LRU cache.
"""

from __future__ import annotations

import heapq
import mmap
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.storage.block_plan import NEVER, UsePlan, block_of, file_of
from megatron_sft_idx.storage.local import CopiedArray

__all__ = ["BlockMemory"]

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
