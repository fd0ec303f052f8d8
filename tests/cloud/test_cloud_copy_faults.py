"""Failures during copies: they recover or report the error, and never leave half a shard."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import disks
import pytest
from copies import command, ended, five_keys, keys, remote_files, run, unfinished, wait_until, write_shard
from faults import Faults
from sample_packs import five_files
from swift_server import SwiftServer

from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.packs.buckets import copy_shard
from megatron_sft_idx.packs.transfer import CopySource

pytestmark = pytest.mark.cloud


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Provide a shard large enough to interrupt its upload: its token file is sent in twelve parts."""
    return write_shard(tmp_path_factory.mktemp("large") / "large", 12_000, 5)


@pytest.fixture
def small(tmp_path: Path) -> str:
    return write_shard(tmp_path / "here/small", 40, 6)


def caught_uploading(s3: Any, bucket: str, shard: str, **environment: str) -> subprocess.Popen[str]:
    """Start an upload to ``x`` and return it when some parts have arrived."""
    process = command("copy", shard, f"s3://{bucket}/x", **environment)
    wait_until(lambda: unfinished(s3, bucket) or process.poll() is not None, "an upload in parts")
    assert process.poll() is None, ended(process)
    return process


def assert_no_shard(s3: Any, bucket: str) -> None:
    assert "x.seq.idx" not in keys(s3, bucket)
    with pytest.raises(ShardNotFoundError):
        CopySource(f"s3://{bucket}/x")


def assert_whole(s3: Any, bucket: str, shard: str) -> None:
    assert remote_files(s3, bucket, "x") == five_files(shard)
    assert keys(s3, bucket) == five_keys("x")
    assert unfinished(s3, bucket) == []


@pytest.mark.parametrize("name", ["object", "proxy"])
def test_a_server_that_restarts_during_an_upload_is_waited_for(
    swift: SwiftServer, s3: Any, bucket: str, large: str, faults: Faults, name: str
) -> None:
    process = caught_uploading(s3, bucket, large)
    swift.kill(name)
    assert process.poll() is None
    swift.start(name)
    code, said = ended(process)
    assert code == 0, said
    assert_whole(s3, bucket, large)
    faults.count(f"{name} server killed and restarted during an upload", "recovered")


def test_an_object_server_that_stays_down_fails_the_upload_in_time(
    swift: SwiftServer, s3: Any, bucket: str, large: str, faults: Faults
) -> None:
    process = caught_uploading(s3, bucket, large, SFT_IDX_STORAGE_SECONDS="3")
    swift.kill("object")
    code, said = ended(process)
    assert code == 1
    assert f"s3://{bucket}/x.bin: could not be written" in said
    assert "continues where this one stopped" in said
    swift.start("object")
    assert_no_shard(s3, bucket)
    code, said = run("copy", large, f"s3://{bucket}/x")
    assert code == 0, said
    assert_whole(s3, bucket, large)
    faults.count("object server down for good during an upload", "refused, and done by the next attempt")


def test_what_a_killed_upload_leaves_is_no_shard_and_the_next_one_clears_it(
    s3: Any, bucket: str, large: str, faults: Faults
) -> None:
    process = caught_uploading(s3, bucket, large)
    process.kill()
    ended(process)
    assert unfinished(s3, bucket) == ["x.bin"]
    assert_no_shard(s3, bucket)
    code, said = run("copy", large, f"s3://{bucket}/x")
    assert code == 0, said
    assert "unfinished uploads of earlier attempts removed: 1" in said
    assert_whole(s3, bucket, large)
    faults.count("upload killed (kill -9) while parts were on their way", "done by the next attempt, parts removed")


def test_a_killed_upload_keeps_others_out_until_they_insist(
    s3: Any, bucket: str, large: str, small: str, faults: Faults
) -> None:
    process = caught_uploading(s3, bucket, large)
    process.kill()
    ended(process)
    with pytest.raises(FormatError, match=r"x\.building: another shard is being uploaded"):
        copy_shard(small, f"s3://{bucket}/x")
    copy_shard(small, f"s3://{bucket}/x", overwrite=True)
    assert_whole(s3, bucket, small)
    faults.count("another shard to the prefix of a killed upload", "refused until --overwrite")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_upload_removes_its_parts_and_its_claim(
    s3: Any, bucket: str, large: str, faults: Faults, number: signal.Signals
) -> None:
    process = caught_uploading(s3, bucket, large)
    process.send_signal(number)
    code, said = ended(process)
    assert code in (130, 143), said
    assert unfinished(s3, bucket) == []
    assert keys(s3, bucket) <= five_keys("x") - {"x.seq.idx"}
    faults.count(f"upload interrupted ({number.name})", "ended, nothing left")


def test_a_damaged_file_is_not_uploaded(s3: Any, bucket: str, small: str, large: str, faults: Faults) -> None:
    for shard in (small, large):
        path = Path(f"{shard}.bin")
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        try:
            with pytest.raises(CorruptShardError, match=r"\.bin: its content does not match .* \(rule F3\)"):
                copy_shard(shard, f"s3://{bucket}/x")
        finally:
            path.write_bytes(good)
        assert keys(s3, bucket) == set()
        assert unfinished(s3, bucket) == []
        faults.count("damaged local file", "refused")


def test_a_truncated_or_damaged_object_is_not_downloaded(
    s3: Any, bucket: str, small: str, tmp_path: Path, faults: Faults
) -> None:
    copy_shard(small, f"s3://{bucket}/x")
    good = five_files(small)[".bin"]
    s3.put_object(Bucket=bucket, Key="x.bin", Body=good[:-100])
    with pytest.raises(CorruptShardError, match=r"x\.bin: .*rule F2"):
        copy_shard(f"s3://{bucket}/x", str(tmp_path / "back/x"))
    faults.count("truncated object", "refused")
    s3.put_object(Bucket=bucket, Key="x.bin", Body=bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(CorruptShardError, match=r"x\.bin: .*rule F3"):
        copy_shard(f"s3://{bucket}/x", str(tmp_path / "back/x"))
    faults.count("damaged object", "refused")
    assert list((tmp_path / "back").iterdir()) == []
    # The store's copy can be repaired without --overwrite, because it is the same shard.
    copy_shard(small, f"s3://{bucket}/x")
    assert remote_files(s3, bucket, "x") == five_files(small)


def test_a_killed_download_goes_on_where_it_stopped(
    s3: Any, bucket: str, large: str, tmp_path: Path, faults: Faults
) -> None:
    copy_shard(large, f"s3://{bucket}/x")
    arriving = tmp_path / "back/x.building/.bin"
    process = command("copy", f"s3://{bucket}/x", str(tmp_path / "back/x"))
    wait_until(lambda: arriving.exists() and arriving.stat().st_size, "a download")
    process.kill()
    ended(process)
    assert 0 < arriving.stat().st_size < os.path.getsize(f"{large}.bin")
    assert not (tmp_path / "back/x.seq.idx").exists()
    copy_shard(f"s3://{bucket}/x", str(tmp_path / "back/x"))
    assert five_files(tmp_path / "back/x") == five_files(large)
    assert {path.name for path in (tmp_path / "back").iterdir()} == five_keys("x")
    faults.count("download killed (kill -9)", "done by the next attempt")


def test_what_arrived_of_another_shard_is_fetched_anew(s3: Any, bucket: str, small: str, tmp_path: Path) -> None:
    copy_shard(small, f"s3://{bucket}/x")
    for suffix, content in ((".bin", b"something else"), (".loss.bin", bytes(10**6))):
        (tmp_path / f"x{suffix}.copy").write_bytes(content)
    copy_shard(f"s3://{bucket}/x", str(tmp_path / "x"))
    assert five_files(tmp_path / "x") == five_files(small)


def test_a_full_disk_fails_the_download_and_more_room_lets_it_go_on(
    s3: Any, bucket: str, small: str, faults: Faults
) -> None:
    copy_shard(small, f"s3://{bucket}/x")
    with disks.mounted("size=8m") as disk:
        with disks.filled(disk, 300_000):
            code, said = run("copy", f"s3://{bucket}/x", str(disk / "x"))
            assert (code, f"{disk}/x: No space left on device" in said) == (1, True), said
            assert {path.name for path in disk.iterdir()} == {"ballast"}  # detected before the work
        copy_shard(f"s3://{bucket}/x", str(disk / "x"))
        assert five_files(disk / "x") == five_files(small)
    faults.count("disk full during a download", "refused, and done by the next attempt")


def test_wrong_keys_and_missing_buckets_are_said_without_the_keys(
    swift: SwiftServer, s3: Any, bucket: str, small: str, tmp_path: Path, faults: Faults
) -> None:
    wrong = {
        "AWS_SECRET_ACCESS_KEY": "a-secret-that-must-not-be-said",
        "AWS_ACCESS_KEY_ID": swift.credentials.access_key,
    }
    unknown = {"AWS_SECRET_ACCESS_KEY": "a-secret-that-must-not-be-said", "AWS_ACCESS_KEY_ID": "nobody:at-all"}
    back = str(tmp_path / "back")
    for fault, arguments, environment, expected in [
        ("wrong secret key", (small, f"s3://{bucket}/x"), wrong, "access denied"),
        ("wrong secret key", (f"s3://{bucket}/x", back), wrong, "access denied"),
        ("unknown access key", (small, f"s3://{bucket}/x"), unknown, "access denied"),
        ("missing bucket", (small, "s3://there-is-none/x"), {}, "no such bucket"),
        ("missing bucket", ("s3://there-is-none/x", back), {}, "no such bucket"),
        ("missing shard", (f"s3://{bucket}/none", back), {}, "no shard here, missing"),
    ]:
        code, said = run("copy", *arguments, **environment, SFT_IDX_STORAGE_SECONDS="5", AWS_MAX_ATTEMPTS="1")
        assert (code, expected in said) == (1, True), said
        assert said.count("\n") == 1, said
        for unsaid in (*wrong.values(), *unknown.values(), swift.credentials.secret):
            assert unsaid not in said
        faults.count(fault, "refused")
    assert keys(s3, bucket) == set()


def test_a_store_that_cannot_be_reached_is_given_up_in_time(
    bucket: str, small: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = run(
        "copy", small, f"s3://{bucket}/x", AWS_ENDPOINT_URL="http://127.0.0.1:9", SFT_IDX_STORAGE_SECONDS="2"
    )
    assert (code, "check that the store is running, and that the endpoint is right" in said) == (1, True), said
    faults.count("store not there", "refused")


def test_an_upload_that_loses_its_claim_does_not_publish(
    s3: Any, bucket: str, large: str, small: str, faults: Faults
) -> None:
    process = caught_uploading(s3, bucket, large)
    process.send_signal(signal.SIGSTOP)  # otherwise it may finish before the other one begins
    copy_shard(small, f"s3://{bucket}/x", overwrite=True)
    process.send_signal(signal.SIGCONT)
    code, said = ended(process)
    assert code == 1, said
    # --overwrite warns about an upload over another running one: then the shard is complete, or missing.
    with contextlib.suppress(ShardNotFoundError, CorruptShardError):
        CopySource(f"s3://{bucket}/x")
        assert remote_files(s3, bucket, "x") == five_files(small)
    copy_shard(small, f"s3://{bucket}/x", overwrite=True)
    assert remote_files(s3, bucket, "x") == five_files(small)
    faults.count("--overwrite while another upload was at work", "refused by the one that lost")
