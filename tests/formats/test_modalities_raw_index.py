"""Raw indexes of JSON lines: the definition of a row, errors, reading by number, and ranges for many readers."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_packs import demo_samples, write_samples

from megatron_sft_idx.cli.main import main
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.modalities import RawRows, create_raw_index
from megatron_sft_idx.formats.pbin import recognise
from megatron_sft_idx.storage import Backend

Made = Callable[[bytes], str]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(data: bytes) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(data)
        return str(path)

    return make


def index_of(path: str) -> list[tuple[int, int]]:
    index = pickle.loads(Path(path).with_suffix(".idx").read_bytes())
    assert all(type(pair) is tuple and list(map(type, pair)) == [int, int] for pair in index)
    return index  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("data", "index"),
    [
        (b'{"a":1}\n{"b":2}\n', [(0, 7), (8, 7)]),
        (b'{"a":1}\n{"b":2}', [(0, 7), (8, 7)]),
        (b'{"a":1}\r\n{"b":2}\r\n', [(0, 8), (9, 8)]),
        ('{"a":"é"}\n{"b":"日本"}\n'.encode(), [(0, 10), (11, 14)]),
        (b'\n\n{"a":1}\n \t\r\n\n{"b":2}\n\n', [(2, 7), (15, 7)]),
        (b'\xef\xbb\xbf{"a":1}\n{"b":2}\n', [(0, 10), (11, 7)]),
        (b'  {"a":1}  \n', [(0, 11)]),
        (b"", []),
        (b"\n\n", []),
    ],
    ids=["plain", "no last newline", "crlf", "unicode", "blank lines", "bom", "spaces", "empty", "only newlines"],
)
def test_rows(made: Made, data: bytes, index: list[tuple[int, int]]) -> None:
    path = made(data)
    report = create_raw_index(path)
    assert index_of(path) == index
    assert report.num_rows == len(index)
    assert report.num_blank == sum(not line.strip() for line in data.split(b"\n")[: data.count(b"\n")])
    assert list(RawRows(path)) == [data[start : start + length] for start, length in index]


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=9) | st.integers()), max_size=20),
    seps=st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\n \n"]), min_size=20, max_size=20),
    last=st.booleans(),
    backend=st.sampled_from(["mmap", "pread"]),
)
def test_any_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[object], seps: list[str], last: bool, backend: Backend
) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    text = "".join(line + sep for line, sep in zip(lines, seps, strict=False))
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes((text if last else text.rstrip("\r\n ")).encode())
    create_raw_index(path, overwrite=True)
    found = RawRows(path, backend=backend)
    assert [json.loads(row) for row in found] == rows
    assert found[-len(rows) :] == list(found)
    for count in (1, 2, 7, 40):
        ranges = found.ranges(count)
        assert len(ranges) == count
        assert b"".join(path.read_bytes()[each.start : each.stop] for each in ranges) == path.read_bytes()
        parts = [
            [line for line in path.read_bytes()[each.start : each.stop].split(b"\n") if line.strip()] for each in ranges
        ]
        assert [len(part) for part in parts] == [each.num_rows for each in ranges]
        assert [json.loads(row) for part in parts for row in part] == rows
        assert [each.first_row for each in ranges] == np.cumsum([0, *map(len, parts)])[:-1].tolist()


def test_rows_longer_than_a_block_and_many_of_them(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sft_idx.formats.modalities._BLOCK_NBYTES", 64)
    rows = [json.dumps({"text": "x" * (i * 37 % 400)}).encode() for i in range(2500)]
    path = made(b"\n".join(rows))
    told: list[tuple[int, int]] = []
    create_raw_index(path, on_progress=lambda num_bytes, num_rows: told.append((num_bytes, num_rows)))
    assert list(RawRows(path)) == rows
    assert [sum(column) for column in zip(*told, strict=True)] == [Path(path).stat().st_size, len(rows)]


def test_ranges_are_about_equal(made: Made) -> None:
    path = made(b'{"a": 1}\n' * 1000)
    create_raw_index(path)
    assert {each.num_rows for each in RawRows(path).ranges(8)} == {125}
    with pytest.raises(FormatError, match="0 ranges"):
        RawRows(path).ranges(0)


def test_lines_that_are_no_json(made: Made) -> None:
    path = made(b'{"a":1}\n\n{"a":\n{"b":2}\nNaN\n')
    with pytest.raises(SequenceError, match=r"rows.jsonl:3: not valid JSON.*--drop-faulty"):
        create_raw_index(path)
    assert not Path(path).with_suffix(".idx").exists()
    report = create_raw_index(path, drop_faulty=True)
    assert (report.num_rows, report.num_blank, report.num_faulty) == (2, 1, 2)
    assert index_of(path) == [(0, 7), (15, 7)]
    assert list(RawRows(path)) == [b'{"a":1}', b'{"b":2}']


def test_other_inputs_are_refused(tmp_path: Path) -> None:
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"a":1}\n'))
    with pytest.raises(FormatError, match="gzip data; expected plain JSON lines"):
        create_raw_index(packed)
    listed = tmp_path / "rows.json"
    listed.write_bytes(b'[{"a":1}]')
    with pytest.raises(FormatError, match="array data; expected plain JSON lines"):
        create_raw_index(listed)
    listed.write_bytes(b'{"a":1}\n')
    with pytest.raises(FormatError, match="no such file"):
        create_raw_index(tmp_path / "missing.jsonl")
    for folder in (tmp_path, "."):
        with pytest.raises(FormatError, match="each file gets its own index"):
            create_raw_index(folder)
    with pytest.raises(FormatError, match="used as both the index and the file to be indexed"):
        create_raw_index(listed.rename(tmp_path / "rows.idx"), overwrite=True)
    (tmp_path / "rows.idx").rename(listed)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["rows.json", "rows.jsonl.gz"]


def test_the_index_of_a_shard_is_neither_replaced_nor_read(tmp_path: Path) -> None:
    write_samples(tmp_path / "rows", demo_samples())
    before = (tmp_path / "rows.idx").read_bytes()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":1}\n')
    for overwrite in (False, True):
        with pytest.raises(FormatError, match=r"rows\.idx: expected a raw index, found .* begins with b'MMIDIDX"):
            create_raw_index(path, overwrite=overwrite)
    with pytest.raises(FormatError, match=r"the index of a Megatron \.bin"):
        len(RawRows(path))
    assert (tmp_path / "rows.idx").read_bytes() == before


def test_only_a_raw_index_is_replaced(made: Made) -> None:
    path = made(b'{"a":1}\n')
    index = Path(path).with_suffix(".idx")
    for pickled in ([[1, 2]], {"a": 1}, [(0, 1), "x"]):
        index.write_bytes(pickle.dumps(pickled))
        before = index.read_bytes()
        with pytest.raises(FormatError, match="which is never replaced"):
            create_raw_index(path, overwrite=True)
        assert index.read_bytes() == before
    index.write_bytes(pickle.dumps([(0, 3)]))
    with pytest.raises(FormatError, match="already exists"):
        create_raw_index(path)
    assert create_raw_index(path, overwrite=True).num_rows == 1


def test_pipes_are_not_waited_for(made: Made, tmp_path: Path) -> None:
    path = made(b'{"a":1}\n')
    os.mkfifo(tmp_path / "pipe")
    for overwrite in (False, True):
        with pytest.raises(FormatError, match="pipe: expected a raw index or nothing, found a FIFO"):
            create_raw_index(path, tmp_path / "pipe", overwrite=overwrite)
    with pytest.raises(FormatError, match="pipe: no such file"):
        create_raw_index(tmp_path / "pipe", tmp_path / "x.idx")
    with pytest.raises(FormatError, match=r"pipe: .* neither a file nor a folder"):
        len(RawRows(path, tmp_path / "pipe"))


def test_an_index_is_no_pbin(made: Made) -> None:
    assert not recognise(create_raw_index(made(b'{"a":1}\n')).index_path)


# ---- indexes of other files ----


@pytest.mark.parametrize(
    "index",
    [
        [(0, 100)],
        [(-1, 3)],
        [(0, 0)],
        [(0, -4)],
        [(8, 7), (0, 7)],
        [(0, 7), (7, 7)],
        [(0, 2**63 - 1)],
        [(2**63 - 1, 2)],
        [(-(2**63), 2)],
        [(0, 7), (8, 2**63 - 1)],
    ],
)
def test_rows_that_are_not_in_the_file(made: Made, index: list[tuple[int, int]]) -> None:
    path = made(b'{"a":1}\n{"b":2}\n')
    Path(path).with_suffix(".idx").write_bytes(pickle.dumps(index))
    with pytest.raises(FormatError, match="the index belongs to another file"):
        len(RawRows(path))


@pytest.mark.parametrize("index", [[(0, 6)], [(1, 6)], [(8, 6)], [(9, 6)], [(0, 15)], [(3, 9)]])
def test_rows_that_are_no_whole_lines(made: Made, index: list[tuple[int, int]]) -> None:
    path = made(b'{"a":1}\n{"b":2}\n')
    Path(path).with_suffix(".idx").write_bytes(pickle.dumps(index))
    rows = RawRows(path)
    with pytest.raises(FormatError, match="not a complete line"):
        rows[0]


def test_an_index_in_characters_is_named(made: Made) -> None:
    lines = ['{"a":"é"}', '{"b":2}']
    path = made("\n".join(lines).encode())
    Path(path).with_suffix(".idx").write_bytes(pickle.dumps([(0, len(lines[0])), (11, len(lines[1]))]))
    rows = RawRows(path)
    assert rows[1] == b'{"b":2}'
    with pytest.raises(FormatError, match="counts characters"):
        rows[0]


class Attack:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("attacked"),)


def test_an_index_that_runs_code(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = made(b'{"a":1}\n')
    Path(path).with_suffix(".idx").write_bytes(pickle.dumps([Attack()]))
    with pytest.raises(FormatError, match="none of it was executed"):
        len(RawRows(path))
    assert not Path("attacked").exists()


# ---- across processes and time ----


def _row(rows: RawRows, number: int) -> bytes:
    return rows[number]


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_rows_travel_to_other_processes(made: Made, backend: Backend) -> None:
    path = made(b'{"a":1}\n{"b":2}\n')
    create_raw_index(path)
    rows = RawRows(path, backend=backend)
    assert rows[0] == b'{"a":1}'
    assert len(pickle.dumps(rows)) < 200 + 2 * len(path)
    with get_context("spawn").Pool(1) as pool:
        assert pool.starmap(_row, [(rows, 1), (rows, -2)]) == [b'{"b":2}', b'{"a":1}']
    with pytest.raises(IndexError, match="no row 2; the file has 2 rows"):
        rows[2]
    with pytest.raises(IndexError, match="there is no row -3; the file has 2 rows"):
        rows[-3]


def test_a_file_that_changed(made: Made) -> None:
    path = made(b'{"a":1}\n{"b":2}\n')
    create_raw_index(path)
    rows = RawRows(path)
    made(b'{"a":1}\n')
    with pytest.raises(FormatError, match="has 8 bytes, but had 16 when"):
        len(rows)


# ---- the command ----


def test_the_command(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(b'{"a":1}\n\n{"b":2}\nbad\n')
    index = str(tmp_path / "index" / "other.idx")
    assert main(["create-raw-index", path]) == 1
    assert "rows.jsonl:4: not valid JSON" in capsys.readouterr().err
    assert main(["create-raw-index", path, "--drop-faulty", "--output", index]) == 0
    assert (
        capsys.readouterr().out
        == f"wrote {index}: 2 rows, blank lines left out: 1, lines that are not JSON left out: 1\n"
    )
    assert list(RawRows(path, index)) == [b'{"a":1}', b'{"b":2}']
    assert main(["create-raw-index", path, "--drop-faulty", "--output", index]) == 1
    assert "already exists" in capsys.readouterr().err
    assert (
        main(["create-raw-index", path, "--drop-faulty", "--output", index, "--overwrite", "--log-interval", "1"]) == 0
    )
    assert "indexing: 2 rows, 100.0%" in capsys.readouterr().err
