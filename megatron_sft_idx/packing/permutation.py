"""Permutations for ordering packs that are the same on every machine."""

from __future__ import annotations

import json

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native


def shuffled(packs: int, *key: int | str) -> NDArray[np.int64]:
    """Return the permutation of ``packs`` numbers for a key: int64 [packs].

    >>> shuffled(5, 1234, "train").tolist() == shuffled(5, 1234, "train").tolist()
    True
    """
    return _native.packing_permutation(packs, xxhash.xxh3_64_intdigest(json.dumps(key).encode()))
