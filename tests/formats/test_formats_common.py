"""Features of all formats: conversion of mask alignments, the rules of packs, files that appear complete."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_trips import run_of, spec_of
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sample_packs import Sample, samples, write_samples

from megatron_sft_idx.errors import FormatError, SequenceError, ShardNotFoundError
from megatron_sft_idx.formats.base import ALIGNMENT_NOTES, checked_alignment, unplaced_note
from megatron_sft_idx.formats.bridge import Padding
from megatron_sft_idx.formats.registry import WRITABLE, create
from megatron_sft_idx.layout.column import ColumnSpec, Per
from megatron_sft_idx.packs.run import (
    MASK_ALIGNMENTS,
    Column,
    PackRun,
    checked_run,
    label_aligned,
    read_window,
    require_same_length,
    windows,
)
from megatron_sft_idx.shard import Shard, write_column
from megatron_sft_idx.storage.outputs import new_file, new_folder
from megatron_sft_idx.storage.publish import Kind


def joined(packs: list[Sample], masks: list[list[float]]) -> dict[str, Any]:
    """Return the arrays of a ``PackRun`` of these packs with these masks."""
    return {
        "tokens": np.array([t for p in packs for t in p.tokens], np.int64),
        "loss_mask": np.array([v for mask in masks for v in mask], np.float32),
        "seq_starts": np.array([s for p in packs for s in p.starts], np.int64),
        "pack_lengths": np.array([len(p.tokens) for p in packs], np.int64),
        "pack_sequences": np.array([len(p.starts) for p in packs], np.int64),
    }


def rolled_right(mask: list[float]) -> list[float]:
    return [0, *mask[:-1]]


def last_lost(pack: Sample) -> Sample:
    """Return the pack without its last token's mask, which rolling right removes."""
    return Sample(pack.tokens, [*pack.mask[:-1], 0], pack.starts)


# ---- masks ----


@given(samples(weights=True))
def test_every_alignment_becomes_the_label_mask_of_its_token_mask(packs: list[Sample]) -> None:
    expected = [v for p in packs for v in p.label_mask]
    firsts = sum(p.mask[start] > 0 for p in packs for start in p.starts)
    token = checked_run("x", 0, PackRun(**joined(packs, [p.mask for p in packs])), mask_alignment="token")
    assert (token.loss_mask.tolist(), token.unplaced) == (expected, firsts)
    label = checked_run("x", 0, PackRun(**joined(packs, [p.label_mask for p in packs])))
    assert (label.loss_mask.tolist(), label.unplaced) == (expected, 0)
    rolled = joined(packs, [rolled_right(p.mask) for p in packs])
    undone = checked_run("x", 0, PackRun(**rolled), mask_alignment="rolled-right")
    assert undone.loss_mask.tolist() == [v for p in packs for v in last_lost(p).label_mask]


@given(samples(least=1))
def test_a_label_mask_at_a_sequence_end_is_cleared_and_counted(packs: list[Sample]) -> None:
    columns = joined(packs, [[1] * len(p.tokens) for p in packs])
    before = columns["loss_mask"].copy()
    run = checked_run("x", 0, PackRun(**columns))
    assert run.loss_mask.tolist() == [v for p in packs for a, b in pairwise(p.bounds) for v in [1] * (b - a - 1) + [0]]
    assert run.unplaced == sum(len(p.starts) for p in packs)
    assert (columns["loss_mask"] == before).all()


def test_no_packs_have_an_empty_mask() -> None:
    nothing = np.empty(0, np.int64)
    for alignment in MASK_ALIGNMENTS:
        run = label_aligned(PackRun(nothing, np.empty(0, np.uint8), nothing, nothing, nothing), alignment)
        assert (len(run.loss_mask), run.unplaced) == (0, 0)


def test_a_mask_that_was_not_rolled_is_not_rolled_back() -> None:
    columns = joined([Sample([1, 2], [1, 1], [0])], [[1, 1]])
    with pytest.raises(SequenceError, match=r"x:5: its loss mask begins with"):
        checked_run("x", 5, PackRun(**columns), mask_alignment="rolled-right")


def test_what_was_done_to_masks_is_said() -> None:
    assert ALIGNMENT_NOTES.get("label") is None
    assert "shifted left" in ALIGNMENT_NOTES["token"]
    assert "rolled back" in ALIGNMENT_NOTES["rolled-right"]
    assert unplaced_note(3, "label").startswith("3 loss mask values at the end")
    assert unplaced_note(3, "token").startswith("3 loss mask values on the first")
    assert checked_alignment("x", "token") == "token"
    with pytest.raises(FormatError, match="x: unknown mask alignment 'left'; choose one of label, token, rolled-right"):
        checked_alignment("x", "left")


# ---- rules ----

PACKS = [Sample([1, 2, 3], [0, 1, 1], [0, 1]), Sample([4], [0], [0]), Sample([5, 6], [0, 1], [0])]


@pytest.mark.parametrize(
    ("column", "value", "error", "words"),
    [
        ("pack_lengths", [3, 0, 3], SequenceError, "x:11: it has 0 tokens, but a pack needs at least one .rule P1"),
        ("pack_lengths", [3, -1, 4], SequenceError, "x:11: it has -1 tokens"),
        ("pack_lengths", [2**63 - 1, 1, 2], SequenceError, "x:10: it has 9223372036854775807 tokens"),
        ("pack_lengths", [3, 1, 1], FormatError, "should have 5 ids"),
        ("pack_lengths", [3, 3], FormatError, "2 pack lengths, but 3 sequence counts"),
        ("pack_lengths", [[3, 1, 2]], FormatError, "has shape"),
        ("pack_lengths", [3.0, 1, 2], FormatError, "expected integers"),
        (
            "pack_sequences",
            [2, 0, 2],
            SequenceError,
            "x:11: it has no sequence starts, but needs at least a first one at 0 .rule P2",
        ),
        ("pack_sequences", [2, 1, 2**62], SequenceError, "x:12: sequence starts run out"),
        ("pack_sequences", [1, 1, 1], FormatError, "and 3 sequence starts; found 6, 6 and 4"),
        ("seq_starts", [1, 2, 0, 0], SequenceError, "x:10: the first sequence starts at 1, expected 0 .rule P2"),
        ("seq_starts", [0, 0, 0, 0], SequenceError, "x:10: sequence 1 starts at 0, expected a start after 0 .rule P3"),
        ("seq_starts", [0, 3, 0, 0], SequenceError, "x:10: sequence 1 starts at 3, but the pack has 3 tokens .rule P4"),
        ("seq_starts", [0, -(2**63), 0, 0], SequenceError, "x:10: sequence 1 starts at -9223372036854775808"),
        ("seq_starts", np.array([0, 2**63, 0, 0], np.uint64), FormatError, "too large for an id"),
        ("tokens", [1, 2, 3, 4, 5], FormatError, "found 5, 6 and 4"),
        (
            "tokens",
            [1, 2, 3, 4, -5, 6],
            SequenceError,
            "x:12: position 0 has id -5, but the token dtype stores 0 to 2147",
        ),
        ("tokens", [1, 2, 3, 4, 5, 2**31], SequenceError, "x:12: position 1 has id 2147483648"),
        ("tokens", ["a"] * 6, FormatError, "expected integers"),
        ("loss_mask", [0, 0, 0, 0, 2, 0], SequenceError, "x:12: position 0 has loss mask 2, .* stores 0 and 1"),
        ("loss_mask", [0, 0, 0.5, -0.5, 0, 0], SequenceError, "x:11: position 0 has loss mask -0.5"),
        ("loss_mask", [0, float("nan"), 0, 0, 0, 0], SequenceError, "x:10: position 1 has loss mask nan"),
        ("loss_mask", [0, 1e39, 0, 0, 0, 0], SequenceError, "finite weight"),
        ("loss_mask", [0], FormatError, "found 6, 1 and 4"),
    ],
)
def test_a_broken_rule_is_named_with_its_pack(column: str, value: Any, error: type[Exception], words: str) -> None:
    columns = joined(PACKS, [p.label_mask for p in PACKS])
    with pytest.raises(error, match=words):
        checked_run("x", 10, PackRun(**(columns | {column: value})))


def test_dtypes_are_kept_or_those_asked_for() -> None:
    columns = joined(PACKS, [p.label_mask for p in PACKS])
    run = checked_run("x", 0, PackRun(**columns))
    assert (run.tokens.dtype, run.loss_mask.dtype) == (np.int32, np.float32)
    run = checked_run("x", 0, PackRun(**columns), token_dtype=np.uint16, mask_dtype=np.uint8)
    assert (run.tokens.dtype, run.loss_mask.dtype) == (np.uint16, np.uint8)
    small = columns | {"tokens": columns["tokens"].astype(">u2"), "loss_mask": columns["loss_mask"].astype(bool)}
    run = checked_run("x", 0, PackRun(**small))
    assert run.tokens.tolist() == columns["tokens"].tolist()
    assert run.loss_mask.dtype == np.uint8
    with pytest.raises(SequenceError, match="has id 65536, but the token dtype stores 0 to 65535"):
        checked_run("x", 0, PackRun(**(columns | {"tokens": [65536] * 6})), token_dtype=np.uint16)
    with pytest.raises(SequenceError, match=r"has loss mask 0.5, but the mask dtype stores 0 and 1"):
        checked_run("x", 0, PackRun(**(columns | {"loss_mask": [0.5] + [0] * 5})), mask_dtype=np.uint8)


def test_columns_of_a_pack_are_equally_long() -> None:
    require_same_length("x", 3, input_ids=2, loss_mask=2)
    with pytest.raises(SequenceError, match="x:3: 2 in input_ids, 3 in loss_mask; each must have one value per token"):
        require_same_length("x", 3, input_ids=2, loss_mask=3)


integers = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4), max_size=6)


@given(st.tuples(integers, integers, integers, integers, integers))
def test_whatever_a_file_says_is_a_run_or_an_error(columns: Any) -> None:
    try:
        run = checked_run("x", 0, PackRun(*columns))
    except (FormatError, SequenceError):
        return
    assert run.tokens.size == run.loss_mask.size == run.pack_lengths.sum()


# ---- output ----


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "plain folder").mkdir()
    kind = Kind("anything", lambda path: True)
    new_file(tmp_path / "x", kind, overwrite=False).publish()
    new_folder(tmp_path / "f", kind, overwrite=False).publish()
    assert os.stat(tmp_path / "x").st_mode == os.stat(tmp_path / "plain").st_mode
    assert os.stat(tmp_path / "f").st_mode == os.stat(tmp_path / "plain folder").st_mode


# ---- columns ----


def column(per: Per, values: NDArray[Any]) -> Column:
    return Column(ColumnSpec.of(per, values), values)


def with_columns(packs: list[Sample]) -> PackRun:
    """Return these packs, with columns whose values show their place."""
    run = run_of(packs)
    columns = {
        "place": column("token", np.arange(len(run.tokens))),
        "row": column("sequence", np.arange(2 * len(run.seq_starts)).reshape(-1, 2)),
        "number": column("pack", np.arange(len(run))),
    }
    return dataclasses.replace(run, columns=columns)


@given(samples(), st.data())
def test_columns_go_with_the_packs_that_are_cut_out_and_joined(packs: list[Sample], data: st.DataObject) -> None:
    run = with_columns(packs)
    cut = data.draw(st.integers(0, len(packs)))
    parts = [run.subrun(0, cut), run.subrun(cut, len(packs))]
    assert [len(part.columns["row"].values) for part in parts] == [len(part.seq_starts) for part in parts]
    whole = PackRun.joined(parts)
    for name, (spec, values) in run.columns.items():
        assert whole.columns[name].spec == spec
        assert whole.columns[name].values.tolist() == values.tolist()
    if packs:
        with pytest.raises(ValueError, match="different columns"):
            PackRun.joined([run, run_of(packs)])


def test_padding_inside_packs_keeps_the_columns_of_what_is_padded() -> None:
    padded = Padding(4, 0).pad(with_columns(PACKS))
    assert padded.tokens.tolist() == [1, 2, 3, 0, 0, 0, 4, 5, 6, 0, 0, 0]
    assert padded.columns["place"].values.tolist() == [0, 1, 2, 0, 0, 0, 3, 4, 5, 0, 0, 0]
    assert padded.columns["row"].values.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(("per", "expected"), [("token", 6), ("sequence", 4), ("pack", 3)])
def test_a_column_has_a_row_for_each(per: Any, expected: int) -> None:
    with pytest.raises(ValueError, match=f"column x: 5 rows, expected {expected}: one per {per}"):
        dataclasses.replace(run_of(PACKS), columns={"x": column(per, np.zeros(5))})


CARRIES = {"sft-idx", "memmap", "parquet", "jsonl-chunks"}
NEED_PYARROW = {"parquet", "save_to_disk"}


@pytest.mark.parametrize("name", [name for name in WRITABLE if name not in NEED_PYARROW or find_spec("pyarrow")])
def test_a_column_that_cannot_be_written_is_refused_or_named_as_lost(tmp_path: Path, name: str) -> None:
    if name in CARRIES:  # it gets the specs of columns; other columns are an error, not a loss
        for lossy in (False, True):
            with (
                pytest.raises(FormatError, match="other columns than the spec of this writer"),
                create(str(tmp_path / "x"), name, spec_of(PACKS), lossy=lossy) as writer,
            ):
                writer.write(with_columns(PACKS))
            assert os.listdir(tmp_path) == []
        return
    if name != "pbin":  # it is never written without permission to lose data
        with (
            pytest.raises(FormatError, match=f"{name} cannot store columns: number, place, row"),
            create(str(tmp_path / "x"), name, spec_of(PACKS)) as writer,
        ):
            writer.write(with_columns(PACKS))
        assert os.listdir(tmp_path) == []
    with create(str(tmp_path / "x"), name, spec_of(PACKS), lossy=True) as writer:
        writer.write(with_columns(PACKS))
    assert writer.lost["columns"] == "columns number, place, row: the format cannot store them"


@given(samples(least=1), st.integers(1, 60))
def test_windows_of_a_shard_carry_the_rows_of_their_packs(packs: list[Sample], tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix, columns = Path(folder) / "x", with_columns(packs).columns
        write_samples(prefix, packs)
        for name, (spec, values) in columns.items():
            write_column(prefix, name, values, per=spec.per)
        shard = Shard(prefix)
        found = [
            window.columns
            for window in windows(shard.files, tokens, {name: shard.columns.open(name) for name in columns})
        ]
        for name, (_, values) in columns.items():
            assert np.concatenate([each[name].values for each in found]).tolist() == values.tolist()
        beyond = islice(windows(shard.files, tokens, stop=len(shard) + 1), len(packs) + 1)
        assert sum(map(len, beyond)) == len(packs)
        assert [*islice(windows(shard.files, tokens, first=len(shard), stop=len(shard) + 2), 2)] == []
        with pytest.raises(ShardNotFoundError, match="no column other"):
            next(windows(shard.files, tokens, {"other": shard.columns.open("other")}))


def test_runs_and_windows_are_compared_as_objects(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", PACKS)
    files = Shard(tmp_path / "x").files
    for one, other in (
        (read_window(files, 0, 2), read_window(files, 0, 2)),
        (read_window(files, 0, 2).run(), read_window(files, 0, 2).run()),
    ):
        assert one != other
        assert {one, other} == {other, one}
