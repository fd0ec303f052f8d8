"""Where a rank stands in the order of a catalog: what goes into a checkpoint, and what a changed job makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.streaming.order import Base, Item

__all__ = ["RankState", "resume"]

VERSION = 1
# Bounds what a damaged checkpoint makes anyone compute with.
_MOST = 2**62
_INTEGERS = ("size", "rank", "generation", "batch_rows", "step_rows", "rows", "items", "packs", "offset")


@dataclass(frozen=True, slots=True)
class RankState:
    """Where one data-parallel rank stands.

    Attributes:
        base: of the order.
        size: data-parallel ranks that share it.
        rank: this one.
        generation: how often what was left was dealt out anew.
        batch_rows: rows of a micro-batch.
        step_rows: rows of this rank in a step of the optimizer.
        rows: rows that it was given since the base was made, padding at the end included; the same on all ranks.
        items: of its items that are done.
        packs: packs that it was given from those.
        shards: of the group that is begun; none where the next one is not.
        offset: packs of that group that are done.
    """

    base: Base
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

    def to_json(self) -> dict[str, Any]:
        """As plain values, which JSON and every checkpoint can hold."""
        base = self.base
        leftovers = [{"shards": list(item.shards), "offset": item.offset} for item in base.leftovers]
        return {
            "version": VERSION,
            "epoch": base.epoch,
            "seed": base.seed,
            "window": base.window,
            **{name: getattr(self, name) for name in _INTEGERS},
            "shards": list(self.shards),
            "base": {**dataclasses.asdict(base), "leftovers": leftovers},
        }

    @classmethod
    def from_json(cls, found: Any) -> RankState:
        """What ``to_json`` gave; FormatError where it cannot have."""
        document = _Document(found)
        if (version := document.integer("version")) != VERSION:
            raise FormatError(
                f"state_dict: version {version}, this package reads {VERSION}; resume with the version that wrote it"
            )
        base = _base(document.inner("base"))
        values = {name: document.integer(name) for name in _INTEGERS}
        state = cls(base, **values, shards=document.shards())
        fits = state.rank < state.size and 0 < state.batch_rows <= state.step_rows and bool(state.shards) == (
            state.offset > 0
        )
        if not fits:
            raise document.wrong("its numbers do not go together")
        return state

    @property
    def _begun(self) -> int:
        """Items that are done or belong to the group that is begun."""
        if not self.shards:
            return self.items
        item = self.base.item(self.rank + self.items * self.size)
        return self.items + (1 if item.offset else len(self.shards))

    def left(self) -> Iterator[Item]:
        """What is left of the items before the first one that nobody after it has touched; for all ranks together."""
        if self.shards:
            yield Item(self.shards, self.offset)

    def next_item(self) -> int:
        """The number, among all items, of the first one that this rank has not touched."""
        return self.rank + self._begun * self.size


def resume(states: Sequence[RankState], size: int, rank: int, *, window: int, batch_rows: int, step_rows: int) -> RankState:
    """The state of a rank of a job of any size that goes on where all ranks of another one stood.

    What is left is dealt out anew: groups that were begun, each to be finished by one rank; shards that were skipped
    over; then all shards from the first one that nobody touched.

    Raises:
        FormatError: not the states of all ranks of one job at one step.
    """
    _require_one_step(states)
    base, old = states[0].base, len(states)
    by_rank = sorted(states, key=lambda state: state.rank)
    begun = sorted(item for state in by_rank for item in state.left())
    # Items are dealt in turns: rank r's next one is r + items * size, and all of its later ones are untouched too.
    beyond = max(state.next_item() - old + 1 for state in by_rank)
    skipped = [
        base.item(number)
        for number in range(max(beyond, len(base.leftovers)))
        if number >= by_rank[number % old].next_item()
    ]
    begun += [item for item in skipped if item.offset]
    untouched = sorted(item for item in skipped if not item.offset)
    frontier = base.frontier + max(0, beyond - len(base.leftovers))
    fresh = dataclasses.replace(base, window=window, leftovers=(*sorted(begun), *untouched), frontier=frontier)
    generation = states[0].generation + 1
    return RankState(fresh, size, rank, generation, batch_rows, step_rows)


def _require_one_step(states: Sequence[RankState]) -> None:
    if not states:
        raise FormatError("load_state_dict: an empty list; give the states of all ranks of one checkpoint")
    first = states[0]
    ranks = sorted(state.rank for state in states)
    if ranks != list(range(first.size)):
        raise FormatError(
            f"load_state_dict: states of ranks {ranks} of {first.size}; give one of every data-parallel rank"
        )
    for state in states:
        same = all(
            getattr(state, name) == getattr(first, name) for name in ("base", "size", "generation", "rows", "batch_rows")
        )
        if not same:
            raise FormatError(
                f"load_state_dict: the states of ranks {first.rank} and {state.rank} are not of one step"
                f" ({first.rows} and {state.rows} rows); give those of one checkpoint"
            )


class _Document:
    """A JSON object that somebody else wrote."""

    def __init__(self, found: Any) -> None:
        if not isinstance(found, Mapping):
            raise FormatError(f"state_dict: found {type(found).__name__}, expected what state_dict() gave")
        self._found = found

    def wrong(self, what: str) -> FormatError:
        return FormatError(f"state_dict: {what}; give what state_dict() returned, unchanged")

    def integer(self, name: str) -> int:
        value = self._found.get(name)
        if type(value) is not int or not 0 <= value < _MOST:
            raise self.wrong(f"{name} is {value!r}, expected a whole number from 0 on")
        return value

    def shards(self) -> tuple[int, ...]:
        value = self._found.get("shards")
        if not isinstance(value, list) or not all(type(n) is int and 0 <= n < _MOST for n in value):
            raise self.wrong("shards is no list of shard numbers")
        return tuple(value)

    def inner(self, name: str) -> _Document:
        return _Document(self._found.get(name))

    def leftovers(self) -> tuple[Item, ...]:
        value = self._found.get("leftovers")
        if not isinstance(value, list):
            raise self.wrong("leftovers is no list")
        items = tuple(Item(entry.shards(), entry.integer("offset")) for entry in map(_Document, value))
        if any(not item.shards or (len(item.shards) > 1 and not item.offset) for item in items):
            raise self.wrong("a leftover names no shard, or several that are not begun")
        return items

    def seed(self) -> int | None:
        return None if self._found.get("seed") is None else self.integer("seed")


def _base(document: _Document) -> Base:
    epoch, window, frontier = (document.integer(name) for name in ("epoch", "window", "frontier"))
    if window < 1:
        raise document.wrong("window is 0")
    return Base(epoch, document.seed(), window, document.leftovers(), frontier)
