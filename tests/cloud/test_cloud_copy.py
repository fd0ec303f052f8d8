"""Copies to and from a real object store are exact; existing files are neither sent again nor replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from columned import SOURCE, SPECS, write_columned
from copies import command, ended, five_keys, keys, remote_files, run, unfinished, write_shard
from sample_packs import demo_samples, five_files, write_samples

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.packs.buckets import copy_shard, upload
from megatron_sft_idx.packs.transfer import CopySource, download
from megatron_sft_idx.shard import Shard, write_column

pytestmark = pytest.mark.cloud


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Provide a small shard: each file is one request."""
    write_samples(tmp_path / "here/train", demo_samples())
    return str(tmp_path / "here/train")


@pytest.fixture
def large(tmp_path: Path) -> str:
    """Provide a large shard: its token file is sent in five parts, its masks in three."""
    return write_shard(tmp_path / "here/large", 4500, 1)


def test_there_and_back(s3: Any, bucket: str, large: str, tmp_path: Path) -> None:
    sent = upload(CopySource(large), f"s3://{bucket}/a/large")
    assert remote_files(s3, bucket, "a/large") == five_files(large)
    assert sent.nbytes_sent == sum(map(len, five_files(large).values()))
    assert keys(s3, bucket) == five_keys("a/large")
    assert unfinished(s3, bucket) == []
    download(CopySource(f"s3://{bucket}/a/large"), str(tmp_path / "back/large"))
    assert five_files(tmp_path / "back/large") == five_files(large)
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == sorted(five_keys("large"))
    assert verify_shard(str(tmp_path / "back/large"), full=True).ok


def test_from_bucket_to_bucket_and_from_folder_to_folder(s3: Any, bucket: str, shard: str, tmp_path: Path) -> None:
    copy_shard(shard, f"s3://{bucket}/one")
    copy_shard(f"s3://{bucket}/one", f"s3://{bucket}/two")
    assert remote_files(s3, bucket, "two") == five_files(shard)
    copy_shard(shard, str(tmp_path / "there/train"))
    assert five_files(tmp_path / "there/train") == five_files(shard)


def test_columns_go_along_are_read_by_ranges_and_go_with_their_shard(s3: Any, bucket: str, tmp_path: Path) -> None:
    write_columned(tmp_path / "x", demo_samples())
    write_column(tmp_path / "x", "late", np.arange(len(demo_samples())), per="pack")
    there, local = f"s3://{bucket}/a/x", {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    sent = copy_shard(str(tmp_path / "x"), there)
    assert sent.nbytes_sent == sum(map(len, local.values()))
    assert keys(s3, bucket) == {f"a/{name}" for name in local}
    assert copy_shard(str(tmp_path / "x"), there).nbytes_sent == 0
    copy_shard(there, str(tmp_path / "back/x"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == local
    names = [*SPECS, "late"]
    near, far = Shard(tmp_path / "x", columns=names), Shard(there, columns=names)
    assert sorted(far.columns) == sorted(names)
    for name in names:
        np.testing.assert_array_equal(near[2][name], far[2][name], strict=True)
    assert verify_shard(there, full=True).ok
    s3.put_object(Bucket=bucket, Key="a/x.mine.col", Body=b"a list of mine")
    write_columned(tmp_path / "new", demo_samples(3), {"source": SOURCE})
    copy_shard(str(tmp_path / "new"), there, overwrite=True)
    assert keys(s3, bucket) == {*five_keys("a/x"), "a/x.source.col", "a/x.mine.col"}
    assert list(Shard(there).columns) == ["source"]


def test_an_empty_shard(s3: Any, bucket: str, tmp_path: Path) -> None:
    write_samples(tmp_path / "empty", [])
    copy_shard(str(tmp_path / "empty"), f"s3://{bucket}/empty")
    copy_shard(f"s3://{bucket}/empty", str(tmp_path / "back"))
    assert five_files(tmp_path / "back") == five_files(tmp_path / "empty")


def test_each_object_has_its_checksum_beside_it(s3: Any, bucket: str, shard: str) -> None:
    copy_shard(shard, f"s3://{bucket}/x")
    header = Shard(shard).header
    found = s3.head_object(Bucket=bucket, Key="x.bin")
    assert found["Metadata"] == {"xxh3-128": header.digests[0].checksum.hex()}


def test_what_is_there_is_not_sent_again(s3: Any, bucket: str, shard: str, tmp_path: Path) -> None:
    first = copy_shard(shard, f"s3://{bucket}/x")
    before = s3.head_object(Bucket=bucket, Key="x.bin")["LastModified"]
    again = copy_shard(shard, f"s3://{bucket}/x")
    assert (again.nbytes_sent, again.nbytes_found) == (0, first.nbytes_sent)
    assert s3.head_object(Bucket=bucket, Key="x.bin")["LastModified"] == before

    s3.delete_object(Bucket=bucket, Key="x.loss.bin")
    part = copy_shard(shard, f"s3://{bucket}/x")
    assert remote_files(s3, bucket, "x") == five_files(shard)
    assert part.nbytes_found == len(
        five_files(shard)[".bin"] + five_files(shard)[".seq.bin"] + five_files(shard)[".idx"]
    )

    copy_shard(f"s3://{bucket}/x", str(tmp_path / "back"))
    assert copy_shard(f"s3://{bucket}/x", str(tmp_path / "back")).nbytes_sent == 0


@pytest.mark.parametrize("remote", [True, False], ids=["upload", "download"])
def test_another_shard_is_replaced_only_when_told(
    s3: Any, bucket: str, shard: str, tmp_path: Path, remote: bool
) -> None:
    write_samples(tmp_path / "other", demo_samples(3))
    target = f"s3://{bucket}/x" if remote else str(tmp_path / "target")
    copy_shard(str(tmp_path / "other"), target)
    with pytest.raises(FormatError, match="--overwrite"):
        copy_shard(shard, target)
    copy_shard(target, str(tmp_path / "kept"))
    assert five_files(tmp_path / "kept") == five_files(tmp_path / "other")
    copy_shard(shard, target, overwrite=True)
    copy_shard(target, str(tmp_path / "new"))
    assert five_files(tmp_path / "new") == five_files(shard)


def test_a_stock_dataset_at_the_prefix_is_not_touched(s3: Any, bucket: str, shard: str) -> None:
    s3.put_object(Bucket=bucket, Key="x.bin", Body=b"somebody's")
    with pytest.raises(
        FormatError, match=r"x\.bin: an object of 10 bytes exists here that does not belong to an SFT shard"
    ):
        copy_shard(shard, f"s3://{bucket}/x")
    assert keys(s3, bucket) == {"x.bin"}
    assert s3.get_object(Bucket=bucket, Key="x.bin")["Body"].read() == b"somebody's"


def test_of_two_that_upload_different_shards_at_once_one_wins(s3: Any, bucket: str, tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / name, 2500, seed) for seed, name in enumerate("ab")]
    ends = [ended(process) for process in [command("copy", shard, f"s3://{bucket}/x") for shard in shards]]
    assert sorted(code for code, _ in ends) == [0, 1], ends
    (lost,) = (said for code, said in ends if code)
    assert "another shard" in lost
    winner = next(shard for shard, (code, _) in zip(shards, ends, strict=True) if not code)
    assert remote_files(s3, bucket, "x") == five_files(winner)
    assert keys(s3, bucket) == five_keys("x")
    assert unfinished(s3, bucket) == []


def test_two_that_upload_the_same_shard_at_once_do_not_disturb_each_other(s3: Any, bucket: str, large: str) -> None:
    ends = [ended(process) for process in [command("copy", large, f"s3://{bucket}/x") for _ in range(2)]]
    assert [code for code, _ in ends] == [0, 0], ends
    assert remote_files(s3, bucket, "x") == five_files(large)
    assert keys(s3, bucket) == five_keys("x")


def test_the_command_copies_folders_and_patterns(s3: Any, bucket: str, tmp_path: Path) -> None:
    for number in (2, 10, 9):
        write_samples(tmp_path / f"parts/part-{number}", demo_samples(number))
    code, said = run("copy", str(tmp_path / "parts"), f"s3://{bucket}/sft/", "--log-interval", "1")
    assert code == 0, said
    assert keys(s3, bucket) == {key for number in (2, 9, 10) for key in five_keys(f"sft/part-{number}")}
    code, said = run("copy", f"s3://{bucket}/sft/part-1*", f"s3://{bucket}/sft/part-9", str(tmp_path / "back") + "/")
    assert code == 0, said
    assert five_files(tmp_path / "back/part-10") == five_files(tmp_path / "parts/part-10")
    assert five_files(tmp_path / "back/part-9") == five_files(tmp_path / "parts/part-9")
    code, said = run("copy", f"s3://{bucket}/sft/", str(tmp_path / "one"))
    assert (code, "end it with /" in said) == (1, True), said
    code, said = run("copy", f"s3://{bucket}/none/", str(tmp_path / "one"))
    assert (code, "no shard" in said) == (1, True), said


def test_msc_reaches_the_same_bucket(
    s3: Any, bucket: str, large: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swift: Any
) -> None:
    options = f"{{base_path: {bucket}, endpoint_url: '{swift.endpoint}', region_name: us-east-1}}"
    config = f"profiles:\n  swift:\n    storage_provider: {{type: s3, options: {options}}}\n"
    (tmp_path / "msc.yaml").write_text(config)
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.yaml"))
    copy_shard(large, "msc://swift/m/large")
    assert remote_files(s3, bucket, "m/large") == five_files(large)
    copy_shard("msc://swift/m/large", str(tmp_path / "back"))
    assert five_files(tmp_path / "back") == five_files(large)
    assert copy_shard(large, "msc://swift/m/large").nbytes_sent == 0
    # Both addresses recognise each other's copies.
    assert copy_shard(large, f"s3://{bucket}/m/large").nbytes_sent == 0
    with pytest.raises(FormatError, match="another shard already exists"):
        copy_shard(write_shard(tmp_path / "other", 3, 3), "msc://swift/m/large")
