"""Dealing a global batch to data-parallel ranks so that none of them has more attention to do than the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["deal"]

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
