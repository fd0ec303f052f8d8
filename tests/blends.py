"""Build datasets for tests with Megatron's own builder, and the shards that they read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from sample_packs import Sample, sample_of, write_samples

from megatron_sft_idx.training.sft_dataset import PackedSFTDataset, PackedSFTDatasetConfig

CAPACITY = 32


def packs_of(count: int, salt: int = 0) -> list[Sample]:
    """Return packs that all differ in tokens and lengths."""
    random = np.random.default_rng(salt)
    packs = []
    for i in range(count):
        lengths = random.integers(1, 10, random.integers(1, 4)).tolist()
        packs.append(sample_of(lengths, lambda p: p % 3 != 0, lambda p, i=i: 1000 * salt + 30 * i + p + 1))
    return packs


def write_packs(prefix: Path, count: int, salt: int = 0, **options: Any) -> str:
    write_samples(prefix, packs_of(count, salt), **{"capacity": CAPACITY, **options})
    return str(prefix)


def write_documents(prefix: Path, lengths: Sequence[int], first: int = 50_000, dtype: Any = np.int32) -> str:
    """Write a stock Megatron dataset. Its tokens are consecutive numbers, through all documents."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for length in lengths:
        builder.add_item(torch.arange(first, first + length))
        builder.end_document()
        first += length
    builder.finalize(f"{prefix}.idx")
    return f"pretrain:{prefix}"


def config_of(blend: Any = None, split: str | None = None, **options: Any) -> PackedSFTDatasetConfig:
    """Return a configuration. ``blend`` is a path, (paths, weights), or None if ``blend_per_split`` is given."""
    if isinstance(blend, str):
        blend = ([blend], None)
    if blend is not None and split is None:
        split = "1,0,0"
    return PackedSFTDatasetConfig(
        **{"random_seed": 7, "sequence_length": CAPACITY, "blend": blend, "split": split, **options}
    )


def build(config: PackedSFTDatasetConfig, sizes: Any = (None, None, None)) -> list[Any]:
    """Build the data sets for train, valid and test with Megatron's builder."""
    return list(BlendedMegatronDatasetBuilder(PackedSFTDataset, list(sizes), lambda: True, config).build())


def key_of(row: Any) -> tuple[int, ...]:
    """Return the tokens of a row without padding, which identify the pack."""
    tokens = row["tokens"].tolist()
    return tuple(token for token in tokens if token)


def digest_of(row: Any) -> str:
    """Return a digest of all bytes of a row."""
    digest = hashlib.sha256()
    for key in sorted(row):
        digest.update(key.encode() + np.asarray(row[key]).tobytes())
    return digest.hexdigest()


def keys_of(dataset: Any, samples: Any = None) -> list[tuple[int, ...]]:
    return [key_of(dataset[int(i)]) for i in (range(len(dataset)) if samples is None else samples)]


def pack_keys(count: int, salt: int = 0) -> list[tuple[int, ...]]:
    return [tuple(pack.tokens) for pack in packs_of(count, salt)]
