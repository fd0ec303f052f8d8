"""Which samples a data-parallel rank reads, and when.

Samples come in the order of the data set, which shuffles each epoch by itself: global batch k is samples k * B to
(k + 1) * B, whatever the number of ranks. So a run that stops after any number of samples goes on with the same global
batches on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.training.rows import rows_of

__all__ = ["PADDING", "PackedBatchSampler", "deal"]

# ---- dealing a global batch ----


# Every swap lowers the largest sum, or the search ends; this only bounds the time of hostile costs.
_MOST_SWAPS = 1000
_CLOSE_ENOUGH = 1.002


def deal(costs: NDArray[np.int64], ranks: int, micro_batches: int) -> NDArray[np.int64]:
    """Split a global batch evenly by cost, to ranks and to micro-batches.

    The packs are sorted and cut into rows of one pack a rank, so that whatever the ranks work on at the same time
    costs about the same: that is for steps in which they wait for each other before the end. In each row the largest
    goes to the rank that has least so far; then the rank that has most swaps with others, in the same row while that
    helps, for the sums are what a step waits for. Whole rows are dealt to micro-batches in the same way.

    Args:
        costs: of each pack of the batch, [ranks * micro_batches * packs a micro-batch].
        ranks: data-parallel ranks.
        micro_batches: micro-batches of each rank in a step.

    Returns:
        Positions in the batch, int64 [ranks, micro_batches, packs], each once; the same for the same arguments.
    """
    rows = _rows(costs, ranks)
    # Rows as packs, micro-batches as ranks.
    by_micro_batch = _rows(costs[rows].sum(axis=1), micro_batches)
    return rows[by_micro_batch].transpose(2, 1, 0)


def _rows(costs: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Positions in rows of similar cost, int64 [packs a rank, ranks], whose columns have nearly equal sums."""
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
    """Lower the largest column sum by swaps, in place: within rows as long as they help, then between them."""
    mean = sums.mean()
    within = np.eye(len(rows), dtype=bool)[:, :, None]
    for _ in range(_MOST_SWAPS):
        high = int(sums.argmax())
        if sums[high] <= mean * _CLOSE_ENOUGH:
            return
        # The larger of the two sums that a swap would leave: [row in this column, row in the other, other column].
        table = costs[rows]
        moved = table[:, high, None, None] - table
        left = np.maximum(sums[high] - moved, sums + moved)
        left[:, :, high] = sums[high]
        inside = np.where(within, left, sums[high])
        best = int((inside if inside.min() < sums[high] else left).argmin())
        if left.flat[best] >= sums[high]:
            return
        mine, theirs, other = np.unravel_index(best, left.shape)
        sums[high] -= moved[mine, theirs, other]
        sums[other] += moved[mine, theirs, other]
        rows[mine, high], rows[theirs, other] = rows[theirs, other], rows[mine, high]


# ---- what a rank reads ----


# A negative index is a row with a loss mask of zeros.
PADDING = -1
# Samples that are looked up at once.
_BLOCK_SAMPLES = 1 << 12


class PackedBatchSampler:
    """Lists of sample numbers, one a micro-batch, of one data-parallel rank; a ``batch_sampler`` for a DataLoader.

    The arguments are those of Megatron's ``MegatronPretrainingSampler``, but for the data set in place of its length.

    Args:
        dataset: what is sampled.
        consumed_samples: samples of all ranks before this run.
        micro_batch_size: packs a rank takes at a time.
        data_parallel_rank: of this process.
        data_parallel_size: ranks that read different packs.
        global_batch_size: packs a step takes; needed to balance, and without that only checked.
        balance_attention: deal the packs of each global batch so that ranks have equal attention to do. The packs of a
            batch stay the same, so training does too; which rank and micro-batch a pack is in differs.
        drop_last: leave out what does not fill a micro-batch of every rank (a global batch when balancing). False
            fills it up with rows whose loss is masked, for evaluation: every pack comes once. Not for Megatron's
            ``BlendedDataset``, which knows no such rows; its ``rows_of`` do.

    Raises:
        FormatError: numbers that do not go together.
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
        # Only where costs are asked for: a blend's rows open all of its members.
        self._rows: Any = dataset if not balance_attention or hasattr(dataset, "attention_costs") else rows_of(dataset)
        if micro_batch_size < 1 or not 0 <= data_parallel_rank < data_parallel_size:
            raise FormatError(
                f"micro-batch size {micro_batch_size}, rank {data_parallel_rank} of {data_parallel_size}; sizes are at"
                " least 1 and ranks count from 0"
            )
        if not 0 <= consumed_samples < self.total_samples:
            raise FormatError(
                f"{consumed_samples} of {self.total_samples} samples are consumed, nothing is left; build the data set"
                " with a larger number of samples"
            )
        self._window = micro_batch_size * data_parallel_size
        if global_batch_size is not None and (global_batch_size < 1 or global_batch_size % self._window):
            raise FormatError(
                f"global batch size {global_batch_size} is no multiple of micro-batch size {micro_batch_size} x"
                f" {data_parallel_size} data-parallel ranks; make it one of {self._window}"
            )
        if balance_attention:
            if global_batch_size is None:
                raise FormatError("balance_attention deals out global batches: give global_batch_size")
            if consumed_samples % global_batch_size:
                raise FormatError(
                    f"{consumed_samples} consumed samples end inside a global batch of {global_batch_size}; with"
                    " balance_attention go on from the end of one"
                )
            self._window = global_batch_size
        if not drop_last and hasattr(dataset, "dataset_index"):
            raise FormatError(
                "drop_last=False fills up with masked rows, which Megatron's BlendedDataset has not; sample and load"
                " rows_of(dataset) (megatron_sft_idx.training.rows) instead"
            )

    def __len__(self) -> int:
        """Micro-batches from ``consumed_samples`` to the end."""
        left = self.total_samples - self.consumed_samples
        windows = left // self._window if self.drop_last else -(-left // self._window)
        return windows * (self._window // (self.micro_batch_size * self.ranks))

    def __iter__(self) -> Iterator[list[int]]:
        for block in self.blocks():
            yield from block.tolist()

    def blocks(self) -> Iterator[NDArray[np.int64]]:
        """The same, many at once: int64 [micro-batches, packs] each, so that what is done for all of them costs little.

        The first ones hold few, for the trainer waits for the first batch.
        """
        count = self.total_samples - self.consumed_samples
        windows, first = (count if self.drop_last else count + self._window - 1) // self._window, 0
        while first < windows:
            last = min(windows, 2 * first + 1, first + max(_BLOCK_SAMPLES // self._window, 1))
            samples = np.arange(first * self._window, last * self._window)
            samples = np.where(samples < count, samples + self.consumed_samples, PADDING)
            yield np.concatenate([self._share(window) for window in samples.reshape(-1, self._window)])
            first = last

    def _share(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """This rank's micro-batches of a window, [micro-batches, packs]."""
        if not self.balance_attention:
            return samples.reshape(-1, self.ranks, self.micro_batch_size)[:, self.rank]
        costs = np.zeros(len(samples), np.int64)
        real = samples >= 0
        costs[real] = self._rows.attention_costs(samples[real])
        micro_batches = len(samples) // (self.ranks * self.micro_batch_size)
        mine: NDArray[np.int64] = samples[deal(costs, self.ranks, micro_batches)[self.rank]]
        return mine
