"""Rebuild indexes with local damage: contents proven by a checksum are restored exactly, hostile ones are rejected."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rebuilding import OFFSETS, assert_same_but_for_json, damage, small
from reseal import put, reseal
from sample_packs import assert_holds, demo_samples, five_files, sample_of

from megatron_sft_idx.check import GivenFacts, rebuild
from megatron_sft_idx.errors import CorruptShardError, FormatError, UnsupportedVersionError
from megatron_sft_idx.shard import Shard

# ---- a wrongly written index ----


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_checksums_vouch_for_is_still_held_to_the_rules(tmp_path: Path, dry_run: bool) -> None:
    wrong = small(tmp_path / "x")
    wrong[".idx"] = wrong[".idx"][:-1] + b"\x01"
    put(tmp_path, reseal(wrong))
    before = five_files(tmp_path / "x")
    with pytest.raises(FormatError, match=r"matches the header, but .* \(rule I1\); move .*seq\.idx away"):
        rebuild(tmp_path / "x", dry_run=dry_run)
    assert five_files(tmp_path / "x") == before
    os.rename(tmp_path / "x.seq.idx", tmp_path / "away")
    assert rebuild(tmp_path / "x").whole


@pytest.mark.parametrize("dry_run", [True, False])
def test_no_index_makes_a_shard_readable_that_was_written_wrong(tmp_path: Path, dry_run: bool) -> None:
    wrong = small(tmp_path / "x")
    wrong[".loss.bin"] = wrong[".loss.bin"][:-1] + b"\x01"
    put(tmp_path, reseal(wrong))
    os.unlink(tmp_path / "x.idx")
    with pytest.raises(FormatError, match=r"every good file matches the header, but .* \(rule H9\)"):
        rebuild(tmp_path / "x", dry_run=dry_run)
    assert not os.path.lexists(tmp_path / "x.idx")


def test_no_other_file_does_either(tmp_path: Path) -> None:
    wrong = small(tmp_path / "x", [sample_of([5], lambda _: 0, lambda p: p)] * 2)
    wrong[".loss.bin"] = wrong[".loss.bin"][:-1] + b"\x01"
    put(tmp_path, reseal(wrong))
    for suffix in (".idx", ".seq.bin"):  # both follow from the header: one sequence per pack
        os.unlink(f"{tmp_path}/x{suffix}")
    left = sorted(os.listdir(tmp_path))
    with pytest.raises(FormatError, match=r"every file could be restored to match the header, but rules are broken"):
        rebuild(tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == left


def test_starts_that_descend_are_refused_before_packs_are_placed_by_them(tmp_path: Path) -> None:
    small(tmp_path / "x", [sample_of([2, 3, 2], lambda _: 0, lambda p: p)] * 2)
    starts = np.array([0, 40000, 5, 0, 2, 5], "<u4")
    (tmp_path / "x.seq.bin").write_bytes(starts.tobytes())
    for suffix in (".idx", ".seq.idx"):
        os.unlink(tmp_path / f"x{suffix}")
    with pytest.raises(CorruptShardError, match=r"x\.seq\.bin: .*start 5 follows start 40000.* or 0"):
        rebuild(tmp_path / "x")


# ---- an index damaged in places ----


@settings(max_examples=60, deadline=None)
@given(suffix=st.sampled_from([".idx", ".seq.idx"]), place=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_one_flipped_bit_of_an_index_is_undone(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, place: int, bit: int
) -> None:
    prefix = tmp_path_factory.mktemp("flip") / "x"
    before = small(prefix, demo_samples(3))
    old, place = Shard(prefix).header, place % len(before[suffix])
    damage(f"{prefix}{suffix}", place, 1 << bit)
    if suffix == ".seq.idx" and OFFSETS["version"] <= place < OFFSETS["version"] + 4:
        with pytest.raises(UnsupportedVersionError):
            rebuild(prefix)
        return
    report = rebuild(prefix)
    if suffix == ".seq.idx" and place < old.nbytes:
        assert_same_but_for_json(Shard(prefix).header, old)
        assert_holds(Shard(prefix), demo_samples(3))
    else:
        assert five_files(prefix) == before
    assert [file.path for file in report.files if file.state == "rebuilt"] == [f"{prefix}{suffix}"]
    assert report.kept == (f"{prefix}{suffix}.damaged",)
    assert Path(report.kept[0]).stat().st_size == len(before[suffix])


@pytest.mark.parametrize("field", ["num_packs", "shard_id", "capacity", "pad_id", "json_nbytes", "checksum", "json"])
def test_what_only_the_header_knew_is_not_believed_without_its_checksum(tmp_path: Path, field: str) -> None:
    small(tmp_path / "x")
    old = Shard(tmp_path / "x").header
    first = {"checksum": old.nbytes - 16, "json": 257}.get(field) or OFFSETS[field]
    for offset in range(first, first + 4):
        damage(tmp_path / "x.seq.idx", offset)
    rebuild(tmp_path / "x")
    header = Shard(tmp_path / "x").header
    assert header.rebuilt
    assert (header.capacity, header.sequence_multiple, header.pad_id) == (header.longest_pack, 1, None)
    assert_same_but_for_json(header, old)


@pytest.mark.parametrize("cut", [0, 1, 100, 300, 330, 400])
def test_a_seq_idx_cut_short_is_replaced(tmp_path: Path, cut: int) -> None:
    before = small(tmp_path / "x")
    nbytes = Shard(tmp_path / "x").header.nbytes
    os.truncate(tmp_path / "x.seq.idx", cut)
    rebuild(tmp_path / "x")
    assert_holds(Shard(tmp_path / "x"), demo_samples())
    assert (five_files(tmp_path / "x") == before) == (cut >= nbytes)


def test_a_good_header_brings_back_both_indexes_without_either(tmp_path: Path) -> None:
    """Its arrays and ``.idx`` are lost. Lengths follow from the end-of-sequence id, proven by the header's checksum."""
    packs = [sample_of([3, 2], lambda p: int(p == 0), lambda p: 9 if p in (2, 4) else 1) for _ in range(5)]
    before = small(tmp_path / "x", packs)
    os.truncate(tmp_path / "x.seq.idx", Shard(tmp_path / "x").header.nbytes)
    os.unlink(tmp_path / "x.idx")
    assert not rebuild(tmp_path / "x").whole
    assert rebuild(tmp_path / "x", GivenFacts(eod_id=9)).whole
    assert five_files(tmp_path / "x") == before


def test_a_later_version_is_not_taken_for_damage(tmp_path: Path) -> None:
    small(tmp_path / "x")
    raw = bytearray((tmp_path / "x.seq.idx").read_bytes())
    struct.pack_into("<I", raw, OFFSETS["version"], 2)
    raw[240:300] = os.urandom(60)
    (tmp_path / "x.seq.idx").write_bytes(raw)
    with pytest.raises(UnsupportedVersionError):
        rebuild(tmp_path / "x")
    assert (tmp_path / "x.seq.idx").read_bytes() == raw


# ---- hostile .idx ----


def hostile(raw: bytearray, offset: int, code: str, value: int) -> bytes:
    struct.pack_into("<" + code, raw, offset, value)
    return bytes(raw)


@pytest.mark.parametrize(
    ("offset", "code", "value", "message"),
    [
        (0, "B", 0x4E, "not a Megatron index of version 1"),
        (9, "Q", 2, "not a Megatron index of version 1"),
        (17, "B", 5, "dtype code 5, expected 4"),
        (18, "Q", 2**63 - 1, "9223372036854775807 packs"),
        (26, "Q", 2**64 - 1, "documents has"),
        (18, "Q", 6, "6 packs and 8 documents"),
        (34, "i", 0, "pack 0 has length 0"),
        (38, "i", -5, "pack 1 has length -5"),
        (34, "i", 2, "pack 1 begins at byte 4, expected 8 from the lengths before it"),
        (34 + 28 + 8, "q", -8, "pack 1 begins at byte -8"),
        (34 + 28 + 16, "q", 2**62, "pack 2 begins at byte"),
        (34 + 24, "i", 2**31 - 1, r"bytes in total, but .bin has .*rule F2"),
    ],
)
def test_a_hostile_idx_is_refused(tmp_path: Path, offset: int, code: str, value: int, message: str) -> None:
    before = small(tmp_path / "x")
    os.unlink(tmp_path / "x.seq.idx")
    (tmp_path / "x.idx").write_bytes(hostile(bytearray(before[".idx"]), offset, code, value))
    with pytest.raises(FormatError, match=message):
        rebuild(tmp_path / "x")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_damage_to_both_indexes_gives_other_packs_or_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    prefix = tmp_path_factory.mktemp("both") / "x"
    packs = demo_samples(3)
    before = small(prefix, packs)
    for suffix in (".idx", ".seq.idx"):
        raw = bytearray(before[suffix])
        for _ in range(data.draw(st.integers(0, 6))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        Path(f"{prefix}{suffix}").write_bytes(raw[: data.draw(st.integers(len(raw) - 40, len(raw)))])
    try:
        whole = rebuild(prefix).whole
    except FormatError:
        return
    if whole:
        assert five_files(prefix)[".idx"] == before[".idx"]
        assert_holds(Shard(prefix), packs)
