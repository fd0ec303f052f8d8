"""Plan from lengths which sequences share a pack: ``pack_sequences``, and ``WindowPacker`` for streams.

::

    lengths -> histogram -> patterns (several planners, the one with fewest packs) -> hand-out -> PackPlan

Planners work on distinct sizes with counts and return patterns, so their cost does not grow with the number of
sequences. The methods ``first-fit-shuffle`` and ``sequential`` depend on an order, and process one sequence at a time.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import SequenceError
from megatron_sft_idx.lines import shown_by_fields
from megatron_sft_idx.packing.linear_program import Patterns, plan_by_linear_program

_LARGEST_CAPACITY: Final = 2**31 - 1  # boundaries are int32
Method: TypeAlias = Literal["auto", "best-fit", "exact-fill", "first-fit-shuffle", "first-fit-decreasing", "sequential"]
Effort: TypeAlias = Literal["normal", "high"]
METHODS: Final = get_args(Method)

# Native planners, each with its method. If two plans have equally many packs, the planner listed first wins: exact fill
# by average mixes lengths best.
_PLANNERS: Final = {
    "exact-fill-average": "exact-fill",
    "exact-fill-fewest": "exact-fill",
    "best-fit": "best-fit",
    "first-fit-decreasing": "first-fit-decreasing",
}
# Maximum number of sequences for which ``auto`` tries first-fit-shuffle. With more, it costs more than all other
# methods and never won.
_MAX_SHUFFLED: Final = 100_000
# effort="high" solves a linear program if the best plan has more than bound * (1 + _GAP) + 1 packs.
_GAP: Final = 1e-4


@shown_by_fields
@dataclass(frozen=True, slots=True, eq=False)
class PackPlan:
    """Packs as CSR arrays: pack ``p`` holds ``sequences[offsets[p]:offsets[p + 1]]``.

    Attributes:
        offsets: int64 [packs + 1], from 0 to the number of sequences.
        sequences: int64, indices into the lengths; each occurs once.
        capacity: maximum number of token positions in a pack.
        fill: number of tokens, not rounded up to the sequence multiple, over ``packs * capacity``; 0 if there are no
            packs.
        lower_bound: no plan can have fewer packs, so a plan with this many is optimal.
        longest: number of tokens in the fullest pack, not rounded up.
        most_sequences: largest number of sequences in one pack.
        method: the method that made the plan: one of ``METHODS`` other than ``auto``, or ``linear-program``.

    Example:
        >>> from megatron_sft_idx import pack_sequences
        >>> plan = pack_sequences([700, 600, 400, 300], capacity=1024)
        >>> for pack in range(plan.num_packs):
        ...     print(plan.sequences[plan.offsets[pack] : plan.offsets[pack + 1]])
        [1 2]
        [0 3]
        >>> plan.fill, plan.longest, plan.most_sequences
        (0.9765625, 1000, 2)
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
        """Length of ``offsets`` minus one."""
        return len(self.offsets) - 1


def pack_sequences(
    lengths: ArrayLike,
    capacity: int,
    *,
    method: str = "auto",
    effort: str = "normal",
    max_sequences_per_pack: int | None = None,
    sequence_multiple: int = 1,
    seed: int = 0,
    groups: ArrayLike | None = None,
) -> PackPlan:
    """Assign every sequence to a pack, with as few packs as possible.

    The same arguments give the same plan on any machine, except with ``effort="high"``. The seed shuffles sequences of
    equal length among their places, and the order of the packs.

    Args:
        lengths: number of tokens of each sequence: any integer array, or a list of integers.
        capacity: maximum number of token positions in a pack, at most 2**31 - 1.
        method: ``auto`` tries all others and takes the plan with the fewest packs. ``exact-fill`` starts a pack with
            its largest sequence and fills it to the last position. ``best-fit`` and ``first-fit-decreasing`` are the
            classic methods. ``first-fit-shuffle`` is first fit in an order shuffled by the seed. ``sequential`` keeps
            the order of the sequences and of the packs, independent of the seed.
        effort: ``high`` also solves a linear program if ``auto`` does not reach the bound. It helps most if packs hold
            two to four sequences, and takes a few seconds more.
        max_sequences_per_pack: maximum number of sequences in a pack; None for no limit.
        sequence_multiple: each sequence takes its length rounded up to this many positions.
        seed: 0 to 2**64 - 1.
        groups: one integer per sequence, such as the number of its preference pair. Adjacent sequences with equal
            numbers are a group. Every method puts a group into one pack, contiguous and in order, and plans it like a
            single sequence of the group's size. None for no groups.

    Raises:
        SequenceError: (a ValueError) a length is zero, or a sequence or group does not fit in a pack.
        ValueError: an option is out of range or not one of its choices.
        TypeError: lengths or options are not integers.

    Example:
        >>> plan = pack_sequences([700, 600, 400, 300], capacity=1024)
        >>> plan.num_packs, plan.lower_bound  # as few packs as possible
        (2, 2)
        >>> plan.sequences[plan.offsets[0] : plan.offsets[1]]  # the first pack has the sequences of 600 and 400 tokens
        array([1, 2])
        >>> pairs = pack_sequences([300, 200, 700, 800], capacity=1600, groups=[0, 0, 1, 1])
        >>> pairs.sequences, pairs.offsets
        (array([0, 1, 2, 3]), array([0, 2, 4]))
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    if effort not in get_args(Effort):
        raise ValueError(f"unknown effort {effort!r}; choose one of {', '.join(get_args(Effort))}")
    if effort == "high" and method != "auto":
        raise ValueError(f"effort='high' needs method='auto', not {method!r}")
    capacity = _as_integer("capacity", capacity, 1, _LARGEST_CAPACITY)
    multiple = _as_integer("sequence_multiple", sequence_multiple, 1, capacity)
    limit = _LARGEST_CAPACITY  # maximum number of sequences per pack
    if max_sequences_per_pack is not None:
        limit = min(limit, _as_integer("max_sequences_per_pack", max_sequences_per_pack, 1, 2**63 - 1))
    seed = _as_integer("seed", seed, 0, 2**64 - 1)
    array = _as_lengths(lengths)
    starts = None if groups is None else _group_starts(groups, len(array))
    if len(array) == 0:
        empty = np.zeros(0, np.int64)
        return PackPlan(
            np.zeros(1, np.int64), empty, capacity, 0.0, 0, 0, 0, "best-fit" if method == "auto" else method
        )
    if starts is None:
        return _Problem(array, capacity, multiple, limit, seed).plan(method, effort)
    counts = np.diff(starts, append=len(array))
    if max_sequences_per_pack is not None:
        if (counts != counts[0]).any():
            raise ValueError("max_sequences_per_pack needs groups of equal size, but these differ; leave it out")
        if (limit := limit // int(counts[0])) < 1:
            raise ValueError(
                f"max_sequences_per_pack is {max_sequences_per_pack}, but groups have {counts[0]} sequences; raise it"
            )
    units = _group_units(array, starts, capacity, multiple)
    plan = _Problem(units, capacity // multiple, 1, limit, seed).plan(method, effort)
    return _ungroup(plan, array, starts, capacity)


class _Problem:
    """The lengths of one call, counted by size in units of the sequence multiple, and the lower bound on packs."""

    def __init__(self, lengths: NDArray[np.int64], capacity: int, multiple: int, limit: int, seed: int) -> None:
        self.lengths, self.capacity, self.multiple, self.limit, self.seed = lengths, capacity, multiple, limit, seed
        self.units = capacity // multiple
        try:
            self.sizes, self.counts, _ = _native.packing_histogram(lengths, capacity, multiple)
        except ValueError:
            raise _misfit(lengths, capacity, multiple) from None
        self.bound = _native.packing_lower_bound(self.sizes, self.counts, self.units, limit)

    def plan(self, method: str, effort: str) -> PackPlan:
        if method in ("first-fit-shuffle", "sequential"):
            return self.in_order(method)
        tried: list[tuple[str, Patterns]] = []
        for planner, name in _PLANNERS.items():
            # No other planner is tried once a plan reaches the bound.
            if method in ("auto", name) and not any(_packs(patterns) == self.bound for _, patterns in tried):
                patterns = _native.packing_plan(self.sizes, self.counts, self.units, self.limit, planner, self.seed)
                tried.append((name, patterns))
        fewest = min(_packs(patterns) for _, patterns in tried)
        if effort == "high" and fewest > self.bound * (1 + _GAP) + 1:
            planned = plan_by_linear_program(self.sizes, self.counts, self.units, self.limit, self.seed, fewest)
            tried += [("linear-program", planned)] if planned else []
        best = min(tried, key=lambda each: _packs(each[1]))
        if method != "auto" or _packs(best[1]) == self.bound:
            return self.hand_out(*best)
        # The methods that depend on an order can find fewer packs if the lengths already are in a perfect order.
        methods = ["sequential", "first-fit-shuffle"] if len(self.lengths) <= _MAX_SHUFFLED else ["sequential"]
        plan = min((self.in_order(each) for each in methods), key=lambda plan: plan.num_packs)
        if plan.num_packs >= _packs(best[1]):
            return self.hand_out(*best)
        if plan.method != "sequential":
            return plan
        return _reorder(plan, _native.packing_permutation(plan.num_packs, self.seed))

    def in_order(self, method: str) -> PackPlan:
        limits = (self.capacity, self.multiple, self.limit)
        if method == "sequential":
            sequences = np.arange(len(self.lengths), dtype=np.int64)
            offsets = _native.packing_sequential(self.lengths, *limits)
        else:
            offsets, sequences = _native.packing_first_fit_shuffle(self.lengths, *limits, self.seed)
        return _plan_of(offsets, sequences, self.lengths, self.capacity, self.bound, method)

    def hand_out(self, method: str, patterns: Patterns) -> PackPlan:
        offsets, sequences = _native.packing_hand_out(self.lengths, self.multiple, self.sizes, *patterns, self.seed)
        longest, (begins, entries, _) = None, patterns
        if self.multiple == 1:  # the patterns hold true lengths, so no array as long as the lengths is needed
            tokens = self.sizes[entries[:, 0]] * entries[:, 1]
            longest = int(np.add.reduceat(tokens, begins[:-1]).max())
        return _plan_of(offsets, sequences, self.lengths, self.capacity, self.bound, method, longest)


def _plan_of(
    offsets: NDArray[np.int64],
    sequences: NDArray[np.int64],
    lengths: NDArray[np.int64],
    capacity: int,
    bound: int,
    method: str,
    longest: int | None = None,
) -> PackPlan:
    """Return the plan for these packs; ``longest`` is computed unless given."""
    if longest is None:
        longest = int(np.add.reduceat(lengths[sequences], offsets[:-1]).max())
    fill, most = int(lengths.sum()) / ((len(offsets) - 1) * capacity), int(np.diff(offsets).max())
    return PackPlan(offsets, sequences, capacity, fill, bound, longest, most, method)


def _packs(patterns: Patterns) -> int:
    return int(patterns[2].sum())


def _reorder(plan: PackPlan, order: NDArray[np.int64]) -> PackPlan:
    """Return the same packs in another order: pack ``p`` of the result is pack ``order[p]`` of the plan."""
    offsets, places = csr_rows(plan.offsets[:-1][order], np.diff(plan.offsets)[order])
    return replace(plan, offsets=offsets, sequences=plan.sequences[places])


def csr_rows(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return CSR offsets and entries of rows of consecutive numbers: begins [5, 9], counts [2, 1] give 5, 6 and 9."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return offsets, np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], counts)


# ---- groups ----


def _group_starts(groups: ArrayLike, count: int) -> NDArray[np.int64]:
    """Return the index of the first sequence of each group: int64 [groups]."""
    if isinstance(groups, np.ma.MaskedArray):
        raise ValueError("groups is a masked array; pass its values, with filled() or compressed()")
    ids = np.asarray(groups)
    if ids.shape != (count,):
        raise ValueError(f"groups has shape {ids.shape}, expected ({count},): one number per sequence")
    if count and not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"groups has dtype {ids.dtype}, expected integers")
    starts = np.flatnonzero(np.append(np.ones(min(count, 1), bool), ids[1:] != ids[:-1])).astype(np.int64)
    numbers, times = np.unique(ids[starts], return_counts=True)
    if (torn := np.flatnonzero(times > 1)).size:
        raise ValueError(
            f"group {numbers[torn[0]]} occurs in {times[torn[0]]} separate places; the sequences of a group must"
            " be adjacent"
        )
    return starts


def _group_units(
    lengths: NDArray[np.int64], starts: NDArray[np.int64], capacity: int, multiple: int
) -> NDArray[np.int64]:
    """Return the size of each group in units of the multiple, with every sequence rounded up: int64 [groups]."""
    if lengths.min() < 1 or lengths.max() > capacity // multiple * multiple:
        raise _misfit(lengths, capacity, multiple)
    units = np.add.reduceat(-(-lengths // multiple), starts)
    overlong = np.flatnonzero(units > capacity // multiple)
    if len(overlong) > 0:
        rounded = f", each sequence rounded up to a multiple of {multiple}," if multiple > 1 else ""
        reason = (
            f"the group that begins here has {int(units[overlong[0]]) * multiple} tokens{rounded} and does not fit"
            f" into the capacity {capacity}; overlong groups: {len(overlong)}; drop them, or raise the capacity"
        )
        raise SequenceError("lengths", int(starts[overlong[0]]), reason)
    return units


def _ungroup(plan: PackPlan, lengths: NDArray[np.int64], starts: NDArray[np.int64], capacity: int) -> PackPlan:
    """Convert a plan of groups to a plan of the sequences in these groups."""
    counts = np.diff(starts, append=len(lengths))
    group_offsets, sequences = csr_rows(starts[plan.sequences], counts[plan.sequences])
    return _plan_of(group_offsets[plan.offsets], sequences, lengths, capacity, plan.lower_bound, plan.method)


# ---- checks of options and lengths ----


def _as_integer(name: str, value: Any, low: int, high: int) -> int:
    """Return a checked option value: numpy integers are allowed, floats and booleans are not."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}, expected an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected an integer") from None
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}, expected {low} to {high}")
    return number


def _as_lengths(lengths: ArrayLike) -> NDArray[np.int64]:
    """Return any integer array or list as one contiguous int64 array."""
    if isinstance(lengths, np.ma.MaskedArray):
        raise ValueError("lengths is a masked array; pass its values, with filled() or compressed()")
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths has {array.ndim} dimensions, expected one")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"lengths has dtype {array.dtype}, expected integers")
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(2**63 - 1))  # too long for any pack in any case
    return np.ascontiguousarray(array, dtype=np.int64)


def _misfit(lengths: NDArray[np.int64], capacity: int, multiple: int, start: int = 0) -> SequenceError:
    """Return the error for lengths that do not fit in a pack: the first (numbered from ``start``), and how many."""
    usable = capacity // multiple * multiple
    short = np.flatnonzero(lengths < 1)
    if len(short) > 0:
        first = int(short[0])
        reason = f"length {int(lengths[first])}, but a sequence needs at least one token; empty sequences: {len(short)}"
        return SequenceError("lengths", start + first, f"{reason}, drop them")
    overlong = np.flatnonzero(lengths > usable)
    first = int(overlong[0])
    rounded = f" rounded up to a multiple of {multiple}" if multiple > 1 else ""
    reason = (
        f"length {int(lengths[first])}{rounded} does not fit into the capacity {capacity}; overlong sequences:"
        f" {len(overlong)}, the longest has {int(lengths.max())} tokens; drop, truncate or split them, or raise the"
        " capacity"
    )
    return SequenceError("lengths", start + first, reason)


# ---- streams ----


_FULL: Final = 0.98
_MAX_WINDOWS: Final = 3  # windows in which a sequence is packed before its pack is returned, full or not


class WindowPacker:
    """Packs lengths that arrive in order, ``window`` of them at a time.

    After each window, the packs that are full enough are returned. Sequences of the other packs are packed again with
    the next window. Each sequence is packed at most three times, so memory is bounded. Compared with packing all
    sequences at once, this costs a few hundredths of a percent of fill. The division of the lengths into calls of
    ``add`` does not change the packs.

    Args:
        capacity: see ``pack_sequences``, also for the options not listed here.
        window: number of sequences to pack at a time. A larger window fills packs better and waits longer.
        full: minimum share of the capacity at which a pack is returned at once.

    Example:
        >>> packer = WindowPacker(1024, window=4)
        >>> for lengths in ([700, 600], [424, 324, 50]):
        ...     print(packer.add(lengths))
        []
        [array([1, 2]), array([0, 3])]
        >>> packer.finish()
        [array([4])]
    """

    def __init__(
        self,
        capacity: int,
        *,
        window: int = 10_000,
        full: float = _FULL,
        method: str = "auto",
        max_sequences_per_pack: int | None = None,
        sequence_multiple: int = 1,
        seed: int = 0,
    ) -> None:
        self._window = _as_integer("window", window, 1, 2**31 - 1)
        self._seed = _as_integer("seed", seed, 0, 2**64 - 1)
        if not 0 <= full <= 1:
            raise ValueError(f"full is {full}, expected 0 to 1")
        self._full = full
        self._in_order = method == "sequential"
        self._capacity, self._multiple, self._limit = capacity, sequence_multiple, max_sequences_per_pack
        self._pack = partial(
            pack_sequences,
            capacity=capacity,
            method=method,
            max_sequences_per_pack=max_sequences_per_pack,
            sequence_multiple=sequence_multiple,
        )
        self._pack([])  # reports bad options now, not at the first full window
        self._windows = 0  # packed so far
        self._added = 0  # sequences so far
        # The waiting sequences: positions in the stream, and lengths; and the number that arrived after the last
        # window.
        self._positions, self._lengths = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._fresh = 0

    def add(self, lengths: ArrayLike) -> list[NDArray[np.int64]]:
        """Add the next lengths. Return the packs that are ready, each as int64 positions of sequences in the stream.

        Raises:
            SequenceError: a length does not fit in a pack; none of these lengths is added.
        """
        array = _as_lengths(lengths)
        usable = self._capacity // self._multiple * self._multiple
        if len(array) > 0 and not (array.min() >= 1 and array.max() <= usable):
            raise _misfit(array, self._capacity, self._multiple, start=self._added)
        packs: list[NDArray[np.int64]] = []
        while len(array) > 0:
            taken = array[: self._window - self._fresh]
            array = array[len(taken) :]
            positions = np.arange(self._added, self._added + len(taken), dtype=np.int64)
            self._positions = np.concatenate([self._positions, positions])
            self._lengths = np.concatenate([self._lengths, taken])
            self._added += len(taken)
            self._fresh += len(taken)
            if self._fresh == self._window:
                packs += self._flush(last=False)
        return packs

    def finish(self) -> list[NDArray[np.int64]]:
        """Return all remaining packs."""
        return self._flush(last=True)

    def _flush(self, *, last: bool) -> list[NDArray[np.int64]]:
        if len(self._lengths) == 0:
            return []
        plan = self._pack(self._lengths, seed=(self._seed + self._windows) % 2**64)
        self._windows += 1
        self._fresh = 0
        ready = np.ones(plan.num_packs, bool) if last else self._ready(plan)
        positions = self._positions[plan.sequences]
        packs = [positions[plan.offsets[p] : plan.offsets[p + 1]] for p in np.flatnonzero(ready)]
        # Waiting sequences stay in the order of the stream, which ``sequential`` needs.
        waiting = np.sort(plan.sequences[np.repeat(~ready, np.diff(plan.offsets))])
        self._positions, self._lengths = self._positions[waiting], self._lengths[waiting]
        return packs

    def _ready(self, plan: PackPlan) -> NDArray[np.bool_]:
        """Return which packs are ready: packs that are full enough or have a sequence that must not wait longer."""
        if self._in_order:
            return np.arange(plan.num_packs) < plan.num_packs - 1
        starts = plan.offsets[:-1]
        rounded = -(-self._lengths // self._multiple) * self._multiple
        ready = np.add.reduceat(rounded[plan.sequences], starts) >= self._full * self._capacity
        if self._limit is not None:
            ready |= np.diff(plan.offsets) == self._limit
        oldest = np.minimum.reduceat(self._positions[plan.sequences], starts)
        return ready | (oldest < self._added - (_MAX_WINDOWS - 1) * self._window)
