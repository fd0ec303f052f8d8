"""Which rank reads which packs of a catalog, and when: a pure function of a few numbers.

The order is described by a ``Base``: what was left over when it was made, and the first shard nobody had touched. That
gives a list of items: the leftovers, then the shards from there on, as many as there will ever be. Item j belongs to
data-parallel rank j mod size, so at a fresh start shard s belongs to rank s mod size.

A rank takes its items in groups: ``window`` untouched ones that follow each other, or one that was begun before. The
packs of a group come in one permutation, which depends on the seed, the epoch and the shards of the group alone: not on
timing, on worker processes, or on how much is published already.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.catalog import Base, Leftover

__all__ = ["AtEnd", "Group", "item", "items_of", "next_group", "num_items", "pack_order", "packs_in", "rows_of"]

AtEnd = Literal["pad", "drop"]


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


def item(base: Base, number: int) -> Leftover:
    """Item ``number``; there is one for every number from 0 on, though its shard may never come."""
    behind = number - len(base.leftovers)
    return base.leftovers[number] if behind < 0 else Leftover((base.frontier + behind,))


def num_items(base: Base, end: int) -> int:
    """Items of a catalog that ends with ``end`` shards."""
    return len(base.leftovers) + max(0, end - base.frontier)


def items_of(base: Base, size: int, rank: int, end: int, first: int = 0) -> Iterator[Leftover]:
    """The items of a rank from its ``first`` on, in a catalog that ends with ``end`` shards."""
    return (item(base, number) for number in range(rank + first * size, num_items(base, end), size))


def next_group(base: Base, size: int, rank: int, items: int, end: int | None) -> Group | None:
    """What a rank reads once it has done so many of its items; None where nothing is left.

    Args:
        base: of the order.
        size: data-parallel ranks.
        rank: one of them.
        items: of this rank's items that are done.
        end: shards of the catalog; None while more may come. Its groups are then whole: wait for their shards.
    """
    if end is None:
        end = base.frontier + (items + base.window + 1) * size
    taken: list[int] = []
    for left in items_of(base, size, rank, end, items):
        if left.offset:
            return Group(tuple(taken), 0, len(taken)) if taken else Group(left.shards, left.offset, 1)
        taken += left.shards
        if len(taken) == base.window:
            break
    return Group(tuple(taken), 0, len(taken)) if taken else None


def pack_order(base: Base, shards: Sequence[int], packs: int, shuffle: bool) -> NDArray[np.int64]:
    """The order of a group's packs, which are numbered through its shards one after the other: int64 [packs]."""
    if not shuffle:
        return np.arange(packs, dtype=np.int64)
    key = json.dumps([base.seed, base.epoch, *shards]).encode()
    return _native.packing_permutation(packs, xxhash.xxh3_64_intdigest(key))


def packs_in(items: Iterable[Leftover], count: Callable[[int], int]) -> int:
    """Packs that are left in items; ``count`` gives those of a shard."""
    return sum(sum(map(count, left.shards)) - left.offset for left in items)


def rows_of(packs: Sequence[int], step_rows: int, at_end: AtEnd) -> int:
    """Rows that every rank serves, so that all take the same steps.

    Args:
        packs: of each rank.
        step_rows: rows a rank serves in a step.
        at_end: ``pad`` goes on with masked rows until the rank that has most is done and its step is whole; ``drop``
            stops with the last step for which every rank has packs.
    """
    return -(-max(packs) // step_rows) * step_rows if at_end == "pad" else min(packs) // step_rows * step_rows
