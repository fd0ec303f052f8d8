"""A rank's way through a catalog: micro-batch after micro-batch, waiting where a shard is not there yet.

All worker processes of a rank walk the same way, and each assembles its own share of the micro-batches. Nothing is
read on the way but headers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.catalog import Base
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.streaming.counts import RankCounts
from megatron_sft_idx.streaming.live import LiveShards, Waiter
from megatron_sft_idx.streaming.order import AtEnd, Group, items_of, next_group, pack_order, rows_of
from megatron_sft_idx.streaming.state import RankState

__all__ = ["MicroBatch", "Walk"]

logger = logging.getLogger("megatron_sft_idx.streaming")
_Rows = tuple[NDArray[np.int64], NDArray[np.int64]]
_NOTHING: _Rows = (np.zeros(0, np.int64), np.zeros(0, np.int64))


class MicroBatch(NamedTuple):
    """The rows of one micro-batch.

    Attributes:
        shards: of each row, int64 [rows].
        packs: of each row, counted inside its shard, int64 [rows].
        num_masked: rows at the end that only fill up, whose loss is to be masked.
        state: where the rank stands after it.
    """

    shards: NDArray[np.int64]
    packs: NDArray[np.int64]
    num_masked: int
    state: RankState


class Walk:
    """Iterates over the micro-batches of one rank from a state on, through all epochs.

    Args:
        shards: of the catalog.
        state: where to begin.
        epochs: how often everything is read.
        at_end: how ranks come to take the same number of steps; see ``rows_of``.
        acknowledged: items and packs that ranks have acknowledged in the order of a state.
        waiter: who waits.
        opened: told of the shards of each group before its first micro-batch comes.
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
        opened: Callable[[tuple[int, ...]], None] = lambda shards: None,
    ) -> None:
        self._shards, self._epochs, self._at_end, self._waiter = shards, epochs, at_end, waiter
        self._acknowledged, self._opened = acknowledged, opened
        self._begin(state)

    def _begin(self, state: RankState) -> None:
        """Stand where a state says, with its group still to be taken up."""
        self.state = state
        self._end = self._shards.end()
        self._counts = RankCounts(self._shards, state, self._acknowledged, self._waiter)
        self._group: Group | None = None
        self._rows, self._taken = _NOTHING, 0

    @property
    def shards(self) -> tuple[int, ...]:
        """Of the group that the last micro-batch ends in."""
        return () if self._group is None else self._group.shards

    def __iter__(self) -> Iterator[MicroBatch]:
        self._require_all_there()
        self._take_up()
        while True:
            yield from self._pad() if self._at_end == "pad" else self._drop()
            epoch = self.state.base.epoch + 1
            if epoch >= self._epochs:
                return
            base = Base(epoch, self.state.base.seed, self.state.base.window)
            self._begin(dataclasses.replace(self.state, base=base, rows=0, items=0, packs=0, shards=(), offset=0))

    def _require_all_there(self) -> None:
        """FormatError where shards that this rank has still to read are gone already."""
        there = self._shards.numbers()
        if not there:
            return
        state, known = self.state, set(there)
        mine = items_of(state.base, state.size, state.rank, there[-1] + 1, state.items)
        gone = sorted({shard for left in mine for shard in left.shards} - known)
        # Looked at again: whoever lists a folder that grows may see a shard and miss an older one.
        if gone := [shard for shard in gone if shard < there[-1] and self._shards.count(shard) is None]:
            raise FormatError(
                f"{self._shards.folder}: {_listed(gone)} not there any more, and rank {state.rank} of {state.size} has"
                " still to read them: a later checkpoint was committed and they were freed, or somebody removed them;"
                " resume from the latest committed checkpoint, or put them back"
            )

    def _take_up(self) -> None:
        """Go on inside the group that was begun."""
        state = self.state
        if not state.shards:
            return
        if not self._next_group() or self._group is None or self._group.shards != state.shards:
            raise FormatError(
                f"{self._shards.folder}: the state was inside shards {list(state.shards)}, which are not what rank"
                f" {state.rank} of {state.size} comes to here; resume with the catalog and the state that go together"
            )
        if not self._group.offset < state.offset < len(self._rows[0]):
            raise FormatError(
                f"{self._shards.folder}: the state is {state.offset} packs into shards {list(state.shards)}, of which"
                f" packs {self._group.offset} to {len(self._rows[0])} are this rank's; another shard was published in"
                " place of one of them: resume with the catalog and the state that go together"
            )
        self._taken = state.offset

    # ---- the two ways to end ----

    def _pad(self) -> Iterator[MicroBatch]:
        size = self.state.batch_rows
        shards, packs = self._take(size)
        while len(shards) == size:
            yield self._micro_batch(shards, packs, 0)
            shards, packs = self._take(size)
        have = self._counts.all()
        total = rows_of(have, self.state.step_rows, "pad")
        self._say_end(total, f"{total - have[self.state.rank]:,} rows of padding")
        if self.state.rows >= total:
            return
        shard, pack = self._filler()
        while self.state.rows < total:
            missing = size - len(shards)
            filled = np.append(shards, np.full(missing, shard)), np.append(packs, np.full(missing, pack))
            yield self._micro_batch(*filled, missing)
            shards, packs = _NOTHING

    def _drop(self) -> Iterator[MicroBatch]:
        step = self.state.step_rows
        while self._counts.reach((self.state.rows // step + 1) * step):
            yield self._micro_batch(*self._take(self.state.batch_rows), 0)
        have = self._counts.all()
        self._say_end(
            self.state.rows,
            f"{sum(have) - self.state.rows * self.state.size:,} packs of all ranks dropped, so that all end together",
        )

    def _micro_batch(self, shards: NDArray[np.int64], packs: NDArray[np.int64], masked: int) -> MicroBatch:
        self.state = dataclasses.replace(self.state, rows=self.state.rows + len(shards))
        return MicroBatch(shards, packs, masked, self.state)

    def _filler(self) -> tuple[int, int]:
        """A pack for rows of padding: of the rank that is last to end, whose shards are the last to be freed."""
        state, have = self.state, self._counts.all()
        longest = list(items_of(state.base, state.size, int(np.argmax(have)), self._end or 0))
        there = self._shards.numbers()
        known = set(there)
        wanted = [shard for left in reversed(longest) for shard in reversed(left.shards) if shard in known]
        for shard in (*wanted, *reversed(there)):
            if self._shards.count(shard):
                return shard, 0
        raise FormatError(
            f"{self._shards.folder}: rank {state.rank} pads its last steps and no shard is left to take rows from; let"
            " the producer keep a few (--keep-recent)"
        )

    def _say_end(self, rows: int, what: str) -> None:
        state = self.state
        if self._waiter.speaks:
            logger.info(
                "%s: epoch %d ends after %s steps of %d rows, %s packs; %s",
                *(self._waiter.who, state.base.epoch + 1, f"{rows // state.step_rows:,}", state.step_rows),
                *(f"{state.packs:,}", what),
            )

    # ---- packs ----

    def _take(self, count: int) -> _Rows:
        """The next packs; fewer where this rank's items end."""
        parts: list[_Rows] = []
        while count:
            shards, packs = (column[self._taken : self._taken + count] for column in self._rows)
            if not len(shards):
                if not self._next_group():
                    break
                continue
            parts.append((shards, packs))
            count -= len(shards)
            self._taken += len(shards)
            self._advance(len(shards))
        if len(parts) == 1:
            return parts[0]
        shards, packs = (np.concatenate(column) for column in zip(_NOTHING, *parts, strict=True))
        return shards, packs

    def _advance(self, packs: int) -> None:
        state, group = self.state, self._group
        assert group is not None
        done = self._taken == len(self._rows[0])
        self.state = dataclasses.replace(
            state,
            packs=state.packs + packs,
            items=state.items + (group.num_items if done else 0),
            shards=() if done else group.shards,
            offset=0 if done else self._taken,
        )

    def _next_group(self) -> bool:
        """Wait for all shards of the next group and put its packs in order; False at the end."""
        while True:
            state = self.state
            group = next_group(state.base, state.size, state.rank, state.items, self._end)
            if group is None:
                return False
            if not all(self._counts.wait(shard) for shard in group.shards):
                self._end = self._shards.end()  # fewer shards than a whole group: what is left is one
                continue
            counts = [self._count(shard) for shard in group.shards]
            if sum(counts):
                break
            self.state = dataclasses.replace(state, items=state.items + group.num_items)
        self._group, self._taken = group, group.offset
        self._opened(group.shards)
        bounds = np.cumsum([0, *counts])
        order = pack_order(state.base, group.shards, int(bounds[-1]), state.shuffle)
        part = np.searchsorted(bounds, order, side="right") - 1
        self._rows = np.array(group.shards)[part], order - bounds[part]
        return True

    def _count(self, shard: int) -> int:
        count = self._shards.count(shard)
        if count is None:
            raise FormatError(f"{self._shards.folder}: {self._shards.name(shard)} went away while it was opened")
        return count


def _listed(shards: list[int]) -> str:
    shown = ", ".join(map(str, shards[:10])) + (", ..." if len(shards) > 10 else "")
    return f"shard {shown} is" if len(shards) == 1 else f"shards {shown} ({len(shards)} in all) are"
