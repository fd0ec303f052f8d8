"""Shards in a bucket equal local ones: pack by pack, in batches, for stock Megatron and in training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from buckets import put, put_samples, reach
from chats import preprocess
from pretrain_runs import run
from sample_packs import assert_holds, demo_samples
from swift_server import SwiftServer
from torch.utils.data import DataLoader
from training_source import random_samples
from training_twin import lone_process

from megatron_sft_idx.cli.main import main
from megatron_sft_idx.dataset import SFTIndexedDataset
from megatron_sft_idx.formats.packed_dataset import open_dataset
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.shard_set import ShardSet, find_prefixes
from megatron_sft_idx.training.batch import BatchAssembler, whole_batch
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.sources import StoredPacks

pytestmark = pytest.mark.cloud
SCHEMES = ("s3", "msc")
CAPACITY = 64


@pytest.fixture
def urls(swift: SwiftServer, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return reach(swift, bucket, tmp_path, monkeypatch)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packs_are_the_local_ones(s3: Any, bucket: str, urls: dict[str, str], tmp_path: Path, scheme: str) -> None:
    packs = demo_samples(20)
    local = put_samples(s3, bucket, "data/x", tmp_path, packs)
    prefix = f"{urls[scheme]}/data/x"
    assert_holds(Shard(prefix), packs)
    assert_holds(open_dataset(f"{urls[scheme]}/data"), packs)
    assert find_prefixes(f"{urls[scheme]}/data/*") == [prefix]
    assert Shard(prefix).header == Shard(local).header
    for options in ([], ["--full"]):
        assert main(["verify", *options, f"{urls[scheme]}/data"]) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batches_are_the_local_ones(s3: Any, bucket: str, urls: dict[str, str], tmp_path: Path, scheme: str) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "local"
    folder.mkdir()
    for name in ("a", "b"):
        prefix = put_samples(s3, bucket, name, folder, random_samples(20, CAPACITY, rng), capacity=CAPACITY)
        assert prefix.parent == folder
    local, remote = (
        BatchAssembler(StoredPacks(ShardSet.open(path)), CAPACITY) for path in (folder, urls[scheme] + "/")
    )
    batches = rng.integers(0, 40, (16, 4)).tolist()
    expected = [local.assemble(batch) for batch in batches]
    loaders: dict[str, Any] = {"BatchLoader": BatchLoader(remote, batches, copy=True)}
    for workers, method in ((0, None), (2, "fork"), (2, "spawn")):
        loaders[f"DataLoader, {workers} workers, {method}"] = DataLoader(
            remote, batch_sampler=batches, collate_fn=whole_batch, num_workers=workers, multiprocessing_context=method
        )
    for name, loader in loaders.items():
        found = list(loader)
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in other), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stock_megatron_and_its_face_read_the_same_prefix(
    s3: Any, bucket: str, urls: dict[str, str], tmp_path: Path, scheme: str
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.object_storage_utils import ObjectStorageConfig

    packs = demo_samples(20)
    put_samples(s3, bucket, "x", tmp_path, packs)
    prefix, config = f"{urls[scheme]}/x", ObjectStorageConfig(path_to_idx_cache=str(tmp_path / "stock"))
    stock = IndexedDataset(prefix, mmap=False, object_storage_config=config)
    ours = SFTIndexedDataset(prefix, mmap=False, object_storage_config=config)
    assert len(stock) == len(ours) == len(packs)
    for i, pack in enumerate(packs):
        assert stock[i].tolist() == ours.get(i).tolist() == pack.tokens
        assert stock.get(i, 0, 1).tolist() == ours.get(i, 0, 1).tolist()
    assert_holds(ours, packs)
    assert ours.index.sequence_lengths.tolist() == stock.sequence_lengths.tolist()
    assert SFTIndexedDataset.exists(prefix)
    assert not SFTIndexedDataset.exists(prefix + "y")
    # Stock code caches .idx in the same folder under the shard's name; our files are named by checksum.
    assert len(list((tmp_path / "stock").glob("*.index"))) == 2


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with lone_process() as module:
        yield module


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ten_steps_of_training_are_bitwise_the_local_ones(
    s3: Any, bucket: str, urls: dict[str, str], tmp_path: Path, script: ModuleType, scheme: str
) -> None:
    outcome = preprocess(tmp_path / "chats", capacity=640)
    assert outcome.code == 0, outcome.err
    put(s3, bucket, "sft/chats", tmp_path / "chats")
    size = ["--seq-length", "640", "--hidden-size", "32", "--train-iters", "10", "--global-batch-size", "4"]
    quiet = ["--log-interval", "1000"]
    local = run(script, ["--data-path", str(tmp_path / "chats"), *size, *quiet])
    remote = run(
        script,
        [
            *("--data-path", f"{urls[scheme]}/sft/chats"),
            *("--object-storage-cache-path", str(tmp_path / "megatron-cache")),
            *size,
            *quiet,
        ],
    )
    assert len(local.losses) == 10
    assert remote.losses == local.losses
    for one, other in zip(remote.rows, local.rows, strict=True):
        assert all(np.array_equal(one[key], other[key]) for key in other)
    assert len(list((tmp_path / "megatron-cache").glob("*.index"))) == 2
