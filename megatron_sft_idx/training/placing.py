"""Where the tokens of some sequences are in memory: in the maps of their shards, or read for this one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.storage import Runs, announce, read_runs
from megatron_sft_idx.training.segments import Pair, Segments

__all__ = ["Placed", "advise", "in_memory", "place"]

_Arrays = tuple[NDArray[Any], NDArray[Any]]


class Placed(NamedTuple):
    """The sequences of ``Segments`` in arrays.

    Attributes:
        arrays: pairs of tokens and label-aligned loss mask.
        slots: int32 [segments], which pair each sequence lies in.
        starts: int64 [segments], its first token there.
    """

    arrays: list[_Arrays]
    slots: NDArray[np.int32]
    starts: NDArray[np.int64]


def in_memory(shards: Sequence[Pair], slots: NDArray[np.int32], segments: Segments) -> Placed | None:
    """These sequences in the arrays of their shards; None where those are not all in memory or mapped.

    Args:
        shards: tokens and loss mask of each shard that is used.
        slots: int32 [segments], which of them each sequence lies in.
        segments: the sequences.
    """
    mapped = _mapped(shards)
    return Placed(mapped, slots, segments.starts) if len(mapped) == len(shards) else None


def place(shards: Sequence[Pair], slots: NDArray[np.int32], segments: Segments) -> Placed:
    """These sequences in memory, read where they are not there; arguments as of ``in_memory``.

    Raises:
        ValueError: a sequence that does not lie within its shard.
        FormatError: a shard is another one by now.
    """
    return in_memory(shards, slots, segments) or _read(shards, slots, segments)


def advise(shards: Sequence[Pair], slots: NDArray[np.int32], segments: Segments) -> None:
    """Have these sequences read from disk in the background; arguments as of ``in_memory``.

    Batches are announced in the order in which they will be read, and within one come tokens, then masks: as ``place``
    reads them.
    """
    runs = Stretches.join(segments, slots)
    arrays = [tokens for tokens, _ in shards] + [loss for _, loss in shards]
    both = np.concatenate([runs.slots, runs.slots + len(shards)])
    announce(Runs(arrays, both, np.tile(runs.starts, 2), np.tile(runs.counts, 2)), more=True)


def _mapped(shards: Sequence[Pair]) -> list[_Arrays]:
    return [(ids, loss) for ids, loss in shards if isinstance(ids, np.ndarray) and isinstance(loss, np.ndarray)]


class Stretches(NamedTuple):
    """Sequences that lie behind one another in one shard, such as those of a stored pack, taken together.

    Attributes:
        slots: int32 [runs], which shard each run lies in.
        starts: int64 [runs], its first token there.
        counts: int64 [runs], its tokens.
        of: int64 [segments], the run of each sequence.
    """

    slots: NDArray[np.int32]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    of: NDArray[np.int64]

    @classmethod
    def join(cls, segments: Segments, slots: NDArray[np.int32]) -> Stretches:
        """The runs of sequences, whose shards are ``slots``."""
        starts, stops = segments.starts, segments.starts + segments.lengths
        begins = np.ones(len(starts), np.bool_)
        begins[1:] = (slots[1:] != slots[:-1]) | (starts[1:] != stops[:-1])
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(starts)) - 1
        return cls(slots[first], starts[first], stops[last] - starts[first], np.cumsum(begins) - 1)


def _read(shards: Sequence[Pair], slots: NDArray[np.int32], segments: Segments) -> Placed:
    """One pair of arrays for each dtype of masks, with the runs that have it end to end."""
    runs = Stretches.join(segments, slots)
    of_run = [shards[slot] for slot in runs.slots.tolist()]
    kinds = list(dict.fromkeys(loss.dtype for _, loss in shards))
    kind_of_run = np.array([kinds.index(loss.dtype) for _, loss in of_run], np.int32)
    placed, places = [], np.empty(len(of_run), np.int64)
    for kind, dtype in enumerate(kinds):
        mine = np.flatnonzero(kind_of_run == kind)
        starts, counts = runs.starts[mine], runs.counts[mine]
        places[mine] = np.cumsum(counts) - counts
        pairs = [of_run[run] for run in mine.tolist()]
        total = max(int(counts.sum()), 0)
        tokens, loss = np.empty(total, pairs[0][0].dtype), np.empty(total, dtype)
        read_runs([pair[0] for pair in pairs], starts, counts, tokens)
        read_runs([pair[1] for pair in pairs], starts, counts, loss)
        placed.append((tokens, loss))
    return Placed(placed, kind_of_run[runs.of], places[runs.of] + segments.starts - runs.starts[runs.of])
