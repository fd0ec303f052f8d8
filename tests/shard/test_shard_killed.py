"""The log of a build's packs, and the remains of builds that were killed, failed or forked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kills import killed_at, leave_complete
from sample_packs import WHOLE, assert_holds, demo_samples, five_files, folder_of, opens, tree_of, write_samples

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard, ShardWriter, find_remains, recover
from megatron_sft_idx.shard import writer as writer_module
from megatron_sft_idx.shard.pack_log import read_blocks
from megatron_sft_idx.storage import building

ROOT = Path(__file__).parents[2]


# ---- the log of packs ----


def test_the_log_knows_what_is_written_while_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "STAGE_TOKENS", 16)
    packs = demo_samples(40)
    folder = tmp_path / "x.building"
    seen = 0
    with ShardWriter(tmp_path / "x", capacity=99, pad_id=3, metadata={"a": 1}, durable=False) as writer:
        assert json.loads((folder / "build.json").read_bytes()) == {
            "sft-building": 1,
            "work": "build",
            "shard": {
                "token_dtype": 4,
                "mask_dtype": 1,
                "capacity": 99,
                "sequence_multiple": 1,
                "pad_id": 3,
                "metadata": {"a": 1},
            },
        }
        for added, pack in enumerate(packs):
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
            records = records_of(folder / "packs")
            assert records == [[len(p.tokens), len(p.starts)] for p in packs[: len(records)]]
            assert added - 8 < len(records) <= added
            tokens = sum(length for length, _ in records)
            assert (folder / ".bin").stat().st_size == 4 * tokens
            assert (folder / ".loss.bin").stat().st_size == tokens
            seen = len(records)
        assert seen > 20


def records_of(log: Path) -> list[list[int]]:
    with open(log, "rb") as stream:
        return [record for block in read_blocks(stream) for record in block.tolist()]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10**6), flip=st.booleans())
def test_a_torn_log_gives_a_prefix_of_its_blocks(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: bool
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    with ShardWriter(folder / "x", durable=False) as writer:
        for pack in demo_samples(9):
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
            writer.flush()
        raw = bytearray((folder / "x.building" / "packs").read_bytes())
        writer.abandon()
    (folder / "whole").write_bytes(raw)
    cut %= len(raw)
    if flip:
        raw[cut] ^= 1
    (folder / "torn").write_bytes(raw if flip else raw[:cut])
    expected, found = records_of(folder / "whole"), records_of(folder / "torn")
    assert len(expected) == 9
    assert len(found) < len(expected)
    assert found == expected[: len(found)]


def test_the_journal_of_an_earlier_version_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    (tmp_path / "x.journal").write_bytes(b"SFTJRNL3" + bytes(90))
    (tmp_path / "x.bin.tmp").write_bytes(b"1234")
    before = tree_of(tmp_path)
    for act in (find_remains, recover, rebuild, ShardWriter, partial(ShardWriter, overwrite=True)):
        with pytest.raises(FormatError, match=r"x\.journal: .* earlier version .* remove this file and the x\.\*\.tmp"):
            act(tmp_path / "x")
    assert tree_of(tmp_path) == before
    for path in [tmp_path / "x.journal", *tmp_path.glob("x.*.tmp")]:
        path.unlink()
    write_samples(tmp_path / "x", demo_samples())
    assert folder_of(tmp_path) == WHOLE


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_unpublished_file_that_is_gone_is_made_anew_where_packs_do_not_need_it(tmp_path: Path, suffix: str) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack([1, 2], [1, 0], [0])
        writer.complete()
        writer.suspend()
    (tmp_path / "x.building" / suffix).unlink()
    if suffix.endswith(".idx") or suffix == ".seq.idx":
        assert recover(tmp_path / "x").num_packs == 1
        assert verify_shard(tmp_path / "x", full=True).ok
        assert folder_of(tmp_path) == WHOLE
    else:
        with pytest.raises(FormatError, match="no complete pack had been written yet"):
            recover(tmp_path / "x")


# ---- killed ----


def run(program: str, *arguments: str, expected: int = 0) -> str:
    """Run a program in a new process and return its stderr."""
    source = "import sys; sys.path[:0] = ['.', 'tests']\n" + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == expected, done.stderr
    return done.stderr


def test_a_build_killed_halfway_leaves_its_folder_and_no_shard(tmp_path: Path) -> None:
    run(
        """
        import os, signal
        from sample_packs import demo_samples
        from megatron_sft_idx.shard import ShardWriter
        writer = ShardWriter(sys.argv[1])
        for pack in demo_samples(30):
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
            if writer.num_packs == 20:
                writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        str(tmp_path / "x"),
        expected=-signal.SIGKILL,
    )
    assert folder_of(tmp_path) == ["x.building"]
    assert folder_of(tmp_path / "x.building") == [".bin", ".loss.bin", ".seq.bin", "build.json", "lock", "packs"]
    with pytest.raises(ShardNotFoundError, match="interrupted here"):
        Shard(tmp_path / "x")
    packs = demo_samples(20)
    assert records_of(tmp_path / "x.building" / "packs") == [[len(pack.tokens), len(pack.starts)] for pack in packs]
    ids = [token for pack in packs for token in pack.tokens]
    assert np.fromfile(tmp_path / "x.building" / ".bin", "<i4").tolist() == ids
    with pytest.raises(FormatError, match=r"interrupted build. Recover its packs with .* or pass overwrite"):
        ShardWriter(tmp_path / "x")
    write_samples(tmp_path / "x", packs, overwrite=True)
    assert folder_of(tmp_path) == WHOLE
    assert_holds(Shard(tmp_path / "x"), packs)


@pytest.mark.parametrize("replaces", [pytest.param(False, marks=pytest.mark.slow), True])
def test_killed_at_any_step_of_publication_a_whole_shard_opens_or_none(tmp_path: Path, replaces: bool) -> None:
    old, new = demo_samples(3), demo_samples(5)
    states = []
    for step in range(100):
        folder = tmp_path / str(step)
        if replaces:
            write_samples(folder / "x", old)
        if not killed_at(step, lambda x=folder / "x": write_samples(x, new, overwrite=True, durable=True)):  # type: ignore[misc]
            assert folder_of(folder) == WHOLE
            break
        if opens(folder / "x"):
            shard = Shard(folder / "x")
            states.append("old" if len(shard) == len(old) else "new")
            assert_holds(shard, old if len(shard) == len(old) else new)
        else:
            states.append("none")
            if not replaces and not (folder / "x.bin").exists():
                continue
            # Once a file has its final name, or the old shard is gone, done.json exists.
            assert (folder / "x.building" / "done.json").exists()
            for suffix in SUFFIXES:
                assert (folder / f"x{suffix}").exists() or (folder / "x.building" / suffix).exists()
    # At least these steps: create the folder; sync and rename build.json and done.json; sync and rename five files;
    # remove the log, the lock and the folder; sync the folders. If a shard is replaced, its .seq.idx is unlinked.
    assert len(states) > (28 if replaces else 26)
    order = ["old", "none", "new"] if replaces else ["none", "new"]
    assert states == sorted(states, key=order.index)
    assert set(states) == set(order)


def fail_at(suffix: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the rename of the file with this suffix fail, after the renames of earlier files."""
    put = building.move_into_place

    def failing(source: str, target: str, found: Any) -> None:
        if target.endswith(suffix):
            raise error
        put(source, target, found)

    monkeypatch.setattr(building, "move_into_place", failing)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("replaces", [False, True])
def test_publication_that_fails_halfway_keeps_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool, error: BaseException
) -> None:
    if replaces:
        write_samples(tmp_path / "x", demo_samples(3))
    fail_at(".seq.bin", error, monkeypatch)
    with pytest.raises(type(error)):
        write_samples(tmp_path / "x", demo_samples(5), overwrite=replaces)
    assert not opens(tmp_path / "x")
    for name in (".seq.bin", ".idx", ".seq.idx", "done.json"):
        assert (tmp_path / "x.building" / name).exists()
    monkeypatch.undo()
    write_samples(tmp_path / "calm" / "x", demo_samples(5))
    recover(tmp_path / "x")
    assert five_files(tmp_path / "x") == five_files(tmp_path / "calm" / "x")
    assert folder_of(tmp_path) == ["calm", *WHOLE]


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("suffix", [".loss.bin", ".seq.bin", ".idx", ".seq.idx"])
def test_of_a_shard_that_lost_a_file_among_its_renames_no_more_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, replaces: bool
) -> None:
    """The next writer must not publish a mix of this build and the replaced shard, which may have equal sizes."""
    if replaces:
        write_samples(tmp_path / "x", demo_samples(3))
    fail_at(".loss.bin", KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        write_samples(tmp_path / "x", demo_samples(3), overwrite=replaces)
    monkeypatch.undo()
    (tmp_path / "x.building" / suffix).unlink()
    before = tree_of(tmp_path)
    for finish in (find_remains, recover, rebuild, ShardWriter):
        with pytest.raises(FormatError, match=r"\(--overwrite\)"):
            finish(tmp_path / "x")
    assert tree_of(tmp_path) == before
    write_samples(tmp_path / "x", demo_samples(4), overwrite=True)
    assert folder_of(tmp_path) == WHOLE
    assert_holds(Shard(tmp_path / "x"), demo_samples(4))


# ---- forks, and the end of a process ----


def test_a_fork_neither_writes_nor_removes(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", durable=False)
    writer.add_pack([1, 2], [1, 0], [0])
    if (child := os.fork()) == 0:
        status = 1
        try:
            for act in (writer.flush, writer.finalize):
                with pytest.raises(FormatError, match="a forked process"):
                    act()
            writer.abandon()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(FormatError, match="another process is writing"):
        ShardWriter(tmp_path / "x", overwrite=True)
    writer.add_pack([3, 4], [1, 0], [0])
    writer.finalize()
    assert [pack["input_ids"].tolist() for pack in Shard(tmp_path / "x")] == [[1, 2], [3, 4]]


def test_a_fork_that_closes_late_takes_nothing_back(tmp_path: Path) -> None:
    """Files reserve disk space in advance, and release what they do not need."""
    ids, mask = np.arange(1, 300_001, dtype=np.int32), np.append(np.ones(299_999, np.uint8), 0)
    writer = ShardWriter(tmp_path / "x", durable=False)
    writer.add_pack(ids, mask, [0])
    writer.flush()
    begin, go = os.pipe()
    if (child := os.fork()) == 0:
        os.read(begin, 1)
        writer.abandon()
        os._exit(0)
    writer.add_pack(ids, mask, [0])
    writer.flush()
    os.write(go, b"x")
    assert os.waitpid(child, 0)[1] == 0
    writer.add_pack(ids, mask, [0])
    writer.finalize()
    assert verify_shard(tmp_path / "x", full=True).ok


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("replaced", [False, True])
def test_an_unpublished_file_that_went_away_is_told_before_anything_is_renamed(
    suffix: str, replaced: bool, tmp_path: Path
) -> None:
    write_samples(tmp_path / "x", demo_samples(3), capacity=64)
    before = tree_of(tmp_path)
    writer = ShardWriter(tmp_path / "x", durable=False, overwrite=True)
    writer.add_pack([1, 2], [1, 0], [0])
    writer.complete()
    unpublished = tmp_path / "x.building" / suffix
    unpublished.unlink()
    if replaced:
        unpublished.write_bytes(b"of somebody else")
    with pytest.raises(FormatError, match=r"x\.building/\S+: was removed or replaced while it was being written"):
        writer.finalize()
    assert tree_of(tmp_path) == before
    assert folder_of(tmp_path) == WHOLE


def write_graded(prefix: Path, tokens: list[int], **options: Any) -> ShardWriter:
    writer = ShardWriter(prefix, columns={"grade": ColumnSpec("pack", "u1")}, durable=False, **options)
    writer.add_pack(tokens, [1, 0], [0], columns={"grade": tokens[:1]})
    return writer


@pytest.mark.parametrize("finish", [find_remains, partial(recover, overwrite=True), rebuild, ShardWriter])
@pytest.mark.parametrize("suffix", [*SUFFIXES, ".grade.col"])
def test_a_file_that_was_lost_is_not_taken_from_the_shard_that_is_replaced(
    suffix: str, finish: Callable[[Path], Any], tmp_path: Path
) -> None:
    write_graded(tmp_path / "x", [1, 2]).finalize()
    before = tree_of(tmp_path)
    leave_complete(write_graded(tmp_path / "x", [3, 4], overwrite=True).finalize)
    (tmp_path / "x.building" / suffix).unlink()
    with pytest.raises(FormatError, match=r"x\.building/\S+: this file was removed .*\(--overwrite\)"):
        finish(tmp_path / "x")
    assert before.items() <= tree_of(tmp_path).items()
    assert Shard(tmp_path / "x")[0]["input_ids"].tolist() == [1, 2]
    write_graded(tmp_path / "x", [3, 4], overwrite=True).finalize()
    assert folder_of(tmp_path) == sorted(before)
    assert Shard(tmp_path / "x")[0]["input_ids"].tolist() == [3, 4]


@pytest.mark.parametrize("finish", [find_remains, partial(recover, overwrite=True), rebuild, ShardWriter])
@pytest.mark.parametrize("suffix", [*SUFFIXES, ".grade.col"])
def test_of_a_complete_shard_that_lost_a_file_nothing_appears(
    suffix: str, finish: Callable[[Path], Any], tmp_path: Path
) -> None:
    leave_complete(write_graded(tmp_path / "x", [1, 2]).finalize)
    (tmp_path / "x.building" / suffix).unlink()
    before = tree_of(tmp_path)
    with pytest.raises(FormatError, match=r"x\.building/\S+: this file was removed .*\(--overwrite\)"):
        finish(tmp_path / "x")
    assert tree_of(tmp_path) == before
    write_graded(tmp_path / "x", [1, 2], overwrite=True).finalize()
    assert folder_of(tmp_path) == sorted([*WHOLE, "x.grade.col"])


@pytest.mark.parametrize("suffix", [".bin", ".seq.idx"])
def test_rebuild_finishes_a_shard_of_which_a_file_has_both_of_its_names(suffix: str, tmp_path: Path) -> None:
    """A kill can leave this state on a file system that renames by a second link."""
    writer = ShardWriter(tmp_path / "x", durable=False)
    writer.add_pack([1, 2], [1, 0], [0])
    leave_complete(writer.finalize)
    for other in SUFFIXES[: SUFFIXES.index(suffix)]:
        os.rename(tmp_path / "x.building" / other, tmp_path / f"x{other}")
    os.link(tmp_path / "x.building" / suffix, tmp_path / f"x{suffix}")
    assert rebuild(tmp_path / "x").whole
    assert folder_of(tmp_path) == WHOLE
    assert Shard(tmp_path / "x")[0]["input_ids"].tolist() == [1, 2]


def test_a_writer_left_behind_removes_its_files_silently(tmp_path: Path) -> None:
    program = """
    from megatron_sft_idx.shard import ShardWriter
    writer = ShardWriter(sys.argv[1])
    writer.add_pack([1], [0], [0])
    writer.flush()
    """
    assert run(program, str(tmp_path / "x")) == ""
    assert folder_of(tmp_path) == []


def test_a_constructor_that_fails_says_nothing_more_when_collected(tmp_path: Path) -> None:
    program = """
    import gc
    from megatron_sft_idx.errors import FormatError
    from megatron_sft_idx.shard import Shard, ShardWriter
    for make in (
        lambda: ShardWriter(sys.argv[1], capacity=0), lambda: ShardWriter(sys.argv[1], token_dtype="i8"),
        lambda: ShardWriter(sys.argv[2] + "/x"), lambda: Shard(sys.argv[1]), lambda: Shard(sys.argv[1], backend="s3"),
        lambda: ShardWriter(sys.argv[1], token_dtype="foo"),
    ):
        try:
            make()
        except (FormatError, OSError):
            gc.collect()
        else:
            raise SystemExit(1)
    """
    (tmp_path / "file").write_bytes(b"")
    assert run(program, str(tmp_path / "x"), str(tmp_path / "file")) == ""
