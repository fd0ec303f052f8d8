"""Pickled lists of pairs: what is taken is what the slow parser makes of it, and is written as Python writes it."""

from __future__ import annotations

import pickle

import numpy as np
from fuzz.contract import refused
from pickled_pairs_twin import twin

from megatron_sft_idx.formats.pbin import read_pairs, write_pairs


def run(data: bytes) -> None:
    with refused("x: "):
        pairs = read_pairs("x", np.frombuffer(data, np.uint8))
        assert list(map(tuple, pairs.tolist())) == twin(data)
        if (pairs >= 0).all():
            written: list[bytes] = []
            write_pairs(written.append, len(pairs), [pairs])
            assert b"".join(written) == pickle.dumps(list(map(tuple, pairs.tolist())), 4)
