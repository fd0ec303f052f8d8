"""One rank's way through live shards: micro-batches in the order of ``live_order``, as shards appear.

Ranks never talk to each other. That all of them end an epoch with the same number of rows, each finds out by counting
the packs of every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live.acks import Base
from megatron_sft_idx.live.catalog import Waiter
from megatron_sft_idx.live.live_order import Group, RankState, items_of, next_group, pack_order
from megatron_sft_idx.live.live_shards import LiveShards
from megatron_sft_idx.training import Wanted

AtEnd = Literal["pad", "drop"]

_NO_PACKS = np.zeros((0, 2), np.int64)


class Walk:
    """Iterates over the micro-batches of one rank from a state on, through all epochs, and waits for shards.

    Each is a ``Wanted`` whose packs are int64 [rows, 2], the number of a shard and of a pack in it, with the state of
    the rank behind it. All worker processes of a rank walk the same way, and read nothing but headers.

    Args:
        shards: the shards.
        state: where the rank stands.
        epochs: how many epochs there are in all.
        at_end: how an epoch ends: ``pad`` fills up with masked rows, ``drop`` drops the packs that make no step.
        acknowledged: by rank, how many items and packs were acknowledged in the order of a state.
        waiter: who waits for shards.

    Attributes:
        state: where the rank stands: behind the last micro-batch, or at the end behind empty shards too.
    """

    def __init__(
        self,
        shards: LiveShards,
        state: RankState,
        *,
        epochs: int,
        at_end: AtEnd,
        acknowledged: Callable[[RankState], dict[int, tuple[int, int]]],
        waiter: Waiter,
    ) -> None:
        self._shards, self._epochs, self._at_end, self._waiter = shards, epochs, at_end, waiter
        self._acknowledged = acknowledged
        self._begin(state)

    def _begin(self, state: RankState) -> None:
        """Stand where a state says; its unfinished group, if there is one, is still to be loaded."""
        self.state = state
        self._end = self._shards.end()
        # The group that is being read, its packs in their order, and how many of these the rank was given.
        self._group, self._packs, self._num_given = Group((), 0, 0), _NO_PACKS, 0
        # Of each rank, how many of its items have been counted, and the packs in them; and which item comes next.
        self._counted = [(0, 0)] * state.size
        self._counted[state.rank] = state.items, state.packs_of_items
        self._next_item = 0

    def __iter__(self) -> Iterator[Wanted]:
        self._require_all_there()
        if self.state.shards:
            self._take_up()
        while True:
            yield from self._pad() if self._at_end == "pad" else self._drop()
            epoch = self.state.base.epoch + 1
            if epoch >= self._epochs:
                return
            base = Base(epoch, self.state.base.seed, self.state.base.window)
            self._begin(dataclasses.replace(self.state, base=base, rows=0, items=0, packs=0, shards=(), offset=0))

    def _require_all_there(self) -> None:
        """FormatError where shards that this rank has still to read have been removed."""
        if not (present := self._shards.numbers()):
            return
        state = self.state
        items = items_of(state.base, state.size, state.rank, present[-1] + 1, state.items)
        gone = sorted({shard for item in items for shard in item.shards}.difference(present))
        # Look again: the listing of a folder that grows may have a shard and lack an older one.
        if gone := [shard for shard in gone if shard < present[-1] and self._shards.count(shard) is None]:
            shown = ", ".join(map(str, gone[:10])) + (", ..." if len(gone) > 10 else "")
            these = f"shard {shown} is" if len(gone) == 1 else f"shards {shown} ({len(gone)} in all) are"
            raise FormatError(
                f"{self._shards.folder}: {these} not there any more, and rank {state.rank} of {state.size} has still to"
                " read them: a later checkpoint was committed and they were freed, or somebody removed them; resume"
                " from the latest committed checkpoint, or put them back"
            )

    def _take_up(self) -> None:
        """Go on inside the unfinished group of the state."""
        state, has_group = self.state, self._next_group()
        group, packs = self._group, len(self._packs)
        if not has_group or group.shards != state.shards or not group.offset < state.offset < packs:
            arrived_at = f"shards {list(group.shards)}, packs {group.offset} to {packs}" if has_group else "the end"
            raise FormatError(
                f"{self._shards.folder}: the state was {state.offset} packs into shards {list(state.shards)}, and what"
                f" rank {state.rank} of {state.size} comes to here is {arrived_at}; resume with the catalog and the"
                " state that go together"
            )
        self._num_given = state.offset

    # ---- the two ways to end ----

    def _pad(self) -> Iterator[Wanted]:
        """Micro-batches to the end of the epoch, with masked rows until the longest rank has whole steps."""
        size, step = self.state.batch_rows, self.state.step_rows
        while len(packs := self._next_packs(size)) == size:
            yield self._micro_batch(packs)
        while self._count_next():
            pass
        longest = max(packs for _, packs in self._counted)
        total = -(-longest // step) * step
        self._say_end(total, f"{total - self._counted[self.state.rank][1]:,} rows of padding")
        filler = self._filler() if self.state.rows < total else _NO_PACKS
        while self.state.rows < total:
            yield self._micro_batch(np.concatenate([packs, np.repeat(filler, size - len(packs), axis=0)]), len(packs))
            packs = _NO_PACKS

    def _drop(self) -> Iterator[Wanted]:
        """Micro-batches to the last step for which every rank has packs."""
        step, more = self.state.step_rows, True
        while more:
            # Count on until every rank is known to have the packs of one more step, or nothing is left to count.
            while more and min(packs for _, packs in self._counted) < (self.state.rows // step + 1) * step:
                more = self._count_next()
            if more:
                yield self._micro_batch(self._next_packs(self.state.batch_rows))
        while self._count_next():
            pass
        left = sum(packs for _, packs in self._counted) - self.state.rows * self.state.size
        self._say_end(self.state.rows, f"{left:,} packs of all ranks dropped, so that all end together")

    def _micro_batch(self, packs: NDArray[np.int64], real: int | None = None) -> Wanted:
        """A micro-batch of these packs; its rows from ``real`` on only fill it up."""
        self.state = dataclasses.replace(self.state, rows=self.state.rows + len(packs))
        return Wanted(packs, None if real is None else np.arange(len(packs)) >= real, self.state)

    def _filler(self) -> NDArray[np.int64]:
        """A pack for masked rows: one of the rank that ends last, whose shards are freed last. int64 [1, 2]."""
        state, present = self.state, self._shards.numbers()
        longest = int(np.argmax([packs for _, packs in self._counted]))
        items = items_of(state.base, state.size, longest, self._end or 0)
        shards = [shard for item in items for shard in item.shards]
        is_present = set(present).__contains__
        for shard in (*filter(is_present, reversed(shards)), *reversed(present)):
            if self._shards.count(shard):
                return np.array([[shard, 0]])
        raise FormatError(
            f"{self._shards.folder}: rank {state.rank} pads its last steps and no shard is left to take rows from; let"
            " the producer keep a few (--keep-recent)"
        )

    def _say_end(self, rows: int, what: str) -> None:
        state = self.state
        self._waiter.say(
            f"{self._waiter.who}: epoch {state.base.epoch + 1} ends after {rows // state.step_rows:,} steps of"
            f" {state.step_rows} rows, {state.packs:,} packs; {what}"
        )

    # ---- packs of this rank ----

    def _next_packs(self, count: int) -> NDArray[np.int64]:
        """The next packs of this rank, int64 [packs, 2]; fewer than ``count`` where its items end."""
        blocks = []
        while count and (self._num_given < len(self._packs) or self._next_group()):
            blocks.append(self._packs[self._num_given : self._num_given + count])
            count -= len(blocks[-1])
            self._num_given += len(blocks[-1])
            state, group, is_done = self.state, self._group, self._num_given == len(self._packs)
            self.state = dataclasses.replace(
                state,
                packs=state.packs + len(blocks[-1]),
                items=state.items + (group.num_items if is_done else 0),
                shards=() if is_done else group.shards,
                offset=0 if is_done else self._num_given,
            )
        return blocks[0] if len(blocks) == 1 else np.concatenate([_NO_PACKS, *blocks])

    def _next_group(self) -> bool:
        """Wait for all shards of the next group and put its packs in order; False where no group is left."""
        while True:
            state = self.state
            group = next_group(state.base, state.size, state.rank, state.items, self._end)
            if group is None:
                return False
            if not all(map(self._wait, group.shards)):
                self._end = self._shards.end()  # the last group may have fewer shards than a whole one
                continue
            counts = [self._shards.count(shard) for shard in group.shards]
            if None in counts:
                gone = self._shards.name(group.shards[counts.index(None)])
                raise FormatError(f"{self._shards.folder}: {gone} went away while it was opened")
            bounds = np.cumsum(np.array([0, *counts], np.int64))
            if bounds[-1]:
                break
            self.state = dataclasses.replace(state, items=state.items + group.num_items)
        order = pack_order(state.base, group.shards, int(bounds[-1]), state.shuffle)
        slot = np.searchsorted(bounds, order, side="right") - 1
        self._packs = np.stack([np.array(group.shards)[slot], order - bounds[slot]], axis=1)
        self._group, self._num_given = group, group.offset
        return True

    def _wait(self, shard: int) -> bool:
        """Wait for a shard; False where there will be fewer shards."""
        before = self.state.base.num_items(shard)

        def uncommitted() -> int:
            if self.state.base.epoch < self._epochs - 1:
                return before  # only the last epoch completes shards, whatever is committed in this one
            return max(0, before - sum(items for items, _ in self._acknowledged(self.state).values()))

        return self._shards.wait(shard, self._waiter, uncommitted)

    # ---- packs of all ranks, by the headers of shards, or by acknowledgements where shards were removed ----

    def _count_next(self) -> bool:
        """Count the packs of the next item, whichever rank's it is; False where no further item can come."""
        index, rank = divmod(self._next_item, self.state.size)
        item = self.state.base.item(self._next_item)
        packs = -item.offset
        for shard in item.shards:
            if index < self._counted[rank][0]:
                break  # an acknowledgement has counted it
            count = self._shards.count(shard)
            if count is None:
                for other, counts in self._acknowledged(self.state).items():
                    self._counted[other] = max(self._counted[other], counts)
                if index < self._counted[rank][0]:
                    break
                if not self._wait(shard):
                    return False
                count = self._shards.count(shard)
            if count is None:
                raise FormatError(
                    f"{self._shards.folder}: {self._shards.name(shard)} of rank {rank} was freed and no"
                    " acknowledgement says how many packs it had; keep the folder of acknowledgements where the"
                    " consumers find it (--ack-dir)"
                )
            packs += count
        else:
            self._counted[rank] = index + 1, self._counted[rank][1] + packs
        self._next_item += 1
        return True
