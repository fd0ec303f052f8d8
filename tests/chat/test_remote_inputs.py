"""Input files in an object store, by folder or pattern: the same rows as local files, never a mix of two objects."""

from __future__ import annotations

import dataclasses
import gzip
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chats import CHATS, files_of, preprocess
from object_folders import serve_folder
from test_chat_files import CONTAINERS, write_rows

from megatron_sft_idx.chat import inputs
from megatron_sft_idx.chat.inputs import InputFile, expand_inputs, iter_pieces
from megatron_sft_idx.errors import FormatError

# Text that hardly compresses, so that compressed files also need many ranges.
_RANDOM = random.Random(0)
_ROWS = [{"messages": [{"role": "user", "content": _RANDOM.randbytes(i % 97).hex()}], "n": i} for i in range(2500)]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """Provide a folder and its URL. Ranges are so small that files need many."""
    (tmp_path / "store").mkdir()
    # The default was fixed when the function was defined.
    monkeypatch.setitem(inputs.read_ahead.__kwdefaults__, "range_nbytes", 701)
    return tmp_path / "store", serve_folder(tmp_path / "store", tmp_path / "msc.json", monkeypatch)


def contents(files: Sequence[InputFile], piece_nbytes: int = 50_000) -> list[Any]:
    """Return the content of the pieces without the path. Their ends in the file depend on the block that was read."""
    pieces = list(iter_pieces(files, piece_nbytes=piece_nbytes))
    held = [(piece.first, piece.fingerprint(), list(piece.rows())) for piece in pieces]
    return [sum(piece.num_bytes for piece in pieces), *held]


@pytest.mark.parametrize("container", [each for each in CONTAINERS if each != "saved"])
def test_the_pieces_are_those_of_a_local_file(store: tuple[Path, str], container: str) -> None:
    folder, url = store
    path = write_rows(folder, container, _ROWS, split=500)
    local, remote = expand_inputs([path]), expand_inputs([f"{url}/{os.path.basename(path)}"])
    assert [dataclasses.replace(file, path=path, etag=None) for file in remote] == local
    assert contents(remote) == contents(local)


def test_folders_and_patterns(store: tuple[Path, str]) -> None:
    folder, url = store
    (folder / "raw/deeper").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "c.txt", "_SUCCESS", ".hidden", "deeper/d.jsonl"):
        (folder / "raw" / name).write_text('{"text": "a row"}\n')

    def found(pattern: str) -> list[str]:
        return [file.path.removeprefix(url) for file in expand_inputs([url + pattern])]

    assert found("/raw/") == ["/raw/a.jsonl", "/raw/b.jsonl", "/raw/c.txt"]
    assert found("/raw/*.jsonl") == ["/raw/a.jsonl", "/raw/b.jsonl"]
    assert found("/raw/*/d*") == ["/raw/deeper/d.jsonl"]
    assert found("/raw/b.jsonl") == ["/raw/b.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("/none.jsonl", "no such object"),
        ("/none*", "no object matches"),
        ("/none/", "no object matches"),
        ("/**/x.jsonl", r"\*\* is not supported for object storage"),
        ("/saved/", r"written by save_to_disk; pass its data files: .*/saved/\*\.arrow"),
    ],
)
def test_what_names_no_input(store: tuple[Path, str], pattern: str, why: str) -> None:
    folder, url = store
    write_rows(folder, "saved", _ROWS[:3], split=1)
    with pytest.raises(FormatError, match=why):
        expand_inputs([url + pattern])


def test_an_object_named_twice_is_refused(store: tuple[Path, str]) -> None:
    folder, url = store
    write_rows(folder, "jsonl", _ROWS[:3])
    with pytest.raises(FormatError, match="matched twice"):
        expand_inputs([f"{url}/*", f"{url}/rows.jsonl"])


@pytest.mark.parametrize("container", ["jsonl", "jsonl.zst", "parquet", "arrow"])
@pytest.mark.parametrize("begun", [False, True], ids=["before it is read", "while it is read"])
def test_an_object_replaced_during_the_run_is_an_error(
    store: tuple[Path, str], tmp_path: Path, container: str, begun: bool
) -> None:
    folder, url = store
    path = Path(write_rows(folder, container, _ROWS, split=100))
    (tmp_path / "other").mkdir()
    other = Path(write_rows(tmp_path / "other", container, [{**row, "n": -row["n"]} for row in _ROWS], split=100))
    os.utime(other, (1, 1))  # two files of equal size and time would have the same etag
    pieces = iter_pieces(expand_inputs([f"{url}/{path.name}"]), piece_nbytes=20_000)
    if begun:
        next(pieces)
    os.replace(other, path)
    with pytest.raises(FormatError, match=r"replaced (during|after)"):
        list(pieces)


def test_an_object_that_goes_away_is_an_error(store: tuple[Path, str]) -> None:
    folder, url = store
    path = Path(write_rows(folder, "jsonl", _ROWS))
    files = expand_inputs([f"{url}/{path.name}"])
    path.unlink()
    with pytest.raises(FormatError, match="no such object"):
        contents(files)


def test_broken_compression_is_said_as_of_a_local_file(store: tuple[Path, str]) -> None:
    folder, url = store
    path = Path(write_rows(folder, "jsonl.gz", _ROWS))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FormatError, match=r"rows\.jsonl\.gz: broken gzip data"):
        contents(expand_inputs([f"{url}/{path.name}"]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_preprocessing_objects_gives_the_bytes_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """JSON lines are read by ranges in the workers. Files that cannot be divided are read here and distributed."""
    (tmp_path / "store").mkdir()
    for number, path in enumerate(("a.jsonl", "b.jsonl.gz")):
        data = CHATS.read_bytes() * (4 - number)
        (tmp_path / "store" / path).write_bytes(gzip.compress(data) if path.endswith(".gz") else data)
    url = serve_folder(tmp_path / "store", tmp_path / "msc.json", monkeypatch)
    here = preprocess(tmp_path / "here" / "x", "--input", tmp_path / "store/a.jsonl", tmp_path / "store/b.jsonl.gz")
    assert here.code == 0, here
    inputs = ("--input", f"{url}/a.jsonl", f"{url}/b.jsonl.gz")
    there = preprocess(tmp_path / "there" / "x", *inputs, "--workers", workers)
    assert there.code == 0, there
    assert files_of(tmp_path / "there" / "x") == files_of(tmp_path / "here" / "x")
