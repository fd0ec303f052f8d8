"""Set-ups in which Megatron-LM's own ``pretrain()`` trains with our provider, and the differences of their losses.

``python tests/megatron_setups.py [NAME ...]`` prints the table for these set-ups, by default for all. It uses the
installed Megatron or, if MEGATRON_LM is set, that checkout with its ``pretrain_gpt.py`` and ``pretrain_hybrid.py``,
whose packages must be installed, such as ``six`` and ``triton``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chats import preprocess
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torchruns import torchrun

from megatron_sft_idx.shard import Shard, ShardWriter

ROOT = Path(__file__).parents[1]
LENGTH, STEPS, SAVED, KILLED, VOCABULARY = 544, 20, 10, 13, 2048
# Compiling Megatron's fused functions takes longer than the runs.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}

# Arguments for a tiny model on the CPU; all others are arguments of a real run.
TINY = f"""
--hidden-size 32 --ffn-hidden-size 128 --num-attention-heads 4 --max-position-embeddings {LENGTH}
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --use-cpu-initialization
--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-rope-fusion
--no-persist-layer-norm --transformer-impl local --hidden-dropout 0 --attention-dropout 0 --distributed-backend gloo
--inference-rng-tracker --no-save-rng --no-load-rng --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}
--seq-length {LENGTH} --micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --num-workers 0
--lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0 --log-interval 1
--eval-iters 0 --eval-interval 1000 --split 1,0,0
""".split()
# Arguments for a GPTModel or a HybridModel of two blocks; in the latter an attention and an MLP layer are one block.
MODELS = {
    "GPT": ("--num-layers", "2"),
    "Hybrid": ("--hybrid-layer-pattern", "*-*-", "--spec", "megatron_attention", "HYBRID"),
}
FLAGS = ("--sft", "--no-create-attention-mask-in-dataloader", "--calculate-per-token-loss")
CHATS = ("--data-path", "{}/chats")
PADDED = ("--data-path", "{}/padded")
WEIGHED = ("--data-path", "{}/weighed")
EVALUATED = ("--split", "90,10,0", "--eval-iters", "2", "--eval-interval", "10")
# A global batch is the whole shard, so every step has the same sequences, in any order.
SEQUENCES = 32
SINGLES = ("--data-path", "{}/singles", "--global-batch-size", str(SEQUENCES))
ROOM = "--max-seqlen-per-dp-cp-rank"
# Megatron requires it even without experts.
DISPATCHER = ("--moe-token-dispatcher-type", "alltoall")
SCHEDULER = (*SINGLES, *DISPATCHER, "--sequence-packing-scheduler", "dp_balanced", ROOM)
BLEND = ("--data-path", "0.7", "{}/chats", "0.3", "{}/others", *EVALUATED)
WEB = ("0.3", "pretrain:{}/web")
MIXED = ("--data-path", "0.5", "{}/chats", "0.2", "{}/others", *WEB, *EVALUATED)
# Without evaluation: with --sft Megatron averages the means of micro-batches, so their size changes the result.
MIXED_PADDED = ("--data-path", "0.7", "{}/padded", *WEB)


@dataclass(frozen=True)
class Setup:
    """A run of Megatron, and the run with which its losses are compared.

    Attributes:
        options: arguments in addition to ``TINY`` and ``FLAGS``. ``{}`` is replaced by the folder with the shards,
            ``{model}`` by the model.
        like: name of the set-up to compare with; None compares with ``tools/pretrain_sft.py`` on the same data.
        model: a key of ``MODELS``.
        ranks: number of processes.
        flags: flags of ``FLAGS`` to pass.
        more: further fields of ``Job``.
        round: set-ups of a later round need the results of earlier rounds.
    """

    options: tuple[str, ...] = CHATS
    like: str | None = "one process"
    model: str = "GPT"
    ranks: int = 1
    flags: tuple[str, ...] = FLAGS
    more: dict[str, Any] = field(default_factory=dict)
    round: int = 0


GPT = {
    "one process": Setup(like=None, more={"alone": "{}/chats"}),
    "micro-batch 2": Setup((*CHATS, "--micro-batch-size", "2"), more={"alone": "{}/chats"}),
    "runner": Setup(more={"runner": True}),
    "runner, DP 2": Setup(ranks=2, more={"runner": True}),
    "DP 2": Setup(ranks=2),
    "DP 2, micro-batch 2": Setup((*CHATS, "--micro-batch-size", "2"), ranks=2),
    "TP 2": Setup((*CHATS, "--tensor-model-parallel-size", "2"), ranks=2),
    "padded to 4": Setup(PADDED, like=None),
    "CP 2": Setup((*PADDED, "--context-parallel-size", "2"), "padded to 4", ranks=2),
    "CP 2, micro-batch 2": Setup(
        (*PADDED, "--context-parallel-size", "2", "--micro-batch-size", "2"), "padded to 4", ranks=2
    ),
    "weights": Setup(WEIGHED, like=None),
    "weights, DP 2": Setup(WEIGHED, "weights", ranks=2),
    "blend, split, evaluation": Setup(BLEND, like=None),
    "blend, DP 2": Setup(BLEND, "blend, split, evaluation", ranks=2),
    "blend, killed": Setup(
        (*BLEND, "--save", "{}/killed {model}", "--save-interval", str(SAVED)), more={"kill_after": KILLED}, round=1
    ),
    "blend, resumed": Setup((*BLEND, "--load", "{}/killed {model}"), "blend, split, evaluation", round=2),
    "blend, resumed by DP 2": Setup(
        (*BLEND, "--load", "{}/killed {model}"), "blend, split, evaluation", ranks=2, round=2
    ),
    # Resumed from a checkpoint, because Megatron initializes each stage with another seed.
    "blend, resumed by PP 2": Setup(
        (*BLEND, "--load", "{}/killed {model}", "--pipeline-model-parallel-size", "2"),
        "blend, split, evaluation",
        ranks=2,
        round=2,
    ),
    "pretraining": Setup(MIXED, like=None),
    "pretraining, DP 2": Setup(MIXED, "pretraining", ranks=2),
    "pretraining, TP 2": Setup((*MIXED, "--tensor-model-parallel-size", "2"), "pretraining", ranks=2),
    "pretraining, padded to 4": Setup(MIXED_PADDED, like=None),
    "pretraining, micro-batch 2": Setup((*MIXED_PADDED, "--micro-batch-size", "2"), "pretraining, padded to 4"),
    "pretraining, CP 2, micro-batch 2": Setup(
        (*MIXED_PADDED, "--context-parallel-size", "2", "--micro-batch-size", "2"), "pretraining, padded to 4", ranks=2
    ),
    "pretraining, killed": Setup(
        (*MIXED, "--save", "{}/mixed {model}", "--save-interval", str(SAVED)), more={"kill_after": KILLED}, round=1
    ),
    "pretraining, resumed": Setup((*MIXED, "--load", "{}/mixed {model}"), "pretraining", round=2),
    "pretraining, resumed by DP 2": Setup((*MIXED, "--load", "{}/mixed {model}"), "pretraining", ranks=2, round=2),
    "pretraining, resumed by PP 2": Setup(
        (*MIXED, "--load", "{}/mixed {model}", "--pipeline-model-parallel-size", "2"), "pretraining", ranks=2, round=2
    ),
    "one sequence a row": Setup(SINGLES, like=None),
    "boundaries ignored": Setup(more={"wrong": "one segment"}),
    "mask one late": Setup(more={"wrong": "mask late"}),
    # Rejected before anything is built; otherwise ranks would wait for each other endlessly.
    "TP 2, a mask wanted": Setup(
        (*CHATS, "--tensor-model-parallel-size", "2"), ranks=2, flags=("--sft", "--calculate-per-token-loss")
    ),
    "TP 2, no --sft": Setup((*CHATS, "--tensor-model-parallel-size", "2"), ranks=2, flags=FLAGS[1:]),
}
# Megatron packs during training: with different pack lengths, and on two processes.
UNPACKED = "one sequence a row"
SCHEDULED = {
    "scheduler, packs of 544": Setup((*SCHEDULER, "544"), UNPACKED, flags=FLAGS[1:]),
    "scheduler, packs of 1,088": Setup((*SCHEDULER, "1088"), UNPACKED, flags=FLAGS[1:]),
    "scheduler, varlen data set": Setup(
        (*SINGLES, *DISPATCHER, "--use-varlen-dataset", ROOM, "1088"), UNPACKED, flags=FLAGS[1:]
    ),
    "scheduler, DP 2": Setup((*SCHEDULER, "1088"), UNPACKED, ranks=2, flags=FLAGS[1:]),
    "scheduler, TP 2": Setup(
        (*SCHEDULER, "1088", "--tensor-model-parallel-size", "2"), UNPACKED, ranks=2, flags=FLAGS[1:]
    ),
    "scheduler, CP 2": Setup((*SCHEDULER, "544", "--context-parallel-size", "2"), UNPACKED, ranks=2, flags=FLAGS[1:]),
    "scheduler, boundaries ignored": Setup(
        (*SCHEDULER, "1088"), UNPACKED, flags=FLAGS[1:], more={"wrong": "one segment"}
    ),
    "scheduler, no room given": Setup(SCHEDULER[:-1], UNPACKED, flags=FLAGS[1:]),
}
WRONG = ("boundaries ignored", "mask one late", "scheduler, boundaries ignored")
REFUSED = {"TP 2, a mask wanted": FLAGS[1], "TP 2, no --sft": FLAGS[0]}


def of_hybrid(name: str) -> str:
    """Return the name of the HybridModel counterpart of a GPTModel set-up."""
    return f"Hybrid, {name}"


def hybrid_setups(setups: dict[str, Setup]) -> dict[str, Setup]:
    """Return the HybridModel counterparts of all GPTModel set-ups, and one that starts from a GPTModel checkpoint."""
    made = {
        of_hybrid(name): replace(setup, model="Hybrid", like=setup.like and of_hybrid(setup.like))
        for name, setup in setups.items()
    }
    split = ("--hybrid-layer-pattern", "*-|*-")
    for stages in map(of_hybrid, ("blend, resumed by PP 2", "pretraining, resumed by PP 2")):
        made[stages] = replace(made[stages], options=(*made[stages].options, *split))
    from_gpt = (*BLEND, "--load", "{}/killed GPT")
    made["Hybrid, from a checkpoint of GPT"] = Setup(from_gpt, "blend, split, evaluation", "Hybrid", round=2)
    return made


def all_setups() -> dict[str, Setup]:
    """Return the set-ups that are possible with the Megatron in use (a checkout or the installed one)."""
    checkout = os.environ.get("MEGATRON_LM")
    if checkout is None:
        core = find_spec("megatron.core")
        megatron = Path(core.origin or "").parents[1] if core else Path("missing")
        hybrid = (megatron / "core/models/hybrid").exists()
    else:
        megatron = Path(checkout, "megatron")
        hybrid = Path(checkout, "pretrain_hybrid.py").exists()
    arguments = megatron / "training/arguments.py"
    # The data set's flag came with the scheduler's loop.
    scheduled = arguments.exists() and "use_varlen_dataset" in arguments.read_text(encoding="utf-8")
    setups = {**GPT, **SCHEDULED} if scheduled else GPT
    return {**setups, **hybrid_setups(setups)} if hybrid else setups


SETUPS = all_setups()


def prepare(folder: Path) -> None:
    """Write shards of the demo's chats: with and without weights, two packings, padded for CP 2, one sequence per pack.

    Also write pretraining data: documents of random tokens.
    """
    for name, options in {"chats": (), "others": ("--seed", 7), "padded": ("--sequence-multiple", 4)}.items():
        outcome = preprocess(folder / name, *options, capacity=LENGTH)
        assert outcome.code == 0, outcome.err
    with ShardWriter(folder / "weighed", capacity=LENGTH, mask_dtype=np.float32, durable=False) as writer:
        for pack in Shard(folder / "chats"):
            weights = pack["loss_mask"] * np.linspace(0.3, 1.9, len(pack["loss_mask"]), dtype=np.float32)
            writer.add_pack(pack["input_ids"], weights, pack["seq_boundaries"][:-1])
        writer.finalize()
    segments = ((pack, *ends) for pack in Shard(folder / "chats") for ends in pairwise(pack["seq_boundaries"].tolist()))
    with ShardWriter(folder / "singles", capacity=LENGTH, durable=False) as writer:
        for pack, start, stop in islice(segments, SEQUENCES):
            writer.add_pack(pack["input_ids"][start:stop], pack["loss_mask"][start:stop], [0])
        writer.finalize()
    rng, documents = np.random.default_rng(43), IndexedDatasetBuilder(f"{folder}/web.bin", dtype=np.int32)
    for length in rng.integers(1, 2000, 60):
        documents.add_item(torch.from_numpy(rng.integers(0, VOCABULARY - 1, length)))
        documents.end_document()
    documents.finalize(f"{folder}/web.idx")


def launch(folder: Path, program: str, jobs: dict[str, Any], ranks: int) -> str:
    """Run jobs of a test program one after the other in the same processes. Return the output."""
    plan = folder / f"{program}.{ranks}.json"
    plan.write_text(json.dumps(jobs).replace("{}", str(folder)), encoding="utf-8")
    command = torchrun(ranks, ROOT / "tests" / program, plan, folder)
    paths = [*filter(None, [os.environ.get("MEGATRON_LM")]), *sys.path, str(ROOT / "tools")]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    # Not a pipe, because children of a killed process would keep it open.
    with plan.with_suffix(".log").open("w+", encoding="utf-8") as said:
        subprocess.run(command, env=environment, stdout=said, stderr=said, timeout=560, check=False)
        said.seek(0)
        return said.read()


def script_losses(folder: Path, names: Iterable[str]) -> dict[str, list[float]]:
    """Return the losses of ``tools/pretrain_sft.py`` for each of these set-ups that is compared with it."""
    alike = {name for name in names if SETUPS[name].like is None}
    if not alike:
        return {}
    same = ("--hidden-size", "--seq-length", "--train-iters", "--weight-decay")
    size = [*(option for name in same for option in TINY[TINY.index(name) :][:2]), "--vocab-size", str(VOCABULARY)]
    jobs = {
        f"script, {name}": {"options": [*size, *(option for option in setup.options if option not in EVALUATED[2:])]}
        for name, setup in GPT.items()
        if not alike.isdisjoint({name, of_hybrid(name)})
    }
    said = launch(folder, "pretrain_runs.py", jobs, 1)
    left = {name: folder / f"{name}.0.json" for name in jobs}
    assert all(path.exists() for path in left.values()), said[-4000:]
    losses = {name.removeprefix("script, "): json.loads(path.read_text()) for name, path in left.items()}
    return {**losses, **{of_hybrid(name): each for name, each in losses.items()}}


def found_by(folder: Path, name: str, ranks: int) -> dict[str, Any]:
    """Return the results of a set-up. They must be equal on all ranks that have them."""
    left = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
    knowing = [each for each in left if each["losses"] or each["error"]]
    assert all(each == knowing[0] for each in knowing), name
    return dict(knowing[0])


def job_of(setup: Setup) -> dict[str, Any]:
    """Return the fields of the ``Job`` for a set-up."""
    options = [option.replace("{model}", setup.model) for option in setup.options]
    argv = [*TINY, *MODELS[setup.model], *setup.flags, *options]
    return {"argv": argv, "hybrid": setup.model == "Hybrid", **setup.more}


def run_all(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Run set-ups and return their results by name.

    Raises:
        AssertionError: a set-up has no result; the message is the output of its processes.
    """
    found = {}
    for turn, ranks, model in product(range(3), (1, 2), MODELS):
        together = (turn, ranks, model)
        setups = {name: setup for name, setup in SETUPS.items() if (setup.round, setup.ranks, setup.model) == together}
        jobs = {name: job_of(setup) for name, setup in setups.items() if name in names}
        killed = [name for name in jobs if "kill_after" in setups[name].more]
        for name in killed:  # each in its own processes, which end with it
            said = launch(folder, "megatron_pretrain.py", {name: jobs.pop(name)}, ranks)
            assert "SIGKILL" in said, said[-4000:]
        if not jobs:
            continue
        said = launch(folder, "megatron_pretrain.py", jobs, ranks)
        for name in jobs:
            assert (folder / f"{name}.0.json").exists(), said[-4000:]
            found[name] = found_by(folder, name, ranks)
    return found


def difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference, or NaN if a value is NaN. A resumed run has only the last values.

    Raises:
        AssertionError: values are missing, or there are more than expected.
    """
    assert len(found) <= len(expected), f"{len(found)} values, at most {len(expected)} are expected"
    assert found or not expected, f"no values, {len(expected)} are expected"
    got, wanted = np.array(found), np.array(expected[len(expected) - len(found) :])
    return float(np.max(np.abs(got - wanted) / np.abs(wanted), initial=0.0))  # keeps NaN, unlike max()


def table(found: dict[str, dict[str, Any]], script: dict[str, list[float]]) -> list[str]:
    """Return one line per set-up: steps, largest relative differences, difference of single segments; or the error.

    For HybridModel, the last number is the difference between its losses and GPTModel's in the same set-up.
    """
    headings = f"{'steps':>6}{'losses':>9}{'norms':>9}{'evaluated':>11}{'segments alone':>17}{'GPT':>9}"
    lines = [f"{'set-up':38}{'like':34}{headings}"]
    for name, left in found.items():
        if left["error"]:
            lines.append(f"{name:38}{left['error']}")
            continue
        like = SETUPS[name].like or "pretrain_sft.py"
        other = {"losses": script.get(name)} if like not in found else found[like]
        shown = ""
        for what, width in (("losses", 9), ("norms", 9), ("validation", 11)):
            known = left[what] and other.get(what)
            shown += f"{difference(left[what], other[what]):{width}.0e}" if known else f"{'-':>{width}}"
        worst, segments = left["alone"]
        alone = f"{worst:.0e} of {segments}" if segments else "-"
        gpt = found.get(name.removeprefix(of_hybrid(""))) if SETUPS[name].model == "Hybrid" else None
        to_gpt = f"{difference(left['losses'], gpt['losses']):.0e}" if gpt else "-"
        lines.append(f"{name:38}{like:34}{len(left['losses']):6}{shown}{alone:>17}{to_gpt:>9}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(SETUPS))
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in SETUPS]:
        parser.error(f"no set-up has the name {unknown[0]!r}; --help lists the names")
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        found = run_all(Path(folder), names or list(SETUPS))
        script = script_losses(Path(folder), found)
    print(*table(found, script), sep="\n")


if __name__ == "__main__":
    main()
