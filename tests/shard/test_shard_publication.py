"""Publication is atomic, replaces nothing without permission, and allows one writer per prefix."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sample_packs import WHOLE, demo_samples, five_files, folder_of, write_samples

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard, ShardWriter, find_remains, recover
from megatron_sft_idx.storage import OutputFile, building


@pytest.mark.parametrize("failing", [*SUFFIXES, "packs", "done.json.tmp"])
def test_a_write_that_fails_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    write = OutputFile.write
    full = False

    def limited(self: OutputFile, data: Any) -> None:
        if full and self.path.endswith("x.building/" + failing):
            raise OSError(28, "No space left on device", self.path)
        write(self, data)

    monkeypatch.setattr(OutputFile, "write", limited)
    writer = ShardWriter(tmp_path / "x", durable=False)
    writer.add_pack([1, 2], [1, 0], [0])
    full = True
    with pytest.raises(OSError, match="No space left"):
        writer.finalize()
    with pytest.raises(FormatError, match="abandoned"):
        writer.add_pack([1, 2], [1, 0], [0])
    with pytest.raises(FormatError, match="abandoned"):
        writer.finalize()
    assert folder_of(tmp_path) == []


def test_a_flush_that_fails_is_not_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path / "x", durable=False)
    writer.add_pack([1, 2], [1, 0], [0])
    write = OutputFile.write
    monkeypatch.setattr(OutputFile, "write", lambda self, data: self.path.endswith("/.bin") or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.flush()
    monkeypatch.setattr(OutputFile, "write", write)
    with pytest.raises(FormatError, match="abandoned"):
        writer.finalize()
    assert folder_of(tmp_path) == []


def test_an_exception_inside_publishes_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    old = demo_samples(3)
    write_samples(tmp_path / "x", old)
    before = five_files(tmp_path / "x")
    stopped = RuntimeError("stopped inside")
    with pytest.raises(RuntimeError, match="stopped inside"), ShardWriter(tmp_path / "x", overwrite=True) as writer:  # noqa: PT012
        writer.add_pack([1], [0], [0])
        writer.flush()
        raise stopped
    assert five_files(tmp_path / "x") == before
    assert folder_of(tmp_path) == WHOLE


def test_a_clean_exit_after_finalize_or_abandon_does_nothing(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.finalize()
    with ShardWriter(tmp_path / "y", durable=False) as writer:
        writer.abandon()
        writer.abandon()
    assert folder_of(tmp_path) == WHOLE


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_nothing_is_overwritten_unasked(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"x{suffix}").write_bytes(b"precious")
    with pytest.raises(FormatError, match=f"x{suffix} already exists; choose another prefix, or move it away"):
        ShardWriter(tmp_path / "x")
    assert (tmp_path / f"x{suffix}").read_bytes() == b"precious"
    assert folder_of(tmp_path) == [f"x{suffix}"]


def test_a_shard_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", durable=False)
    (tmp_path / "x.idx").write_bytes(b"precious")
    with pytest.raises(FormatError, match=r"someone else created \S+/x\.idx in the meantime"):
        writer.finalize()
    assert folder_of(tmp_path) == ["x.idx"]
    assert (tmp_path / "x.idx").read_bytes() == b"precious"


def test_one_writer_a_prefix(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        for overwrite in (False, True):
            with pytest.raises(FormatError, match="another process is writing this output"):
                ShardWriter(tmp_path / "x", overwrite=overwrite)
        writer.add_pack([1], [0], [0])
    assert len(Shard(tmp_path / "x")) == 1


def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    winners: list[int] = []
    surprises: list[BaseException] = []
    barrier = threading.Barrier(8)

    def build(number: int) -> None:
        barrier.wait()
        for _ in range(10):
            try:
                with ShardWriter(tmp_path / "x", durable=False, overwrite=True) as writer:
                    for _ in range(number + 1):
                        writer.add_pack([number] * 3, [0] * 3, [0])
                winners.append(number)
            except Exception as error:
                if not isinstance(error, FormatError) or "another process is writing" not in str(error):
                    surprises.append(error)

    threads = [threading.Thread(target=build, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not surprises
    assert winners
    shard = Shard(tmp_path / "x")
    assert len(shard) == shard[0]["input_ids"][0] + 1
    assert folder_of(tmp_path) == WHOLE


_LOOKS = {name: getattr(os, name) for name in ("open", "lstat", "stat", "scandir", "mkdir", "listdir")}


def ends_before_look(first: ShardWriter, end: Callable[[ShardWriter], object], number: int, output: Path) -> bool:
    """Begin a second writer, and end the first before the second's look number ``number``.

    Return False if there is none.
    """
    num_looks = 0

    def before(look: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*arguments: Any, **options: Any) -> Any:
            nonlocal num_looks
            num_looks += 1
            if num_looks == number:
                with pytest.MonkeyPatch.context() as ending:
                    for name, original in _LOOKS.items():
                        ending.setattr(os, name, original)
                    end(first)
            return look(*arguments, **options)

        return looked

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(FormatError):
        for name, original in _LOOKS.items():
            patch.setattr(os, name, before(original))
        try:
            ShardWriter(output, durable=False, overwrite=True).abandon()
        except FormatError as error:
            if "another process is writing this output" not in str(error):
                pytest.fail(f"before look {number}: {error}")
            raise
    return num_looks >= number


@pytest.mark.parametrize("end", [ShardWriter.abandon, ShardWriter.finalize], ids=["abandoned", "finished"])
def test_a_writer_may_end_before_any_look_of_another(tmp_path: Path, end: Callable[[ShardWriter], object]) -> None:
    for number in itertools.count(1):
        with ShardWriter(tmp_path / f"x{number}", durable=False) as first:
            first.add_pack([1], [0], [0])
            if not ends_before_look(first, end, number, tmp_path / f"x{number}"):
                break
    assert number > 10


def test_files_of_writers_that_come_and_go_between_the_looks_are_no_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, others = building.require_ours, [ShardWriter(tmp_path / "x", durable=False)]

    def look_then_change(output: str) -> None:
        look(output)
        if others:
            others.pop().abandon()
            with monkeypatch.context() as patch:
                patch.setattr(building, "require_ours", look)
                others.append(ShardWriter(output, durable=False))
            others[-1].add_pack([1], [0], [0])
            others[-1].flush()

    monkeypatch.setattr(building, "require_ours", look_then_change)
    with pytest.raises(FormatError, match="another process is writing this output"):
        ShardWriter(tmp_path / "x", overwrite=True)
    monkeypatch.undo()
    others.pop().abandon()
    assert folder_of(tmp_path) == []


def test_a_removed_lock_is_not_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ShardWriter(tmp_path / "x", durable=False)
    opened = os.open
    second: list[ShardWriter] = []

    def open_then_finish(path: Any, *arguments: Any) -> int:
        fd = opened(path, *arguments)
        if str(path).endswith("/lock") and first.num_packs == 0:
            first.add_pack([1], [0], [0])
            first.finalize()
        return fd

    monkeypatch.setattr(os, "open", open_then_finish)
    second.append(ShardWriter(tmp_path / "x", durable=False, overwrite=True))
    with pytest.raises(FormatError, match="another process is writing"):
        ShardWriter(tmp_path / "x", overwrite=True)
    second.pop().abandon()
    assert len(Shard(tmp_path / "x")) == 1


def test_remains_of_a_killed_build_go_with_the_next(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack([1, 2], [1, 0], [0])
        writer.flush()
        writer.suspend()
    assert folder_of(tmp_path) == ["x.building"]
    ShardWriter(tmp_path / "x", overwrite=True, durable=False).abandon()
    assert folder_of(tmp_path) == []


@pytest.mark.parametrize(
    "put", [os.mkfifo, Path.touch, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(".")]
)
def test_what_is_in_the_place_of_the_building_folder_and_is_no_folder_is_refused(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    put(tmp_path / "x.building")
    for attempt in (ShardWriter, find_remains, recover, partial(ShardWriter, overwrite=True)):
        with pytest.raises(FormatError, match=r"x\.building: .* exists at the path"):
            attempt(tmp_path / "x")
    assert folder_of(tmp_path) == ["x.building"]


def test_a_missing_folder_is_made_and_a_file_in_its_place_is_not(tmp_path: Path) -> None:
    write_samples(tmp_path / "a" / "b" / "x", [])
    assert Shard(tmp_path / "a" / "b" / "x").header.num_packs == 0
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FormatError, match="file is a file, not a folder; choose another name"):
        ShardWriter(tmp_path / "file" / "x")


@pytest.mark.parametrize("replaces", [False, True])
def test_what_follows_from_a_step_comes_after_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    if replaces:
        write_samples(tmp_path / "x", demo_samples(2))
    steps: list[str] = []

    def name_of(path: Any) -> str:
        path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        return str(Path(path).relative_to(tmp_path))

    def noting(module: Any, name: str) -> None:
        call = getattr(module, name)

        def noted(path: Any, *arguments: Any) -> Any:
            steps.append(f"{name} {name_of(path)}")
            return call(path, *arguments)

        monkeypatch.setattr(module, name, noted)

    writer = ShardWriter(tmp_path / "x", overwrite=True)
    noting(building, "move_into_place")
    for name in ("fsync", "unlink", "rename", "rmdir"):
        noting(os, name)
    for pack in demo_samples(3):
        writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
    writer.finalize()
    monkeypatch.undo()
    done = "x.building/done.json.tmp"
    # Before a file is created, an existing file of its name is removed; a replacing rename is a step of
    # move_into_place.
    new = tuple(f"{step} x.building/." for step in ("unlink", "rename"))
    steps = [step for step in steps if step != f"unlink {done}" and not step.startswith(new)]
    assert steps[:-5] == [
        *(f"fsync x.building/{suffix}" for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx", ".seq.idx")),
        # Everything is on disk before done.json, and done.json before the first change at the prefix.
        *(f"fsync {done}", f"rename {done}", "fsync x.building"),
        *["unlink x.seq.idx", "fsync ."] * replaces,
        *(f"move_into_place x.building/{suffix}" for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx")),
        *("fsync .", "move_into_place x.building/.seq.idx", "fsync ."),
    ]
    # The log is removed only when the new shard is on disk, and done.json is removed last.
    assert steps[-5:] == [
        *("unlink x.building/packs", "unlink x.building/build.json"),
        *("unlink x.building/done.json", "unlink x.building/lock", "rmdir x.building"),
    ]


def test_a_publication_looks_through_its_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_samples(tmp_path / "x", demo_samples(2))
    looks, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or scandir(path))
    write_samples(tmp_path / "x", demo_samples(3), overwrite=True)
    assert [look for look in looks if Path(look) == tmp_path] == [str(tmp_path)]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_locks_nothing_is_written_and_the_way_round_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(FormatError, match="does not support locks"):
        ShardWriter(tmp_path / "x")
    assert folder_of(tmp_path) == []
