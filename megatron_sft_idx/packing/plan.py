"""What packing returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PackPlan"]


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
