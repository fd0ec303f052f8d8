"""Publication of files and folders: allowed existing contents, the new content, and remains of the old one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from kills import killed_at, kills_at

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import OutputFile, building, publish
from megatron_sft_idx.storage.outputs import new_file, new_folder, write_file
from megatron_sft_idx.storage.publish import (
    Kind,
    Place,
    check_place,
    head_of,
    make_folders,
    new_control_file,
    require_apart,
    require_space,
    resolve,
    write_control_file,
)

OURS = b"ours "
_OTHER = "choose another name"
PAGE = Kind("a page of tests", lambda path: head_of(path, len(OURS)) == OURS)


def everything(folder: Path) -> dict[str, object]:
    """Return all names below a folder, with everything whose change would be noticed."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else path.stat().st_mode
    return found


def bind(path: Path) -> None:
    # Paths of sockets must be short.
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


STRANGERS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"notes"),
    "folder": lambda path: (path.mkdir(), (path / "notes").write_bytes(b"notes")),
    "link to a file": lambda path: (path.with_name("n").write_bytes(OURS), path.symlink_to("n")),
    "link to a folder": lambda path: (path.with_name("n").mkdir(), path.symlink_to("n")),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "looping link": lambda path: path.symlink_to(path.name),
    "FIFO": os.mkfifo,
    "socket": bind,
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_at_the_place_is_left_alone(tmp_path: Path, stranger: str, folder: bool, overwrite: bool) -> None:
    STRANGERS[stranger](tmp_path / "x")
    before = everything(tmp_path)
    with pytest.raises(FormatError, match=f"^{tmp_path}/x: "):
        (new_folder if folder else new_file)(tmp_path / "x", PAGE, overwrite=overwrite)
    assert everything(tmp_path) == before


def test_one_of_the_kind_is_replaced_only_when_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x"
    write_file(path, OURS + b"1", PAGE, overwrite=False)
    with pytest.raises(FormatError, match="already exists"):
        write_file(path, OURS + b"2", PAGE, overwrite=False)
    assert path.read_bytes() == OURS + b"1"
    write_file(path, OURS + b"2", PAGE, overwrite=True)
    assert everything(path.parent) == {"x": OURS + b"2"}


def test_an_empty_file_or_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "d").mkdir()
    write_file(tmp_path / "x", OURS, PAGE, overwrite=False)
    _folder_of(tmp_path / "d", {"a": OURS}, overwrite=False)
    assert everything(tmp_path) == {"x": OURS, "d": (tmp_path / "d").stat().st_mode, "d/a": OURS}


def _folder_of(path: Path, files: dict[str, bytes], *, overwrite: bool) -> None:
    with new_folder(path, PAGE, overwrite=overwrite) as new:
        for name, content in files.items():
            with contextlib.closing(new.open(name)) as file:
                file.write(content)
        new.publish()


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_entry_by_entry(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(publish, "_rename", lambda old, new, flags: False)
    _folder_of(tmp_path / "d", {"a": OURS, "b": OURS}, overwrite=False)
    _folder_of(tmp_path / "d", {"z": OURS}, overwrite=True)
    assert os.listdir(tmp_path) == ["d"]
    assert os.listdir(tmp_path / "d") == ["z"]
    write_file(tmp_path / "x", OURS, PAGE, overwrite=False)
    assert sorted(os.listdir(tmp_path)) == ["d", "x"]


@pytest.mark.parametrize("stranger", [*STRANGERS, "empty folder", "folder of the kind"])
def test_one_stranger_refuses_a_folder_by_name(tmp_path: Path, stranger: str) -> None:
    _folder_of(tmp_path / "d", {"a": OURS}, overwrite=False)
    if stranger in STRANGERS:
        STRANGERS[stranger](tmp_path / "d" / "x")
    else:
        _folder_of(tmp_path / "d" / "x", {"a": OURS} if stranger == "folder of the kind" else {}, overwrite=False)
    before = everything(tmp_path)
    with pytest.raises(FormatError, match=rf"^{tmp_path}/d: (contains|expected .* found) \w+, a .*{_OTHER}"):
        new_folder(tmp_path / "d", PAGE, overwrite=True)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("renameat2", [True, False])
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("before", [None, OURS], ids=["free", "replaced"])
def test_what_appears_meanwhile_is_left_alone(
    tmp_path: Path, before: bytes | None, folder: bool, renameat2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not renameat2:
        monkeypatch.setattr(publish, "_rename", lambda old, new, flags: False)
    place = tmp_path / "x"
    if before is not None:
        _folder_of(place, {"a": before}, overwrite=False) if folder else place.write_bytes(before)
    make = new_folder if folder else new_file
    with make(place, PAGE, overwrite=True) as new:
        if before is not None:
            os.rename(place, tmp_path / "away")
        place.write_bytes(b"notes")
        with pytest.raises(FormatError, match="was written here"):
            new.publish()
    assert place.read_bytes() == b"notes"
    assert sorted(os.listdir(tmp_path)) == (["x"] if before is None else ["away", "x"])


def test_a_stranger_that_comes_into_a_folder_in_the_last_moment_brings_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "d"
    _folder_of(place, {"a": OURS}, overwrite=False)
    move = building.move_into_place

    def late(temporary: str, path: str, found: publish.Identity | None) -> str | None:
        (place / "notes").write_bytes(b"notes")
        return move(temporary, path, found)

    monkeypatch.setattr(building, "move_into_place", late)
    with pytest.raises(FormatError, match="notes"):
        _folder_of(place, {"z": OURS}, overwrite=True)
    assert everything(tmp_path) == {"d": place.stat().st_mode, "d/a": OURS, "d/notes": b"notes"}


def test_a_failure_removes_what_it_made_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "bystander").write_bytes(b"notes")
    before = everything(tmp_path)
    for make in (new_file, new_folder):
        with make(tmp_path / "x", PAGE, overwrite=False) as new, contextlib.closing(new.open("a")) as file:
            file.write(b"half")
        assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["", ".", "..", "d/..", "d/", "/", "a\0b", "n" * 256, "d/\udcff", "f/x", "dangling/x", "loop/x"]
)
def test_names_that_are_no_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "f").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    before = everything(tmp_path)
    with pytest.raises(FormatError):
        new_file(name, PAGE, overwrite=True)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ["", ".", "..", "d/..", "/", "d/../..", "../here"])
def test_a_folder_that_holds_the_working_folder_is_not_replaced(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "d").mkdir(parents=True)
    (tmp_path / "here" / "page").write_bytes(OURS)
    monkeypatch.chdir(tmp_path / "here")
    before = everything(tmp_path)
    with pytest.raises(FormatError):
        new_folder(name, PAGE, overwrite=True)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("path", ["s3://bucket/x", "gs://bucket/x"])
def test_no_folder_is_made_that_has_the_name_of_a_store(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for write in (lambda: write_file(path, OURS, PAGE, overwrite=False), lambda: make_folders(path)):
        with pytest.raises(FormatError, match=path):
            write()
    assert os.listdir(tmp_path) == []


def test_links_above_are_followed_and_long_names_have_room(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    name = "ü" * 120
    write_file(tmp_path / "link" / name, OURS, PAGE, overwrite=False)
    assert os.listdir(tmp_path / "real") == [name]
    assert resolve(tmp_path / "link" / "d" / "", folder=True) == str(tmp_path / "real" / "d")


def test_files_of_a_run_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_bytes(b"rows")
    os.link("in", "hard")
    os.symlink("in", "soft")
    (tmp_path / "d").mkdir()
    os.symlink("d", "e")
    source = Place("in", "the input")
    require_apart([Place("out", "the output"), Place("d/s", "--summary")], [source, source])
    for other in ("in", "./in", "d/../in", "hard", str(tmp_path / "in"), "e/../in"):
        with pytest.raises(FormatError, match="both the output and the input"):
            require_apart([Place(other, "the output")], [source])
    with pytest.raises(FormatError, match="both the output and the input"):
        require_apart([Place("in", "the output")], [Place("soft", "the input")])
    with pytest.raises(FormatError, match="both the output and --summary"):
        require_apart([Place("d/x", "the output"), Place("e/x", "--summary")])
    with pytest.raises(FormatError, match="this folder would be replaced"):
        require_apart([Place("d", "the output", folder=True)], [Place("e/rows", "the input")])
    with pytest.raises(FormatError, match="contains the current folder"):
        require_apart([Place("..", "the output", folder=True)])


def test_room_is_looked_for_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_space(str(tmp_path / "not" / "there"), 1)
    with pytest.raises(OSError, match="are free") as error:
        require_space(str(tmp_path / "x"), 1 << 62)
    assert error.value.filename == str(tmp_path / "x")
    room = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*room[:5], 100, 3, 3, *room[8:]]))
    require_space(str(tmp_path / "x"), 1, files=3)
    with pytest.raises(OSError, match="3 inodes are free"):
        require_space(str(tmp_path / "x"), 1, files=4)
    # Like btrfs, which has no fixed number of inodes.
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*room[:5], 0, 0, 0, *room[8:]]))
    require_space(str(tmp_path / "x"), 1, files=4)


@pytest.mark.parametrize("before", [b"", OURS])
def test_a_file_that_is_written_to_meanwhile_is_left_alone(tmp_path: Path, before: bytes) -> None:
    place = tmp_path / "x"
    place.write_bytes(before)
    with new_file(place, PAGE, overwrite=True) as new:
        new.open().write(OURS)
        place.write_bytes(b"notes")  # the inode stays
        with pytest.raises(FormatError, match="begins with b'notes'"):
            new.publish()
    assert everything(tmp_path) == {"x": b"notes"}


def test_what_a_killed_writer_left_is_taken_and_a_living_one_is_not_disturbed(tmp_path: Path) -> None:
    left = tmp_path / ".x.tmp"
    left.write_bytes(OURS + b"half")
    one = new_control_file(tmp_path / "x", PAGE, overwrite=False)
    two = new_control_file(tmp_path / "x", PAGE, overwrite=True)
    with one, two:
        assert left.read_bytes() == b""
        assert len(os.listdir(tmp_path)) == 2
        one.publish()
        with pytest.raises(FormatError, match="was written here"):
            two.publish()
    assert everything(tmp_path) == {"x": b""}


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_of_two_writers_of_an_output_the_second_is_refused(tmp_path: Path, folder: bool) -> None:
    make = new_folder if folder else new_file
    with make(tmp_path / "x", PAGE, overwrite=True) as one:
        with pytest.raises(FormatError, match="another process is writing this output"):
            make(tmp_path / "x", PAGE, overwrite=True)
        one.open("a").write(OURS)
        one.publish()
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("old", [False, True], ids=["free", "replaced"])
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
@kills_at
def test_killed_at_every_step_and_taken_over(tmp_path: Path, folder: bool, old: bool, stride: int) -> None:
    """Only one folder is left, the old or the new output is complete, and the next writer finishes the work."""

    def write(place: Path, content: bytes) -> None:
        if folder:
            _folder_of(place, {"a": content, "b": content}, overwrite=True)
        else:
            write_file(place, content, PAGE, overwrite=True)

    def content_of(place: Path) -> object:
        return everything(place) if folder else place.read_bytes()

    write(tmp_path / "old", OURS + b"old")
    write(tmp_path / "new", OURS + b"new")
    whole = [content_of(tmp_path / name) for name in ("old", "new")]
    step, inner, again = stride // 2, 0, True
    while True:
        here = tmp_path / f"{step}"
        here.mkdir()
        for stranger in (".x.tmp", "x.tmp"):
            (here / stranger).write_bytes(b"notes")
        if old:
            write(here / "x", OURS + b"old")
        if not killed_at(step, lambda here=here: write(here / "x", OURS + b"new")):
            break
        assert {*os.listdir(here)} <= {".x.tmp", "x.tmp", "x", "x.building"}
        # If two folders cannot be exchanged, there is a moment without either.
        if (here / "x").exists():
            assert content_of(here / "x") in whole
        again = inner < 200
        while again and killed_at(inner, lambda here=here: write(here / "x", OURS + b"new")):
            assert not (here / "x").exists() or content_of(here / "x") in whole
            inner += 1
        write(here / "x", OURS + b"new")
        assert content_of(here / "x") == whole[1]
        assert {*os.listdir(here)} == {".x.tmp", "x.tmp", "x"}
        step += stride
    assert step > 12


def test_a_stranger_under_the_temporary_name_is_left_alone(tmp_path: Path) -> None:
    for stranger, put in STRANGERS.items():
        folder = tmp_path / stranger
        folder.mkdir()
        put(folder / ".x.tmp")
        before = everything(folder)
        write_control_file(folder / "x", OURS, PAGE, overwrite=False)
        assert everything(folder) == {**before, "x": OURS}
    os.link(tmp_path / "link to a file" / "n", tmp_path / ".x.tmp")
    write_control_file(tmp_path / "x", OURS + b"new", PAGE, overwrite=False)
    assert (tmp_path / ".x.tmp").read_bytes() == OURS


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_takes_control_files_and_no_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for number in b"12":
        write_control_file(tmp_path / "x", OURS + bytes([number]), PAGE, overwrite=True)
        assert everything(tmp_path) == {"x": OURS + bytes([number])}
    with pytest.raises(FormatError, match="not support locks"):
        write_file(tmp_path / "y", OURS, PAGE, overwrite=True)
    assert os.listdir(tmp_path) == ["x"]


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    assert check_place(str(tmp_path / "deep" / "x"), PAGE, overwrite=False) is None
    assert os.listdir(tmp_path) == []


# ---- room on disk ----


@pytest.mark.parametrize("end", ["sync", "close"])
def test_a_file_gives_back_the_room_that_it_reserved_and_did_not_use(tmp_path: Path, end: str) -> None:
    path, data = tmp_path / "x", os.urandom(1 << 20)
    file = OutputFile(str(path), durable=False)
    file.write(data)
    assert path.stat().st_size == len(data)
    getattr(file, end)()
    assert path.read_bytes() == data
    assert path.stat().st_blocks * 512 < 2 * len(data)
    file.close()


def test_a_disk_that_reserves_no_room_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("megatron_sft_idx.storage.local._fallocate", lambda *args: asked.append(1) or -1)
    data = os.urandom(3 << 20)
    with contextlib.closing(OutputFile(str(tmp_path / "x"), durable=False)) as file:
        for start in range(0, len(data), 1 << 18):
            file.write(data[start : start + (1 << 18)])
    assert (tmp_path / "x").read_bytes() == data
    assert len(asked) == 1
