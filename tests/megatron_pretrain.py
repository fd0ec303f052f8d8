"""One rank of Megatron-LM's own ``pretrain()``, on the CPU and on our provider: jobs of a JSON file, under torchrun.

``megatron_setups`` starts it: ``torchrun ... tests/megatron_pretrain.py JOBS FOLDER`` runs each job, named in JOBS and
described by ``Job``, and leaves ``FOLDER/NAME.RANK.json``: what Megatron itself said of every step. What is
done to Megatron for want of a GPU is in ``without_cuda``; its own loop, samplers, loaders, broadcasts, model, optimizer
and checkpoints run as they are. Where MEGATRON_LM names a checkout, that one is run, its ``pretrain_gpt.py`` and
``pretrain_hybrid.py`` included; otherwise the installed wheel, which lacks these scripts, so that ``forward_step`` here
stands in for those there.
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

# Of Megatron-LM, to be run in place of what is installed.
CHECKOUT = os.environ.get("MEGATRON_LM")
PROVIDER = "megatron_sft_idx.training.provider"
POPPED = "    cu_seqlens_padded = batch.pop('cu_seqlens_padded', None)"
KEYS = (
    *("attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels", "local_cp_size", "loss_mask"),
    *("max_seqlen", "position_ids", "tokens"),
)


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        argv: arguments of Megatron-LM, those that make it a tiny model on the CPU included.
        hybrid: the model is HybridModel, not GPTModel.
        kill_after: this step is the last; then the process kills itself. None runs to the end.
        alone: prefix of a shard: the loss of every trained segment in its packs, alone in the model, is compared.
        runner: whether ``python -m megatron_sft_idx.pretrain`` runs the script, which is not edited then.
        wrong: what is done wrong on purpose: ``one segment`` for the whole row, ``mask late`` by one position.
    """

    argv: list[str]
    hybrid: bool = False
    kill_after: int | None = None
    alone: str | None = None
    runner: bool = False
    wrong: str | None = None


@dataclass
class Found:
    """What a run left.

    Attributes:
        losses: of every step, as Megatron reports it.
        norms: of the gradient, of every step.
        validation: every loss of an evaluation.
        alone: the largest relative difference of a segment's loss in its pack to its loss alone, and how many segments
            were compared.
        error: what the run ended with, if it did not run to its end.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    alone: tuple[float, int] = (0.0, 0)
    error: str | None = None


# ---- Megatron without CUDA ----


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """While entered, a GPU that is this CPU: what Megatron's training asks of ``torch.cuda`` beyond its core."""
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
        if not CHECKOUT:  # a wheel has them compiled, and no makefile
            entered.enter_context(mock.patch.object(dataset_utils, "compile_helpers", nothing))
        entered.enter_context(mock.patch.object(core_utils, "tex", mock.Mock(thd_get_partitioned_indices=partitioned)))
        entered.enter_context(megatron_device())
        yield


# ---- what pretrain_gpt.py does, which no wheel has ----


def get_batch(batches: Iterator[dict[str, Tensor]] | None) -> dict[str, Any]:
    """A micro-batch, on every rank what that rank is to compute."""
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
    """As there: the masked sum, the whole number it is divided by, and both to report."""
    loss = (losses.view(-1).float() * loss_mask.view(-1)).sum()
    tokens = loss_mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def params_of(batch: dict[str, Any]) -> PackedSeqParams | None:
    """The boundaries; as there, the padded ones in place of the others too, which Transformer Engine needs."""
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


# ---- a run, watched ----


class Alone:
    """Compares the loss of each trained segment inside its pack with its loss alone in the model.

    What the segments are is asked of the shard, not of the batch.

    Args:
        forward: of the model's class.
        prefix: of the shard.
        length: of a row.
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
        """The largest relative difference, NaN where a loss is, and how many segments were compared."""
        return difference(self._found, self._expected), len(self._found)

    def forward(self, model: Any, tokens: Tensor, *args: Any, **named: Any) -> Tensor:
        """In place of the model's own, which it calls."""
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
    """``BatchAssembler.fill`` with a mistake."""

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
    """Whether Megatron packs as it trains."""
    return not {"--sequence-packing-scheduler", "--use-varlen-dataset"}.isdisjoint(job.argv)


def patched_scheduler(wrong: str | None) -> contextlib.ExitStack:
    """Entered, Megatron's packing scheduler takes what is here for the Transformer Engine that it asks for.

    It makes ``one segment`` of all sequences of a pack where that is ``wrong``.
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
    """The class that is trained. HybridModel is missing before megatron-core 0.18."""
    if not job.hybrid:
        return GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel


def pretrain(job: Job) -> None:
    """As ``pretrain_gpt.py`` and ``pretrain_hybrid.py`` do, but for the provider of the data sets."""
    from megatron.training import argument_utils, arguments, training

    args = arguments.parse_and_validate_args()
    of_model = argument_utils.hybrid_config_from_args if job.hybrid else argument_utils.gpt_config_from_args
    config = argument_utils.pretrain_cfg_container_from_args(args, of_model(args))
    training.pretrain(config, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)


def script_of(job: Job, checkout: str) -> Path:
    """The script of a checkout for the model of a job."""
    return Path(checkout, "pretrain_hybrid.py" if job.hybrid else "pretrain_gpt.py")


def run_script(job: Job, checkout: str) -> None:
    """The script of a checkout for this model, with one import in place of its provider."""
    path = script_of(job, checkout)
    source = path.read_text(encoding="utf-8")
    source = source.replace("def train_valid_test_datasets_provider", "def the_stock_one")
    source = source.replace(
        "if __name__ ==", f"from {PROVIDER} import train_valid_test_datasets_provider\nif __name__ =="
    )
    if "cu_seqlens = cu_seqlens[0]" not in source:  # 0.16, as docs/megatron.md mends it
        flat = "    if cu_seqlens is not None:\n        cu_seqlens = cu_seqlens.squeeze(0)"
        source = source.replace(POPPED, f"{POPPED}\n{flat}")
    exec(compile(source, str(path), "exec"), {"__name__": "__main__"})


def run(job: Job) -> Found:
    """Megatron's ``pretrain()`` with these arguments, from start to end."""
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
        # It warms up kernels with random numbers, as many as a micro-batch has: models would begin otherwise.
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
