"""tools/pretrain_sft.py on live data, killed with SIGKILL and restarted with the same command: each row comes once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chats import TOKENIZER
from live_catalogs import make_catalog
from test_live_training import LENGTH, PATIENCE, Feed, launch, shard_producer, wait_for
from test_pretrain_script import ROOT, THREADS

from megatron_sft_idx.tokenize import EncodingOptions, RowEncoder

CHATS = 300


def options(folder: Path, ranks: int, *more: object) -> list[str]:
    """Return options without a save interval, so that only the producer's limit causes checkpoints."""
    data = ["--data-path", f"live:{folder / 'chunks'}", "--seq-length", LENGTH, "--global-batch-size", ranks]
    model = ["--hidden-size", 32, "--log-interval", 1000, "--train-iters", 1000, "--metrics", folder / "log.jsonl"]
    return [str(option) for option in (*data, *model, "--save", folder / "checkpoints", "--max-wait", 60, *more)]


@contextmanager
def training(folder: Path, ranks: int, diary: str) -> Iterator[subprocess.Popen[str]]:
    process = launch(folder, {"run": options(folder, ranks)}, ranks, diary=str(folder / diary))
    try:
        yield process
    finally:
        kill(process)


def kill(torchrun: subprocess.Popen[str]) -> None:
    """Kill all processes. Each rank is a separate process group with its children."""
    if torchrun.poll() is None:
        ranks = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        torchrun.kill()
        for rank in ranks:
            os.killpg(int(rank), signal.SIGKILL)
        torchrun.wait()  # not for other processes that hold its output


def steps_of(folder: Path) -> int:
    log = folder / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def saved_steps(folder: Path) -> int:
    latest = folder / "checkpoints/latest_checkpointed_iteration.txt"
    return int(latest.read_text()) if latest.exists() else 0


def rows_of(folder: Path, diary: str, ranks: int, steps: int | None = None) -> list[list[int]]:
    """Return the rows that the ranks trained on, in their first steps or in all. There is one row per rank and step."""
    lines = [(folder / f"{diary}.{rank}").read_text().splitlines()[:steps] for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in lines}) == 1
    return [row for of_rank in lines for line in of_rank for row in json.loads(line)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_command_goes_on_after_a_kill(ranks: int, tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.add(range(CHATS), last=True)
    least = ranks  # one row per rank and step, in windows of one shard
    with shard_producer(tmp_path, "--max-ahead-shards", least, "--keep-recent", 0) as producer:
        with training(tmp_path, ranks, "killed") as first:
            wait_for(lambda: 0 < saved_steps(tmp_path) < steps_of(tmp_path) - 1, first, "no checkpoint yet")
            kill(first)
        assert producer.poll() is None, "it waits for what is not completed"
        with training(tmp_path, ranks, "again") as second:
            said = second.communicate(timeout=PATIENCE)[0]
        assert second.returncode == 0, said[-6000:]
        assert producer.wait(PATIENCE) == 0
    (going_on,) = re.findall(r"resuming from \S+iter_(\d+), after (\d+) steps", said)
    saved = int(going_on[1])
    assert int(going_on[0]) == saved > 0
    assert "the data ended after step" in said
    kept = rows_of(tmp_path, "killed", ranks, saved)
    assert len(kept) == saved * ranks, "no more than was trained on"
    tokenizer = RowEncoder(EncodingOptions(str(TOKENIZER))).tokenizer
    rows = [*kept, *rows_of(tmp_path, "again", ranks)]
    found = [int(number) for row in rows for number in re.findall(r"row (\d+)", tokenizer.decode(row))]
    assert sorted(found) == list(range(CHATS))
    assert len(list((tmp_path / "chunks").glob("shard-*.seq.idx"))) <= least, "the others are freed"


@pytest.mark.slow
def test_too_few_shards_ahead_are_refused_at_the_start(tmp_path: Path) -> None:
    make_catalog(tmp_path / "chunks", [3, 3, 3], ended=False, max_ahead_shards=1)
    command = [sys.executable, str(ROOT / "tools/pretrain_sft.py"), *options(tmp_path, 2, "--vocab-size", 2048)]
    done = subprocess.run(
        command, env={**os.environ, **THREADS}, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"error: .*at most 1 shards ahead.* start the producer with --max-ahead-shards 2 or more", done.stderr
    )
    assert "Traceback" not in done.stderr
