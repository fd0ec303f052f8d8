"""Run one rank of Megatron-LM's own ``pretrain()`` on the CPU with our provider: jobs of a JSON file, under torchrun.

``megatron_setups`` starts it: ``torchrun ... tests/megatron_pretrain.py JOBS FOLDER`` runs each job in JOBS (see
``Job``) and writes ``FOLDER/NAME.RANK.json`` with the values that Megatron itself reported for every step.
``without_cuda`` contains all changes to Megatron that a machine without GPU needs. Megatron's loop, samplers, loaders,
broadcasts, model, optimizer and checkpoints are unchanged. If MEGATRON_LM is set, that checkout is run with its own
``pretrain_gpt.py`` and ``pretrain_hybrid.py``. The installed wheel lacks these scripts; ``forward_step`` of this module
then replaces theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpt_model import megatron_device
from megatron.core import mpu
from megatron.core import utils as core_utils
from megatron.core.datasets import utils as dataset_utils
from megatron.core.enums import ModelType
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron_attention import Attention, partitioned
from megatron_setups import difference
from torch import Tensor

from megatron_sft_idx import pretrain as runner
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.training.batch import BatchAssembler, Tensors
from megatron_sft_idx.training.provider import train_valid_test_datasets_provider

# A checkout of Megatron-LM to run instead of the installed one.
CHECKOUT = os.environ.get("MEGATRON_LM")
PROVIDER = "megatron_sft_idx.training.provider"
POPPED = "    cu_seqlens_padded = batch.pop('cu_seqlens_padded', None)"
KEYS = (
    *("attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels", "local_cp_size", "loss_mask"),
    *("max_seqlen", "position_ids", "tokens"),
)


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        argv: arguments of Megatron-LM, including the ones for a tiny model on the CPU.
        hybrid: train HybridModel instead of GPTModel.
        kill_after: the process kills itself after this step. None runs to the end.
        alone: prefix of a shard. The loss of every trained segment is compared to the loss of the segment by itself.
        runner: whether ``python -m megatron_sft_idx.pretrain`` runs the script; then the script is not edited.
        wrong: a deliberate error: ``one segment`` for the whole row, or ``mask late`` by one position.
    """

    argv: list[str]
    hybrid: bool = False
    kill_after: int | None = None
    alone: str | None = None
    runner: bool = False
    wrong: str | None = None


@dataclass
class Found:
    """The results of a run.

    Attributes:
        losses: loss of every step, as Megatron reports it.
        norms: gradient norm of every step.
        validation: losses of all evaluations.
        alone: the largest relative difference between a segment's loss in its pack and by itself, and the number of
            compared segments.
        error: the error that ended the run, if any.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    alone: tuple[float, int] = (0.0, 0)
    error: str | None = None


# ---- Megatron without CUDA ----


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Let the CPU act as a GPU: replace the functions of ``torch.cuda`` that Megatron's training calls."""
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    cuda: dict[str, Any] = {
        "device_count": lambda: 1,
        "get_device_properties": lambda *_: mock.Mock(major=10),
        "get_rng_state": lambda *_: torch.zeros(1, dtype=torch.uint8),
        "memory_stats": dict,
        "mem_get_info": lambda *_: (1 << 30, 1 << 30),
        "Stream": mock.MagicMock(),
        "stream": lambda _: contextlib.nullcontext(),
        "Event": mock.MagicMock(),
    }
    zeros = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used")
    cuda |= dict.fromkeys(zeros, lambda *_: 0)
    cuda |= dict.fromkeys(("set_device", "set_rng_state", "empty_cache", "reset_peak_memory_stats"), nothing)
    with contextlib.ExitStack() as entered:
        for name, stand_in in cuda.items():
            entered.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        entered.enter_context(mock.patch.object(LocalSpecProvider, "core_attention", return_value=Attention))
        if not CHECKOUT:  # a wheel has compiled helpers and no makefile
            entered.enter_context(mock.patch.object(dataset_utils, "compile_helpers", nothing))
        entered.enter_context(mock.patch.object(core_utils, "tex", mock.Mock(thd_get_partitioned_indices=partitioned)))
        entered.enter_context(megatron_device())
        yield


# ---- code of pretrain_gpt.py, which wheels lack ----


def get_batch(batches: Iterator[dict[str, Tensor]] | None) -> dict[str, Any]:
    """Return the part of a micro-batch that this rank computes."""
    from megatron.training import get_args

    args, tp_rank = get_args(), mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        assert batches is not None
        read = next(batches)
        batch = {key: read.get(key) for key in KEYS}
    batch = core_utils.get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=args.sft,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = core_utils.flatten_batch_for_packed_sequences(batch)
    cut: dict[str, Any] = core_utils.get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    return cut


def sum_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Like in pretrain_gpt.py: return the masked sum, the integer to divide it by, and both for reports."""
    loss = (losses.view(-1).float() * loss_mask.view(-1)).sum()
    tokens = loss_mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def params_of(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Return the boundaries.

    Like in pretrain_gpt.py, the padded ones replace the others, as Transformer Engine needs.
    """
    if batch["cu_seqlens"] is None:
        return None
    padded = batch["cu_seqlens_padded"]
    bounds = (batch["cu_seqlens"] if padded is None else padded)[0]
    longest = int(batch["max_seqlen"].item())
    both = {"cu_seqlens_q_padded": padded[0], "cu_seqlens_kv_padded": padded[0]} if padded is not None else {}
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest, **both
    )


def forward_step(batches: Any, model: Any) -> tuple[Tensor, Any]:
    batch = get_batch(batches)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=params_of(batch),
    )
    return losses, partial(sum_loss, batch["loss_mask"])


# ---- a monitored run ----


class Alone:
    """Compares the loss of each trained segment inside its pack with its loss when the model sees only this segment.

    The segments are read from the shard, not from the batch.

    Args:
        forward: ``forward`` of the model's class.
        prefix: prefix of the shard.
        length: length of a row.
    """

    def __init__(self, forward: Callable[..., Tensor], prefix: str, length: int) -> None:
        self._forward = forward
        packs = list(Shard(prefix))
        self._packs = {
            tuple(ids + [0] * (length - len(ids))): i for i, ids in enumerate(p["input_ids"].tolist() for p in packs)
        }
        self._shard, self._length, self._looking = packs, length, False
        self._found: list[float] = []
        self._expected: list[float] = []

    def outcome(self) -> tuple[float, int]:
        """Return the largest relative difference (NaN if a loss is NaN) and the number of compared segments."""
        return difference(self._found, self._expected), len(self._found)

    def forward(self, model: Any, tokens: Tensor, *args: Any, **named: Any) -> Tensor:
        """Replaces the model's own ``forward``, and calls it."""
        losses = self._forward(model, tokens, *args, **named)
        if not self._looking and model.training:
            self._looking = True
            with torch.no_grad():
                for row, found in zip(tokens.view(-1, self._length), losses.view(-1, self._length), strict=True):
                    self._compare(model, self._shard[self._packs[tuple(row.tolist())]], found)
            self._looking = False
        return losses

    def _compare(self, model: Any, pack: Any, found: Tensor) -> None:
        for start, stop in pairwise(pack["seq_boundaries"].tolist()):
            mask = torch.from_numpy(np.array(pack["loss_mask"][start:stop], np.float32))
            if not mask.any():
                continue
            ids, size = torch.from_numpy(np.array(pack["input_ids"][start:stop], np.int64)), stop - start
            bounds = torch.tensor([0, size], dtype=torch.int32)
            params = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=size, max_seqlen_kv=size
            )
            labels = torch.cat([ids[1:], ids[:1]])[None]
            positions = torch.arange(size)[None]
            alone = self._forward(model, ids[None], positions, None, labels=labels, packed_seq_params=params)
            self._found.append(float((found[start:stop] * mask).sum()))
            self._expected.append(float((alone.view(-1) * mask).sum()))


def spoil(fill: Callable[..., Tensors], wrong: str) -> Callable[..., Tensors]:
    """Return ``BatchAssembler.fill`` with a deliberate error."""

    def filled(*args: Any, **named: Any) -> Tensors:
        batch = fill(*args, **named)
        if wrong == "one segment":
            batch["max_seqlen"][:] = batch["cu_seqlens"][:, 1:] = batch["tokens"].shape[1]
        else:
            assert wrong == "mask late"
            batch["loss_mask"][:] = batch["loss_mask"].roll(1, 1)
        return batch

    return filled


def is_scheduled(job: Job) -> bool:
    """Return whether Megatron packs during training."""
    return not {"--sequence-packing-scheduler", "--use-varlen-dataset"}.isdisjoint(job.argv)


def patched_scheduler(wrong: str | None) -> contextlib.ExitStack:
    """Return a context in which Megatron's packing scheduler accepts this module's replacement for Transformer Engine.

    If ``wrong`` is ``one segment``, all sequences of a pack become one segment.
    """
    from megatron.core.datasets import data_schedule
    from megatron.core.transformer import transformer_config

    def whole(**named: Any) -> PackedSeqParams:
        ends = {name: bounds[[0, -1]] for name, bounds in named.items() if name.startswith("cu_seqlens")}
        return PackedSeqParams(**{**named, **ends})

    with contextlib.ExitStack() as entered:
        tex = mock.Mock(thd_get_partitioned_indices=partitioned)
        entered.enter_context(mock.patch.object(data_schedule, "tex", tex))
        entered.enter_context(mock.patch.object(transformer_config, "is_te_min_version", return_value=True))
        if wrong == "one segment":
            entered.enter_context(mock.patch.object(data_schedule, "PackedSeqParams", whole))
        return entered.pop_all()


def model_of(job: Job) -> type:
    """Return the class of the model. HybridModel does not exist before megatron-core 0.18."""
    if not job.hybrid:
        return GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel


def pretrain(job: Job) -> None:
    """Do the same as ``pretrain_gpt.py`` and ``pretrain_hybrid.py``, with another provider of data sets."""
    from megatron.training import argument_utils, arguments, training

    args = arguments.parse_and_validate_args()
    of_model = argument_utils.hybrid_config_from_args if job.hybrid else argument_utils.gpt_config_from_args
    config = argument_utils.pretrain_cfg_container_from_args(args, of_model(args))
    training.pretrain(config, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)


def script_of(job: Job, checkout: str) -> Path:
    """Return the script of a checkout for the model of a job."""
    return Path(checkout, "pretrain_hybrid.py" if job.hybrid else "pretrain_gpt.py")


def run_script(job: Job, checkout: str) -> None:
    """Run the script of a checkout for this model, with its provider replaced by one import."""
    path = script_of(job, checkout)
    source = path.read_text(encoding="utf-8")
    source = source.replace("def train_valid_test_datasets_provider", "def the_stock_one")
    source = source.replace(
        "if __name__ ==", f"from {PROVIDER} import train_valid_test_datasets_provider\nif __name__ =="
    )
    if "cu_seqlens = cu_seqlens[0]" not in source:  # 0.16, with the change of docs/megatron.md
        flat = "    if cu_seqlens is not None:\n        cu_seqlens = cu_seqlens.squeeze(0)"
        source = source.replace(POPPED, f"{POPPED}\n{flat}")
    exec(compile(source, str(path), "exec"), {"__name__": "__main__"})


def run(job: Job) -> Found:
    """Run Megatron's ``pretrain()`` with these arguments."""
    from megatron.training import training

    found = Found()
    log, evaluate = training.training_log, training.evaluate

    def watched_log(losses: dict[str, Tensor], total: Any, rate: Any, iteration: int, *args: Any, **named: Any) -> Any:
        if losses:  # the last pipeline stage has them
            found.losses.append(float(losses["lm loss"]))
            found.norms.append(float(args[3]))
        if iteration == job.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return log(losses, total, rate, iteration, *args, **named)

    def watched_evaluate(*args: Any, **named: Any) -> Any:
        result = evaluate(*args, **named)
        found.validation += [float(loss) for loss in result[0].values()]
        return result

    with contextlib.ExitStack() as entered:

        def patch(where: Any, name: str, stand_in: Any) -> None:
            entered.enter_context(mock.patch.object(where, name, stand_in))

        patch(training, "training_log", watched_log)
        patch(training, "evaluate", watched_evaluate)
        patch(training, "initialize_megatron", partial(training.initialize_megatron, allow_no_cuda=True))
        # It warms up kernels with as many random numbers as a micro-batch has, which would change the initial weights.
        patch(training, "set_jit_fusion_options", lambda **_: None)
        patch(sys, "argv", ["pretrain_gpt.py", *job.argv])
        if is_scheduled(job):
            entered.enter_context(patched_scheduler(job.wrong))
        elif job.wrong:
            patch(BatchAssembler, "fill", spoil(BatchAssembler.fill, job.wrong))
        if job.alone:
            trained = model_of(job)
            alone = Alone(trained.forward, job.alone, int(job.argv[job.argv.index("--seq-length") + 1]))

            def forward(model: Any, *args: Any, **named: Any) -> Tensor:
                return alone.forward(model, *args, **named)

            patch(trained, "forward", forward)
        try:
            if job.runner:
                script = script_of(job, CHECKOUT) if CHECKOUT else Path(__file__).with_name("stock_pretrain.py")
                runner.main([str(script), *job.argv])
            elif CHECKOUT:
                run_script(job, CHECKOUT)
            else:
                pretrain(job)
        except Exception as error:
            found.error = str(error) or repr(error)
    if job.alone:
        found.alone = alone.outcome()
    training.destroy_global_state()
    return found


def main(jobs: str, folder: str) -> None:
    torch.set_num_threads(1)
    for name, described in json.loads(Path(jobs).read_text(encoding="utf-8")).items():
        with without_cuda():
            found = run(Job(**described))
        rank = torch.distributed.get_rank()
        Path(folder, f"{name}.{rank}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
