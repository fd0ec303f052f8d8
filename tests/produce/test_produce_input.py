"""Growing input: when each file of a growing folder is taken, and resuming in the middle."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx.chat.inputs import InputFile, expand_inputs, iter_pieces, stream_pieces
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.produce.feed import Position, feed
from megatron_sft_idx.produce.growing_folder import GrowingFolder
from megatron_sft_idx.produce.input_kinds import fixed_files
from megatron_sft_idx.produce.taken_files import TakenFile, TakenFiles
from megatron_sft_idx.tokenize import NOT_YET


class Scene:
    """A folder, a clock that the test controls, and the taken files."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder / "watched"
        self.folder.mkdir(exist_ok=True)
        self.log_path = str(folder / "_inputs.jsonl")
        self.now = 1000.0
        self.lines: list[str] = []
        self.options = {"settle": 5.0, "end_after": None, **options}
        self.restart()

    def restart(self, first: int = 0) -> None:
        growing = GrowingFolder(
            str(self.folder),
            1 << 10,
            TakenFiles(self.log_path),
            log=self.lines.append,
            clock=lambda: self.now,
            **self.options,  # type: ignore[arg-type]
        )
        self.files = growing.files(first)

    def put(self, name: str, rows: int = 1) -> None:
        with open(self.folder / name, "a") as file:
            file.write('{"a": 1}\n' * rows)

    def next(self, seconds: float = 1) -> str | None:
        """Return the file taken after ``seconds``, read to its end; None if none is taken, ``end`` at the end."""
        self.now += seconds
        try:
            pieces = next(self.files)
        except StopIteration:
            return "end"
        if pieces is NOT_YET:
            return None
        names = {os.path.basename(piece.path) for piece in pieces}  # type: ignore[union-attr]
        return names.pop() if names else ""


@pytest.fixture
def scene(tmp_path) -> Scene:
    return Scene(tmp_path)


def test_a_file_is_whole_when_a_later_one_is_there(scene):
    scene.put("2.jsonl")
    assert scene.next() is None
    scene.put("10.jsonl")  # later in number, but not as text
    assert scene.next() == "2.jsonl"
    assert scene.next() is None


def test_a_file_is_whole_when_its_size_has_settled(scene):
    scene.put("a.jsonl")
    assert [scene.next() for _ in range(4)] == [None] * 4
    scene.put("a.jsonl")
    assert [scene.next() for _ in range(5)] == [None] * 5
    assert scene.next() == "a.jsonl"
    assert scene.lines == [f"{scene.folder}/a.jsonl: taken as complete, because its size has not changed for 5 s"]


@pytest.mark.parametrize("years", [-30, 30])
def test_times_of_files_say_nothing(scene, years):
    scene.put("a.jsonl")
    os.utime(scene.folder / "a.jsonl", (1.8e9 + years * 3.15e7,) * 2)
    assert [scene.next() for _ in range(5)] == [None] * 5
    assert scene.next() == "a.jsonl"


def test_the_end_is_a_file_of_that_name(scene):
    for name in ("b.jsonl", "a.jsonl", "_END"):
        scene.put(name)
    assert [scene.next() for _ in range(3)] == ["a.jsonl", "b.jsonl", "end"]


def test_what_is_being_written_is_passed_over(scene):
    (scene.folder / "inner").mkdir()
    os.mkfifo(scene.folder / "pipe")
    for name in (".a.jsonl", "_a.jsonl", "a.jsonl.tmp", "a.part", "b.partial"):
        scene.put(name)
    assert [scene.next() for _ in range(9)] == [None] * 9
    os.rename(scene.folder / "a.jsonl.tmp", scene.folder / "a.jsonl")
    scene.put("_END")
    assert [scene.next(), scene.next()] == ["a.jsonl", "end"]


def test_silence_ends_it_where_that_was_asked_for(tmp_path):
    scene = Scene(tmp_path, end_after=20.0)
    assert scene.next(19) is None
    scene.put("a.jsonl")
    assert [scene.next(), scene.next(6)] == [None, "a.jsonl"]
    assert [scene.next(19), scene.next(19), scene.next(2)] == [None, None, "end"]  # counted from the next call


def test_a_file_that_comes_late_is_taken_late(scene):
    for name in ("b.jsonl", "c.jsonl"):
        scene.put(name)
    assert scene.next() == "b.jsonl"
    scene.put("a.jsonl")
    assert scene.next() == "a.jsonl"
    scene.put("_END")
    scene.restart()
    assert [scene.next() for _ in range(4)] == ["b.jsonl", "a.jsonl", "c.jsonl", "end"]


def test_files_that_are_done_may_be_removed(scene):
    for name in ("a.jsonl", "b.jsonl", "_END"):
        scene.put(name)
    assert [scene.next(), scene.next()] == ["a.jsonl", "b.jsonl"]
    (scene.folder / "a.jsonl").unlink()
    scene.restart(first=1)
    assert [scene.next(), scene.next()] == ["b.jsonl", "end"]


def test_where_the_list_of_files_was_lost_they_are_taken_again(scene):
    for name in ("a.jsonl", "b.jsonl", "_END"):
        scene.put(name)
    scene.restart(first=1)
    assert [scene.next(), scene.next()] == ["b.jsonl", "end"]


def test_a_file_that_grows_after_it_was_taken_is_an_error(scene):
    scene.put("a.jsonl")
    scene.put("b.jsonl")
    scene.now += 1
    pieces: Iterator[object] = next(scene.files)  # type: ignore[assignment]
    next(pieces)
    scene.put("a.jsonl")
    with pytest.raises(FormatError, match=r"a\.jsonl: had 9 bytes when it was read, and now has 18 bytes"):
        next(pieces)


@pytest.mark.parametrize("then", ["nothing", "b.jsonl", "_END"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_file_that_grows_after_it_settled_is_an_error(scene, then, restarted):
    """All of it was read, but its writer had only paused: later data must not be lost silently."""
    scene.put("a.jsonl")
    assert [scene.next(), scene.next(6)] == [None, "a.jsonl"]
    assert scene.next() is None
    if restarted:
        scene.restart()
        assert [scene.next(), scene.next()] == ["a.jsonl", None]
    scene.put("a.jsonl")
    if then != "nothing":
        scene.put(then)
    with pytest.raises(FormatError, match=r"a\.jsonl: had 9 bytes when it was read, and now has 18.*raise --settle"):
        scene.next()


def test_a_file_that_settled_may_be_removed_once_it_was_read(scene):
    scene.put("a.jsonl")
    assert [scene.next(), scene.next(6)] == [None, "a.jsonl"]
    (scene.folder / "a.jsonl").unlink()
    scene.put("_END")
    assert scene.next() == "end"


def test_many_files_are_found_with_few_looks(scene, monkeypatch):
    names = [f"{number}.jsonl" for number in range(50)]
    for name in [*names, "_END"]:
        scene.put(name)
    looks = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: looks.append(path) or listdir(path))
    assert [scene.next() for _ in range(51)] == [*names, "end"]
    assert len(looks) == 2


def test_a_file_that_is_gone_is_an_error(scene):
    for name in ("a.jsonl", "_END"):
        scene.put(name)
    assert scene.next() == "a.jsonl"
    (scene.folder / "a.jsonl").unlink()
    scene.restart()
    with pytest.raises(FormatError, match="no longer exists; restore it"):
        scene.next()


def test_an_empty_file_is_taken_and_gives_nothing(scene):
    (scene.folder / "a.jsonl").touch()
    for name in ("b.jsonl", "_END"):
        scene.put(name)
    assert [scene.next() for _ in range(3)] == ["", "b.jsonl", "end"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FormatError, match="the folder to watch does not exist"):
        GrowingFolder(str(tmp_path / "x"), 1, TakenFiles(str(tmp_path / "log")), settle=1, end_after=None, log=print)
    with pytest.raises(FormatError, match="copy what appears in the bucket"):
        GrowingFolder("s3://bucket/x", 1, TakenFiles(str(tmp_path / "log")), settle=1, end_after=None, log=print)


def test_the_log_is_read_back_but_for_a_torn_line(tmp_path):
    path = tmp_path / "log"
    files = [TakenFile("a\nb", 3), TakenFile("ü", 0), TakenFile("c", 2**40)]
    log = TakenFiles(str(path))
    log.add(*files[:2])
    log.add(files[2])
    log.close()
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        found = TakenFiles(str(path))
        assert found.files == files[: whole[:length].count(b"\n")]
        found.add(TakenFile("last", 1))
        found.close()
        assert TakenFiles(str(path)).files == [*files[: whole[:length].count(b"\n")], TakenFile("last", 1)]


@given(st.binary(max_size=40) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_a_log_with_anything_else_is_refused(tmp_path_factory, line):
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes((line.encode() if isinstance(line, str) else line) + b"\n")
    with pytest.raises(FormatError, match="damaged"):
        TakenFiles(str(path))


@pytest.mark.parametrize("change", [{"file": -1}, {"pieces": None}, {"fingerprint": 3}, {"file_fingerprint": None}])
def test_a_position_that_is_wrong_is_named(change):
    content = {**Position(1, 2, "a", "b").to_json(), **change}
    with pytest.raises(FormatError, match=f"^x: {next(iter(change))} is "):
        Position.parse("x", content)


class Arriving(io.RawIOBase):
    """A stream that delivers bytes in blocks of these sizes."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._data, self._sizes = data, sizes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        size = min(self._sizes.pop() if self._sizes else len(self._data), len(buffer))
        block, self._data = self._data[:size], self._data[size:]
        buffer[: len(block)] = block
        return len(block)


@given(
    lines=st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=30),
    sizes=st.lists(st.integers(1, 40), max_size=60),
    mark=st.booleans(),
)
def test_a_pipe_is_cut_as_a_file_is_however_it_comes(tmp_path_factory, lines, sizes, mark):
    path = tmp_path_factory.mktemp("pipe") / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * mark + b"{}\n" + b"\n".join(lines))
    wanted = iter_pieces([InputFile(str(path), "lines", "", 0)], piece_nbytes=50)
    stream = io.BufferedReader(Arriving(path.read_bytes(), sizes), 64)
    found = list(stream_pieces(stream, name=str(path), piece_nbytes=50))
    assert [(p.first, p.payload, p.ends.tolist()) for p in found] == [
        (p.first, p.payload, p.ends.tolist()) for p in wanted
    ]


class Files:
    """Some files of rows; ``feed`` divides them into pieces."""

    def __init__(self, folder: Path, counts: tuple[int, ...] = (40, 0, 3, 60)) -> None:
        self.folder = folder
        for number, count in enumerate(counts):
            rows = (json.dumps({"row": f"{number}-{row}"}) + "\n" for row in range(count))
            (folder / f"{number}.jsonl").write_text("".join(rows))

    def rest(self, start: Position | None = None) -> list[tuple[bytes, Position]]:
        files, log = expand_inputs([str(self.folder / "*.jsonl")]), TakenFiles(str(self.folder / "log"))
        start = start or Position()
        fed = feed(fixed_files(files, 100, log, start.file), start, "catalog")
        return [(piece.payload, place.behind) for place, piece in fed]  # type: ignore[misc]


def test_going_on_from_every_position_gives_the_rest(tmp_path):
    files = Files(tmp_path)
    whole = files.rest()
    assert len(whole) > 10
    for number, (_, position) in enumerate(whole):
        assert files.rest(position) == whole[number + 1 :]


def test_files_behind_the_position_are_not_read_again(tmp_path):
    files = Files(tmp_path)
    whole = files.rest()
    (tmp_path / "0.jsonl").write_bytes(b"x" * (tmp_path / "0.jsonl").stat().st_size)
    assert files.rest(whole[-2][1]) == whole[-1:]


def test_other_content_before_the_position_is_noticed(tmp_path):
    files = Files(tmp_path)
    whole = files.rest()
    text = (tmp_path / "3.jsonl").read_text()
    (tmp_path / "3.jsonl").write_text(text.replace("3-1", "3-2", 1))
    with pytest.raises(FormatError, match="differs from the input that the existing shards were made from"):
        files.rest(whole[-1][1])
    # Data after the position can be anything.
    (tmp_path / "3.jsonl").write_text(text.replace("3-59", "3-60"))
    start = next(position for _, position in whole if position.file == 3)
    assert len(files.rest(start)) == len(whole) - [position for _, position in whole].index(start) - 1
