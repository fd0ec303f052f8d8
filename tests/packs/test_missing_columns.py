"""Errors about a missing column list the existing columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import command
from columned import SOURCE, write_columned
from sample_packs import demo_samples, write_samples

from megatron_sft_idx import open_dataset
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard import Shard, ShardWriter, write_column
from megatron_sft_idx.shard.shard_set import ShardSet

PACKS = demo_samples(4)
SPECS = {"score": ColumnSpec("sequence", np.float32), "topic": ColumnSpec("pack", np.int32)}
SAID = "has no column nope; it has late, score, topic"
# Formats that can store columns, and paths to write to.
CARRYING = {"parquet": "there.parquet", "memmap": "there", "jsonl-chunks": "there"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("columns")
    write_columned(path / "x", PACKS, SPECS)
    write_column(path / "x", "late", np.zeros(len(PACKS)), per="pack")
    write_samples(path / "plain", PACKS)
    return path


WAYS: dict[str, Callable[[str], Any]] = {
    "of an open shard": lambda prefix: Shard(prefix).columns["nope"],
    "opened by name": lambda prefix: Shard(prefix).columns.open("nope"),
    "of a shard's packs": lambda prefix: Shard(prefix, columns=["nope"])[0],
    "of many shards": lambda prefix: ShardSet([prefix], columns=["nope"]),
    "of a dataset": lambda prefix: open_dataset(prefix, columns=("nope",)),
}


@pytest.mark.parametrize("way", WAYS)
def test_of_a_shard(folder: Path, way: str) -> None:
    for name, said in (("x", SAID), ("plain", "has no column nope; it has none")):
        with pytest.raises(Exception, match="has no column") as caught:
            WAYS[way](str(folder / name))
        assert str(caught.value).startswith(f"{folder / name}: {said}")


def test_a_look_at_a_column_that_may_be_missing_is_no_error(folder: Path) -> None:
    columns = Shard(folder / "x").columns
    assert (columns.get("nope"), "nope" in columns, "late" in columns) == (None, False, True)


@pytest.mark.parametrize("name", CARRYING)
def test_of_other_formats(folder: Path, tmp_path: Path, name: str) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow")
    there = str(tmp_path / CARRYING[name])
    convert(str(folder / "x"), there, name, ConvertOptions(lossy=True))
    with pytest.raises(Exception, match=SAID) as caught:
        open_dataset(there, columns=("nope",))[0]
    assert str(caught.value).startswith(there)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("x: has no column source; it has late, score, topic; ", ("inspect", "x", "--row", "a.jsonl:1")),
        ("s: has no column late; it has source; x has column late; ", ("merge", "s", "x", "--output-prefix", "out")),
    ],
)
def test_of_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, said: str, words: tuple[object, ...]) -> None:
    monkeypatch.chdir(folder)
    write_columned(folder / "s", PACKS, {"source": SOURCE}, overwrite=True)
    done = command(*words)
    assert (done.code, done.err.count("\n")) == (1, 1), done
    assert said in done.err


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (("--where", "source == a.jsonl"), "--where source == a.jsonl needs it"),
        (("--where", "late >= 0", "--where", "nope > 1"), "--where nope > 1 needs it"),
        (("--loss-weight-column", "nope"), "--loss-weight-column nope needs it"),
    ],
)
def test_of_commands_that_choose_or_weigh(folder: Path, tmp_path: Path, words: tuple[str, ...], more: str) -> None:
    verbs = [("pack", folder / "x", *words, "--seq-length", 64, "--output-prefix", tmp_path / "out")]
    verbs += [("inspect", folder / "x", *words)] if words[0] == "--where" else []
    for verb in verbs:
        done = command(*verb)
        assert done.code == 2, done
        name = more.split()[1]
        assert f"x: has no column {name}; it has late, score, topic; {more}" in done.err
    assert not [*tmp_path.iterdir()]


def test_of_batches_and_losses(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from megatron_sft_idx.training.batch import BatchAssembler
    from megatron_sft_idx.training.losses import dpo_losses, files_of
    from megatron_sft_idx.training.sources import StoredPacks

    source = StoredPacks(ShardSet([str(folder / "x")], columns=["score"]))
    with pytest.raises(ValueError, match=r"^columns: the source has no column nope; it has score; open its shards"):
        BatchAssembler(source, 4096, columns=("nope",))
    batch = BatchAssembler(source, 4096, columns=("score",)).sample(0)
    said = "^batch: has no column {}; it has score; request .*columns="
    with pytest.raises(ValueError, match=said.format("source")):
        files_of(batch)
    with pytest.raises(ValueError, match=said.format("pair")):
        dpo_losses(torch.zeros(1, 4096), batch)


def test_a_writer_lists_what_it_was_opened_for(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", columns=SPECS) as writer:
        with pytest.raises(ValueError, match="columns nope, but this writer was opened for score, topic"):
            writer.add_pack([1, 2], [1, 0], [0], columns={"nope": [1]})
        writer.add_pack([1, 2], [1, 0], [0], columns={"score": [1], "topic": [2]})
