"""tools/pretrain_sft.py trains, has equal losses for every form of the same packs, and resumes where it stopped."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from chats import preprocess
from gpt_model import model_inputs, seed_everything
from pretrain_runs import Curve, Rows, run
from torch.distributed.run import get_args_parser as torchrun_parser
from torchruns import torchrun
from training_twin import batch_of, lone_process, random_sequences

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.shard import Shard

ROOT = Path(__file__).parents[2]
LENGTH, STEPS, BATCH, STOP = 544, 12, 4, 5
TOLERANCE = 2e-6
LATEST = "latest_checkpointed_iteration.txt"
THREADS = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the demo's chats, packed at ``chats``, tokenised at ``chats.unpacked``, in halves, and pickled."""
    folder = tmp_path_factory.mktemp("data")
    outcome = preprocess(folder / "chats", "--keep-corpus", capacity=LENGTH)
    assert outcome.code == 0, outcome.err
    without_columns = ConvertOptions(reader={"columns": ()})
    convert(str(folder / "chats"), str(folder / "chats.npy"), "npy", without_columns)
    outcome = preprocess(folder / "others", "--seed", 7, capacity=LENGTH)
    assert outcome.code == 0, outcome.err
    return folder


def options(data: Path, *more: object, steps: int = STEPS) -> list[str]:
    size = ["--hidden-size", 32, "--seq-length", LENGTH, "--log-interval", 1000]
    taken = ["--train-iters", steps, "--global-batch-size", BATCH]
    path = [] if {"--data-path", "--train-data-path"} & {*more} else ["--data-path", data / "chats"]
    return [str(option) for option in (*path, *size, *taken, *more)]


def blend(data: Path, *more: object) -> list[str]:
    paths = ["--data-path", 0.7, data / "chats", 0.3, data / "others"]
    return options(data, *paths, "--data-cache-path", data / "cache", *more)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with lone_process() as module:
        yield module


def wanted_runs(data: Path, checkpoints: Path, processes: str) -> dict[str, dict[str, Any]]:
    """Return the runs for one process or two; the metrics of ``resumed`` have the name of the processes."""
    return {
        "shard": {"options": options(data)},
        "legacy": {"options": options(data), "rows": ["legacy", str(data / "chats.npy")]},
        "planned": {"options": options(data), "rows": ["planned", str(data / "chats.unpacked")]},
        "resumed": {"options": blend(data, "--load", checkpoints, "--metrics", data / f"{processes}.jsonl")},
    }


@pytest.fixture(scope="module")
def whole(script: ModuleType, data: Path) -> Curve:
    """Return the curve of an uninterrupted run on a blend."""
    return run(script, blend(data))


@pytest.fixture(scope="module")
def checkpoints(script: ModuleType, data: Path) -> Path:
    """Return the checkpoints of a run on the same blend that died two steps after the last one."""
    folder = data / "checkpoints"
    dead = run(script, blend(data, "--save", folder, "--save-interval", STOP), kill_at=(STOP + 2) * BATCH)
    assert not dead.losses
    return folder


@pytest.fixture(scope="module")
def alone(script: ModuleType, data: Path, checkpoints: Path) -> dict[str, Curve]:
    """Return the curves of all runs, in this process."""
    return {name: run(script, **wanted) for name, wanted in wanted_runs(data, checkpoints, "alone").items()}


@pytest.fixture(scope="module")
def together(data: Path, checkpoints: Path) -> dict[str, Curve]:
    """Return the curves of all runs by two processes, each with every second row of the global batches."""
    plan = data / "plan.json"
    plan.write_text(json.dumps(wanted := wanted_runs(data, checkpoints, "together")))
    launched = subprocess.run(
        torchrun(2, ROOT / "tests/pretrain_runs.py", plan, data),
        env={**os.environ, **THREADS},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr[-4000:]
    curves = {}
    for name in wanted:
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


def assert_packs(metrics: Path, steps: dict[int, Rows]) -> None:
    """Check that the packs in metrics have the tokens of the rows of each step."""
    found = {line["step"]: line["packs"] for line in map(json.loads, metrics.read_text().splitlines())}
    assert found.keys() == steps.keys()
    for step, rows in steps.items():
        shards = [(Shard(prefix), numbers) for prefix, numbers in found[step].items()]
        packs = [(shard[number]["input_ids"], shard.header.pad_id) for shard, numbers in shards for number in numbers]
        tokens = {tuple(np.pad(ids, (0, LENGTH - len(ids)), constant_values=pad)) for ids, pad in packs}
        assert tokens == {tuple(row["tokens"]) for row in rows}, step


def difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of a loss."""
    assert len(found) == len(expected)
    return max(abs(got - wanted) / wanted for got, wanted in zip(found, expected, strict=True))


@pytest.mark.parametrize("processes", ["alone", pytest.param("together", marks=pytest.mark.slow)])
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
    # The comparison is meaningful: all losses differ, and they fall.
    assert len(set(expected.losses)) == STEPS
    assert np.mean(expected.losses[-3:]) < np.mean(expected.losses[:3])


def test_other_rows_give_another_curve(script: ModuleType, data: Path, alone: dict[str, Curve]) -> None:
    other = run(script, options(data, "--data-path", data / "others"))
    assert difference(other.losses, alone["shard"].losses) > 1000 * TOLERANCE


@pytest.mark.parametrize("processes", ["alone", pytest.param("together", marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_with_the_same_batches(
    processes: str, whole: Curve, data: Path, request: pytest.FixtureRequest
) -> None:
    resumed: Curve = request.getfixturevalue(processes)["resumed"]
    assert_bitwise(resumed.rows, whole.rows[STOP * BATCH :])
    print(f"{processes}, resumed: {difference(resumed.losses, whole.losses[STOP:]):.1e}")
    assert difference(resumed.losses, whole.losses[STOP:]) <= TOLERANCE
    steps = {step + 1: whole.rows[step * BATCH : (step + 1) * BATCH] for step in range(STOP, STEPS)}
    assert_packs(data / f"{processes}.jsonl", steps)


@pytest.mark.skipif(
    find_spec("megatron.core.dist_checkpointing.gpt_checkpoint_interop") is None,
    reason="this megatron-core does not load GPTModel into HybridModel: that needs 0.19, for Python 3.12 on",
)
def test_a_checkpoint_of_gpt_model_goes_on_as_hybrid_model(
    script: ModuleType, data: Path, tmp_path: Path, whole: Curve, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script.HYBRID
    with monkeypatch.context() as patched:
        patched.setattr(script, "HYBRID", False)
        begun = run(script, blend(data, "--save", tmp_path, "--train-iters", STOP))
        assert difference(begun.losses, whole.losses[:STOP]) <= TOLERANCE
    resumed = run(script, blend(data, "--load", tmp_path))
    assert difference(resumed.losses, whole.losses[STOP:]) <= TOLERANCE
    # The optimizer's state was loaded too: with only the weights, the curve differs.
    tuned = run(script, blend(data, "--load", tmp_path, "--finetune"))
    assert difference(tuned.losses[:1], begun.losses[:1]) > 1000 * TOLERANCE


@pytest.mark.skipif(find_spec("megatron.core.models.hybrid") is None, reason="no HybridModel: it is there from 0.18 on")
def test_a_checkpoint_of_hybrid_model_is_refused_where_there_is_none(
    script: ModuleType, data: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "HYBRID", False)
    with pytest.raises(FormatError, match=r"iter_0000005: contains a HybridModel, .* 0.18 or later; use"):
        run(script, blend(data, "--load", checkpoints))


def test_validation_on_another_shard(
    script: ModuleType,
    data: Path,
    alone: dict[str, Curve],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read, load_batches = [], script.load_batches

    def spy(args: Any, dataset: Any, consumed: int) -> Any:
        read.extend(prefix for source in script.sources_of(dataset) for prefix in source.shards.prefixes)
        return load_batches(args, dataset, consumed)

    monkeypatch.setattr(script, "load_batches", spy)
    both = ["--train-data-path", data / "chats", "--valid-data-path", data / "others", "--eval-iters", 2]
    curve = run(script, options(data, *both, "--loss-by-source", "--save", tmp_path))
    assert read == [str(data / "chats"), str(data / "others")]
    assert re.search(r"^validation  loss \d", capsys.readouterr().out, re.MULTILINE)
    # The training is that of --data-path without a split, which can also resume from this checkpoint.
    assert curve.losses == alone["shard"].losses
    assert len(run(script, options(data, "--save", tmp_path, steps=STEPS + 1)).losses) == 1


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        ("", "give either --data-path, or --train-data-path for training and --valid-data-path for validation"),
        ("--data-path a --train-data-path b", "give either --data-path, or --train-data-path"),
        ("--valid-data-path b --eval-iters 1", "give either --data-path, or --train-data-path"),
        ("--data-path a --valid-data-path b --eval-iters 1", "--valid-data-path is for --train-data-path"),
        ("--train-data-path a --split 9,1,0", "--split 9,1,0 applies to --data-path, but --train-data-path is also"),
        ("--train-data-path a --valid-data-path b", "--valid-data-path is only read with --eval-iters"),
        ("--train-data-path a --eval-iters 2", "--eval-iters 2: there is no validation data; give --valid-data-path"),
    ],
)
def test_paths_that_contradict_each_other(
    paths: str, why: str, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.parse_arguments(["--seq-length", "64", *paths.split()])
    assert why in capsys.readouterr().err


def test_another_batch_size_leaves_no_sample_out_and_takes_none_twice(
    script: ModuleType, data: Path, tmp_path: Path, whole: Curve
) -> None:
    """This happens if a new number of processes cannot divide the old batch size."""
    seen: Rows = []
    metrics = tmp_path / "metrics.jsonl"
    for steps, batch in ((2, 4), (3, 6), (5, 3)):
        more = ["--save", tmp_path, "--metrics", metrics, "--global-batch-size", batch, "--train-iters", steps]
        seen += run(script, blend(data, *more)).rows
    assert_bitwise(seen, whole.rows[: 2 * 4 + 6 + 2 * 3])
    ends = [0, 4, 8, 14, 17, 20]
    assert_packs(metrics, {step: seen[begin:end] for step, (begin, end) in enumerate(pairwise(ends), 1)})


def test_the_same_command_goes_on_by_itself(
    script: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = options(data, "--save", tmp_path, "--save-interval", 2, steps=4)
    assert not run(script, same, kill_at=3 * BATCH).losses
    assert len(run(script, same).losses) == 2
    said = capsys.readouterr().out
    assert f"saved {tmp_path}/iter_0000002\n" in said
    assert f"resuming from {tmp_path}/iter_0000002, after 2 steps\n" in said
    assert not run(script, same).losses
    assert "nothing to train: --train-iters 4" in capsys.readouterr().out
    assert script.parse_arguments([*same, "--load", str(tmp_path)]).load == tmp_path
    assert capsys.readouterr().out == ""
    # The checkpoint in --load is later than the one in --save.
    other = options(data, "--save", tmp_path / "other", steps=2)
    assert len(run(script, other).losses) == 2
    later = options(data, "--save", tmp_path / "other", "--load", tmp_path, steps=5)
    capsys.readouterr()
    assert len(run(script, later).losses) == 1
    said = capsys.readouterr().out
    assert f"--save {tmp_path}/other is at step 2, --load {tmp_path} at step 4: resuming from --load\n" in said
    assert f"resuming from {tmp_path}/iter_0000004, after 4 steps\n" in said
    assert script.whole_steps(tmp_path / "other") == [2, 5]
    # Now the one in --save is later.
    assert not run(script, later).losses
    assert f"--load {tmp_path} at step 4: resuming from --save\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("save", "load", "whole", "taken"),
    [
        (None, 4, [], "load"),
        (None, 4, [4], "save"),
        (None, 4, [3], "load"),
        (3, 4, [2, 3, 4], "load"),
        (4, 4, [4], "save"),
        (5, 4, [5, 9], "save"),
        (10, 9, [10], "save"),
        (3, 4, [3, 6, 10], "4 would overwrite the checkpoint of step 6 in --save save; .* write 10 to"),
        (None, 4, [5], "save"),
    ],
)
def test_the_later_checkpoint_is_continued_and_none_overwritten(
    save: int | None,
    load: int,
    whole: list[int],
    taken: str,
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, latest in (("save", save), ("load", load)):
        Path(folder).mkdir()
        if latest is not None:
            Path(folder, LATEST).write_text(str(latest))
    for step in whole:
        Path(f"save/iter_{step:07d}").mkdir()
        Path(f"save/iter_{step:07d}/metadata.json").touch()
    Path("save/unfinished").mkdir()  # as left by a kill during writing
    held = save if save is not None or not whole else whole[-1]
    command = ["--data-path", "x", "--seq-length", "64", "--save", "save", "--load", "load"]
    if taken in ("save", "load"):
        assert script.parse_arguments(command).load == Path(taken)
        said = f"--save save is at step {held}, --load load at step {load}: resuming from --{taken}\n"
        assert capsys.readouterr().out == (said if held is not None else "")
        return
    with pytest.raises(SystemExit) as leaving:
        script.parse_arguments(command)
    assert leaving.value.code == 2
    assert re.search(f"error: --load load: resuming from step {taken}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--log", "x"], "--log is now --metrics"),
        (["--load", "nowhere"], "--load nowhere: no checkpoint found"),
        (["--save", "file"], "--save file: expected a folder or nothing, found a file"),
        (
            ["--save", "begun", "--fresh"],
            "--fresh: begun contains the checkpoint of step 7, which new ones would overwrite",
        ),
        (["--save", "odd"], "latest_checkpointed_iteration.txt: expected the number of the latest checkpoint"),
        (["--save", "new", "--load", "odd"], "expected the number of the latest checkpoint"),
    ],
)
def test_checkpoints_are_looked_for_at_the_start(
    more: list[str],
    why: str,
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for folder, content in (("begun", "7"), ("odd", "release")):
        Path(folder).mkdir()
        Path(folder, LATEST).write_text(content)
    with pytest.raises(SystemExit) as leaving:
        script.parse_arguments(["--data-path", "x", "--seq-length", "64", *more])
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_a_checkpoint_that_is_named_and_not_there(script: ModuleType, data: Path, tmp_path: Path) -> None:
    (tmp_path / LATEST).write_text("7")
    with pytest.raises(FormatError, match=r"iter_0000007: missing, but latest_checkpointed_iteration.txt refers to it"):
        run(script, options(data, "--save", tmp_path))


def test_the_help_shows_defaults(script: ModuleType) -> None:
    for action in script.build_parser()._actions:
        assert action.help, action.option_strings
        shown = action.help == argparse.SUPPRESS or "default" in action.help
        assert shown or action.default in (None, False, True, (), argparse.SUPPRESS), action.option_strings


def test_no_option_is_one_of_torchruns(script: ModuleType) -> None:
    """torchrun's parser also reads the script's options, and rejects prefixes of two torchrun options."""
    for option in script.build_parser()._option_string_actions:
        if option not in ("-h", "--help", "--log"):
            assert torchrun_parser().parse_args(["script.py", option, "1"]).training_script_args == [option, "1"]


@pytest.mark.parametrize(
    ("more", "code", "line"),
    [
        pytest.param(["--data-path", "nowhere"], 1, r"pretrain_sft.py: error: nowhere.*", marks=pytest.mark.slow),
        pytest.param(
            ["--vocab-size", "128"],
            1,
            r"pretrain_sft.py: error: --vocab-size 128: the data's tokenizer has 2000 tokens.*",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--global-batch-size", "3"],
            1,
            r"pretrain_sft.py: error: global batch size 3 is not a multiple .*; use a multiple.*",
            marks=pytest.mark.slow,
        ),
        (["--split", "abc"], 1, r"pretrain_sft.py: error: split 'abc': expected shares of all packs, such as 98,1,1"),
        pytest.param(
            ["--num-attention-heads", "7"],
            2,
            r"pretrain_sft.py: error: --hidden-size \d+ is not a multiple of --num-.*",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--micro-batch-size", "0"],
            2,
            r"pretrain_sft.py: error: .*'0': expected a whole number from 1 .*",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--load", "nowhere"],
            2,
            r"pretrain_sft.py: error: --load nowhere: no checkpoint found.*",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_errors_are_one_line(more: list[str], code: int, line: str, data: Path) -> None:
    ranks = 2 if more[0] in ("--data-path", "--global-batch-size") else 1
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, str(ROOT / "tools/pretrain_sft.py"), *options(data, *more)],
        env={**os.environ, **THREADS},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr
    errors = [said for said in done.stderr.splitlines() if said.startswith("pretrain_sft.py: error:")]
    assert len(errors) == 1
    assert re.fullmatch(line, errors[0])
    assert "[rank" not in done.stderr
    if ranks == 1:
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("first", ["nowhere: no shard here", "Connection closed by peer"])
def test_a_process_that_is_left_alone_says_so_only_where_no_other_has_spoken(first, script, monkeypatch, capsys):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(script, "_get_default_store", lambda: store)
    kinds = [RuntimeError if "closed" in first else FormatError, RuntimeError, RuntimeError]
    for kind, message in zip(kinds, [first, "Connection closed by peer", "Connection reset by peer"], strict=True):
        with pytest.raises(SystemExit, match="1"), script.one_line_errors():
            raise kind(message)
    said = capsys.readouterr().err.splitlines()
    alone = "another process has failed; see its message"
    assert said == [f"pretrain_sft.py: error: {alone if 'closed' in first else first}"]


@pytest.mark.parametrize("weight", [1.0, 0.3, 2.5])
def test_weights_are_divided_by_as_megatron_does(weight: float, script: ModuleType, data: Path) -> None:
    """The divisor is the sum of each micro-batch's weights, rounded down to an integer, over all micro-batches."""
    args = script.parse_arguments([*options(data, "--vocab-size", "256"), "--micro-batch-size", "2"])
    seed_everything(args.seed)
    model = script.build_model(args)
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(args.global_batch_size // 2):
        rows = [random_sequences(rng, lengths, 256) for lengths in ([300, 200], [544])]
        batches.append(batch_of([[(ids, mask * weight) for ids, mask in row] for row in rows], LENGTH, 5))
    model.zero_grad_buffer()
    loss = script.run_step(args, model, iter(batches))
    found = {name: value.main_grad.clone() for name, value in model.module.named_parameters()}
    total, tokens, trained = torch.zeros(()), 0, 0
    for batch in batches:
        inputs, loss_mask = model_inputs(batch, args.attention)
        total = total + (model.module(**inputs).float() * loss_mask).sum()
        tokens, trained = tokens + int(loss_mask.sum()), trained + int((loss_mask != 0).sum())
    assert loss == pytest.approx(float(total / tokens), rel=1e-6)
    parameters = dict(model.module.named_parameters())
    for name, gradient in zip(parameters, torch.autograd.grad(total / tokens, list(parameters.values())), strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)
    # With weights other than 1, the divisor differs from the number of trained tokens.
    assert (tokens == trained) == (weight == 1.0)


@pytest.mark.slow
def test_the_script_learns_the_demo_data(data: Path) -> None:
    log = data / "log.jsonl"
    started = subprocess.run(
        [sys.executable, str(ROOT / "tools/pretrain_sft.py"), *options(data, "--metrics", log, "--lr", 3e-3, steps=50)],
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
