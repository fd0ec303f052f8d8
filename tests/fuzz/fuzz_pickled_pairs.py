"""Pickled lists of pairs: accepted input equals the slow parser's result, and survives being written again."""

from __future__ import annotations

import pickle

import numpy as np
from fuzz.contract import refused
from pickled_pairs_twin import twin

from megatron_sft_idx.formats.pickles import read_pairs, write_pairs


def run(data: bytes) -> None:
    with refused("x: "):
        pairs = read_pairs("x", np.frombuffer(data, np.uint8))
        assert list(map(tuple, pairs.tolist())) == twin(data)
        written: list[bytes] = []
        write_pairs(written.append, [pairs])
        assert pickle.loads(b"".join(written)) == twin(data)
