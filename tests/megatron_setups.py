"""Set-ups in which Megatron-LM's own ``pretrain()`` trains on our provider, and how far their losses lie apart.

``python tests/megatron_setups.py`` prints the table, for the Megatron that is installed or, where MEGATRON_LM names a
checkout, for that one and its ``pretrain_gpt.py``; names of set-ups after it run no others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from chats import preprocess

from megatron_sft_idx.shard import Shard, ShardWriter

ROOT = Path(__file__).parents[1]
LENGTH, STEPS, SAVED, KILLED, VOCABULARY = 544, 20, 10, 13, 2048
# Compiling what Megatron fuses takes longer than the runs.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}

# A model of two layers, made and trained on the CPU; what follows are the arguments of a real run.
TINY = f"""
--num-layers 2 --hidden-size 32 --ffn-hidden-size 128 --num-attention-heads 4 --max-position-embeddings {LENGTH}
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --use-cpu-initialization
--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-rope-fusion
--no-persist-layer-norm --transformer-impl local --hidden-dropout 0 --attention-dropout 0 --distributed-backend gloo
--inference-rng-tracker --no-save-rng --no-load-rng --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}
--seq-length {LENGTH} --micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --num-workers 0
--lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0 --log-interval 1
--eval-iters 0 --eval-interval 1000 --split 1,0,0
""".split()
FLAGS = ("--sft", "--no-create-attention-mask-in-dataloader", "--calculate-per-token-loss")
CHATS = ("--data-path", "{}/chats")
PADDED = ("--data-path", "{}/padded")
WEIGHED = ("--data-path", "{}/weighed")
EVALUATED = ("--split", "90,10,0", "--eval-iters", "2", "--eval-interval", "10")
BLEND = ("--data-path", "0.7", "{}/chats", "0.3", "{}/others", *EVALUATED)


@dataclass(frozen=True)
class Setup:
    """A run of Megatron and the one whose losses it should have.

    Attributes:
        options: beyond ``TINY`` and ``FLAGS``; the folder with the shards takes the place of ``{}``.
        like: name of the set-up to compare with; None where that is ``tools/pretrain_sft.py``, on the same data.
        ranks: processes.
        flags: those of ``FLAGS`` that are given.
        more: fields of ``Job``.
        round: set-ups of a later round need what those before left.
    """

    options: tuple[str, ...] = CHATS
    like: str | None = "one process"
    ranks: int = 1
    flags: tuple[str, ...] = FLAGS
    more: dict[str, Any] = field(default_factory=dict)
    round: int = 0


SETUPS = {
    "one process": Setup(like=None, more={"alone": "{}/chats"}),
    "micro-batch 2": Setup((*CHATS, "--micro-batch-size", "2"), more={"alone": "{}/chats"}),
    "runner": Setup(more={"runner": True}),
    "runner, DP 2": Setup(ranks=2, more={"runner": True}),
    "DP 2": Setup(ranks=2),
    "DP 2, micro-batch 2": Setup((*CHATS, "--micro-batch-size", "2"), ranks=2),
    "TP 2": Setup((*CHATS, "--tensor-model-parallel-size", "2"), ranks=2),
    "padded to 4": Setup(PADDED, like=None),
    "CP 2": Setup((*PADDED, "--context-parallel-size", "2"), "padded to 4", 2),
    "CP 2, micro-batch 2": Setup(
        (*PADDED, "--context-parallel-size", "2", "--micro-batch-size", "2"), "padded to 4", 2
    ),
    "weights": Setup(WEIGHED, like=None),
    "weights, DP 2": Setup(WEIGHED, "weights", 2),
    "blend, split, evaluation": Setup(BLEND, like=None),
    "blend, DP 2": Setup(BLEND, "blend, split, evaluation", 2),
    "blend, killed": Setup(
        (*BLEND, "--save", "{}/killed", "--save-interval", str(SAVED)), more={"kill_after": KILLED}, round=1
    ),
    "blend, resumed": Setup((*BLEND, "--load", "{}/killed"), "blend, split, evaluation", round=2),
    "blend, resumed by DP 2": Setup((*BLEND, "--load", "{}/killed"), "blend, split, evaluation", 2, round=2),
    # From a checkpoint, since Megatron draws the weights of each stage with another seed.
    "blend, resumed by PP 2": Setup(
        (*BLEND, "--load", "{}/killed", "--pipeline-model-parallel-size", "2"), "blend, split, evaluation", 2, round=2
    ),
    "boundaries ignored": Setup(more={"wrong": "one segment"}),
    "mask one late": Setup(more={"wrong": "mask late"}),
    # Refused before anything is built: on their own, ranks would wait for each other for ever.
    "TP 2, a mask wanted": Setup(
        (*CHATS, "--tensor-model-parallel-size", "2"), ranks=2, flags=("--sft", "--calculate-per-token-loss")
    ),
    "TP 2, no --sft": Setup((*CHATS, "--tensor-model-parallel-size", "2"), ranks=2, flags=FLAGS[1:]),
}
WRONG = ("boundaries ignored", "mask one late")
REFUSED = {"TP 2, a mask wanted": FLAGS[1], "TP 2, no --sft": FLAGS[0]}


def prepare(folder: Path) -> None:
    """The demo's chats as shards: packed, with weights, packed otherwise, and packed to be padded for CP 2."""
    for name, options in {"chats": (), "others": ("--seed", 7), "padded": ("--sequence-multiple", 4)}.items():
        outcome = preprocess(folder / name, *options, capacity=LENGTH)
        assert outcome.code == 0, outcome.err
    with ShardWriter(folder / "weighed", capacity=LENGTH, mask_dtype=np.float32, durable=False) as writer:
        for pack in Shard(folder / "chats"):
            weights = pack["loss_mask"] * np.linspace(0.3, 1.9, len(pack["loss_mask"]), dtype=np.float32)
            writer.add_pack(pack["input_ids"], weights, pack["seq_boundaries"][:-1])
        writer.finalize()


def launch(folder: Path, program: str, jobs: dict[str, Any], ranks: int) -> str:
    """Run the jobs of a program of tests, one after the other in the same processes; what these said."""
    plan = folder / f"{program}.{ranks}.json"
    plan.write_text(json.dumps(jobs).replace("{}", str(folder)), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = [*filter(None, [os.environ.get("MEGATRON_LM")]), str(ROOT), *sys.path]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    # Not a pipe: what a killed process leaves behind would hold it open.
    with plan.with_suffix(".log").open("w+", encoding="utf-8") as said:
        command = [*torchrun, str(ROOT / "tests" / program), str(plan), str(folder)]
        subprocess.run(command, env=environment, stdout=said, stderr=said, timeout=560, check=False)
        said.seek(0)
        return said.read()


def script_losses(folder: Path) -> dict[str, list[float]]:
    """The losses of ``tools/pretrain_sft.py`` for each set-up that is like it."""
    same = ("--hidden-size", "--seq-length", "--train-iters", "--weight-decay")
    size = [*(option for name in same for option in TINY[TINY.index(name) :][:2]), "--vocab-size", str(VOCABULARY)]
    jobs = {
        f"script, {name}": {"options": [*size, *(option for option in setup.options if option not in EVALUATED[2:])]}
        for name, setup in SETUPS.items()
        if setup.like is None
    }
    said = launch(folder, "pretrain_runs.py", jobs, 1)
    left = {name: folder / f"{name}.0.json" for name in jobs}
    assert all(path.exists() for path in left.values()), said[-4000:]
    return {name.removeprefix("script, "): json.loads(path.read_text()) for name, path in left.items()}


def found_by(folder: Path, name: str, ranks: int) -> dict[str, Any]:
    """What a set-up left, which is the same on all ranks that know it."""
    left = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
    knowing = [each for each in left if each["losses"] or each["error"]]
    assert all(each == knowing[0] for each in knowing), name
    return dict(knowing[0])


def run_all(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """What every set-up left, by name.

    Raises:
        AssertionError: one left nothing; the message is what its processes said.
    """
    found = {}
    for turn in range(3):
        for ranks in (1, 2):
            setups = {name: SETUPS[name] for name in names if (SETUPS[name].round, SETUPS[name].ranks) == (turn, ranks)}
            if not setups:
                continue
            jobs = {
                name: {"argv": [*TINY, *setup.flags, *setup.options], **setup.more} for name, setup in setups.items()
            }
            said = launch(folder, "megatron_pretrain.py", jobs, ranks)
            for name, setup in setups.items():
                if "kill_after" in setup.more:
                    assert "SIGKILL" in said, said[-4000:]
                    continue
                assert (folder / f"{name}.0.json").exists(), said[-4000:]
                found[name] = found_by(folder, name, ranks)
    return found


def difference(found: list[float], expected: list[float]) -> float:
    """The largest relative difference, NaN if a value is; of a run that was resumed, the last values are there alone.

    Raises:
        AssertionError: nothing was found where something is expected, or more than is expected.
    """
    assert len(found) <= len(expected), f"{len(found)} values, at most {len(expected)} are expected"
    assert found or not expected, f"no values, {len(expected)} are expected"
    got, wanted = np.array(found), np.array(expected[len(expected) - len(found) :])
    return float(np.max(np.abs(got - wanted) / np.abs(wanted), initial=0.0))  # NaN goes through; not so by max()


def table(found: dict[str, dict[str, Any]], script: dict[str, list[float]]) -> list[str]:
    """A line a set-up: steps, the largest relative differences, and how segments alone differ; or the error."""
    lines = [f"{'set-up':26}{'like':26}{'steps':>6}{'losses':>9}{'norms':>9}{'evaluated':>11}{'segments alone':>17}"]
    for name, left in found.items():
        if left["error"]:
            lines.append(f"{name:26}{left['error']}")
            continue
        like = SETUPS[name].like or "pretrain_sft.py"
        other = {"losses": script[name]} if like not in found else found[like]
        shown = ""
        for what, width in (("losses", 9), ("norms", 9), ("validation", 11)):
            known = left[what] and other.get(what)
            shown += f"{difference(left[what], other[what]):{width}.0e}" if known else f"{'-':>{width}}"
        worst, segments = left["alone"]
        alone = f"{worst:.0e} of {segments}" if segments else "-"
        lines.append(f"{name:26}{like:26}{len(left['losses']):6}{shown}{alone:>17}")
    return lines


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        found, script = run_all(Path(folder), names or list(SETUPS)), script_losses(Path(folder))
    print(*table(found, script), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
