"""tools/pretrain_sft.py learns, learns the same from every form of the same packs, and goes on where it stopped."""

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
from chats import preprocess
from pretrain_runs import Curve, Rows, run
from training_twin import lone_process

from megatron_sft_idx.formats.npy import write_legacy
from megatron_sft_idx.shard import Shard

ROOT = Path(__file__).parent.parent
LENGTH, STEPS, BATCH, STOP = 544, 12, 4, 5
TOLERANCE = 2e-6
THREADS = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's chats, packed at ``chats``, tokenised at ``chats.unpacked``, in halves, and pickled."""
    folder = tmp_path_factory.mktemp("data")
    outcome = preprocess(folder / "chats", "--keep-corpus", capacity=LENGTH)
    assert outcome.code == 0, outcome.err
    write_legacy(folder / "chats.npy", Shard(folder / "chats"))
    outcome = preprocess(folder / "others", "--seed", 7, capacity=LENGTH)
    assert outcome.code == 0, outcome.err
    return folder


def options(data: Path, *more: object, steps: int = STEPS) -> list[str]:
    size = ["--hidden-size", 32, "--seq-length", LENGTH, "--log-interval", 1000]
    taken = ["--train-iters", steps, "--global-batch-size", BATCH]
    path = [] if "--data-path" in more else ["--data-path", data / "chats"]
    return [str(option) for option in (*path, *size, *taken, *more)]


def blend(data: Path, *more: object) -> list[str]:
    paths = ["--data-path", 0.7, data / "chats", 0.3, data / "others"]
    return options(data, *paths, "--data-cache-path", data / "cache", *more)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with lone_process() as module:
        yield module


def wanted_runs(data: Path, checkpoints: Path) -> dict[str, dict[str, Any]]:
    """What is run by one process and by two."""
    return {
        "shard": {"options": options(data)},
        "legacy": {"options": options(data), "rows": ["legacy", str(data / "chats.npy")]},
        "planned": {"options": options(data), "rows": ["planned", str(data / "chats.unpacked")]},
        "resumed": {"options": blend(data, "--load", checkpoints)},
    }


@pytest.fixture(scope="module")
def whole(script: ModuleType, data: Path) -> Curve:
    """A blend trained without a stop."""
    return run(script, blend(data))


@pytest.fixture(scope="module")
def checkpoints(script: ModuleType, data: Path) -> Path:
    """Where a run on the same blend left its checkpoints when it died two steps later."""
    folder = data / "checkpoints"
    dead = run(script, blend(data, "--save", folder, "--save-interval", STOP), kill_at=(STOP + 2) * BATCH)
    assert not dead.losses
    return folder


@pytest.fixture(scope="module")
def alone(script: ModuleType, data: Path, checkpoints: Path) -> dict[str, Curve]:
    """All runs, in this process."""
    return {name: run(script, **wanted) for name, wanted in wanted_runs(data, checkpoints).items()}


@pytest.fixture(scope="module")
def together(data: Path, checkpoints: Path) -> dict[str, Curve]:
    """All runs by two processes, each with every second row of the global batches."""
    plan = data / "plan.json"
    plan.write_text(json.dumps(wanted_runs(data, checkpoints)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launched = subprocess.run(
        [*torchrun, str(ROOT / "tests/pretrain_runs.py"), str(plan), str(data)],
        env={**os.environ, **THREADS},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr[-4000:]
    curves = {}
    for name in wanted_runs(data, checkpoints):
        losses = [json.loads((data / f"{name}.{rank}.json").read_text()) for rank in range(2)]
        assert losses[0] == losses[1]
        parts = [np.load(data / f"{name}.{rank}.npy", allow_pickle=True).tolist() for rank in range(2)]
        curves[name] = Curve(losses[0], [row for pair in zip(*parts, strict=True) for row in pair])
    return curves


def assert_bitwise(found: Rows, expected: Rows) -> None:
    assert len(found) == len(expected) > 0
    for row, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            assert got[key].dtype == value.dtype
            assert np.array_equal(got[key], value), f"row {row}: {key}"


def difference(found: list[float], expected: list[float]) -> float:
    """Largest relative difference of a loss."""
    assert len(found) == len(expected)
    return max(abs(got - wanted) / wanted for got, wanted in zip(found, expected, strict=True))


@pytest.mark.parametrize("processes", ["alone", "together"])
def test_loss_curves_are_the_same_from_every_form_of_the_data(
    processes: str, alone: dict[str, Curve], request: pytest.FixtureRequest
) -> None:
    curves: dict[str, Curve] = request.getfixturevalue(processes)
    expected = alone["shard"]
    assert len(expected.losses) == STEPS
    for name in ("shard", "legacy", "planned"):
        print(f"{processes}, {name}: {difference(curves[name].losses, expected.losses):.1e}")
        assert difference(curves[name].losses, expected.losses) <= TOLERANCE
        assert_bitwise(curves[name].rows, expected.rows)
    # The losses are worth comparing: every step's is another one, and they fall.
    assert len(set(expected.losses)) == STEPS
    assert np.mean(expected.losses[-3:]) < np.mean(expected.losses[:3])


def test_other_rows_give_another_curve(script: ModuleType, data: Path, alone: dict[str, Curve]) -> None:
    other = run(script, options(data, "--data-path", data / "others"))
    assert difference(other.losses, alone["shard"].losses) > 1000 * TOLERANCE


@pytest.mark.parametrize("processes", ["alone", "together"])
def test_a_stopped_run_goes_on_with_the_same_batches(
    processes: str, whole: Curve, request: pytest.FixtureRequest
) -> None:
    resumed: Curve = request.getfixturevalue(processes)["resumed"]
    assert_bitwise(resumed.rows, whole.rows[STOP * BATCH :])
    print(f"{processes}, resumed: {difference(resumed.losses, whole.losses[STOP:]):.1e}")
    assert difference(resumed.losses, whole.losses[STOP:]) <= TOLERANCE


@pytest.mark.slow
def test_the_script_learns_the_demo_data(data: Path) -> None:
    log = data / "log.jsonl"
    started = subprocess.run(
        [sys.executable, str(ROOT / "tools/pretrain_sft.py"), *options(data, "--log", log, "--lr", 3e-3, steps=50)],
        env={**os.environ, **THREADS},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert started.returncode == 0, started.stderr[-4000:]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert [line["step"] for line in lines] == list(range(1, 51))
    # The demo's tokenizer has 2,000 tokens.
    assert losses[0] == pytest.approx(np.log(2048), rel=0.02)
    print(f"from {losses[0]:.3f} to {np.mean(losses[-5:]):.3f}")
    assert np.mean(losses[-5:]) < 0.8 * losses[0]
