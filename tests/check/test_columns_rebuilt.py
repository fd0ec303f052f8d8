"""Rebuilding shards with columns. Columns cannot be derived, so they are kept or reported as lost, never dropped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chats import command
from columned import SOURCE, SPECS, assert_columns, write_columned
from sample_packs import demo_samples

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import SUFFIXES, listed_columns
from megatron_sft_idx.live.catalog import Catalog
from megatron_sft_idx.shard import Shard, ShardWriter, read_header, write_column

PACKS = demo_samples(20)
FEW = {"source": SOURCE, "topk": ColumnSpec("token", "f4", 3)}


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flipped(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def states(prefix: Path, **options: bool) -> dict[str, str]:
    report = rebuild(prefix, **options)
    return {file.path.removeprefix(str(prefix)): file.state for file in report.files}


DAMAGE: dict[str, Callable[[Path], object]] = {
    ".idx lost": lambda prefix: os.unlink(f"{prefix}.idx"),
    ".idx damaged": lambda prefix: flipped(Path(f"{prefix}.idx"), 40),
    "arrays of .seq.idx": lambda prefix: flipped(Path(f"{prefix}.seq.idx"), -9),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_columns_of_a_shard_that_is_mended_are_listed_as_before(tmp_path: Path, what: str) -> None:
    write_columned(tmp_path / "x", PACKS, SPECS)
    write_column(tmp_path / "x", "late", np.arange(20), per="pack")
    before = files_in(tmp_path)
    DAMAGE[what](tmp_path / "x")
    done = command("rebuild", tmp_path / "x")
    assert done.code == 0, done.err
    after = files_in(tmp_path)
    assert {name: after[name] for name in before} == before
    assert sorted(Shard(tmp_path / "x").columns) == sorted([*SPECS, "late"])
    assert ".col" not in done.out
    assert states(tmp_path / "x") == dict.fromkeys(
        [*SUFFIXES, *(f".{name}.col" for name in sorted([*SPECS, "late"]))], "good"
    )


def test_columns_stay_as_attached_ones_where_the_listing_is_lost(tmp_path: Path) -> None:
    write_columned(tmp_path / "x", PACKS, {**FEW, "gone": ColumnSpec("pack", "u1")}, capacity=64)
    before = files_in(tmp_path)
    os.unlink(tmp_path / "x.gone.col")
    flipped(tmp_path / "x.seq.idx", 40)
    done = command("rebuild", tmp_path / "x")
    assert done.code == 0, done.err
    assert "x: the new .seq.idx lists no columns; source, topk remain as attached columns" in done.out
    header = read_header(tmp_path / "x")
    assert header.rebuilt
    assert not listed_columns(header.metadata)
    assert_columns(Shard(tmp_path / "x"), FEW)
    assert (tmp_path / "x.topk.col").read_bytes() == before["x.topk.col"]
    assert verify_shard(tmp_path / "x", full=True).ok


def test_a_file_that_is_no_column_is_told_and_left_alone(tmp_path: Path) -> None:
    write_columned(tmp_path / "x", PACKS, FEW)
    (tmp_path / "x.notes.col").write_text("a stranger's")
    for full in (False, True):
        report = verify_shard(tmp_path / "x", full=full)
        assert [(finding.rule, finding.path) for finding in report.findings] == [("C1", str(tmp_path / "x.notes.col"))]
        assert "if it is not a column, rename it" in report.findings[0].remedy
    done = command("rebuild", tmp_path / "x")
    assert (done.code, "x.notes.col: lost: " in done.out, "nothing was rebuilt" in done.out) == (1, True, True)
    assert (tmp_path / "x.notes.col").read_text() == "a stranger's"
    # If the header lists it, it is a column that was lost.
    (tmp_path / "x.topk.col").write_text("a stranger's")
    assert {finding.rule for finding in verify_shard(tmp_path / "x").findings} == {"C1"}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("name", ["topk", "late"])
@pytest.mark.parametrize("damage", ["values", "header", "cut", "lost"])
def test_a_column_that_is_lost_is_said_and_a_good_shard_beside_it_stays(
    tmp_path: Path, dry_run: bool, name: str, damage: str
) -> None:
    write_columned(tmp_path / "x", PACKS, FEW)
    write_column(tmp_path / "x", "late", np.arange(20), per="pack")
    path = tmp_path / f"x.{name}.col"
    if damage == "lost":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flipped(path, 100 if damage == "header" else -1)
    before = files_in(tmp_path)
    done = command("rebuild", tmp_path / "x", *(["--dry-run"] if dry_run else []))
    assert files_in(tmp_path) == before
    if (name, damage) == ("late", "lost"):
        assert done.code == 0  # nothing shows that there was one
        return
    assert done.code == 1
    assert f"{path}: lost: " in done.out
    assert "a column cannot be derived; restore it from a copy, or " in done.out
    assert "columns are lost, the rest is complete" in done.err
    assert "nothing to do" not in done.out
    assert "the five files are good, so nothing was rebuilt" in done.out
    assert {state for suffix, state in states(tmp_path / "x").items() if suffix != f".{name}.col"} == {"good"}
    # An index next to it is repaired anyway.
    os.unlink(tmp_path / "x.idx")
    found = states(tmp_path / "x", dry_run=dry_run)
    assert (found[".idx"], found[f".{name}.col"]) == ("rebuilt", "lost")
    if name == "topk" and not dry_run:
        new = command("merge", tmp_path / "x", "--lossy", "--output-prefix", tmp_path / "new")
        assert (new.code, "column topk left out" in new.out) == (0, True), new.err
        assert sorted(Shard(tmp_path / "new").columns) == ["late", "source"]


def test_a_killed_build_is_rebuilt_with_its_columns(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", columns={"grade": ColumnSpec("pack", "f4")})
    for number, pack in enumerate(PACKS[:5]):
        writer.add_pack(pack.tokens, pack.label_mask, pack.starts, columns={"grade": [number]})
    writer.flush()
    writer.suspend()
    done = command("rebuild", tmp_path / "x")
    assert done.code == 0, done.err
    assert f"{tmp_path}/x.grade.col: rebuilt: from {tmp_path}/x.building\n" in done.out
    assert [float(pack["grade"]) for pack in Shard(tmp_path / "x", columns=["grade"])] == [0, 1, 2, 3, 4]
    assert states(tmp_path / "x") == dict.fromkeys([*SUFFIXES, ".grade.col"], "good")


def test_what_a_live_shard_takes_counts_its_columns(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    write_columned(catalog.shard_prefix(0), PACKS, FEW)
    assert catalog.shard_nbytes(0) == sum(map(len, files_in(tmp_path).values()))
    os.unlink(catalog.shard_prefix(0) + ".topk.col")
    assert catalog.shard_nbytes(0) == sum(map(len, files_in(tmp_path).values()))
    assert catalog.numbers() == catalog.present() == [0]
