"""One chunk of JSON lines: its packs have the values of its lines."""

from __future__ import annotations

import json
from itertools import pairwise

from fuzz.contract import refused, scratch
from fuzz.packed import packs_of

from megatron_sft_idx.formats.jsonl_chunks import Reader, recognise


def run(data: bytes) -> None:
    folder = scratch("jsonl-chunks")
    chunk = folder / "chunk_00000.jsonl"
    chunk.write_bytes(data)
    for path in (chunk, folder):
        recognise(str(path))
        with refused(str(folder)):
            packs = packs_of(Reader(path))
            rows = [json.loads(line) for line in data.split(b"\n") if line.strip(b" \t\r\n")]
            assert len(packs) == len(rows)
            for (ids, mask, bounds), row in zip(packs, rows, strict=True):
                assert ids == row["input_ids"]
                assert [b - a for a, b in pairwise(bounds)] == row["lengths"]
                ends = set(bounds[1:])
                shifted = [at not in ends and row["labels"][at] != -100 for at in range(1, len(ids) + 1)]
                assert mask == shifted
