"""The checks of ``make test-gpu`` on this machine: rehearsals without a GPU, and messages about the others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import checks
import pytest
import torch
from training_twin import lone_process

from megatron_sft_idx.training.batch import BatchAssembler

CPU = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    with lone_process():
        yield


@pytest.fixture
def setting(tmp_path: Path) -> checks.Setting:
    return checks.Setting(True, tmp_path)


@pytest.mark.slow
def test_without_a_gpu_it_says_what_it_skips() -> None:
    done = subprocess.run(
        [sys.executable, checks.__file__], env=CPU, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no GPU, 0 in all; torch ")
    lines = [re.split(" {2,}", line) for line in done.stdout.splitlines()[2:]]
    assert lines == [
        [check.name, "skipped", f"needs {check.gpus} GPU{'s' * (check.gpus > 1)}, found 0"] for check in checks.CHECKS
    ]


# Three ranks that import Megatron; and timed training, where any time is accepted.
SLOW = ("data parallel", "step time")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[pytest.mark.slow] * (check.name in SLOW), id=check.name)
        for check in checks.CHECKS
        if check.rehearsed
    ],
)
def test_what_a_cpu_can_run_of_a_check_holds(check: checks.Check, setting: checks.Setting) -> None:
    rows = list(check.run(setting))
    print(checks.table(rows))
    judged = [row for row in rows if row.good is not None]
    assert all(row.good for row in judged)
    # Times are only reported; everything else is compared.
    assert bool(judged) == (check.name != "step time")


def test_a_comparison_can_fail(
    setting: checks.Setting, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "LOSS", -1.0)
    rows = list(checks.attention(setting))
    assert [row.good for row in rows] == [False, True, None, True]
    monkeypatch.setattr(checks, "widen", lambda batch, pad_id, device: {**batch, "tokens": batch["tokens"] + 1})
    assert [row.good for row in checks.widening(setting)] == [False, False]
    assert "FAILS" in checks.table(rows)


def test_a_batch_that_is_written_over_is_noticed(setting: checks.Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.flip(0) if name == "tokens" else tensor for name, tensor in batch.items()}

    monkeypatch.setattr(checks, "on_device", torn)
    assert [row.good for row in checks.transfers(setting) if row.good is not None] == [False, False]


@pytest.mark.parametrize(
    ("name", "gpus", "engine", "why"),
    [
        ("attention", 1, False, "needs Transformer Engine"),
        ("attention", 1, True, None),
        ("widening", 1, False, None),
        ("data parallel", 1, True, "needs 2 GPUs, found 1"),
        ("context parallel", 2, False, "needs Transformer Engine"),
        ("context parallel", 2, True, None),
    ],
)
def test_what_is_missing_is_named(name: str, gpus: int, engine: bool, why: str | None) -> None:
    (check,) = [check for check in checks.CHECKS if check.name == name]
    found = checks.missing(check, gpus, engine, rehearse=False)
    assert found is None if why is None else found is not None and found.startswith(why)


def test_a_context_parallel_rank_alone_reads_its_part(setting: checks.Setting) -> None:
    """Run each of two ranks and one rank with whole rows, with ``thd`` instead of Transformer Engine."""
    source = setting.shard("context", rows=2, multiple=4)
    out = setting.folder / "out.json"
    command = [sys.executable, checks.__file__, "--context-rank", str(setting.folder / "context")]
    command += ["--length", str(setting.length), "--out", str(out), "--rehearse"]
    done = subprocess.run(command, env=CPU, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    batch = BatchAssembler(source, setting.length, sequence_multiple=4).assemble(range(2))
    loss, gradient = checks.learned(setting.model("thd"), batch, "thd")
    assert found["loss"] == pytest.approx(loss, rel=checks.LOSS)
    assert found["gradient norm"] == pytest.approx(float(gradient.norm()), rel=checks.GRADIENT)
