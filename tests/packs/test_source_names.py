"""Names of input files are the shortest unique ones, and one function finds the file for a given spelling."""

from __future__ import annotations

import json
import os
from pathlib import Path

import datasets
import numpy as np
import pytest
from chats import TOKENIZER, command, preprocess, write_rows
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx import preprocess as run
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.source_names import find_name, listed_names, shortest_names, told_apart
from megatron_sft_idx.shard import Shard

PARTS = st.lists(st.sampled_from(["a", "b", "c.d", "x y"]), min_size=1, max_size=4)
PATHS = st.lists(PARTS, min_size=1, max_size=8, unique_by=tuple)


def files(paths: list[list[str]]) -> list[str]:
    """Return paths of files. None is the folder of another."""
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
        # A name means the file; the whole path works too if the input is known.
        assert find_name(name, names, "x") == number
        whole = [f"/somewhere/{each}" for each in given]
        assert find_name(whole[number], names, "x", whole) == number
        with pytest.raises(FormatError, match="no input file matches"):
            find_name(whole[number], names, "x")


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
        ("x/u.jsonl", 3),
        ("u.jsonl", 4),
    ):
        assert find_name(spelling, names, "x") == number, spelling
    with pytest.raises(
        FormatError, match=r"^x: t\.jsonl matches several files: a/t\.jsonl, b/t\.jsonl; use one of these names$"
    ):
        find_name("t.jsonl", names, "x")
    for spelling in (
        *("c/t.jsonl", "", "jsonl", "ther.jsonl", "a", "../t.jsonl", "deep/other.jsonl", "c/u.jsonl", "/u.jsonl"),
        *("/data/b/t.jsonl", "s3://bucket/a/t.jsonl"),
    ):
        with pytest.raises(FormatError, match=r"no input file matches .*; the input files are a/t\.jsonl, b/t\.jsonl"):
            find_name(spelling, names, "x")


def test_one_spelling_in_every_command_and_no_path_in_the_header(tmp_path: Path) -> None:
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
    assert (ambiguous.code, "matches several files: a/train.jsonl, b/train.jsonl" in ambiguous.err) == (1, True), (
        ambiguous
    )
    listed = command("inspect", tmp_path / "x", "--where", "source == b/train.jsonl", "--json")
    assert json.loads(listed.out)["selected"] == 12
    # split and merge keep the names; equal names of different files are numbered.
    words = ("--shards", 2, "--output-prefix", tmp_path / "s")
    assert command("split", tmp_path / "x", *words).code == 0
    merge([f"{tmp_path}/s-00000-of-00002", f"{tmp_path}/s-00001-of-00002"], tmp_path / "m", durable=False)
    assert listed_names(Shard(tmp_path / "m").columns["source"].spec) == ["a/train.jsonl", "b/train.jsonl"]
    for name in "ab":
        assert preprocess(tmp_path / f"one-{name}", "--input", tmp_path / name / "train.jsonl").code == 0
    merge([tmp_path / "one-a", tmp_path / "one-b"], tmp_path / "both", durable=False)
    assert listed_names(Shard(tmp_path / "both").columns["source"].spec) == ["train.jsonl (0)", "train.jsonl (1)"]
    ambiguous = command("inspect", tmp_path / "both", "--where", "source == train.jsonl")
    assert (ambiguous.code, "matches several files: train.jsonl (0), train.jsonl (1)" in ambiguous.err) == (2, True), (
        ambiguous
    )
    listed = command("inspect", tmp_path / "both", "--where", "source == train.jsonl (1)", "--json")
    assert json.loads(listed.out)["selected"] == 6


def test_a_name_that_two_files_have_means_neither() -> None:
    paths = [f"/c/datasets--o--n/snapshots/{letter * 40}/data/t.jsonl" for letter in "ab"]
    names = shortest_names(paths)
    assert len({*names}) == 1
    with pytest.raises(FormatError, match=r"t\.jsonl matches several files: "):
        find_name(names[0], names, "--where")


def test_of_very_many_names_the_nearest_are_listed() -> None:
    names = [f"{number:03}.jsonl" for number in range(200)] + ["chats.jsonl", "deep/more.jsonl"]
    for spelling, nearest in (("chat.jsonl", "chats.jsonl, 000"), ("old/more.jsonl", "deep/more.jsonl, 000")):
        with pytest.raises(FormatError, match=rf"the input files are {nearest}\.jsonl, .* and 192 more$"):
            find_name(spelling, names, "x")


def test_one_spelling_is_one_file_in_all_options_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name, letter in (("a.jsonl", "h"), ("../a.jsonl", "o")):
        write_rows(Path(name), [{"prompt": f"{letter} {number}?", "completion": f"{number}."} for number in range(3)])
    ways = {
        "--repeat": lambda spelling: ("--repeat", f"{spelling}=2"),
        "--loss-weight": lambda spelling: ("--loss-weight", f"{spelling}=0.5"),
        "--where": lambda spelling: ("--where", f"source == {spelling}"),
    }
    inputs = ("--input", "a.jsonl", "../a.jsonl")
    # The path of one file is the name of the other.
    for option, words in ways.items():
        for spelling in ("a.jsonl", "./a.jsonl"):
            refused = preprocess(tmp_path / "x", *inputs, *words(spelling))
            said = "a.jsonl is the path of here/a.jsonl, and also the name of another input; write the whole path"
            assert (refused.code, option in refused.err, said in refused.err) == (1, True, True), refused
        for spelling in ("old/a.jsonl", "old/here/a.jsonl", "/a.jsonl", tmp_path / "old/a.jsonl", "b.jsonl"):
            refused = preprocess(tmp_path / "x", *inputs, *words(spelling))
            said = f"no input file matches {spelling}; the input files are here/a.jsonl, a.jsonl"
            assert (refused.code, said in refused.err) == (1, True), refused
        assert not [*tmp_path.glob("x*")]
        for file, spellings in enumerate(
            [
                ("here/a.jsonl", f"{tmp_path.name}/here/a.jsonl", tmp_path / "here/a.jsonl", "../here/a.jsonl"),
                ("../a.jsonl", tmp_path / "a.jsonl", f"{tmp_path.name}/a.jsonl"),
            ]
        ):
            made = []
            for number, spelling in enumerate(spellings):
                prefix = tmp_path / f"{option}-{file}-{number}"
                assert preprocess(prefix, *inputs, *words(spelling)).code == 0
                made.append([path.read_bytes() for path in sorted(tmp_path.glob(f"{prefix.name}.*"))])
                shard = Shard(prefix, columns=["source"])
                files = np.concatenate([pack["source"][:, 0] for pack in shard])
                if option == "--where":
                    assert {*files.tolist()} == {file}
                    named = f"source == {['here/a.jsonl', 'a.jsonl'][file]}"
                    assert shard.header.metadata["packing"]["where"] == [named]
                elif option == "--repeat":
                    assert np.bincount(files).tolist() == [3 + 3 * (file == 0), 3 + 3 * (file == 1)]
                else:
                    assert shard.header.metadata["options"]["loss_weights"] == [[0.5, 1.0], [1.0, 0.5]][file]
            assert all(each == made[0] for each in made)
    # In the shard, a file has only its name.
    for words in (("--row", "old/a.jsonl:1"), ("--where", "source == old/a.jsonl"), ("--row", f"{tmp_path}/a.jsonl:1")):
        refused = command("inspect", tmp_path / "--repeat-0-0", *words)
        assert refused.code in (1, 2)
        assert "; the input files are here/a.jsonl, a.jsonl" in refused.err, refused
    assert "a.jsonl:1: pack" in command("inspect", tmp_path / "--repeat-0-0", "--row", "a.jsonl:1").out


def test_a_condition_by_a_path_holds_for_a_corpus_that_is_kept(tmp_path: Path) -> None:
    rows = [{"prompt": "a?", "completion": "b."}] * 3
    files = [write_rows(tmp_path / name, rows) for name in ("one.jsonl", " two.jsonl", "two.jsonl")]
    given = ("--input", *files, "--keep-corpus", "--where")
    assert preprocess(tmp_path / "x", *given, f"source != {files[0]}").code == 0
    assert Shard(tmp_path / "x").header.metadata["packing"]["where"] == ["source != one.jsonl"]
    # This name cannot be written in a condition.
    refused = preprocess(tmp_path / "y", *given, f"source == {files[1]}")
    assert (refused.code, "no input file matches" in refused.err) == (1, True), refused


def test_a_folder_is_no_name_of_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "math").mkdir()
    (tmp_path / "other").mkdir()
    for name in ("math/a.jsonl", "other/math"):
        write_rows(tmp_path / name, [{"prompt": "a?", "completion": "b."}])
    given = (tmp_path / "x", "--input", "math/a.jsonl", "other/math", "--repeat")
    refused = preprocess(*given, "math=2")
    said = "math is a folder or glob of the input, and also the name of another input; write the whole path"
    assert (refused.code, said in refused.err) == (1, True), refused
    assert preprocess(*given, "math/=2", "other/math=3").code == 0


def test_no_name_tells_the_folder_of_data_that_a_program_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    rows = [{"prompt": "a?", "completion": "b."}, {"prompt": "c?", "completion": "d."}]
    path, other = write_rows(tmp_path / "raw/math", rows), write_rows(tmp_path / "raw/deep.jsonl", rows)
    options = {"tokenizer": TOKENIZER, "seq_length": 64, "workers": 0, "log_interval": 0}

    def made(name: str, inputs: list[object], **more: object) -> list[int]:
        run(inputs, output_prefix=tmp_path / name, **options, **more)
        shard = Shard(tmp_path / name, columns=["source"])
        assert listed_names(shard.columns["source"].spec)[:2] == ["raw/math", "math"]
        return np.bincount(np.concatenate([pack["source"][:, 0] for pack in shard])).tolist()

    mixed = [path, {"math": datasets.Dataset.from_list(rows[:1])}, other]
    assert made("x", mixed, repeat={"math": 3, "raw/math": 2}, where=["source != deep.jsonl"]) == [4, 3]
    assert made("y", mixed, where=["source == math"]) == [0, 1]
    assert made("z", mixed, where=[f"source == {path}"]) == [2]
    monkeypatch.chdir(tmp_path / "raw")
    for more in ({"repeat": {"math": 2}}, {"loss_weight": {"math": 2}}, {"where": ["source == math"]}):
        with pytest.raises(FormatError, match="math is the path of raw/math, and also the name of another input"):
            made("n", ["math", *mixed[1:]], **more)
    # An ambiguous name matches neither file.
    paths = ["/math", "/out/x.rows-abcd_123/math"]
    assert told_apart(shortest_names(paths)) == ["math (0)", "math (1)"]
    with pytest.raises(
        FormatError, match=r"math matches several files: math \(0\), math \(1\); use one of these names"
    ):
        find_name("math", told_apart(shortest_names(paths)), "x", paths)
    assert not [*tmp_path.glob("n*")]
