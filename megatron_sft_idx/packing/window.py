"""Packing a stream: some sequences at a time, in bounded memory."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx.packing.pack import as_integer, as_lengths, misfit, pack_sequences
from megatron_sft_idx.packing.plan import PackPlan

__all__ = ["WindowPacker"]

FULL: Final = 0.98
WAIT: Final = 3  # windows


class WindowPacker:
    """Packs lengths that arrive in order, ``window`` of them at a time.

    Packs at least ``full`` are given out after each window; the sequences of the others wait and are packed
    anew with the next one, for at most three windows, so that memory stays bounded and no sequence waits for
    ever. Against packing everything at once this costs a few hundredths of a percent of fill. The packs
    depend on the lengths and the options, not on how the lengths are cut into calls of ``add``.

    Args:
        capacity: as for ``pack_sequences``, and so are the options not named here.
        window: sequences packed at a time; more fill better and wait longer.
        full: the share of the capacity from which on a pack is given out at once.
    """

    def __init__(
        self,
        capacity: int,
        *,
        window: int = 10_000,
        full: float = FULL,
        method: str = "auto",
        max_sequences_per_pack: int | None = None,
        sequence_multiple: int = 1,
        seed: int = 0,
    ) -> None:
        self._window = as_integer("window", window, 1, 2**31 - 1)
        self._seed = as_integer("seed", seed, 0, 2**64 - 1)
        if not 0 <= full <= 1:
            raise ValueError(f"full is {full}, it must be 0 to 1")
        self._full = full
        self._in_order = method == "sequential"
        self._capacity, self._multiple, self._most = capacity, sequence_multiple, max_sequences_per_pack
        self._pack = partial(
            pack_sequences,
            capacity=capacity,
            method=method,
            max_sequences_per_pack=max_sequences_per_pack,
            sequence_multiple=sequence_multiple,
        )
        self._pack([])  # refuses bad options now, not at the first full window
        self._windows = 0  # packed so far
        self._seen = 0  # sequences added so far
        self._positions = np.zeros(0, np.int64)  # of the sequences at hand, in the stream
        self._lengths = np.zeros(0, np.int64)
        self._fresh = 0  # of those, the ones that no window has seen

    def add(self, lengths: ArrayLike) -> list[NDArray[np.int64]]:
        """Takes the next lengths; returns the packs that are ready, as int64 positions in the stream.

        Raises:
            SequenceError: a length does not fit; none of these lengths is taken then.
        """
        array = as_lengths(lengths)
        usable = self._capacity // self._multiple * self._multiple
        if len(array) > 0 and not (array.min() >= 1 and array.max() <= usable):
            raise misfit(array, self._capacity, self._multiple, start=self._seen)
        packs: list[NDArray[np.int64]] = []
        while len(array) > 0:
            taken = array[: self._window - self._fresh]
            array = array[len(taken) :]
            positions = np.arange(self._seen, self._seen + len(taken), dtype=np.int64)
            self._positions = np.concatenate([self._positions, positions])
            self._lengths = np.concatenate([self._lengths, taken])
            self._seen += len(taken)
            self._fresh += len(taken)
            if self._fresh == self._window:
                packs += self._flush(last=False)
        return packs

    def finish(self) -> list[NDArray[np.int64]]:
        """Returns all packs that are left."""
        return self._flush(last=True)

    def _flush(self, *, last: bool) -> list[NDArray[np.int64]]:
        if len(self._lengths) == 0:
            return []
        plan = self._pack(self._lengths, seed=(self._seed + self._windows) % 2**64)
        self._windows += 1
        self._fresh = 0
        ready = np.ones(plan.num_packs, bool) if last else self._ready(plan)
        positions = self._positions[plan.sequences]
        given = [positions[plan.offsets[p] : plan.offsets[p + 1]] for p in np.flatnonzero(ready)]
        # Those that wait stay in the order of the stream, which is all that sequential asks for.
        waiting = np.sort(plan.sequences[np.repeat(~ready, np.diff(plan.offsets))])
        self._positions, self._lengths = self._positions[waiting], self._lengths[waiting]
        return given

    def _ready(self, plan: PackPlan) -> NDArray[np.bool_]:
        """Which packs are given out: full ones, and those with a sequence that has waited long enough."""
        if self._in_order:
            return np.arange(plan.num_packs) < plan.num_packs - 1
        starts = plan.offsets[:-1]
        rounded = -(-self._lengths // self._multiple) * self._multiple
        ready = np.add.reduceat(rounded[plan.sequences], starts) >= self._full * self._capacity
        if self._most is not None:
            ready |= np.diff(plan.offsets) == self._most
        oldest = np.minimum.reduceat(self._positions[plan.sequences], starts)
        return ready | (oldest < self._seen - (WAIT - 1) * self._window)
