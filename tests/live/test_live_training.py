"""tools/pretrain_sft.py on live data: four ranks train while producers write; every row once, and files are freed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TOKENIZER, write_rows
from sample_packs import sample_of
from test_formats_jsonl_chunks import produced
from test_live_chunks import producer
from test_pretrain_script import ROOT, THREADS
from torchruns import torchrun

from megatron_sft_idx.live import Catalog
from megatron_sft_idx.tokenize import EncodingOptions, RowEncoder

# Four ranks that import torch and Megatron take most of a minute on two cores.
pytestmark = pytest.mark.slow

RANKS, LENGTH, LINES, ROWS, CHATS = 4, 64, 3, 41, 200
PATIENCE = 240.0
# The producers stop at this row, in the middle of a chunk, until training has done this number of steps.
STOP_ROW, STEPS_BEFORE = 28, 6


@dataclass
class Run:
    """The results of a run: each rank's rows and losses, and the output."""

    rows: list[list[dict[str, np.ndarray]]]
    losses: list[list[float]]
    said: str

    def real(self, rank: int) -> list[np.ndarray]:
        """Return the tokens of a rank's rows with loss, without padding."""
        found = []
        for row in self.rows[rank]:
            if row["loss_mask"].any():
                found.append(row["tokens"][: np.flatnonzero(row["loss_mask"])[-1] + 2])
        return found


def chat(number: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"row {number}"}, {"role": "assistant", "content": f"It is {number}."}]
    return {"messages": turns}


def pack(number: int) -> dict[str, Any]:
    """Return a pack of two sequences whose first ids are the row's number."""
    return produced(sample_of([3 + number % 4, 5], lambda p: p % 2, lambda p: number if p == 0 else 1000 + p))


def options(folder: Path, *more: object, steps: int = 1000) -> list[str]:
    data = ["--data-path", f"live:{folder / 'chunks'}", "--seq-length", LENGTH, "--global-batch-size", RANKS]
    model = ["--hidden-size", 32, "--log-interval", 1000, "--metrics", folder / "log.jsonl", "--train-iters", steps]
    return [str(option) for option in (*data, *model, *more)]


def saves(folder: Path) -> list[object]:
    return ["--save", folder / "checkpoints", "--save-interval", STEPS_BEFORE]


def chunk_runs(folder: Path) -> dict[str, list[str]]:
    ends = ["--end-after", 4, "--samples-per-chunk", LINES]
    return {
        "raw": options(folder / "raw", "--tokenizer-model", TOKENIZER, *ends, *saves(folder / "raw")),
        "packed": options(folder / "packed", "--vocab-size", 2048, "--live-window", 0, *ends),
    }


def steps_of(folder: Path) -> int:
    log = folder / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def launch(folder: Path, runs: dict[str, list[str]], ranks: int = RANKS, **more: Any) -> subprocess.Popen[str]:
    """Start ranks that do the runs one after the other. See ``pretrain_runs.run`` for ``more``."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps({name: {"options": wanted, **more} for name, wanted in runs.items()}))
    return subprocess.Popen(
        torchrun(ranks, ROOT / "tests/pretrain_ranks.py", plan, folder),
        env={**os.environ, **THREADS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(what: Any, training: subprocess.Popen[str], why: str) -> None:
    begin = time.monotonic()
    while not what():
        if training.poll() is not None or time.monotonic() - begin > PATIENCE:
            training.kill()
            pytest.fail(f"{why}:\n{training.communicate()[0][-6000:]}")
        time.sleep(0.05)


def finish(folder: Path, name: str, said: str, ranks: int = RANKS) -> Run:
    """Return the results of a run of some ranks in the folder."""
    rows = [np.load(folder / f"{name}.{rank}.npy", allow_pickle=True).tolist() for rank in range(ranks)]
    losses = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
    return Run(rows, losses, said)


class Feed:
    """The input of a producer of shards: a watched folder to which files are added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "input"
        self.folder.mkdir(parents=True)

    def add(self, rows: range, *, last: bool = False) -> None:
        """Add files of ten chats each."""
        for first in rows[::10]:
            name = f"{first:05d}.jsonl"
            written = write_rows(self.folder / f"_{name}", [chat(i) for i in rows if first <= i < first + 10])
            written.rename(self.folder / name)
        if last:
            (self.folder / "_END").touch()


@contextmanager
def shard_producer(folder: Path, *more: object) -> Iterator[subprocess.Popen[str]]:
    """Run ``megatron-sft-idx produce`` on the files of a feed."""
    source = ["--watch", folder / "input", "--settle", 0.5, "--tokenizer-model", TOKENIZER, "--workers", 0]
    shards = ["--catalog", folder / "chunks", "--seq-length", LENGTH, "--tokens-per-shard", 100]
    command = [sys.executable, "-m", "megatron_sft_idx", "produce", *source, *shards, *more]
    process = subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, **THREADS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def chunk_run(folder: Path, row: Callable[[int], dict[str, Any]]) -> Iterator[tuple[Any, Callable[[], object]]]:
    """Run a producer of chunks that stops in the middle of a line. Yield it with a function that lets it continue."""
    folder.mkdir()
    go, rows = folder / "go", [row(i) for i in range(ROWS)]
    with producer(folder, rows, samples_per_chunk=LINES, stops={str(STOP_ROW): str(go)}, keep_recent=1) as process:
        yield process, go.touch


@contextmanager
def catalog_run(folder: Path) -> Iterator[tuple[Any, Callable[[], object]]]:
    """Run a producer of shards that waits for the second half of its input. Yield it with a function that adds that."""
    feed = Feed(folder)
    feed.add(range(CHATS // 2))
    with shard_producer(folder, "--keep-recent", 1) as process:
        yield process, lambda: feed.add(range(CHATS // 2, CHATS), last=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Train with four ranks on a catalog, then on raw chats, then on packs, while a producer writes each."""
    folder = tmp_path_factory.mktemp("live")
    wanted = {"catalog": options(folder / "catalog", *saves(folder / "catalog")), **chunk_runs(folder)}
    written: dict[str, str] = {}
    with ExitStack() as stack:
        producers = {
            "catalog": stack.enter_context(catalog_run(folder / "catalog")),
            "raw": stack.enter_context(chunk_run(folder / "raw", chat)),
            "packed": stack.enter_context(chunk_run(folder / "packed", pack)),
        }
        training = launch(folder, wanted)
        stack.callback(training.kill)
        for name, (at_work, go_on) in producers.items():
            data = folder / name / "chunks"
            wait_for(lambda: steps_of(folder / name) >= STEPS_BEFORE, training, f"{name}: no steps yet")  # noqa: B023
            # No rank had to wait for the producer: it is in the middle of its rows.
            assert at_work.poll() is None
            assert Catalog(data).end() is None
            if "--save" in wanted[name]:
                acks = data / "_acks"
                wait_for(lambda: len(list(acks.glob("*/*"))) == RANKS, training, "no acknowledgements")  # noqa: B023
            go_on()
            written[name] = at_work.communicate(timeout=PATIENCE)[0]
        said = training.communicate(timeout=PATIENCE)[0]
        assert training.returncode == 0, said[-6000:]
    return {name: finish(folder, name, said + written[name]) for name in wanted}


@pytest.fixture(scope="module")
def numbers() -> dict[str, Any]:
    """Return for each run a function that finds the number of a row in its tokens."""
    tokenizer = RowEncoder(EncodingOptions(str(TOKENIZER))).tokenizer

    def of_chat(tokens: np.ndarray) -> int:
        said = re.findall(r"row (\d+)", tokenizer.decode(tokens.tolist()))
        assert len(said) == 1
        return int(said[0])

    def of_pack(tokens: np.ndarray) -> list[int]:
        return [int(number) for number in re.findall(r"row (\d+)", tokenizer.decode(tokens.tolist()))]

    return {"catalog": of_pack, "raw": of_chat, "packed": lambda tokens: int(tokens[0])}


@pytest.mark.parametrize("name", ["raw", "packed"])
def test_every_row_is_trained_on_once(name: str, runs: dict[str, Run], numbers: dict[str, Any]) -> None:
    run = runs[name]
    found = [[numbers[name](tokens) for tokens in run.real(rank)] for rank in range(RANKS)]
    assert sorted(number for rank in found for number in rank) == list(range(ROWS))
    for rank in range(RANKS):
        # Chunk c belongs to rank c mod size, and only its own rows come; with window 0 in order.
        mine = [number for number in range(ROWS) if number // LINES % RANKS == rank]
        assert found[rank] == mine if name == "packed" else sorted(found[rank]) == mine


@pytest.mark.parametrize("name", ["raw", "packed"])
def test_all_ranks_take_the_same_steps(name: str, runs: dict[str, Run]) -> None:
    # The rank with most rows has four chunks of three; other ranks are padded with rows without loss.
    assert {len(rows) for rows in runs[name].rows} == {12}
    assert all(losses == runs[name].losses[0] for losses in runs[name].losses)
    assert len(runs[name].losses[0]) == 12


def test_every_sequence_of_a_catalog_is_trained_on_once(runs: dict[str, Run], numbers: dict[str, Any]) -> None:
    run = runs["catalog"]
    found = [number for rank in range(RANKS) for row in run.real(rank) for number in numbers["catalog"](row)]
    assert sorted(found) == list(range(CHATS))
    assert len({len(rows) for rows in run.rows}) == 1
    assert all(losses == run.losses[0] for losses in run.losses)


def test_disk_is_freed_behind_a_checkpoint(runs: dict[str, Run]) -> None:
    for name, freed in (
        ("catalog", r"made by this run, [1-9]\d* removed by it"),
        ("raw", "cleaned up chunk_00000.jsonl"),
    ):
        assert re.search(freed, runs[name].said), name
    assert "cleaned up" not in runs["packed"].said, "it saved no checkpoint, so nothing of it is durable"


def test_the_log_says_what_is_going_on(runs: dict[str, Run]) -> None:
    said = runs["raw"].said
    for line in (
        r"data-parallel rank 0 of 4: catalog .*/raw/chunks, window 1, shuffled, epoch 1 of 1, from row 0",
        r"rank 0: chunk 8 \(chunk_00008.jsonl\), 3 packs",
        r"rank \d waits 0 s for chunk \d+ \(chunk_\d{5}.jsonl\); ",
        r"rank 1: committed epoch 1, \d+ items, \d+ packs",
        r"chunk_00000.jsonl is completed",
        r"no chunk was added or has grown for 4 s, so the end is declared at 14 chunks",
        r"the data ended after step 12, before --train-iters 1000",
    ):
        assert re.search(line, said), line
    opened = re.findall(r"rank (\d): chunk (\d+) ", said)
    assert {int(number) % RANKS == int(rank) for rank, number in opened} == {True} or _only_padding(opened)


def _only_padding(opened: list[tuple[str, str]]) -> bool:
    """Return whether chunks were opened only for padding: ranks that are done pad with rows of another rank's chunk."""
    foreign = [(rank, number) for rank, number in opened if int(number) % RANKS != int(rank)]
    return len(set(foreign)) <= 2 * RANKS and all(int(number) >= 8 for _, number in foreign)
