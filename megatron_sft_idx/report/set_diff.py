"""Two shards as sets: of packs whatever their order, of sequences whatever packs these are in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.report.repeats import Counted, HashSample
from megatron_sft_idx.report.windows import Window, locate_sequence
from megatron_sft_idx.shard import Shard

__all__ = ["PackDifference", "SequenceDifference", "ShardSamples", "pack_hashes", "shape_hashes"]

_MOST, _MOST_PACKS = 1 << 20, 1 << 18
_UPPER = np.uint64(0xFFFFFFFF00000000)


@dataclass(frozen=True, slots=True)
class PackDifference:
    """How two shards' packs differ, copies counted, whatever their order.

    Attributes:
        share: of all packs that the counts are of; below 1 they are a sample, chosen by hash, the same in both.
        shared: packs in both: the same ids, masks and boundaries.
        only_here: packs that the other does not have, or not so often.
        only_there: the same, the other way round.
        first_here: numbers of the first of those that the other does not have at all.
        first_there: the same of the other.
    """

    share: float
    shared: int
    only_here: int
    only_there: int
    first_here: tuple[int, ...]
    first_there: tuple[int, ...]

    @property
    def same(self) -> bool:
        """Whether both hold the same packs, as far as the sample tells."""
        return not (self.only_here or self.only_there)


@dataclass(frozen=True, slots=True)
class SequenceDifference:
    """How two shards' sequences differ, copies counted.

    Attributes:
        share: of all sequences that the counts are of; below 1 they are a sample, chosen by hash, the same in both.
        shared: sequences in both, with the same mask.
        other_mask: sequences in both whose masks differ.
        only_here: sequences whose ids the other does not have.
        only_there: the same, the other way round.
        first_here: pack and number in it of the first of those that only this shard has, in ids or mask.
        first_there: the same of the other.
    """

    share: float
    shared: int
    other_mask: int
    only_here: int
    only_there: int
    first_here: tuple[tuple[int, int], ...]
    first_there: tuple[tuple[int, int], ...]

    @property
    def same(self) -> bool:
        """Whether both hold the same sequences, as far as the sample tells."""
        return not (self.other_mask or self.only_here or self.only_there)


class ShardSamples:
    """Hashes of a shard's packs, of its sequences' ids, and of their ids and mask together."""

    def __init__(self, shard: Shard, parts: Iterable[Window], most: int = _MOST, most_packs: int = _MOST_PACKS) -> None:
        self._shard = shard
        self._packs = HashSample(most_packs)
        self._ids, self._whole = HashSample(most), HashSample(most)
        for window in parts:
            tokens, loss = shard.files.tokens[window.tokens], shard.files.loss[window.tokens]
            self._packs.add(pack_hashes(window, tokens, loss), window.first)
            ids, masks = _native.hash_runs(tokens, window.bounds), _native.hash_runs(loss, window.bounds)
            self._ids.add(ids, window.sequence)
            # The upper half decides what is kept, and must do so alike whatever the mask.
            self._whole.add(ids & _UPPER | (ids ^ masks) & ~_UPPER, window.sequence)

    def pack_difference(self, other: ShardSamples, most: int) -> PackDifference:
        """How the packs differ; ``most`` are named."""
        bits = _same_limit(self._packs, other._packs)
        return PackDifference(0.5**bits, *_compared(self._packs, other._packs, most))

    def sequence_difference(self, other: ShardSamples, most: int) -> SequenceDifference:
        """How the sequences differ; ``most`` are named."""
        bits = _same_limit(self._ids, self._whole, other._ids, other._whole)
        same_ids, only_here, only_there, _, _ = _compared(self._ids, other._ids, 0)
        shared, _, _, first_here, first_there = _compared(self._whole, other._whole, most)
        return SequenceDifference(
            share=0.5**bits,
            shared=shared,
            other_mask=max(0, same_ids - shared),
            only_here=only_here,
            only_there=only_there,
            first_here=self._places(first_here),
            first_there=other._places(first_there),
        )

    def _places(self, numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
        return tuple(locate_sequence(self._shard, number)[:2] for number in numbers)


def pack_hashes(window: Window, tokens: NDArray[np.generic], loss: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Of each pack of a window, whose ids and masks are given: ids, mask and boundaries as one number."""
    ids, masks = _native.hash_runs(tokens, window.pack_bounds), _native.hash_runs(loss, window.pack_bounds)
    mixed: NDArray[np.uint64] = ids ^ masks * np.uint64(3) ^ shape_hashes(window) * np.uint64(5)
    return mixed


def shape_hashes(window: Window) -> NDArray[np.uint64]:
    """Hashes of the sequences' starts in their packs, by pack."""
    packs = np.repeat(window.pack_bounds[:-1], np.diff(window.sequence_offsets))
    return _native.hash_runs((window.bounds[:-1] - packs).astype(np.int32), window.sequence_offsets)


def _same_limit(*samples: HashSample) -> int:
    """Thins all out alike; gives their bits."""
    bits = max(sample.bits for sample in samples)
    for sample in samples:
        sample.thin(bits)
    return bits


def _compared(here: HashSample, there: HashSample, most: int) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...]]:
    """Two multisets: how many elements they share and how many only one has; numbers of the first that only one has."""
    left, right = here.counted(), there.counted()
    _, at, other = np.intersect1d(left.hashes, right.hashes, assume_unique=True, return_indices=True)
    common = int(np.minimum(left.times[at], right.times[other]).sum())
    only_here, only_there = int(left.times.sum()) - common, int(right.times.sum()) - common
    return common, only_here, only_there, _first_alone(left, right, most), _first_alone(right, left, most)


def _first_alone(here: Counted, there: Counted, most: int) -> tuple[int, ...]:
    return tuple(np.sort(here.first[~np.isin(here.hashes, there.hashes)])[:most].tolist())
