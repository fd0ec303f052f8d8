"""Which rank reads which packs of live shards, and in which order. Nothing here reads a file, waits or keeps time.

The order follows from a few numbers, so every rank computes it alone, and a run that goes on from a checkpoint computes
the same one. Shards are numbered from 0. Nobody knows yet how many will come.

**Items.** A ``Deal`` is an endless list of items. Item j belongs to data-parallel rank j mod size. At a fresh start
item j is shard j. These are the items of rank 1 of 2 ranks, among the first six shards:

    >>> deal = Deal(size=2, window=2)
    >>> [deal.item(number).shards for number in deal.items_of(rank=1, end=6)]
    [(1,), (3,), (5,)]

**Groups.** A rank reads its items in groups of ``window`` shards. The packs of a group come in one permutation. It
depends on the seed, the epoch and the shards of the group, and on nothing else: not on timing, and not on how many
shards are published. The last group may be smaller:

    >>> deal.group(rank=1, items_done=0, end=6)
    Group(shards=(1, 3), packs_read=0, num_items=2)
    >>> deal.group(rank=1, items_done=2, end=6)
    Group(shards=(5,), packs_read=0, num_items=1)

**Resuming.** With as many ranks as before, each goes on from its own ``RankState``. With another number of ranks, what
is left is dealt out anew. Suppose that rank 0 stopped 5 packs into its group of shards 0 and 2, and that rank 1 has
done shards 1 and 3 and stands in front of shards 5 and 7:

    >>> states = [RankState(deal, rank=0, packs=5, open_shards=(0, 2), open_packs=5, rows=5),
    ...           RankState(deal, rank=1, packs=5, items=2, rows=5)]
    >>> again = dealt_anew(states, size=3, window=2)
    >>> again.leftovers
    (Item(shards=(0, 2), packs_read=5),)
    >>> again.frontier
    4

The rest of the open group is the first item of the new list, whole, since its packs are one permutation. After the
leftovers come shards 4, 5, 6 and so on, which nobody had touched. So each pack is read exactly once:

    >>> [again.item(number).shards for number in range(4)]
    [(0, 2), (4,), (5,), (6,)]

**Completed shards.** A rank does its items in order. So one number for each rank, how many items it has done, says
which shards are completed. Module ``acks`` writes these numbers down for the producer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live.documents import Positive, Record, require_version
from megatron_sft_idx.packing.permutation import shuffled

# Version of the states in checkpoints, and what messages call them.
STATE_VERSION = 2
_STATE = "state_dict"
# A damaged state must not make a list of this length.
_MOST_SKIPPED = 10_000_000

# ---- how shards are dealt out ----


@dataclass(frozen=True, slots=True)
class Item(Record):
    """What one rank reads as a whole: an untouched shard, or the rest of a group that an earlier deal began.

    Attributes:
        shards: numbers of the shards, in the order in which their packs are numbered; one unless a group was begun.
        packs_read: how many packs of the group's permutation were read already; 0 for an untouched shard.
    """

    shards: tuple[int, ...]
    packs_read: int = 0


class Group(NamedTuple):
    """Items that a rank reads together, in one permutation of their packs.

    Attributes:
        shards: the shards of all these items.
        packs_read: how many packs of the permutation were read under an earlier deal.
        num_items: how many items these are.
    """

    shards: tuple[int, ...]
    packs_read: int
    num_items: int


@dataclass(frozen=True, slots=True)
class Deal(Record):
    """How the shards of one epoch are dealt out to ranks, and how their packs are shuffled.

    Two deals that are equal give the same packs to the same ranks in the same order.

    Attributes:
        size: the number of data-parallel ranks.
        window: how many untouched shards of a rank make a group.
        seed: of the shuffle.
        shuffle: whether the packs of a group are shuffled, rather than read as they are stored.
        epoch: the epoch, from 0.
        leftovers: the first items: what an earlier deal of this epoch has left over below ``frontier``.
        frontier: number of the first shard that nobody had touched; the shards from it on are the items after the
            leftovers. A shard below it that is in no leftover is completed.
    """

    size: Positive
    window: Positive = 1
    seed: int = 0
    shuffle: bool = True
    epoch: int = 0
    leftovers: tuple[Item, ...] = ()
    frontier: int = 0

    def contradiction(self) -> tuple[str, Any, str] | None:
        """A leftover of no shard, or of several that are untouched."""
        if any(not item.shards or (len(item.shards) > 1 and not item.packs_read) for item in self.leftovers):
            return "leftovers", "one of them", "one shard, or several that are begun"
        return None

    def item(self, number: int) -> Item:
        """Item ``number``. There is one for every number from 0 on, though its shard may never come."""
        if number < len(self.leftovers):
            return self.leftovers[number]
        return Item((self.frontier + number - len(self.leftovers),))

    def num_items(self, end: int) -> int:
        """How many items there are where ``end`` shards are all; the number of the item of shard ``end``."""
        return len(self.leftovers) + max(0, end - self.frontier)

    def items_of(self, rank: int, end: int, first: int = 0) -> range:
        """Numbers of a rank's items, without its ``first`` ones, where ``end`` shards are all.

        >>> list(Deal(size=3).items_of(rank=1, end=9, first=1))
        [4, 7]
        """
        return range(rank + first * self.size, self.num_items(end), self.size)

    def group(self, rank: int, items_done: int, end: int | None) -> Group | None:
        """The group that a rank reads once it has done ``items_done`` of its items; None where none is left.

        A leftover that was begun is a group by itself, as its packs have their permutation already.

        Args:
            rank: the rank.
            items_done: how many of its items it has done.
            end: how many shards there are in all. None while nobody knows: the group is a whole one then, and the
                caller must wait for its shards.
        """
        if end is None:
            end = self.frontier + (items_done + self.window + 1) * self.size
        shards: list[int] = []
        for number in self.items_of(rank, end, items_done):
            item = self.item(number)
            if item.packs_read:
                return Group(tuple(shards), 0, len(shards)) if shards else Group(item.shards, item.packs_read, 1)
            shards += item.shards
            if len(shards) == self.window:
                break
        return Group(tuple(shards), 0, len(shards)) if shards else None

    def pack_order(self, shards: Sequence[int], packs: int) -> NDArray[np.int64]:
        """The permutation of a group's packs, which are numbered through its shards one after the other.

        Args:
            shards: the shards of the group.
            packs: how many packs they have together.

        Returns:
            int64 [packs]. The first one read comes first.

        >>> Deal(size=2, shuffle=False).pack_order((1, 3), 4).tolist()
        [0, 1, 2, 3]
        """
        if not self.shuffle:
            return np.arange(packs, dtype=np.int64)
        return shuffled(packs, self.seed, self.epoch, *shards)

    def of_epoch(self, epoch: int) -> Deal:
        """The deal of another epoch from its beginning, where nothing is left over."""
        return dataclasses.replace(self, epoch=epoch, leftovers=(), frontier=0)


# ---- where a rank stands ----


@dataclass(frozen=True, slots=True)
class RankState(Record):
    """How far one data-parallel rank has come. Checkpoints hold it.

    Attributes:
        deal: what the ranks read.
        rank: the data-parallel rank, from 0.
        generation: how often this consumer's shards were dealt out anew, to other ranks or otherwise.
        batch_rows: rows of a micro-batch.
        step_rows: rows of this rank in a step of the optimizer.
        rows: rows that the rank was given under this deal, masked ones at the end included; equal on all ranks.
        items: how many of its items the rank has done.
        packs: packs that the rank was given under this deal, those of an open group included.
        open_shards: the shards of the group that the rank is in the middle of; none between two groups.
        open_packs: how many packs of that group's permutation are read; 0 between two groups.
    """

    deal: Deal
    rank: int
    generation: int = 0
    batch_rows: Positive = 1
    step_rows: Positive = 1
    rows: int = 0
    items: int = 0
    packs: int = 0
    open_shards: tuple[int, ...] = ()
    open_packs: int = 0

    def contradiction(self) -> tuple[str, Any, str] | None:
        """Numbers that no rank can come to."""
        is_open = bool(self.open_shards)
        if self.rank >= self.deal.size or is_open != (self.open_packs > 0) or self.packs_of_items < 0:
            return "rank, open_shards, open_packs or packs", self.rank, "numbers that go together"
        return None

    @property
    def first_open_item(self) -> int:
        """Number of the first item that the rank has not done."""
        return self.rank + self.items * self.deal.size

    @property
    def first_untouched_item(self) -> int:
        """Number of the first item of the rank of which it has read nothing."""
        if not self.open_shards:
            begun = 0
        elif self.deal.item(self.first_open_item).packs_read:
            begun = 1  # a leftover, whatever the number of its shards
        else:
            begun = len(self.open_shards)
        return self.first_open_item + begun * self.deal.size

    @property
    def packs_of_items(self) -> int:
        """How many packs the rank was given of the items that it has done."""
        if not self.open_shards:
            return self.packs
        # Of a leftover, some were read under the earlier deal.
        return self.packs - (self.open_packs - self.deal.item(self.first_open_item).packs_read)

    def at_epoch(self, epoch: int) -> RankState:
        """The state at the beginning of another epoch."""
        return RankState(self.deal.of_epoch(epoch), self.rank, self.generation, self.batch_rows, self.step_rows)

    def difference(self, other: RankState) -> str:
        """What forbids that a rank of state ``other`` goes on from this one, in both states; empty where nothing does.

        >>> RankState(Deal(size=2), rank=0).difference(RankState(Deal(size=4), rank=0))
        'data-parallel size 2, and here it is 4'
        """
        for what, mine, others in (
            ("rank", self.rank, other.rank),
            ("data-parallel size", self.deal.size, other.deal.size),
            ("micro-batch size", self.batch_rows, other.batch_rows),
            ("rows in a step", self.step_rows, other.step_rows),
            ("window", self.deal.window, other.deal.window),
        ):
            if mine != others:
                return f"{what} {mine}, and here it is {others}"
        return ""

    def to_json(self) -> dict[str, Any]:
        """The state as plain values, which JSON and every checkpoint can hold."""
        return {"version": STATE_VERSION, **Record.to_json(self)}

    @classmethod
    def from_json(cls, content: Any) -> RankState:
        """The state in the plain values of ``to_json``. FormatError where they are not those of a state."""
        if not isinstance(content, dict):
            raise FormatError(f"{_STATE}: found {type(content).__name__}, expected what state_dict() returned")
        require_version(_STATE, content, STATE_VERSION)
        return cls.parse(_STATE, content)


def dealt_anew(states: Sequence[RankState], size: int, window: int) -> Deal:
    """What all ranks of one job have left, dealt out to any number of ranks.

    The items of the new deal are, in this order: groups that were begun, each to be finished by one rank; shards that
    some rank had not come to while others were beyond them; then all shards that nobody had touched.

    Args:
        states: of all ranks, at one step.
        size: the number of ranks that go on.
        window: how many untouched shards make a group from now on.

    Raises:
        FormatError: these are not the states of all ranks of one job at one step.
    """
    states = _of_one_step(states)
    deal = states[0].deal
    begun = [Item(state.open_shards, state.open_packs) for state in states if state.open_shards]
    # Items from ``beyond`` on are untouched by all ranks, and those below ``least`` are begun or done by all.
    beyond = max(len(deal.leftovers), *(state.first_untouched_item - deal.size + 1 for state in states))
    least = min(state.first_untouched_item for state in states)
    if beyond - least > _MOST_SKIPPED:
        raise FormatError(f"{_STATE}: one rank is {beyond - least} shards ahead of another, so no state of one run")
    numbers = range(least, beyond)
    skipped = [deal.item(number) for number in numbers if number >= states[number % deal.size].first_untouched_item]
    begun += [item for item in skipped if item.packs_read]
    untouched = [item for item in skipped if not item.packs_read]
    leftovers = *sorted(begun, key=_shards), *sorted(untouched, key=_shards)
    frontier = deal.frontier + beyond - len(deal.leftovers)
    return dataclasses.replace(deal, size=size, window=window, leftovers=leftovers, frontier=frontier)


def _shards(item: Item) -> tuple[int, ...]:
    return item.shards


def _of_one_step(states: Sequence[RankState]) -> list[RankState]:
    """The states by rank. FormatError where they are not those of all ranks of one job at one step."""
    if not states:
        raise FormatError(f"{_STATE}: an empty list; give the states of all data-parallel ranks of one checkpoint")
    states = sorted(states, key=lambda state: state.rank)
    first, ranks = states[0], [state.rank for state in states]
    if len(ranks) != first.deal.size or ranks != list(range(first.deal.size)):
        raise FormatError(
            f"{_STATE}: states of ranks {ranks[:20]}, expected one of each of the {first.deal.size} data-parallel ranks"
            " of one checkpoint"
        )
    shared = ("deal", "generation", "batch_rows", "step_rows", "rows")
    for state in states:
        if any(getattr(state, name) != getattr(first, name) for name in shared):
            raise FormatError(
                f"{_STATE}: ranks {first.rank} and {state.rank} do not stand at one step ({first.rows} and"
                f" {state.rows} rows, epochs {first.deal.epoch} and {state.deal.epoch}); give the states of one"
                " checkpoint"
            )
    return states


# ---- how far ahead a producer must be allowed to be ----


def least_ahead(deal: Deal, step_rows: int, min_packs: int) -> int:
    """The least ``max_ahead_shards`` with which a producer and a job never wait for each other for good.

    The producer publishes a shard only while fewer than ``max_ahead_shards`` are published and not completed. A shard
    is completed when a rank has read all of it and a checkpoint says so. Two things must always be possible:

    * **A step.** At its beginning a rank may have one pack left in its open group. The other ``step_rows - 1`` packs
      come from further groups, which have ``window * min_packs`` packs or more each. All ranks together read
      ``window * size`` shards in a group. With 2 ranks, a window of 1, shards of at least 8 packs and 10 packs a step,
      a rank may take its packs from 3 groups (1 + 8 + 1), which are 6 shards:

      >>> least_ahead(Deal(size=2, window=1), step_rows=10, min_packs=8)
      6

    * **The end of a group.** A job may save one pack before the end of a group, and its next micro-batch may reach into
      the next group, which begins only when all its shards are there. From the first shard of the one to the last of
      the other, of one rank, there are ``(2 * window - 1) * size`` more. With 4 ranks and a window of 3, where rank 0
      reads shards 0, 4 and 8 and then 12, 16 and 20, these are shards 0 to 20:

      >>> least_ahead(Deal(size=4, window=3), step_rows=1, min_packs=100)
      21

    Args:
        deal: of the job.
        step_rows: packs that a rank takes in a step of the optimizer.
        min_packs: how many packs every shard but the last one has at least.
    """
    packs_of_group = deal.window * min_packs
    further_groups = _divided_up(step_rows - 1, packs_of_group)
    shards_of_a_step = (1 + further_groups) * deal.window * deal.size
    shards_to_end_a_group = (2 * deal.window - 1) * deal.size + 1
    return max(shards_of_a_step, shards_to_end_a_group)


def last_shard_of_step(state: RankState, packs_in: Callable[[int], int], min_packs: int) -> int:
    """The number of the last shard that a rank may need for its next step.

    It follows from what shards have at least, and not from what they have. So a run and one that repeats it from a
    checkpoint get the same answer, whichever shards are there by then.

    Rank 0 of 2 ranks has read 5 of the 8 packs of shard 0, and takes 4 packs a step. Three come from shard 0, and one
    from shard 2:

    >>> state = RankState(Deal(size=2), rank=0, step_rows=4, packs=5, open_shards=(0,), open_packs=5)
    >>> last_shard_of_step(state, packs_in=lambda shard: 8, min_packs=8)
    2

    Args:
        state: of the rank, between two steps.
        packs_in: gives the number of packs in a shard of the open group.
        min_packs: how many packs every other shard has at least.
    """
    deal = state.deal
    packs = sum(packs_in(shard) for shard in state.open_shards) - state.open_packs
    last = max(state.open_shards, default=0)
    number = state.first_untouched_item
    shards_of_group = 0
    # A group begins only when all its shards are there.
    while packs < state.step_rows or 0 < shards_of_group < deal.window:
        item = deal.item(number)
        number += deal.size
        last = max(last, *item.shards)
        if item.packs_read:  # a group by itself, with one pack left at least
            packs, shards_of_group = packs + 1, 0
        else:
            packs, shards_of_group = packs + min_packs, shards_of_group % deal.window + 1
    return last


def _divided_up(number: int, divisor: int) -> int:
    """``number / divisor``, rounded up."""
    return -(-number // divisor)
