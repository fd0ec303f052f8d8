"""The path of a rank through live shards: follows the order of ``live_order`` while shards appear.

``Walk`` makes micro-batches until the last epoch ends. Three parts are separate:

* ``OwnPacks`` returns the packs of this rank, in order. It waits for the shards of its next group.
* ``RankCounts`` counts the packs of all ranks. Ranks do not communicate about data. Each one determines by itself, from
  the headers of all shards, after how many steps an epoch ends for all.
* ``Walk`` ends the epoch for all ranks at the same step, by padding or by omitting packs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.lines import Shown
from megatron_sft_idx.live.live_order import Group, RankState
from megatron_sft_idx.live.live_shards import LiveShards
from megatron_sft_idx.live.waiting import Waiter
from megatron_sft_idx.training import Wanted

AtEnd = Literal["pad", "drop"]
# By rank, the number of acknowledged items in a deal, and the number of their packs.
Acknowledged: TypeAlias = Callable[[RankState], dict[int, tuple[int, int]]]
# Waits for a shard; returns False if there will be fewer shards.
Wait: TypeAlias = Callable[[int], bool]

_NO_PACKS = np.zeros((0, 2), np.int64)


class Walk(Shown):
    """Iterates over the micro-batches of one rank from a state on, through all epochs, and waits for shards.

    Each is a ``Wanted`` with packs as int64 [rows, 2] (number of a shard and of a pack in it) and the state of the rank
    after it. Only the headers of shards are read.

    Args:
        shards: the shards.
        state: position of the rank.
        epochs: total number of epochs.
        at_end: how an epoch ends: ``pad`` adds masked rows, ``drop`` omits packs that do not make a complete step.
        acknowledged: function that returns what was acknowledged in the deal of a state.
        waiter: how to wait for shards.

    Attributes:
        state: position of the rank after the last micro-batch. At the end it is after all items, even if the last ones
            are shards without packs, which no micro-batch follows.
    """

    def __init__(
        self,
        shards: LiveShards,
        state: RankState,
        *,
        epochs: int,
        at_end: AtEnd,
        acknowledged: Acknowledged,
        waiter: Waiter,
    ) -> None:
        self._shards, self._epochs, self._at_end = shards, epochs, at_end
        self._acknowledged, self._waiter = acknowledged, waiter
        self.state = state

    def _shown(self) -> str:
        return f"{self._shards!r}, rank {self.state.rank} of {self.state.deal.size}"

    def __iter__(self) -> Iterator[Wanted]:
        while True:
            yield from self._pad() if self._at_end == "pad" else self._drop()
            next_epoch = self.state.deal.epoch + 1
            if next_epoch >= self._epochs:
                return
            self.state = self.state.at_epoch(next_epoch)

    # ---- two ways to end an epoch ----

    def _pad(self) -> Iterator[Wanted]:
        """Yield micro-batches to the end of the epoch, with masked rows until the longest rank has complete steps."""
        own = OwnPacks(self._shards, self._wait)
        size, step = self.state.batch_rows, self.state.step_rows
        packs = self._take(own)
        while len(packs) == size:
            yield self._micro_batch(packs, size)
            packs = self._take(own)
        counts = RankCounts(self._shards, self.state, self._acknowledged, self._wait)
        counts.count_all()
        total = -(-max(counts.packs) // step) * step
        self._say_end(total, f"{total - counts.packs[self.state.rank]:,} rows of padding")
        filler = self._filler(counts) if self.state.rows < total else _NO_PACKS
        while self.state.rows < total:
            filled = np.concatenate([packs, np.repeat(filler, size - len(packs), axis=0)])
            yield self._micro_batch(filled, len(packs))
            packs = _NO_PACKS

    def _drop(self) -> Iterator[Wanted]:
        """Yield micro-batches up to the last step for which every rank has packs."""
        own = OwnPacks(self._shards, self._wait)
        counts = RankCounts(self._shards, self.state, self._acknowledged, self._wait)
        size, step = self.state.batch_rows, self.state.step_rows
        while True:
            end_of_step = (self.state.rows // step + 1) * step
            if not counts.count_up_to(end_of_step):
                break
            while self.state.rows < end_of_step:
                yield self._micro_batch(self._take(own), size)
        left = sum(counts.packs) - self.state.rows * self.state.deal.size
        self._say_end(
            self.state.rows, f"{left:,} packs of all ranks were dropped, so that all ranks end at the same step"
        )

    def _take(self, own: OwnPacks) -> NDArray[np.int64]:
        """Return the packs of the next micro-batch, int64 [packs, 2]; fewer at the end of the rank's items."""
        packs, self.state = own.take(self.state, self.state.batch_rows)
        return packs

    def _micro_batch(self, packs: NDArray[np.int64], num_real: int) -> Wanted:
        """Return a micro-batch of these packs. Rows from ``num_real`` on are only padding."""
        self.state = dataclasses.replace(self.state, rows=self.state.rows + len(packs))
        masked = np.arange(len(packs)) >= num_real
        return Wanted(packs, masked if num_real < len(packs) else None, self.state)

    def _filler(self, counts: RankCounts) -> NDArray[np.int64]:
        """Return a pack for masked rows, int64 [1, 2]: from the rank that ends last, whose shards are removed last."""
        deal, present = self.state.deal, self._shards.numbers()
        longest = int(np.argmax(counts.packs))
        items = [deal.item(number) for number in deal.items_of(longest, self._shards.end() or 0)]
        shards = [shard for item in items for shard in item.shards]
        is_present = set(present).__contains__
        for shard in (*filter(is_present, reversed(shards)), *reversed(present)):
            if self._shards.count(shard):
                return np.array([[shard, 0]])
        raise FormatError(
            f"{self._shards.folder}: rank {self.state.rank} must pad its last steps, but no shard is left to take rows"
            " from; let the producer keep a few shards (--keep-recent)"
        )

    def _say_end(self, rows: int, what: str) -> None:
        state = self.state
        self._waiter.say(
            f"{self._waiter.who}: epoch {state.deal.epoch + 1} ends after {rows // state.step_rows:,} steps of"
            f" {state.step_rows} rows, {state.packs:,} packs; {what}"
        )

    def _wait(self, shard: int) -> bool:
        """Wait for a shard. Return False if there will be fewer shards."""
        deal = self.state.deal
        # All items before a shard are leftovers or untouched shards.
        items_before = deal.item_of_shard(max(shard, deal.frontier))

        def unacknowledged() -> int:
            if deal.epoch < self._epochs - 1:
                return items_before  # only the last epoch completes shards, whatever is committed in this one
            done = sum(items for items, _ in self._acknowledged(self.state).values())
            return max(0, items_before - done)

        return self._shards.wait(shard, self._waiter, unacknowledged)


class OwnPacks(Shown):
    """The packs of one rank in one epoch, group by group.

    Args:
        shards: the shards.
        wait: called before a shard is read.
    """

    def __init__(self, shards: LiveShards, wait: Wait) -> None:
        self._shards, self._wait = shards, wait
        self._end = shards.end()
        # The open group, and its packs in order: int64 [packs, 2]. The state has the number of packs read.
        self._group: Group | None = None
        self._packs = _NO_PACKS

    def _shown(self) -> str:
        return f"{len(self._packs):,} packs in the open group of {self._shards!r}"

    def take(self, state: RankState, count: int) -> tuple[NDArray[np.int64], RankState]:
        """Return the next packs after a state, int64 [packs, 2], and the state after them.

        There are fewer than ``count`` at the end of the rank's items. Each call must get the state of the previous one.
        """
        taken = [_NO_PACKS]
        while count:
            if self._group is None:
                state = self._open_group(state)
            if self._group is None:
                break
            first = max(state.open_packs, self._group.packs_read)
            packs = self._packs[first : first + count]
            taken.append(packs)
            count -= len(packs)
            state = self._behind(state, self._group, first + len(packs), len(packs))
        return np.concatenate(taken), state

    def _behind(self, state: RankState, group: Group, position: int, num_taken: int) -> RankState:
        """Return the state after ``num_taken`` packs that end at ``position`` in the open group, which may end here."""
        packs = state.packs + num_taken
        if position < len(self._packs):
            return dataclasses.replace(state, packs=packs, open_shards=group.shards, open_packs=position)
        self._group = None
        items = state.items + group.num_items
        return dataclasses.replace(state, packs=packs, items=items, open_shards=(), open_packs=0)

    def _open_group(self, state: RankState) -> RankState:
        """Wait for all shards of the next group that has packs, and put its packs in order.

        Returns the state before that group, after groups without packs. If no group is left, none is open.
        """
        while True:
            group = state.deal.group(state.rank, state.items, self._end)
            if group is None:
                if state.open_shards:
                    raise self._not_the_catalog_of(state, "the end")
                return state
            if not all(map(self._wait, group.shards)):
                self._end = self._shards.end()  # the last group may be smaller
                continue
            # The start of each shard's packs in the group.
            begins = np.cumsum([0, *map(self._num_packs, group.shards)])
            num_packs = int(begins[-1])
            if group.packs_read and group.packs_read >= num_packs:
                raise FormatError(
                    f"{self._shards.folder}: in the state, {group.packs_read} packs of shards {list(group.shards)}"
                    f" were read, but these have only {num_packs}; resume with the catalog that belongs to the state"
                )
            if num_packs:
                break
            state = dataclasses.replace(state, items=state.items + group.num_items)
        is_same_group = group.shards == state.open_shards and group.packs_read < state.open_packs < num_packs
        if state.open_shards and not is_same_group:
            arrived_at = f"shards {list(group.shards)}, packs {group.packs_read} to {num_packs}"
            raise self._not_the_catalog_of(state, arrived_at)
        order = state.deal.pack_order(group.shards, num_packs)
        place = np.searchsorted(begins, order, side="right") - 1
        self._packs = np.stack([np.array(group.shards)[place], order - begins[place]], axis=1)
        self._group = group
        return state

    def _num_packs(self, shard: int) -> int:
        count = self._shards.count(shard)
        if count is None:
            raise FormatError(f"{self._shards.folder}: {self._shards.name(shard)} disappeared while it was opened")
        return count

    def _not_the_catalog_of(self, state: RankState, arrived_at: str) -> FormatError:
        return FormatError(
            f"{self._shards.folder}: in the state, rank {state.rank} of {state.deal.size} was at pack"
            f" {state.open_packs} of shards {list(state.open_shards)}, but this catalog leads to {arrived_at}; resume"
            " with the catalog that belongs to the state"
        )


class RankCounts(Shown):
    """Counts the packs of each rank in an epoch, item by item in the order in which shards appear.

    The header of a shard has the number of its packs. A removed shard was completed, so the acknowledgement of its rank
    includes its packs.

    Args:
        shards: the shards.
        state: state of this rank, whose own items up to there are counted.
        acknowledged: function that returns what was acknowledged in the deal of a state.
        wait: called if a shard does not exist.

    Attributes:
        packs: number of packs counted so far, by rank.
    """

    def __init__(self, shards: LiveShards, state: RankState, acknowledged: Acknowledged, wait: Wait) -> None:
        self._shards, self._state, self._acknowledged, self._wait = shards, state, acknowledged, wait
        # By rank, the number of its counted items.
        self._items = [0] * state.deal.size
        self.packs = [0] * state.deal.size
        self._items[state.rank], self.packs[state.rank] = state.items, state.packs_of_items
        self._next_item = 0

    def _shown(self) -> str:
        return f"{self._shards!r}, packs by rank {self.packs}"

    def count_up_to(self, packs: int) -> bool:
        """Count until every rank is known to have this many packs. Return False if some rank has fewer in total."""
        while min(self.packs) < packs:
            if not self._count_next():
                return False
        return True

    def count_all(self) -> None:
        """Count all packs of all ranks."""
        while self._count_next():
            pass

    def _count_next(self) -> bool:
        """Count the packs of the next item, of any rank. Return False if no further item can come."""
        index, rank = divmod(self._next_item, self._state.deal.size)
        item = self._state.deal.item(self._next_item)
        missing: list[int] = []
        if index >= self._items[rank]:
            missing = [shard for shard in item.shards if self._shards.count(shard) is None]
        if missing:  # removed, or not there yet
            self._count_acknowledged()
        if index >= self._items[rank]:
            if not all(map(self._wait, missing)):
                return False
            self.packs[rank] += sum(self._packs_of(shard, rank) for shard in item.shards) - item.packs_read
            self._items[rank] = index + 1
        self._next_item += 1
        return True

    def _packs_of(self, shard: int, rank: int) -> int:
        count = self._shards.count(shard)
        if count is None:
            raise FormatError(
                f"{self._shards.folder}: {self._shards.name(shard)} of rank {rank} was deleted, and its number of"
                " packs is in no acknowledgement; use the same folder of acknowledgements in all runs (--ack-dir)"
            )
        return count

    def _count_acknowledged(self) -> None:
        """Use the counts of ranks that have acknowledged more items than are counted."""
        for rank, (items, packs) in self._acknowledged(self._state).items():
            if items > self._items[rank]:
                self._items[rank], self.packs[rank] = items, packs
