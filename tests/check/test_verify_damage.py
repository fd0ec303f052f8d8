"""Damage of every kind: a full verification finds all of it, and neither depth crashes or hangs."""

from __future__ import annotations

import errno
import os
import struct
import threading
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reseal import Files, field, put, reseal, set_fields
from sample_packs import demo_samples, five_files, write_samples

from megatron_sft_idx.check import Report, verify_shard
from megatron_sft_idx.check.pack_walk import CheckedFile, Meter
from megatron_sft_idx.errors import ShardNotFoundError
from megatron_sft_idx.layout.files import SUFFIXES


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Files:
    prefix = tmp_path_factory.mktemp("whole") / "x"
    write_samples(prefix, demo_samples(5), token_dtype=np.uint16, capacity=20, pad_id=0)
    return five_files(prefix)


def looked_at(prefix: str) -> Report:
    """Verify at both depths, with any findings, and return the full report."""
    quick, report = verify_shard(prefix), verify_shard(prefix, full=True)
    assert quick.ok or not report.ok  # the full verification finds everything that the quick one finds
    for finding in (*quick.findings, *report.findings):
        assert finding.offset is None or finding.offset >= 0
        assert str(finding)
    return report


@pytest.mark.sample(2)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_single_flipped_bit_is_found(tmp_path: Path, whole: Files, suffix: str) -> None:
    prefix = put(tmp_path, whole)
    assert verify_shard(prefix, full=True).ok
    with open(prefix + suffix, "r+b") as file:
        for bit in range(8 * len(whole[suffix])):
            right = whole[suffix][bit // 8]
            os.pwrite(file.fileno(), bytes([right ^ 1 << bit % 8]), bit // 8)
            findings = verify_shard(prefix, full=True).findings
            assert findings[0].path == prefix + suffix, f"bit {bit}"
            # A count in the header is wrong only if the header is.
            assert suffix == ".seq.idx" or "H9" not in {finding.rule for finding in findings}, f"bit {bit}"
            os.pwrite(file.fileno(), bytes([right]), bit // 8)
    assert verify_shard(prefix, full=True).ok


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_truncation_is_found_at_once(tmp_path: Path, whole: Files, suffix: str) -> None:
    prefix = put(tmp_path, whole)
    for size in range(len(whole[suffix])):
        Path(prefix + suffix).write_bytes(whole[suffix][:size])
        assert not verify_shard(prefix).ok
        rules = {finding.rule for finding in looked_at(prefix).findings}
        assert rules & {"F2", "H1", "H3"}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_whatever_follows_a_file_is_found(tmp_path: Path, whole: Files, suffix: str) -> None:
    report = looked_at(put(tmp_path, {**whole, suffix: whole[suffix] + b"\0"}))
    assert "F2" in {finding.rule for finding in report.findings}


def test_files_of_two_shards_in_every_mix(tmp_path: Path, whole: Files) -> None:
    # The same shape with other tokens and masks, so sizes show nothing.
    packs = [type(p)([t + 1 for t in p.tokens], [1 - m for m in p.mask], p.starts) for p in demo_samples(5)]
    write_samples(tmp_path / "y", packs, token_dtype=np.uint16, capacity=20, pad_id=0)
    other = five_files(tmp_path / "y")
    assert all(len(other[suffix]) == len(whole[suffix]) for suffix in SUFFIXES)
    different = [suffix for suffix in SUFFIXES if other[suffix] != whole[suffix]]
    assert len(different) == 3
    for count in (1, 2):
        for swapped in combinations(different, count):
            report = looked_at(put(tmp_path, {**whole, **{suffix: other[suffix] for suffix in swapped}}))
            assert "F3" in {finding.rule for finding in report.findings}
    assert verify_shard(put(tmp_path, {**whole, **{suffix: other[suffix] for suffix in different}}), full=True).ok


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_under_anothers_name(tmp_path: Path, whole: Files, suffix: str) -> None:
    for name in SUFFIXES:
        if name != suffix:
            assert not looked_at(put(tmp_path, {**whole, name: whole[suffix]})).ok


# Values for counts in the header and for array entries that overflow somewhere.
HOSTILE = [1, 2**31, 2**32 - 1, 2**56 - 1, 2**56, 2**60 - 1, 2**61, 2**63 - 1, 2**63, 2**64 - 1]
COUNTS = ["num_packs", "num_sequences", "num_tokens", "num_trained_tokens", "num_masked_packs", "tokens_nbytes",
          "loss_nbytes", "idx_nbytes", "starts_nbytes"]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_counts_that_overflow(tmp_path: Path, whole: Files, value: int) -> None:
    raw = whole[".seq.idx"]
    for name in COUNTS:
        if field(raw, name) != value:
            assert not looked_at(put(tmp_path, {**whole, ".seq.idx": set_fields(raw, **{name: value})})).ok
    together = dict.fromkeys(COUNTS[:3], value)
    assert not looked_at(put(tmp_path, {**whole, ".seq.idx": set_fields(raw, **together)})).ok
    assert not looked_at(put(tmp_path, reseal(whole, **together))).ok
    for name in ("sequence_multiple", "capacity", "longest_pack", "most_sequences", "json_nbytes", "header_nbytes"):
        if field(raw, name) != (value & 0xFFFFFFFF):
            changed = set_fields(raw, **{name: value & 0xFFFFFFFF})
            report = looked_at(put(tmp_path, {**whole, ".seq.idx": changed}))
            assert not report.ok or name in ("sequence_multiple", "capacity")


@pytest.mark.parametrize("value", [-(2**63), -1, 0, 2**31, 2**56, 2**61, 2**63 - 1])
def test_arrays_that_overflow(tmp_path: Path, whole: Files, value: int) -> None:
    for suffix in (".seq.idx", ".idx"):
        for offset in range(34 if suffix == ".idx" else 320, len(whole[suffix]) - 7, 4):
            data = bytearray(whole[suffix])
            struct.pack_into("<q", data, offset, value)
            if bytes(data) != whole[suffix]:
                assert not looked_at(put(tmp_path, reseal({**whole, suffix: bytes(data)}))).ok


def test_claims_of_another_byte_order(tmp_path: Path, whole: Files) -> None:
    raw = bytearray(whole[".seq.idx"])
    for name, code in (("version", "I"), ("header_nbytes", "I"), ("num_packs", "Q"), ("num_tokens", "Q")):
        at = {"version": 8, "header_nbytes": 12, "num_packs": 32, "num_tokens": 48}[name]
        struct.pack_into(">" + code, raw, at, field(whole[".seq.idx"], name))
    report = looked_at(put(tmp_path, {**whole, ".seq.idx": bytes(raw)}))
    assert [f.rule for f in report.findings] == ["H2"]
    swapped = np.frombuffer(whole[".bin"], "<u2").astype(">u2").tobytes()
    report = looked_at(put(tmp_path, {**whole, ".bin": swapped}))
    assert [f.rule for f in report.findings] == ["F3"]


def test_a_damaged_header_keeps_nothing_else_from_being_checked(tmp_path: Path, whole: Files) -> None:
    broken: dict[str, Any] = {".bin": b"\xff" + whole[".bin"][1:], ".loss.bin": b"\x09" + whole[".loss.bin"][1:]}
    for offset in (72, 75, 216, 310):  # the tokens' dtype, flags, reserved, the header's checksum
        raw = bytearray(whole[".seq.idx"])
        raw[offset] ^= 8
        report = looked_at(put(tmp_path, {**whole, **broken, ".seq.idx": bytes(raw)}))
        rules = {finding.rule for finding in report.findings}
        assert rules > {"F3", "P7"}
        assert "H4" in rules


def test_masks_of_a_dtype_that_means_nothing_are_hashed_all_the_same(tmp_path: Path, whole: Files) -> None:
    changed = {".seq.idx": set_fields(whole[".seq.idx"], mask_dtype=9), ".loss.bin": b"\x09" + whole[".loss.bin"][1:]}
    report = looked_at(put(tmp_path, {**whole, **changed}))
    assert {finding.rule for finding in report.findings} == {"H5", "F3"}


def test_files_that_are_missing_or_something_else(tmp_path: Path, whole: Files) -> None:
    for suffix in SUFFIXES:
        for kind in ("missing", "folder", "pipe", "empty", "dangling"):
            prefix = put(tmp_path, whole, name=f"{kind}{suffix.replace('.', '-')}")
            path = Path(prefix + suffix)
            path.unlink()
            if kind == "folder":
                path.mkdir()
            elif kind == "pipe":
                os.mkfifo(path)
            elif kind == "empty":
                path.touch()
            elif kind == "dangling":
                path.symlink_to(tmp_path / "nowhere")
            report = looked_at(prefix)
            wanted = ("F2" if suffix != ".seq.idx" else "H1") if kind == "empty" else "F1"
            assert (wanted, str(path)) in {(finding.rule, finding.path) for finding in report.findings}


def test_nothing_there_at_all(tmp_path: Path) -> None:
    for prefix in (tmp_path / "x", tmp_path / "no" / "x", tmp_path):
        with pytest.raises(ShardNotFoundError, match="rule F1"):
            verify_shard(prefix)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_shrinks_while_it_is_read(
    tmp_path: Path, whole: Files, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_sft_idx.check.pack_walk._CHUNK_NBYTES", 16)  # so that something is left to read
    prefix, size = put(tmp_path, whole), len(whole[suffix])
    report = verify_shard(prefix, full=True, advance=lambda _: os.truncate(prefix + suffix, size - 9))
    assert ("F3", prefix + suffix) in {(finding.rule, finding.path) for finding in report.findings}


def test_progress_ends_with_every_byte(tmp_path: Path, whole: Files) -> None:
    seen: list[int] = []
    verify_shard(put(tmp_path, whole), full=True, advance=seen.append)
    assert sum(seen) == sum(map(len, whole.values())) - 320  # the header is read before
    assert min(seen) >= 0


@pytest.mark.parametrize("suffix", [".bin", ".loss.bin"])
def test_an_error_in_one_thread_ends_the_other(
    tmp_path: Path, whole: Files, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_sft_idx.check.pack_walk._CHUNK_NBYTES", 16)
    prefix, read_into = put(tmp_path, whole), CheckedFile.read_into
    calls: list[str] = []

    def failing(file: CheckedFile, out: NDArray[Any], offset: int) -> int:
        calls.append(file.path)
        if file.path == prefix + suffix:
            raise OSError(errno.EIO, "Input/output error", file.path)
        return read_into(file, out, offset)

    monkeypatch.setattr(CheckedFile, "read_into", failing)
    with pytest.raises(OSError, match="Input/output error"):
        verify_shard(prefix, full=True)
    assert calls.count(prefix + suffix) == 1


def test_an_error_of_the_tokens_is_told_before_the_masks_are_read(
    tmp_path: Path, whole: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, read_into, failed, calls = put(tmp_path, whole), CheckedFile.read_into, threading.Event(), []

    def failing(file: CheckedFile, out: NDArray[Any], offset: int) -> int:
        if file.path == prefix + ".bin":
            raise OSError(errno.EIO, "Input/output error", file.path)
        if file.path == prefix + ".loss.bin":
            failed.wait(5)
            calls.append(offset)
        return read_into(file, out, offset)

    monkeypatch.setattr("megatron_sft_idx.check.pack_walk._CHUNK_NBYTES", 16)
    monkeypatch.setattr(CheckedFile, "read_into", failing)
    monkeypatch.setattr(Meter, "stop", lambda meter: [setattr(meter, "_stopped", True), failed.set()])
    with pytest.raises(OSError, match="Input/output error"):
        verify_shard(prefix, full=True)
    assert len(calls) <= 1


def test_a_column_that_cannot_be_opened_is_told_before_the_shard_is_read(tmp_path: Path, whole: Files) -> None:
    prefix = put(tmp_path, whole)
    Path(f"{prefix}.a.col").write_bytes(b"")
    Path(f"{prefix}.b.col").symlink_to("x.b.col")
    seen: list[int] = []
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"x\.b\.col"):
        verify_shard(prefix, full=True, advance=seen.append)
    assert seen == []
    assert len(os.listdir("/proc/self/fd")) <= open_before
