"""Two shards as sets of sequences, whatever packs these are in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_sft_idx import _native
from megatron_sft_idx.report.repeats import Counted, HashSample
from megatron_sft_idx.report.windows import Window, locate_sequence
from megatron_sft_idx.shard import Shard

__all__ = ["SequenceDifference", "SequenceSamples"]

_MOST = 1 << 20
_UPPER = np.uint64(0xFFFFFFFF00000000)


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


class SequenceSamples:
    """Hashes of a shard's sequences: of their ids, and of ids and mask together."""

    def __init__(self, shard: Shard, parts: Iterable[Window], most: int = _MOST) -> None:
        self._shard = shard
        self._ids, self._whole = HashSample(most), HashSample(most)
        for window in parts:
            ids = _native.hash_runs(shard.files.tokens[window.tokens], window.bounds)
            masks = _native.hash_runs(shard.files.loss[window.tokens], window.bounds)
            self._ids.add(ids, window.sequence)
            # The upper half decides what is kept, and must do so alike whatever the mask.
            self._whole.add(ids & _UPPER | (ids ^ masks) & ~_UPPER, window.sequence)

    def difference(self, other: SequenceSamples, most: int) -> SequenceDifference:
        """How the sequences differ; ``most`` are named."""
        bits = max(sample.bits for samples in (self, other) for sample in (samples._ids, samples._whole))
        for samples in (self, other):
            samples._ids.thin(bits)
            samples._whole.thin(bits)
        ids, other_ids = self._ids.counted(), other._ids.counted()
        whole, other_whole = self._whole.counted(), other._whole.counted()
        common_ids, common = _common(ids, other_ids), _common(whole, other_whole)
        return SequenceDifference(
            share=0.5**bits,
            shared=common,
            other_mask=max(0, common_ids - common),
            only_here=int(ids.times.sum()) - common_ids,
            only_there=int(other_ids.times.sum()) - common_ids,
            first_here=self._first_alone(whole, other_whole, most),
            first_there=other._first_alone(other_whole, whole, most),
        )

    def _first_alone(self, here: Counted, there: Counted, most: int) -> tuple[tuple[int, int], ...]:
        alone = np.sort(here.first[~np.isin(here.hashes, there.hashes)])[:most]
        return tuple(locate_sequence(self._shard, number)[:2] for number in alone.tolist())


def _common(here: Counted, there: Counted) -> int:
    """How many elements two multisets share."""
    _, at, other = np.intersect1d(here.hashes, there.hashes, assume_unique=True, return_indices=True)
    return int(np.minimum(here.times[at], there.times[other]).sum())
