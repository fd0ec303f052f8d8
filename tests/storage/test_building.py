"""``X.building``: after a kill at any step the old or the new output is complete; errors contain the remedy."""

from __future__ import annotations

import errno
import gc
import glob
import itertools
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kills import killed_at, leave_complete
from sample_packs import WHOLE, assert_holds, demo_samples, five_files, folder_of, opens, tree_of, write_samples

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.errors import FormatError, SFTIndexError, ShardNotFoundError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import BUILDING, SUFFIXES
from megatron_sft_idx.packs.split import SplitSize, output_prefix, split
from megatron_sft_idx.shard import Shard, ShardWriter, find_remains, recover, write_column
from megatron_sft_idx.storage import building, publish
from megatron_sft_idx.storage.building import Building
from megatron_sft_idx.storage.building_files import OUTPUT, Done, building_of, inode_at, read_done

OLD, NEW = demo_samples(3), demo_samples(7)


def write_old(prefix: Path) -> None:
    """Write the shard to replace, with a column that the new one does not have."""
    write_samples(prefix, OLD)
    write_column(prefix, "note", np.arange(3, dtype="u1"), per="pack")


def write_new(prefix: Path, *, durable: bool = False) -> None:
    write_samples(prefix, NEW, overwrite=True, durable=durable)


def state_of(prefix: Path) -> str:
    """Return which shard is at the prefix: ``old``, ``new`` or ``none``. Check that it is complete."""
    if not opens(prefix):
        return "none"
    shard = Shard(prefix)
    state = "old" if len(shard) == len(OLD) else "new"
    assert_holds(shard, OLD if state == "old" else NEW)
    assert verify_shard(prefix, full=True).ok
    return state


# ---- killed, and killed again ----


def finish_by_rebuild(prefix: Path) -> None:
    rebuild(prefix, overwrite=True)


def finish_by_recovery(prefix: Path) -> None:
    recover(prefix, overwrite=True)


def finish_by_writing(prefix: Path) -> None:
    write_new(prefix, durable=True)


FINISHERS = {"rebuild": finish_by_rebuild, "recover": finish_by_recovery, "writer": finish_by_writing}


def done_or_nothing_there(finish: Callable[[Path], None], prefix: Path) -> bool:
    """Finish unfinished work, if there is any. Return whether there was."""
    try:
        finish(prefix)
    except SFTIndexError:
        left = find_remains(prefix)
        if left is not None and (left.is_complete or left.num_packs):
            raise
        return False
    return True


@pytest.fixture(scope="module")
def killed_states(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], list[tuple[int, bool]]]:
    """Return the steps of a writer at which a kill leaves a new state, and whether the output is complete."""

    @cache
    def states(replaces: bool) -> list[tuple[int, bool]]:
        folder, seen, found = tmp_path_factory.mktemp("states"), set(), []
        for step in itertools.count():
            prefix = folder / f"{step}" / "x"
            if replaces:
                write_old(prefix)
            if not killed_at(step, lambda prefix=prefix: write_new(prefix, durable=True)):  # type: ignore[misc]
                assert step > 20
                return found
            prefix.parent.mkdir(exist_ok=True)
            what = (*tree_of(prefix.parent), (prefix.parent / "x.building").exists())
            if what not in seen:
                seen.add(what)
                found.append((step, (prefix.parent / "x.building" / "done.json").exists()))
        raise AssertionError

    return states


@pytest.mark.parametrize("finisher", FINISHERS)
@pytest.mark.parametrize("replaces", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stride", [59, pytest.param(1, marks=pytest.mark.slow)])
def test_a_build_and_its_recovery_may_be_killed_at_any_step(
    tmp_path: Path, killed_states: Callable[[bool], list[tuple[int, bool]]], replaces: bool, finisher: str, stride: int
) -> None:
    """With a stride, each state is tested with a few steps of the recovery; together, all steps are tested."""
    finish = FINISHERS[finisher]
    write_new(tmp_path / "calm" / "x")
    expected = five_files(tmp_path / "calm" / "x")
    most, states = 0, set[tuple[str, str]]()
    for number, (step, is_complete) in enumerate(killed_states(replaces)):
        for again in itertools.count(number % stride, stride):
            prefix = tmp_path / f"{step}-{again}" / "x"
            if replaces:
                write_old(prefix)
            assert killed_at(step, lambda prefix=prefix: write_new(prefix, durable=True))  # type: ignore[misc]
            first = state_of(prefix)
            is_done = not killed_at(again, lambda prefix=prefix: done_or_nothing_there(finish, prefix))  # type: ignore[misc]
            second = state_of(prefix)
            states.add((first, second))
            assert second != "old" or first == "old"
            if is_complete or finisher == "writer":  # then nothing is lost
                done_or_nothing_there(finish, prefix)
                assert state_of(prefix) == "new" or (first, finisher) == ("old", "recover")
            else:
                done_or_nothing_there(finish, prefix)
            if (third := state_of(prefix)) != "none" and finisher != "recover":
                allowed = [*WHOLE, "x.note.col"] if third == "old" else WHOLE
                assert folder_of(prefix.parent) == sorted(allowed)
            if not Shard(prefix).header.rebuilt if third == "new" else False:
                assert five_files(prefix) == expected
            # In any state, running the first command again gives the result of an uninterrupted run.
            write_new(prefix)
            assert five_files(prefix) == expected
            assert folder_of(prefix.parent) == WHOLE
            shutil.rmtree(prefix.parent)
            if is_done:
                most = max(most, again)
                break
    assert most > 20
    assert ("none", "new") in states
    assert (("old", "old") in states) == replaces


def write_file(prefix: Path, text: bytes) -> None:
    with Building.take(str(prefix)) as work:
        if work.is_done:
            work.finish()
            return write_file(prefix, text)
        work.clear()
        work.begin({"work": "file"})
        work.open(OUTPUT).write(text)
        work.stage([OUTPUT], {OUTPUT: old} if (old := inode_at(str(prefix))) is not None else {})
        work.complete()
        work.finish()
    return None


def write_folder(prefix: Path, text: bytes) -> None:
    with Building.take(str(prefix)) as work:
        if work.is_done:
            work.finish()
            return write_folder(prefix, text)
        work.clear()
        work.begin({"work": "folder"})
        os.mkdir(work.path(OUTPUT))
        for name in ("a", "b"):
            (Path(work.path(OUTPUT)) / name).write_bytes(text)
        work.stage([OUTPUT], {OUTPUT: old} if (old := inode_at(str(prefix))) is not None else {})
        work.complete()
        work.finish()
    return None


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("write", [write_file, write_folder])
def test_a_file_or_folder_is_replaced_at_once(
    tmp_path: Path, write: Callable[[Path, bytes], None], can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:  # as on NFS
        monkeypatch.setattr(publish, "_rename", lambda *_: False)
    states = []
    for step in itertools.count():
        prefix = tmp_path / str(step) / "x"
        write(prefix, b"old")
        if not killed_at(step, lambda prefix=prefix: write(prefix, b"new")):  # type: ignore[misc]
            break
        found = {raw for name, raw in tree_of(prefix.parent).items() if name.split("/")[0] == "x"}
        assert len(found) < 2
        states.append(*found or ["none"])
        write(prefix, b"new")
        expected = {"x": b"new"} if write is write_file else {"x/a": b"new", "x/b": b"new"}
        assert tree_of(prefix.parent) == expected
        assert folder_of(prefix.parent) == ["x"]
    assert step > 15
    order = [b"old", "none", b"new"]
    assert states == sorted(states, key=order.index)
    if can_exchange or write is write_file:
        assert {*states} == {b"old", b"new"}


# ---- files of other programs ----


def put_link(path: Path) -> None:
    path.symlink_to("nowhere")


def put_file(path: Path) -> None:
    path.write_bytes(b"precious")


# Foreign entries for the folder of an interrupted build, as functions that create them.
STRANGERS = {
    "notes.txt": put_file,
    ".hidden": put_file,
    ".BIN": put_file,
    "x.bin": put_file,
    "build.json.bak": put_file,
    ".UPPER.col": put_file,
    "link": put_link,
    ".idx": put_link,
    ".note.col": os.mkfifo,
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    ".seq.idx": os.mkdir,
    "parts": put_file,
    "parts/notes.txt": put_file,
    "parts/" + "0" * 32 + ".part": os.mkdir,
    "parts/" + "1" * 32 + ".part": put_link,
    "output/folder": os.mkdir,
    "output/link": put_link,
    "output.old/pipe": os.mkfifo,
}
ACTS: list[Callable[[Path], Any]] = [
    ShardWriter,
    partial(ShardWriter, overwrite=True),
    find_remains,
    partial(recover, overwrite=True),
    rebuild,
    partial(rebuild, dry_run=True),
    partial(rebuild, overwrite=True),
]


def look(folder: Path) -> dict[str, Any]:
    """Return everything in a folder, with its kind and content."""
    found: dict[str, Any] = dict(tree_of(folder))
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        if path.name != "lock" and not stat.S_ISREG(mode):
            found[str(path.relative_to(folder))] = os.readlink(path) if path.is_symlink() else stat.S_IFMT(mode)
    return found


def leave_packs(prefix: Path, **options: Any) -> None:
    writer = ShardWriter(prefix, durable=False, **options)
    for pack in NEW:
        writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
    writer.flush()
    writer.suspend()


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_in_the_folder_is_named_and_left_alone(tmp_path: Path, name: str) -> None:
    write_samples(tmp_path / "x", OLD)
    leave_packs(tmp_path / "x", overwrite=True)
    path = tmp_path / "x.building" / name
    path.parent.mkdir(exist_ok=True)
    STRANGERS[name](path)
    before = look(tmp_path)
    for act in ACTS:
        with pytest.raises(FormatError) as refused:
            act(tmp_path / "x")
        assert str(refused.value).startswith(f"{tmp_path}/x.building: contains {name}, which is not part of a build")
        assert str(refused.value).endswith(": move it away")
    # The shard can still be read.
    assert state_of(tmp_path / "x") == "old"
    assert look(tmp_path) == before
    os.rename(path, tmp_path / "away")
    recover(tmp_path / "x", overwrite=True)
    assert state_of(tmp_path / "x") == "new"
    assert folder_of(tmp_path) == sorted([*WHOLE, "away"])


@pytest.mark.parametrize("name", [*SUFFIXES, ".note.col", "packs", "done.json", "build.json", "done.json.tmp"])
def test_what_is_in_a_folder_that_says_nothing_is_a_strangers(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.building").mkdir()
    put_file(tmp_path / "x.building" / name)
    before = look(tmp_path)
    for act in ACTS:
        with pytest.raises(
            FormatError, match=f"x.building: contains {name}, which is not part of a build.*: move the folder away"
        ):
            act(tmp_path / "x")
    assert look(tmp_path) == before
    assert building_of(f"{tmp_path}/x") is None
    os.rename(tmp_path / "x.building", tmp_path / "away")
    write_new(tmp_path / "x")
    assert folder_of(tmp_path) == sorted([*WHOLE, "away"])


def test_a_stranger_that_comes_while_a_shard_is_written_stays(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x") as writer:
        put_file(tmp_path / "x.building" / "notes.txt")
        put_file(tmp_path / "x.building" / "~lock")
        writer.abandon()
    # It did not exist before, and nothing in it is ours.
    assert tree_of(tmp_path) == {}


@pytest.mark.parametrize("empty", ["packs", ".bin", "done.json"])
def test_empty_files_of_a_writer_that_was_killed_as_it_began_are_no_strangers(tmp_path: Path, empty: str) -> None:
    (tmp_path / "x.building").mkdir()
    for name in ("lock", empty, "build.json.tmp"):
        (tmp_path / "x.building" / name).touch()
    if empty == "done.json":  # it is renamed when it is complete
        with pytest.raises(FormatError, match=r"contains done\.json, which is not part of a build"):
            ShardWriter(tmp_path / "x")
        return
    write_new(tmp_path / "x")
    assert folder_of(tmp_path) == WHOLE


# ---- damaged records ----

DAMAGED = [b"", b"[1]", b"{", b'{"sft-building": 1', b'{"sft-building": 1}}', b'{"sft-building": 1, "a": \xff}']
DAMAGED += [b'{"sft-building": 1, "a": ' + b"[" * 100_000]


_DAMAGED = r"x\.building(/{0}\.json: damaged, so the|: contains {0}\.json, which is not part of a build)"


def follow_remedy(prefix: Path, error: FormatError) -> None:
    """Follow the error's advice, and build again."""
    if str(error).endswith(": move it away"):  # nothing shows that it is ours
        name = str(error).split(": contains ")[1].split(",")[0]
        os.rename(f"{prefix}.building/{name}", prefix.parent / "away")
        if name == "done.json" and not Path(f"{prefix}.seq.idx").exists():  # during the renames
            for path in prefix.parent.glob("x.*[!g]"):
                path.unlink()
        write_new(prefix)
        assert state_of(prefix) == "new"
        assert folder_of(prefix.parent) == sorted(["away", *WHOLE])
        return
    said = f"remove the folder {prefix}.building and the output {prefix}, unless that is complete; then run the command"
    assert f"{said} again" in str(error)
    shutil.rmtree(f"{prefix}.building")
    if not Path(f"{prefix}.seq.idx").exists():
        for path in prefix.parent.glob("x.*"):
            path.unlink()
    write_new(prefix)
    assert state_of(prefix) == "new"
    assert folder_of(prefix.parent) == WHOLE


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("raw", DAMAGED)
def test_a_damaged_build_json_is_said_with_a_remedy_that_works(tmp_path: Path, raw: bytes, replaces: bool) -> None:
    if replaces:
        write_old(tmp_path / "x")
    leave_complete(lambda: write_new(tmp_path / "x"))
    (tmp_path / "x.building" / "build.json").write_bytes(raw)
    before = look(tmp_path)
    for act in ACTS:
        with pytest.raises(FormatError, match=_DAMAGED.format("build")) as refused:
            act(tmp_path / "x")
    assert look(tmp_path) == before
    assert state_of(tmp_path / "x") == ("old" if replaces else "none")
    follow_remedy(tmp_path / "x", refused.value)


WRONG = [
    {"files": None},
    {"files": [1]},
    {"files": ["../x"]},
    {"files": ["build.json"]},
    {"files": ["parts"]},
    {"files": [".seq.idx/.."]},
    {"replaces": []},
    {"replaces": {".bin": "7"}},
    {"replaces": {".bin": True}},
    {"replaces": {"../notes": 7}},
    {"outputs": [""]},
    {"outputs": ["/../y"]},
    {"outputs": [None]},
    {"awaits": 1},
    {"awaits": None},
]


@pytest.mark.parametrize("is_renaming", [False, True])
@pytest.mark.parametrize("changed", [*DAMAGED, *WRONG])
def test_a_damaged_done_json_is_said_with_a_remedy_that_works(
    tmp_path: Path, changed: bytes | dict[str, Any], is_renaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_old(tmp_path / "x")
    if is_renaming:
        fail_at(".idx", KeyboardInterrupt(), monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            write_new(tmp_path / "x")
        monkeypatch.undo()
    else:
        leave_complete(lambda: write_new(tmp_path / "x"))
    path = tmp_path / "x.building" / "done.json"
    good = json.loads(path.read_bytes())
    assert read_done(f"{tmp_path}/x")._asdict().keys() <= good.keys()
    path.write_bytes(changed if isinstance(changed, bytes) else json.dumps({**good, **changed}).encode())
    before = look(tmp_path)
    for act in ACTS:
        with pytest.raises(FormatError, match=_DAMAGED.format("done")) as refused:
            act(tmp_path / "x")
    assert look(tmp_path) == before
    follow_remedy(tmp_path / "x", refused.value)


def test_paths_that_are_no_text_are_noted(tmp_path: Path) -> None:
    with Building.take(f"{tmp_path}/x") as work:
        work.begin({"source": "a\udcffb"})
    with Building.take(f"{tmp_path}/x", create=False) as work:
        assert work.holds({"source": "a\udcffb"})
        work.discard()


# ---- missing files, and other entries at their names ----


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("name", [*SUFFIXES, ".note.col"])
def test_a_file_that_is_gone_leaves_everything_as_it_is(tmp_path: Path, name: str, replaces: bool) -> None:
    columns = {"note": ColumnSpec("pack", "u1")}

    def write() -> None:
        with ShardWriter(tmp_path / "x", columns=columns, overwrite=True) as writer:
            for pack in NEW:
                writer.add_pack(pack.tokens, pack.label_mask, pack.starts, columns={"note": [7]})

    if replaces:
        write_old(tmp_path / "x")
    leave_complete(write)
    (tmp_path / "x.building" / name).unlink()
    before = look(tmp_path)
    for act in [ShardWriter, find_remains, recover, rebuild, partial(rebuild, dry_run=True)]:
        with pytest.raises(FormatError) as refused:
            act(tmp_path / "x")
        said = (
            f"{name}: this file was removed before it was moved to its final path; run the command that wrote it again"
        )
        assert said in str(refused.value)
    with Building.take(f"{tmp_path}/x", create=False) as work, pytest.raises(FormatError, match="was removed before"):
        work.finish()
    assert look(tmp_path) == before
    write()
    assert state_of(tmp_path / "x") == "new"
    assert folder_of(tmp_path) == sorted([*WHOLE, "x.note.col"])


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("name", SUFFIXES)
@pytest.mark.parametrize("put", [put_file, os.mkdir, os.mkfifo, put_link])
def test_something_that_has_appeared_leaves_everything_as_it_is(
    tmp_path: Path, put: Callable[[Path], None], name: str, replaces: bool
) -> None:
    if replaces:
        write_old(tmp_path / "x")
    leave_complete(lambda: write_new(tmp_path / "x"))
    target = tmp_path / f"x{name}"
    if replaces:
        os.rename(target, tmp_path / "old")
    put(target)
    before = look(tmp_path)
    for _ in range(2):
        with Building.take(f"{tmp_path}/x", create=False) as work, pytest.raises(FormatError) as refused:
            work.finish()
        assert str(refused.value) == (
            f"{target}: something else was written here after this command began, and was not replaced; move it away,"
            f" then run the same command again: the output is complete in {tmp_path}/x.building"
        )
        assert look(tmp_path) == before
    os.rename(target, tmp_path / "away")
    write_new(tmp_path / "x")
    assert state_of(tmp_path / "x") == "new"
    assert folder_of(tmp_path) == sorted([*WHOLE, "away", *["old"] * replaces])


def test_a_column_that_took_the_place_of_one_that_was_to_go_stays(tmp_path: Path) -> None:
    write_old(tmp_path / "x")
    leave_complete(lambda: write_new(tmp_path / "x"))
    os.rename(tmp_path / "x.note.col", tmp_path / "old")
    put_file(tmp_path / "x.note.col")
    with Building.take(f"{tmp_path}/x", create=False) as work:
        work.finish()
    assert len(Shard(tmp_path / "x")) == len(NEW)
    assert (tmp_path / "x.note.col").read_bytes() == b"precious"


# ---- several outputs ----


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    write_samples(folder / "old", demo_samples(12), metadata={"which": "old"})
    write_samples(folder / "new", demo_samples(15), metadata={"which": "new"})
    split(folder / "new", folder / "calm" / "x", SplitSize(shards=3), durable=False)
    return folder


def split_anew(sources: Path, folder: Path, *, durable: bool = False) -> None:
    split(sources / "new", folder / "x", SplitSize(shards=3), overwrite=True, durable=durable)


def found_by_glob(folder: Path) -> set[str]:
    """Return the shards that a glob of all outputs finds. Check that all are complete."""
    found = set()
    for path in glob.glob(f"{folder}/x-*.seq.idx"):
        prefix = path.removesuffix(".seq.idx")
        assert opens(prefix)
        found.add(Shard(prefix).header.metadata["which"])
        assert verify_shard(prefix, full=True).ok
    return found


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_of_several_outputs_old_and_new_are_never_seen_together(tmp_path: Path, sources: Path, stride: int) -> None:
    states, counts = [], []
    for step in itertools.count(0, stride):
        folder = tmp_path / str(step)
        split(sources / "old", folder / "x", SplitSize(shards=3), durable=False)
        if not killed_at(step, lambda folder=folder: split_anew(sources, folder, durable=True)):  # type: ignore[misc]
            break
        found = found_by_glob(folder)
        assert len(found) < 2
        states.append(*found or ["none"])
        counts.append(len(glob.glob(f"{folder}/x-*.seq.idx")))
        split_anew(sources, folder)
        assert tree_of(folder) == tree_of(sources / "calm")
        assert folder_of(folder) == folder_of(sources / "calm")
    assert step > 100
    order = ["old", "none", "new"]
    assert states == sorted(states, key=order.index)
    assert {*states} == {*order}
    # Sometimes only some of the old or of the new shards exist, while the others are removed or published.
    old, new = (
        [count for state, count in zip(states, counts, strict=True) if state == which] for which in ("old", "new")
    )
    assert old == sorted(old, reverse=True)
    assert new == sorted(new)
    assert old[0] == new[-1] == 3


@pytest.mark.slow
def test_a_split_that_is_finished_may_be_killed_too(tmp_path: Path, sources: Path) -> None:
    for step in itertools.count():
        folder = tmp_path / str(step)
        split(sources / "old", folder / "x", SplitSize(shards=3), durable=False)
        leave_complete(lambda folder=folder: split_anew(sources, folder))  # type: ignore[misc]
        if not killed_at(step, lambda folder=folder: split_anew(sources, folder, durable=True)):  # type: ignore[misc]
            break
        assert len(found_by_glob(folder)) < 2
        split_anew(sources, folder)
        assert tree_of(folder) == tree_of(sources / "calm")
        shutil.rmtree(folder)
    assert step > 40


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("name", [".bin", ".seq.idx"])
def test_an_output_that_lost_a_file_is_made_again(
    tmp_path: Path, sources: Path, name: str, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(sources / "old", tmp_path / "x", SplitSize(shards=3), durable=False)
    if is_done:
        leave_complete(lambda: split_anew(sources, tmp_path))
    else:
        complete = Building.complete

        def stop_at_the_job(self: Building, outputs: Any = (), *, awaits: bool = False) -> None:
            if outputs:
                raise KeyboardInterrupt
            complete(self, outputs, awaits=awaits)

        with monkeypatch.context() as patch:
            patch.setattr(Building, "complete", stop_at_the_job)
            with pytest.raises(KeyboardInterrupt):
                split_anew(sources, tmp_path)
    Path(f"{output_prefix(str(tmp_path / 'x'), 1, 3)}{BUILDING}/{name}").unlink()
    if is_done:
        with pytest.raises(FormatError, match=r"was removed before it was moved to its final path; .* \(--overwrite\)"):
            split(sources / "new", tmp_path / "x", SplitSize(shards=3))
        assert found_by_glob(tmp_path) == {"old"}
    split_anew(sources, tmp_path)
    assert tree_of(tmp_path) == tree_of(sources / "calm")


# ---- a folder where only owners may replace files ----


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes the folder sticky and gives one file in it to another user."""

    def make(name: str) -> None:
        lstat, owner = os.lstat, os.geteuid()
        tmp_path.chmod(0o1777)

        def changed(path: Any, **options: Any) -> os.stat_result:
            status = lstat(path, **options)
            uid = 4321 if os.fspath(path) == f"{tmp_path}/{name}" else 1234
            return os.stat_result((*status[:4], uid, *status[5:])) if uid == 4321 or owner != 1234 else status

        def folder_of_root(path: Any, **options: Any) -> os.stat_result:
            status = real_stat(path, **options)
            return os.stat_result((*status[:4], 0, *status[5:])) if os.fspath(path) == str(tmp_path) else status

        real_stat = os.stat
        monkeypatch.setattr(building.os, "lstat", changed)
        monkeypatch.setattr(building.os, "stat", folder_of_root)
        monkeypatch.setattr(building.os, "geteuid", lambda: 1234)

    return make


@pytest.mark.parametrize("name", ["x.bin", "x.seq.idx", "x.note.col"])
def test_another_users_file_in_a_sticky_folder_is_refused_before_the_first_is_removed(
    tmp_path: Path, name: str, foreign: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_old(tmp_path / "x")
    before = look(tmp_path)
    foreign(name)
    with pytest.raises(
        FormatError, match=rf"{name}: belongs to another user, and .* only the owner .* \(sticky bit\); choose"
    ):
        write_new(tmp_path / "x")
    monkeypatch.undo()
    assert look(tmp_path) == before
    leave_complete(lambda: write_new(tmp_path / "x"))  # the folder became sticky while it was written
    before = look(tmp_path)
    foreign(name)
    for act in (write_new, partial(recover, overwrite=True), partial(rebuild, overwrite=True)):
        with pytest.raises(FormatError, match=rf"{name}: belongs to another user"):
            act(tmp_path / "x")
    monkeypatch.undo()
    assert look(tmp_path) == before
    assert state_of(tmp_path / "x") == "old"
    with Building.take(f"{tmp_path}/x") as work:
        assert work.is_done
    write_new(tmp_path / "x")
    assert state_of(tmp_path / "x") == "new"


# ---- errors of the disk ----


def fail_at(end: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the rename of this file fail, after the renames of earlier files."""
    move = building.move_into_place

    def failing(source: str, target: str, old: Any) -> str | None:
        if source.endswith("/" + end):
            raise error
        return move(source, target, old)

    monkeypatch.setattr(building, "move_into_place", failing)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("end", SUFFIXES)
def test_an_error_of_the_disk_among_the_renames_says_what_to_do(
    tmp_path: Path, end: str, replaces: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    surprises: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", surprises.append)
    if replaces:
        write_old(tmp_path / "x")
    with monkeypatch.context() as patch:
        fail_at(end, OSError(errno.ENOSPC, "No space left on device", "somewhere"), patch)
        writer = ShardWriter(tmp_path / "x", overwrite=True)
        for pack in NEW:
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
        with pytest.raises(OSError, match="No space left on device") as failed:
            writer.finalize()
    remedy = f"the rest is complete in {tmp_path}/x.building: run the same command again to finish it"
    assert failed.value.errno == errno.ENOSPC
    assert failed.value.strerror == f"No space left on device; {remedy}"
    assert failed.value.filename == "somewhere"
    with pytest.raises(FormatError, match="finished or was abandoned"):
        writer.add_pack([1], [0], [0])
    del writer, failed
    gc.collect()
    assert (surprises, capsys.readouterr()) == ([], ("", ""))
    assert state_of(tmp_path / "x") == "none"
    write_new(tmp_path / "x")
    assert state_of(tmp_path / "x") == "new"
    assert folder_of(tmp_path) == WHOLE


@pytest.mark.parametrize("call", ["fsync", "rename", "unlink", "rmdir"])
def test_an_error_at_any_step_of_finishing_leaves_what_can_be_finished(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = set()
    for step in itertools.count():
        prefix = tmp_path / str(step) / "x"
        write_old(prefix)
        leave_complete(lambda prefix=prefix: write_new(prefix))  # type: ignore[misc]
        todo, real = [step], getattr(os, call)

        def failing(*arguments: Any, todo: list[int] = todo, real: Any = real, **options: Any) -> Any:
            todo[0] -= 1
            if todo[0] == -1:
                raise OSError(errno.EIO, "Input/output error", arguments[0])
            return real(*arguments, **options)

        with monkeypatch.context() as patch, Building.take(str(prefix), create=False) as work:
            patch.setattr(building.os, call, failing)
            try:
                work.finish()
            except OSError as error:
                assert "run the same command again to finish it" in str(error)  # noqa: PT017
                assert work.closed
        if todo[0] >= 0:
            break
        states.add(state_of(prefix))
        write_new(prefix)
        assert state_of(prefix) == "new"
        assert folder_of(prefix.parent) == WHOLE
    assert states


# ---- one writer at a time, and release of the lock ----


def test_two_writers_at_once(tmp_path: Path) -> None:
    with Building.take(f"{tmp_path}/x") as first:
        first.begin({"work": "one"})
        for options in ({}, {"create": False}, {"shared": True}, {"wait": 0.3}):
            with pytest.raises(FormatError, match="x: another process is writing this output; wait for it"):
                Building.take(f"{tmp_path}/x", **options)  # type: ignore[arg-type]
    # Readers block writers, but not other readers.
    with (
        Building.take(f"{tmp_path}/x", shared=True, create=False),
        Building.take(f"{tmp_path}/x", shared=True) as other,
    ):
        assert other.holds({"work": "one"})
        with pytest.raises(FormatError, match="another process is writing"):
            Building.take(f"{tmp_path}/x")
    with Building.take(f"{tmp_path}/x") as second:
        assert second.holds({"work": "one"})
        assert not second.holds({"work": "two"})
        second.discard()
    assert folder_of(tmp_path) == []


def test_a_writer_waits_for_another_one(tmp_path: Path) -> None:
    first = Building.take(f"{tmp_path}/x")
    begin, go = os.pipe()
    if (child := os.fork()) == 0:
        status = 1
        try:
            first.close()  # only the parent's descriptor of the lock
            os.write(go, b"x")
            with Building.take(f"{tmp_path}/x", wait=60) as second:
                second.begin({"work": "second"})
            status = 0
        finally:
            os._exit(status)
    os.read(begin, 1)
    first.discard()
    assert os.waitpid(child, 0)[1] == 0
    with Building.take(f"{tmp_path}/x", create=False) as left:
        assert left.holds({"work": "second"})


def test_a_fork_only_closes_it(tmp_path: Path) -> None:
    work = Building.take(f"{tmp_path}/x")
    work.begin({"work": "build"})
    work.open(".bin").write(b"1234")
    if (child := os.fork()) == 0:
        status = 1
        try:
            with pytest.raises(FormatError, match=f"process {os.getppid()}, and cannot be used in a forked process"):
                work.require_owner()
            work.discard()
            assert work.closed
            work.discard()
            work.release()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert folder_of(tmp_path / "x.building") == [".bin", "build.json", "lock"]
    with pytest.raises(FormatError, match="another process is writing"):
        Building.take(f"{tmp_path}/x")
    work.stage([".bin"], {})
    work.complete()
    work.finish()
    assert tree_of(tmp_path) == {"x.bin": b"1234"}


@pytest.mark.parametrize("last", ["finish", "discard", "release", "close"])
def test_it_ends_once(tmp_path: Path, last: str) -> None:
    work = Building.take(f"{tmp_path}/x")
    work.begin({"work": "build"})
    work.open(".bin").write(b"1234")
    work.stage([".bin"], {})
    work.complete()
    getattr(work, last)()
    assert work.closed
    left = tree_of(tmp_path)
    done = b'{"sft-building": 1, "files": [".bin"], "replaces": {}, "outputs": [], "awaits": false}'
    complete = {
        "x.building/.bin": b"1234",
        "x.building/build.json": b'{"sft-building": 1, "work": "build"}',
        "x.building/done.json": done,
    }
    assert left == {"finish": {"x.bin": b"1234"}, "discard": {}, "release": complete, "close": complete}[last]
    number = os.open(tmp_path, os.O_RDONLY)  # gets the descriptor number of the lock
    for end in ("discard", "release", "close", "close"):
        getattr(work, end)()
    os.fstat(number)
    os.close(number)
    assert tree_of(tmp_path) == left
    if last in ("release", "close"):
        assert read_done(f"{tmp_path}/x") == Done([".bin"], {}, [], awaits=False)


def test_a_folder_in_which_nothing_was_begun_goes_with_its_writer(tmp_path: Path) -> None:
    with Building.take(f"{tmp_path}/a/x") as work:
        work.release()
    assert folder_of(tmp_path / "a") == []
    with pytest.raises(FileNotFoundError):
        Building.take(f"{tmp_path}/a/x", create=False)
    with pytest.raises(ShardNotFoundError):
        rebuild(tmp_path / "a" / "x")
    assert folder_of(tmp_path / "a") == []


def test_the_lock_is_released_though_the_folder_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Building.take(str(tmp_path / "x"))
    folder.begin({"work": "test"})

    def refuse(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        folder.discard()
    monkeypatch.undo()
    Building.take(str(tmp_path / "x")).discard()
    assert os.listdir(tmp_path) == []
