"""Publication: all at once or not at all, over nothing unasked, one writer a prefix."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packs import WHOLE, demo_samples, five_files, folder_of, write_samples

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard, ShardWriter, find_remains, publication, recover
from megatron_sft_idx.shard.journal import JournalHead
from megatron_sft_idx.storage import OutputFile


@pytest.mark.parametrize(
    "failing", [".bin.tmp", ".loss.bin.tmp", ".seq.bin.tmp", ".journal", ".idx.tmp", ".seq.idx.tmp"]
)
def test_a_write_that_fails_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    write = OutputFile.write
    full = False

    def limited(self: OutputFile, data: Any) -> None:
        if full and self.path.endswith("x" + failing):
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
    monkeypatch.setattr(OutputFile, "write", lambda self, data: self.path.endswith(".bin.tmp") or 1 / 0)
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
    with pytest.raises(FormatError, match=f"x{suffix} exist"):
        ShardWriter(tmp_path / "x")
    assert (tmp_path / f"x{suffix}").read_bytes() == b"precious"
    assert folder_of(tmp_path) == [f"x{suffix}"]


def test_a_shard_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", durable=False)
    (tmp_path / "x.idx").write_bytes(b"precious")
    with pytest.raises(FormatError, match=r"x\.idx exist"):
        writer.finalize()
    assert folder_of(tmp_path) == ["x.idx"]
    assert (tmp_path / "x.idx").read_bytes() == b"precious"


def test_one_writer_a_prefix(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        for overwrite in (False, True):
            with pytest.raises(FormatError, match="another writer is at work"):
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
                if not isinstance(error, FormatError) or "another writer" not in str(error):
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


def test_files_of_writers_that_come_and_go_between_the_looks_are_no_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (inodes := tmp_path / "inodes").mkdir()
    read, others = publication.read_journal, [ShardWriter(tmp_path / "x", durable=False)]

    def read_then_change(paths: ShardPaths) -> JournalHead | None:
        head = read(paths)
        if others:
            others.pop().abandon()
            for _ in range(10):  # take the inodes that are free now
                tempfile.mkstemp(dir=inodes)
            others.append(ShardWriter(paths.prefix, durable=False))
            others[-1].add_pack([1], [0], [0])
            others[-1].flush()
        return head

    monkeypatch.setattr(publication, "read_journal", read_then_change)
    with pytest.raises(FormatError, match="another writer is at work here"):
        ShardWriter(tmp_path / "x", overwrite=True)
    others.pop().abandon()
    assert folder_of(tmp_path) == ["inodes"]


def test_a_lock_on_a_removed_journal_is_not_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ShardWriter(tmp_path / "x", durable=False)
    opened = os.open
    second: list[ShardWriter] = []

    def open_then_finish(path: Any, *arguments: Any) -> int:
        fd = opened(path, *arguments)
        if str(path).endswith(".journal") and first.num_packs == 0:
            first.add_pack([1], [0], [0])
            first.finalize()
        return fd

    monkeypatch.setattr(os, "open", open_then_finish)
    second.append(ShardWriter(tmp_path / "x", durable=False, overwrite=True))
    with pytest.raises(FormatError, match="another writer"):
        ShardWriter(tmp_path / "x", overwrite=True)
    second.pop().abandon()
    assert len(Shard(tmp_path / "x")) == 1


def test_remains_of_a_killed_build_go_with_the_next(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack([1, 2], [1, 0], [0])
        writer.flush()
        writer.suspend()
    assert len(folder_of(tmp_path)) == 6
    ShardWriter(tmp_path / "x", overwrite=True, durable=False).abandon()
    assert folder_of(tmp_path) == []


@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo])
def test_what_is_named_like_the_journal_and_is_no_file_is_refused(tmp_path: Path, put: Callable[[Path], None]) -> None:
    put(tmp_path / "x.journal")
    for attempt in (ShardWriter, find_remains, recover):
        with pytest.raises(FormatError, match=r"x\.journal: .* is here"):
            attempt(tmp_path / "x")
    assert folder_of(tmp_path) == ["x.journal"]


def test_a_missing_folder_is_made_and_a_file_in_its_place_is_not(tmp_path: Path) -> None:
    write_samples(tmp_path / "a" / "b" / "x", [])
    assert Shard(tmp_path / "a" / "b" / "x").header.num_packs == 0
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FormatError, match="file is a file, expected a folder"):
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
        return "folder" if Path(path) == tmp_path else Path(path).name

    def noting(module: Any, name: str) -> None:
        call = getattr(module, name)

        def noted(path: Any, *arguments: Any) -> None:
            steps.append(f"{name} {name_of(path)}")
            call(path, *arguments)

        monkeypatch.setattr(module, name, noted)

    writer = ShardWriter(tmp_path / "x", overwrite=True)
    noting(publication, "move_into_place")
    for name in ("fsync", "unlink"):
        noting(os, name)
    for pack in demo_samples(3):
        writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
    writer.finalize()
    monkeypatch.undo()
    assert steps == [
        *(f"fsync x{suffix}.tmp" for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx", ".seq.idx")),
        *("fsync folder", "fsync x.journal", *["unlink x.seq.idx", "fsync folder"] * replaces),
        *(f"move_into_place x{suffix}.tmp" for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx")),
        *("fsync folder", "move_into_place x.seq.idx.tmp", "fsync folder"),
        "unlink x.journal",
    ]


def test_a_publication_looks_through_its_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_samples(tmp_path / "x", demo_samples(2))
    looks, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or scandir(path))
    write_samples(tmp_path / "x", demo_samples(3), overwrite=True)
    assert len(looks) == 1


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_locks_nothing_is_written_and_the_way_round_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(FormatError, match="has no locks"):
        ShardWriter(tmp_path / "x")
    assert folder_of(tmp_path) == []
