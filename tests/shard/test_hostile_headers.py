"""False headers with corrected checksums: extreme counts, swapped bytes, truncation, flipped bits."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import Files, read_everything
from fuzz.repair import field_of, put_field, repair_header, repair_shard
from sample_packs import assert_holds, demo_samples, five_files, write_samples

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import (
    CorruptShardError,
    FormatError,
    SFTIndexError,
    ShardNotFoundError,
    UnsupportedVersionError,
)
from megatron_sft_idx.layout.files import FIELDS, SUFFIXES
from megatron_sft_idx.shard import Shard, read_header

# The first two fields determine how the rest is read; test_format.py tests them.
NUMBERS = [field.name for field in FIELDS if field.format in "BIQq" and field.name not in ("version", "header_nbytes")]
EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**56, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
# A reader does not need these fields to find the data, and cannot check them against sizes.
FREE = {"num_trained_tokens", "num_masked_packs", "longest_pack", "most_sequences"}
FREE |= {"capacity", "pad_id", "sequence_multiple", "flags"}
DATA = [f"{name}_nbytes" for name in ("tokens", "loss", "idx", "starts")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Files:
    prefix = tmp_path_factory.mktemp("whole") / "x"
    write_samples(prefix, demo_samples(), metadata={"tokenizer": "demo"})
    return five_files(prefix)


def put(folder: Path, files: Files) -> str:
    prefix = str(folder / "x")
    for suffix, data in files.items():
        Path(prefix + suffix).write_bytes(data)
    return prefix


def is_refused(prefix: str) -> bool:
    """Return whether opening is an error, which verification must report too.

    Otherwise check that reads stay in bounds.
    """
    report = verify_shard(prefix, full=True)
    assert verify_shard(prefix).ok or not report.ok
    try:
        shards = [Shard(prefix), Shard(prefix, backend="pread")]
    except SFTIndexError as error:
        assert str(error).startswith(prefix)  # noqa: PT017
        assert not report.ok
        return True
    assert read_everything(shards[0]) == read_everything(shards[1])
    return False


def lying(whole: Files, **fields: int) -> bytes:
    raw = bytearray(whole[".seq.idx"])
    for name, value in fields.items():
        nbytes = struct.calcsize("<" + next(field.format for field in FIELDS if field.name == name))
        kept = value % 2 ** (8 * nbytes)
        put_field(raw, name, kept - 2**64 if name == "pad_id" and kept >= 2**63 else kept)
    return repair_header(bytes(raw))


@pytest.mark.parametrize("value", EXTREMES)
def test_every_number_of_the_header_at_its_extremes(tmp_path: Path, whole: Files, value: int) -> None:
    for name in NUMBERS:
        raw = lying(whole, **{name: value})
        prefix = put(tmp_path, {**whole, ".seq.idx": raw})
        assert is_refused(prefix) or name in FREE or raw == whole[".seq.idx"], name


@pytest.mark.parametrize("value", EXTREMES[5:])
def test_counts_and_sizes_that_agree_on_a_lie(tmp_path: Path, whole: Files, value: int) -> None:
    """Sums of such counts overflow 64 bits if a reader computes sizes before it checks the limit."""
    counts = {"num_packs": value, "num_sequences": value, "num_tokens": value, "num_trained_tokens": 0}
    widths = dict(zip(DATA, (4, 1, 20, 4), strict=True))
    sizes = {name: value * width + (42 if name == "idx_nbytes" else 0) for name, width in widths.items()}
    for lie in (counts, counts | sizes, counts | dict.fromkeys(DATA, 0)):
        assert is_refused(put(tmp_path, {**whole, ".seq.idx": lying(whole, **lie)}))


def test_bytes_swapped_as_a_big_endian_writer_would(tmp_path: Path, whole: Files) -> None:
    good = whole[".seq.idx"]
    for field in FIELDS:
        if field.format == "B" or field.name not in NUMBERS:
            continue
        raw = bytearray(good)
        end = field.offset + struct.calcsize("<" + field.format)
        raw[field.offset : end] = raw[field.offset : end][::-1]
        refused = is_refused(put(tmp_path, {**whole, ".seq.idx": repair_header(bytes(raw))}))
        assert refused or field.name in FREE or raw == good, field.name
    raw = bytearray(good)
    raw[8:12] = raw[8:12][::-1]
    with pytest.raises(UnsupportedVersionError, match="version 16777216, but this package reads 1"):
        Shard(put(tmp_path, {**whole, ".seq.idx": bytes(raw)}))


def test_a_later_version_is_refused_whatever_else_it_says(tmp_path: Path, whole: Files) -> None:
    for version in (2, 255, 2**31, 2**32 - 1):
        raw = whole[".seq.idx"][:8] + struct.pack("<I", version) + os.urandom(400)
        with pytest.raises(UnsupportedVersionError, match=rf"version {version}, but this package reads 1.*upgrade"):
            Shard(put(tmp_path, {**whole, ".seq.idx": raw}))


def test_cut_at_every_byte(tmp_path: Path, whole: Files) -> None:
    for suffix in SUFFIXES:
        prefix = put(tmp_path, whole)
        for size in reversed(range(len(whole[suffix]))):
            os.truncate(prefix + suffix, size)
            with pytest.raises(FormatError) as caught:
                Shard(prefix)
            assert str(caught.value).startswith(prefix + suffix)


def test_every_bit_of_the_header_flipped(tmp_path: Path, whole: Files) -> None:
    good = whole[".seq.idx"]
    prefix = put(tmp_path, whole)
    for bit in range(8 * field_of(good, "header_nbytes")):
        raw = bytearray(good)
        raw[bit // 8] ^= 1 << bit % 8
        Path(prefix + ".seq.idx").write_bytes(raw)
        with pytest.raises(FormatError):
            Shard(prefix)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_bit_of_every_file_flipped(tmp_path: Path, whole: Files, suffix: str) -> None:
    prefix = put(tmp_path, whole)
    for bit in range(8 * len(whole[suffix])):
        raw = bytearray(whole[suffix])
        raw[bit // 8] ^= 1 << bit % 8
        Path(prefix + suffix).write_bytes(raw)
        is_refused(prefix)
        assert not verify_shard(prefix, full=True).ok


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_in_the_place_of_another(tmp_path: Path, whole: Files, suffix: str) -> None:
    for other in SUFFIXES:
        if other != suffix:
            assert is_refused(put(tmp_path, {**whole, suffix: whole[other]})), other


@pytest.mark.parametrize("suffix", [".bin", ".loss.bin", ".seq.bin", ".seq.idx"])
def test_a_file_that_shrinks_while_it_is_open_is_an_error_and_not_garbage(
    tmp_path: Path, whole: Files, suffix: str
) -> None:
    packs = demo_samples()
    prefix = put(tmp_path, whole)
    shard = Shard(prefix, backend="pread")
    last = len(shard) - 1
    os.truncate(prefix + suffix, len(whole[suffix]) - 1)
    reads: list[Any] = [lambda: shard[last], lambda: shard.sequences(last), lambda: list(shard)]
    reads += {
        ".bin": [lambda: shard.get(last)],
        ".seq.idx": [lambda: shard.get(last), lambda: shard.token_offsets, shard.files.check_ends],
        ".seq.bin": [shard.sequence_bounds],
    }.get(suffix, [])
    for read in reads:
        with pytest.raises(CorruptShardError, match=r"cut short.*F2") as caught:
            read()
        assert caught.value.path == prefix + suffix
        assert caught.value.offset == len(whole[suffix]) - 1
    put(tmp_path, whole)
    assert_holds(shard, packs)


def test_the_repair_of_a_good_shard_changes_nothing(whole: Files) -> None:
    assert repair_shard(whole) == whole


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_missing_and_never_waited_for(
    tmp_path: Path, suffix: str, put: Callable[[Path], None]
) -> None:
    write_samples(tmp_path / "x", demo_samples())
    (tmp_path / f"x{suffix}").unlink()
    put(tmp_path / f"x{suffix}")
    for opened in (Shard, read_header) if suffix == ".seq.idx" else (Shard,):
        with pytest.raises(ShardNotFoundError, match=re.escape(f"missing {tmp_path}/x{suffix} ")):
            opened(tmp_path / "x")
