"""``PackedRows``: the light object that turns sample numbers into rows; what worker processes get."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.loader import BatchRows, whole_rows
from megatron_sft_idx.training.order import EpochOrder
from megatron_sft_idx.training.sources import PlannedPacks, StoredPacks, reopen

__all__ = ["PackedRows"]


class PackedRows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of one split: an order over a source of packs. Needs torch and not Megatron.

    A ``PackedSFTDataset`` pickles as this: a worker process opens the files by itself, and starts without importing
    Megatron, which takes seconds and hundreds of MB.

    Args:
        source: of the packs.
        order: of the epochs.
        num_samples: rows to serve, over as many epochs as it takes.
        seq_length: positions of a row.
        sequence_multiple: each sequence is padded to a multiple of this inside its row.
        width: of ``cu_seqlens``; None leaves it to the source.
        pad_id: fills up rows; None leaves it to the source.
    """

    def __init__(
        self,
        source: StoredPacks | PlannedPacks,
        order: EpochOrder,
        num_samples: int,
        seq_length: int,
        *,
        sequence_multiple: int = 1,
        width: int | None = None,
        pad_id: int | None = None,
    ) -> None:
        self.source, self.order, self.num_samples = source, order, num_samples
        self.seq_length, self.sequence_multiple = seq_length, sequence_multiple
        self.width, self.pad_id = width, pad_id

    def __reduce__(self) -> tuple[Any, ...]:
        order, shape = self.order, (self.sequence_multiple, self.width, self.pad_id)
        # The order's pack count and fingerprint are the source's.
        return _rows, (self.source.state(), order.seed, order.split, self.num_samples, self.seq_length, *shape)

    @cached_property
    def assembler(self) -> BatchAssembler:
        """Assembles rows of this data set."""
        return BatchAssembler(
            self.source,
            self.seq_length,
            sequence_multiple=self.sequence_multiple,
            width=self.width,
            pad_id=self.pad_id,
        )

    def packs(self, samples: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
        """The pack of each sample, numbered as in ``source``. IndexError unless all are 0 to ``num_samples`` - 1."""
        samples = np.asarray(samples, np.int64)
        if len(samples) and not 0 <= samples.min() <= samples.max() < self.num_samples:
            raise IndexError(f"samples {samples.min()} to {samples.max()}, there are {self.num_samples}")
        return self.order.pack_of(samples)

    def attention_costs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum of squared sequence lengths of each sample: attention's work, as it never crosses a sequence."""
        segments = self.source.segments(self.packs(samples))
        if not len(samples):
            return np.zeros(0, np.int64)
        costs: NDArray[np.int64] = np.add.reduceat(np.square(segments.lengths), segments.offsets[:-1])
        return costs

    def batch(self, samples: Sequence[int] | NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Several samples, stacked; negative ones with their loss masked, as in ``__getitem__``."""
        packs, masked = self._wanted(samples)
        batch = self.assembler.assemble(packs)
        batch["loss_mask"][torch.from_numpy(masked)] = 0
        return batch

    def __getitems__(self, samples: Sequence[int] | NDArray[np.int64]) -> BatchRows:
        """What a ``DataLoader`` asks for a batch: assembled whole; give it ``collate_fn=whole_batch``."""
        return whole_rows(self.assembler, *self._wanted(samples))

    def _wanted(self, samples: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The packs of samples, and which of them only fill up a batch."""
        wanted = np.asarray(samples, np.int64)
        masked = wanted < 0
        return self.packs(np.where(masked, wanted + self.num_samples, wanted)), masked

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int | np.integer[Any] | None) -> dict[str, torch.Tensor]:
        """One sample.

        A negative index (or None, as Megatron's GPTDataset has it) gives a row that fills up a batch: real tokens,
        counted from the end, and a loss mask of zeros. IndexError where there is no such sample.
        """
        i = -1 if index is None else operator.index(index)
        at = i if i >= 0 else i + self.num_samples
        if not 0 <= at < self.num_samples:
            raise IndexError(f"sample {i}, there are {self.num_samples}")
        pack = self.order.epoch(at // self.order.packs)[at % self.order.packs]
        return self.assembler.sample(int(pack), masked=i < 0)


def _rows(
    source_state: tuple[Any, ...],
    seed: int,
    split: str,
    num_samples: int,
    seq_length: int,
    sequence_multiple: int,
    width: int | None,
    pad_id: int | None,
) -> PackedRows:
    source = reopen(*source_state)
    order = EpochOrder(source.num_packs, seed, split, source.fingerprint)
    return PackedRows(
        source, order, num_samples, seq_length, sequence_multiple=sequence_multiple, width=width, pad_id=pad_id
    )
