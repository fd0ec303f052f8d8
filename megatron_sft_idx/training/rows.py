"""Sample numbers to packs: the order of an epoch, the rows of data sets, and the samples of a data-parallel rank.

``PackedRows`` are the rows of one data set; they have a small pickle for worker processes. ``BlendedRows`` are the rows
of a blend::

    rows = rows_of(dataset)
    sampler = PackedBatchSampler(rows, ...)
    for batch in BatchLoader(rows.assembler, rows.micro_batches(sampler)):
        step(batch)

Sample i of a run is position ``i % packs`` of epoch ``i // packs``, and each epoch is one permutation of all packs.
The permutation depends only on the seed, the split, the data and the number of the epoch. It does not depend on the
number of requested samples, on ranks, on batch sizes or on the start of the run. A longer run therefore begins with the
same samples as a shorter one, and a resumed run continues with exactly the samples that would have come next.

The generator is a Fisher-Yates shuffle on SplitMix64 (``csrc/packing/random.h``), seeded with the 64-bit xxh3 of
``[seed, split, fingerprint, epoch]`` as JSON. It gives the same order on every machine and with every version of numpy.

Global batch k has the samples k * B to (k + 1) * B of the data set, for any number of ranks. A run that stops after any
number of samples can therefore resume with the same global batches on another number of ranks.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout.media_layout import KINDS, Kind
from megatron_sft_idx.lines import Shown, shown_by_fields
from megatron_sft_idx.packing.permutation import shuffled
from megatron_sft_idx.training.batch import Batch, BatchAssembler
from megatron_sft_idx.training.loader import Wanted
from megatron_sft_idx.training.media import MediaStep
from megatron_sft_idx.training.pretraining import MixedPacks, PretrainingPacks, blended
from megatron_sft_idx.training.sources import JoinedPacks, PackSource, PlannedPacks, StoredPacks, find_items, reopen


@shown_by_fields
class EncoderCost(NamedTuple):
    """The work of an image or audio encoder, in the unit in which attention to a sequence of n tokens costs n^2.

    An encoder with K layers of width a, and m encoder positions per position of the pack, costs about
    12 m a^2 K / (h L) per position, next to a language model with L layers of width h.

    Attributes:
        per_position: for each position that an item takes in its pack.
        per_item: for each item, for encoders that pad all items to one size.

    Example:
        >>> # Qwen2.5-VL 7B: 4 encoder positions per position of the pack, 32 layers of width 1280; 28 of width 3584.
        >>> cost = EncoderCost(per_position=round(12 * 4 * 1280**2 * 32 / (3584 * 28)))
        >>> cost
        EncoderCost(per_position=25078, per_item=0)
        >>> media_costs = {"image": cost}  # for PackedSFTDatasetConfig
    """

    per_position: float = 0
    per_item: float = 0


# For each position of the language model, which has L layers of width h, an encoder with K layers of width a has m
# positions. It then costs 12 m a^2 K / (h L) per position: 24 m a^2 K against 2 h L floating-point operations for each
# n^2 of causal attention, forwards. The values are for Qwen2.5-VL 7B (m 4, a 1280, K 32, h 3584, L 28) and for
# Qwen2-Audio 7B (m 2, a 1280, K 32, h 4096, L 32), which pads every recording to the 750 positions of half a minute.
ENCODER_COSTS: Final[Mapping[Kind, EncoderCost]] = {
    "image": EncoderCost(per_position=25_000),
    "audio": EncoderCost(per_item=750 * 9_600),
}
_MOST_COST: Final = 10**12


def encoder_costs(given: Any) -> Mapping[Kind, EncoderCost]:
    """Return the costs that ``media_costs`` sets: for each kind an ``EncoderCost``, or a number per position.

    None stands for ``ENCODER_COSTS``; kinds that are missing cost nothing.

    FormatError: there is another kind, or a cost is not a number from 0 to 10^12.

    >>> encoder_costs({"image": 30_000})
    {'image': EncoderCost(per_position=30000, per_item=0)}
    """
    if given is None:
        return ENCODER_COSTS
    if not isinstance(given, Mapping):
        raise FormatError(f"media_costs: {brief(given)}, expected a dict with costs of 'image' and 'audio'")
    costs: dict[Kind, EncoderCost] = {}
    for kind, value in given.items():
        if kind not in KINDS:
            raise FormatError(f"media_costs: unknown kind {brief(kind)}; the kinds are {', '.join(KINDS)}")
        cost = EncoderCost(*value) if isinstance(value, tuple) and len(value) == 2 else EncoderCost(value)
        for each in cost:
            if isinstance(each, bool) or not isinstance(each, int | float) or not 0 <= each <= _MOST_COST:
                raise FormatError(f"media_costs: {brief(value)} for {kind}, expected numbers from 0 to {_MOST_COST:,}")
        costs[kind] = cost
    return costs


# For each kind of item its cost; a number is the cost per position.
MediaCosts: TypeAlias = Mapping[Kind, EncoderCost | float]


# ---- the order of an epoch ----


class EpochOrder(Shown):
    """The order of ``packs`` packs (1 or more) in each epoch; each split of a data set has its own order.

    ``epoch(number)`` returns the packs of one epoch in order. The orders of two epochs are cached, with 4 bytes per
    pack and epoch (8 bytes above 2^31 packs), because a batch can contain the end of one epoch and the start of the
    next. Threads can share an ``EpochOrder``.
    """

    def __init__(self, packs: int, seed: int, split: str, fingerprint: str) -> None:
        self.packs, self.seed, self.split = packs, seed, split

        # Not a method: a cached method would keep this object, and gigabytes, alive until the garbage collector runs.
        @lru_cache(maxsize=2)
        def epoch(number: int) -> NDArray[np.int32] | NDArray[np.int64]:
            order = shuffled(packs, seed, split, fingerprint, number)
            permutation = order.astype(np.int32) if packs <= 2**31 else order
            permutation.flags.writeable = False
            return permutation

        self.epoch = epoch

    def _shown(self) -> str:
        return f"{self.packs:,} packs, seed {self.seed}, split {self.split}"

    def pack_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the pack of each sample, int64; samples are counted from 0 over all epochs."""
        epochs, positions = np.divmod(samples, self.packs)
        if len(samples) and (epochs == epochs[0]).all():
            return self.epoch(int(epochs[0]))[positions].astype(np.int64, copy=False)
        out = np.empty(len(samples), np.int64)
        for number in np.unique(epochs).tolist():
            rows = epochs == number
            out[rows] = self.epoch(number)[positions[rows]]
        return out


# ---- samples to packs ----


class Rows(Shown, ABC, torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A map-style data set of samples; each sample is a pack of ``source``.

    ``shape`` has the arguments of ``BatchAssembler`` except the source and its columns.
    """

    source: PackSource
    num_samples: int
    shape: dict[str, Any]
    media_costs: MediaCosts | None = None

    def _shown(self) -> str:
        return f"{self.num_samples:,} samples of {self.source!r}"

    @abstractmethod
    def _packs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the pack of each sample; samples are 0 to ``num_samples`` - 1."""

    @abstractmethod
    def stored(self, packs: NDArray[np.int64]) -> dict[str, set[int]]:
        """Return where packs of ``source`` are stored; see ``stored_packs``."""

    @cached_property
    def assembler(self) -> BatchAssembler:
        """The assembler of the batches of this data set, with all columns of the source."""
        return BatchAssembler(self.source, columns=tuple(self.source.columns), **self.shape)

    def packs(self, samples: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
        """Return the pack number of each sample in ``source``. IndexError: one is not in 0 to ``num_samples`` - 1."""
        samples = np.asarray(samples, np.int64)
        if len(samples) and not 0 <= samples.min() <= samples.max() < self.num_samples:
            raise IndexError(f"samples {samples.min()} to {samples.max()} requested, but there are {self.num_samples}")
        return self._packs(samples)

    def wanted(self, samples: NDArray[np.int64] | Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the packs of samples and which of them are masked, both in the shape of ``samples``.

        A negative number counts from the end and means a masked sample.
        """
        numbers = np.asarray(samples, np.int64)
        masked = numbers < 0
        packs = self.packs(np.where(masked, numbers + self.num_samples, numbers).ravel())
        return packs.reshape(numbers.shape), masked

    def micro_batches(self, batches: Iterable[Sequence[int]]) -> MicroBatches:
        """Return the packs of each micro-batch of sample numbers, for a ``BatchLoader``; looked up at each iteration.

        For a ``PackedBatchSampler``, many micro-batches are looked up at once.
        """
        return MicroBatches(self, batches)

    def sample_costs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the part of each sample's work that differs between full packs, int64 [samples].

        The attention of the language model costs the sum of the squared sequence lengths. If batches carry images and
        audio, the work of the encoders is added in the same unit (``encoder_costs`` of ``media_costs``).
        """
        segments = self.source.segments(self.packs(samples))
        of_each = np.square(segments.lengths)
        if self.shape.get("media") is not None:
            found = find_items(self.source, segments)
            for kind, cost in encoder_costs(self.media_costs).items():
                own = found.items.kinds == KINDS[kind]
                of_items = np.rint(cost.per_item + cost.per_position * found.items.lengths[own]).astype(np.int64)
                np.add.at(of_each, found.segments[own], of_items)
        sums = np.append(0, np.cumsum(of_each))
        costs: NDArray[np.int64] = sums[segments.offsets[1:]] - sums[segments.offsets[:-1]]
        if segments.whole is not None:
            costs[segments.whole.packs] = self.shape["seq_length"] ** 2
        return costs

    def __getitems__(self, samples: Sequence[int] | NDArray[np.int64]) -> Batch:
        """Return a whole batch to a ``DataLoader``, whose ``collate_fn`` must be ``whole_batch``."""
        packs, masked = self.wanted(samples)
        return self.assembler.rows(packs, masked)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int | np.integer[Any] | None) -> dict[str, torch.Tensor]:
        """Return one sample.

        A negative index (or None, which Megatron's GPTDataset accepts) returns a row that only fills up a batch: the
        tokens of the sample counted from the end, with a loss mask of zeros.

        Raises:
            IndexError: there is no such sample.
            FormatError: there is a media step, whose results come in whole batches only.
        """
        i = -1 if index is None else operator.index(index)
        return self.assembler.sample(int(self.packs([i if i >= 0 else i + self.num_samples])[0]), i < 0)


class PackedRows(Rows):
    """The samples of one split: a source of packs in the order of a seed. Needs torch but not Megatron.

    A ``PackedSFTDataset`` pickles as this class. A worker process then opens the files itself and starts without
    importing Megatron, which would take seconds and hundreds of MB.

    There are ``num_samples`` samples, over as many epochs as needed. For the other arguments, see ``BatchAssembler``.
    """

    def __init__(
        self,
        source: StoredPacks | PlannedPacks,
        seed: int,
        split: str,
        num_samples: int,
        seq_length: int,
        sequence_multiple: int = 1,
        width: int | None = None,
        pad_id: int | None = None,
        padding_mask: bool = False,
        files: Sequence[dict[str, Any]] = (),
        media: MediaStep | None = None,
        ignore_media: bool = False,
        media_costs: MediaCosts | None = None,
    ) -> None:
        self.source: StoredPacks | PlannedPacks = source
        self.order, self.num_samples = EpochOrder(source.num_packs, seed, split, source.fingerprint), num_samples
        self.shape = {
            "seq_length": seq_length,
            "sequence_multiple": sequence_multiple,
            "width": width,
            "pad_id": pad_id,
            "padding_mask": padding_mask,
            "files": files,
            "media": media,
            "ignore_media": ignore_media,
        }
        self.media_costs = media_costs

    def __reduce__(self) -> tuple[Any, ...]:
        order, rest = self.order, (*self.shape.values(), self.media_costs)
        return _reopened, (type(self), self.source.state(), order.seed, order.split, self.num_samples, *rest)

    def _packs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.order.pack_of(samples)

    def stored(self, packs: NDArray[np.int64]) -> dict[str, set[int]]:
        """Return where packs of ``source`` are stored; see ``stored_packs``."""
        return self.source.stored(packs)


class SingleRows(PackedRows):
    """Samples of one sequence each, for Megatron's packing scheduler, which packs during training.

    A sample has ``tokens``, ``labels`` and ``position_ids``, int64 [n], ``loss_mask``, float32 [n], and
    ``original_seq_len`` and ``padded_seq_len``, int32 [1]. n is the padded length, a multiple of
    ``sequence_multiple``. The packs of the source must have one sequence each.
    """

    def __getitem__(self, index: int | np.integer[Any] | None) -> dict[str, torch.Tensor]:
        packs, masked = self.wanted([-1 if index is None else operator.index(index)])
        assembler = self.assembler
        segments, multiple = assembler.plan(packs), assembler.sequence_multiple
        length = int(segments.lengths[0])
        padded = -(-length // multiple) * multiple
        batch = assembler.fill(segments, Batch(assembler.layout(1, padded)), masked, seq_length=padded)
        sample = {name: batch[name][0] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        sizes = torch.tensor([[length], [padded]], dtype=torch.int32)
        return {**sample, "original_seq_len": sizes[0], "padded_seq_len": sizes[1]}

    def __getitems__(self, samples: Sequence[int] | NDArray[np.int64]) -> list[dict[str, torch.Tensor]]:  # type: ignore[override]
        """Return a list of samples, because their lengths differ."""
        return [self[int(sample)] for sample in samples]


class PretrainingRows(Rows):
    """The samples of pretraining data, in the order of its data set; for ``shape``, see ``Rows``."""

    def __init__(self, source: PretrainingPacks, num_samples: int, **shape: Any) -> None:
        self.source: PretrainingPacks = source
        self.num_samples, self.shape = num_samples, shape

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(PretrainingRows, **self.shape), (self.source, self.num_samples)

    def _packs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return samples

    def stored(self, packs: NDArray[np.int64]) -> dict[str, set[int]]:
        """Return where packs of ``source`` are stored; see ``stored_packs``."""
        return self.source.stored(packs)


class BlendedRows(Rows):
    """The samples of a blend, read like one data set: in whole batches, with masked samples and read-ahead.

    Sample i is sample ``sample_of[i]`` of member ``member_of[i]``. All members must have the same ``shape``.
    """

    def __init__(
        self,
        members: Sequence[PackedRows | PretrainingRows],
        member_of: NDArray[np.integer[Any]],
        sample_of: NDArray[np.integer[Any]],
    ) -> None:
        self.source: JoinedPacks | MixedPacks = blended([member.source for member in members])
        self.num_samples = len(member_of)
        of_packs = next(member for member in members if isinstance(member, PackedRows))
        self.shape, self.media_costs = of_packs.shape, of_packs.media_costs
        self._members, self._index = members, (member_of, sample_of)

    def _packs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        members, numbers = (np.asarray(column[samples], np.int64) for column in self._index)
        packs = np.empty(len(samples), np.int64)
        for member, begin in enumerate(self.source.packs_before[:-1].tolist()):
            rows = np.flatnonzero(members == member)
            packs[rows] = self._members[member].packs(numbers[rows]) + begin
        return packs

    def stored(self, packs: NDArray[np.int64]) -> dict[str, set[int]]:
        """Return where packs of ``source`` are stored; see ``stored_packs``."""
        found: dict[str, set[int]] = {}
        members = np.searchsorted(self.source.packs_before, packs, side="right") - 1
        for member in sorted(set(members.tolist())):
            own = packs[members == member] - self.source.packs_before[member]
            for prefix, numbers in self._members[member].stored(own).items():
                found[prefix] = found.get(prefix, set()) | numbers  # two members may have the same shard
        return found


def rows_of(dataset: Any) -> Rows:
    """Return the rows of a data set that Megatron's builder made, for a ``BatchLoader``.

    Args:
        dataset: a ``PackedSFTDataset``, its rows, or a ``BlendedDataset`` of these.

    Raises:
        TypeError: ``dataset`` is something else, such as a blend of blends.
    """
    if isinstance(dataset, Rows):
        return dataset
    if isinstance(rows := getattr(dataset, "rows", None), Rows):
        return rows
    if not hasattr(dataset, "dataset_index"):
        raise TypeError(f"{type(dataset).__name__}: expected a PackedSFTDataset, or a blend of them")
    if dataset.dataset_index is None and len(dataset):
        with suppress(FormatError):  # samples with images come in whole batches only
            dataset[0]  # with defer_npy_index_mmap, a blend opens its index at the first read
    members = [rows for rows in map(rows_of, dataset.datasets) if isinstance(rows, PackedRows | PretrainingRows)]
    if len(members) < len(dataset.datasets):
        raise TypeError(
            "a blend of blends is not supported; blend their members directly, each with the product of its weights"
        )
    return BlendedRows(members, dataset.dataset_index, dataset.dataset_sample_index)


def stored_packs(dataset: Any, samples: NDArray[np.int64] | Sequence[int]) -> dict[str, list[int]]:
    """Return the packs that samples consist of, by the prefix of their shard.

    ``megatron-sft-idx inspect PREFIX --pack N`` shows such a pack. On any number of ranks, a step trains on consecutive
    samples: from the number of samples consumed before the step to the number consumed after it.

    Args:
        dataset: a data set for ``rows_of``.
        samples: numbers of samples.

    Returns:
        The numbers of the packs in each shard, ascending. If packs are planned when training starts (``--repack``),
            these are the stored packs that contain the sequences. For pretraining data, these are the numbers of rows
            in Megatron's ``GPTDataset``, under ``pretrain:PREFIX``.

    Raises:
        IndexError: there is no such sample.
        TypeError: see ``rows_of``.

    Example:
        >>> from argparse import Namespace
        >>> from megatron_sft_idx.training.provider import build_datasets
        >>> args = Namespace(data_path=["data/chats"], split="1,0,0", seq_length=16, seed=1)
        >>> train, _, _ = build_datasets(args, [12, 0, 0])
        >>> stored_packs(train, range(8, 12))  # the third step with 4 samples per step
        {'data/chats': [0, 4, 5, 6]}
    """
    rows = rows_of(dataset)
    return {prefix: sorted(packs) for prefix, packs in rows.stored(rows.packs(samples)).items()}


def _reopened(kind: type[PackedRows], source_state: tuple[Any, ...], *others: Any) -> PackedRows:
    return kind(reopen(*source_state), *others)


# ---- balancing a global batch ----


def deal(costs: NDArray[np.int64], ranks: int, micro_batches: int) -> NDArray[np.int64]:
    """Distribute the packs of a global batch over ranks and micro-batches so that all have about the same cost.

    The packs are sorted by cost and cut into rows of one pack per rank. Packs that ranks process at the same time then
    cost about the same, which matters because ranks may wait for each other within a step. In each row, the pack with
    the highest cost goes to the rank with the lowest sum so far, and so on. Then the rank with the highest sum, for
    which a step has to wait, swaps packs with other ranks while that lowers its sum, within a row if possible. Whole
    rows are distributed over micro-batches in the same way.

    Args:
        costs: cost of each pack of the batch, int64 [ranks * micro_batches * packs per micro-batch].
        ranks: number of data-parallel ranks.
        micro_batches: number of micro-batches of each rank in a step.

    Returns:
        Positions in the batch, int64 [ranks, micro_batches, packs], each exactly once. The result is deterministic.
    """
    rows = _level(costs, ranks)
    return rows[_level(costs[rows].sum(axis=1), micro_batches)].transpose(2, 1, 0)


def _level(costs: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Return positions in ``costs``, int64 [packs per rank, ranks]: rows of similar costs, columns of similar sums."""
    order = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    rows = np.empty_like(order)
    sums = np.zeros(ranks, np.int64)
    for row, members in zip(rows, order, strict=True):
        least_first = np.argsort(sums, kind="stable")
        row[least_first] = members
        sums[least_first] += costs[members]
    _swap(costs, rows, sums)
    return rows


def _swap(costs: NDArray[np.int64], rows: NDArray[np.int64], sums: NDArray[np.int64]) -> None:
    """Swap entries in place while this lowers the largest column sum: within rows if possible, else between rows."""
    mean = sums.mean()
    for _ in range(1000):  # each swap lowers the largest sum a little; the limit is for adversarial costs
        high = int(sums.argmax())
        if sums[high] <= mean * 1.002:
            return
        table = costs[rows]
        # The larger of the two sums after each possible swap. First swaps within a row: [row, other column]. Then swaps
        # between rows: [row of the highest column, other row, other column]; there are many times as many of these.
        for theirs in (table[:, None], table[None]):
            moved = table[:, high, None, None] - theirs
            higher = np.maximum(sums[high] - moved, sums + moved)
            higher[:, :, high] = sums[high]
            best = int(higher.argmin())
            if higher.flat[best] < sums[high] - mean * 1e-4:
                break
        else:
            return
        row, other_row, other = np.unravel_index(best, higher.shape)
        other_row = row if higher.shape[1] == 1 else other_row
        change = table[row, high] - table[other_row, other]
        sums[high] -= change
        sums[other] += change
        rows[row, high], rows[other_row, other] = rows[other_row, other], rows[row, high]


# ---- the samples of a rank ----


# The number of a sample that only fills up a batch and has a loss mask of zeros.
PADDING = -1


@shown_by_fields
@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The packs of each micro-batch, looked up at each iteration; one entry per batch of sample numbers."""

    rows: Rows
    batches: Iterable[Sequence[int]]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Wanted]:
        if blocks := getattr(self.batches, "blocks", None):
            for packs, masked in map(self.rows.wanted, blocks()):
                yield from map(Wanted, packs, masked)
        else:
            yield from (Wanted(*self.rows.wanted(batch)) for batch in self.batches)


class PackedBatchSampler(Shown):
    """The sample numbers of one data-parallel rank, one list per micro-batch; a DataLoader's ``batch_sampler``.

    It takes the arguments of Megatron's ``MegatronPretrainingSampler``, with the data set in place of its length.

    Args:
        dataset: the data set.
        consumed_samples: number of samples that all ranks together have consumed before.
        micro_batch_size: packs per micro-batch of a rank.
        data_parallel_rank: the rank of this process.
        data_parallel_size: number of ranks that read different packs.
        global_batch_size: packs per step; required for ``balance_attention``, otherwise only checked.
        balance_attention: distribute the packs of each global batch so that all ranks have about the same attention
            work. Each global batch keeps its packs, so training is the same; only the ranks and micro-batches of packs
            change.
        drop_last: drop the packs at the end that do not fill a micro-batch of every rank (with ``balance_attention``, a
            global batch). False fills up with masked samples, for evaluation, so that every pack comes once. This does
            not work with Megatron's ``BlendedDataset``, which has no masked samples; use its ``rows_of``.

    Raises:
        FormatError: the numbers contradict each other.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        global_batch_size: int | None = None,
        balance_attention: bool = False,
        drop_last: bool = True,
    ) -> None:
        self.dataset, self.total_samples, self.consumed_samples = dataset, len(dataset), consumed_samples
        self.micro_batch_size, self.drop_last = micro_batch_size, drop_last
        self.rank, self.ranks = data_parallel_rank, data_parallel_size
        self.balance_attention = balance_attention
        # Made only if costs are needed, because the rows of a blend open all of its members.
        self._rows: Any = None
        if balance_attention:
            self._rows = dataset if hasattr(dataset, "sample_costs") else rows_of(dataset)
        if micro_batch_size < 1 or not 0 <= data_parallel_rank < data_parallel_size:
            raise FormatError(
                f"micro-batch size {micro_batch_size}, rank {data_parallel_rank} of {data_parallel_size}; sizes are at"
                " least 1 and ranks count from 0"
            )
        if not 0 <= consumed_samples < self.total_samples:
            raise FormatError(
                f"all samples are consumed ({consumed_samples} of {self.total_samples}); build the dataset with a"
                " larger number of samples"
            )
        self._window = micro_batch_size * data_parallel_size
        if global_batch_size is not None and (global_batch_size < 1 or global_batch_size % self._window):
            raise FormatError(
                f"global batch size {global_batch_size} is not a multiple of micro-batch size {micro_batch_size} x"
                f" {data_parallel_size} data-parallel ranks; use a multiple of {self._window}"
            )
        if balance_attention:
            if global_batch_size is None:
                raise FormatError(
                    "balance_attention needs global_batch_size, because it distributes whole global batches"
                )
            if consumed_samples % global_batch_size:
                raise FormatError(
                    f"{consumed_samples} consumed samples end inside a global batch of {global_batch_size}; with"
                    " balance_attention, resume at the end of a global batch"
                )
            self._window = global_batch_size
        if not drop_last and hasattr(dataset, "dataset_index"):
            raise FormatError(
                "drop_last=False pads with masked rows, which Megatron's BlendedDataset does not support; sample and"
                " load rows_of(dataset) (megatron_sft_idx.training.rows) instead"
            )

    def _shown(self) -> str:
        consumed = f"{self.consumed_samples:,} of {self.total_samples:,} samples consumed"
        return f"{consumed}, micro-batches of {self.micro_batch_size}, rank {self.rank} of {self.ranks}"

    def __len__(self) -> int:
        """Number of micro-batches from ``consumed_samples`` to the end."""
        return self._windows * (self._window // (self.micro_batch_size * self.ranks))

    @property
    def _windows(self) -> int:
        remaining = self.total_samples - self.consumed_samples
        return remaining // self._window if self.drop_last else -(-remaining // self._window)

    def __iter__(self) -> Iterator[list[int]]:
        for block in self.blocks():
            yield from block.tolist()

    def blocks(self) -> Iterator[NDArray[np.int64]]:
        """Yield the same sample numbers in blocks of many micro-batches, int64 [micro-batches, packs], which is faster.

        The first blocks are small, because the trainer waits for the first batch.
        """
        count = self.total_samples - self.consumed_samples
        windows, first = self._windows, 0
        while first < windows:
            last = min(windows, 2 * first + 1, first + max((1 << 12) // self._window, 1))
            samples = np.arange(first * self._window, last * self._window)
            samples = np.where(samples < count, samples + self.consumed_samples, PADDING)
            yield np.concatenate([self._share(window) for window in samples.reshape(-1, self._window)])
            first = last

    def _share(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the micro-batches of this rank in a window, [micro-batches, packs]."""
        if not self.balance_attention:
            return samples.reshape(-1, self.ranks, self.micro_batch_size)[:, self.rank]
        costs = np.zeros(len(samples), np.int64)
        real = samples >= 0
        costs[real] = self._rows.sample_costs(samples[real])
        micro_batches = len(samples) // (self.ranks * self.micro_batch_size)
        share: NDArray[np.int64] = samples[deal(costs, self.ranks, micro_batches)[self.rank]]
        return share
