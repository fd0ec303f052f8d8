"""Damage never gets into a new file: a command that reads a damaged shard fails, and creates nothing.

The commands are read from the command line's parser, so a new command must be added here too.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from chats import command, files_of, preprocess
from damage import KINDS

from megatron_sft_idx.cli.main import build_parser
from megatron_sft_idx.formats.registry import WRITABLE
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard, write_column

# Commands that do not derive data from a shard, or that handle damaged ones.
OTHER_COMMANDS = {
    "preprocess": "reads chats",
    "produce": "reads chats",
    "create-raw-index": "reads JSON lines",
    "inspect": "shows",
    "verify": "checks",
    "rebuild": "makes a damaged shard whole",
}
PACK = ("pack", "{source}", "--seq-length", "512", "--overlong", "split", "--output-prefix", "{out}/x")
CONVERT = ("convert", "{source}", "{out}/x", "--overwrite", "--lossy", "--to")
RECIPES: dict[str, tuple[str, ...]] = {
    "pack": PACK,
    "pack into several": (*PACK, "--output-shards", "2"),
    "merge": ("merge", "{source}", "{source}", "--output-prefix", "{out}/x"),
    "split": ("split", "{source}", "--shards", "2", "--output-prefix", "{out}/x"),
    "copy": ("copy", "{source}", "{out}/x"),
    **{f"convert to {name}": (*CONVERT, name) for name in WRITABLE},
    **{f"convert to {name} without reading it again": (*CONVERT, name, "--no-verify") for name in WRITABLE},
}
DAMAGES = ("bit flip", "truncation", "extension", "zeroed range", "moved block")
FILES = (*SUFFIXES, ".source.col", ".score.col")


class Source(NamedTuple):
    """A shard with a written and an attached column."""

    prefix: Path
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    prefix = tmp_path_factory.mktemp("source") / "data"
    assert preprocess(prefix, "--max-rows", "40", capacity=2048).code == 0
    num_tokens = Shard(prefix).header.num_tokens
    write_column(prefix, "score", np.arange(num_tokens, dtype=np.float32), per="token")
    return Source(prefix, files_of(prefix))


def verbs(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices


def attempt(recipe: str, source: Source, folder: Path, files: dict[str, bytes]):
    """Write the files of a shard into ``folder`` and run the recipe on it. Return its outcome and the new names."""
    shard, out = folder / "shard", folder / "out"
    shard.mkdir()
    out.mkdir()
    for suffix, raw in files.items():
        (shard / f"data{suffix}").write_bytes(raw)
    outcome = command(*(word.format(source=shard / "data", out=out) for word in RECIPES[recipe]))
    return outcome, sorted(path.name for path in out.iterdir())


def damaged(files: dict[str, bytes], suffix: str, kind: str, seed: int) -> dict[str, bytes]:
    rng = np.random.default_rng([seed, zlib.crc32(f"{suffix} {kind}".encode())])
    changed = files[suffix]
    while changed == files[suffix]:
        changed = KINDS[kind](files[suffix], b"", rng)
    return {**files, suffix: changed}


def assert_stops(recipe: str, source: Source, folder: Path, suffix: str, kind: str, seed: int = 0) -> None:
    outcome, appeared = attempt(recipe, source, folder, damaged(source.files, suffix, kind, seed))
    assert (outcome.code, appeared) == (1, []), (recipe, suffix, kind, outcome)
    assert "Traceback" not in outcome.err
    assert outcome.err.strip().splitlines()[-1].startswith("megatron-sft-idx"), outcome.err


def test_every_command_is_entered_here():
    derive = {recipe.split()[0] for recipe in RECIPES}
    assert derive | OTHER_COMMANDS.keys() == {*verbs(build_parser())}


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_undamaged_shard_passes(recipe, source, tmp_path):
    outcome, appeared = attempt(recipe, source, tmp_path, source.files)
    assert outcome.code == 0, outcome
    assert appeared


@pytest.mark.sample(40)
@pytest.mark.parametrize("suffix", FILES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_damaged_shard_stops(recipe, suffix, source, tmp_path):
    """This tests one damage per recipe and file; the slow test has all of them."""
    kind = DAMAGES[zlib.crc32(f"{recipe} {suffix}".encode()) % len(DAMAGES)]
    assert_stops(recipe, source, tmp_path, suffix, kind)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_damage_of_every_file_stops(recipe, source, tmp_path):
    for suffix in FILES:
        for kind in DAMAGES:
            for seed in range(3):
                folder = tmp_path / f"{suffix[1:]} {kind} {seed}"
                folder.mkdir()
                assert_stops(recipe, source, folder, suffix, kind, seed)
