"""The journal of a build: head and blocks read from it are the bytes that were there."""

from __future__ import annotations

import io

from fuzz.contract import refused
from fuzz.repair import repair_journal

from megatron_sft_idx.shard.journal import encode_block, read_blocks, read_head


def run(data: bytes) -> None:
    for raw in (data, repair_journal(data)):
        stream = io.BytesIO(raw)
        with refused("x.journal: "):
            assert isinstance(read_head(stream, "x.journal"), dict)
            start = stream.tell()
            blocks = b"".join(encode_block(*block) for block in read_blocks(stream))
            assert raw[start:].startswith(blocks)
