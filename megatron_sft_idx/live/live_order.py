"""Which rank reads which packs of a catalog, and when: a pure function of a few numbers, however late shards come.

The order is described by a ``Base``: what was left over when it was made, and the first shard nobody had touched. That
gives a list of items: the leftovers, then the shards from there on, as many as there will ever be. Item j belongs to
data-parallel rank j mod size, so at a fresh start shard s belongs to rank s mod size.

A rank takes its items in groups: ``window`` untouched ones that follow each other, or one that was begun before. The
packs of a group come in one permutation, which depends on the seed, the epoch and the shards of the group alone: not on
timing, on worker processes, or on how much is published already. All worker processes of a rank walk the same way, each
assembles its own share of the micro-batches, and nothing is read on the way but headers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live.acks import Ack, Base, Leftover
from megatron_sft_idx.live.catalog import Positive, Record, Waiter, require_version
from megatron_sft_idx.live.live_shards import LiveShards
from megatron_sft_idx.training import Wanted

AtEnd = Literal["pad", "drop"]

VERSION = 1
_NAME = "state_dict"
_NOTHING = np.zeros((0, 2), np.int64)


class Group(NamedTuple):
    """Items that a rank reads together.

    Attributes:
        shards: all of theirs.
        offset: packs that are done before it begins.
        num_items: of the rank's items.
    """

    shards: tuple[int, ...]
    offset: int
    num_items: int


def _items_of(base: Base, size: int, rank: int, end: int, first: int = 0) -> Iterator[Leftover]:
    """The items of a rank from its ``first`` on, in a catalog that ends with ``end`` shards."""
    return (base.item(number) for number in range(rank + first * size, base.num_items(end), size))


def next_group(base: Base, size: int, rank: int, items: int, end: int | None) -> Group | None:
    """What a rank reads once it has done so many of its items; None where nothing is left.

    ``end`` is how many shards the catalog has; None while more may come. Groups are then whole: wait for their shards.
    """
    if end is None:
        end = base.frontier + (items + base.window + 1) * size
    taken: list[int] = []
    for left in _items_of(base, size, rank, end, items):
        if left.offset:
            return Group(tuple(taken), 0, len(taken)) if taken else Group(left.shards, left.offset, 1)
        taken += left.shards
        if len(taken) == base.window:
            break
    return Group(tuple(taken), 0, len(taken)) if taken else None


def least_ahead(state: RankState, least: int, *, lagging: bool = False) -> int:
    """How many shards a producer must be able to be ahead, so that ranks that save between steps never wait for ever.

    A rank may have one pack left of its group as a step begins, and take the others of the step from further groups;
    all shards before the last of these count that no rank has completed. To end one group a rank may need the first
    packs of its next, and a loader of its own pace commits where it likes: that is asked for in any case.

    ``least`` is of packs in any shard but the last; ``lagging`` as for ``LiveDataset.prepare``.
    """
    window, size = state.base.window, state.size
    groups = 1 - (1 - state.step_rows) // (window * least)
    return max(groups * window * size, (2 * window - 1) * size + (size if lagging else 1))


def pack_order(base: Base, shards: Sequence[int], packs: int, shuffle: bool) -> NDArray[np.int64]:
    """The order of a group's packs, which are numbered through its shards one after the other: int64 [packs]."""
    if not shuffle:
        return np.arange(packs, dtype=np.int64)
    key = json.dumps([base.seed, base.epoch, *shards]).encode()
    return _native.packing_permutation(packs, xxhash.xxh3_64_intdigest(key))


# ---- where a rank stands ----


@dataclass(frozen=True, slots=True)
class RankState(Record):
    """Where one data-parallel rank stands: what goes into a checkpoint.

    Attributes:
        base: of the order.
        shuffle: packs come shuffled inside their group, not as they are stored.
        size: data-parallel ranks that share the order.
        rank: this one.
        generation: how often what was left has been dealt out anew.
        batch_rows: rows of a micro-batch.
        step_rows: rows of this rank in a step of the optimizer.
        rows: rows it was given since the base was made, masked ones at the end included; the same on all ranks.
        items: of its items that are done.
        packs: packs it was given since the base was made, those of the group that is begun included.
        shards: of the group that is begun; none where the next one is not.
        offset: packs of that group that are done.
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
        """Packs it was given from the items that are done."""
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

        ``packs_in`` says how many are in the shards of the group that is begun; any other has ``least``.
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
        """What has to be the same for one to go on from the other and is not: its name, and the value of each."""
        pairs = [
            ("rank", self.rank, other.rank),
            ("data-parallel size", self.size, other.size),
            ("micro-batch size", self.batch_rows, other.batch_rows),
            ("rows in a step", self.step_rows, other.step_rows),
            ("window", self.base.window, other.base.window),
        ]
        return [pair for pair in pairs if pair[1] != pair[2]]

    def ack(self, consumer: str, epochs: int) -> Ack:
        """What is acknowledged once the checkpoint that holds this state is durable."""
        done = self.items, self.packs_of_items
        return Ack(consumer, self.generation, self.base, self.size, self.rank, *done, self.base.epoch, epochs)

    def to_json(self) -> dict[str, Any]:
        """As plain values, which JSON and every checkpoint can hold."""
        return {"version": VERSION, **Record.to_json(self)}

    @classmethod
    def from_json(cls, found: Any) -> RankState:
        """What ``to_json`` gave; FormatError where it cannot have."""
        if not isinstance(found, dict):
            raise FormatError(f"{_NAME}: found {type(found).__name__}, expected what state_dict() returned")
        require_version(_NAME, found, VERSION)
        return cls.parse(_NAME, found)

    def contradiction(self) -> tuple[str, Any, str] | None:
        """Numbers that no walk comes to."""
        if any(not left.shards or (len(left.shards) > 1 and not left.offset) for left in self.base.leftovers):
            return "base.leftovers", "one of them", "one shard, or several that are begun"
        if self.rank >= self.size or bool(self.shards) != (self.offset > 0) or self.packs_of_items < 0:
            return "rank, shards, offset or packs", self.rank, "numbers that go together"
        return None


def resume(
    states: Sequence[RankState], size: int, rank: int, *, window: int, batch_rows: int, step_rows: int
) -> RankState:
    """The state of a rank of a job of any size that goes on where all ranks of another one stood.

    What is left is dealt out anew: groups that were begun, each to be finished by one rank; shards that were skipped
    over; then all shards from the first one on that nobody touched.

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
    # From this item on nobody has touched any: the last one that a rank has begun is next_item - old.
    beyond = max(len(base.leftovers), *(state.next_item - old + 1 for state in states))
    least = min(state.next_item for state in states)
    if beyond - least > 10_000_000:  # bounds what a damaged state makes anyone do
        raise FormatError(f"{_NAME}: one rank is {beyond - least} shards ahead of another, so no state of one run")
    skipped = [base.item(number) for number in range(least, beyond) if number >= states[number % old].next_item]
    begun += [left for left in skipped if left.offset]
    untouched = [left for left in skipped if not left.offset]
    leftovers = tuple(left for part in (begun, untouched) for left in sorted(part, key=lambda left: left.shards))
    frontier = base.frontier + beyond - len(base.leftovers)
    fresh = dataclasses.replace(base, window=window, leftovers=leftovers, frontier=frontier)
    return RankState(fresh, first.shuffle, size, rank, first.generation + 1, batch_rows, step_rows)


# ---- a rank's way through the catalog ----


class Walk:
    """Iterates over the micro-batches of one rank from a state on, through all epochs, waiting for shards.

    Each has packs int64 [rows, 2], shard and number inside it, and the rank's state behind it. ``acknowledged`` says
    which items and packs ranks have acknowledged in the order of a state, by rank. ``state`` is where the rank stands:
    behind the last micro-batch, and behind empty shards at the end, which none follows.
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
        """Stand where a state says, with its group still to be taken up."""
        self.state = state
        self._end = self._shards.end()
        # The group that is read, its packs in their order, and how many of them were taken.
        self._group, self._packs, self._taken = Group((), 0, 0), _NOTHING, 0
        # Of each rank, how many of its items are counted, and the packs in them; and which item is counted next.
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
        """FormatError where shards that this rank has still to read are gone already."""
        if not (there := self._shards.numbers()):
            return
        state = self.state
        mine = _items_of(state.base, state.size, state.rank, there[-1] + 1, state.items)
        gone = sorted({shard for left in mine for shard in left.shards}.difference(there))
        # Looked at again: whoever lists a folder that grows may see a shard and miss an older one.
        if gone := [shard for shard in gone if shard < there[-1] and self._shards.count(shard) is None]:
            shown = ", ".join(map(str, gone[:10])) + (", ..." if len(gone) > 10 else "")
            these = f"shard {shown} is" if len(gone) == 1 else f"shards {shown} ({len(gone)} in all) are"
            raise FormatError(
                f"{self._shards.folder}: {these} not there any more, and rank {state.rank} of {state.size} has still to"
                " read them: a later checkpoint was committed and they were freed, or somebody removed them; resume"
                " from the latest committed checkpoint, or put them back"
            )

    def _take_up(self) -> None:
        """Go on inside the group that was begun."""
        state, found = self.state, self._next_group()
        group, packs = self._group, len(self._packs)
        if not found or group.shards != state.shards or not group.offset < state.offset < packs:
            here = f"shards {list(group.shards)}, packs {group.offset} to {packs}" if found else "the end"
            raise FormatError(
                f"{self._shards.folder}: the state was {state.offset} packs into shards {list(state.shards)}, and what"
                f" rank {state.rank} of {state.size} comes to here is {here}; resume with the catalog and the state"
                " that go together"
            )
        self._taken = state.offset

    # ---- the two ways to end ----

    def _pad(self) -> Iterator[Wanted]:
        """Go on with masked rows until the rank that has most packs is done and its step is whole."""
        size, step = self.state.batch_rows, self.state.step_rows
        while len(packs := self._take(size)) == size:
            yield self._micro_batch(packs)
        while self._count_next():
            pass
        most = max(have for _, have in self._counted)
        total = -(-most // step) * step
        self._say_end(total, f"{total - self._counted[self.state.rank][1]:,} rows of padding")
        filler = self._filler() if self.state.rows < total else _NOTHING
        while self.state.rows < total:
            yield self._micro_batch(np.concatenate([packs, np.repeat(filler, size - len(packs), axis=0)]), len(packs))
            packs = _NOTHING

    def _drop(self) -> Iterator[Wanted]:
        """Stop with the last step for which every rank has packs."""
        step, more = self.state.step_rows, True
        while more:
            # Every rank is known to have the packs of a step more, or one of them never will.
            while more and min(have for _, have in self._counted) < (self.state.rows // step + 1) * step:
                more = self._count_next()
            if more:
                yield self._micro_batch(self._take(self.state.batch_rows))
        while self._count_next():
            pass
        left = sum(have for _, have in self._counted) - self.state.rows * self.state.size
        self._say_end(self.state.rows, f"{left:,} packs of all ranks dropped, so that all end together")

    def _micro_batch(self, packs: NDArray[np.int64], real: int | None = None) -> Wanted:
        """The next rows; those from ``real`` on only fill up."""
        self.state = dataclasses.replace(self.state, rows=self.state.rows + len(packs))
        return Wanted(packs, None if real is None else np.arange(len(packs)) >= real, self.state)

    def _filler(self) -> NDArray[np.int64]:
        """A pack for rows of padding: of the rank that is last to end, whose shards are the last to be freed."""
        state, there = self.state, self._shards.numbers()
        most = int(np.argmax([have for _, have in self._counted]))
        longest = [shard for left in _items_of(state.base, state.size, most, self._end or 0) for shard in left.shards]
        known = set(there)
        for shard in (*reversed(longest), *reversed(there)):
            if shard in known and self._shards.count(shard):
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

    def _take(self, count: int) -> NDArray[np.int64]:
        """The next packs; fewer where this rank's items end."""
        parts = []
        while count and (self._taken < len(self._packs) or self._next_group()):
            parts.append(self._packs[self._taken : self._taken + count])
            count -= len(parts[-1])
            self._taken += len(parts[-1])
            state, group, done = self.state, self._group, self._taken == len(self._packs)
            self.state = dataclasses.replace(
                state,
                packs=state.packs + len(parts[-1]),
                items=state.items + (group.num_items if done else 0),
                shards=() if done else group.shards,
                offset=0 if done else self._taken,
            )
        return parts[0] if len(parts) == 1 else np.concatenate([_NOTHING, *parts])

    def _next_group(self) -> bool:
        """Wait for all shards of the next group and put its packs in order; False at the end."""
        while True:
            state = self.state
            group = next_group(state.base, state.size, state.rank, state.items, self._end)
            if group is None:
                return False
            if not all(map(self._wait, group.shards)):
                self._end = self._shards.end()  # fewer shards than a whole group: what is left is one
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
        part = np.searchsorted(bounds, order, side="right") - 1
        self._packs = np.stack([np.array(group.shards)[part], order - bounds[part]], axis=1)
        self._group, self._taken = group, group.offset
        return True

    def _wait(self, shard: int) -> bool:
        """Wait for a shard; False where the catalog ends before it."""
        before = self.state.base.num_items(shard)

        def uncommitted() -> int:
            return max(0, before - sum(items for items, _ in self._acknowledged(self.state).values()))

        return self._shards.wait(shard, self._waiter, uncommitted)

    # ---- packs of all ranks: what headers say, or acknowledgements where shards are freed ----

    def _count_next(self) -> bool:
        """Count the next item of all; False where no more can come."""
        index, rank = divmod(self._next_item, self.state.size)
        left = self.state.base.item(self._next_item)
        packs = -left.offset
        for shard in left.shards:
            if index < self._counted[rank][0]:
                break  # acknowledgements count for it
            count = self._shards.count(shard)
            if count is None:
                for other, done in self._acknowledged(self.state).items():
                    self._counted[other] = max(self._counted[other], done)
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
