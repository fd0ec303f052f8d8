"""Legacy ``.npy``: any pickle gives valid packs or is rejected, and never executes code."""

from __future__ import annotations

import numpy as np
from fuzz.contract import refused, scratch

from megatron_sft_idx.formats.npy import read_legacy


def run(data: bytes) -> None:
    path = scratch("npy") / "x.npy"
    path.write_bytes(data)
    with refused(str(path)):
        packs = read_legacy(path)
        assert packs.tokens.dtype == np.int32
        assert len(packs.tokens) == len(packs.loss_mask) == packs.pack_lengths.sum()
        assert len(packs.seq_starts) == packs.pack_sequences.sum()
        assert len(packs.pack_lengths) == len(packs.pack_sequences)
        assert (packs.tokens >= 0).all()
        assert (packs.loss_mask >= 0).all()
        first = 0
        for length, count in zip(packs.pack_lengths.tolist(), packs.pack_sequences.tolist(), strict=True):
            starts = packs.seq_starts[first : first + count].tolist()
            first += count
            assert starts[0] == 0
            assert starts == sorted(set(starts))
            assert starts[-1] < length
    assert [entry.name for entry in scratch("npy").iterdir()] == ["x.npy"]
