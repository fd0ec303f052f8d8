"""Columns of a shard: write, attach, read, verify, replace, recover and remove them."""

from __future__ import annotations

import gc
import os
import pickle
import re
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from chats import command
from columned import SOURCE, SPECS, assert_columns, unchecked, values_of, write_columned
from hypothesis import given
from hypothesis import strategies as st
from kills import killed_at, kills_at, leave_complete
from rebuilding import damage
from sample_packs import assert_holds, demo_samples, tree_of, write_samples
from shard_folders import files_of as open_files_of
from shard_folders import maps_of

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.errors import (
    CorruptShardError,
    FormatError,
    SequenceError,
    SFTIndexError,
    ShardNotFoundError,
    UnsupportedVersionError,
)
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.column import ColumnHeader, ColumnSpec
from megatron_sft_idx.layout.files import SUFFIXES, check_column_name
from megatron_sft_idx.packs.run import windows
from megatron_sft_idx.shard import Shard, ShardWriter, find_remains, pair_numbers, recover, remove_shard, write_column
from megatron_sft_idx.shard import columns as columns_module
from megatron_sft_idx.shard import writer as writer_module
from megatron_sft_idx.shard.build_options import BuildOptions
from megatron_sft_idx.storage import publish

SPECIFICATION = (Path(__file__).parents[2] / "megatron_sft_idx" / "FORMAT.md").read_text(encoding="utf-8")
PACKS = demo_samples(40)


# ---- written and read ----


@pytest.mark.parametrize("backend", ["mmap", "pread", "reopen"])
def test_what_is_written_is_read(tmp_path: Path, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "STAGE_TOKENS", 16)
    header = write_columned(tmp_path / "x", PACKS)
    assert sorted(header.metadata["columns"]) == sorted(SPECS)
    shard = Shard(tmp_path / "x", backend=backend, columns=SPECS)
    assert_columns(shard)
    assert_holds(shard, PACKS)
    again = pickle.loads(pickle.dumps(shard))
    for i, (first, last) in enumerate(zip(shard.token_offsets[:-1], shard.token_offsets[1:], strict=True)):
        begin, end = shard.sequence_offsets[i : i + 2]
        spans = {"token": slice(first, last), "sequence": slice(begin, end), "pack": i}
        for name, spec in SPECS.items():
            expected = values_of(spec, 0, len(shard.columns[name]))[spans[spec.per]]
            np.testing.assert_array_equal(shard[i][name], expected)
            np.testing.assert_array_equal(again[i][name], expected)
    assert "source" not in Shard(tmp_path / "x")[0]
    assert verify_shard(tmp_path / "x", full=True).ok


def test_less_is_held_in_memory_of_tokens_with_wide_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "STAGE_TOKENS", 80)
    spec = ColumnSpec("token", "f4", 18)  # nine times the bytes that are assumed per token
    with ShardWriter(tmp_path / "x", columns={"topk": spec}, durable=False) as writer:
        for _ in range(9):
            writer.add_pack([1] * 4, [0] * 4, [0], columns={"topk": np.ones((4, 18))})
        assert (tmp_path / "x.building" / ".topk.col").stat().st_size == spec.header_nbytes + 8 * 4 * spec.row_nbytes
    shard = Shard(tmp_path / "x")
    found = windows(shard.files, 80, {"topk": shard.columns.open("topk")})
    assert [window.num_tokens for window in found] == [8, 8, 8, 8, 4]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="nothing here lists what is mapped")
@pytest.mark.parametrize("backend", ["mmap", "pread", "reopen"])
def test_a_reader_that_is_let_go_lets_go_of_its_files_at_once(tmp_path: Path, backend: Any) -> None:
    """Files must not stay open until garbage is collected, because the next shard needs a replaced shard's space."""
    write_columned(tmp_path / "x", PACKS)
    gc.disable()
    try:
        shard = Shard(tmp_path / "x", backend=backend, columns=SPECS)
        assert len(shard[0]) > 3
        assert (maps_of(tmp_path), open_files_of(tmp_path)) != (0, 0) or backend == "reopen"
        del shard
        assert (maps_of(tmp_path), open_files_of(tmp_path)) == (0, 0)
    finally:
        gc.enable()


def test_the_five_files_but_for_the_listing_are_those_without(tmp_path: Path) -> None:
    with_, without = write_columned(tmp_path / "with", PACKS), write_samples(tmp_path / "without", PACKS)
    assert with_.shard_id == without.shard_id
    for suffix in SUFFIXES[:-1]:
        assert (tmp_path / f"with{suffix}").read_bytes() == (tmp_path / f"without{suffix}").read_bytes()
    # So a column of one shard can be attached to the other.
    shutil.copy(tmp_path / "with.source.col", tmp_path / "without.source.col")
    assert Shard(tmp_path / "without").columns["source"].spec == SOURCE


def test_packs_at_once_and_whole_shards_bring_their_columns(tmp_path: Path) -> None:
    write_columned(tmp_path / "x", PACKS)
    shard = Shard(tmp_path / "x")
    with ShardWriter(tmp_path / "y", columns=SPECS) as writer:
        arrays = shard.files.tokens, shard.files.loss, shard.files.starts
        counts = np.diff(shard.token_offsets), np.diff(shard.sequence_offsets)
        writer.add_packs(*arrays, *counts, columns={name: shard.columns[name].values for name in SPECS})
    assert_columns(Shard(tmp_path / "y"))
    with ShardWriter(tmp_path / "z", columns=SPECS) as writer:
        writer.add_shard(shard)
    for name in SPECS:
        assert (tmp_path / f"z.{name}.col").read_bytes() == (tmp_path / f"x.{name}.col").read_bytes()
    with (
        pytest.raises(FormatError, match=r"column .* differs from the column that .*y2 was opened with"),
        ShardWriter(tmp_path / "y2") as w,
    ):
        w.add_shard(shard)


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (None, "columns none, but this writer was opened for grade, source"),
        ({"grade": [1.0]}, "columns grade, but this writer was opened for grade, source"),
        (
            {"grade": [1.0, 2.0], "source": [[0, 1]]},
            r"column grade has shape \(2,\); expected \(1,\): one row per pack",
        ),
        ({"grade": [1.0], "source": [[0, 1]]}, r"column source has shape \(1, 2\); expected \(2, 2\): one row per seq"),
        ({"grade": [1.0], "source": [[0, 1], [0, -1]]}, "column source has values that do not fit into uint32"),
        ({"grade": [1e300], "source": [[0, 1], [0, 2]]}, "column grade has values that do not fit into float32"),
        ({"grade": [1.0], "source": [[0, 1], [0, 0.5]]}, "column source has dtype float64; expected uint32"),
    ],
)
def test_values_that_do_not_fit_are_refused_and_nothing_of_the_pack_is_kept(
    tmp_path: Path, columns: Any, match: str
) -> None:
    specs = {"grade": ColumnSpec("pack", np.float32), "source": SOURCE}
    good = {"grade": [1.0], "source": [[0, 1], [0, 2]]}
    with ShardWriter(tmp_path / "x", columns=specs) as writer:
        writer.add_pack([1, 2], [0, 0], [0, 1], columns=good)
        with pytest.raises(SequenceError, match=match):
            writer.add_pack([1, 2], [0, 0], [0, 1], columns=columns)
        with pytest.raises(SequenceError, match="P4"):
            writer.add_pack([1, 2], [0, 0], [0, 2], columns=good)
        writer.add_pack([3, 4], [0, 0], [0, 1], columns={"grade": [2], "source": [[1, 1], [1, 2]]})
    shard = Shard(tmp_path / "x", columns=specs)
    assert [pack["grade"] for pack in shard] == [1, 2]
    assert shard.columns["source"].values.tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]


@pytest.mark.parametrize("name", ["", "A", "1a", "a-b", "a.b", "a/b", "loss", "seq", "tokens", "labels", "a" * 65])
def test_names_that_would_not_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match=r"a name of at most 64 lower-case letters|this name has another meaning"):
        ShardWriter(tmp_path / "x", columns={name: SOURCE})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [
        {"per": "row"},
        {"dtype": "c8"},
        {"dtype": "U3"},
        {"dtype": "foo"},
        {"width": 0},
        {"width": 1 << 17},
        {"alignment": "left"},
    ],
)
def test_kinds_that_would_not_do(options: Any) -> None:
    with pytest.raises(FormatError, match=r"^column: "):
        ColumnSpec(**{"per": "token", "dtype": "u1", **options})


def test_a_big_endian_array_is_stored_little(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", PACKS[:2])
    values = np.arange(Shard(tmp_path / "x").header.num_tokens, dtype=">f8")
    write_column(tmp_path / "x", "x", values, per="token")
    np.testing.assert_array_equal(Shard(tmp_path / "x").columns["x"].values, values.astype("<f8"), strict=True)


# ---- attached ----


def test_a_column_is_attached_in_pieces_and_again_with_leave(tmp_path: Path) -> None:
    write_columned(tmp_path / "x", PACKS, {"source": SOURCE})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    header = Shard(tmp_path / "x").header
    whole = np.arange(header.num_tokens * 3, dtype=np.int32).reshape(-1, 3)
    write_column(tmp_path / "x", "topk", (whole[i : i + 7] for i in range(0, len(whole), 7)), per="token")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "x.topk.col"} == before
    np.testing.assert_array_equal(Shard(tmp_path / "x").columns["topk"].values, whole, strict=True)
    assert sorted(Shard(tmp_path / "x").columns) == ["source", "topk"]
    with pytest.raises(FormatError, match="--overwrite"):
        write_column(tmp_path / "x", "topk", whole, per="token")
    write_column(tmp_path / "x", "topk", whole + 1, per="token", overwrite=True)
    assert Shard(tmp_path / "x").columns["topk"].values[0].tolist() == [1, 2, 3]
    with pytest.raises(FormatError, match="was written with this column"):
        write_column(
            tmp_path / "x", "source", np.zeros((header.num_sequences, 2), "u4"), per="sequence", overwrite=True
        )
    assert verify_shard(tmp_path / "x", full=True).ok


def test_what_a_killed_attachment_left_is_taken_over_by_the_next(tmp_path: Path) -> None:
    header = write_samples(tmp_path / "x", PACKS)
    before = sorted(os.listdir(tmp_path))

    def attached(dies: bool) -> None:
        def values() -> Iterator[Any]:
            for row in range(header.num_sequences):
                yield np.zeros((1, 1000))
                if dies and row == 50:  # far after the buffered rows
                    os.kill(os.getpid(), signal.SIGKILL)

        write_column(tmp_path / "x", "topk", values(), per="sequence")

    for _ in range(2):
        assert killed_at(1 << 30, lambda: attached(True))
        assert (tmp_path / "x.building" / ".topk.col").stat().st_size > 50_000
        assert sorted(os.listdir(tmp_path)) == sorted([*before, "x.building"])
        assert verify_shard(tmp_path / "x", full=True).ok
    attached(False)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "x.topk.col"])


@pytest.mark.parametrize("finish", [rebuild, lambda prefix: write_samples(prefix, PACKS, overwrite=True)])
def test_an_attachment_killed_at_any_step_has_the_old_column_or_the_new(
    tmp_path: Path, finish: Callable[[Path], Any]
) -> None:
    values = {number: np.full(len(PACKS), number, "u1") for number in (1, 2)}
    states = []
    for step in range(100):
        prefix = tmp_path / str(step) / "x"
        write_samples(prefix, PACKS)
        write_column(prefix, "grade", values[1], per="pack")
        before = tree_of(prefix.parent)
        attach = lambda prefix=prefix: write_column(prefix, "grade", values[2], per="pack", overwrite=True)  # noqa: E731
        if not killed_at(step, attach):
            break
        states.append(int(Shard(prefix).columns["grade"].values[0]))
        assert verify_shard(prefix, full=True).ok
        finish(prefix)
        after = tree_of(prefix.parent)
        assert {name: raw for name, raw in after.items() if name != "x.grade.col"} == {
            name: raw for name, raw in before.items() if name != "x.grade.col"
        }
        if finish is rebuild:
            assert int(Shard(prefix).columns["grade"].values[0]) >= states[-1]
    assert states == sorted(states)
    assert set(states) == {1, 2}
    assert len(states) > 15


def test_an_attachment_that_lost_its_column_is_made_again(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", PACKS)
    attach = partial(write_column, tmp_path / "x", "grade", np.ones(len(PACKS)), per="pack")
    leave_complete(attach)
    (tmp_path / "x.building" / ".grade.col").unlink()
    for work in (attach, partial(rebuild, tmp_path / "x")):
        with pytest.raises(
            FormatError,
            match=r"\.grade\.col: this file was removed before it was moved .* that wrote it again, with overwrite",
        ):
            work()
    attach(overwrite=True)
    assert verify_shard(tmp_path / "x", full=True).ok
    assert sorted(Shard(tmp_path / "x").columns) == ["grade"]
    assert not (tmp_path / "x.building").exists()


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (np.zeros(3), "3 rows, expected 100: one per sequence"),
        ([np.zeros(99), np.zeros(2)], "101 rows, expected 100"),
        ([np.zeros(99), np.zeros((1, 2))], "from row 99: column x has shape"),
        (np.zeros((100, 2, 2)), "from row 0: column x has shape"),
        (np.zeros(100, "c8"), "dtype complex64"),
        ([], "0 rows, expected 100"),
        ([[[1], [1, 2]]], "from row 0: column x: the values cannot be converted to an array"),
        ([np.zeros(99), [[1], [1, 2]]], "from row 99: column x: the values cannot be converted to an array"),
        (list(range(100)), r"from row 0: column x has shape \(\); expected an array of some rows"),
    ],
)
def test_what_cannot_be_attached_leaves_nothing(tmp_path: Path, values: Any, match: str) -> None:
    write_samples(tmp_path / "x", PACKS)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(FormatError, match=match):
        write_column(tmp_path / "x", "x", values, per="sequence")
    assert sorted(os.listdir(tmp_path)) == before
    with pytest.raises(ShardNotFoundError):
        write_column(tmp_path / "y", "x", values, per="sequence")


def test_a_column_replaced_while_it_is_opened_is_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_samples(tmp_path / "x", PACKS)
    ones, open_items = np.ones(len(PACKS)), columns_module.open_items
    write_column(tmp_path / "x", "x", ones, per="pack", metadata={"is": "ones"})

    def replacing(*arguments: Any) -> Any:
        write_column(tmp_path / "x", "x", 2 * ones, per="pack", metadata={"is": "twos"}, overwrite=True)
        return open_items(*arguments)

    monkeypatch.setattr(columns_module, "open_items", replacing)
    with pytest.raises(FormatError, match="another column was attached after this one was opened"):
        Shard(tmp_path / "x", columns=["x"])


def test_a_strangers_file_is_never_replaced_by_a_column(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", PACKS)
    (tmp_path / "x.mine.col").write_text("a list of mine")
    (tmp_path / "x.folder.col").mkdir()
    with pytest.raises(CorruptShardError, match=r"x\.mine\.col.*rule C1"):
        list(Shard(tmp_path / "x").columns)
    assert {finding.rule for finding in verify_shard(tmp_path / "x").findings} == {"C1"}
    (tmp_path / "x.folder.col").rmdir()
    with pytest.raises(FormatError, match="expected a column of a shard"):
        write_column(tmp_path / "x", "mine", np.zeros(len(PACKS)), per="pack", overwrite=True)
    with pytest.raises(FormatError, match=r"x\.mine\.col"):
        write_columned(tmp_path / "x", PACKS, {"mine": ColumnSpec("pack", "u1")}, overwrite=True)
    with pytest.raises(
        FormatError, match=r"x\.mine\.col: the file has the name of a column of .*x, but is not a column"
    ):
        write_samples(tmp_path / "x", PACKS[:3], overwrite=True)
    remove_shard(ShardPaths.of(tmp_path / "x"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.mine.col", "a list of mine")]


def test_a_column_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    write_columned(tmp_path / "x", PACKS, {"source": SOURCE})
    with pytest.raises(ShardNotFoundError, match=r"has no column other; it has .*; attach it with write_column"):
        Shard(tmp_path / "x", columns=["other"])
    assert Shard(tmp_path / "x").columns.get("other") is None
    os.unlink(tmp_path / "x.source.col")
    with pytest.raises(ShardNotFoundError, match=r"written with column source \(rule C8\)"):
        Shard(tmp_path / "x", columns=["source"])
    write_column(tmp_path / "x", "late", np.zeros(len(PACKS)), per="pack")
    again = pickle.loads(pickle.dumps(Shard(tmp_path / "x", columns=["late"])))
    os.unlink(tmp_path / "x.late.col")
    with pytest.raises(ShardNotFoundError, match="has no column late; it has "):
        again[0]
    (tmp_path / "x.source.col").mkdir()
    assert [finding.rule for finding in verify_shard(tmp_path / "x").findings] == ["C8"]


def test_columns_are_verified_though_they_came_or_went_since_the_folder_was_listed(tmp_path: Path) -> None:
    write_columned(tmp_path / "x", PACKS, {"source": SOURCE})
    for beside in ((), ("source", "gone")):
        assert verify_shard(tmp_path / "x", beside=beside).ok
    damage(tmp_path / "x.source.col", -1)
    assert [finding.rule for finding in verify_shard(tmp_path / "x", full=True, beside=()).findings] == ["C7"]


def test_metadata_may_be_put_into_a_spec_before_it_is_used(tmp_path: Path) -> None:
    spec = ColumnSpec("pack", "f4")
    spec.metadata["teacher"] = "x" * 500  # type: ignore[index]
    write_columned(tmp_path / "x", PACKS, {"grade": spec})
    assert_columns(Shard(tmp_path / "x"), {"grade": spec})


# ---- replaced and removed ----


@pytest.mark.parametrize("slashes", ["/", "//"])
def test_a_shard_goes_with_its_columns(tmp_path: Path, slashes: str) -> None:
    prefix = f"{tmp_path}{slashes}x"
    write_columned(prefix, PACKS)
    write_column(prefix, "late", np.zeros(len(PACKS)), per="pack")
    with pytest.raises(FormatError, match=r"x\.late\.col"):
        write_samples(prefix, PACKS)
    write_columned(prefix, PACKS[:5], {"source": SOURCE}, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == sorted([f"x{suffix}" for suffix in SUFFIXES] + ["x.source.col"])
    assert_columns(Shard(prefix), {"source": SOURCE})
    remove_shard(ShardPaths.of(prefix))
    assert os.listdir(tmp_path) == []


def test_a_path_of_a_column_is_taken_for_its_prefix() -> None:
    assert ShardPaths.of("data/x.source.col").prefix == "data/x"
    assert ShardPaths("x", columns=("b", "a")).all[-3:] == ("x.b.col", "x.a.col", "x.seq.idx")
    assert ShardPaths.of("x").with_columns(["b", "a"]).unpublished.all[-3:] == (
        "x.building/.a.col",
        "x.building/.b.col",
        "x.building/.seq.idx",
    )


@pytest.mark.parametrize(("old", "renames"), [(False, True), (True, True), (False, False)])
@kills_at
def test_a_kill_at_each_step_leaves_the_shard_with_all_it_lists_or_none(
    tmp_path: Path, stride: int, old: bool, renames: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "STAGE_TOKENS", 64)
    if not renames:  # as on NFS, where a file has both names for a moment
        monkeypatch.setattr(publish, "_rename", lambda *_: False)
    specs = {"source": SOURCE, "grade": ColumnSpec("pack", "f4"), "topk": ColumnSpec("token", "i4", 2)}

    def build(folder: Path) -> None:
        write_columned(folder / "x", PACKS[:20], specs, overwrite=True, durable=True)

    step, recovered = stride // 2, 0
    while True:
        folder = tmp_path / str(step)
        folder.mkdir()
        if old:
            write_columned(folder / "x", PACKS[:3], {"source": SOURCE, "other": ColumnSpec("pack", "u1")})
        if not killed_at(step, lambda folder=folder: build(folder)):  # type: ignore[misc]
            break
        try:
            shard = Shard(folder / "x")
        except ShardNotFoundError:
            shard = None
        if shard is not None:
            assert verify_shard(folder / "x", full=True).ok
            assert_columns(shard, specs if len(shard) == 20 else {"source": SOURCE, "other": ColumnSpec("pack", "u1")})
        elif (folder / "x.building" / "build.json").exists():
            copy = tmp_path / f"recovered-{step}"
            os.rename(folder, copy)
            left = find_remains(copy / "x")
            if left is not None and (left.num_packs or left.is_complete):
                recover(copy / "x", overwrite=True)
                recovered += 1
                taken = Shard(copy / "x")
                assert_columns(taken, specs)
                assert_holds(taken, PACKS[: len(taken)])
                assert verify_shard(copy / "x", full=True).ok
            folder = copy
        build(folder)
        assert_columns(Shard(folder / "x"), specs)
        assert sorted(os.listdir(folder)) == sorted([f"x{s}" for s in SUFFIXES] + [f"x.{name}.col" for name in specs])
        step += stride
    assert step > 20
    assert recovered > 5 // stride


@pytest.mark.parametrize("nbytes", [0, 100, -1, 1])
def test_a_column_that_changed_since_its_shard_was_complete_is_found(tmp_path: Path, nbytes: int) -> None:
    with ShardWriter(tmp_path / "x", columns={"source": SOURCE}) as writer:
        rows = values_of(SOURCE, 0, len(PACKS[0].starts))
        writer.add_pack(PACKS[0].tokens, PACKS[0].label_mask, PACKS[0].starts, columns={"source": rows})
        leave_complete(writer.finalize)
    column = tmp_path / "x.building" / ".source.col"
    whole = column.read_bytes()
    column.write_bytes(whole + b"\0" if nbytes == 1 else whole[:nbytes])
    for look in (find_remains, recover):
        with pytest.raises(CorruptShardError, match=r"x\.building/\.source\.col"):
            look(tmp_path / "x")
    column.write_bytes(whole)
    recover(tmp_path / "x")
    assert_columns(Shard(tmp_path / "x"), {"source": SOURCE})


def test_a_removal_that_was_killed_is_finished(tmp_path: Path) -> None:
    step = 0
    while True:
        folder = tmp_path / str(step)
        folder.mkdir()
        write_columned(folder / "x", PACKS[:3], {"source": SOURCE})
        if not killed_at(step, lambda folder=folder: remove_shard(ShardPaths.of(folder / "x"))):  # type: ignore[misc]
            break
        write_samples(folder / "x", PACKS[:2], overwrite=True)
        assert sorted(os.listdir(folder)) == sorted(f"x{suffix}" for suffix in SUFFIXES)
        step += 1
    assert os.listdir(folder) == []
    assert step > 5


def test_options_that_say_what_no_column_is_are_refused() -> None:
    options = BuildOptions(np.dtype("<i4"), np.dtype("u1"), None, 1, None, columns={"source": SOURCE})
    good = options.encode()
    assert BuildOptions.decode(good, "x.building/build.json") == options
    spec = good["columns"]["source"]
    for columns in (
        [],
        {"A": spec},
        {"a": []},
        {"a": {**spec, "dtype": 99}},
        {"a": {**spec, "width": "x"}},
        {"a": None},
    ):
        with pytest.raises(
            FormatError, match=r"x\.building/build\.json: not the options of a build .* remove its folder"
        ):
            BuildOptions.decode({**good, "columns": columns}, "x.building/build.json")


# ---- the rules ----

Change = Callable[[bytearray], bytearray | None]


def at(offset: int, data: bytes, *, seal: bool = True) -> Change:
    """Return a change of bytes of the file, with the header's checksum corrected."""

    def change(raw: bytearray) -> bytearray:
        raw[offset : offset + len(data)] = data
        return sealed(raw) if seal else raw

    return change


def sealed(raw: bytearray) -> bytearray:
    (size,) = struct.unpack_from("<I", raw, 12)
    raw[size - 16 : size] = xxhash.xxh3_128_digest(bytes(raw[: size - 16]))
    return raw


def values_changed(raw: bytearray) -> bytearray:
    raw[-1] ^= 1
    return raw


def another_file_number(raw: bytearray) -> bytearray:
    (size,) = struct.unpack_from("<I", raw, 12)
    raw[size : size + 8] = struct.pack("<II", 3, 0)
    raw[56:72] = xxhash.xxh3_128_digest(bytes(raw[size:]))
    return sealed(raw)


# rule, change of x.source.col, byte offset of the finding (None for any), other broken rules if the shard lists it
BROKEN: list[tuple[str, Change, int | None, set[str]]] = [
    ("C1", at(7, b"\r"), 0, set()),
    ("C1", at(8, b"\2"), 8, set()),
    ("C2", at(12, struct.pack("<I", 65)), 12, set()),
    ("C2", at(12, struct.pack("<I", (16 << 20) + 64), seal=False), 12, set()),
    ("C2", lambda raw: raw[:100], 100, set()),
    ("C2", lambda raw: raw[:200], 200, set()),
    ("C2", lambda raw: raw[:-1], None, set()),
    ("C2", lambda raw: raw + b"\0", None, set()),
    ("C1", lambda raw: bytearray(), 0, set()),
    ("C3", at(129, b"F", seal=False), None, {"C4"}),
    ("C4", at(32, b"\4"), 32, set()),
    ("C4", at(33, b"\x0b"), 33, set()),
    ("C4", at(34, b"\1"), 34, set()),
    ("C4", at(35, b"\1"), 35, set()),
    ("C4", at(36, struct.pack("<I", 0)), 36, set()),
    ("C4", at(40, struct.pack("<Q", 2**60)), 40, set()),
    ("C4", at(52, b"\1"), 52, set()),
    ("C4", at(127, b"\1"), 72, set()),
    ("C4", at(128, b"["), 128, set()),
    ("C4", at(48, struct.pack("<I", 2**31)), 48, set()),
    ("C5", at(32, b"\3"), 40, {"C9"}),
    ("C6", at(16, bytes(16)), 16, set()),
    ("C7", values_changed, None, set()),
    ("C8", at(56, bytes(16)), None, {"C7"}),
    ("C9", another_file_number, None, set()),
]


@pytest.mark.parametrize(("rule", "change", "offset", "others"), BROKEN)
def test_a_broken_rule_is_named(
    tmp_path: Path, rule: str, change: Change, offset: int | None, others: set[str]
) -> None:
    write_columned(tmp_path / "x", PACKS, {"source": SOURCE})
    path = tmp_path / "x.source.col"
    raw = change(bytearray(path.read_bytes()))
    path.write_bytes(b"" if raw is None else raw)
    report = verify_shard(tmp_path / "x", full=True)
    found = [finding for finding in report.findings if finding.rule == rule]
    assert found, report.findings
    # A changed header with a corrected checksum is no longer the one that the shard lists.
    assert {finding.rule for finding in report.findings} <= {rule, "C8", "C2"} | others
    assert found[0].path == str(path)
    assert offset in (None, found[0].offset)
    assert re.fullmatch(rf".*\.source\.col(: byte \d+)?: .+ \(rule {rule}\); .+", str(found[0]))
    if rule not in ("C7", "C9"):
        with pytest.raises(SFTIndexError) as refused:
            Shard(tmp_path / "x", columns=["source"])
        assert isinstance(refused.value, UnsupportedVersionError) or re.search(
            r"\(rule C\d|rule F2", str(refused.value)
        )


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(("rule", "change", "offset", "others"), BROKEN)
def test_a_shard_is_written_without_a_broken_column_as_it_is_advised(
    tmp_path: Path, rule: str, change: Change, offset: int | None, others: set[str], listed: bool
) -> None:
    write_columned(tmp_path / "x", PACKS, {"source": SOURCE} if listed else {})
    path, kept = tmp_path / "x.source.col", Shard(tmp_path / "x")
    if not listed:
        shape = (kept.header.num_sequences, 2)
        write_column(tmp_path / "x", "source", np.zeros(shape, np.uint32), per="sequence", metadata=SOURCE.metadata)
    raw = change(bytearray(path.read_bytes()))
    path.write_bytes(b"" if raw is None else raw)
    assert not rebuild(tmp_path / "x").whole
    advice = command("rebuild", tmp_path / "x").err.rsplit(": megatron-sft-idx ", 1)[1].split()
    done = command(*advice[:-1], tmp_path / "new")
    assert (done.code, "column source left out (--lossy): " in done.out) == (0, True), done.err
    assert (verify_shard(tmp_path / "new", full=True).ok, list(Shard(tmp_path / "new").columns)) == (True, [])
    assert Shard(tmp_path / "new").shard_id == kept.shard_id


def test_every_rule_of_columns_is_broken_here() -> None:
    rules = set(re.findall(r"^- \*\*(C\d+)\*\* ", SPECIFICATION, re.MULTILINE))
    assert {rule for rule, *_ in BROKEN} | {"C10"} == rules
    assert len(rules) == 10


def paired(count: int) -> np.ndarray:
    return np.stack([np.arange(count) // 2 + 5, np.arange(count) % 2], 1).astype(np.uint32)


# Changes of a column ``pair`` of 100 sequences, the first sequences of the findings, and the number of violations.
TORN: list[tuple[Callable[[np.ndarray], np.ndarray], list[int], int]] = [
    (lambda rows: rows, [], 0),
    (lambda rows: rows[::-1], [*range(0, 100, 2)], 50),
    (lambda rows: np.roll(rows, 1, axis=0), [*range(0, 100, 2)], 50),
    (lambda rows: np.where(np.arange(100)[:, None] == 31, [[21, 1]], rows), [30], 1),
    (lambda rows: np.where(np.arange(100)[:, None] == 98, [[54, 2]], rows), [98], 1),
]


@pytest.mark.parametrize(("change", "rows", "count"), TORN)
def test_sequences_that_are_no_pairs_are_told_by_rule_c10(
    tmp_path: Path, change: Callable[[np.ndarray], np.ndarray], rows: list[int], count: int
) -> None:
    write_samples(tmp_path / "x", PACKS)
    torn = change(paired(100)).astype(np.uint32)
    if rows:
        with pytest.raises(FormatError, match=r"column pair: sequences \d+ and \d+ have .* \(rule C10\)"):
            write_column(tmp_path / "x", "pair", np.split(torn, [33]), per="sequence")
    with unchecked():
        write_column(tmp_path / "x", "pair", torn, per="sequence")
    report = verify_shard(tmp_path / "x", full=True)
    found = [finding for finding in report.findings if finding.rule == "C10"]
    begin = Shard(tmp_path / "x").columns["pair"].spec.header_nbytes
    assert [finding.offset for finding in found] == [begin + 8 * row for row in rows][: len(found)]
    assert len(found) + report.omitted.get("C10", 0) == count
    assert report.ok == (not rows)
    if not rows:
        np.testing.assert_array_equal(pair_numbers(Shard(tmp_path / "x")), paired(100)[:, 0])
        return
    with pytest.raises(
        CorruptShardError, match=rf"byte {found[0].offset}: sequences {rows[0]} and {rows[0] + 1} have .*rule C10"
    ):
        pair_numbers(Shard(tmp_path / "x"))


def test_a_pair_without_its_second_and_another_column_of_that_name_are_told_too(tmp_path: Path) -> None:
    odd = [pack for pack in PACKS if len(pack.starts) % 2][:1]
    count = len(odd[0].starts)
    for name, rows in (("x", paired(count)), ("y", paired(count)[:, 0]), ("z", paired(count).astype(np.float32))):
        write_samples(tmp_path / name, odd)
        with pytest.raises(FormatError, match="C10"):
            write_column(tmp_path / name, "pair", rows, per="sequence")
        with unchecked():
            write_column(tmp_path / name, "pair", rows, per="sequence")
        assert {finding.rule for finding in verify_shard(tmp_path / name, full=True).findings} == {"C10"}
        with pytest.raises(CorruptShardError, match="C10"):
            pair_numbers(Shard(tmp_path / name))
    write_samples(tmp_path / "w", odd)
    assert pair_numbers(Shard(tmp_path / "w")) is None


def test_no_byte_of_a_column_can_change_unnoticed(tmp_path: Path) -> None:
    """Damage 500 copies by flipped bits, truncation or extension; verification must find every one."""
    specs = {"source": SOURCE, "topk": ColumnSpec("token", "f4", 3, metadata={"teacher": "big"})}
    write_columned(tmp_path / "x", PACKS, specs)
    write_column(tmp_path / "x", "late", np.arange(len(PACKS), dtype="u2"), per="pack")
    random = np.random.default_rng(5)
    for number in range(500):
        path = tmp_path / f"x.{('source', 'topk', 'late')[number % 3]}.col"
        good = path.read_bytes()
        raw = bytearray(good)
        if number % 5 == 4:
            size = int(random.integers(len(raw)))
            raw = raw[:size] if number % 2 else raw + random.bytes(size + 1)
        else:
            # Headers are small compared to values, but more important.
            limit = len(raw) if number % 2 else min(len(raw), 320)
            for place in random.integers(limit, size=int(random.integers(1, 4))):
                raw[place] ^= 1 << int(random.integers(8))
        if raw != good:
            path.write_bytes(raw)
            assert not verify_shard(tmp_path / "x", full=True).ok, (path.name, number)
            path.write_bytes(good)
    assert verify_shard(tmp_path / "x", full=True).ok


@given(st.binary(max_size=400) | st.binary(max_size=300).map(lambda tail: b"\x89SFTCOL\n\1\0\0\0\xc0\0\0\0" + tail))
def test_any_bytes_are_a_column_or_refused(raw: bytes) -> None:
    try:
        header = ColumnHeader.decode(raw, "x.a.col")
    except SFTIndexError:
        return
    assert header.encode() == raw[: header.spec.header_nbytes]


def test_a_column_that_names_no_files_is_no_source(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", PACKS)
    with pytest.raises(FormatError, match=r"column source: expected uint32 values .* and metadata with 'files'"):
        write_column(tmp_path / "x", "source", np.zeros((100, 2), np.uint32), per="sequence")
    beyond = np.full((100, 2), 3, np.uint32)
    with pytest.raises(FormatError, match="sequence 0 is from file 3, expected a number below 3"):
        write_column(tmp_path / "x", "source", beyond, per="sequence", metadata=SOURCE.metadata)
    with unchecked():
        write_column(tmp_path / "x", "source", np.zeros((100, 2), np.uint32), per="sequence")
    assert [(f.rule, f.found) for f in verify_shard(tmp_path / "x").findings] == [
        ("C9", "a source column without file names")
    ]


def test_a_column_of_another_shard_is_a_finding_and_not_a_column(tmp_path: Path) -> None:
    write_columned(tmp_path / "x", PACKS, {"source": SOURCE})
    write_samples(tmp_path / "y", PACKS[:39])
    shutil.copy(tmp_path / "x.source.col", tmp_path / "y.source.col")
    for looked_at in (list, dict, lambda columns: columns.get("source")):
        with pytest.raises(CorruptShardError, match="C6"):
            looked_at(Shard(tmp_path / "y").columns)
    with pytest.raises(CorruptShardError, match="C6"):
        Shard(tmp_path / "y", columns=["source"])
    assert {finding.rule for finding in verify_shard(tmp_path / "y").findings} == {"C5", "C6"}


def test_names_are_checked_where_they_are_asked_for(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", PACKS)
    with pytest.raises(FormatError, match="expected a name of at most 64 lower-case letters"):
        Shard(tmp_path / "x", columns=["../x"])
    assert check_column_name("a_1") == "a_1"
