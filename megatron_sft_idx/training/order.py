"""The order of an epoch.

Sample i of a run is position ``i % packs`` of epoch ``i // packs``, and each epoch is one permutation of all packs.
The permutation depends on the seed, the split, the data and the epoch's number and on nothing else: not on how many
samples are asked for, on ranks, batch sizes or where a run began. So a longer run begins with the same samples as a
shorter one, and a run that is resumed anywhere goes on with the ones that would have come.

The generator is our own Fisher-Yates shuffle on SplitMix64 (``csrc/packing/random.h``), seeded with the 64-bit xxh3 of
``[seed, split, fingerprint, epoch]`` as JSON: the same on every machine and with every version of numpy.
"""

from __future__ import annotations

import json

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native

__all__ = ["EpochOrder"]

# A batch may end one epoch and begin the next.
_EPOCHS_HELD = 2


class EpochOrder:
    """Which pack comes when.

    Holds the permutations of two epochs at most, 4 bytes a pack each (8 beyond 2^31 packs). Threads may share one.

    Args:
        packs: packs in an epoch, at least 1.
        seed: of the run.
        split: ``train``, ``valid`` or ``test``; splits of one data set are shuffled differently.
        fingerprint: of the data.
    """

    def __init__(self, packs: int, seed: int, split: str, fingerprint: str) -> None:
        self.packs, self.seed, self.split, self.fingerprint = packs, seed, split, fingerprint
        # Replaced, never changed: no lock that a fork could catch in a thread's hands. Two threads that come first
        # both shuffle; either result serves.
        self._held: dict[int, NDArray[np.int32] | NDArray[np.int64]] = {}

    def __reduce__(self) -> tuple[type[EpochOrder], tuple[int, int, str, str]]:
        return EpochOrder, (self.packs, self.seed, self.split, self.fingerprint)

    def epoch(self, number: int) -> NDArray[np.int32] | NDArray[np.int64]:
        """The packs of one epoch in their order."""
        if (held := self._held.get(number)) is not None:
            return held
        key = json.dumps([self.seed, self.split, self.fingerprint, number]).encode()
        order = _native.packing_permutation(self.packs, xxhash.xxh3_64_intdigest(key))
        made = order.astype(np.int32) if self.packs <= 2**31 else order
        made.flags.writeable = False
        self._held = {**dict(list(self._held.items())[1 - _EPOCHS_HELD :]), number: made}
        return made

    def pack_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The pack of each sample, int64; samples count from 0 through all epochs."""
        epochs, positions = np.divmod(samples, self.packs)
        if len(samples) and (epochs == epochs[0]).all():
            return self.epoch(int(epochs[0]))[positions].astype(np.int64, copy=False)
        out = np.empty(len(samples), np.int64)
        for number in np.unique(epochs):
            here = epochs == number
            out[here] = self.epoch(int(number))[positions[here]]
        return out
