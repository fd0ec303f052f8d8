"""``Header.decode``: an accepted header is encoded again to the same bytes."""

from __future__ import annotations

from fuzz.contract import refused
from fuzz.repair import repair_header

from megatron_sft_idx.layout.files import Header


def run(data: bytes) -> None:
    for raw in (data, repair_header(data)):
        with refused("x.seq.idx: "):
            header = Header.decode(raw, "x.seq.idx")
            assert header.encode() == raw[: header.nbytes]
            assert header.num_packs <= header.num_sequences <= header.num_tokens
            assert max(digest.nbytes for digest in header.digests) < 2**60
