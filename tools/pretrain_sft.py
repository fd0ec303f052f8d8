"""Train a language model on packed SFT data with megatron.core only: a script to read and to start from.

``hybrid_model.py`` makes the model, a ``HybridModel``. With megatron.core before 0.18, which does not have it,
``gpt_model.py`` makes a ``GPTModel``. ``live_training.py`` has the code for live data.

Runs with or without a GPU, in one process or under ``torchrun`` (data parallel)::

    python tools/pretrain_sft.py --data-path data/chats --seq-length 4096 --train-iters 1000
    torchrun --nproc-per-node 8 tools/pretrain_sft.py --data-path data/chats --seq-length 4096 --attention te --bf16

It can also train while the data is still being made, from a catalog or a folder of JSONL chunks::

    python tools/pretrain_sft.py --data-path live:data/catalog --seq-length 4096 --train-iters 20000

Options have the same names and meanings as in Megatron-LM. The same command resumes from the latest checkpoint, with
any number of processes. The exit code is 0 for success, 1 for an error, with a line that describes it, and 2 for a
wrong option.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

try:
    from megatron_sft_idx import PackedSFTDataset
except ImportError as error:  # torch or Megatron is missing
    raise SystemExit(f"{__file__}: {error}") from None

import torch
from gpt_model import (
    ATTENTION,
    build_gpt,
    connect,
    current_device,
    laid_out,
    megatron_device,
    model_inputs,
    seed_everything,
)
from live_training import LiveData, add_live_options, check_live_options, is_live, open_live
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from megatron_sft_idx.cli.options import add_read_options, positive, preprocess_arguments, read_options
from megatron_sft_idx.cli.preprocess import add_mask_options, add_row_options
from megatron_sft_idx.cli.streams import standard_streams
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.lines import log_line, print_lines, unescaped
from megatron_sft_idx.tokenize import encoding_options
from megatron_sft_idx.training.batch import Tensors
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.losses import file_names, files_of, mean_by_file, sums_by_file
from megatron_sft_idx.training.pretraining import PretrainingPacks
from megatron_sft_idx.training.provider import build_datasets
from megatron_sft_idx.training.rows import PackedBatchSampler, Rows, rows_of, stored_packs
from megatron_sft_idx.training.sources import PlannedPacks, StoredPacks

# From megatron.core 0.18 on.
HYBRID = find_spec("megatron.core.models.hybrid") is not None
if HYBRID:
    from hybrid_model import BLOCK, build_hybrid

# Called with every batch of this process before it is used.
Observer = Callable[[Tensors], None]
_LATEST = "latest_checkpointed_iteration.txt"
# The file that dist_checkpointing writes last: a checkpoint with this file is complete.
_WRITTEN_LAST = "metadata.json"
# The folder in --save for a checkpoint that is not yet complete.
_UNFINISHED = "unfinished"
# Parts of the error messages of gloo and NCCL collectives when another process has ended.
_LEFT_ALONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "communicator was aborted")


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, and only on rank 0."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        if os.environ.get("RANK", "0") == "0":
            log_line(f"{self.prog}: error: {message}")
        raise SystemExit(2)


class Renamed(argparse.Action):
    """An option that was renamed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        """Refuse the option and give its new name."""
        parser.error(f"{self.option_strings[0]} is now {self.const}, because torchrun has an option with the old name")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data-path",
        nargs="+",
        help=(
            "a prefix, folder or glob, local or at s3:// or msc://; or several with a weight before each, where"
            " pretrain:PREFIX can be a stock Megatron dataset; or live:FOLDER"
        ),
    )
    data.add_argument(
        "--split", help="shares of --data-path for training, validation and test, such as 98,1,1; default: 1,0,0"
    )
    data.add_argument(
        "--train-data-path", nargs="+", help="instead of --data-path: shards for training only, written in the same way"
    )
    data.add_argument(
        "--valid-data-path", nargs="+", help="shards for validation, with --train-data-path and --eval-iters"
    )
    data.add_argument("--data-cache-path", help="folder for cached indices")
    data.add_argument("--object-storage-cache-path", help="folder for the index files of shards at s3:// or msc://")
    data.add_argument("--seq-length", type=positive, required=True, help="number of positions in a training row")
    data.add_argument(
        "--repack", action="store_true", help="plan packs for --seq-length at start-up; no file is rewritten"
    )
    data.add_argument(
        "--ignore-media",
        action="store_true",
        help=(
            "train on shards with images or audio as if their placeholder tokens were text; without this option, such"
            " shards are rejected"
        ),
    )
    add_read_options(data)

    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=positive, default=2, help="number of layers (default: %(default)s)")
    model.add_argument("--hidden-size", type=positive, default=64, help="width of the layers (default: %(default)s)")
    model.add_argument(
        "--num-attention-heads", type=positive, default=4, help="attention heads of each layer (default: %(default)s)"
    )
    model.add_argument(
        "--vocab-size", type=positive, help="number of rows of the embedding; default: enough for the tokenizer"
    )
    model.add_argument(
        "--init-method-std",
        type=float,
        default=0.02,
        help="standard deviation of the initial weights (default: %(default)s)",
    )
    model.add_argument("--bf16", action="store_true", help="train in bfloat16; required for te")
    model.add_argument(
        "--attention",
        choices=ATTENTION,
        default="thd",
        help=(
            "thd: segment by segment, on any machine; mask: a block-diagonal mask; unpacked: one row per sequence;"
            " te: Transformer Engine's THD kernels, which need a GPU and --bf16, and which no test without a GPU has"
            " run (default: %(default)s)"
        ),
    )

    training = parser.add_argument_group("training")
    training.add_argument(
        "--micro-batch-size",
        type=positive,
        default=1,
        help="packs that a process computes at once (default: %(default)s)",
    )
    training.add_argument(
        "--global-batch-size",
        type=positive,
        default=4,
        help="packs of a step, on all processes together (default: %(default)s)",
    )
    training.add_argument(
        "--balance-attention", action="store_true", help="give all processes the same amount of attention to compute"
    )
    training.add_argument("--train-iters", type=int, help="number of steps; default: 50; required for live data")
    training.add_argument(
        "--eval-iters", type=int, default=0, help="number of validation steps after training (default: %(default)s)"
    )
    training.add_argument(
        "--lr", type=float, default=1e-3, help="learning rate, the same for all steps (default: %(default)s)"
    )
    training.add_argument(
        "--clip-grad", type=float, default=1.0, help="largest norm of the gradients (default: %(default)s)"
    )
    training.add_argument(
        "--weight-decay", type=float, default=0.01, help="weight decay of Adam (default: %(default)s)"
    )
    training.add_argument(
        "--seed",
        type=int,
        default=1234,
        help="seed of the order of packs and of the initial weights (default: %(default)s)",
    )
    training.add_argument(
        "--save",
        type=Path,
        help=(
            "folder for checkpoints; if it contains some, training resumes from the latest, unless --load has a later"
            " one"
        ),
    )
    training.add_argument(
        "--save-interval",
        type=int,
        default=0,
        help="steps between checkpoints; 0 saves only the last step, which is always saved (default: %(default)s)",
    )
    training.add_argument(
        "--load",
        type=Path,
        help=(
            "folder of checkpoints; training resumes from the latest, unless --save has one that is as late or later"
        ),
    )
    training.add_argument(
        "--finetune",
        action="store_true",
        help=(
            "load only the weights from --load and begin at step 0, on any data; once --save contains a checkpoint,"
            " the same command resumes from that"
        ),
    )
    training.add_argument(
        "--fresh",
        action="store_true",
        help=(
            "start from the beginning, regardless of what an earlier run has acknowledged; needs another --save folder"
        ),
    )
    training.add_argument(
        "--log-interval", type=int, default=1, help="steps between printed lines (default: %(default)s)"
    )
    training.add_argument(
        "--loss-by-source",
        action="store_true",
        help="also log the loss per input file; shards contain the file of each sequence",
    )
    training.add_argument(
        "--metrics",
        type=Path,
        help="write loss, gradient norm and the numbers of the packs of each step to this file, as JSON lines",
    )
    training.add_argument("--log", action=Renamed, const="--metrics", help=argparse.SUPPRESS)

    add_live_options(parser)
    add_row_options(parser.add_argument_group("live chunks of raw chats"), required=False)
    add_mask_options(parser)
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    check_data_paths(args, parser)
    try:
        if is_live(args):
            check_live_options(args)
        args.encoding = encoding_options(preprocess_arguments(args)) if args.tokenizer_model else None
    except FormatError as error:
        parser.error(str(error))
    if is_live(args) and args.loss_by_source:
        parser.error(
            "--loss-by-source does not work with live data, which does not record its input files; leave it out"
        )
    if args.save and find_spec("psutil") is None:  # without it, megatron.core hangs while it writes a checkpoint
        parser.error("--save needs psutil; install it with: pip install 'megatron-sft-idx[megatron]'")
    if args.hidden_size % args.num_attention_heads:
        parser.error(f"--hidden-size {args.hidden_size} is not a multiple of --num-attention-heads")
    check_checkpoints(args, parser)
    args.read = read_options(args, parser)
    args.train_iters = 50 if args.train_iters is None else args.train_iters
    args.consumed_train_samples = 0
    args.data_record = None  # not needed for live data: its states in a checkpoint have the same information
    return args


def check_data_paths(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse options for paths that contradict each other, and set the default of ``--split``."""
    if bool(args.data_path) == bool(args.train_data_path):
        parser.error("give either --data-path, or --train-data-path for training and --valid-data-path for validation")
    if args.valid_data_path and args.data_path:
        parser.error("--valid-data-path is for --train-data-path; give that instead of --data-path")
    if args.split and args.train_data_path:
        parser.error(
            f"--split {args.split} applies to --data-path, but --train-data-path is also given; leave one of them out"
        )
    if args.valid_data_path and not args.eval_iters:
        parser.error("--valid-data-path is only read with --eval-iters; give that too, such as --eval-iters 10")
    if args.train_data_path and args.eval_iters and not args.valid_data_path:
        parser.error(f"--eval-iters {args.eval_iters}: there is no validation data; give --valid-data-path")
    args.split = args.split or "1,0,0"  # also with --train-data-path, which trains on all of its shards


def check_checkpoints(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse unusable folders of checkpoints, and set ``args.load`` to the folder to resume from, if any.

    This is ``--save`` or ``--load``, whichever has the later checkpoint; if they are equal, ``--save``. If it is
    ``--load``, all complete checkpoints in ``--save`` must have lower numbers, so that none is overwritten.
    """
    try:
        loaded = latest_step(args.load) if args.load else None
        if args.load and loaded is None:
            parser.error(f"--load {args.load}: no checkpoint found")
        if args.save and args.save.exists() and not args.save.is_dir():
            parser.error(f"--save {args.save}: expected a folder or nothing, found a file")
        begun = latest_step(args.save) if args.save else None
    except FormatError as error:
        parser.error(str(error))
    if begun is not None and args.fresh:
        parser.error(
            f"--fresh: {args.save} contains the checkpoint of step {begun}, which new ones would overwrite; pass"
            " another --save folder, or move the old checkpoints away"
        )
    if args.finetune and loaded is None:
        parser.error("--finetune needs weights; pass --load, a folder of checkpoints")
    if args.finetune and begun is not None:  # resume this run instead
        args.finetune, args.load, loaded = False, None, None
    leads = os.environ.get("RANK", "0") == "0"
    if args.save and begun is None and loaded is None and (args.save / _UNFINISHED).exists() and leads:
        print_lines(
            [(f"{args.save / _UNFINISHED}: a killed run did not finish this checkpoint, and saved none before it")]
        )
    if args.finetune:
        return
    taken = loaded is not None and (begun is None or begun < loaded)
    if args.save and taken and (later := [step for step in whole_steps(args.save) if step > (loaded or 0)]):
        parser.error(
            f"--load {args.load}: resuming from step {loaded} would overwrite the checkpoint of step {later[0]} in"
            f" --save {args.save}; pass another --save folder, or write {later[-1]} to {args.save / _LATEST} to resume"
            " from the latest checkpoint there"
        )
    if begun is not None and loaded is not None and args.load.resolve() != args.save.resolve():
        held = f"--save {args.save} is at step {begun}, --load {args.load} at step {loaded}"
        if leads:
            print_lines([f"{held}: resuming from {'--load' if taken else '--save'}"])
    if begun is not None and not taken:
        args.load = args.save


def whole_steps(folder: Path) -> list[int]:
    """Return the step of each complete checkpoint in a folder, in ascending order."""
    found = [path.parent.name for path in folder.glob(f"iter_*/{_WRITTEN_LAST}")]
    return sorted(int(name.removeprefix("iter_")) for name in found if name.removeprefix("iter_").isdecimal())


def latest_step(folder: Path) -> int | None:
    """Return the step of the latest checkpoint in a folder; None if there is none.

    If the file with the number of the latest checkpoint is missing, this is the newest complete checkpoint.

    FormatError: the file cannot be read, or there are checkpoints but none is complete.
    """
    path = folder / _LATEST
    try:
        return int(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError):
        raise FormatError(
            f"{path}: expected the number of the latest checkpoint; write it here, as in iter_NNNNNNN"
        ) from None
    if whole := whole_steps(folder):
        return whole[-1]
    if torn := sorted(folder.glob("iter_*")):
        raise FormatError(
            f"{torn[-1]}: {_WRITTEN_LAST} is missing, and no other checkpoint in {folder} is complete; restore the"
            " missing files, or pass another folder to start from the beginning"
        )
    return None


def build_model(args: argparse.Namespace) -> DistributedDataParallel:
    """Build a model that is wrapped for data-parallel training."""
    config = TransformerConfig(
        num_layers=args.num_layers * len(BLOCK) if HYBRID else args.num_layers,
        is_hybrid_model=HYBRID,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        init_method_std=args.init_method_std,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        use_cpu_initialization=not torch.cuda.is_available(),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # These fused kernels are extensions that do not come with megatron.core.
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bf16=args.bf16,
        pipeline_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        # Every trained token has the same weight, independent of its pack, micro-batch and rank.
        calculate_per_token_loss=True,
    )
    build = build_hybrid if HYBRID else build_gpt
    model = build(config, args.attention, args.vocab_size, args.seq_length).to(current_device())
    inner = Float16Module(config, model) if args.bf16 else model
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), inner)
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def build_optimizer(args: argparse.Namespace, model: DistributedDataParallel) -> MegatronOptimizer:
    config = OptimizerConfig(
        optimizer="adam", lr=args.lr, weight_decay=args.weight_decay, clip_grad=args.clip_grad, bf16=args.bf16
    )
    return get_megatron_optimizer(config, [model])


def loss_function(
    loss_mask: Tensor, files: Tensor | None, count: int, losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the summed loss, its divisor, and a report of both; divide after summing over micro-batches and ranks.

    If the files of the positions are given, ``count`` of them, both values are also reported per file.

    The divisor is counted as in Megatron-LM: the sum of the weights of a micro-batch, truncated to an integer. For a
    mask of 0 and 1, this is the number of trained tokens.
    """
    loss = (losses.float() * loss_mask).sum()
    trained = loss_mask.float().sum().int()
    report = {"lm loss": torch.stack([loss.detach(), trained])}
    if files is not None:
        report["by source"] = sums_by_file(losses, loss_mask, files, count)
    return loss, trained, report


def forward_step(
    args: argparse.Namespace,
    observe: Observer | None,
    sources: Sequence[str],
    batches: Iterator[Tensors],
    model: DistributedDataParallel,
) -> tuple[Tensor, Any]:
    """Run one micro-batch through the model, as ``forward_backward_func`` requires."""
    batch = next(batches)
    if observe:
        observe(batch)
    batch = {key: value.to(current_device(), non_blocking=True) for key, value in batch.items()}
    inputs, loss_mask = model_inputs(batch, args.attention)
    files = laid_out({**batch, "files": files_of(batch)}, args.attention, ["files"])["files"] if sources else None
    return model(**inputs), partial(loss_function, loss_mask, files, len(sources))


def run_step(
    args: argparse.Namespace,
    model: DistributedDataParallel,
    batches: Iterator[Tensors],
    *,
    forward_only: bool = False,
    observe: Observer | None = None,
    by_source: dict[str, float] | None = None,
) -> float:
    """Run all micro-batches of a global batch, with backward unless ``forward_only``; return the mean trained loss.

    Args:
        args: the result of ``parse_arguments``.
        model: the result of ``build_model``.
        batches: micro-batches of this process.
        forward_only: do not train.
        observe: called with every micro-batch before it is used.
        by_source: the names of the input files; receives their mean losses.
    """
    sources = list(by_source or ())
    micro_batches = args.global_batch_size // (args.micro_batch_size * parallel_state.get_data_parallel_world_size())
    reports = get_forward_backward_func()(
        forward_step_func=partial(forward_step, args, observe, sources),
        data_iterator=batches,
        model=[model],
        num_microbatches=micro_batches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    total = torch.stack([report["lm loss"] for report in reports]).double().sum(0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    if by_source:
        sums = torch.stack([report["by source"] for report in reports]).sum(0)
        torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        by_source.clear()
        by_source.update(mean_by_file(sums, sources))
    return float(total[0] / total[1].clamp(min=1))


def checkpoint_state(
    model: DistributedDataParallel, optimizer: MegatronOptimizer, *, loading: bool = False
) -> dict[str, Any]:
    """Return the content of a checkpoint, sharded so that any number of processes can write and read it."""
    weights = model.module.sharded_state_dict()
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading)}


def save_checkpoint(args: argparse.Namespace, step: int, model: Any, optimizer: Any, live: LiveData | None) -> None:
    """Write ``iter_N`` in ``--save``; it is the latest checkpoint once the file with the latest number is replaced.

    The folder gets this name only when it is complete. An incomplete ``iter_N`` is therefore not the result of a kill.
    """
    target, first = args.save / f"iter_{step:07d}", torch.distributed.get_rank() == 0
    unfinished = args.save / _UNFINISHED
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a run that was killed
        unfinished.mkdir(parents=True)
    torch.distributed.barrier()
    common = {"step": step, "samples": args.consumed_train_samples, "data": args.data_record}
    common |= {"live": live.gather_states()} if live else {}
    dist_checkpointing.save({**checkpoint_state(model, optimizer), **common}, str(unfinished))
    if first:
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
        fresh = args.save / "latest.tmp"
        fresh.write_text(str(step), encoding="utf-8")
        fresh.replace(args.save / _LATEST)
        print_lines([f"saved {target}"])
    if live:
        live.commit()  # data that the checkpoint covers will not be read again, so its producer may remove it


class Begun(NamedTuple):
    """The checkpoint to resume from; the defaults mean that there is none.

    Attributes:
        source: its folder.
        steps: number of steps that were done.
        samples: number of samples that were consumed; the batch size may have been different.
        data: the ``data_record`` of its run; None if the checkpoint has none, for example after live data.
    """

    source: str = ""
    steps: int = 0
    samples: int = 0
    data: dict[str, Any] | None = None


def latest_checkpoint(folder: Path) -> Path:
    """Return the latest checkpoint in a folder that has at least one. FormatError: it is missing."""
    latest = folder / f"iter_{latest_step(folder) or 0:07d}"
    if not latest.is_dir():
        raise FormatError(
            f"{latest}: missing, but {_LATEST} refers to it; restore it, or write the number of another checkpoint to"
            f" {_LATEST}"
        )
    return latest


def begun(args: argparse.Namespace) -> Begun:
    """Return the checkpoint to resume from. With ``--finetune``, only weights are loaded and nothing is resumed."""
    if args.load is None or args.finetune:
        return Begun()
    source = latest_checkpoint(args.load)
    found = dist_checkpointing.load_common_state_dict(str(source))
    return Begun(str(source), found["step"], found["samples"], found.get("data"))


def sources_of(dataset: Any) -> list[StoredPacks | PlannedPacks | PretrainingPacks]:
    """Return the source of packs of a data set, or of each member of a blend; empty for live data or no data."""
    members = getattr(dataset, "datasets", [dataset])
    return [member.source for member in members if isinstance(member, PackedSFTDataset)]


def data_record(args: argparse.Namespace, dataset: Any) -> dict[str, Any]:
    """Return what determines the batches of finished data and their order: options, and the ids of the shards."""
    data_path = args.data_path or args.train_data_path
    paths, weights = get_blend_from_list(data_path)
    shares = [1.0] * len(paths) if weights is None else [round(weight / sum(weights), 9) for weight in weights]
    shards = [(source.content, share) for source, share in zip(sources_of(dataset), shares, strict=True)]
    # Packs that are planned at start-up and rows of pretraining data also depend on the sequence length.
    corpora = [source for source in sources_of(dataset) if isinstance(source, PretrainingPacks)]
    length = {"--seq-length": args.seq_length} if args.repack or corpora else {}
    options = {"--seed": args.seed, "--split": args.split, "--repack": args.repack, **length}
    orders = [source.order() for source in corpora]
    return {"options": options, "--data-path": " ".join(data_path), "shards": shards, "orders": orders}


def require_same_data(source: str, was: dict[str, Any] | None, now: dict[str, Any]) -> None:
    """Raise FormatError if a checkpoint's samples are not the first ones of this run: some would be repeated or lost.

    Shards may have moved; they are compared by their ids.
    """
    remedy = (
        "samples would be repeated or missing; use the old value, or start again with another --save, and with"
        " --finetune from these weights"
    )
    if was is None:
        raise FormatError(
            f"{source}: does not record which data its run used, perhaps because that was live data; pass the same"
            " live data, or start again with another --save, and with --finetune from these weights"
        )
    for option, value in now["options"].items():
        old = was["options"].get(option)
        same = old == value
        if option == "--split":
            same = parse_and_normalize_split(old) == parse_and_normalize_split(value)
        if not same:
            raise FormatError(f"{source}: its run had {option} {old}, this one has {option} {value}: {remedy}")
    if was["shards"] == now["shards"]:
        if was.get("orders", []) != now["orders"]:
            raise FormatError(
                f"{source}: its run had pretraining data in another order, because the order depends on the number of"
                f" epochs, and so on --train-iters and --global-batch-size: {remedy}"
            )
        return
    old, new = was["--data-path"], now["--data-path"]
    if old == new:
        raise FormatError(f"{source}: the shards at {new} have changed since its run began: {remedy}")
    raise FormatError(
        f"{source}: its run had the data path {old}, this one has {new}, with other shards or weights: {remedy}"
    )


def use_names_of(source: str, args: argparse.Namespace, state: dict[str, Any]) -> None:
    """Rename the tensors of a state to the names in a checkpoint, which may have the other model class.

    FormatError: Megatron does not convert between the two.
    """
    names = dist_checkpointing.load_tensors_metadata(source)
    if ("decoder.final_norm.weight" in names) == HYBRID:
        return
    if not HYBRID:
        raise FormatError(
            f"{source}: contains a HybridModel, which needs megatron-core 0.18 or later; use the version that wrote it"
        )
    if find_spec("megatron.core.dist_checkpointing.gpt_checkpoint_interop") is None:
        raise FormatError(
            f"{source}: contains a GPTModel, which can be loaded into a HybridModel from megatron-core 0.19 on; use"
            " that version, or the version that wrote it"
        )
    from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop

    maps = interop.gpt_compatible_layer_maps(BLOCK * args.num_layers)
    interop.retarget_sharded_state_dict_to_gpt_checkpoint(state, maps)


def load_checkpoint(
    args: argparse.Namespace, model: DistributedDataParallel, optimizer: MegatronOptimizer, live: LiveData | None
) -> int:
    """Load the checkpoint to resume from, or only weights, if there are any; return the number of steps done."""
    if args.finetune:
        weights = latest_checkpoint(args.load)
        state = {"model": model.module.sharded_state_dict()}
        use_names_of(str(weights), args, state)
        found = dist_checkpointing.load(state, str(weights))
        model.module.load_state_dict(found["model"])
        optimizer.reload_model_params()  # it may have a float32 copy of them
        if torch.distributed.get_rank() == 0:
            print_lines([f"starting with the weights of {weights}"])
    source, step, _, _ = begun(args)
    if source:
        state = checkpoint_state(model, optimizer, loading=True)
        use_names_of(source, args, state)
        found = dist_checkpointing.load(state, source)
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        if live:
            live.load_states(found.get("live"))
        if torch.distributed.get_rank() == 0:
            print_lines([f"resuming from {source}, after {step} steps"])
    return step


class Log:
    """Log one line per step on the first process: to the terminal, and as JSON if requested.

    The JSON also has the packs of the step on all processes, if ``rows`` are given.
    """

    def __init__(self, args: argparse.Namespace, rows: Rows | None) -> None:
        self.speaks = torch.distributed.get_rank() == 0
        self.interval, self.path, self.begin = args.log_interval, args.metrics, time.perf_counter()
        self.rows = rows

    def __call__(self, step: int, samples: range, **values: float) -> None:
        """Log the values of a step and the packs of its samples."""
        if not self.speaks:
            return
        if self.path:
            packs = {"packs": stored_packs(self.rows, samples)} if self.rows is not None else {}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values, **packs}) + "\n")
        if step % self.interval == 0:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
            self.say(f"step {step:>6}  {shown}  {time.perf_counter() - self.begin:.1f} s")

    def say(self, line: str) -> None:
        """Print a line on the first process only."""
        if self.speaks:
            print_lines([line])


def train(
    args: argparse.Namespace,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    batches: Iterator[Tensors],
    *,
    step: int = 0,
    observe: Observer | None = None,
    live: LiveData | None = None,
    rows: Rows | None = None,
) -> list[float]:
    """Train from ``step`` to the last step, or to the end of live data; return the loss of every step.

    Args:
        args: the result of ``parse_arguments``.
        model: the result of ``build_model``.
        optimizer: the optimizer of the model.
        batches: micro-batches of this process.
        step: number of steps already done.
        observe: called with every micro-batch before it is used.
        live: the source of the batches, if it is live data.
        rows: the samples of the batches, whose packs are logged; None for live data.
    """
    log, losses, saved = Log(args, rows), [], step
    sources = file_names(rows.assembler.source_files) if rows is not None and args.loss_by_source else ()
    model.train()
    for now in range(step + 1, args.train_iters + 1):
        if live and args.save and live.is_blocked():
            # The producer waits for a checkpoint to complete shards, and the next step may need data not yet made.
            if saved < now - 1:
                save_checkpoint(args, now - 1, model, optimizer, live)
                saved = now - 1
            if live.is_blocked():
                live.deal_anew()
        # Live data ends for all processes at the same time, between two steps.
        if (first := next(batches, None)) is None:
            log.say(f"the data ended after step {now - 1}, before --train-iters {args.train_iters}")
            break
        model.zero_grad_buffer()
        optimizer.zero_grad()
        by_source = dict.fromkeys(sources, 0.0)
        loss = run_step(args, model, itertools.chain([first], batches), observe=observe, by_source=by_source)
        _, norm, _ = optimizer.step()
        losses.append(loss)
        samples = range(args.consumed_train_samples, args.consumed_train_samples + args.global_batch_size)
        args.consumed_train_samples = samples.stop
        of_files = {f"loss of {name}": loss for name, loss in by_source.items()}
        log(now, samples, loss=loss, grad_norm=float(norm), **of_files)
        if args.save and args.save_interval and now % args.save_interval == 0:
            save_checkpoint(args, now, model, optimizer, live)
            saved = now
    if args.save and step + len(losses) > saved:
        save_checkpoint(args, step + len(losses), model, optimizer, live)
    return losses


def vocabulary_of(dataset: Any, wanted: int | None = None) -> int:
    """Return the rows of the embedding: ``wanted``, or the size of the data's tokenizer rounded up to suit a GPU.

    FormatError: the data does not record the size of its tokenizer, or the size is above ``wanted``.
    """
    known: list[int | None]
    if isinstance(dataset, LiveData):
        known = [dataset.vocab_size]
    else:
        chats = [source.shards for source in sources_of(dataset) if not isinstance(source, PretrainingPacks)]
        headers = [header for shards in chats for header in shards.headers]
        known = [header.metadata.get("tokenizer", {}).get("vocab_size") for header in headers]
    if wanted is None and None in known:
        raise FormatError("the data does not record the size of the tokenizer's vocabulary; pass --vocab-size")
    most = max((size for size in known if size is not None), default=0)
    enough = -(-most // 128) * 128
    if wanted is not None and wanted < most:
        raise FormatError(
            f"--vocab-size {wanted}: the data's tokenizer has {most} tokens; leave it out for {enough}, or raise it"
        )
    return wanted or enough


def load_batches(args: argparse.Namespace, dataset: Any, consumed: int) -> Iterator[Tensors]:
    """Return micro-batches for this process, after ``consumed`` samples of all processes."""
    rows = rows_of(dataset)
    sampler = PackedBatchSampler(
        rows,
        consumed_samples=consumed,
        micro_batch_size=args.micro_batch_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        global_batch_size=args.global_batch_size,
        balance_attention=args.balance_attention,
    )
    return iter(BatchLoader(rows.assembler, rows.micro_batches(sampler)))


def evaluate(args: argparse.Namespace, model: DistributedDataParallel, batches: Iterator[Tensors]) -> float:
    """Return the mean loss of ``--eval-iters`` global batches."""
    model.eval()
    with torch.no_grad():
        losses = [run_step(args, model, batches, forward_only=True) for _ in range(args.eval_iters)]
    return sum(losses) / len(losses)


def pretrain(args: argparse.Namespace, observe: Observer | None = None) -> list[float]:
    """Run the whole training in an existing process group; return the losses of the steps."""
    if is_live(args):
        with open_live(args, args.encoding) as live:
            return fit(args, live, None, observe)
    source, step, args.consumed_train_samples, data = begun(args)
    to_come = [steps * args.global_batch_size for steps in (max(args.train_iters - step, 0), args.eval_iters)]
    samples = [args.consumed_train_samples + to_come[0], to_come[1], 0]
    options = {"index_only_packing": args.repack, "read": args.read, "columns": ("source",) * args.loss_by_source}
    training, validation, _ = build_datasets(args, samples, **options)
    args.data_record = data_record(args, training)
    if source:
        require_same_data(source, data, args.data_record)
    return fit(args, training, validation, observe)


def fit(args: argparse.Namespace, training: Any, validation: Any, observe: Observer | None) -> list[float]:
    """Train a new model, or a model from a checkpoint, and evaluate it."""
    args.vocab_size = vocabulary_of(training, args.vocab_size)
    for dataset in (training, validation):
        for source in sources_of(dataset):
            if isinstance(source, PretrainingPacks):  # it has no header with the size of the tokenizer
                source.vocab_size = args.vocab_size
    seed_everything(args.seed)
    model = build_model(args)
    optimizer = build_optimizer(args, model)
    live = training if isinstance(training, LiveData) else None
    step = load_checkpoint(args, model, optimizer, live)
    losses: list[float] = []
    if step >= args.train_iters and torch.distributed.get_rank() == 0:
        print(f"nothing to train: --train-iters {args.train_iters}", flush=True)
    if step < args.train_iters:
        rows = None if live else rows_of(training)
        batches = live or load_batches(args, training, args.consumed_train_samples)
        losses = train(args, model, optimizer, batches, step=step, observe=observe, live=live, rows=rows)
    if args.eval_iters:
        loss = evaluate(args, model, load_batches(args, validation, 0))
        if torch.distributed.get_rank() == 0:
            print(f"validation  loss {loss:.4f}", flush=True)
    return losses


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Report errors of data, options and files in one line on standard error, and exit with 1.

    If several processes have the same error, only one reports it. A process whose collective failed because another
    process ended reports nothing if another process has reported an error. Bugs keep their traceback.
    """
    left_alone = False
    try:
        yield
    except (SFTIndexError, CheckpointingException, OSError, ImportError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
    except RuntimeError as error:
        # torchrun ends the remaining processes of a job; the process that failed has reported the reason.
        if not any(words in str(error) for words in _LEFT_ALONE):
            raise
        left_alone, message = True, "another process has failed; see its message"
    else:
        return
    with contextlib.suppress(Exception):  # the store may have ended with the first process
        said = _get_default_store().add("said", 1) > 1
        if _get_default_store().add(f"said {message}", 1) > 1 or (left_alone and said):
            raise SystemExit(1)
    log_line(f"{Path(__file__).name}: error: {message}")
    raise SystemExit(1)


def end_with_launcher() -> None:
    """End this process within seconds if it was started by ``torchrun`` and ``torchrun`` was killed.

    Without this, ranks would continue training without their launcher and keep their devices.
    """
    if not torch.distributed.is_torchelastic_launched():
        return
    launcher = os.getppid()
    words = f"{Path(__file__).name}: error: torchrun (process {launcher}) has ended, so this rank ends too"

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        # In a separate thread, because writing to a full pipe without a reader would block.
        speaker = threading.Thread(target=log_line, args=(words,), daemon=True)
        speaker.start()
        speaker.join(2)
        if os.getpgrp() == os.getpid():  # the case under torchrun: also end processes of this rank, as for checkpoints
            os.killpg(0, signal.SIGKILL)
        os._exit(1)  # even if the main thread waits, for example for other ranks

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def main() -> None:
    end_with_launcher()
    with standard_streams():  # a closed pipe or a full disk does not end the training
        # Output of libraries contains line ends; lines of this script are escaped where they are made.
        sys.stdout, sys.stderr = unescaped(sys.stdout), unescaped(sys.stderr)
        args = parse_arguments()
        logging.basicConfig(format="%(message)s")
        logging.getLogger("megatron_sft_idx").setLevel(logging.INFO)
        with one_line_errors(), megatron_device():
            connect()
            parallel_state.initialize_model_parallel()
            pretrain(args)
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except SystemExit as ending:
        if not (isinstance(ending.code, int) and torch.distributed.is_initialized()):
            raise
        for started in multiprocessing.active_children():  # such as Megatron's checkpoint workers, which wait for work
            started.kill()
        # Torch may abort if Python ends while threads of the group run, and ending them may wait for other ranks.
        os._exit(ending.code)
