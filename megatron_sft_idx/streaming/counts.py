"""How many packs each rank has: what the others' headers say, or their acknowledgements where those are freed."""

from __future__ import annotations

from collections.abc import Callable

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.streaming.live import LiveShards, Waiter
from megatron_sft_idx.streaming.order import item
from megatron_sft_idx.streaming.state import RankState

__all__ = ["RankCounts"]


class RankCounts:
    """Packs of every rank, counted shard by shard as they are published.

    Args:
        shards: of the catalog.
        state: of the rank that counts, as it stands.
        acknowledged: items and packs that ranks have acknowledged in the order of a state.
        waiter: who waits for shards.
    """

    def __init__(
        self,
        shards: LiveShards,
        state: RankState,
        acknowledged: Callable[[RankState], dict[int, tuple[int, int]]],
        waiter: Waiter,
    ) -> None:
        self._shards, self._state, self._acknowledged, self._waiter = shards, state, acknowledged, waiter
        self._have = [0] * state.size
        self._items = [0] * state.size
        self._take_for_counted(state.rank, state.items, state.packs_of_items)
        self._next = 0

    def _take_for_counted(self, rank: int, items: int, packs: int) -> None:
        if items > self._items[rank]:
            self._items[rank], self._have[rank] = items, packs

    def wait(self, shard: int) -> bool:
        """Wait for a shard; False where the catalog ends before it."""
        return self._shards.wait(shard, self._waiter, lambda: self._uncommitted(shard))

    def _uncommitted(self, shard: int) -> int:
        """Items of all ranks before a shard that no acknowledgement includes."""
        base = self._state.base
        before = len(base.leftovers) + max(0, shard - base.frontier)
        return max(0, before - sum(items for items, _ in self._acknowledged(self._state).values()))

    def reach(self, packs: int) -> bool:
        """Wait until every rank is known to have so many; False where one never will."""
        while min(self._have) < packs:
            if not self._count_next():
                return False
        return True

    def all(self) -> list[int]:
        """Packs of each rank, once no more can come."""
        while self._count_next():
            pass
        return list(self._have)

    def _count_next(self) -> bool:
        """Count the next item of all; False where there is none."""
        base, size = self._state.base, self._state.size
        rank, index = self._next % size, self._next // size
        if index >= self._items[rank]:
            left = item(base, self._next)
            packs = self._packs(left.shards, rank, index)
            if packs is None:
                return False
            if index >= self._items[rank]:
                self._take_for_counted(rank, index + 1, self._have[rank] + packs - left.offset)
        self._next += 1
        return True

    def _packs(self, shards: tuple[int, ...], rank: int, index: int) -> int | None:
        """Packs of an item; any number where an acknowledgement counts for it; None where it will never come."""
        total = 0
        for shard in shards:
            count = self._shards.count(shard)
            if count is None:
                for other, done in self._acknowledged(self._state).items():
                    self._take_for_counted(other, *done)
                if index < self._items[rank]:
                    return 0
                if not self.wait(shard):
                    return None
                count = self._shards.count(shard)
            if count is None:
                raise FormatError(
                    f"{self._shards.folder}: {self._shards.name(shard)} of rank {rank} was freed and no"
                    " acknowledgement says how many packs it had; keep the folder of acknowledgements where the"
                    " consumers find it (--ack-dir)"
                )
            total += count
        return total
