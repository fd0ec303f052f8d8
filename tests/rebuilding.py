"""Shards to damage, for the tests of ``rebuild``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sample_packs import Sample, demo_samples, five_files, write_samples

from megatron_sft_idx.layout import FIELDS, Header

OFFSETS = {field.name: field.offset for field in FIELDS}
METADATA = {"tokenizer": "demo", "text": "ünïcode"}


def small(prefix: Path, packs: list[Sample] | None = None, **options: Any) -> dict[str, bytes]:
    """Write a shard with a value in every field of its header. Return its files."""
    defaults = {"capacity": 64, "sequence_multiple": 2, "pad_id": 7, "metadata": METADATA}
    write_samples(prefix, demo_samples() if packs is None else packs, **{**defaults, **options})
    return five_files(prefix)


def damage(path: str | os.PathLike[str], offset: int, flip: int = 0xFF) -> None:
    raw = bytearray(Path(path).read_bytes())
    raw[offset] ^= flip
    Path(path).write_bytes(raw)


def assert_same_but_for_json(found: Header, expected: Header) -> None:
    for name in (
        *("num_packs", "num_sequences", "num_tokens", "num_trained_tokens", "num_masked_packs", "token_dtype"),
        *("mask_dtype", "longest_pack", "most_sequences", "digests", "shard_id", "arrays_checksum"),
    ):
        assert getattr(found, name) == getattr(expected, name), name
