"""examples/megatron_lm.sh through Megatron's own ``pretrain()``, with a tiny model on the CPU."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chats import CHATS, TOKENIZER, command
from megatron_setups import FLAGS, TINY, found_by, launch

from megatron_sft_idx import pretrain

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTH, STEPS = 544, 12
# Instead of GPUs and the model of the example.
SMALL = (
    *("--num-layers", "2", "--num-query-groups", "2", "--kv-channels", "8", "--seq-length", LENGTH),
    *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", TOKENIZER),
    *("--tensor-model-parallel-size", "1", "--global-batch-size", "4", "--train-iters", STEPS, "--lr", "1e-3"),
    *("--lr-warmup-iters", "0", "--eval-interval", "6", "--eval-iters", "2", "--save-interval", "6"),
)
FOR_GPUS = ("--bf16", "--use-distributed-optimizer")


def arguments_of_torchrun(folder: Path, *more: object, **names: str) -> list[str]:
    """The arguments of torchrun in the script; a program that prints them replaces it."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/torchrun").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (folder / "bin/torchrun").chmod(0o755)
    environment = {**os.environ, "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]), **names}
    script = ["bash", str(EXAMPLES / "megatron_lm.sh"), *map(str, more)]
    run = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_the_script_starts_the_runner_with_its_arguments(tmp_path: Path) -> None:
    words = arguments_of_torchrun(tmp_path, "--lr", "2e-5", MEGATRON_LM="Megatron-LM", BASE="base", GPUS="2")
    assert words[:4] == ["--nproc-per-node", "2", "-m", "megatron_sft_idx.pretrain"]
    script, options, rest = pretrain.divide(pretrain.build_parser(), words[4:])
    assert (script, options, rest[-2:]) == ("Megatron-LM/pretrain_gpt.py", {}, ["--lr", "2e-5"])
    assert set(FLAGS) <= set(rest)
    assert "seq-length: " + rest[rest.index("--seq-length") + 1] in (EXAMPLES / "sft_qwen3.yaml").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards of examples/sft_qwen3.yaml, from the bundled chats."""
    if find_spec("megatron.training") is None:
        pytest.skip("no megatron.training: it is in the wheel of megatron-core from 0.19 on, for Python 3.12 on")
    folder = tmp_path_factory.mktemp("example")
    given = ["--input", CHATS, "--tokenizer", TOKENIZER, "--seq-length", LENGTH, "--valid-fraction", 0.1]
    made = command(
        *("preprocess", "--config", EXAMPLES / "sft_qwen3.yaml", *given, "--earlier-reasoning", "drop"),
        *("--output-prefix", folder / "data/sft", "--workers", 0),
    )
    assert made.code == 0, made.err
    return folder


def test_megatron_trains_evaluates_and_saves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = TINY[: TINY.index("--split")]  # the example gives paths for training and validation
    script = arguments_of_torchrun(folder, *cpu, *SMALL, MEGATRON_LM="Megatron-LM", BASE="base")[5:]
    argv = [word for word in script if word not in FOR_GPUS]
    assert len(argv) == len(script) - len(FOR_GPUS)
    given = argv.index("--pretrained-checkpoint")
    first = [*argv[:given], *argv[given + 2 :], "--train-iters", "1", "--save", "base", "--load", "base"]
    monkeypatch.chdir(folder)
    found = run(folder, {"base": first, "example": argv})
    base, example = found["base"], found["example"]
    assert base["error"] is example["error"] is None
    assert len(base["losses"]) == 1
    assert len(example["losses"]) == STEPS
    assert example["losses"][-1] < example["losses"][0] - 0.1
    assert example["validation"][-1] < example["validation"][0] - 0.1
    assert (folder / "checkpoints/sft/latest_checkpointed_iteration.txt").read_text() == str(STEPS)


def run(folder: Path, jobs: dict[str, list[str]]) -> dict[str, Any]:
    """The outcome of each run, by name; all runs share a process."""
    said = launch(folder, "megatron_pretrain.py", {n: {"argv": argv, "runner": True} for n, argv in jobs.items()}, 1)
    assert all((folder / f"{name}.0.json").exists() for name in jobs), said[-4000:]
    return {name: found_by(folder, name, 1) for name in jobs}
