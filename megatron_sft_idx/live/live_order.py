"""Which rank reads which packs of live shards, and in which order. Nothing here reads files, waits or uses a clock.

The order follows from the fields of a ``Deal``, so every rank computes it without communication, and a run that resumes
from a checkpoint computes the same order. Shards are numbered from 0. Their total number is not known yet. An item is
*begun* when some of its packs are read, *done* when all are, and *untouched* before that.

**Items.** A ``Deal`` is an endless list of items. Item j belongs to data-parallel rank j mod size. At a new start, item
j is shard j. These are the items of rank 1 of 2 ranks, among the first six shards:

    >>> deal = Deal(size=2, window=2)
    >>> [deal.item(number).shards for number in deal.items_of(rank=1, end=6)]
    [(1,), (3,), (5,)]

**Groups.** A rank reads its items in groups of ``window`` items. The packs of a group are read in one permutation. It
depends only on the seed, the epoch and the shards of the group, not on timing, and not on the number of published
shards. The last group may be smaller:

    >>> deal.group(rank=1, items_done=0, end=6)
    Group(shards=(1, 3), packs_read=0, num_items=2)
    >>> deal.group(rank=1, items_done=2, end=6)
    Group(shards=(5,), packs_read=0, num_items=1)

**Resuming.** With the same number of ranks, each resumes from its own ``RankState``. With another number of ranks, the
rest is distributed again. Suppose that each rank was given 5 packs. Rank 0 stopped inside its group of shards 0 and 2.
The shards of rank 1 are smaller: it has done shards 1 and 3, and its next ones are shards 5 and 7:

    >>> states = [RankState(deal, rank=0, packs=5, open_shards=(0, 2), open_packs=5, rows=5),
    ...           RankState(deal, rank=1, packs=5, items=2, rows=5)]
    >>> again = dealt_anew(states, size=3, window=2)
    >>> again.leftovers
    (Item(shards=(0, 2), packs_read=5),)
    >>> again.frontier
    4

The rest of the open group is the first item of the new list, as a whole, because its packs are one permutation. After
the leftovers come shards 4, 5, 6 and so on, which are untouched. So no pack is read twice, and none is lost:

    >>> [again.item(number).shards for number in range(4)]
    [(0, 2), (4,), (5,), (6,)]

**Completed shards.** A rank does its items in order. So one number per rank, the number of items that it has done,
determines which shards are completed. Module ``acks`` writes these numbers for the producer.
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

# Version of the states in checkpoints, and their name in messages.
STATE_VERSION = 2
_STATE = "state_dict"
# ``dealt_anew`` rejects states in which one rank is further ahead of another (in items), because it lists all between.
_MOST_SKIPPED = 10_000_000

# ---- assignment of shards ----


@shown_by_fields
@dataclass(frozen=True, slots=True)
class Item(Record):
    """The unit of work of a rank: an untouched shard, or the rest of a group that was begun under an earlier deal.

    Attributes:
        shards: numbers of the shards, in the order in which their packs are numbered; one unless a group was begun.
        packs_read: number of packs of the group's permutation that were already read; 0 for an untouched shard.
    """

    shards: tuple[int, ...]
    packs_read: int = 0


@shown_by_fields
class Group(NamedTuple):
    """Items that a rank reads together, in one permutation of their packs.

    Attributes:
        shards: the shards of all these items.
        packs_read: number of packs of the permutation that were read under an earlier deal.
        num_items: number of these items.
    """

    shards: tuple[int, ...]
    packs_read: int
    num_items: int


@shown_by_fields
@dataclass(frozen=True, slots=True)
class Deal(Record):
    """The assignment of the shards of one epoch to ranks, and the shuffle of their packs.

    Equal deals give the same packs to the same ranks in the same order.

    Attributes:
        size: number of data-parallel ranks.
        window: number of untouched shards of a rank in a group.
        seed: seed of the shuffle.
        shuffle: whether the packs of a group are shuffled, rather than read in the order of storage.
        epoch: the epoch, from 0.
        leftovers: the first items: the rest of the shards below ``frontier`` from an earlier deal of this epoch.
        frontier: shards from this number on were untouched. They are the items after the leftovers. A shard below it
            that is not in a leftover is done.
    """

    size: Positive
    window: Positive = 1
    seed: int = 0
    shuffle: bool = True
    epoch: int = 0
    leftovers: tuple[Item, ...] = ()
    frontier: int = 0

    def contradiction(self) -> tuple[str, Any, str] | None:
        """Return an error if a leftover has no shard, or several shards and no pack that was read."""
        if any(not item.shards or (len(item.shards) > 1 and not item.packs_read) for item in self.leftovers):
            return "leftovers", "one of them", "one shard, or several that are begun"
        return None

    def item(self, number: int) -> Item:
        """Return item ``number``. Every number from 0 on has an item, even if its shard never comes."""
        if number < len(self.leftovers):
            return self.leftovers[number]
        return Item((self.frontier + number - len(self.leftovers),))

    def item_of_shard(self, shard: int) -> int:
        """Return the number of a shard's item. The shard must not be below ``frontier``."""
        return len(self.leftovers) + shard - self.frontier

    def num_items(self, end: int) -> int:
        """Return the number of items if the catalog ends with ``end`` shards."""
        return self.item_of_shard(max(end, self.frontier))

    def items_of(self, rank: int, end: int) -> range:
        """Return the numbers of a rank's items if the catalog ends with ``end`` shards.

        >>> list(Deal(size=3).items_of(rank=1, end=9))
        [1, 4, 7]
        """
        return range(rank, self.num_items(end), self.size)

    def group(self, rank: int, items_done: int, end: int | None) -> Group | None:
        """Return the next group of a rank that has done ``items_done`` of its items; None if none is left.

        A leftover that was begun is a separate group, because its packs already have a permutation.

        Args:
            rank: the rank.
            items_done: number of its items that it has done.
            end: total number of shards. None while it is unknown: then the group has its full size, and the caller must
                wait for its shards.
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
        """Return the permutation of a group's packs, which are numbered consecutively through its shards.

        Args:
            shards: the shards of the group.
            packs: total number of their packs.

        Returns:
            int64 [packs], in reading order.

        >>> Deal(size=2, shuffle=False).pack_order((1, 3), 4).tolist()
        [0, 1, 2, 3]
        """
        if not self.shuffle:
            return np.arange(packs, dtype=np.int64)
        return shuffled(packs, self.seed, self.epoch, *shards)

    def of_epoch(self, epoch: int) -> Deal:
        """Return the deal of another epoch from its beginning, without leftovers."""
        return dataclasses.replace(self, epoch=epoch, leftovers=(), frontier=0)


# ---- the position of a rank ----


@shown_by_fields
@dataclass(frozen=True, slots=True)
class RankState(Record):
    """The progress of one data-parallel rank, stored in checkpoints.

    Attributes:
        deal: the assignment of shards to ranks.
        rank: the data-parallel rank, from 0.
        generation: increases with every deal under which this consumer's acknowledgements were made; see ``acks``.
        batch_rows: number of rows in a micro-batch.
        step_rows: number of rows of this rank in a step of the optimizer.
        rows: number of rows that the rank got under this deal, equal on all ranks. At the end of an epoch some may be
            masked rows, which complete a step when the rank has no packs left.
        items: number of its items that the rank has done.
        packs: number of packs that the rank got under this deal, including packs of an open group.
        open_shards: the shards of the unfinished group of the rank; none between two groups.
        open_packs: number of packs read of that group's permutation, from its beginning, including packs read under an
            earlier deal; 0 between two groups.
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
        """Return an error for impossible numbers."""
        if self.rank >= self.deal.size:
            return "rank", self.rank, f"less than its size {self.deal.size}"
        if bool(self.open_shards) != bool(self.open_packs):
            return "open_packs", self.open_packs, "more than 0 where a group is open, else 0"
        if self.packs_of_items < 0:
            return "packs", self.packs, "at least the items of the open group"
        return None

    @property
    def first_open_item(self) -> int:
        """Number of the first item that the rank has not done."""
        return self.rank + self.items * self.deal.size

    @property
    def first_untouched_item(self) -> int:
        """Number of the rank's first item from which it has read nothing."""
        if not self.open_shards:
            begun = 0
        elif self.deal.item(self.first_open_item).packs_read:
            begun = 1  # a leftover, for any number of shards
        else:
            begun = len(self.open_shards)
        return self.first_open_item + begun * self.deal.size

    @property
    def packs_of_items(self) -> int:
        """Number of packs that the rank got from the items that it has done."""
        if not self.open_shards:
            return self.packs
        # Part of a leftover was read under the earlier deal.
        return self.packs - (self.open_packs - self.deal.item(self.first_open_item).packs_read)

    def at_epoch(self, epoch: int) -> RankState:
        """Return the state at the beginning of another epoch."""
        return RankState(self.deal.of_epoch(epoch), self.rank, self.generation, self.batch_rows, self.step_rows)

    def difference(self, other: RankState) -> str:
        """Return why a rank set up as ``other`` cannot resume from this state, as a clause; "" if it can.

        >>> RankState(Deal(size=2), rank=0).difference(RankState(Deal(size=4), rank=0))
        'data-parallel size 2, but this run has 4'
        """
        for what, mine, others in (
            ("rank", self.rank, other.rank),
            ("data-parallel size", self.deal.size, other.deal.size),
            ("micro-batch size", self.batch_rows, other.batch_rows),
            ("rows per step", self.step_rows, other.step_rows),
            ("window", self.deal.window, other.deal.window),
        ):
            if mine != others:
                return f"{what} {mine}, but this run has {others}"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain values for JSON and any checkpoint."""
        return {"version": STATE_VERSION, **Record.to_json(self)}

    @classmethod
    def from_json(cls, content: Any) -> RankState:
        """Parse the plain values of ``to_json``. FormatError: they do not describe a state."""
        return states_from_json([content])[0]


def states_to_json(states: Sequence[RankState]) -> list[dict[str, Any]]:
    """Return all ranks' states as plain values. Their deal is one object, which pickle and torch.save store once."""
    deal = states[0].deal.to_json()
    small = Deal(states[0].deal.size)
    return [{**dataclasses.replace(state, deal=small).to_json(), "deal": deal} for state in states]


def states_from_json(contents: Sequence[Any]) -> list[RankState]:
    """Parse the plain values of ``to_json`` or ``states_to_json``.

    Deals can have thousands of leftovers, so a deal equal to that of the previous state is parsed only once.

    Raises:
        FormatError: the values do not describe states.
    """
    states: list[RankState] = []
    content_of_deal = deal = None
    for content in contents:
        if not isinstance(content, dict):
            raise FormatError(f"{_STATE}: expected the result of state_dict(), found {type(content).__name__}")
        require_version(_STATE, content, STATE_VERSION)
        if deal is None or content.get("deal") != content_of_deal:
            content_of_deal = content.get("deal")
            deal = Deal.parse(_STATE, content_of_deal, "deal.")
        states.append(RankState.parse(_STATE, {**content, "deal": deal}))
    return states


# ---- redistribution ----


def dealt_anew(states: Sequence[RankState], size: int, window: int) -> Deal:
    """Distribute the remaining items of all ranks of a job to any number of ranks.

    The items of the new deal are, in this order: groups that were begun, each finished by one rank; shards that some
    rank had not reached while others were beyond them; then all untouched shards.

    Args:
        states: states of all ranks, at one step.
        size: number of ranks that resume.
        window: number of untouched shards in a group from now on.

    Raises:
        FormatError: these are not the states of all ranks of one job at one step.
    """
    states = _of_one_step(states)
    deal = states[0].deal
    begun = [Item(state.open_shards, state.open_packs) for state in states if state.open_shards]
    # Every item below the first number is begun or done. No rank has touched an item from the second number on.
    all_touched = min(state.first_untouched_item for state in states)
    none_touched = max(state.first_untouched_item - deal.size + 1 for state in states)
    none_touched = max(none_touched, len(deal.leftovers))  # leftovers stay leftovers
    if none_touched - all_touched > _MOST_SKIPPED:
        raise FormatError(
            f"{_STATE}: one rank is {none_touched - all_touched} items ahead of another, so the states are from"
            " different runs"
        )
    untouched: list[Item] = []
    for number in range(all_touched, none_touched):
        item = deal.item(number)
        if number < states[number % deal.size].first_untouched_item:
            continue
        # A leftover may be begun under an earlier deal although no rank has touched it under this one.
        (begun if item.packs_read else untouched).append(item)
    leftovers = *sorted(begun, key=_shards), *sorted(untouched, key=_shards)
    frontier = deal.frontier + none_touched - len(deal.leftovers)
    return dataclasses.replace(deal, size=size, window=window, leftovers=leftovers, frontier=frontier)


def _shards(item: Item) -> tuple[int, ...]:
    return item.shards


def _of_one_step(states: Sequence[RankState]) -> list[RankState]:
    """Return the states by rank. FormatError: they do not belong to all ranks of one job at one step."""
    if not states:
        raise FormatError(f"{_STATE}: an empty list; pass the states of all data-parallel ranks of one checkpoint")
    states = sorted(states, key=lambda state: state.rank)
    first, ranks = states[0], [state.rank for state in states]
    if len(ranks) != first.deal.size or ranks != list(range(first.deal.size)):
        raise FormatError(
            f"{_STATE}: states of ranks {ranks[:20]}, expected one state for each of the {first.deal.size}"
            " data-parallel ranks of one checkpoint"
        )
    shared = ("deal", "generation", "batch_rows", "step_rows", "rows")
    for state in states:
        if any(getattr(state, name) != getattr(first, name) for name in shared):
            raise FormatError(
                f"{_STATE}: ranks {first.rank} and {state.rank} are at different steps ({first.rows} and {state.rows}"
                f" rows, epochs {first.deal.epoch} and {state.deal.epoch}); pass the states of one checkpoint"
            )
    return states


# ---- the minimum for a producer's limit ----


def least_ahead(deal: Deal, step_rows: int, min_packs: int) -> int:
    """Return how many shards a producer must be allowed to run ahead, so that all ranks can finish their next step.

    The producer publishes a shard only while fewer than ``max_ahead_shards`` are published and not completed. A shard
    is completed when its whole group is read and included in a checkpoint. So the result is the largest number of
    uncompleted shards that one step can need, in the worst case:

    * Everything possible is committed. The rest was distributed again if necessary (``may_need_commit`` of the loader).
      So the begun groups come first, evenly distributed over the ranks, and then shard after shard.
    * A begun group has one pack left. All other shards have ``min_packs``.

    Two ranks take 10 packs per step, from shards with at least 8 packs. Both are inside a shard with one pack left, and
    need two more shards each. These are 6 shards:

    >>> least_ahead(Deal(size=2), step_rows=10, min_packs=8)
    6

    Two ranks take 1 pack per step, in groups of two shards. Rank 0 is inside a group. Rank 1 needs its next group, and
    every other shard belongs to rank 0. So 2 shards are begun, and 3 more are needed:

    >>> least_ahead(Deal(size=2, window=2), step_rows=1, min_packs=8)
    5

    Four ranks were inside a shard each, and three ranks resume. Rank 0 gets two of the begun shards:

    >>> begun = tuple(Item((shard,), packs_read=7) for shard in range(4))
    >>> least_ahead(Deal(size=3, leftovers=begun, frontier=4), step_rows=12, min_packs=8)
    10

    Args:
        deal: deal of the job. Its leftovers count, because more groups may be begun than it has ranks.
        step_rows: number of packs that a rank takes in a step of the optimizer.
        min_packs: minimum number of packs in every shard except the last one.
    """
    leftover_groups = [len(item.shards) for item in deal.leftovers if item.packs_read]
    # The job may be inside any of these groups. While it runs, each rank begins at most one more.
    shards_of_group = sorted([*leftover_groups, *[deal.window] * deal.size], reverse=True)
    most_begun = max(deal.size, len(leftover_groups))
    least = 0
    for num_begun in range(most_begun + 1):
        # The first ranks have one begun group more than the others, unless these are evenly distributed.
        fewer, ranks_with_more = divmod(num_begun, deal.size)
        num_items = _items_for_step(deal, step_rows, min_packs, fewer, deal.size - 1)
        if ranks_with_more:
            of_those = _items_for_step(deal, step_rows, min_packs, fewer + 1, ranks_with_more - 1)
            num_items = max(num_items, of_those)
        untouched = num_items - num_begun
        least = max(least, sum(shards_of_group[:num_begun]) + untouched)
    return least


def _items_for_step(deal: Deal, step_rows: int, min_packs: int, num_begun: int, rank: int) -> int:
    """Return the number of items up to the last one that a rank needs for a step.

    The first ``num_begun`` of its items have one pack left. All others are untouched shards.
    """
    groups = _divided_up(max(0, step_rows - num_begun), deal.window * min_packs)
    items_of_rank = num_begun + groups * deal.window
    return max(0, items_of_rank - 1) * deal.size + rank + 1


def last_shard_of_step(state: RankState, packs_in: Callable[[int], int], min_packs: int) -> int:
    """Return the highest number of a shard that this rank may need for its next step.

    It depends on the minimum size of shards, not on their actual size. So a run and its repetition from a checkpoint
    get the same result, independent of the existing shards.

    Rank 0 of 2 ranks has read 5 of the 8 packs of shard 0, and takes 4 packs per step. Three come from shard 0, and one
    from shard 2:

    >>> state = RankState(Deal(size=2), rank=0, step_rows=4, packs=5, open_shards=(0,), open_packs=5)
    >>> last_shard_of_step(state, packs_in=lambda shard: 8, min_packs=8)
    2

    Args:
        state: state of the rank, between two steps.
        packs_in: function that returns the number of packs in a shard of the open group.
        min_packs: minimum number of packs in every other shard except the last one.
    """
    deal = state.deal
    packs = sum(packs_in(shard) for shard in state.open_shards) - state.open_packs
    last = max(state.open_shards, default=0)
    items_begun = (state.first_untouched_item - state.rank) // deal.size
    while packs < state.step_rows:
        group = deal.group(state.rank, items_begun, end=None)
        assert group is not None  # while the end is unknown, there is always another one
        # A group that was begun under an earlier deal has at least one pack left.
        packs += 1 if group.packs_read else len(group.shards) * min_packs
        last = max(last, *group.shards)  # a group is read only once all its shards are there
        items_begun += group.num_items
    return last


def _divided_up(number: int, divisor: int) -> int:
    """Return ``number / divisor``, rounded up."""
    return -(-number // divisor)
