"""``--help`` of every command has examples, and each of them works with files of the names in it."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from chats import CHATS, SUFFIXES, TOKENIZER, command, write_rows

from megatron_sft_idx.cli.main import build_parser
from megatron_sft_idx.shard import Shard, ShardWriter

# Examples with remote files, other programs or special rights are parsed but not run.
AWAY = ("s3://", "msc://", "--engine ray", " | ", "--memory-limit")
# Commands that search, and exit with 1 if they find nothing.
NOT_FOUND = ("--find 'as an AI'",)


def verbs() -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    return dict(action.choices)


def examples_of(text: str, program: str) -> list[str]:
    """Return the command lines of a help text, each as one line."""
    lines = text.replace("\\\n", " ").splitlines()
    found = re.compile(rf" {{4}}((?:[\w-]+ \| )?{program} .*)")
    return [re.sub(r"\s+", " ", match[1]) for line in lines if (match := found.fullmatch(line))]


EXAMPLES = [
    (verb, example)
    for verb, parser in {"": build_parser(), **verbs()}.items()
    for example in examples_of(parser.epilog or "", f"megatron-sft-idx {verb}".strip())
]


def arguments_of(example: str) -> list[str]:
    """Return the arguments of an example, without the parts for the shell: a pipe before it, or an output file."""
    line = example.partition(" | ")[2] or example
    return shlex.split(line.partition(" > ")[0])[1:]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder with all files that the examples use, made from the demo's chats."""
    here = tmp_path_factory.mktemp("world")
    for name in ("Qwen3-8B", "tok"):
        shutil.copytree(TOKENIZER, here / name)
    for name in ("raw", "old", "data/parts", "index", "parts", "backup"):
        (here / name).mkdir(parents=True)
    # Without reasoning, which the bundled template drops, so that examples run unchanged.
    rows = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        for message in row["messages"]:
            message.pop("reasoning_content", None)
    write_rows(here / "chats.jsonl", rows)
    shutil.copy(here / "chats.jsonl", here / "raw/a.jsonl")
    (here / "raw/_END").touch()
    if find_spec("zstandard"):
        import zstandard

        (here / "raw/a.jsonl.zst").write_bytes(zstandard.compress((here / "chats.jsonl").read_bytes()))
    if find_spec("pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"prompt": ["What is 2 + 2?"], "completion": ["4."]}), here / "more.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        made = ["--input", "chats.jsonl", "--tokenizer-model", "tok", "--seq-length", 1024, "--workers", 0]
        run("preprocess", *made, "--keep-corpus", "--output-prefix", "data/train")
        for prefix in ("data/train-again", "data/math", "data/code", "data/part-9", "data/part-10", "data/parts/a"):
            run("copy", "data/train", prefix)
        run(
            "pack", "data/train.unpacked", "--seq-length", 1024, "--sequence-multiple", 8, "--output-prefix", "data/cp4"
        )
        for prefix in ("corpus-1", "corpus-2"):
            run("copy", "data/train.unpacked", prefix)
        run("convert", "data/train", "old/train.npy", "--to", "npy", "--no-columns")
        if find_spec("pyarrow"):
            run("convert", "data/train", "data/part-1.parquet", "--to", "parquet")
        write_stock(Shard("data/train"), "data/text_document", "data/masks")
    return here


def run(*arguments: object) -> None:
    outcome = command(*arguments)
    assert outcome.code == 0, outcome.err


def write_stock(shard: Shard, tokens: str, masks: str) -> None:
    """Write two stock Megatron datasets: the ids of a shard, and its masks.

    Two files of a shard are a stock dataset.
    """
    for path, key in ((tokens, "input_ids"), (masks, "loss_mask")):
        with ShardWriter(path) as writer:
            for pack in shard:
                writer.add_pack(pack[key].astype(np.int32), 0 * pack["loss_mask"], [0])
        for suffix in (".loss.bin", ".seq.bin", ".seq.idx"):
            Path(path + suffix).unlink()


@pytest.mark.parametrize("verb", verbs())
def test_help_has_an_example(verb: str) -> None:
    shown = command(verb, "--help")
    assert shown.code == 0
    assert examples_of(shown.out, f"megatron-sft-idx {verb}")
    assert " ... " not in shown.out.partition("examples:")[2], "an example that is cut short cannot be pasted"


@pytest.mark.parametrize(("verb", "example"), EXAMPLES)
def test_an_example_works(
    verb: str, example: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word, library in ((".zst", "zstandard"), ("parquet", "pyarrow")):
        if word in example:
            pytest.importorskip(library)
    arguments = arguments_of(example)
    parsed = build_parser().parse_args(arguments)
    if any(mark in example for mark in AWAY):
        return
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for path in made_by(parsed):
        path.unlink()
    if hasattr(parsed, "workers"):
        arguments += ["--workers", "0"]  # the same bytes, without waiting for processes
    outcome = command(*arguments)
    assert outcome.code == (1 if any(mark in example for mark in NOT_FOUND) else 0), outcome.err


def made_by(parsed: argparse.Namespace) -> list[Path]:
    """Return existing files that are in the way of an example's output."""
    target = getattr(parsed, "output_prefix", None) or getattr(parsed, "destination", None)
    if target is None or target == getattr(parsed, "source", None):
        return []
    return [path for path in map(Path, [target, *shard(target), *shard(f"{target}.unpacked")]) if path.is_file()]


def shard(prefix: str) -> list[str]:
    return [prefix + suffix for suffix in (*SUFFIXES, ".source.col")]


def test_commands_are_listed_by_what_they_are_for() -> None:
    shown = command("--help").out.partition("commands:\n")[2].partition("example:")[0]
    groups = re.findall(r"^  (\w[\w ]*):$|^    ([\w-]+)(?: |$)", shown, re.MULTILINE)
    assert [group for group, _ in groups if group] == ["prepare", "inspect", "repair", "convert and move"]
    assert sorted(verb for _, verb in groups if verb) == sorted(verbs())


def test_the_training_script_teaches_what_it_parses() -> None:
    from training_twin import pretrain_script

    script = pretrain_script()
    examples = examples_of(script.build_parser().description or "", r"(?:python|torchrun)")
    assert len(examples) == 3
    for example in examples:
        script.parse_arguments(shlex.split(example.partition("pretrain_sft.py ")[2]))


def test_a_command_imports_no_other() -> None:
    """Importing all commands takes longer than a small job, and worker processes import this module too."""
    script = (
        "import sys; from megatron_sft_idx.cli.main import build_parser; build_parser('split'); print(*sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "megatron_sft_idx.cli.move" in found
    assert not {f"megatron_sft_idx.{name}" for name in ("cli.produce", "check", "inspect", "live")} & set(found)
