"""The planner of ``effort="high"``: a linear program over patterns, on a coarse grid of sizes.

Gilmore and Gomory, "A linear programming approach to the cutting-stock problem" (1961). A pattern is the number of
sequences of each size in a pack. A variable of the program is the number of packs with a pattern. Patterns are added
one by one; each is the best solution of a knapsack problem for the current prices of the sizes (column generation).
Sizes are rounded up to a grid of ``GRID`` steps, so that every pattern also fits the true sizes. The solution is
rounded down to whole packs, and an ordinary planner packs the remaining sequences.

It helps if packs hold two to four sequences: greedy planners are then several percent above the bound. If packs hold
many sequences, the grid costs more than the program gains, so the caller must take the better of both plans. No plan is
made if the grid is so coarse that no plan on it can be better than the other one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native

GRID: Final = 256
# Limit on the amount of computation for a solution, which is valid after each pivot: a few seconds. Most problems take
# a tenth of it.
_MAX_WORK: Final = 1_000_000_000
_TOLERANCE: Final = 1e-7

Patterns = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]


def plan_by_linear_program(
    sizes: NDArray[np.int64], counts: NDArray[np.int64], capacity: int, max_sequences: int, seed: int, fewest: int
) -> Patterns | None:
    """Return patterns that pack all sequences, or None if they would not be fewer packs than ``fewest``.

    Args:
        sizes: ascending sizes of the classes, each at most the capacity.
        counts: number of sequences of each class.
        capacity: capacity of a pack, in the unit of the sizes.
        max_sequences: maximum number of sequences in a pack.
        seed: seed of the planner that packs the remaining sequences.
        fewest: number of packs of the other plan.

    Returns:
        Offsets int64 [patterns + 1], entries int32 [n, 2], and the number of packs of each pattern, int64 [patterns].
        Pattern ``p`` is ``entries[offsets[p] : offsets[p + 1]]``; entry (4, 2) is two sequences of class 4.
    """
    grid = min(GRID, capacity)
    steps = -(-sizes * grid // capacity)  # rounded up, so that whatever fits the grid fits the capacity
    present, group = np.unique(steps, return_inverse=True)
    demand = np.bincount(group, counts).astype(np.int64)
    if _native.packing_lower_bound(present, demand, grid, max_sequences) >= fewest:
        return None
    columns, amounts = _solve(present, demand, grid, max_sequences)
    remaining = counts.copy()
    packed = _PackedClasses(remaining, group)
    for column, amount in zip(columns, np.floor(amounts + _TOLERANCE).astype(np.int64), strict=True):
        packed.use(column, int(amount))
    if len(rest := np.flatnonzero(remaining)):
        planners = ("exact-fill-average", "exact-fill-fewest", "best-fit", "first-fit-decreasing")
        plans = (
            _native.packing_plan(sizes[rest], remaining[rest], capacity, max_sequences, planner, seed)
            for planner in planners
        )
        offsets, entries, packs = min(plans, key=lambda plan: int(plan[2].sum()))
        packed.offsets += (offsets[1:] + len(packed.entries)).tolist()
        packed.entries += zip(rest[entries[:, 0]].tolist(), entries[:, 1].tolist(), strict=True)
        packed.packs += packs.tolist()
    return np.array(packed.offsets), np.array(packed.entries, np.int32).reshape(-1, 2), np.array(packed.packs, np.int64)


def _solve(
    present: NDArray[np.int64], demand: NDArray[np.int64], grid: int, max_sequences: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return patterns (counts of the grid sizes) and the number of packs of each, by a revised simplex method."""
    columns, inverse, amounts = _first_patterns(present, demand, grid, max_sequences)
    work = 0
    while work < _MAX_WORK:
        prices = inverse.sum(axis=0)
        column, rounds = _best_pattern(present, prices, grid, max_sequences)
        work += len(present) * (rounds * grid + len(present))
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


def _first_patterns(
    present: NDArray[np.int64], demand: NDArray[np.int64], grid: int, max_sequences: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return as many starting patterns as sizes, the inverse of their matrix, and the number of packs of each.

    Each pattern is filled with the largest remaining sizes, and used until one of them runs out. The pattern represents
    this size. No later pattern contains it, so the matrix is triangular. Starting from such full packs takes a tenth of
    the pivots of starting from patterns of one size.
    """
    count, sizes = len(present), present.tolist()
    columns, inverse, amounts = np.zeros((count, count), np.int64), np.zeros((count, count)), np.zeros(count)
    remaining, waiting = demand.astype(np.float64), list(range(count))
    while waiting:
        column, room, free = np.zeros(count, np.int64), grid, max_sequences
        for i in reversed(waiting):
            if times := min(room // sizes[i], free):
                column[i], room, free = times, room - times * sizes[i], free - times
        used = np.flatnonzero(column)
        packs = remaining[used] / column[used]
        out = int(used[np.argmin(packs)])
        inverse[out] = -(columns[:, out] @ inverse) / column[out]
        inverse[out, out] += 1 / column[out]
        columns[out], amounts[out] = column, max(packs.min(), 0.0)
        remaining -= amounts[out] * column
        waiting.remove(out)
    return columns, inverse, amounts


def _best_pattern(
    present: NDArray[np.int64], prices: NDArray[np.float64], grid: int, max_sequences: int
) -> tuple[NDArray[np.int64], int]:
    """Return the pattern of highest price, by dynamic programming.

    Each round adds one sequence, until none fits or pays.

    Returns:
        The pattern, and the number of rounds.
    """
    value = np.append(np.zeros(grid + 1), -np.inf)
    choices = []
    before = np.arange(grid + 1)[:, None] - present[None, :]
    before[before < 0] = grid + 1  # the index of -inf in value
    for _ in range(min(max_sequences, grid // int(present[0]))):
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
    return pattern, 1 + len(choices)


class _PackedClasses:
    """Turns patterns of grid sizes into packs of true size classes, in the form of ``plan_by_linear_program``.

    Class ``c`` was rounded up to grid size number ``group[c]``. The largest class of a grid size is packed first,
    because small sequences are easier to pack at the end. ``use`` subtracts packed sequences from ``remaining``, the
    counts by class.
    """

    def __init__(self, remaining: NDArray[np.int64], group: NDArray[np.int64]) -> None:
        self._remaining = remaining
        # For each grid size its smallest class, and its largest class with remaining sequences.
        self._first = np.searchsorted(group, np.arange(int(group.max()) + 1))
        self._at = np.append(self._first[1:], len(group)) - 1
        self.offsets, self.packs = [0], list[int]()
        self.entries: list[tuple[int, int]] = []

    def use(self, column: NDArray[np.int64], packs: int) -> None:
        """Make up to ``packs`` packs with a pattern, or fewer if sequences run out."""
        while packs > 0 and (entries := self._one_pack(column)):
            # As many equal packs as the scarcest class allows.
            step = min(packs, *(int(self._remaining[c]) // times for c, times in entries))
            for c, times in entries:
                self._remaining[c] -= times * step
            self.entries.extend(entries)
            self.offsets.append(len(self.entries))
            self.packs.append(step)
            packs -= step

    def _one_pack(self, column: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return entries of one pack for a pattern, or [] if the classes of a grid size have too few sequences."""
        entries = []
        for g in np.flatnonzero(column):
            while self._at[g] >= self._first[g] and self._remaining[self._at[g]] == 0:
                self._at[g] -= 1
            missing, c = int(column[g]), int(self._at[g])
            while missing > 0 and c >= self._first[g]:
                if (times := min(missing, int(self._remaining[c]))) > 0:
                    entries.append((c, times))
                missing, c = missing - times, c - 1
            if missing > 0:
                return []
        return entries
