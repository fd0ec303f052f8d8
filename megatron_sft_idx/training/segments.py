"""Packs as lists of sequences that lie somewhere in shards: what batches are assembled from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.storage import Array

__all__ = ["PackSource", "Pair", "Segments", "dense", "in_slots", "interleaved"]

Pair: TypeAlias = tuple[Array, Array]


@dataclass(frozen=True, slots=True)
class Segments:
    """The sequences of some packs, in order.

    Attributes:
        offsets: int64 [packs + 1], CSR: pack i holds segments offsets[i] to offsets[i + 1].
        shards: int32 [segments], which of the source's ``arrays`` each sequence lies in.
        starts: int64 [segments], its first token there.
        lengths: int64 [segments], its tokens.
        used: the values of ``shards``, ascending, where they are known already; None where nobody looked.
    """

    offsets: NDArray[np.int64]
    shards: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    used: list[int] | None = None

    def in_slots(self) -> tuple[list[int], NDArray[np.int32]]:
        """As the function of that name, of ``shards``."""
        return in_slots(self.shards, self.used)


class PackSource(Protocol):
    """Rows to train on: packs as stored, or planned at start-up over tokenised sequences.

    Attributes:
        num_packs: rows.
        capacity: most token positions a row may hold.
        sequence_multiple: each sequence rounded up to this still fits the capacity.
        most_sequences: sequences in the row that has most.
        pad_id: the tokenizer's padding id, None where unknown.
        fingerprint: hex; equal content and options, equal fingerprint.
    """

    num_packs: int
    capacity: int
    sequence_multiple: int
    most_sequences: int
    pad_id: int | None
    fingerprint: str

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Where the sequences of these packs lie."""
        ...

    def arrays(self, shard: int) -> Pair:
        """Tokens and label-aligned loss mask of a shard, whole: numpy's where mapped or in memory, or read by slices.

        A number is what ``segments`` says; several shards may lie in one pair of arrays.
        """
        ...


def in_slots(shards: NDArray[Any], used: list[int] | None = None) -> tuple[list[int], NDArray[Any]]:
    """The shards that are named, ascending, and for each entry which of these it names: lists stay short that way.

    Args:
        shards: numbers, in any order.
        used: what they name, where that is known.
    """
    if used is None:
        used = sorted(set(shards.tolist()))
    return used, shards if dense(used) else np.searchsorted(np.array(used), shards).astype(shards.dtype)


def dense(used: list[int]) -> bool:
    """Whether ascending numbers are 0, 1, ... to the last, so that they are their own slots."""
    return not used or (used[0] >= 0 and used[-1] == len(used) - 1)


def interleaved(members: NDArray[np.int64], ask: Callable[[int, NDArray[np.int64]], Segments]) -> Segments:
    """The sequences of packs that lie in several places, each of which is asked once.

    Args:
        members: int64 [packs], the place of each pack.
        ask: given a place and the positions in ``members`` of its packs, ascending, the segments of these.
    """
    order = np.argsort(members, kind="stable")
    used, firsts = np.unique(members[order], return_index=True)
    parts = [ask(member, rows) for member, rows in zip(used.tolist(), np.split(order, firsts)[1:], strict=True)]
    if not parts:
        return Segments(np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    counts, begins = np.empty(len(members), np.int64), np.empty(len(members), np.int64)
    counts[order] = np.concatenate([np.diff(part.offsets) for part in parts])
    begins[order] = np.cumsum(counts[order]) - counts[order]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    taken = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], counts)
    columns = [(part.shards, part.starts, part.lengths) for part in parts]
    shards, starts, lengths = (np.concatenate(column)[taken] for column in zip(*columns, strict=True))
    return Segments(offsets, shards, starts, lengths)
