"""What packing returns, and orders of packs: what packing leaves open, and training may care about."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native

__all__ = ["PackPlan", "attention_cost", "group_by_cost", "reorder"]


@dataclass(frozen=True, slots=True, eq=False)
class PackPlan:
    """Packs as CSR arrays: pack ``p`` holds ``sequences[offsets[p]:offsets[p + 1]]``.

    Attributes:
        offsets: int64 [packs + 1], from 0 to the number of sequences.
        sequences: int64, indices into the lengths; each occurs once.
        capacity: token positions a pack may hold.
        fill: tokens over ``packs * capacity``; tokens as given, not rounded up to the sequence multiple. 0
            where there are no packs.
        lower_bound: packs that no plan can do without; a plan that has no more is optimal.
        longest: tokens of the fullest pack, not rounded up.
        most_sequences: sequences of the pack that has most of them.
        method: what made the plan: one of ``METHODS`` other than ``auto``, or ``linear-program``.
    """

    offsets: NDArray[np.int64]
    sequences: NDArray[np.int64]
    capacity: int
    fill: float
    lower_bound: int
    longest: int
    most_sequences: int
    method: str

    @property
    def num_packs(self) -> int:
        """Length of ``offsets`` less one."""
        return len(self.offsets) - 1


def attention_cost(lengths: NDArray[np.int64], plan: PackPlan) -> NDArray[np.int64]:
    """The sum of squared lengths of each pack, int64 [packs].

    Attention never crosses a sequence, so its work follows the squares of the lengths, not the pack's length.
    """
    if plan.num_packs == 0:
        return np.zeros(0, np.int64)
    squares = np.square(np.asarray(lengths).astype(np.int64, copy=False)[plan.sequences])
    return np.add.reduceat(squares, plan.offsets[:-1])


def group_by_cost(costs: NDArray[np.int64], group_size: int, seed: int = 0) -> NDArray[np.int64]:
    """An order of packs in which each run of ``group_size`` packs has similar costs.

    With data parallelism a step waits for its slowest rank: give each of the ranks one pack of a run. Packs
    are sorted by cost and cut into runs; the runs are shuffled, and so are the packs inside each. The packs
    left over when the runs are full come last.

    Args:
        costs: [packs], such as ``attention_cost``.
        group_size: packs that are worked on at the same time.
        seed: of the shuffles, and of the order of packs of equal cost.

    Returns:
        int64 [packs], a permutation.
    """
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}, it must be at least 1")
    # Equal costs in random order, so that runs are not made of neighbours in the plan.
    random = _native.packing_permutation(len(costs), seed)
    by_cost = random[np.argsort(np.asarray(costs)[random], kind="stable")]
    # Those left over are taken from the middle of the costs, where leaving them out widens no run.
    spare = len(costs) % group_size
    begin = (len(costs) - spare) // group_size // 2 * group_size
    left_over = by_cost[begin : begin + spare]
    runs = np.delete(by_cost, slice(begin, begin + spare)).reshape(-1, group_size)
    inside = random[: runs.size].reshape(runs.shape).argsort(axis=1)
    runs = np.take_along_axis(runs, inside, axis=1)[_native.packing_permutation(len(runs), seed)]
    return np.concatenate([runs.ravel(), left_over])


def reorder(plan: PackPlan, order: NDArray[np.int64]) -> PackPlan:
    """The same packs in another order: pack ``p`` of the result is pack ``order[p]`` of the plan."""
    counts = np.diff(plan.offsets)[order]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    # Each position's source: its place inside its pack, after where that pack began.
    source = np.arange(len(plan.sequences)) + np.repeat(plan.offsets[:-1][order] - offsets[:-1], counts)
    return replace(plan, offsets=offsets, sequences=plan.sequences[source])
