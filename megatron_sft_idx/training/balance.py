"""Dealing a global batch to data-parallel ranks so that none of them has more attention to do than the others."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

__all__ = ["deal"]

# Every swap lowers the largest sum or leaves; this only bounds the time of hostile costs.
_MOST_SWAPS = 1000
_CLOSE_ENOUGH = 1.002


def deal(costs: NDArray[np.int64], ranks: int, micro_batches: int) -> NDArray[np.int64]:
    """Split a global batch evenly by cost: to ranks, then inside each rank to micro-batches.

    The largest goes first to whoever has least and still has room; then the rank that has most swaps with others for
    as long as that helps. A rank's sum is what a step waits for; micro-batches are evened out after it.

    Args:
        costs: of each pack of the batch, [ranks * micro_batches * packs a micro-batch].
        ranks: data-parallel ranks.
        micro_batches: micro-batches of each rank in a step.

    Returns:
        Positions in the batch, int64 [ranks, micro_batches, packs], each once; the same for the same arguments.
    """
    shares = _even(costs, ranks)
    dealt = [share[_even(costs[share], micro_batches)] for share in shares]
    return np.stack(dealt)


def _even(costs: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    """Positions in groups of one size whose sums are near each other: int64 [groups, len(costs) / groups]."""
    room = len(costs) // groups
    if groups == 1 or room == 1:
        return np.arange(len(costs)).reshape(groups, room)
    members: list[list[int]] = [[] for _ in range(groups)]
    least = [(0, group) for group in range(groups)]
    for position in np.argsort(-costs, kind="stable").tolist():
        total, group = heapq.heappop(least)
        members[group].append(position)
        if len(members[group]) < room:
            heapq.heappush(least, (total + int(costs[position]), group))
    dealt = np.array(members, np.int64)
    _swap(costs, dealt)
    return dealt


def _swap(costs: NDArray[np.int64], dealt: NDArray[np.int64]) -> None:
    """Lower the largest sum by swaps with other groups, in place."""
    sums = costs[dealt].sum(axis=1)
    mean = sums.mean()
    for _ in range(_MOST_SWAPS):
        high = int(sums.argmax())
        if sums[high] <= mean * _CLOSE_ENOUGH:
            return
        # What each swap of one of ``high`` for one of another group would leave as the larger of the two sums.
        gain = costs[dealt[high]][:, None, None] - costs[dealt][None, :, :]
        left = np.maximum(sums[high] - gain, sums[None, :, None] + gain)
        left[:, high] = sums[high]
        best = int(left.argmin())
        if left.flat[best] >= sums[high]:
            return
        mine, group, theirs = np.unravel_index(best, left.shape)
        moved = gain[mine, group, theirs]
        dealt[high, mine], dealt[group, theirs] = dealt[group, theirs], dealt[high, mine]
        sums[high] -= moved
        sums[group] += moved
