"""Failures of a bucket during reading: recovery or a clear error, and never a wrong token.

Every test prints its numbers of correct reads, errors, and wrong reads; the last must be 0.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buckets import put_samples, reach
from sample_packs import Sample, demo_samples
from swift_server import SwiftServer
from training_source import random_samples

from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError, ShardNotFoundError, StorageError
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage.remote import forget_stores
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.sources import StoredPacks

pytestmark = pytest.mark.cloud
SCHEMES = ("s3", "msc")
CAPACITY = 64
PACKS = demo_samples(20)


@pytest.fixture
def urls(swift: SwiftServer, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return reach(swift, bucket, tmp_path, monkeypatch)


@pytest.fixture
def counts(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Counter[str]]:
    """Provide counts of reads. Print them at the end, and check that none is wrong."""
    made: Counter[str] = Counter(right=0, errors=0, wrong=0)
    yield made
    with capsys.disabled():
        print(f"\n  {request.node.name}: " + ", ".join(f"{count} {what}" for what, count in made.items()), end=" ")
    assert not made["wrong"]


def read(shard: Shard, i: int, counts: Counter[str], packs: list[Sample] = PACKS) -> None:
    """Read one pack and count the outcome."""
    try:
        pack = shard[i]
    except SFTIndexError:
        counts["errors"] += 1
        raise
    same = pack["input_ids"].tolist() == packs[i].tokens and pack["loss_mask"].tolist() == packs[i].label_mask
    counts["right" if same else "wrong"] += 1


def read_again_and_again(shard: Shard, counts: Counter[str]) -> None:
    for i in range(10**6):
        read(shard, i % len(PACKS), counts)


def other_packs() -> list[Sample]:
    """Return packs as long as PACKS, without a common token."""
    return [Sample([token + 500 for token in pack.tokens], pack.mask, pack.starts) for pack in PACKS]


def later(seconds: float, work: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, work)
    timer.start()
    return timer


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("server", ["object", "proxy"])
def test_a_server_that_is_killed_and_comes_back(
    swift: SwiftServer,
    s3: Any,
    bucket: str,
    urls: dict[str, str],
    tmp_path: Path,
    counts: Counter[str],
    scheme: str,
    server: str,
) -> None:
    put_samples(s3, bucket, "x", tmp_path, PACKS)
    shard = Shard(f"{urls[scheme]}/x")
    for i in range(len(PACKS)):
        if i == 5:
            swift.kill(server)
            timer = later(1.0, lambda: swift.start(server))
        read(shard, i, counts)
    timer.join()
    assert counts["right"] == len(PACKS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_server_that_stays_dead_is_an_error_and_reading_goes_on_after_it(
    swift: SwiftServer,
    s3: Any,
    bucket: str,
    urls: dict[str, str],
    tmp_path: Path,
    counts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
) -> None:
    put_samples(s3, bucket, "x", tmp_path, PACKS)
    monkeypatch.setenv("SFT_IDX_STORAGE_SECONDS", "1")
    forget_stores()
    shard = Shard(f"{urls[scheme]}/x")
    read(shard, 0, counts)
    swift.kill("proxy")
    with pytest.raises(StorageError, match="check that the store is running"):
        read(shard, 1, counts)
    swift.start("proxy")
    read(shard, 1, counts)
    swift.kill("object")
    with pytest.raises(StorageError):
        read(shard, 2, counts)
    swift.start("object")
    monkeypatch.setenv("SFT_IDX_STORAGE_SECONDS", "60")  # the proxy retries a failed server after a while
    forget_stores()
    read(Shard(f"{urls[scheme]}/x"), 2, counts)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batches_go_on_over_a_restart_of_the_proxy(
    swift: SwiftServer, s3: Any, bucket: str, urls: dict[str, str], tmp_path: Path, counts: Counter[str], scheme: str
) -> None:
    rng = np.random.default_rng(0)
    local = put_samples(s3, bucket, "x", tmp_path, random_samples(40, CAPACITY, rng), capacity=CAPACITY)
    here, there = (BatchAssembler(StoredPacks(ShardSet.open(path)), CAPACITY) for path in (local, f"{urls[scheme]}/x"))
    batches = rng.integers(0, 40, (40, 4)).tolist()
    for i, found in enumerate(BatchLoader(there, batches)):
        if i == 3:
            swift.kill("proxy")
            timer = later(1.0, lambda: swift.start("proxy"))
        expected = here.assemble(batches[i])
        counts["right" if all(torch.equal(found[key], expected[key]) for key in expected) else "wrong"] += 1
    timer.join()
    assert counts["right"] == len(batches)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_wrong_key_is_said_without_the_key(
    swift: SwiftServer,
    s3: Any,
    bucket: str,
    urls: dict[str, str],
    tmp_path: Path,
    counts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
) -> None:
    put_samples(s3, bucket, "x", tmp_path, PACKS)
    wrong = "this-is-not-the-key"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    config = Path(os.environ["MSC_CONFIG"])
    text = config.read_text().replace(swift.credentials.secret, wrong).replace(f"swift-{bucket}", f"wrong-{bucket}")
    config.write_text(text)
    forget_stores()
    url = urls[scheme].replace(f"swift-{bucket}", f"wrong-{bucket}")
    for work in (lambda: Shard(f"{url}/x"), lambda: ShardSet.open(f"{url}/")):
        with pytest.raises(StorageError, match=r"access denied \(HTTP 403.*check the credentials") as caught:
            work()
        counts["errors"] += 1
        assert wrong not in f"{caught.value} {caught.value!r}"
        assert caught.value.__suppress_context__


@pytest.mark.parametrize("scheme", SCHEMES)
def test_files_that_are_missing_or_cut_short(
    s3: Any, bucket: str, urls: dict[str, str], tmp_path: Path, counts: Counter[str], scheme: str
) -> None:
    for suffix in SUFFIXES:
        put_samples(s3, bucket, "x", tmp_path, PACKS)
        body = s3.get_object(Bucket=bucket, Key="x" + suffix)["Body"].read()
        s3.put_object(Bucket=bucket, Key="x" + suffix, Body=body[:-1])
        with pytest.raises(CorruptShardError, match="F2"):
            Shard(f"{urls[scheme]}/x")
        s3.delete_object(Bucket=bucket, Key="x" + suffix)
        with pytest.raises(ShardNotFoundError) as caught:
            Shard(f"{urls[scheme]}/x")
        assert caught.value.missing == [f"{urls[scheme]}/x{suffix}"]
        counts["errors"] += 2


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("change", ["replaced", "cut short", "removed"])
def test_an_object_that_changes_under_a_reader(
    s3: Any, bucket: str, urls: dict[str, str], tmp_path: Path, counts: Counter[str], scheme: str, change: str
) -> None:
    put_samples(s3, bucket, "x", tmp_path, PACKS)
    shard, state = Shard(f"{urls[scheme]}/x"), pickle.dumps(Shard(f"{urls[scheme]}/x"))
    assembler = BatchAssembler(StoredPacks(ShardSet.open(f"{urls[scheme]}/x")), CAPACITY)
    assembler.assemble([0])
    read(shard, 1, counts)
    if change == "replaced":
        put_samples(s3, bucket, "x", tmp_path, other_packs())
    else:
        for suffix in (".bin", ".loss.bin"):
            body = s3.get_object(Bucket=bucket, Key="x" + suffix)["Body"].read()
            s3.delete_object(Bucket=bucket, Key="x" + suffix)
            if change == "cut short":
                s3.put_object(Bucket=bucket, Key="x" + suffix, Body=body[:-1])
    expected = StorageError if change == "removed" else FormatError
    for i in range(len(PACKS)):
        with pytest.raises(expected):
            read(shard, i, counts)
    with pytest.raises(expected):
        list(BatchLoader(assembler, [[1, 2], [3, 4]]))
    with pytest.raises((FormatError, ShardNotFoundError)):
        read(pickle.loads(state), 0, counts)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_shard_replaced_while_it_is_read(
    s3: Any, bucket: str, urls: dict[str, str], tmp_path: Path, counts: Counter[str], scheme: str
) -> None:
    put_samples(s3, bucket, "x", tmp_path, PACKS)
    shard = Shard(f"{urls[scheme]}/x")
    timer = later(0.3, lambda: put_samples(s3, bucket, "x", tmp_path, other_packs()) and None)
    with pytest.raises(FormatError, match="replaced after it was opened"):
        read_again_and_again(shard, counts)
    timer.join()
    fresh = Shard(f"{urls[scheme]}/x")
    for i in range(len(PACKS)):
        read(fresh, i, counts, other_packs())
    assert counts["errors"] == 1
