"""``preprocess --resume``: wherever a run was interrupted, it ends with the bytes of one that was not."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chats import CHATS, ROOT, TOKENIZER, command, files_of, preprocess, remains, write_rows
from kills import killed_at
from packs import opens

from megatron_sft_idx.preprocess import pipeline, source
from megatron_sft_idx.shard import Shard, find_remains

PIECE_NBYTES = 4000


@pytest.fixture(scope="module")
def chats():
    return [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def rows(chats):
    """A few dozen pieces; bad rows among them, and a weight in the middle."""
    answer = {"role": "assistant", "content": "Yes.", "weight": 0.5}
    weighted = {"messages": [{"role": "user", "content": "Is it?"}, answer]}
    bad = {"messages": []}
    tokenized = {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}
    return [*chats[:60], bad, tokenized, *chats[60:120], weighted, *chats[120:180], bad]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(source, "PIECE_NBYTES", PIECE_NBYTES)


class Case:
    """One input, and what an uninterrupted run makes of it."""

    def __init__(self, folder: Path, rows: Any, *options: object) -> None:
        self.folder = folder
        self.source = write_rows(folder / "rows.jsonl", rows)
        self.options = (*options, "--on-bad-row", "skip")
        self.calm = self.run(folder / "calm" / "x")
        assert self.calm.code == 0, self.calm
        self.files = files_of(folder / "calm" / "x")
        self.counts = self.counts_of(folder / "calm" / "x")

    def run(self, prefix: Path, *more: object, workers: int = 0) -> Any:
        prefix.parent.mkdir(exist_ok=True)
        summary = prefix.parent.parent / f"{prefix.parent.name}.json"
        arguments = ("--input", self.source, "--summary", summary, "--workers", workers, *self.options, *more)
        return preprocess(prefix, *arguments)

    def counts_of(self, prefix: Path) -> dict[str, Any]:
        summary = json.loads((prefix.parent.parent / f"{prefix.parent.name}.json").read_text())
        return {name: summary[name] for name in ("corpus", "packing")}

    def assert_ends_the_same(self, prefix: Path, *more: object) -> None:
        resumed = self.run(prefix, "--resume", *more)
        assert resumed.code == 0, resumed
        assert files_of(prefix) == self.files
        assert remains(prefix.parent) == sorted(f"x{suffix}" for suffix in self.files)
        counts = self.counts_of(prefix)
        if counts["corpus"].pop("reused"):
            # The corpus was finished, and its header has only the number of bad rows.
            counts["corpus"]["bad_rows"] = self.counts["corpus"]["bad_rows"]
        assert counts == {**self.counts, "corpus": {k: v for k, v in self.counts["corpus"].items() if k != "reused"}}


def interrupted_after(case: Case, prefix: Path, step: int) -> bool:
    return killed_at(step, lambda: case.run(prefix))


def test_killed_at_any_step_it_ends_the_same(tmp_path, rows):
    case = Case(tmp_path, rows)
    for step in range(0, 200, 3):
        prefix = tmp_path / str(step) / "x"
        if not interrupted_after(case, prefix, step):
            break
        opens(prefix)
        case.assert_ends_the_same(prefix)
    assert step > 40


def test_killed_again_and_again_it_ends_the_same(tmp_path, rows):
    case = Case(tmp_path, rows)
    chance = random.Random(7)
    for attempt in range(6):
        prefix = tmp_path / str(attempt) / "x"
        if not interrupted_after(case, prefix, chance.randrange(60)):
            continue
        for _ in range(4):
            killed_at(chance.randrange(60), lambda prefix=prefix: case.run(prefix, "--resume"))
            opens(prefix)
        case.assert_ends_the_same(prefix)
