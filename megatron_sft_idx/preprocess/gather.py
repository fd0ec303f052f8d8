"""From a plan to a shard: sequences are read where they lie, and written in the order of their packs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.preprocess.overlong import Selection
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard.writer import MaskAlignment

__all__ = ["CorpusReader", "PackedRun", "SequenceReader", "write_packs"]


class SequenceReader(Protocol):
    """Tokenised sequences, wherever they lie.

    Attributes:
        mask_alignment: of the masks it gives.
        window_tokens: about how many it is best asked for at once.
    """

    mask_alignment: MaskAlignment
    window_tokens: int

    def read(self, selection: Selection) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ids and masks of the selection, end to end."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PackedRun:
    """Consecutive packs of a plan.

    Attributes:
        offsets: pack ``p`` holds the cuts ``[offsets[p], offsets[p + 1])`` of the selection, int64 [packs + 1].
        selection: the cuts of all these packs.
        longest: tokens of the longest pack, or more.
    """

    offsets: NDArray[np.int64]
    selection: Selection
    longest: int


class CorpusReader:
    """The sequences of a shard, whatever its packs are."""

    mask_alignment: MaskAlignment = "label"
    window_tokens = 1 << 20

    def __init__(self, source: Shard) -> None:
        self._tokens, self._loss = source.files.tokens[:], source.files.loss[:]
        self._bounds = source.sequence_bounds()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.diff(self._bounds)

    def read(self, selection: Selection) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ids and masks of the selection, end to end."""
        starts = self._bounds[selection.sequences]
        if selection.begins is not None:
            starts = starts + selection.begins
        lengths = selection.lengths.astype(np.int64)
        in_order = np.arange(len(starts))
        ids, mask = (np.empty(int(lengths.sum()), array.dtype) for array in (self._tokens, self._loss))
        for array, out in ((self._tokens, ids), (self._loss, mask)):
            _native.gather_sequences(array, starts, starts + lengths, in_order, out)
        # Where a sequence was cut its last label is gone; elsewhere this is zero already (rule P6).
        mask[np.cumsum(lengths) - 1] = 0
        return ids, mask

    def count_trained(self, sequences: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
        """How many of the tokens at these positions of these sequences are trained on; none is a first one."""
        labels = (self._bounds[sequences] + positions - 1).tolist()
        return sum(int(self._loss[label : label + 1][0] != 0) for label in labels)


def write_packs(
    reader: SequenceReader,
    run: PackedRun,
    writer: ShardWriter,
    progress: Callable[[int, int], None] = lambda units, items: None,
) -> None:
    """Write the packs, some at a time."""
    lengths = run.selection.lengths.astype(np.int64)
    # As many packs as surely hold no more than the window, and one at least.
    at_once = max(1, reader.window_tokens // max(run.longest, 1))
    for first in range(0, len(run.offsets) - 1, at_once):
        bounds = run.offsets[first : first + at_once + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        each = lengths[begin:end]
        ends = np.cumsum(each)
        counts = np.diff(bounds)
        pack_ends = ends[np.cumsum(counts) - 1]
        pack_lengths = np.diff(pack_ends, prepend=0)
        starts = ends - each - np.repeat(pack_ends - pack_lengths, counts)
        ids, mask = reader.read(run.selection.window(begin, end))
        writer.add_packs(ids, mask, starts, pack_lengths, counts, mask_alignment=reader.mask_alignment)
        progress(end - begin, end - begin)
