"""Another command runs on the remains of an interrupted one: nothing is lost, and nothing is mixed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import CHATS, command, preprocess, write_rows
from kills import killed_at
from sample_packs import demo_samples, five_files, write_samples

from megatron_sft_idx.check import accept as accept_module
from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.column import PAIR
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import SplitSize, split
from megatron_sft_idx.shard import Shard, ShardWriter, find_remains, recover, remove_shard
from megatron_sft_idx.storage import building
from megatron_sft_idx.storage.outputs import new_folder
from megatron_sft_idx.storage.publish import Kind, head_of

PACKS = demo_samples(12)


def leave_packs(prefix: Path, count: int = 4) -> None:
    """Leave the remains of a program that was killed while it wrote a shard."""
    writer = ShardWriter(prefix, overwrite=True, capacity=64)
    for pack in PACKS[:count]:
        writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
    writer.flush()
    writer.suspend()


def packs_left(prefix: Path) -> int:
    remains = find_remains(prefix)
    return 0 if remains is None else remains.num_packs


def left_whole(work: Any) -> None:
    """Do work in a fork that is killed when the first ``finish`` begins: all files are complete but not renamed."""

    def dies() -> None:
        def kill(self: building.Building, *_: Any) -> None:
            os.kill(os.getpid(), 9)

        building.Building.finish = kill  # type: ignore[method-assign]
        work()

    assert killed_at(10**9, dies)


# ---- packs of a program ----


def test_a_split_that_is_refused_leaves_the_packs_of_a_program(tmp_path: Path) -> None:
    write_samples(tmp_path / "s", PACKS, capacity=64)
    leave_packs(tmp_path / "x-00001-of-00002")
    with pytest.raises(FormatError, match="Recover its packs"):
        split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2))
    assert packs_left(tmp_path / "x-00001-of-00002") == 4
    assert not (tmp_path / "x-00000-of-00002.building").exists()


def test_a_merge_that_finds_itself_leaves_the_packs_of_a_program(tmp_path: Path) -> None:
    write_samples(tmp_path / "s", PACKS, capacity=64)
    merge([tmp_path / "s"], tmp_path / "x")
    leave_packs(tmp_path / "x")
    with pytest.raises(FormatError, match="Recover its packs"):
        merge([tmp_path / "s"], tmp_path / "x")
    assert packs_left(tmp_path / "x") == 4


def test_a_preprocess_that_finds_itself_leaves_the_packs_of_a_program(tmp_path: Path) -> None:
    assert preprocess(tmp_path / "x").code == 0
    leave_packs(tmp_path / "x")
    assert preprocess(tmp_path / "x").out.startswith("found ")
    assert packs_left(tmp_path / "x") == 4


def test_a_pair_that_was_cut_by_a_kill_is_left_out_as_a_whole(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", capacity=64, columns={"pair": PAIR})
    for number in range(5):
        writer.add_pack([1, 2, 3], [1, 1, 0], [0], columns={"pair": np.array([[number // 2, number % 2]], np.uint32)})
        writer.flush()
    writer.suspend()
    rebuild(tmp_path / "x")
    assert len(Shard(tmp_path / "x")) == 4
    assert verify_shard(tmp_path / "x", full=True).ok


# ---- files of other programs ----


def test_stock_data_next_to_a_shard_that_is_set_aside_are_nobody_s_to_replace(tmp_path: Path) -> None:
    write_samples(tmp_path / "s", PACKS, capacity=64)
    left_whole(lambda: split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2)))
    stock = {tmp_path / f"x-00000-of-00002{end}": b"MMIDIDX" * 9 for end in (".bin", ".idx")}
    for path, content in stock.items():
        path.write_bytes(content)
    with pytest.raises(FormatError):
        merge([tmp_path / "s"], tmp_path / "x-00000-of-00002", overwrite=True)
    assert {path: path.read_bytes() for path in stock} == stock


def test_what_comes_between_the_check_and_the_rename_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = building.move_into_place

    def late(temporary: str, path: str, expected: Any) -> Any:
        if path.endswith(".idx") and not path.endswith(".seq.idx"):
            Path(path).write_bytes(b"of somebody")
        return move(temporary, path, expected)

    monkeypatch.setattr(building, "move_into_place", late)
    with pytest.raises(FormatError, match="was written here"):
        write_samples(tmp_path / "x", PACKS)
    monkeypatch.undo()
    assert (tmp_path / "x.idx").read_bytes() == b"of somebody"
    (tmp_path / "x.idx").unlink()
    rebuild(tmp_path / "x")
    assert len(Shard(tmp_path / "x")) == len(PACKS)


def test_a_file_of_another_program_that_has_the_inode_of_an_old_one_is_not_replaced(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", PACKS)
    writer = ShardWriter(tmp_path / "x", overwrite=True)
    writer.add_pack([1, 2], [1, 0], [0])
    for path in tmp_path.glob("x.*"):
        if path.is_file():
            path.write_bytes(b"of another program")  # the inode stays
    with pytest.raises(FormatError, match="never replaced"):
        writer.finalize()
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"of another program"}


def test_an_old_folder_that_a_stranger_came_into_before_a_kill_is_not_removed(tmp_path: Path) -> None:
    kind = Kind("pages of tests", lambda path: head_of(path, 4) == b"ours")

    def write(content: bytes) -> None:
        with new_folder(tmp_path / "d", kind, overwrite=True) as new:
            new.open("a").write(content)
            new.publish()

    write(b"ours old")
    (tmp_path / "d").rename(tmp_path / "aside")
    (tmp_path / "aside").rename(tmp_path / "d")

    def dies() -> None:
        move = building.move_into_place

        def late(*arguments: Any) -> None:
            (tmp_path / "d/notes").write_bytes(b"notes")
            move(*arguments)
            os.kill(os.getpid(), 9)

        building.move_into_place = late
        write(b"ours new")

    assert killed_at(10**9, dies)
    for _ in range(2):
        with pytest.raises(FormatError, match="found notes"):
            write(b"ours newer")
    assert (tmp_path / "d.building/output/notes").read_bytes() == b"notes"
    assert (tmp_path / "d/a").read_bytes() == b"ours new"


# ---- several outputs ----


def test_all_outputs_are_checked_before_the_first_old_one_is_removed(tmp_path: Path) -> None:
    write_samples(tmp_path / "old", PACKS[:6], capacity=64)
    write_samples(tmp_path / "s", PACKS, capacity=64)
    split(tmp_path / "old", tmp_path / "x", SplitSize(shards=2))
    before = [five_files(tmp_path / f"x-0000{number}-of-00002") for number in range(2)]
    left_whole(lambda: split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2), overwrite=True))
    (tmp_path / "x-00001-of-00002.bin").rename(tmp_path / "aside")
    (tmp_path / "x-00001-of-00002.bin").write_bytes(b"of somebody")
    with pytest.raises(FormatError, match="something else was written here"):
        split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2))
    assert five_files(tmp_path / "x-00000-of-00002") == before[0]
    assert verify_shard(tmp_path / "x-00000-of-00002", full=True).ok
    (tmp_path / "aside").replace(tmp_path / "x-00001-of-00002.bin")
    report = split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2))
    assert report.num_kept == 2
    assert sum(len(Shard(prefix)) for prefix in report.prefixes) == len(PACKS)


def test_a_file_that_is_gone_as_it_is_renamed_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_samples(tmp_path / "s", PACKS, capacity=64)
    move = building.move_into_place

    def gone(temporary: str, path: str, expected: Any) -> Any:
        if path.endswith("x-00001-of-00002.idx"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", temporary)
        return move(temporary, path, expected)

    monkeypatch.setattr(building, "move_into_place", gone)
    with pytest.raises(OSError, match="run the same command again"):
        split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2))
    monkeypatch.undo()
    assert split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2)).num_kept == 2


def test_a_command_that_began_in_an_output_is_named(tmp_path: Path) -> None:
    write_samples(tmp_path / "s", PACKS, capacity=64)
    left_whole(lambda: split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2)))
    shutil.rmtree(tmp_path / "x-00001-of-00002.building")
    leave_packs(tmp_path / "x-00001-of-00002")
    for overwrite in (False, True):
        with pytest.raises(FormatError, match="another command began to write here"):
            split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2), overwrite=overwrite)
    assert packs_left(tmp_path / "x-00001-of-00002") == 4


def test_rebuild_finishes_a_job_with_several_outputs(tmp_path: Path) -> None:
    write_samples(tmp_path / "s", PACKS, capacity=64)
    left_whole(lambda: split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2)))
    for dry_run in (True, False):
        report = rebuild(tmp_path / "x", dry_run=dry_run)
        assert report.note == "2 outputs of a split that was complete except for renaming its files"
        assert (tmp_path / "x-00000-of-00002.seq.idx").exists() != dry_run
    assert not list(tmp_path.glob("*.building"))
    assert sum(len(Shard(tmp_path / f"x-0000{number}-of-00002")) for number in range(2)) == len(PACKS)


def test_an_output_that_was_being_removed_is_not_taken_for_one_that_is_set_aside(tmp_path: Path) -> None:
    write_samples(tmp_path / "s", PACKS, capacity=64)
    split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2))
    left_whole(lambda: remove_shard(ShardPaths.of(tmp_path / "x-00000-of-00002")))
    assert split(tmp_path / "s", tmp_path / "x", SplitSize(shards=2)).num_kept in (1, 2)
    assert sum(len(Shard(tmp_path / f"x-0000{number}-of-00002")) for number in range(2)) == len(PACKS)
    assert not list(tmp_path.glob("*.building"))


# ---- rebuild ----


def test_a_shard_that_was_being_accepted_is_accepted_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path / "x", PACKS, capacity=64)
    with open(tmp_path / "x.bin", "r+b") as tokens:
        tokens.write(b"\x07")

    def dies() -> None:
        add_run = ShardWriter.add_run

        def half(self: ShardWriter, run: Any) -> None:
            add_run(self, run)
            self.flush()
            os.kill(os.getpid(), 9)

        ShardWriter.add_run = half  # type: ignore[method-assign]
        rebuild(tmp_path / "x", accept_contents=True)

    monkeypatch.setattr(accept_module, "COPIED_TOKENS", 30)
    assert killed_at(10**9, dies)
    assert (tmp_path / "x.building/packs").stat().st_size
    assert rebuild(tmp_path / "x", accept_contents=True).whole
    assert len(Shard(tmp_path / "x")) == len(PACKS)
    assert verify_shard(tmp_path / "x", full=True).ok


def test_a_whole_build_with_two_damaged_indexes_is_not_said_to_be_whole(tmp_path: Path) -> None:
    packs = [pack for pack in demo_samples(300) if len(pack.starts) > 1]
    left_whole(lambda: write_samples(tmp_path / "x", packs))
    for name in (".idx", ".seq.idx"):
        with open(tmp_path / "x.building" / name, "r+b") as file:
            file.seek(-9, os.SEEK_END)
            file.write(b"\xff\xff")
    try:
        report = rebuild(tmp_path / "x")
    except FormatError:
        return
    assert report.whole == verify_shard(tmp_path / "x", full=True).ok


# ---- parts ----


def test_parts_of_an_earlier_run_stay_if_a_row_is_bad(tmp_path: Path) -> None:
    assert preprocess(tmp_path / "x", capacity=16).code == 1  # fails with a too long row after all rows are tokenised
    parts = sorted(path.name for path in tmp_path.glob("x.building/parts/*.part"))
    bad = write_rows(tmp_path / "bad.jsonl", [{"messages": []}])
    refused = preprocess(tmp_path / "x", "--input", CHATS, bad)
    assert (refused.code, "to skip such rows, pass --on-bad-row skip" in refused.err) == (1, True), refused
    assert {*parts} <= {path.name for path in tmp_path.glob("x.building/parts/*.part")}
    done = preprocess(tmp_path / "x", "--input", CHATS, bad, "--on-bad-row", "skip")
    assert (done.code, "parts reused" in done.err) == (0, True), done


def test_an_output_of_other_input_is_found_before_the_work(tmp_path: Path) -> None:
    assert preprocess(tmp_path / "x", "--output-shards", 2).code == 0
    for path in tmp_path.glob("x-00001-of-00002.*"):
        path.unlink()
    other = write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"},
                                                              {"role": "assistant", "content": "b"}]}] * 9)  # fmt: skip
    refused = preprocess(tmp_path / "x", "--output-shards", 2, "--input", other)
    assert (refused.code, "the content of the input was" in refused.err) == (1, True), refused
    assert not list(tmp_path.glob("*.building"))


def test_recover_says_where_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="there is no such folder"):
        recover(tmp_path / "x")
    assert command("rebuild", tmp_path / "x").code == 1
