"""Sample numbers to rows, whole batches at a time.

``PackedRows`` are of one data set, the light object that worker processes get; ``BlendedRows`` of a blend of them::

    rows = rows_of(dataset)
    sampler = PackedBatchSampler(rows, ...)
    for batch in BatchLoader(rows.assembler, rows.micro_batches(sampler)):
        step(batch)

Sample i of a run is position ``i % packs`` of epoch ``i // packs``, and each epoch is one permutation of all packs.
The permutation depends on the seed, the split, the data and the epoch's number and on nothing else: not on how many
samples are asked for, on ranks, batch sizes or where a run began. So a longer run begins with the same samples as a
shorter one, and a run that is resumed anywhere goes on with the ones that would have come.

The generator is our own Fisher-Yates shuffle on SplitMix64 (``csrc/packing/random.h``), seeded with the 64-bit xxh3 of
``[seed, split, fingerprint, epoch]`` as JSON: the same on every machine and with every version of numpy.
"""

from __future__ import annotations

import json
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.training.batch import Batch, BatchAssembler
from megatron_sft_idx.training.loader import BatchRows, Wanted, whole_rows
from megatron_sft_idx.training.sources import JoinedPacks, PackSource, PlannedPacks, StoredPacks, reopen

__all__ = ["BlendedRows", "EpochOrder", "PackedRows", "Rows", "SingleRows", "rows_of"]

# ---- the order of an epoch ----


# A batch may end one epoch and begin the next.
_EPOCHS_HELD = 2


class EpochOrder:
    """Which pack comes when.

    Holds the permutations of two epochs at most, 4 bytes a pack each (8 beyond 2^31 packs). Threads may share one.

    Args:
        packs: packs in an epoch, at least 1.
        seed: of the run.
        split: ``train``, ``valid`` or ``test``; splits of one data set are shuffled differently.
        fingerprint: of the data.
    """

    def __init__(self, packs: int, seed: int, split: str, fingerprint: str) -> None:
        self.packs, self.seed, self.split, self.fingerprint = packs, seed, split, fingerprint
        # Replaced, never changed: no lock that a fork could catch in a thread's hands. Two threads that come first
        # both shuffle; either result serves.
        self._held: dict[int, NDArray[np.int32] | NDArray[np.int64]] = {}

    def __reduce__(self) -> tuple[type[EpochOrder], tuple[int, int, str, str]]:
        return EpochOrder, (self.packs, self.seed, self.split, self.fingerprint)

    def epoch(self, number: int) -> NDArray[np.int32] | NDArray[np.int64]:
        """The packs of one epoch in their order."""
        if (held := self._held.get(number)) is not None:
            return held
        key = json.dumps([self.seed, self.split, self.fingerprint, number]).encode()
        order = _native.packing_permutation(self.packs, xxhash.xxh3_64_intdigest(key))
        made = order.astype(np.int32) if self.packs <= 2**31 else order
        made.flags.writeable = False
        self._held = {**dict(list(self._held.items())[1 - _EPOCHS_HELD :]), number: made}
        return made

    def pack_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The pack of each sample, int64; samples count from 0 through all epochs."""
        epochs, positions = np.divmod(samples, self.packs)
        if len(samples) and (epochs == epochs[0]).all():
            return self.epoch(int(epochs[0]))[positions].astype(np.int64, copy=False)
        out = np.empty(len(samples), np.int64)
        for number in np.unique(epochs):
            here = epochs == number
            out[here] = self.epoch(int(number))[positions[here]]
        return out


# ---- samples to packs ----


class Rows(ABC, torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples, each of which is a pack of ``source``.

    Attributes:
        source: of the packs.
        num_samples: rows to serve.
        seq_length: positions of a row.
        sequence_multiple: each sequence is padded to a multiple of this inside its row.
        width: of ``cu_seqlens``; None leaves it to the source.
        pad_id: fills up rows; None leaves it to the source.
        padding_mask: whether rows have one.
    """

    source: PackSource
    num_samples: int
    seq_length: int
    sequence_multiple: int
    width: int | None
    pad_id: int | None
    padding_mask: bool

    @abstractmethod
    def _packs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The pack of each sample; samples are 0 to ``num_samples`` - 1."""

    @cached_property
    def assembler(self) -> BatchAssembler:
        """Assembles rows of this data set."""
        return BatchAssembler(
            self.source,
            self.seq_length,
            sequence_multiple=self.sequence_multiple,
            width=self.width,
            pad_id=self.pad_id,
            padding_mask=self.padding_mask,
            columns=tuple(self.source.columns),
        )

    def packs(self, samples: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
        """The pack of each sample, numbered as in ``source``. IndexError unless all are 0 to ``num_samples`` - 1."""
        samples = np.asarray(samples, np.int64)
        if len(samples) and not 0 <= samples.min() <= samples.max() < self.num_samples:
            raise IndexError(f"samples {samples.min()} to {samples.max()}, there are {self.num_samples}")
        return self._packs(samples)

    def wanted(self, samples: NDArray[np.int64] | Sequence[int]) -> Wanted:
        """Some samples as packs; negative ones, which only fill up a batch, count from the end and are masked."""
        return Wanted(*self._wanted(np.asarray(samples, np.int64)))

    def _wanted(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        masked = samples < 0
        packs = self.packs(np.where(masked, samples + self.num_samples, samples).ravel())
        return packs.reshape(samples.shape), masked

    def micro_batches(self, batches: Iterable[Sequence[int]]) -> Iterator[Wanted]:
        """Micro-batches of samples as a ``BatchLoader`` takes them.

        Args:
            batches: samples of each. A ``PackedBatchSampler`` is asked for many at once, which costs less.
        """
        if blocks := getattr(batches, "blocks", None):
            for block in blocks():
                packs, masked = self._wanted(block)
                yield from map(Wanted, packs, masked)
        else:
            yield from map(self.wanted, batches)

    def attention_costs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum of squared sequence lengths of each sample: attention's work, as it never crosses a sequence."""
        segments = self.source.segments(self.packs(samples))
        if not len(samples):
            return np.zeros(0, np.int64)
        costs: NDArray[np.int64] = np.add.reduceat(np.square(segments.lengths), segments.offsets[:-1])
        return costs

    def batch(self, samples: Sequence[int] | NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Several samples, stacked; negative ones with their loss masked, as in ``__getitem__``."""
        packs, masked, _ = self.wanted(samples)
        return self.assembler.assemble(packs, masked=masked)

    def __getitems__(self, samples: Sequence[int] | NDArray[np.int64]) -> BatchRows:
        """What a ``DataLoader`` asks for a batch: assembled whole; give it ``collate_fn=whole_batch``."""
        packs, masked, _ = self.wanted(samples)
        return whole_rows(self.assembler, packs, masked)

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
        return self.assembler.sample(int(self._packs(np.array([at]))[0]), masked=i < 0)


class PackedRows(Rows):
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
        padding_mask: whether rows have one, for MoE routers.
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
        padding_mask: bool = False,
    ) -> None:
        self.source = self.stored = source
        self.order, self.num_samples = order, num_samples
        self.seq_length, self.sequence_multiple = seq_length, sequence_multiple
        self.width, self.pad_id, self.padding_mask = width, pad_id, padding_mask

    def __reduce__(self) -> tuple[Any, ...]:
        order, shape = self.order, (self.seq_length, self.sequence_multiple, self.width, self.pad_id, self.padding_mask)
        # The order's pack count and fingerprint are the source's.
        return _rows, (type(self), self.stored.state(), order.seed, order.split, self.num_samples, *shape)

    def _packs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.order.pack_of(samples)


class SingleRows(PackedRows):
    """One sequence a sample, for Megatron's packing scheduler, which packs as it trains.

    A sample has ``tokens``, ``labels`` and ``position_ids``, int64 [n], ``loss_mask``, float32 [n], and
    ``original_seq_len`` and ``padded_seq_len``, int32 [1]: n is the padded length, a multiple of
    ``sequence_multiple``. The source has packs of one sequence each.
    """

    def __getitem__(self, index: int | np.integer[Any] | None) -> dict[str, torch.Tensor]:
        packs, masked, _ = self.wanted([-1 if index is None else operator.index(index)])
        assembler = self.assembler
        segments = assembler.plan(packs)
        length = int(segments.lengths[0])
        padded = -(-length // self.sequence_multiple) * self.sequence_multiple
        batch = assembler.fill(segments, Batch(assembler.layout(1, padded)), masked, seq_length=padded)
        sample = {name: batch[name][0] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        sizes = torch.tensor([[length], [padded]], dtype=torch.int32)
        return {**sample, "original_seq_len": sizes[0], "padded_seq_len": sizes[1]}

    def __getitems__(self, samples: Sequence[int] | NDArray[np.int64]) -> list[dict[str, torch.Tensor]]:  # type: ignore[override]
        """The samples, which are of different lengths."""
        return [self[int(sample)] for sample in samples]


class BlendedRows(Rows):
    """Samples of a blend, read as those of one data set: whole batches, looked ahead for, and fillers masked.

    Args:
        members: what is blended; their rows have one shape.
        member_of: integers [samples], which of them each sample is of.
        sample_of: integers [samples], its number there.
    """

    def __init__(
        self, members: Sequence[PackedRows], member_of: NDArray[np.integer[Any]], sample_of: NDArray[np.integer[Any]]
    ) -> None:
        first = members[0]
        self.source = self._joined = JoinedPacks([member.stored for member in members])
        self.num_samples, self.seq_length = len(member_of), first.seq_length
        self.sequence_multiple, self.width, self.pad_id = first.sequence_multiple, first.width, first.pad_id
        self.padding_mask = first.padding_mask
        self._members, self._index = members, (member_of, sample_of)

    def _packs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        members, numbers = (np.asarray(column[samples], np.int64) for column in self._index)
        packs = np.empty(len(samples), np.int64)
        for member, begin in enumerate(self._joined.packs_before[:-1].tolist()):
            here = np.flatnonzero(members == member)
            packs[here] = self._members[member].packs(numbers[here]) + begin
        return packs


def rows_of(dataset: Any) -> Rows:
    """The rows of what Megatron's dataset builder made, to be read natively.

    Args:
        dataset: a ``PackedSFTDataset``, its rows, or a ``BlendedDataset`` of these.

    Raises:
        TypeError: something else.
    """
    if isinstance(dataset, Rows):
        return dataset
    if isinstance(rows := getattr(dataset, "rows", None), Rows):
        return rows
    if not hasattr(dataset, "dataset_index"):
        raise TypeError(f"{type(dataset).__name__}: expected a PackedSFTDataset, or a blend of such data sets")
    if dataset.dataset_index is None and len(dataset):
        dataset[0]  # with defer_npy_index_mmap a blend opens its index when first read
    members = [rows_of(member) for member in dataset.datasets]
    return BlendedRows(members, dataset.dataset_index, dataset.dataset_sample_index)  # type: ignore[arg-type]


def _rows(
    kind: type[PackedRows],
    source_state: tuple[Any, ...],
    seed: int,
    split: str,
    num_samples: int,
    seq_length: int,
    sequence_multiple: int,
    width: int | None,
    pad_id: int | None,
    padding_mask: bool,
) -> PackedRows:
    source = reopen(*source_state)
    order = EpochOrder(source.num_packs, seed, split, source.fingerprint)
    return kind(
        source,
        order,
        num_samples,
        seq_length,
        sequence_multiple=sequence_multiple,
        width=width,
        pad_id=pad_id,
        padding_mask=padding_mask,
    )
