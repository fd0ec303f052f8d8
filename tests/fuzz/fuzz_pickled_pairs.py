"""Pickled lists of pairs: what is taken is what Python's own unpickler makes of it, and is written as it writes it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from fuzz.contract import refused

from megatron_sft_idx.formats.modalities.pickled_pairs import read_pairs, write_pairs


def unpickled(data: bytes) -> list[list[int]]:
    """The slow way, for pickles that ``read_pairs`` has let through: no name is left in them that could be called."""
    loads: Any = pickle._loads  # type: ignore[attr-defined]  # in Python: its memo has no entries that nobody made
    return [list(pair) for pair in loads(data)]


def run(data: bytes) -> None:
    with refused("x: "):
        pairs = read_pairs("x", np.frombuffer(data, np.uint8))
        assert pairs.tolist() == unpickled(data)
        if (pairs >= 0).all():
            written: list[bytes] = []
            write_pairs(written.append, len(pairs), [pairs])
            assert b"".join(written) == pickle.dumps(list(map(tuple, pairs.tolist())), 4)
