"""The simplest source of packs: the packs of shards, as stored, one shard after another."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sample_packs import Sample, sample_of, write_samples

from megatron_sft_idx.shard import Shard
from megatron_sft_idx.training.sources import Segments


class StoredRows:
    """The packs of some shards. It pickles like the shards."""

    def __init__(self, *shards: Shard, sequence_multiple: int = 1, pad_id: int | None = None) -> None:
        self.shards = shards
        headers = [shard.header for shard in shards]
        self.num_packs = sum(header.num_packs for header in headers)
        self.capacity = max(header.capacity for header in headers)
        self.most_sequences = max(header.most_sequences for header in headers)
        self.sequence_multiple = sequence_multiple
        self.pad_id = pad_id
        self.columns: dict[str, Any] = {}
        self.media_prefix: str | None = None
        self.fingerprint = "".join(shard.shard_id.hex() for shard in shards)
        self.firsts = np.cumsum([0, *(header.num_packs for header in headers)])

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        rows, counts = [], []
        for pack in packs.tolist():
            shard = int(np.searchsorted(self.firsts, pack, side="right")) - 1
            local = pack - int(self.firsts[shard])
            begin, _ = self.shards[shard].token_range(local)
            bounds = self.shards[shard][local]["seq_boundaries"].tolist()
            rows += [(shard, begin + a, b - a) for a, b in pairwise(bounds)]
            counts.append(len(bounds) - 1)
        shards, starts, lengths = zip(*rows, strict=True) if rows else ((), (), ())
        return Segments(
            np.cumsum([0, *counts], dtype=np.int64),
            np.array(shards, np.int32),
            np.array(starts, np.int64),
            np.array(lengths, np.int64),
        )

    def arrays(self, shard: int) -> tuple[NDArray[Any], NDArray[Any]]:
        files = self.shards[shard].files
        return files.tokens[:], files.loss[:]

    def items(self, shard: int) -> None:
        """Return None, because there are no images or audio."""


def random_samples(count: int, capacity: int, rng: np.random.Generator, weights: bool = False) -> list[Sample]:
    """Return packs of one to five sequences. The first pack is exactly full."""
    packs = []
    for i in range(count):
        sizes = rng.integers(1, capacity // 5 + 1, rng.integers(1, 6)).tolist() if i else [capacity - 3, 3]
        ids, flags = rng.integers(1, 60_000, sum(sizes)), rng.integers(0, 2, sum(sizes))
        mask = (flags * rng.random(sum(sizes))).astype("f4") if weights else flags
        packs.append(sample_of(sizes, lambda p, mask=mask: float(mask[p]), lambda p, ids=ids: int(ids[p])))
    return packs


def two_shards(folder: Path, capacity: int = 40, count: int = 13) -> tuple[StoredRows, list[Sample]]:
    """Write packs to two shards of different dtypes."""
    rng = np.random.default_rng(0)
    first, second = random_samples(count, capacity, rng), random_samples(count, capacity, rng, weights=True)
    write_samples(folder / "first", first, capacity=capacity, token_dtype=np.uint16)
    write_samples(folder / "second", second, capacity=capacity, token_dtype=np.int32, mask_dtype=np.float32)
    return StoredRows(Shard(folder / "first"), Shard(folder / "second"), pad_id=9), first + second


def sequences_of(sample: Sample) -> list[tuple[list[int], list[float]]]:
    """Return the sequences of a sample in the form of the slow twin."""
    return [(sample.tokens[a:b], sample.label_mask[a:b]) for a, b in pairwise(sample.bounds)]
