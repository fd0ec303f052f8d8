"""Where a rank stands in the order of a catalog: what goes into a checkpoint, and what a changed job makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sft_idx.catalog import Base, Leftover
from megatron_sft_idx.catalog.documents import Document
from megatron_sft_idx.errors import FormatError, UnsupportedVersionError
from megatron_sft_idx.streaming.order import item

__all__ = ["VERSION", "RankState", "resume"]

VERSION = 1
_NAME = "state_dict"
_LEAST = {"size": 1, "batch_rows": 1, "step_rows": 1}
_COUNTS = ("size", "rank", "generation", "batch_rows", "step_rows", "rows", "items", "packs", "offset")
# Bounds what a damaged state makes anyone do.
_MOST_SKIPPED = 10_000_000
# What is the same on all ranks at one step.
_SHARED = ("base", "shuffle", "size", "generation", "batch_rows", "step_rows", "rows")


@dataclass(frozen=True, slots=True)
class RankState:
    """Where one data-parallel rank stands.

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
    size: int
    rank: int
    generation: int = 0
    batch_rows: int = 1
    step_rows: int = 1
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

    def _first_open(self) -> Leftover:
        return item(self.base, self.rank + self.items * self.size)

    def is_before(self, other: RankState) -> bool:
        """Whether the rank came to this state before it came to another one of the same order."""
        return (self.base.epoch, self.rows) < (other.base.epoch, other.rows)

    @property
    def next_item(self) -> int:
        """The number, among the items of all ranks, of the first one that this rank has not touched."""
        begun = 0
        if self.shards:
            begun = 1 if self._first_open().offset else len(self.shards)
        return self.rank + (self.items + begun) * self.size

    def to_json(self) -> dict[str, Any]:
        """As plain values, which JSON and every checkpoint can hold."""
        base = self.base
        return {
            "version": VERSION,
            "epoch": base.epoch,
            "seed": base.seed,
            "window": base.window,
            "shuffle": self.shuffle,
            **{name: getattr(self, name) for name in _COUNTS},
            "shards": list(self.shards),
            "base": {
                **base.to_json(),
                "leftovers": [{"shards": list(left.shards), "offset": left.offset} for left in base.leftovers],
            },
        }

    @classmethod
    def from_json(cls, found: Any) -> RankState:
        """What ``to_json`` gave; FormatError where it cannot have."""
        if not isinstance(found, Mapping):
            raise FormatError(f"{_NAME}: found {type(found).__name__}, expected what state_dict() returned")
        document = Document(_NAME, found)
        if (version := document.whole("version")) != VERSION:
            raise UnsupportedVersionError(_NAME, version, [VERSION])
        counts = {name: document.whole(name, _LEAST.get(name, 0)) for name in _COUNTS}
        base, shuffle = Base.parse(document.document("base")), found.get("shuffle")
        if type(shuffle) is not bool:
            raise document.wrong("shuffle", shuffle, "true or false")
        if any(not left.shards or (len(left.shards) > 1 and not left.offset) for left in base.leftovers):
            raise document.wrong("base.leftovers", "one of them", "one shard, or several that are begun")
        state = cls(base, shuffle, **counts, shards=tuple(document.wholes("shards")))
        if state.rank >= state.size or bool(state.shards) != (state.offset > 0) or state.packs_of_items < 0:
            raise document.wrong("rank, shards, offset or packs", found.get("rank"), "numbers that go together")
        return state


def resume(
    states: Sequence[RankState], size: int, rank: int, *, window: int, batch_rows: int, step_rows: int
) -> RankState:
    """The state of a rank of a job of any size that goes on where all ranks of another one stood.

    What is left is dealt out anew: groups that were begun, each to be finished by one rank; shards that were skipped
    over; then all shards from the first one on that nobody touched.

    Raises:
        FormatError: these are not the states of all ranks of one job at one step.
    """
    _require_one_step(states)
    states = sorted(states, key=lambda state: state.rank)
    base, old = states[0].base, len(states)
    begun = [Leftover(state.shards, state.offset) for state in states if state.shards]
    # From this item on nobody has touched any: the last one that a rank has begun is next_item - old.
    beyond = max(len(base.leftovers), *(state.next_item - old + 1 for state in states))
    first = min(state.next_item for state in states)
    if beyond - first > _MOST_SKIPPED:
        raise FormatError(f"{_NAME}: one rank is {beyond - first} shards ahead of another, so no state of one run")
    skipped = [item(base, number) for number in range(first, beyond) if number >= states[number % old].next_item]
    begun += [left for left in skipped if left.offset]
    fresh = dataclasses.replace(
        base,
        window=window,
        leftovers=(
            *sorted(begun, key=lambda left: left.shards),
            *sorted((left for left in skipped if not left.offset), key=lambda left: left.shards),
        ),
        frontier=base.frontier + beyond - len(base.leftovers),
    )
    generation = states[0].generation + 1
    return RankState(fresh, states[0].shuffle, size, rank, generation, batch_rows, step_rows)


def _require_one_step(states: Sequence[RankState]) -> None:
    """FormatError unless these are the states of all ranks at one step."""
    if not states:
        raise FormatError(f"{_NAME}: an empty list; give the states of all data-parallel ranks of one checkpoint")
    first = states[0]
    ranks = sorted(state.rank for state in states)
    if len(ranks) != first.size or ranks != list(range(first.size)):
        raise FormatError(
            f"{_NAME}: states of ranks {ranks[:20]}, expected one of each of the {first.size} data-parallel ranks of"
            " one checkpoint"
        )
    for state in states:
        if any(getattr(state, name) != getattr(first, name) for name in _SHARED):
            raise FormatError(
                f"{_NAME}: ranks {first.rank} and {state.rank} do not stand at one step ({first.rows} and"
                f" {state.rows} rows, epochs {first.base.epoch} and {state.base.epoch}); give the states of one"
                " checkpoint"
            )
