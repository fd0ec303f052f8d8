"""Helpers for many test modules: bundled chats, calls of the command line, a shard as sequences."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_sft_idx.cli.main import main
from megatron_sft_idx.shard import Shard

ROOT = Path(__file__).parents[1]
CHATS = ROOT / "tools/demo/chats.jsonl"
TOKENIZER = ROOT / "tools/demo/tokenizer"
GENERATION_TEMPLATE = ROOT / "tools/demo/chat_template_generation.jinja"
SUFFIXES = (".bin", ".loss.bin", ".seq.bin", ".idx", ".seq.idx")
# Suffixes of the files that preprocess writes.
MADE = (*SUFFIXES, ".source.col")


class Outcome(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


def command(*arguments: object) -> Outcome:
    """Run ``megatron-sft-idx`` in this process."""
    return outcome_of(main, *arguments)


def outcome_of(program: Callable[[list[str]], int], *arguments: object) -> Outcome:
    """Run the main function of a program in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = program([str(argument) for argument in arguments])
        except SystemExit as leaving:  # from argparse
            code = int(leaving.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def preprocess(prefix: Path, *arguments: object, rows: Any = None, capacity: int = 1024) -> Outcome:
    """Run ``preprocess`` in this process. ``rows``, if given, are written next to the prefix and used as input."""
    source = CHATS
    if rows is not None:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        source = write_rows(prefix.parent / "rows.jsonl", rows)
    given = [*(() if "--input" in arguments else ("--input", source)), *arguments]
    if "--tokenizer-model" not in arguments:
        given += ["--tokenizer-model", TOKENIZER]
    if "--seq-length" not in arguments:
        given += ["--seq-length", capacity]
    if (
        "--earlier-reasoning" not in arguments
    ):  # the bundled template drops reasoning that some of the bundled chats have
        given += ["--earlier-reasoning", "drop"]
    if "--workers" not in arguments:
        given += ["--workers", 0]
    if "--output-prefix" not in arguments:
        given += ["--output-prefix", prefix]
    return command("preprocess", *given)


def write_rows(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def files_of(prefix: Path) -> dict[str, bytes]:
    """Return the bytes of a shard and of its columns, by suffix."""
    columns = [path.name.removeprefix(prefix.name) for path in prefix.parent.glob(f"{prefix.name}.*.col")]
    suffixes = (*SUFFIXES, *(suffix for suffix in columns if suffix.count(".") == 2))
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in suffixes}


def sequences_of(prefix: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return all sequences of a shard as ids and token-aligned mask."""
    shard = Shard(prefix)
    pairs = (pair for i in range(len(shard)) for pair in shard.sequences(i))
    return [(ids, np.concatenate([mask[:1] * 0, mask[:-1]])) for ids, mask in pairs]


def remains(folder: Path) -> list[str]:
    """Return the names in a folder, except the input that the test itself put there."""
    return sorted(path.name for path in folder.iterdir() if path.name != "rows.jsonl")
