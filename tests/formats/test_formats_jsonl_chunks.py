"""Packed JSONL chunks, written by this package and by other producers."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_trips import any_packs, assert_reads, run_of, spec_of, write_packs
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_packs import Sample, assert_is, demo_samples, folder_of, sample_of

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats import jsonl_chunks
from megatron_sft_idx.formats.jsonl_chunks import Reader, Writer, line_bounds, recognise


def produced(pack: Sample, **changes: Any) -> dict[str, Any]:
    """Return a pack in a producer's form: concatenated sequences, and a label for each trained token."""
    lengths = [b - a for a, b in pairwise(pack.bounds)]
    row = {
        "input_ids": pack.tokens,
        "labels": [token if value else -100 for token, value in zip(pack.tokens, pack.mask, strict=True)],
        "position_ids": [p for length in lengths for p in range(length)],
        "lengths": lengths,
        "pack_length": len(pack.tokens),
        "num_samples": len(lengths),
    }
    return {**row, **changes}


def write_chunk(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    return path


def write_chunks(folder: Path, packs: Sequence[Sample], size: int, first: int = 0) -> Path:
    for number, start in enumerate(range(0, len(packs), size), first):
        write_chunk(folder / f"chunk_{number:05d}.jsonl", [produced(p) for p in packs[start : start + size]])
    return folder


# ---- trips ----


@given(any_packs(), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_packs_come_back(packs: list[Sample], pieces: int, chunk: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "x")
        write_packs(Writer, folder, packs, pieces=pieces, samples_per_chunk=chunk)
        assert len(folder_of(folder)) == max(1, -(-len(packs) // chunk))
        reader = Reader(folder)
        assert_reads(reader, packs)
        assert reader.notes == []


@given(any_packs())
@settings(max_examples=25, deadline=None)
def test_lines_are_those_of_a_producer(packs: list[Sample]) -> None:
    """The exception is labels of first tokens, which a label-aligned mask cannot represent."""
    with tempfile.TemporaryDirectory() as scratch:
        write_packs(Writer, Path(scratch, "x"), packs, samples_per_chunk=1000)
        lines = Path(scratch, "x", "chunk_00000.jsonl").read_text().splitlines()
    assert len(lines) == len(packs)
    for line, pack in zip(lines, packs, strict=True):
        expected = produced(pack)
        for start in pack.starts:
            expected["labels"][start] = -100
        assert json.loads(line) == expected
        assert list(json.loads(line)) == list(expected)


def test_same_packs_same_bytes(tmp_path: Path) -> None:
    packs = demo_samples(23)
    for pieces in (1, 2, 23):
        write_packs(Writer, tmp_path / f"{pieces}", packs, pieces=pieces, samples_per_chunk=5)
    assert folder_of(tmp_path / "1") == [f"chunk_{i:05d}.jsonl" for i in range(5)]
    for name in folder_of(tmp_path / "1"):
        assert len({(tmp_path / f"{pieces}" / name).read_bytes() for pieces in (1, 2, 23)}) == 1, name


# ---- folders of other programs ----


def test_a_producers_folder(tmp_path: Path) -> None:
    packs = demo_samples(10)
    folder = write_chunks(tmp_path / "x", packs, 3)
    (folder / "chunk_00000.jsonl.completed").touch()
    (folder / "chunk_00004.jsonl.tmp").write_text("half")
    reader = Reader(folder)
    assert_reads(reader, packs)
    assert (reader.spec.capacity, reader.spec.pad_id) == (max(len(p.tokens) for p in packs), None)
    firsts = sum(p.mask[start] for p in packs for start in p.starts)
    assert [note.split()[0] for note in reader.notes] == [str(firsts)]
    assert "first token of a sequence" in reader.notes[0]
    assert_reads(Reader(folder / "chunk_00001.jsonl"), packs[3:6])


def test_chunks_go_by_number_past_99999(tmp_path: Path) -> None:
    packs = demo_samples(4)
    folder = write_chunks(tmp_path / "x", packs, 1, first=99_998)
    assert folder_of(folder)[0] == "chunk_100000.jsonl"
    reader = Reader(folder)
    assert_reads(reader, packs)
    assert reader.notes[0].startswith("chunks 0 to 99997 are missing: their producer")


def test_gaps_are_errors(tmp_path: Path) -> None:
    packs = demo_samples(8)
    folder = write_chunks(tmp_path / "x", packs, 1)
    for number in (2, 3, 6):
        (folder / f"chunk_{number:05d}.jsonl").unlink()
    with pytest.raises(FormatError, match="chunks 2 to 3, 6 are missing"):
        Reader(folder)


def test_a_name_that_could_be_there_twice_is_refused(tmp_path: Path) -> None:
    folder = write_chunks(tmp_path / "x", demo_samples(), 9)
    for name in ("chunk_1.jsonl", "chunk_000001.jsonl"):
        (folder / name).touch()
        with pytest.raises(FormatError, match=r"expected the name chunk_00001\.jsonl"):
            Reader(folder)
        (folder / name).unlink()


def test_fields_of_others_empty_lines_and_empty_chunks_are_passed_over(tmp_path: Path) -> None:
    packs = demo_samples(3)
    folder = tmp_path / "x"
    write_chunk(folder / "chunk_00000.jsonl", [])
    write_chunk(folder / "chunk_00001.jsonl", [produced(p, channel="a", images=None) for p in packs[:2]])
    with open(folder / "chunk_00001.jsonl", "a") as file:
        file.write("\n\n" + json.dumps(produced(packs[2])))  # complete, but without a newline
    assert_reads(Reader(folder), packs)
    assert recognise(str(folder))


def test_blank_lines_are_passed_over_whatever_they_are_made_of(tmp_path: Path) -> None:
    packs = demo_samples(3)
    lines = [json.dumps(produced(pack)) for pack in packs]
    (tmp_path / "chunk_00000.jsonl").write_bytes("\r\n\r\n".join(["  ", *lines, "\t", ""]).encode() + b"  ")
    reader = Reader(tmp_path)
    assert len(reader) == len(packs)
    assert_reads(reader, packs)


# ---- errors ----


def test_a_line_of_what_is_no_white_space_in_json_is_no_blank_line(tmp_path: Path) -> None:
    (tmp_path / "chunk_00000.jsonl").write_bytes(b"\v\n")
    with pytest.raises(SequenceError):
        list(Reader(tmp_path).runs())


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_lines_may_lie_across_the_blocks_they_are_found_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("megatron_sft_idx.formats.jsonl_chunks._BLOCK_NBYTES", block)
    raw = b"{}\n\n" + b"x" * (2 * 64 - 5) + b"\n" + b"y" * 6 + b"\n" + b'{"last":0}'
    (tmp_path / "x").write_bytes(raw)
    starts, stops = line_bounds(str(tmp_path / "x"))
    lines = [raw[a:b].rstrip() for a, b in zip(starts, stops, strict=True)]
    assert lines == [line for line in raw.split(b"\n") if line]


@pytest.mark.parametrize("cut", [1, 2, 30, 100])
def test_a_line_that_is_being_written_is_told(tmp_path: Path, cut: int) -> None:
    folder = write_chunks(tmp_path / "x", demo_samples(), 3)
    path = folder / "chunk_00002.jsonl"
    raw = path.read_bytes()
    path.write_bytes(raw + raw[:-1][:-cut])
    with pytest.raises(FormatError, match=r"chunk_00002\.jsonl:2: .*still being written, or its producer died"):
        Reader(folder)
    path.write_bytes(raw + bytes(100))
    with pytest.raises(FormatError, match="still being written"):
        Reader(folder)


def test_a_chunk_that_is_cut_short_under_a_reader_is_told(tmp_path: Path) -> None:
    folder = write_chunks(tmp_path / "x", demo_samples(), 9)
    reader = Reader(folder)
    (folder / "chunk_00000.jsonl").write_bytes(b"")
    with pytest.raises(FormatError, match="truncated"):
        reader.read(3)


PACK = sample_of([2, 1, 3], lambda p: p % 2, lambda p: p + 50)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pack_length": 5}, "pack_length is 5, but the sum of lengths is 6"),
        ({"pack_length": 6.0}, "pack_length is 6.0"),
        ({"num_samples": 2}, "num_samples is 2, but there are 3 lengths"),
        ({"num_samples": True}, "num_samples is True"),
        ({"lengths": [2, 1, 2]}, "input_ids has 6 entries, but the sum of lengths is 5"),
        ({"lengths": [2, 0, 4]}, "expected one or more sequences"),
        ({"lengths": []}, "expected one or more sequences"),
        ({"lengths": [2, -3, 7]}, "expected one or more sequences"),
        ({"lengths": [2**62, 2**62, 2**62]}, "expected one or more sequences"),
        ({"lengths": [2**63]}, "too large for an id or a length"),
        ({"labels": [-100] * 5}, "labels has 5 entries"),
        ({"labels": [-100, 51, -100, 53, -100, 56]}, r"labels\[5\] is 56, but input_ids\[5\] is 55"),
        ({"labels": [51, 52, 53, 54, 55, -100]}, "undo any shift"),
        ({"position_ids": [0, 1, 2, 3, 4, 5]}, r"position_ids\[2\] is 2, expected 0"),
        ({"position_ids": [[0, 1], 0, 0, 1, 2, 3]}, "position_ids is not a list of whole numbers"),
        ({"input_ids": [1.5] * 6}, "input_ids is not a list"),
        ({"input_ids": [True] * 6}, "input_ids is not a list"),
        ({"input_ids": "123456"}, "input_ids is not a list"),
        ({"input_ids": [2**64 - 1] * 6}, "too large for an id or a length"),
        ({"input_ids": [2**31, 51, 52, 53, 54, 55]}, "P8"),
        ({"input_ids": [-1, 51, 52, 53, 54, 55]}, "P8"),
    ],
)
def test_a_broken_pack_is_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    good = [produced(p) for p in demo_samples(3)]
    write_chunk(tmp_path / "x" / "chunk_00000.jsonl", good)
    write_chunk(tmp_path / "x" / "chunk_00001.jsonl", [*good, produced(PACK, **changes), *good])
    reader = Reader(tmp_path / "x")
    assert_is(reader.read(5), demo_samples(3)[2])
    with pytest.raises(SequenceError, match=reason) as caught:
        reader.read(6)
    assert caught.value.position == 6
    with pytest.raises(SequenceError, match=reason) as caught:
        list(reader.runs())
    assert caught.value.position == 6


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids", "lengths", "pack_length", "num_samples"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    row = produced(PACK)
    del row[name]
    path = write_chunk(tmp_path / "chunk_00000.jsonl", [row])
    with pytest.raises(SequenceError, match=f"{name} missing;"):
        Reader(path).read(0)
    assert not recognise(str(path))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1, 2]", "found list"),
        ('{"messages": []}', "preprocess"),
        ("nonsense", "invalid literal"),
        ("[" * 5000, "line 1|recursion"),
    ],
)
def test_other_lines_are_refused(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "chunk_00000.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(SequenceError, match=reason) as caught:
        Reader(path).read(0)
    assert "chunk_00000.jsonl, its pack 0" in str(caught.value)
    assert not recognise(str(path))
    assert not recognise(str(tmp_path))


def test_what_is_no_chunk_at_all(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no chunks, expected files named chunk_00000\.jsonl"):
        Reader(tmp_path)
    with pytest.raises(FormatError, match="not found"):
        Reader(tmp_path / "missing.jsonl")
    assert not recognise(str(tmp_path))
    assert not recognise(str(tmp_path / "missing.jsonl"))
    with pytest.raises(FormatError, match="always shifted once on reading"):
        Reader(write_chunks(tmp_path / "x", demo_samples(), 9), mask_alignment="rolled-right")


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_damaged_chunks_fail_cleanly(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = write_chunks(Path(scratch, "x"), demo_samples(3), 9) / "chunk_00000.jsonl"
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
        recognise(str(path.parent))
        try:
            reader = Reader(path.parent)
            packs = [reader.read(i) for i in range(len(reader))]
            assert sum(len(p["input_ids"]) for p in packs) == reader.spec.num_tokens
        except (FormatError, SequenceError):
            pass


def test_weights_are_refused_unless_loss_is_allowed(tmp_path: Path) -> None:
    packs = [demo_samples()[0], sample_of([3], lambda p: 0.5, lambda p: p)]
    spec = {"mask_dtype": np.dtype(np.float32)}
    with pytest.raises(FormatError, match=r"pack 1 has a loss weight of 0\.5"):
        write_packs(Writer, tmp_path / "x", packs, spec=spec)
    assert folder_of(tmp_path) == []
    with Writer(tmp_path / "x", spec_of(packs), lossy=True) as out:
        out.write(run_of(packs, mask_dtype=np.float32))
    assert dict(out.lost) == {"masks": "2 loss weights other than 0 and 1 became 1"}
    assert Reader(tmp_path / "x").read(1)["loss_mask"].tolist() == [1, 1, 0]


def test_nothing_is_left_where_writing_ends_early(tmp_path: Path) -> None:
    packs = demo_samples()
    with (
        pytest.raises(FormatError, match=r"7 packs.*expected 9"),
        Writer(tmp_path / "x", spec_of(demo_samples(9))) as out,
    ):
        out.write(run_of(packs))
    out = Writer(tmp_path / "x", spec_of(packs))
    out.write(run_of(packs[:2]))
    out.abandon()
    with pytest.raises(FormatError, match="samples_per_chunk 0"):
        Writer(tmp_path / "x", spec_of(packs), samples_per_chunk=0)
    assert folder_of(tmp_path) == []
    (tmp_path / "x").mkdir()
    write_packs(Writer, tmp_path / "x", packs)
    with pytest.raises(FormatError, match="--overwrite"):
        Writer(tmp_path / "x", spec_of(packs))
    write_packs(Writer, tmp_path / "x", packs, overwrite=True)
    assert_reads(Reader(tmp_path / "x"), packs)


@pytest.mark.parametrize(
    ("name", "content", "ours"),
    [
        ("chunk_00001.jsonl", b"", True),
        ("chunk_00000.jsonl.completed", b"", True),
        ("chunk_00000.jsonl.completed", b"notes", False),
        ("chunk_00001.jsonl", b'{"messages": []}\n', False),
        ("chunk_1.jsonl", b"", False),
        ("rows.jsonl", b"", False),
        (".hidden", b"", False),
    ],
)
def test_a_folder_is_replaced_where_all_in_it_is_of_chunks(
    tmp_path: Path, name: str, content: bytes, ours: bool
) -> None:
    packs = demo_samples()
    write_packs(Writer, tmp_path / "x", packs)
    (tmp_path / "x" / name).write_bytes(content)
    if ours:
        write_packs(Writer, tmp_path / "x", packs[:2], overwrite=True)
        assert folder_of(tmp_path / "x") == ["chunk_00000.jsonl"]
    else:
        with pytest.raises(
            FormatError, match=f"x: expected .*, found {re.escape(name)}, a file of {len(content)} bytes"
        ):
            Writer(tmp_path / "x", spec_of(packs), overwrite=True)
        assert (tmp_path / "x" / name).read_bytes() == content


def test_a_first_line_of_any_length_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of a long pack with wide columns of tokens is recognised without reading it completely."""
    monkeypatch.setattr(jsonl_chunks, "_MAX_HEAD_NBYTES", 300)
    path = write_chunk(tmp_path / "x" / "chunk_00000.jsonl", [produced(PACK, columns={"topk": [[1] * 99] * 6})])
    assert recognise(str(path))
    write_packs(Writer, tmp_path / "x", demo_samples(), overwrite=True)
    assert not recognise(str(write_chunk(tmp_path / "chats.jsonl", [{"messages": ["input_ids, labels"] * 99}])))


def test_identity_is_of_all_chunks(tmp_path: Path) -> None:
    folder = write_chunks(tmp_path / "x", demo_samples(), 2)
    before = Reader(folder).identity
    assert Reader(folder).identity == before
    write_chunk(folder / "chunk_00004.jsonl", [produced(PACK)])
    assert Reader(folder).identity != before
