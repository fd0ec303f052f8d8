"""High effort: a linear program over patterns, on a coarse grid of sizes.

Gilmore and Gomory, "A linear programming approach to the cutting-stock problem" (1961): a variable says how
many packs use a pattern; patterns enter one by one, each the best answer of a knapsack to the prices of the
sizes (column generation). Sizes are rounded up to a grid of ``GRID`` steps, so that every pattern found also
fits the true sizes; the solution is rounded down to whole packs, and an ordinary planner packs what is left.

It helps where packs hold two to four sequences and greedy planners stay percents away from the bound. Where
they hold many the grid costs more than it gains, so the caller takes the better of both plans.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native

GRID: Final = 256
_PIVOTS: Final = 3000  # seconds; the solution is valid after any of them
_TOLERANCE: Final = 1e-7

Patterns = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]


def plan_by_linear_program(
    sizes: NDArray[np.int64], counts: NDArray[np.int64], capacity: int, most: int, seed: int
) -> Patterns:
    """Patterns for size classes: offsets [patterns + 1], entries [n, 2] of class and times, packs of each.

    Args:
        sizes: ascending sizes of the classes, each at most capacity.
        counts: sequences of each class.
        capacity: in the units of sizes.
        most: sequences a pack may hold.
        seed: for the planner of what is left over.
    """
    grid = min(GRID, capacity)
    steps = -(-sizes * grid // capacity)  # rounded up, so that what fits the grid fits the capacity
    present, group = np.unique(steps, return_inverse=True)
    demand = np.bincount(group, counts).astype(np.float64)
    columns, amounts = _solve(present, demand, grid, most)
    left = counts.copy()
    taken = _Taken(left, group)
    for column, amount in zip(columns, np.floor(amounts + _TOLERANCE).astype(np.int64), strict=True):
        taken.use(column, int(amount))
    if len(rest := np.flatnonzero(left)):
        planners = ("exact-fill-average", "exact-fill-fewest", "best-fit", "first-fit-decreasing")
        plans = (_native.packing_plan(sizes[rest], left[rest], capacity, most, planner, seed) for planner in planners)
        offsets, entries, packs = min(plans, key=lambda plan: int(plan[2].sum()))
        taken.offsets += (offsets[1:] + len(taken.entries)).tolist()
        taken.entries += zip(rest[entries[:, 0]].tolist(), entries[:, 1].tolist(), strict=True)
        taken.used += packs.tolist()
    return np.array(taken.offsets), np.array(taken.entries, np.int32).reshape(-1, 2), np.array(taken.used, np.int64)


def _solve(
    present: NDArray[np.int64], demand: NDArray[np.float64], grid: int, most: int
) -> tuple[list[NDArray[np.int64]], NDArray[np.float64]]:
    """The basic patterns (times of each grid size) and how many packs use each: a revised simplex method."""
    times = np.minimum(grid // present, most)
    columns = [row.astype(np.int64) for row in np.diag(times)]
    inverse = np.diag(1.0 / times)
    amounts = demand / times
    for _ in range(_PIVOTS):
        prices = inverse.sum(axis=0)
        column = _best_pattern(present, prices, grid, most)
        if prices @ column <= 1 + _TOLERANCE:
            break
        direction = inverse @ column
        ratios = np.full(len(amounts), np.inf)
        np.divide(amounts, direction, out=ratios, where=direction > _TOLERANCE)
        out = int(np.argmin(ratios))
        row = inverse[out] / direction[out]
        inverse -= np.outer(direction, row)
        inverse[out] = row
        amounts -= ratios[out] * direction
        amounts[out] = ratios[out]
        columns[out] = column
    return columns, np.maximum(amounts, 0.0)


def _best_pattern(present: NDArray[np.int64], prices: NDArray[np.float64], grid: int, most: int) -> NDArray[np.int64]:
    """The pattern of highest price: a knapsack, one more sequence a round until no more fit or none pays."""
    value = np.append(np.zeros(grid + 1), -np.inf)
    choices = []
    before = np.arange(grid + 1)[:, None] - present[None, :]
    before[before < 0] = grid + 1  # where value holds what never wins
    for _ in range(min(most, grid // int(present[0]))):
        offers = value[before] + prices
        choice = offers.argmax(axis=1)
        offer = offers[np.arange(grid + 1), choice]
        pays = offer > value[:-1] + _TOLERANCE
        if not pays.any():
            break
        choices.append(np.where(pays, choice, -1))
        value[:-1][pays] = offer[pays]
    pattern = np.zeros(len(present), np.int64)
    room = grid
    for choice in reversed(choices):
        if (pick := int(choice[room])) >= 0:
            pattern[pick] += 1
            room -= int(present[pick])
    return pattern


class _Taken:
    """Takes whole packs off the true classes, the largest sizes of each grid step first.

    They fit wherever their step does, and the smaller ones are easier to place in what is left over.
    """

    def __init__(self, left: NDArray[np.int64], group: NDArray[np.int64]) -> None:
        self._left = left
        self._first = np.searchsorted(group, np.arange(int(group.max()) + 1))
        self._at = np.append(self._first[1:], len(group)) - 1
        self.offsets, self.used = [0], list[int]()
        self.entries: list[tuple[int, int]] = []

    def use(self, column: NDArray[np.int64], packs: int) -> None:
        wanted = np.flatnonzero(column)
        while packs > 0:
            heads = [self._head(int(g)) for g in wanted]
            if any(c < 0 for c in heads):
                return
            # As many alike as the scarcest head allows; where it is down to its last few, one of mixed sizes.
            alike = min(int(self._left[c] // column[g]) for g, c in zip(wanted, heads, strict=True))
            if alike > 0:
                entries = [(c, int(column[g])) for g, c in zip(wanted, heads, strict=True)]
            else:
                entries = self._mixed(column, wanted)
                if not entries:
                    return
            step = min(max(alike, 1), packs)
            for c, times in entries:
                self._left[c] -= times * step
            self.entries.extend(entries)
            self.offsets.append(len(self.entries))
            self.used.append(step)
            packs -= step

    def _head(self, g: int) -> int:
        while self._at[g] >= self._first[g] and self._left[self._at[g]] == 0:
            self._at[g] -= 1
        return int(self._at[g]) if self._at[g] >= self._first[g] else -1

    def _mixed(self, column: NDArray[np.int64], wanted: NDArray[np.int64]) -> list[tuple[int, int]]:
        entries = []
        for g in wanted:
            missing, c = int(column[g]), int(self._at[g])
            while missing > 0 and c >= self._first[g]:
                times = min(missing, int(self._left[c]))
                if times > 0:
                    entries.append((c, times))
                missing, c = missing - times, c - 1
            if missing > 0:
                return []
        return entries
