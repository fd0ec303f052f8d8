"""Which rank reads which packs of live shards, and in which order: computed from a few numbers, never from timing.

A ``Base`` describes the order: the leftovers of an earlier job, and the first shard that nobody had touched. That gives
a list of items: the leftovers, then one item for each shard from there on. Item j belongs to data-parallel rank
j mod size, so in a fresh job shard s belongs to rank s mod size.

A rank takes its items in groups: ``window`` untouched items that follow each other, or one that was begun before. The
packs of a group come in one permutation, which depends on the seed, the epoch and the shards of the group alone: not on
timing, on worker processes, or on how many shards are published. ``RankState`` says how far a rank has come,
``resume`` deals what is left to any number of ranks. Nothing here reads a file or waits; ``walk`` does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live.acks import Ack, Base, Leftover
from megatron_sft_idx.live.catalog import Positive, Record, require_version

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


def items_of(base: Base, size: int, rank: int, end: int, first: int = 0) -> Iterator[Leftover]:
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
    for item in items_of(base, size, rank, end, items):
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
    key = json.dumps([base.seed, base.epoch, *shards]).encode()
    return _native.packing_permutation(packs, xxhash.xxh3_64_intdigest(key))


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

    def differences(self, other: RankState) -> list[tuple[str, int, int]]:
        """What differs and must not where a rank goes on from the other state: names, and the value in each state."""
        pairs = [
            ("rank", self.rank, other.rank),
            ("data-parallel size", self.size, other.size),
            ("micro-batch size", self.batch_rows, other.batch_rows),
            ("rows in a step", self.step_rows, other.step_rows),
            ("window", self.base.window, other.base.window),
        ]
        return [pair for pair in pairs if pair[1] != pair[2]]

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
    base, old = first.base, len(states)
    begun = [Leftover(state.shards, state.offset) for state in states if state.shards]
    # No rank has touched this item or a later one; the last item that a rank has begun is its next_item - old.
    beyond = max(len(base.leftovers), *(state.next_item - old + 1 for state in states))
    least = min(state.next_item for state in states)
    if beyond - least > 10_000_000:  # a damaged state must not make a list of that length
        raise FormatError(f"{_NAME}: one rank is {beyond - least} shards ahead of another, so no state of one run")
    skipped = [base.item(number) for number in range(least, beyond) if number >= states[number % old].next_item]
    begun += [left for left in skipped if left.offset]
    untouched = [left for left in skipped if not left.offset]
    leftovers = tuple(left for some in (begun, untouched) for left in sorted(some, key=lambda left: left.shards))
    frontier = base.frontier + beyond - len(base.leftovers)
    fresh = dataclasses.replace(base, window=window, leftovers=leftovers, frontier=frontier)
    return RankState(fresh, first.shuffle, size, rank, first.generation + 1, batch_rows, step_rows)
