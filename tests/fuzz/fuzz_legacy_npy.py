"""Legacy ``.npy``: a pickle from anywhere gives packs that keep the rules, or is refused; it runs nothing."""

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
        assert len(packs.tokens) == len(packs.loss) == packs.token_offsets[-1]
        assert len(packs.starts) == packs.sequence_offsets[-1]
        assert len(packs.token_offsets) == len(packs.sequence_offsets)
        assert (packs.tokens >= 0).all()
        assert (packs.loss >= 0).all()
        for i in range(len(packs.token_offsets) - 1):
            starts = packs.starts[packs.sequence_offsets[i] : packs.sequence_offsets[i + 1]].tolist()
            assert starts[0] == 0
            assert starts == sorted(set(starts))
            assert starts[-1] < packs.token_offsets[i + 1] - packs.token_offsets[i]
    assert [entry.name for entry in scratch("npy").iterdir()] == ["x.npy"]
