"""tools/pretrain_sft.py on a blend with pretraining data: resume, two processes, evaluation, losses by source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from chats import ROOT, preprocess
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from pretrain_runs import Curve, Rows, run
from test_pretrain_script import THREADS, TOLERANCE, assert_bitwise, difference
from training_twin import lone_process

from megatron_sft_idx.errors import FormatError

LENGTH, STEPS, BATCH, STOP = 544, 8, 4, 3
VOCABULARY = 2048


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the demo's chats, and documents of random tokens that are rare in the chats."""
    folder = tmp_path_factory.mktemp("data")
    outcome = preprocess(folder / "chats", capacity=LENGTH)
    assert outcome.code == 0, outcome.err
    write_web(folder / "web", 40)
    return folder


def write_web(prefix: Path, documents: int) -> None:
    rng = np.random.default_rng(documents)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in rng.integers(1, 2000, documents):
        builder.add_item(torch.from_numpy(rng.integers(1500, 1900, length)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with lone_process() as module:
        yield module


def options(data: Path, *more: object, steps: int = STEPS) -> list[str]:
    paths = [0.6, data / "chats", 0.4, f"pretrain:{data}/web"] if "--data-path" not in more else []
    given = ["--data-path", *paths] if paths else []
    given += ["--data-cache-path", data / "cache", "--hidden-size", 32, "--seq-length", LENGTH]
    given += ["--train-iters", steps, "--global-batch-size", BATCH, "--log-interval", 1000]
    return [str(option) for option in (*given, *more)]


@pytest.fixture(scope="module")
def whole(script: ModuleType, data: Path) -> Curve:
    return run(script, options(data))


def is_text(row: dict[str, Any]) -> bool:
    return bool((row["tokens"] >= 1500).all())


def test_a_stopped_run_goes_on_with_the_same_batches(
    script: ModuleType, data: Path, tmp_path: Path, whole: Curve
) -> None:
    assert 8 < sum(map(is_text, whole.rows)) < 20
    assert not run(
        script, options(data, "--save", tmp_path, "--save-interval", STOP), kill_at=(STOP + 1) * BATCH
    ).losses
    resumed = run(script, options(data, "--load", tmp_path))
    assert_bitwise(resumed.rows, whole.rows[STOP * BATCH :])
    assert difference(resumed.losses, whole.losses[STOP:]) <= TOLERANCE


# In make test, test_training_distributed reads such a blend with two processes.
@pytest.mark.slow
def test_two_processes_train_on_the_same(data: Path, tmp_path: Path, whole: Curve) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"mixed": {"options": options(data, "--micro-batch-size", 2)}}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(ROOT / "tests/pretrain_runs.py"), str(plan), str(tmp_path)]
    launched = subprocess.run(
        command, env={**os.environ, **THREADS}, capture_output=True, text=True, timeout=300, check=False
    )
    assert launched.returncode == 0, launched.stderr[-4000:]
    losses = [json.loads((tmp_path / f"mixed.{rank}.json").read_text()) for rank in range(2)]
    assert losses[0] == losses[1]
    assert difference(losses[0], whole.losses) <= TOLERANCE
    parts = [np.load(tmp_path / f"mixed.{rank}.npy", allow_pickle=True).tolist() for rank in range(2)]
    # The ranks take turns, with micro-batches of two rows.
    rows: Rows = [row for i in range(0, len(parts[0]), 2) for part in parts for row in part[i : i + 2]]
    assert_bitwise(rows, whole.rows)


def test_losses_by_source_and_evaluation(
    script: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    more = ["--loss-by-source", "--metrics", metrics, "--eval-iters", 2, "--split", "90,10,0"]
    run(script, options(data, *more, steps=3))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [sum(map(len, line["packs"].values())) for line in lines] == [BATCH] * 3
    assert {path for line in lines for path in line["packs"]} == {str(data / "chats"), f"pretrain:{data}/web"}
    names = {name for line in lines for name in line if name.startswith("loss of ")}
    assert "loss of pretrain:web" in names
    assert len(names) == 2
    # For unseen, uniform tokens the loss is about the log of the vocabulary.
    assert lines[0]["loss of pretrain:web"] == pytest.approx(np.log(VOCABULARY), rel=0.05)
    assert "validation  loss" in capsys.readouterr().out


def test_another_corpus_or_order_is_no_continuation(script: ModuleType, data: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    assert len(run(script, options(data, "--save", save, steps=2)).losses) == 2
    with pytest.raises(FormatError, match=r"pretraining data in another order.*--train-iters"):
        run(script, options(data, "--save", save, steps=400))
    with pytest.raises(FormatError, match=f"had --seq-length {LENGTH}, this one has --seq-length 640"):
        run(script, options(data, "--save", save, "--seq-length", 640, steps=3))
    write_web(tmp_path / "web", 41)
    paths = ["--data-path", 0.6, data / "chats", 0.4, f"pretrain:{tmp_path}/web"]
    with pytest.raises(FormatError, match="other shards or weights"):
        run(script, options(data, *paths, "--save", save, steps=3))


def test_tokens_outside_the_vocabulary_are_refused(script: ModuleType, data: Path, tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/web.bin", dtype=np.int32)
    builder.add_item(torch.full((3000,), VOCABULARY))
    builder.end_document()
    builder.finalize(f"{tmp_path}/web.idx")
    paths = ["--data-path", 0.6, data / "chats", 0.4, f"pretrain:{tmp_path}/web"]
    with pytest.raises(FormatError, match=f"has token {VOCABULARY}, which is not in the model's vocabulary"):
        run(script, options(data, *paths))


def test_so_are_those_of_validation_data(script: ModuleType, data: Path, tmp_path: Path) -> None:
    """The first documents, used as training data, are like all others."""
    builder = IndexedDatasetBuilder(f"{tmp_path}/web.bin", dtype=np.int32)
    for number in range(100):
        builder.add_item(torch.full((600,), VOCABULARY if number >= 90 else 5))
        builder.end_document()
    builder.finalize(f"{tmp_path}/web.idx")
    paths = ["--data-path", 0.6, data / "chats", 0.4, f"pretrain:{tmp_path}/web"]
    with pytest.raises(FormatError, match=f"has token {VOCABULARY}"):
        run(script, options(data, *paths, "--split", "90,10,0", "--eval-iters", 2, steps=2))
