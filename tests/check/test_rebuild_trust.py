"""A rebuild never publishes data, or reports them as undamaged, if another file shows that they have changed."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chats import command
from columned import SOURCE, write_columned
from kills import killed_at
from rebuilding import damage
from sample_packs import Sample, demo_samples, tree_of

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.shard import Shard, ShardWriter, find_remains

PACKS = demo_samples(20)
SPECS = {"source": SOURCE, "topk": ColumnSpec("token", "f4", 3)}
COLUMNS = [".source.col", ".topk.col"]


# ---- a complete build that was killed ----


class Killed(NamedTuple):
    """Folders of a merge that was killed before and during its renames; and the merged shard's files."""

    source: Path
    before: Path
    among: Path
    whole: dict[str, bytes]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    write_columned(folder / "x", PACKS, SPECS)
    merge([folder / "x"], folder / "whole" / "m")
    left: dict[bool, Path] = {}
    for step in range(100):
        prefix = folder / str(step) / "m"
        if not killed_at(step, lambda prefix=prefix: merge([folder / "x"], prefix)):  # type: ignore[misc]
            break
        remains = find_remains(prefix)
        if remains is not None and f"{prefix}.seq.idx" in (remains.unpublished or {}):
            left[os.path.exists(f"{prefix}.bin")] = prefix.parent
    return Killed(folder / "x", left[False], left[True], tree_of(folder / "whole"))


def name_now(prefix: Path, suffix: str) -> Path:
    return next(path for path in (Path(f"{prefix}.building/{suffix}"), Path(f"{prefix}{suffix}")) if path.exists())


@pytest.mark.sample(7)
@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("when", ["before", "among"])
@pytest.mark.parametrize("suffix", [".bin", ".loss.bin", ".seq.bin", *COLUMNS])
def test_files_that_changed_since_a_build_was_complete_get_no_name(
    tmp_path: Path, killed: Killed, suffix: str, when: str, dry_run: bool
) -> None:
    shutil.copytree(getattr(killed, when), tmp_path, dirs_exist_ok=True)
    damage(name_now(tmp_path / "m", suffix), -1 if suffix in COLUMNS else 1, 1)
    before = tree_of(tmp_path)
    done = command("rebuild", tmp_path / "m", *(["--dry-run"] if dry_run else []))
    assert done.code == 1
    assert "all files were complete, but rules are broken in" in done.err
    assert "they have changed since" in done.err
    assert any(f"; the first is {tmp_path}/m{at}{suffix}: " in done.err for at in ("", ".building/"))
    assert done.err.endswith("; nothing was published; build it again with overwrite (--overwrite)\n")
    assert tree_of(tmp_path) == before
    merge([killed.source], tmp_path / "m", overwrite=True)
    assert tree_of(tmp_path) == killed.whole


@pytest.mark.parametrize("when", ["before", "among"])
@pytest.mark.parametrize("place", [(".idx", -9), (".seq.idx", -9)])
def test_indexes_that_changed_since_a_build_was_complete_are_brought_back(
    tmp_path: Path, killed: Killed, when: str, place: tuple[str, int]
) -> None:
    shutil.copytree(getattr(killed, when), tmp_path, dirs_exist_ok=True)
    damage(name_now(tmp_path / "m", place[0]), place[1])
    before = tree_of(tmp_path)
    assert rebuild(tmp_path / "m", dry_run=True).whole
    assert tree_of(tmp_path) == before
    done = command("rebuild", tmp_path / "m")
    assert (done.code, done.err) == (0, "")
    after = tree_of(tmp_path)
    assert after.pop(f"m{place[0]}.damaged") != killed.whole[f"m{place[0]}"]
    assert after == killed.whole


def test_what_a_disk_gives_back_otherwise_than_it_was_checked_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ShardWriter(tmp_path / "m")
    for pack in PACKS:
        writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
    writer.flush()
    writer.suspend()
    complete = ShardWriter.complete

    def then_changed(self: ShardWriter) -> Any:
        header = complete(self)
        damage(tmp_path / "m.building" / ".loss.bin", 1, 1)
        return header

    monkeypatch.setattr(ShardWriter, "complete", then_changed)
    with pytest.raises(
        FormatError, match=r"checked while it was read, but .* the files have changed since.* run the sa"
    ):
        rebuild(tmp_path / "m")
    monkeypatch.undo()
    assert not (tmp_path / "m.seq.idx").exists()
    damage(tmp_path / "m.building" / ".loss.bin", 1, 1)
    assert rebuild(tmp_path / "m").whole
    assert verify_shard(tmp_path / "m", full=True).ok


# ---- reports before the rebuild ----


@pytest.mark.parametrize("when", ["before", "among"])
def test_a_dry_run_of_what_was_copied_says_what_a_rebuild_says(tmp_path: Path, killed: Killed, when: str) -> None:
    shutil.copytree(getattr(killed, when), tmp_path, dirs_exist_ok=True)
    before = tree_of(tmp_path)
    dry = rebuild(tmp_path / "m", dry_run=True)
    assert tree_of(tmp_path) == before
    assert rebuild(tmp_path / "m") == replace(dry, dry_run=False)
    assert tree_of(tmp_path) == killed.whole


def test_a_dry_run_of_packs_that_were_copied_says_what_a_rebuild_says(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "left" / "m") as writer:
        for pack in PACKS:
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
        writer.flush()
        shutil.copytree(tmp_path / "left", tmp_path / "copied")
        writer.abandon()
    dry = rebuild(tmp_path / "copied" / "m", dry_run=True)
    assert rebuild(tmp_path / "copied" / "m") == replace(dry, dry_run=False)
    assert len(Shard(tmp_path / "copied" / "m")) == len(PACKS)


def test_packs_are_counted_that_were_recovered_and_not_those_that_seemed_to_be_there(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "m") as writer:
        for pack in PACKS:
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
        writer.flush()
        writer.suspend()
    starts = (tmp_path / "m.building" / ".seq.bin").read_bytes()
    num_kept = sum(len(pack.starts) for pack in PACKS[:7])
    (tmp_path / "m.building" / ".seq.bin").write_bytes(starts[: 4 * num_kept] + bytes(len(starts) - 4 * num_kept))
    report = rebuild(tmp_path / "m")
    shard = Shard(tmp_path / "m")
    assert len(shard) < len(PACKS)
    assert f": {len(shard)} packs, {shard.header.num_sequences} sequences, " in report.note


# ---- data that do not belong to a column ----


def columned(prefix: Path) -> dict[str, bytes]:
    write_columned(prefix, PACKS, SPECS)
    return tree_of(prefix.parent)


# Changes of the data that break no rule that can be checked without a header.
CHANGES = {"tokens": ".bin", "masks": ".loss.bin"}


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("header", ["lost", "damaged"])
@pytest.mark.parametrize("what", CHANGES)
def test_no_header_is_derived_from_data_that_a_column_was_not_written_for(
    tmp_path: Path, what: str, header: str, dry_run: bool
) -> None:
    whole = columned(tmp_path / "x")
    damage(tmp_path / f"x{CHANGES[what]}", 1, 1)
    os.unlink(tmp_path / "x.seq.idx") if header == "lost" else damage(tmp_path / "x.seq.idx", 300)
    before = tree_of(tmp_path)
    done = command("rebuild", tmp_path / "x", *(["--dry-run"] if dry_run else []))
    assert done.code == 1
    assert "x.source.col: belongs to shard " in done.err
    assert "tokens, masks, starts or pack lengths have changed, or this file belongs to another shard" in done.err
    for claim in ("lost", "complete", "good", "attach", "merge"):
        assert claim not in done.err + done.out
    assert tree_of(tmp_path) == before
    # The user restores the changed file from a copy, or declares that the columns belong to another shard.
    if not dry_run:
        away = tmp_path / "away"
        away.mkdir()
        for suffix in COLUMNS:
            os.rename(tmp_path / f"x{suffix}", away / f"x{suffix}")
        said = command("rebuild", tmp_path / "x")
        assert (said.code, "follows all rules; no checksum was left" in said.out, "complete" in said.out) == (
            0,
            True,
            False,
        )
        assert ("checksum differs from the damaged .seq.idx" in said.out) == (header == "damaged")
        assert (f"{tmp_path}/x{CHANGES[what]}: the checksum differs" in said.out) == (header == "damaged")
        for suffix in COLUMNS:
            os.rename(away / f"x{suffix}", tmp_path / f"x{suffix}")
        again = command("rebuild", tmp_path / "x")
        assert again.code == 1
        assert again.out.count("found a column of shard ") == 2
        assert again.err.endswith("and it is unknown which ones; see the lines above\n")
        for claim in ("lost", "complete", "the five files are good", "attach", "merge"):
            assert claim not in again.err + again.out
        found = verify_shard(tmp_path / "x", full=True).findings
        assert [finding.rule for finding in found] == ["C6", "C6"]
        assert all("the data may have changed instead: compare" in finding.remedy for finding in found)
        os.unlink(tmp_path / "x.seq.idx")
    (tmp_path / f"x{CHANGES[what]}").write_bytes(whole[f"x{CHANGES[what]}"])
    assert rebuild(tmp_path / "x").compared
    assert verify_shard(tmp_path / "x", full=True).ok


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("witness", ["column", "checksums", None])
def test_a_derived_header_is_called_whole_where_something_proves_the_data(
    tmp_path: Path, witness: str | None, dry_run: bool
) -> None:
    columned(tmp_path / "x")
    if witness != "column":
        for suffix in COLUMNS:
            os.unlink(tmp_path / f"x{suffix}")
    damage(tmp_path / "x.seq.idx", 300) if witness == "checksums" else os.unlink(tmp_path / "x.seq.idx")
    done = command("rebuild", tmp_path / "x", *(["--dry-run"] if dry_run else []))
    assert (done.code, done.err) == (0, "")
    if not dry_run:
        assert ("x: a complete shard, every checksum verified\n" in done.out) == bool(witness)
        assert ("no checksum was left to verify that its contents are what was written" in done.out) == (not witness)
        assert rebuild(tmp_path / "x").note == "nothing to do"


def test_of_several_columns_one_that_fits_tells_the_others_apart(tmp_path: Path) -> None:
    columned(tmp_path / "x")
    write_columned(tmp_path / "y", demo_samples(5), SPECS)
    shutil.copy(tmp_path / "y.topk.col", tmp_path / "x.stray.col")
    os.unlink(tmp_path / "x.seq.idx")
    dry = rebuild(tmp_path / "x", dry_run=True)
    report = rebuild(tmp_path / "x")
    assert dry == replace(report, dry_run=True)
    assert [file.path for file in report.files if file.state not in ("good", "rebuilt")] == [f"{tmp_path}/x.stray.col"]
    assert (report.compared, report.files[-2].state) == (True, "lost")
    assert [file.state for file in rebuild(tmp_path / "x").files].count("lost") == 1


def test_of_a_killed_build_no_checksum_is_claimed(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "m")
    writer.add_pack(PACKS[0].tokens, PACKS[0].label_mask, PACKS[0].starts)
    writer.flush()
    writer.suspend()
    done = command("rebuild", tmp_path / "m")
    assert (done.code, "no checksum was left to verify" in done.out, "verified" in done.out) == (0, True, False)


def test_a_header_of_another_shard_is_found_by_a_column(tmp_path: Path) -> None:
    whole = columned(tmp_path / "x")
    others = [Sample(pack.tokens[::-1], pack.mask, pack.starts) for pack in PACKS]
    write_columned(tmp_path / "other" / "x", others, SPECS)
    shutil.copy(tmp_path / "other" / "x.seq.idx", tmp_path / "x.seq.idx")
    with pytest.raises(
        FormatError, match=r"x\.seq\.idx: belongs to shard .* but according to .*x\.source\.col .* move this one away"
    ):
        rebuild(tmp_path / "x")
    os.unlink(tmp_path / "x.seq.idx")
    assert rebuild(tmp_path / "x").compared
    after, others_in = tree_of(tmp_path), [f"other/x{suffix}" for suffix in (*SUFFIXES, *COLUMNS)]
    assert {name: raw for name, raw in after.items() if name not in ("x.seq.idx", *others_in)} == {
        name: raw for name, raw in whole.items() if name != "x.seq.idx"
    }


def test_each_column_that_is_lost_is_said_however_many_there_are(tmp_path: Path) -> None:
    specs = {f"c{number}": ColumnSpec("pack", "u1") for number in range(13)}
    write_columned(tmp_path / "x", PACKS, specs)
    for name in specs:
        damage(tmp_path / f"x.{name}.col", -1)
    assert [file.state for file in rebuild(tmp_path / "x").files] == ["good"] * 5 + ["lost"] * 13
