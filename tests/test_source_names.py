"""Input files have the shortest names that tell them apart, and one function finds the file of a spelling."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from chats import command, preprocess, write_rows
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.source_names import find_name, listed_names, shortest_names
from megatron_sft_idx.shard import Shard

PARTS = st.lists(st.sampled_from(["a", "b", "c.d", "x y"]), min_size=1, max_size=4)
PATHS = st.lists(PARTS, min_size=1, max_size=8, unique_by=tuple)


def files(paths: list[list[str]]) -> list[str]:
    """Paths of files, of which none is the folder of another."""
    return ["/".join([*path[:-1], path[-1] + ".jsonl"]) for path in paths]


@given(PATHS)
def test_a_name_is_the_shortest_end_that_no_other_file_has(paths: list[list[str]]) -> None:
    given = files(paths)
    names = shortest_names(given)
    assert len({*names}) == len(names)
    for number, (path, name) in enumerate(zip(given, names, strict=True)):
        assert f"/{path}".endswith(f"/{name}")
        others = [other for other in given if other != path]
        shorter = name.partition("/")[2]
        assert not shorter or any(f"/{other}".endswith(f"/{shorter}") for other in others)
        # A name, and the whole path, mean the file.
        assert find_name(name, names, "x") == number
        if not any(other.endswith(f"/{name}") for other in given if other != path):
            assert find_name(f"/somewhere/{path}", names, "x") == number


@given(PATHS, st.sampled_from(["/", "/data/", "s3://bucket/", "s3://bucket/deep/er/", "./", "more/"]))
def test_names_do_not_tell_where_the_files_lie(paths: list[list[str]], folder: str) -> None:
    given = files(paths)
    assert shortest_names([folder + path for path in given]) == shortest_names(given)
    assert shortest_names(given[::-1]) == shortest_names(given)[::-1]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/train.jsonl", "b/train.jsonl"], ["a/train.jsonl", "b/train.jsonl"]),
        (["x/chats.jsonl"], ["chats.jsonl"]),
        (["/mnt/x/chats.jsonl"], ["chats.jsonl"]),
        (["a/t.jsonl", "b/t.jsonl", "c/other.jsonl"], ["a/t.jsonl", "b/t.jsonl", "other.jsonl"]),
        (["t.jsonl", "a/t.jsonl"], ["t.jsonl", "a/t.jsonl"]),
        (["a/x/t.jsonl", "b/x/t.jsonl", "b/y/t.jsonl"], ["a/x/t.jsonl", "b/x/t.jsonl", "y/t.jsonl"]),
        (["s3://one/t.jsonl", "s3://two/t.jsonl"], ["one/t.jsonl", "two/t.jsonl"]),
        (["s3://one/t", "s3://one/t/u"], ["t", "u"]),
        (
            [f"/cache/datasets--{owner}--chats/snapshots/{'0' * 40}/data/t.parquet" for owner in ("me", "you")],
            ["me/chats/data/t.parquet", "you/chats/data/t.parquet"],
        ),
        (["a/\udcff.jsonl"], ["\\xff.jsonl"]),
    ],
)
def test_names_by_example(paths: list[str], names: list[str]) -> None:
    assert shortest_names(paths) == names


def test_a_spelling_means_one_file_or_is_refused() -> None:
    names = ["a/t.jsonl", "b/t.jsonl", "other.jsonl", "b/x/u.jsonl", "u.jsonl"]
    for spelling, number in (
        ("a/t.jsonl", 0),
        ("./b/t.jsonl", 1),
        ("/data/b/t.jsonl", 1),
        ("deep/other.jsonl", 2),
        ("x/u.jsonl", 3),
        ("u.jsonl", 4),
        ("/b/x/u.jsonl", 3),
        ("c/u.jsonl", 4),
        ("s3://bucket/a/t.jsonl", 0),
    ):
        assert find_name(spelling, names, "x") == number, spelling
    with pytest.raises(FormatError, match=r"^x: t\.jsonl is any of a/t\.jsonl, b/t\.jsonl; name one of them$"):
        find_name("t.jsonl", names, "x")
    for spelling in ("c/t.jsonl", "", "jsonl", "ther.jsonl", "a", "../t.jsonl"):
        with pytest.raises(FormatError, match=r"no input file matches .*; there are a/t\.jsonl, b/t\.jsonl"):
            find_name(spelling, names, "x")


def test_one_spelling_in_every_verb_and_no_path_in_the_header(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        rows = [{"prompt": f"{name} {number}?", "completion": f"{number}."} for number in range(6)]
        write_rows(tmp_path / name / "train.jsonl", rows)
    inputs = ("--input", tmp_path / "a/train.jsonl", tmp_path / "b/train.jsonl")
    given = (*inputs, "--repeat", "b/train.jsonl=2", "--loss-weight", "b/train.jsonl=0.5")
    assert preprocess(tmp_path / "x", *given, "--packing", "none").code == 0
    shard = Shard(tmp_path / "x")
    assert listed_names(shard.columns["source"].spec) == ["a/train.jsonl", "b/train.jsonl"]
    assert os.fsencode(tmp_path) not in b"".join(path.read_bytes() for path in tmp_path.glob("x.*"))
    found = command("inspect", tmp_path / "x", "--row", "b/train.jsonl:5", "--json")
    assert len(json.loads(found.out)["sequences"]) == 2
    ambiguous = command("inspect", tmp_path / "x", "--row", "train.jsonl:5")
    assert (ambiguous.code, "is any of a/train.jsonl, b/train.jsonl" in ambiguous.err) == (1, True), ambiguous
    listed = command("inspect", tmp_path / "x", "--where", f"source == {tmp_path}/b/train.jsonl", "--json")
    assert json.loads(listed.out)["selected"] == 12
    # A split keeps the names, and so does a merge; equal names of other files are numbered.
    words = ("--shards", 2, "--output-prefix", tmp_path / "s")
    assert command("split", tmp_path / "x", *words).code == 0
    merge([f"{tmp_path}/s-00000-of-00002", f"{tmp_path}/s-00001-of-00002"], tmp_path / "m", durable=False)
    assert listed_names(Shard(tmp_path / "m").columns["source"].spec) == ["a/train.jsonl", "b/train.jsonl"]
    for name in "ab":
        assert preprocess(tmp_path / f"one-{name}", "--input", tmp_path / name / "train.jsonl").code == 0
    merge([tmp_path / "one-a", tmp_path / "one-b"], tmp_path / "both", durable=False)
    assert listed_names(Shard(tmp_path / "both").columns["source"].spec) == ["train.jsonl (0)", "train.jsonl (1)"]
    ambiguous = command("inspect", tmp_path / "both", "--where", "source == train.jsonl")
    assert (ambiguous.code, "is any of train.jsonl (0), train.jsonl (1)" in ambiguous.err) == (2, True), ambiguous
    listed = command("inspect", tmp_path / "both", "--where", "source == train.jsonl (1)", "--json")
    assert json.loads(listed.out)["selected"] == 6


def test_a_name_that_two_files_have_means_neither() -> None:
    paths = [f"/c/datasets--o--n/snapshots/{letter * 40}/data/t.jsonl" for letter in "ab"]
    names = shortest_names(paths)
    assert len({*names}) == 1
    with pytest.raises(FormatError, match=r"t\.jsonl is any of"):
        find_name(names[0], names, "--where")
