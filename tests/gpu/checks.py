"""Checks that need a GPU, as one table: ``make test-gpu``. Without a GPU, the table shows the reasons for skips.

``--rehearse`` runs everything that a CPU can, in small sizes and with replacements: ``thd`` for Transformer Engine's
kernels, gloo for NCCL, plain memory for pinned. The exit code is 1 if a comparison fails. Times are only reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import numpy as np
import torch
from gpt_model import connect, current_device, megatron_device, model_inputs, seed_everything
from megatron.core import parallel_state
from training_twin import lone_process, pretrain_script, random_sequences

from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler, Tensors, widen
from megatron_sft_idx.training.loader import BatchLoader, _Slot
from megatron_sft_idx.training.sources import StoredPacks

ROOT = Path(__file__).parents[2]
VOCABULARY, PAD = 1024, 3
# bfloat16 keeps 8 bits, 4e-3 of a value: thousands of roundings average out in a loss, but a gradient is summed in
# bfloat16. On the CPU, differences were 1e-4 and 2e-2. The control, missing boundaries, changes a gradient by more than
# half of itself, which is more than ten times the limit.
LOSS, GRADIENT = 1e-3, 5e-2
# float32 sums in another order.
LOSS_OF_RANKS = 2e-5


class Row(NamedTuple):
    """A line of the table. ``good`` is None for values that are only reported."""

    check: str
    found: str
    expected: str = ""
    good: bool | None = None


@dataclass(frozen=True)
class Check:
    """Attributes: the function, its needs in addition to one GPU, and in ``rehearsed`` the replacement without one."""

    name: str
    run: Callable[[Setting], Iterator[Row]]
    gpus: int = 1
    engine: bool = False
    rehearsed: str | None = None


@dataclass(frozen=True)
class Setting:
    """Attributes: the device, the size, and a folder to write to."""

    rehearse: bool
    folder: Path

    @property
    def length(self) -> int:
        """The number of positions of a row."""
        return 256 if self.rehearse else 4096

    @property
    def attention(self) -> str:
        """The attention for packed rows."""
        return "thd" if self.rehearse else "te"

    def shard(self, name: str, *, rows: int, multiple: int = 1, packed: bool = True) -> StoredPacks:
        """Return rows of about eight random sequences each, or the same sequences with one per row."""
        prefix, rng = self.folder / name, np.random.default_rng(7)
        with ShardWriter(prefix, capacity=self.length, sequence_multiple=multiple, pad_id=PAD) as writer:
            for _ in range(rows):
                room = self.length // multiple
                cuts = np.sort(rng.choice(np.arange(1, room), 7, replace=False))
                lengths = np.diff([0, *cuts, room]) * multiple - rng.integers(0, multiple, 8)
                pairs = random_sequences(rng, lengths.tolist(), VOCABULARY)
                for part in [pairs] if packed else [[pair] for pair in pairs]:
                    ids, masks = (np.concatenate(arrays) for arrays in zip(*part, strict=True))
                    starts = np.cumsum([0, *(len(one) for one, _ in part[:-1])])
                    writer.add_pack(ids, masks.astype(np.uint8), starts)
            writer.finalize()
        return StoredPacks(ShardSet.open(prefix))

    def model(self, attention: str, **sizes: int) -> Any:
        """Return a model, wrapped for its gradients, whose attention has an effect from the first step.

        Always the same.
        """
        seed_everything(1)
        # Small in a rehearsal, because bfloat16 products are slow on CPUs without support.
        hidden_size = 64 if self.rehearse else 256
        given = {
            "seq_length": self.length,
            "vocab_size": VOCABULARY,
            "hidden_size": hidden_size,
            "attention": attention,
        }
        options = ["--data-path", "-", "--init-method-std", "0.1", "--bf16"]
        for name, value in {**given, **sizes}.items():
            options += [f"--{name.replace('_', '-')}", str(value)]
        script: ModuleType = pretrain_script()
        return script.build_model(script.parse_arguments(options))


def on_device(batch: Tensors) -> Tensors:
    """Return a copy of the batch on the device."""
    return {name: tensor.to(current_device(), non_blocking=True) for name, tensor in batch.items()}


# ---- Transformer Engine's THD path ----


def learned(model: Any, batch: Tensors, attention: str) -> tuple[float, torch.Tensor]:
    """Return the mean loss of a batch's trained tokens, and its gradient with all parameters concatenated."""
    model.zero_grad_buffer()
    inputs, mask = model_inputs(on_device(batch), attention)
    loss = (model(**inputs).float() * mask).sum() / mask.sum()
    loss.backward()
    gradient = torch.cat([parameter.main_grad.float().flatten() for parameter in model.module.parameters()])
    return float(loss.detach()), gradient.clone()


def attention(setting: Setting) -> Iterator[Row]:
    """Compare packed rows with one row per sequence, and with missing boundaries as the control."""
    batch = BatchAssembler(setting.shard("attention", rows=4), setting.length).assemble(range(4))
    packed = setting.model(setting.attention)
    alone = setting.model("unpacked" if setting.rehearse else "te")
    loss, gradient = learned(alone, batch, "unpacked")
    whole = torch.full_like(batch["cu_seqlens"], setting.length)
    whole[:, 0] = 0
    forgotten = {**batch, "cu_seqlens": whole, "max_seqlen": torch.full_like(batch["max_seqlen"], setting.length)}
    for name, rows, control in (("", batch, False), (", boundaries forgotten", forgotten, True)):
        found, its_gradient = learned(packed, rows, setting.attention)
        for what, away, most in (
            ("loss", abs(found - loss) / loss, LOSS),
            ("gradient", float((its_gradient - gradient).norm() / gradient.norm()), GRADIENT),
        ):
            row = f"{setting.attention} against unpacked, bfloat16: {what}{name}", f"{away:.1e}"
            if not control:
                yield Row(*row, f"<= {most:.0e}", away <= most)
            elif what == "gradient":
                yield Row(*row, f"> {10 * most:.0e}, the control", away > 10 * most)
            else:
                yield Row(*row)


# ---- batches on their way to the device ----


def widening(setting: Setting) -> Iterator[Row]:
    """Compare narrow batches widened on the device with wide batches made on the host."""
    for multiple in (1, 8):
        source = setting.shard(f"narrow-{multiple}", rows=6, multiple=multiple)
        wide = BatchAssembler(source, setting.length, sequence_multiple=multiple).assemble(range(6))
        narrow = BatchAssembler(source, setting.length, sequence_multiple=multiple, form="narrow").assemble(range(6))
        found = widen(narrow, PAD, current_device())
        same = found.keys() == wide.keys() and all(
            found[name].dtype == tensor.dtype and torch.equal(found[name].cpu(), tensor)
            for name, tensor in wide.items()
        )
        nbytes = [sum(tensor.nbytes for tensor in one.values()) for one in (narrow, wide)]
        said = f"{'equal' if same else 'another'}, {nbytes[0]:,} bytes for {nbytes[1]:,}"
        yield Row(f"narrow batches widened on the device, multiple {multiple}", said, "bit for bit", same)


def digest(batch: Tensors) -> torch.Tensor:
    """Return a number that depends on every value and its place, on the batch's device."""
    sums = [
        (tensor.double().flatten() * torch.arange(1, tensor.numel() + 1, device=tensor.device, dtype=torch.float64))
        for _, tensor in sorted(batch.items())
    ]
    return torch.stack([one.sum() for one in sums])


def fed(setting: Setting, assembler: BatchAssembler, steps: int, *, pinned: bool) -> tuple[list[float], float, int]:
    """Run steps while the next batch is transferred. Return blocked seconds of each, seconds per step, and batches."""
    device, rows = current_device(), 4
    batches = [[(step * rows + row) % assembler.source.num_packs for row in range(rows)] for step in range(steps)]
    size = 128 if setting.rehearse else 6144
    weight = torch.randn(size, size, device=device, dtype=torch.bfloat16) / size
    finished: list[Any] = []
    digests, blocked = [], []
    begin = time.perf_counter()
    for batch in BatchLoader(assembler, batches, pin_memory=pinned):
        asked = time.perf_counter()
        there = on_device(batch)
        blocked.append(time.perf_counter() - asked)
        digests.append(digest(there))
        value = weight
        for _ in range(10):
            value = value @ weight
        if device.type == "cuda":
            finished.append(torch.cuda.Event())
            finished[-1].record()
            if len(finished) > 2:  # like a trainer that reads its loss some steps later
                finished[-3].synchronize()
    seconds = (time.perf_counter() - begin) / steps
    expected = [digest(assembler.assemble(packs)) for packs in batches]
    arrived = sum(torch.equal(got.cpu(), wanted) for got, wanted in zip(digests, expected, strict=True))
    return blocked, seconds, arrived


def transfers(setting: Setting) -> Iterator[Row]:
    """Copy pinned batches while the device computes, and check that reused buffers are not overwritten too early."""
    steps = 8 if setting.rehearse else 200
    assembler = BatchAssembler(setting.shard("transfers", rows=32), setting.length)
    for pinned in (True, False):
        blocked, seconds, arrived = fed(setting, assembler, steps, pinned=pinned)
        name = f"{'pinned' if pinned else 'pageable'} transfers"
        said = f"{1e6 * statistics.median(blocked):,.0f} us blocked in a copy, {1e3 * seconds:.1f} ms a step"
        yield Row(f"{name}: time", said)
        yield Row(f"{name}: batches as they were made", f"{arrived} of {steps}", "all", arrived == steps)
    given_back = _Slot.given_back
    try:
        _Slot.given_back = lambda self: None  # type: ignore[method-assign]
        *_, arrived = fed(setting, assembler, steps, pinned=True)
    finally:
        _Slot.given_back = given_back  # type: ignore[method-assign]
    yield Row("the same, buffers given back before they are copied", f"{arrived} of {steps}", "fewer, where copies lag")


# ---- the speed of packing ----


def step_time(setting: Setting) -> Iterator[Row]:
    """Compare packed sequences with the same sequences padded to full rows."""
    sizes = {} if setting.rehearse else {"hidden_size": 1024, "num_layers": 8, "num_attention_heads": 16}
    rates = []
    for name, packed in (("packed", True), ("padded", False)):
        source = setting.shard(f"time-{name}", rows=2, packed=packed)
        assembler, model = BatchAssembler(source, setting.length), setting.model(setting.attention, **sizes)
        batches = [assembler.assemble([row, row + 1]) for row in range(0, source.num_packs - 1, 2)]
        tokens = int(source.segments(np.arange(source.num_packs)).lengths.sum())
        for batch in batches:  # the first round chooses kernels
            learned(model, batch, setting.attention)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for batch in batches:
            learned(model, batch, setting.attention)
        torch.cuda.synchronize()
        rates.append(tokens / (time.perf_counter() - begin))
        yield Row(f"training, {name} rows of {setting.length}", f"{rates[-1]:,.0f} tokens of sequences a second")
    yield Row("packed over padded", f"{rates[0] / rates[1]:.1f} times")


# ---- several GPUs ----


def torchrun(ranks: int, *command: object) -> None:
    """Run a program on ``ranks`` ranks. Raise RuntimeError with its output if it fails."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *command]
    done = subprocess.run([str(part) for part in launch], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr[-2000:]}")


def data_parallel(setting: Setting) -> Iterator[Row]:
    """Compare tools/pretrain_sft.py on one rank and on two: the losses must be equal in every step."""
    setting.shard("ranks", rows=16)
    curves = []
    for ranks in (1, 2):
        log = setting.folder / f"losses-{ranks}.jsonl"
        data = ["--data-path", setting.folder / "ranks", "--seq-length", setting.length, "--vocab-size", VOCABULARY]
        taken = ["--train-iters", 4, "--micro-batch-size", 2, "--attention", "thd", "--metrics", log]
        torchrun(ranks, ROOT / "tools/pretrain_sft.py", *data, *taken)
        curves.append([json.loads(line)["loss"] for line in log.read_text().splitlines()])
    away = max(abs(one - two) / one for one, two in zip(*curves, strict=True))
    good = away <= LOSS_OF_RANKS and len(set(curves[0])) == 4
    yield Row("two data-parallel ranks against one: loss of 4 steps", f"{away:.1e}", f"<= {LOSS_OF_RANKS:.0e}", good)


def own_positions(cu_seqlens: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return a context-parallel rank's positions of a row: two parts of each segment, from its front and its end.

    Every segment is divided into 2 x ranks equal parts. Rank r has part r and its mirror image.
    """
    own = []
    for start, stop in pairwise(cu_seqlens.unique_consecutive().tolist()):
        part, rest = divmod(stop - start, 2 * ranks)
        assert not rest, "the shard's multiple is 2 x ranks"
        for piece in (rank, 2 * ranks - 1 - rank):
            own.append(torch.arange(start + piece * part, start + (piece + 1) * part))
    return torch.cat(own)


def partition(setting: Setting) -> Iterator[Row]:
    """Check that ranks divide every segment's positions, like Transformer Engine if it is installed."""
    source = setting.shard("partition", rows=3, multiple=4)
    batch = BatchAssembler(source, setting.length, sequence_multiple=4).assemble(range(3))
    same = True
    for bounds in batch["cu_seqlens_padded"]:
        parts = [own_positions(bounds, 2, rank) for rank in range(2)]
        same &= torch.equal(torch.cat(parts).sort().values, torch.arange(setting.length))
        if find_spec("transformer_engine") and torch.cuda.is_available():
            import transformer_engine_torch

            for rank, own in enumerate(parts):
                theirs = transformer_engine_torch.thd_get_partitioned_indices(
                    bounds.unique_consecutive().to(current_device()), setting.length, 2, rank
                )
                same &= torch.equal(theirs.cpu().long(), own)
    yield Row("positions of two context-parallel ranks", "each once" if same else "others", "each once", same)


def context_parallel(setting: Setting) -> Iterator[Row]:
    """Compare two ranks that share every row with one rank that has all of it."""
    setting.shard("context", rows=2, multiple=4)
    outcomes = []
    for ranks in (1, 2):
        out = setting.folder / f"context-{ranks}.json"
        torchrun(
            ranks, __file__, "--context-rank", setting.folder / "context", "--length", setting.length, "--out", out
        )
        outcomes.append(json.loads(out.read_text()))
    for what, most in (("loss", LOSS), ("gradient norm", GRADIENT)):
        one, two = (outcome[what] for outcome in outcomes)
        away = abs(one - two) / one
        yield Row(f"two context-parallel ranks against one: {what}", f"{away:.1e}", f"<= {most:.0e}", away <= most)


def context_rank(setting: Setting, prefix: Path, length: int, out: Path) -> None:
    """Run one context-parallel rank on its part of every row."""
    connect()
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    model = setting.model(setting.attention, seq_length=length)
    assembler = BatchAssembler(StoredPacks(ShardSet.open(prefix)), length, sequence_multiple=4)
    total = torch.zeros(2, dtype=torch.float64, device=current_device())
    model.zero_grad_buffer()
    for row in range(2):
        batch = assembler.assemble([row])
        own = own_positions(batch["cu_seqlens_padded"][0], ranks, rank)
        # The boundaries are still for the whole row.
        part = {name: value if "seqlen" in name else value[:, own] for name, value in batch.items()}
        inputs, mask = model_inputs(on_device(part), setting.attention)
        loss = (model(**inputs).float() * mask).sum()
        loss.backward()
        total += torch.stack([loss.detach(), mask.sum()]).double()
    torch.distributed.all_reduce(total)
    square = torch.zeros((), dtype=torch.float64, device=current_device())
    for parameter in model.module.parameters():
        gradient = parameter.main_grad.float()
        torch.distributed.all_reduce(gradient)
        square += gradient.double().square().sum()
    if rank == 0:
        found = {"loss": float(total[0] / total[1]), "gradient norm": float(square.sqrt() / total[1])}
        out.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


# ---- the table ----


CHECKS = [
    Check("attention", attention, engine=True, rehearsed="thd for Transformer Engine's kernels"),
    Check("widening", widening, rehearsed="on the CPU"),
    Check("transfers", transfers, rehearsed="in plain memory"),
    Check("step time", step_time, engine=True, rehearsed="thd for Transformer Engine's kernels"),
    Check("partition", partition, rehearsed="not held against Transformer Engine's"),
    Check("data parallel", data_parallel, gpus=2, rehearsed="gloo for NCCL"),
    Check("context parallel", context_parallel, gpus=2, engine=True),
]


def missing(check: Check, gpus: int, engine: bool, rehearse: bool) -> str | None:
    """Return why a check cannot run, or None."""
    if rehearse:
        return None if check.rehearsed else "nothing stands in for attention over several ranks"
    if gpus < check.gpus:
        return f"needs {check.gpus} GPU{'s' if check.gpus > 1 else ''}, found {gpus}"
    if check.engine and not engine:
        return "needs Transformer Engine: pip install 'transformer-engine[pytorch]'"
    return None


def table(rows: Sequence[Row]) -> str:
    """Format rows for people: found value, expected value, outcome."""
    outcome = {True: "ok", False: "FAILS", None: ""}
    cells = [("check", "found", "expected", ""), *((*row[:3], outcome[row.good]) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def main(argv: list[str] | None = None) -> int:
    """Run all possible checks and print the table. Return 1 if a comparison fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with stand-ins")
    parser.add_argument("--context-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.context_rank:
        with megatron_device():
            context_rank(Setting(args.rehearse, args.context_rank.parent), args.context_rank, args.length, args.out)
        return 0
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    engine = find_spec("transformer_engine") is not None
    where = torch.cuda.get_device_name(0) if gpus else "no GPU"
    print(f"{where}, {gpus} in all; torch {torch.__version__}; Transformer Engine {'there' if engine else 'missing'}")
    rows: list[Row] = []
    needed = [check for check in CHECKS if missing(check, gpus, engine, args.rehearse) is None]
    with tempfile.TemporaryDirectory() as folder, lone_process() if needed else contextlib.nullcontext():
        for check in CHECKS:
            if check not in needed:
                rows.append(Row(check.name, "skipped", missing(check, gpus, engine, args.rehearse) or ""))
                continue
            if args.rehearse:
                rows.append(Row(check.name, "rehearsed", check.rehearsed or ""))
            rows.extend(check.run(Setting(args.rehearse, Path(folder))))
    print(table(rows))
    return int(any(row.good is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
