"""Folders of many small shards, and counts of their open files."""

from __future__ import annotations

import os
from pathlib import Path

from sample_packs import Sample, demo_samples, write_samples

from megatron_sft_idx.shard.shard_set import ShardSet

PACKS = demo_samples(40)
SIZES = [7, 0, 1, 12, 3, 9, 8]


def write(folder: Path, sizes: list[int] = SIZES, **options: object) -> list[Sample]:
    done = 0
    for number, size in enumerate(sizes):
        write_samples(folder / f"s{number}", PACKS[done : done + size], **{"capacity": 64, **options})
        done += size
    return PACKS[:done]


def is_held(shards: ShardSet) -> str:
    return "reopened" if shards.in_memory is None else "held"


def maps_of(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def files_of(folder: Path) -> int:
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.lexists(link) and os.readlink(link).startswith(f"{folder}/") for link in links)


def rewritten(path: Path) -> None:
    """Replace a file by a new file with the same bytes, like a restored copy."""
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw)
