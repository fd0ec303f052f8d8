"""Each index lost or damaged in turn and brought back; what cannot be derived is refused by name."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import command, preprocess
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from packs import (
    WHOLE,
    Sample,
    assert_holds,
    demo_samples,
    five_files,
    folder_of,
    sample_of,
    samples,
    write_samples,
)

from megatron_sft_idx import SFTIndexedDataset
from megatron_sft_idx.errors import FormatError, ShardNotFoundError, UnsupportedVersionError
from megatron_sft_idx.layout import FIELDS, Header
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.rebuild import Known, rebuild
from megatron_sft_idx.shard import Shard

OFFSETS = {field.name: field.offset for field in FIELDS}
METADATA = {"tokenizer": "demo", "text": "ünïcode"}


def small(prefix: Path, packs: list[Sample] | None = None, **options: Any) -> dict[str, bytes]:
    """A shard with something in every field of its header; its files."""
    defaults = {"capacity": 64, "sequence_multiple": 2, "pad_id": 7, "metadata": METADATA}
    write_samples(prefix, demo_samples() if packs is None else packs, **{**defaults, **options})
    return five_files(prefix)


def damage(path: str | os.PathLike[str], offset: int, flip: int = 0xFF) -> None:
    raw = bytearray(Path(path).read_bytes())
    raw[offset] ^= flip
    Path(path).write_bytes(raw)


def assert_same_but_for_json(found: Header, expected: Header) -> None:
    for name in (
        *("num_packs", "num_sequences", "num_tokens", "num_trained_tokens", "num_masked_packs", "token_dtype"),
        *("mask_dtype", "longest_pack", "most_sequences", "digests", "shard_id", "arrays_checksum"),
    ):
        assert getattr(found, name) == getattr(expected, name), name


# ---- one index lost ----


@pytest.mark.parametrize("lost", [".idx", ".seq.idx"])
def test_a_lost_index_of_a_preprocessed_shard_comes_back(tmp_path: Path, lost: str) -> None:
    assert preprocess(tmp_path / "x").code == 0
    before, header = five_files(tmp_path / "x"), Shard(tmp_path / "x").header
    packs = [pack["input_ids"].tolist() for pack in Shard(tmp_path / "x")]
    os.unlink(tmp_path / f"x{lost}")
    assert command("rebuild", tmp_path / "x").code == 0
    after, shard = five_files(tmp_path / "x"), Shard(tmp_path / "x")
    assert {suffix for suffix in SUFFIXES if after[suffix] != before[suffix]} == ({lost} - {".idx"})
    assert_same_but_for_json(shard.header, header)
    assert [pack["input_ids"].tolist() for pack in SFTIndexedDataset(str(tmp_path / "x"))] == packs
    assert shard.header.rebuilt == (lost == ".seq.idx")
    assert folder_of(tmp_path) == WHOLE


def test_a_rebuilt_header_says_what_is_no_longer_known(tmp_path: Path) -> None:
    small(tmp_path / "x")
    old = Shard(tmp_path / "x").header
    os.unlink(tmp_path / "x.seq.idx")
    rebuild(tmp_path / "x")
    header = Shard(tmp_path / "x").header
    assert header.rebuilt
    assert (header.capacity, header.sequence_multiple, header.pad_id) == (header.longest_pack, 1, None)
    unknown = ["capacity", "metadata", "pad_id", "sequence_multiple"]
    assert header.metadata == {"format_writer": 1, "rebuilt": {"pack_lengths": ".idx", "unknown": unknown}}

    os.unlink(tmp_path / "x.seq.idx")
    rebuild(tmp_path / "x", Known(capacity=64, sequence_multiple=2, pad_id=7))
    header = Shard(tmp_path / "x").header
    assert (header.capacity, header.sequence_multiple, header.pad_id) == (64, 2, 7)
    assert header.metadata["rebuilt"]["unknown"] == ["metadata"]
    assert_same_but_for_json(header, old)


KINDS = [(np.uint16, False), (np.int32, False), (np.uint16, True), (np.int32, True)]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS), lost=st.sampled_from([".idx", ".seq.idx"]))
def test_any_shard_survives_the_loss_of_an_index(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: tuple[Any, bool], lost: str
) -> None:
    (token_dtype, weights), prefix = kind, tmp_path_factory.mktemp("any") / "x"
    packs = data.draw(samples(token_dtype=token_dtype, weights=weights))
    mask_dtype = np.dtype(np.float32 if weights else np.uint8)
    before = small(prefix, packs, token_dtype=token_dtype, mask_dtype=mask_dtype)
    header = Shard(prefix).header
    os.unlink(f"{prefix}{lost}")
    known = Known(capacity=64, sequence_multiple=2, pad_id=7, mask_dtype=None if packs else mask_dtype)
    assert rebuild(prefix, known).whole
    after, shard = five_files(prefix), Shard(prefix)
    assert_holds(shard, packs)
    assert_same_but_for_json(shard.header, header)
    assert (shard.header.capacity, shard.header.sequence_multiple, shard.header.pad_id) == (64, 2, 7)
    assert after[".idx"] == before[".idx"]
    assert after[".seq.idx"][shard.header.nbytes :] == before[".seq.idx"][header.nbytes :]
    assert lost == ".seq.idx" or after == before


def test_an_empty_shard_does_not_say_what_its_masks_are(tmp_path: Path) -> None:
    small(tmp_path / "x", [])
    os.unlink(tmp_path / "x.seq.idx")
    with pytest.raises(FormatError, match=r"says nothing of their dtypes; pass --token-dtype and --mask-dtype"):
        rebuild(tmp_path / "x")


def test_an_index_that_megatron_itself_wrote_will_do(tmp_path: Path) -> None:
    before = small(tmp_path / "x", token_dtype=np.uint16)
    stock = IndexedDatasetBuilder(str(tmp_path / "stock.bin"), np.uint16)
    for sample in demo_samples():
        stock.add_document(np.array(sample.tokens), [len(sample.tokens)])
    stock.finalize(str(tmp_path / "x.idx"))
    os.unlink(tmp_path / "x.seq.idx")
    rebuild(tmp_path / "x")
    assert (tmp_path / "x.idx").read_bytes() == before[".idx"]
    assert_holds(Shard(tmp_path / "x"), demo_samples())


def test_an_index_with_other_documents_gives_lengths_and_is_written_anew(tmp_path: Path) -> None:
    before = small(tmp_path / "x", token_dtype=np.uint16)
    stock = IndexedDatasetBuilder(str(tmp_path / "stock.bin"), np.uint16)
    for sample in demo_samples():
        stock.add_item(torch.tensor(sample.tokens))
    stock.end_document()
    stock.finalize(str(tmp_path / "x.idx"))
    os.unlink(tmp_path / "x.seq.idx")
    report = rebuild(tmp_path / "x")
    assert report.kept == (f"{tmp_path}/x.idx.damaged",)
    assert (tmp_path / "x.idx").read_bytes() == before[".idx"]
    assert_holds(Shard(tmp_path / "x"), demo_samples())


# ---- an index damaged in places ----


@settings(max_examples=120, deadline=None)
@given(suffix=st.sampled_from([".idx", ".seq.idx"]), place=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_one_flipped_bit_of_an_index_is_undone_exactly(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, place: int, bit: int
) -> None:
    prefix = tmp_path_factory.mktemp("flip") / "x"
    before = small(prefix, demo_samples(3))
    damage(f"{prefix}{suffix}", place % len(before[suffix]), 1 << bit)
    report = rebuild(prefix)
    assert five_files(prefix) == before
    assert [file.path for file in report.files if file.state == "rebuilt"] == [f"{prefix}{suffix}"]
    assert report.kept == (f"{prefix}{suffix}.damaged",)
    assert Path(report.kept[0]).stat().st_size == len(before[suffix])


@pytest.mark.parametrize("also_idx", [False, True])
@pytest.mark.parametrize(
    ("first", "size"),
    [
        (OFFSETS["magic"], 12),
        (OFFSETS["header_nbytes"], 4),
        (OFFSETS["shard_id"], 16),
        (OFFSETS["num_packs"], 40),
        (OFFSETS["tokens_nbytes"], 24),
        (OFFSETS["json_nbytes"], 4),
        (OFFSETS["reserved"], 40),
    ],
)
def test_header_fields_that_follow_from_the_data_are_filled_in_and_the_rest_is_proven(
    tmp_path: Path, first: int, size: int, also_idx: bool
) -> None:
    before = small(tmp_path / "x")
    for offset in range(first, first + size):
        damage(tmp_path / "x.seq.idx", offset)
    if also_idx:
        os.unlink(tmp_path / "x.idx")
    rebuild(tmp_path / "x")
    assert five_files(tmp_path / "x") == before


@pytest.mark.parametrize("field", ["capacity", "sequence_multiple", "pad_id", "checksum", "json"])
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
    unproven = header.metadata["rebuilt"].get("unproven")
    if field == "json":
        assert unproven is None
    else:
        assert unproven["metadata"] == {**METADATA, "format_writer": 1}
    if field == "checksum":
        assert [unproven[name] for name in ("capacity", "sequence_multiple", "pad_id")] == [64, 2, 7]


def test_options_that_contradict_a_proven_header_are_refused(tmp_path: Path) -> None:
    small(tmp_path / "x")
    damage(tmp_path / "x.seq.idx", OFFSETS["num_packs"])
    with pytest.raises(FormatError, match=r"proves capacity 64, --capacity is 99; leave the option out"):
        rebuild(tmp_path / "x", Known(capacity=99))


@pytest.mark.parametrize("cut", [0, 1, 100, 300, 330, 400])
def test_a_seq_idx_cut_short_is_replaced(tmp_path: Path, cut: int) -> None:
    before = small(tmp_path / "x")
    nbytes = Shard(tmp_path / "x").header.nbytes
    os.truncate(tmp_path / "x.seq.idx", cut)
    rebuild(tmp_path / "x")
    assert_holds(Shard(tmp_path / "x"), demo_samples())
    assert (five_files(tmp_path / "x") == before) == (cut >= nbytes)


def test_a_good_header_brings_back_both_indexes_without_either(tmp_path: Path) -> None:
    """Its arrays are gone and so is ``.idx``: lengths by the end-of-sequence id, proven by the header's checksum."""
    packs = [sample_of([3, 2], lambda p: int(p == 0), lambda p: 9 if p in (2, 4) else 1) for _ in range(5)]
    before = small(tmp_path / "x", packs)
    os.truncate(tmp_path / "x.seq.idx", Shard(tmp_path / "x").header.nbytes)
    os.unlink(tmp_path / "x.idx")
    assert not rebuild(tmp_path / "x").whole
    assert rebuild(tmp_path / "x", Known(eod_id=9)).whole
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


# ---- data files ----


@pytest.mark.parametrize("suffix", [".bin", ".loss.bin"])
@pytest.mark.parametrize("lost", [False, True])
def test_tokens_and_masks_cannot_be_derived_but_the_rest_is(tmp_path: Path, suffix: str, lost: bool) -> None:
    before = small(tmp_path / "x")
    path = tmp_path / f"x{suffix}"
    os.unlink(path) if lost else damage(path, 3)
    os.unlink(tmp_path / "x.idx")
    report = rebuild(tmp_path / "x")
    assert not report.whole
    assert (tmp_path / "x.idx").read_bytes() == before[".idx"]
    assert [file.path for file in report.files if file.state == "lost"] == [str(path)]
    outcome = command("rebuild", tmp_path / "x")
    assert outcome.code == 1
    assert "cannot be derived; restore it from a copy" in outcome.out


def test_starts_of_an_unpacked_shard_are_zeros(tmp_path: Path) -> None:
    packs = [sample_of([1 + i % 4], lambda p: 1, lambda p: p) for i in range(9)]
    before = small(tmp_path / "x", packs)
    os.unlink(tmp_path / "x.seq.bin")
    assert rebuild(tmp_path / "x").whole
    assert five_files(tmp_path / "x") == before


@pytest.mark.parametrize("inside", [False, True])
def test_starts_of_packs_follow_the_end_of_sequence_ids_if_the_checksum_agrees(tmp_path: Path, inside: bool) -> None:
    lengths, ends = [3, 1, 4], {2, 3, 7} | ({5} if inside else set())
    packs = [sample_of(lengths, lambda p: 0, lambda p: 9 if p in ends else p) for _ in range(4)]
    before = small(tmp_path / "x", packs)
    damage(tmp_path / "x.seq.bin", 5)
    damaged = (tmp_path / "x.seq.bin").read_bytes()
    assert not rebuild(tmp_path / "x").whole
    report = rebuild(tmp_path / "x", Known(eod_id=9))
    assert report.whole != inside
    assert (tmp_path / "x.seq.bin").read_bytes() == (damaged if inside else before[".seq.bin"])
    assert inside or Path(report.kept[0]).read_bytes() == damaged


@pytest.mark.parametrize("suffix", [".bin", ".loss.bin", ".seq.bin"])
def test_without_a_header_all_three_data_files_are_needed(tmp_path: Path, suffix: str) -> None:
    small(tmp_path / "x")
    os.unlink(tmp_path / "x.seq.idx")
    os.unlink(tmp_path / f"x{suffix}")
    before = folder_of(tmp_path)
    with pytest.raises(FormatError, match=rf"no good .seq.idx, and .*x{suffix} is missing: .* restore it from a copy"):
        rebuild(tmp_path / "x")
    assert folder_of(tmp_path) == before


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda p: os.truncate(f"{p}.bin", 9), r"do not go together|\.bin has 9"),
        (lambda p: os.truncate(f"{p}.loss.bin", 9), "do not go together"),
        (lambda p: os.truncate(f"{p}.seq.bin", 9), "starts have 4 each"),
        (lambda p: os.truncate(f"{p}.seq.bin", 8), "packs begin here"),
        (lambda p: damage(f"{p}.seq.bin", 0), "the first start is 255"),
        (lambda p: damage(f"{p}.seq.bin", 11), "pack 1: sequence 1 starts at"),
        (lambda p: damage(f"{p}.loss.bin", 3), r"pack 1: position 2 has loss mask 255.*rule P7"),
        (lambda p: damage(f"{p}.bin", 3), r"pack 0: position 0 has id .*rule P8"),
    ],
)
def test_data_that_breaks_a_rule_gets_no_index(tmp_path: Path, break_it: Callable[[str], None], message: str) -> None:
    small(tmp_path / "x")
    os.unlink(tmp_path / "x.seq.idx")
    break_it(f"{tmp_path}/x")
    before = folder_of(tmp_path)
    with pytest.raises(FormatError, match=message):
        rebuild(tmp_path / "x")
    assert folder_of(tmp_path) == before


# ---- hostile .idx ----


def hostile(raw: bytearray, offset: int, code: str, value: int) -> bytes:
    struct.pack_into("<" + code, raw, offset, value)
    return bytes(raw)


@pytest.mark.parametrize(
    ("offset", "code", "value", "message"),
    [
        (0, "B", 0x4E, "not Megatron's index of version 1"),
        (9, "Q", 2, "not Megatron's index of version 1"),
        (17, "B", 5, "dtype code 5, expected 4"),
        (18, "Q", 2**63 - 1, "9223372036854775807 packs"),
        (26, "Q", 2**64 - 1, "documents take"),
        (18, "Q", 6, "6 packs and 8 documents"),
        (34, "i", 0, "pack 0 has length 0"),
        (38, "i", -5, "pack 1 has length -5"),
        (34, "i", 2, "pack 1 begins at byte 4, by the lengths before it at 8"),
        (34 + 28 + 8, "q", -8, "pack 1 begins at byte -8"),
        (34 + 28 + 16, "q", 2**62, "pack 2 begins at byte"),
        (34 + 24, "i", 2**31 - 1, r"bytes in all, .bin has .*rule F2"),
    ],
)
def test_a_hostile_idx_is_refused(tmp_path: Path, offset: int, code: str, value: int, message: str) -> None:
    before = small(tmp_path / "x")
    os.unlink(tmp_path / "x.seq.idx")
    (tmp_path / "x.idx").write_bytes(hostile(bytearray(before[".idx"]), offset, code, value))
    with pytest.raises(FormatError, match=message):
        rebuild(tmp_path / "x")


@settings(max_examples=100, deadline=None)
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


# ---- nothing at all ----


def test_a_good_shard_is_left_alone(tmp_path: Path) -> None:
    before = small(tmp_path / "x")
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in WHOLE}
    outcome = command("rebuild", f"{tmp_path}/x.seq.idx")
    assert (outcome.code, "nothing to do" in outcome.out) == (0, True)
    assert folder_of(tmp_path) == WHOLE
    assert five_files(tmp_path / "x") == before
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in WHOLE} == times


def test_nothing_gives_nothing(tmp_path: Path) -> None:
    with pytest.raises(ShardNotFoundError, match="nothing to rebuild from"):
        rebuild(tmp_path / "x")
    assert folder_of(tmp_path) == []
    (tmp_path / "y.bin").mkdir()
    with pytest.raises(FormatError, match="not a file"):
        rebuild(tmp_path / "y")


def test_the_script_is_the_verb(tmp_path: Path) -> None:
    import runpy
    import sys

    small(tmp_path / "x")
    os.unlink(tmp_path / "x.idx")
    argv, sys.argv = sys.argv, ["rebuild_index.py", f"{tmp_path}/x"]
    try:
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(Path(__file__).parent.parent / "tools/rebuild_index.py"), run_name="__main__")
    finally:
        sys.argv = argv
    assert leaving.value.code == 0
    assert Shard(tmp_path / "x")
