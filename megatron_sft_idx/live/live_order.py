"""Which rank reads which packs of live shards, and in which order: computed from a few numbers, never from timing.

A ``Base`` describes the order: the leftovers of an earlier job, and the first shard that nobody had touched. That gives
a list of items: the leftovers, then one item for each shard from there on. Item j belongs to data-parallel rank
j mod size, so in a fresh job shard s belongs to rank s mod size.

A rank takes its items in groups: ``window`` untouched items that follow each other, or one that was begun before. The
packs of a group come in one permutation, which depends on the seed, the epoch and the shards of the group alone: not on
timing, on worker processes, or on how many shards are published. ``RankState`` says how far a rank has come,
``resume`` deals what is left to any number of ranks, and ``Walk`` makes micro-batches of the packs as shards appear.
Ranks never talk to each other: that all of them end an epoch with the same number of rows, each finds out by counting
the packs of every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live.acks import Ack, Base, Leftover
from megatron_sft_idx.live.catalog import Positive, Record, Waiter, require_version
from megatron_sft_idx.live.live_shards import LiveShards
from megatron_sft_idx.training import Wanted, shuffled

AtEnd = Literal["pad", "drop"]

_NO_PACKS = np.zeros((0, 2), np.int64)
VERSION = 1
_NAME = "state_dict"


class Group(NamedTuple):
    """Items that a rank reads together, in one permutation of their packs.

    Attributes:
        shards: the shards of all these items.
        offset: how many packs of the permutation an earlier job has read.
        num_items: how many items these are.
    """

    shards: tuple[int, ...]
    offset: int
    num_items: int


def _items_of(base: Base, size: int, rank: int, end: int, first: int = 0) -> Iterator[Leftover]:
    """The items of a rank from its ``first`` on, in a catalog that ends with ``end`` shards."""
    return (base.item(number) for number in range(rank + first * size, base.num_items(end), size))


def next_group(base: Base, size: int, rank: int, items: int, end: int | None) -> Group | None:
    """The group that a rank reads once it has done ``items`` of its items; None where none is left.

    ``end`` is how many shards there are in all, None while that is not known: the group is then a whole one, and the
    caller must wait for its shards.
    """
    if end is None:
        end = base.frontier + (items + base.window + 1) * size
    shards: list[int] = []
    for item in _items_of(base, size, rank, end, items):
        if item.offset:
            return Group(tuple(shards), 0, len(shards)) if shards else Group(item.shards, item.offset, 1)
        shards += item.shards
        if len(shards) == base.window:
            break
    return Group(tuple(shards), 0, len(shards)) if shards else None


def least_ahead(state: RankState, min_packs: int, *, lagging: bool = False) -> int:
    """How many shards a producer must be allowed to be ahead, so that ranks that save between steps never deadlock.

    When a step begins, a rank may have one pack left of its group and take the others of the step from further groups.
    All shards before the last of these count that no rank has completed. To end one group, a rank may also need the
    first packs of its next one, since a loader that runs ahead commits wherever it stands.

    Args:
        state: of any rank.
        min_packs: how many packs every shard but the last one has at least.
        lagging: as for ``LiveDataset.prepare``.
    """
    window, size = state.base.window, state.size
    groups = 1 - (1 - state.step_rows) // (window * min_packs)
    return max(groups * window * size, (2 * window - 1) * size + (size if lagging else 1))


def pack_order(base: Base, shards: Sequence[int], packs: int, shuffle: bool) -> NDArray[np.int64]:
    """The permutation of a group's packs, which are numbered through its shards one after the other: int64 [packs]."""
    if not shuffle:
        return np.arange(packs, dtype=np.int64)
    return shuffled(packs, base.seed, base.epoch, *shards)


# ---- where a rank stands ----


@dataclass(frozen=True, slots=True)
class RankState(Record):
    """How far one data-parallel rank has come; goes into checkpoints.

    Attributes:
        base: of the order.
        shuffle: whether the packs of a group are shuffled, rather than as they are stored.
        size: how many data-parallel ranks share the order.
        rank: which of them this is.
        generation: how often the order was dealt out anew, to another number of ranks or otherwise.
        batch_rows: rows of a micro-batch.
        step_rows: rows of this rank in a step of the optimizer.
        rows: rows that the rank was given since the base was made, masked ones at the end included; equal on all ranks.
        items: how many of its items the rank has done.
        packs: packs that the rank was given since the base was made, those of an unfinished group included.
        shards: the shards of the group that the rank is in the middle of; none between two groups.
        offset: how many packs of that group the rank was given.
    """

    base: Base
    shuffle: bool
    size: Positive
    rank: int
    generation: int = 0
    batch_rows: Positive = 1
    step_rows: Positive = 1
    rows: int = 0
    items: int = 0
    packs: int = 0
    shards: tuple[int, ...] = ()
    offset: int = 0

    @property
    def packs_of_items(self) -> int:
        """How many packs the items that are done had."""
        if not self.shards:
            return self.packs
        return self.packs - self.offset + self._first_open().offset

    @property
    def next_item(self) -> int:
        """The number, among the items of all ranks, of the first one that this rank has not touched."""
        begun = 0
        if self.shards:
            begun = 1 if self._first_open().offset else len(self.shards)
        return self.rank + (self.items + begun) * self.size

    def last_shard(self, rows: int, packs_in: Callable[[int], int], least: int) -> int:
        """The last shard in which the next ``rows`` packs of the rank may lie.

        ``packs_in`` gives the packs in a shard of the unfinished group; every other shard has ``least`` or more.
        """
        have = sum(map(packs_in, self.shards)) - self.offset
        last, number, fresh = max(self.shards, default=0), self.next_item, 0
        while have < rows or fresh % self.base.window:
            left = self.base.item(number)
            last, number = max(last, *left.shards), number + self.size
            have, fresh = have + (1 if left.offset else least), 0 if left.offset else fresh + 1
        return last

    def _first_open(self) -> Leftover:
        return self.base.item(self.rank + self.items * self.size)

    def difference(self, other: RankState) -> str:
        """What must not differ where a rank goes on from the other state, in both states; empty if nothing does."""
        for what, mine, others in (
            ("rank", self.rank, other.rank),
            ("data-parallel size", self.size, other.size),
            ("micro-batch size", self.batch_rows, other.batch_rows),
            ("rows in a step", self.step_rows, other.step_rows),
            ("window", self.base.window, other.base.window),
        ):
            if mine != others:
                return f"{what} {mine}, and here it is {others}"
        return ""

    def ack(self, consumer: str, epochs: int) -> Ack:
        """The acknowledgement to be written once the checkpoint that holds this state is durable."""
        done = self.items, self.packs_of_items
        return Ack(consumer, self.generation, self.base, self.size, self.rank, *done, self.base.epoch, epochs)

    def to_json(self) -> dict[str, Any]:
        """The state as plain values, which JSON and every checkpoint can hold."""
        return {"version": VERSION, **Record.to_json(self)}

    @classmethod
    def from_json(cls, content: Any) -> RankState:
        """The state in the plain values of ``to_json``. FormatError where they are not those of a state."""
        if not isinstance(content, dict):
            raise FormatError(f"{_NAME}: found {type(content).__name__}, expected what state_dict() returned")
        require_version(_NAME, content, VERSION)
        return cls.parse(_NAME, content)

    def contradiction(self) -> tuple[str, Any, str] | None:
        """Numbers that no walk can come to."""
        if any(not left.shards or (len(left.shards) > 1 and not left.offset) for left in self.base.leftovers):
            return "base.leftovers", "one of them", "one shard, or several that are begun"
        if self.rank >= self.size or bool(self.shards) != (self.offset > 0) or self.packs_of_items < 0:
            return "rank, shards, offset or packs", self.rank, "numbers that go together"
        return None


def resume(
    states: Sequence[RankState], size: int, rank: int, *, window: int, batch_rows: int, step_rows: int
) -> RankState:
    """The state of one rank of a job that goes on where all ranks of another job stood, on any number of ranks.

    What is left is dealt out anew, in this order: groups that were begun, each to be finished by one rank; shards that
    some rank had not come to while others were beyond them; then all shards that nobody had touched.

    Raises:
        FormatError: these are not the states of all ranks of one job at one step.
    """
    if not states:
        raise FormatError(f"{_NAME}: an empty list; give the states of all data-parallel ranks of one checkpoint")
    states = sorted(states, key=lambda state: state.rank)
    first, ranks = states[0], [state.rank for state in states]
    if len(ranks) != first.size or ranks != list(range(first.size)):
        raise FormatError(
            f"{_NAME}: states of ranks {ranks[:20]}, expected one of each of the {first.size} data-parallel ranks of"
            " one checkpoint"
        )
    shared = ("base", "shuffle", "size", "generation", "batch_rows", "step_rows", "rows")
    for state in states:
        if any(getattr(state, name) != getattr(first, name) for name in shared):
            raise FormatError(
                f"{_NAME}: ranks {first.rank} and {state.rank} do not stand at one step ({first.rows} and"
                f" {state.rows} rows, epochs {first.base.epoch} and {state.base.epoch}); give the states of one"
                " checkpoint"
            )
    base = first.base
    num_ranks = len(states)
    begun = [Leftover(state.shards, state.offset) for state in states if state.shards]
    # No rank has touched this item or a later one; the last item that a rank has begun is its next_item - num_ranks.
    beyond = max(len(base.leftovers), *(state.next_item - num_ranks + 1 for state in states))
    least = min(state.next_item for state in states)
    if beyond - least > 10_000_000:  # a damaged state must not make a list of that length
        raise FormatError(f"{_NAME}: one rank is {beyond - least} shards ahead of another, so no state of one run")
    skipped = [base.item(number) for number in range(least, beyond) if number >= states[number % num_ranks].next_item]
    begun += [left for left in skipped if left.offset]
    untouched = [left for left in skipped if not left.offset]
    begun.sort(key=lambda left: left.shards)
    untouched.sort(key=lambda left: left.shards)
    frontier = base.frontier + beyond - len(base.leftovers)
    fresh = dataclasses.replace(base, window=window, leftovers=(*begun, *untouched), frontier=frontier)
    return RankState(fresh, first.shuffle, size, rank, first.generation + 1, batch_rows, step_rows)


# ---- a rank's way through live shards ----


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
        self._group = Group((), 0, 0)
        self._packs = _NO_PACKS
        self._num_given = 0
        # Of each rank, how many of its items have been counted, and the packs in them; and which item comes next.
        self._counted = [(0, 0)] * state.size
        self._counted[state.rank] = state.items, state.packs_of_items
        self._next_item = 0

    def __iter__(self) -> Iterator[Wanted]:
        if self.state.shards:
            self._take_up()
        while True:
            yield from self._pad() if self._at_end == "pad" else self._drop()
            epoch = self.state.base.epoch + 1
            if epoch >= self._epochs:
                return
            base = Base(epoch, self.state.base.seed, self.state.base.window)
            self._begin(dataclasses.replace(self.state, base=base, rows=0, items=0, packs=0, shards=(), offset=0))

    def _take_up(self) -> None:
        """Go on inside the unfinished group of the state."""
        has_group = self._next_group()
        state, group = self.state, self._group
        packs = len(self._packs)
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
        items = _items_of(state.base, state.size, longest, self._end or 0)
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
            if group.offset and group.offset >= bounds[-1]:
                raise FormatError(
                    f"{self._shards.folder}: the state was {group.offset} packs into shards {list(group.shards)}, which"
                    f" have {bounds[-1]}; resume with the catalog and the state that go together"
                )
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
