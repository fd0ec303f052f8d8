"""Shards to merge in tests, and changes of their headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sample_packs import Sample, write_samples

from megatron_sft_idx.layout import Header
from megatron_sft_idx.packs.merge import MergeReport, merge


def write_parts(folder: Path, packs: Sequence[Sample], cuts: Sequence[int], **options: Any) -> list[str]:
    """Write shards ``s0``, ``s1``, ... with the packs between the cuts."""
    bounds = [0, *sorted(cuts), len(packs)]
    prefixes = [str(folder / f"s{i}") for i in range(len(bounds) - 1)]
    for i, prefix in enumerate(prefixes):
        write_samples(prefix, packs[bounds[i] : bounds[i + 1]], **{"capacity": 64, **options})
    return prefixes


def merged(sources: Sequence[str], prefix: Path | str, **options: Any) -> MergeReport:
    return merge(sources, prefix, durable=False, **options)


def rewrite_header(prefix: str, **changes: Any) -> None:
    """Replace fields of the header, and correct its checksum."""
    path = Path(prefix + ".seq.idx")
    raw = path.read_bytes()
    header = Header.decode(raw, str(path))
    path.write_bytes(dataclasses.replace(header, **changes).encode() + raw[header.nbytes :])
