"""Which rank reads which packs of live shards, and in which order. Nothing here reads a file, waits or keeps time.

The order follows from the fields of a ``Deal``, so every rank computes it alone, and a run that goes on from a
checkpoint computes the same one. Shards are numbered from 0. Nobody knows yet how many will come. Three words are used:
an item is *begun* when some of its packs are read, *done* when all are, and *untouched* before.

**Items.** A ``Deal`` is an endless list of items. Item j belongs to data-parallel rank j mod size. At a fresh start
item j is shard j. These are the items of rank 1 of 2 ranks, among the first six shards:

    >>> deal = Deal(size=2, window=2)
    >>> [deal.item(number).shards for number in deal.items_of(rank=1, end=6)]
    [(1,), (3,), (5,)]

**Groups.** A rank reads its items in groups of ``window`` items. The packs of a group come in one permutation. It
depends on the seed, the epoch and the shards of the group, and on nothing else: not on timing, and not on how many
shards are published. The last group may be smaller:

    >>> deal.group(rank=1, items_done=0, end=6)
    Group(shards=(1, 3), packs_read=0, num_items=2)
    >>> deal.group(rank=1, items_done=2, end=6)
    Group(shards=(5,), packs_read=0, num_items=1)

**Resuming.** With as many ranks as before, each goes on from its own ``RankState``. With another number of ranks, what
is left is dealt out anew. Suppose that each rank was given 5 packs. Rank 0 stopped inside its group of shards 0 and 2.
The shards of rank 1 are smaller: it has done shards 1 and 3, and stands in front of shards 5 and 7:

    >>> states = [RankState(deal, rank=0, packs=5, open_shards=(0, 2), open_packs=5, rows=5),
    ...           RankState(deal, rank=1, packs=5, items=2, rows=5)]
    >>> again = dealt_anew(states, size=3, window=2)
    >>> again.leftovers
    (Item(shards=(0, 2), packs_read=5),)
    >>> again.frontier
    4

The rest of the open group is the first item of the new list, whole, since its packs are one permutation. After the
leftovers come shards 4, 5, 6 and so on, which nobody had touched. So no pack is read twice, and none is forgotten:

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
from megatron_sft_idx.lines import shown_by_fields
from megatron_sft_idx.live.documents import Positive, Record, require_version
from megatron_sft_idx.packing.permutation import shuffled

# Version of the states in checkpoints, and what messages call them.
STATE_VERSION = 2
_STATE = "state_dict"
# ``dealt_anew`` refuses states in which one rank is further ahead of another, in items: it would list all between them.
_MOST_SKIPPED = 10_000_000

# ---- how shards are dealt out ----


@shown_by_fields
@dataclass(frozen=True, slots=True)
class Item(Record):
    """What one rank reads as a whole: an untouched shard, or the rest of a group that an earlier deal began.

    Attributes:
        shards: numbers of the shards, in the order in which their packs are numbered; one unless a group was begun.
        packs_read: how many packs of the group's permutation were read already; 0 for an untouched shard.
    """

    shards: tuple[int, ...]
    packs_read: int = 0


@shown_by_fields
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


@shown_by_fields
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
        leftovers: the first items: what an earlier deal of this epoch has left of the shards below ``frontier``.
        frontier: nobody had touched a shard from this number on. These shards are the items after the leftovers. A
            shard below it that is in no leftover is done.
    """

    size: Positive
    window: Positive = 1
    seed: int = 0
    shuffle: bool = True
    epoch: int = 0
    leftovers: tuple[Item, ...] = ()
    frontier: int = 0

    def contradiction(self) -> tuple[str, Any, str] | None:
        """Reports a leftover that has no shard, or several shards and no pack that was read."""
        if any(not item.shards or (len(item.shards) > 1 and not item.packs_read) for item in self.leftovers):
            return "leftovers", "one of them", "one shard, or several that are begun"
        return None

    def item(self, number: int) -> Item:
        """Item ``number``. There is one for every number from 0 on, though its shard may never come."""
        if number < len(self.leftovers):
            return self.leftovers[number]
        return Item((self.frontier + number - len(self.leftovers),))

    def item_of_shard(self, shard: int) -> int:
        """Number of the item of a shard, which must not be below ``frontier``."""
        return len(self.leftovers) + shard - self.frontier

    def num_items(self, end: int) -> int:
        """How many items there are if the catalog ends with ``end`` shards."""
        return self.item_of_shard(max(end, self.frontier))

    def items_of(self, rank: int, end: int) -> range:
        """Numbers of a rank's items if the catalog ends with ``end`` shards.

        >>> list(Deal(size=3).items_of(rank=1, end=9))
        [1, 4, 7]
        """
        return range(rank, self.num_items(end), self.size)

    def group(self, rank: int, items_done: int, end: int | None) -> Group | None:
        """The group that a rank reads once it has done ``items_done`` of its items; None where none is left.

        A leftover that was begun is a group by itself, as its packs have their permutation already.

        Args:
            rank: the rank.
            items_done: how many of its items it has done.
            end: how many shards there are in all. None while nobody knows: then the group is not cut short, and the
                caller must wait for its shards.
        """
        shards: list[int] = []
        for num_items in range(self.window):
            number = rank + (items_done + num_items) * self.size
            if end is not None and number >= self.num_items(end):
                break
            item = self.item(number)
            if item.packs_read:
                if not shards:
                    return Group(item.shards, item.packs_read, 1)
                break
            shards += item.shards  # one, since it is untouched
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


@shown_by_fields
@dataclass(frozen=True, slots=True)
class RankState(Record):
    """How far one data-parallel rank has come. Checkpoints hold it.

    Attributes:
        deal: what the ranks read.
        rank: the data-parallel rank, from 0.
        generation: grows with every deal that acknowledgements of this consumer were made under; see ``acks``.
        batch_rows: rows of a micro-batch.
        step_rows: rows of this rank in a step of the optimizer.
        rows: rows that the rank was given under this deal, equal on all ranks. At the end of an epoch some may be
            masked rows, which fill up a step where the rank has no packs left.
        items: how many of its items the rank has done.
        packs: packs that the rank was given under this deal, those of an open group included.
        open_shards: the shards of the group that the rank is in the middle of; none between two groups.
        open_packs: how many packs of that group's permutation are read, from its beginning, those that were read under
            an earlier deal included; 0 between two groups.
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
        """Reports numbers that no rank can come to."""
        if self.rank >= self.deal.size:
            return "rank", self.rank, f"less than its size {self.deal.size}"
        if bool(self.open_shards) != bool(self.open_packs):
            return "open_packs", self.open_packs, "more than 0 where a group is open, else 0"
        if self.packs_of_items < 0:
            return "packs", self.packs, "those of the open group at least"
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
        """Why a rank that is set up as ``other`` cannot go on from this state, as a clause; empty where it can.

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
        return states_from_json([content])[0]


def states_to_json(states: Sequence[RankState]) -> list[dict[str, Any]]:
    """The states of all ranks as plain values. Their deal is one object, which pickle and torch.save store once."""
    deal = states[0].deal.to_json()
    small = Deal(states[0].deal.size)
    return [{**dataclasses.replace(state, deal=small).to_json(), "deal": deal} for state in states]


def states_from_json(contents: Sequence[Any]) -> list[RankState]:
    """The states in the plain values of ``to_json`` or ``states_to_json``.

    Deals can have thousands of leftovers. So a deal that is the same as in the state before is parsed once.

    Raises:
        FormatError: the values are not those of states.
    """
    states: list[RankState] = []
    content_of_deal = deal = None
    for content in contents:
        if not isinstance(content, dict):
            raise FormatError(f"{_STATE}: found {type(content).__name__}, expected what state_dict() returned")
        require_version(_STATE, content, STATE_VERSION)
        if deal is None or content.get("deal") != content_of_deal:
            content_of_deal = content.get("deal")
            deal = Deal.parse(_STATE, content_of_deal, "deal.")
        states.append(RankState.parse(_STATE, {**content, "deal": deal}))
    return states


# ---- dealing anew ----


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
    # Every item below the first number is begun or done by its rank. No rank has touched one from the second number on.
    all_touched = min(state.first_untouched_item for state in states)
    none_touched = max(state.first_untouched_item - deal.size + 1 for state in states)
    none_touched = max(none_touched, len(deal.leftovers))  # leftovers stay leftovers
    if none_touched - all_touched > _MOST_SKIPPED:
        raise FormatError(
            f"{_STATE}: one rank is {none_touched - all_touched} items ahead of another, so these are no states of one"
            " run"
        )
    untouched: list[Item] = []
    for number in range(all_touched, none_touched):
        item = deal.item(number)
        if number < states[number % deal.size].first_untouched_item:
            continue
        # A leftover may be begun, under an earlier deal, though nobody has touched it under this one.
        (begun if item.packs_read else untouched).append(item)
    leftovers = *sorted(begun, key=_shards), *sorted(untouched, key=_shards)
    frontier = deal.frontier + none_touched - len(deal.leftovers)
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
    """How far ahead a producer must be allowed to be, so that all ranks always come to the end of their next step.

    The producer publishes a shard only while fewer than ``max_ahead_shards`` are published and not completed. A shard
    is completed when its whole group is read and a checkpoint says so. So the answer is how many shards can be needed
    for one step and be not completed, in the worst case:

    * All is committed that can be. What is left was dealt out anew, if that was needed (``may_need_commit`` of the
      loader). So the begun groups come first, spread evenly over the ranks, and then shard after shard.
    * A begun group has one pack left. All other shards have ``min_packs``.

    Two ranks take 10 packs a step, of shards with at least 8 packs. Both are inside a shard, with one pack left, and
    need two more shards each. These are 6 shards:

    >>> least_ahead(Deal(size=2), step_rows=10, min_packs=8)
    6

    Two ranks take 1 pack a step, in groups of two shards. Rank 0 is inside a group. Rank 1 needs its next group, and
    every other shard belongs to rank 0. So 2 shards are begun, and 3 more are needed:

    >>> least_ahead(Deal(size=2, window=2), step_rows=1, min_packs=8)
    5

    Four ranks were inside a shard each, and three ranks go on. Rank 0 gets two of the begun shards:

    >>> begun = tuple(Item((shard,), packs_read=7) for shard in range(4))
    >>> least_ahead(Deal(size=3, leftovers=begun, frontier=4), step_rows=12, min_packs=8)
    10

    Args:
        deal: of the job. Its leftovers count, since more groups may be begun than it has ranks.
        step_rows: packs that a rank takes in a step of the optimizer.
        min_packs: how many packs every shard but the last one has at least.
    """
    leftover_groups = [len(item.shards) for item in deal.leftovers if item.packs_read]
    # The job may be inside any of these groups; while it runs, each rank begins at most one more.
    shards_of_group = sorted([*leftover_groups, *[deal.window] * deal.size], reverse=True)
    most_begun = max(deal.size, len(leftover_groups))
    least = 0
    for num_begun in range(most_begun + 1):
        # The first ranks have one begun group more than the others, unless these are spread evenly.
        fewer, ranks_with_more = divmod(num_begun, deal.size)
        num_items = _items_for_step(deal, step_rows, min_packs, fewer, deal.size - 1)
        if ranks_with_more:
            of_those = _items_for_step(deal, step_rows, min_packs, fewer + 1, ranks_with_more - 1)
            num_items = max(num_items, of_those)
        untouched = num_items - num_begun
        least = max(least, sum(shards_of_group[:num_begun]) + untouched)
    return least


def _items_for_step(deal: Deal, step_rows: int, min_packs: int, num_begun: int, rank: int) -> int:
    """How many items there are up to the last one that a rank needs for a step.

    The first ``num_begun`` of its items have one pack left. All others are untouched shards.
    """
    groups = _divided_up(max(0, step_rows - num_begun), deal.window * min_packs)
    items_of_rank = num_begun + groups * deal.window
    return max(0, items_of_rank - 1) * deal.size + rank + 1


def last_shard_of_step(state: RankState, packs_in: Callable[[int], int], min_packs: int) -> int:
    """The highest number of a shard that this rank may need for its next step; other ranks may need others.

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
        min_packs: how many packs every other shard but the last one has at least.
    """
    deal = state.deal
    packs = sum(packs_in(shard) for shard in state.open_shards) - state.open_packs
    last = max(state.open_shards, default=0)
    items_begun = (state.first_untouched_item - state.rank) // deal.size
    while packs < state.step_rows:
        group = deal.group(state.rank, items_begun, end=None)
        assert group is not None  # while the end is not known, there is always another one
        # Of a group that was begun under an earlier deal, one pack is left at least.
        packs += 1 if group.packs_read else len(group.shards) * min_packs
        last = max(last, *group.shards)  # a group is read only once all its shards are there
        items_begun += group.num_items
    return last


def _divided_up(number: int, divisor: int) -> int:
    """``number / divisor``, rounded up."""
    return -(-number // divisor)
