"""Live data for a training script with Megatron's arguments: options, the loader, and states in checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.layout.files import stated_in
from megatron_sft_idx.lines import get_logger
from megatron_sft_idx.live.acks import ack_folder, newest_acks
from megatron_sft_idx.live.catalog import Catalog, Limits, default_max_sequences
from megatron_sft_idx.live.catalog_shards import CatalogShards
from megatron_sft_idx.live.chunks import LiveChunks, chunks_in, declaring_end
from megatron_sft_idx.live.live_loader import LiveConfig, LiveLoader
from megatron_sft_idx.live.live_order import Deal, RankState, states_from_json, states_to_json
from megatron_sft_idx.live.live_shards import LiveShards
from megatron_sft_idx.live.waiting import Waiter
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.tokenize import EncodingOptions
from megatron_sft_idx.training import Tensors, parallel_multiple

logger = get_logger("megatron_sft_idx.live")

LIVE = "live:"
# Options that are only for chunks. If one is given, the folder has chunks or will have them.
_OF_CHUNKS = ("tokenizer_model", "samples_per_chunk", "num_chunks", "end_after")


def add_live_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that go with ``--data-path live:FOLDER``."""
    live = parser.add_argument_group("live data (--data-path live:FOLDER)")
    live.add_argument(
        "--live-end",
        choices=("pad", "drop"),
        default="pad",
        help="how to make all ranks end with the same step: add rows without loss, or drop rows (default: %(default)s)",
    )
    chunks = parser.add_argument_group("live chunks (FOLDER/chunk_00000.jsonl, ...)")
    for group, table in ((live, _LIVE_OPTIONS), (chunks, _CHUNK_OPTIONS)):
        for option, kind, _, default, unit, what in table:
            said = what if default is None else f"{what} (default: %(default)s)"
            group.add_argument(f"--{option}", type=kind, default=default, metavar=unit, help=said)


# Name, type, minimum, default, metavar and help of each option.
_LIVE_OPTIONS: tuple[tuple[str, type, int | None, Any, str, str], ...] = (
    ("live-window", int, 0, 1, "N", "shards of a rank to shuffle together; 0 reads packs in the stored order"),
    ("max-wait", float, 0, 540.0, "SECONDS", "give up on a shard after this long; below the collectives' timeout"),
    ("consumer", str, None, "train", "NAME", "name of this run among the runs that read the folder"),
    ("ack-dir", str, None, None, "FOLDER", "write acknowledgements to this folder instead of the data's folder"),
)
_END_AFTER = "stop after this long without a new or growing chunk, for producers that do not mark the end"
_MOST_SEQUENCES = (
    "maximum for packed lines, or for chats with --earlier-reasoning split; default: 1 per 32 tokens, but at least 64"
)
_CHUNK_OPTIONS: tuple[tuple[str, type, int | None, Any, str, str], ...] = (
    ("max-sequences-per-pack", int, 1, None, "N", _MOST_SEQUENCES),
    ("samples-per-chunk", int, 1, None, "N", "samples in every chunk but the last; another number is an error"),
    ("consumers", int, 1, 1, "N", "runs that read the folder; a chunk is completed once all have committed it"),
    ("num-chunks", int, 0, None, "N", "total number of chunks, if it is known"),
    ("end-after", float, 0, None, "SECONDS", _END_AFTER),
    ("settle", float, 0, 5.0, "SECONDS", "the newest chunk is complete when it has not changed for this long"),
)


def is_live(args: argparse.Namespace) -> bool:
    """Return whether ``--data-path`` is live data."""
    return any(path.startswith(LIVE) for path in args.data_path or ())


def check_live_options(args: argparse.Namespace) -> None:
    """Raise FormatError if other options cannot be combined with live data, or a number is too small.

    Args:
        args: the arguments of Megatron, of ``add_live_options`` and of the script.
    """
    name = " ".join(args.data_path)
    if len(args.data_path) > 1:
        raise FormatError(
            f"--data-path {name}: a blend needs the amount of data in each part, which is unknown for live data;"
            " produce one catalog from all inputs, or train on finished folders"
        )
    require_local(args.data_path[0][len(LIVE) :], "live data")
    if args.ack_dir is not None:
        require_local(args.ack_dir, "a folder of acknowledgements")
    if args.train_iters is None:
        raise FormatError(f"--data-path {name}: the amount of live data is unknown; pass --train-iters")
    for option, off, why in (
        ("split", "1,0,0", "live data cannot be split into parts"),
        ("eval_iters", 0, "live data is only for training; evaluate on a finished folder"),
        ("repack", False, "packs are planned over all sequences, and most do not exist yet; let the producer pack"),
        ("balance_attention", False, "each rank reads different shards, so packs are not distributed over the ranks"),
        ("data_cache_path", None, "there is no index to build"),
    ):
        if getattr(args, option, None) not in (off, None):  # the script may lack the option or a default for it
            raise FormatError(f"--data-path {name}: leave out --{option.replace('_', '-')}: {why}")
    for option, _, least, *_ in (*_LIVE_OPTIONS, *_CHUNK_OPTIONS):
        value = getattr(args, option.replace("-", "_"))
        if least is not None and value is not None and not value >= least:  # also refuses NaN
            raise FormatError(f"--{option} {value}: expected {least} or more")
    if getattr(args, "chat_template", None) and not args.tokenizer_model:
        raise FormatError("--chat-template is for raw chats, which also need --tokenizer")


def open_live(args: argparse.Namespace, encoding: EncodingOptions | None = None) -> LiveData:
    """Open the live data of this process's data-parallel rank; returns a context manager.

    Args:
        args: the arguments of Megatron and of ``add_live_options``.
        encoding: how to convert lines of chunks to sequences, if they are raw chats.

    Raises:
        FormatError: the arguments do not fit the content of the folder.
        SFTIndexError: no data came into the folder in time.
    """
    folder = args.data_path[0][len(LIVE) :]
    chunks = any(getattr(args, name) is not None for name in _OF_CHUNKS) or _holds_chunks(folder, args.max_wait)
    tensor = args.tensor_model_parallel_size if getattr(args, "sequence_parallel", False) else 1
    multiple = parallel_multiple(getattr(args, "context_parallel_size", 1), tensor)
    shards: LiveShards = CatalogShards(folder, max_wait=args.max_wait)
    if chunks:
        alone = encoding is not None and encoding.masks.earlier_reasoning != "split"
        most = 1 if alone else args.max_sequences_per_pack or default_max_sequences(args.seq_length)
        shards = LiveChunks(
            folder,
            Limits(args.seq_length, most, multiple),
            encoding,
            args.vocab_size,
            getattr(args, "on_bad_row", "error"),
            samples_per_chunk=args.samples_per_chunk,
            num_chunks=args.num_chunks,
            end_folders=(folder, args.ack_dir) if args.ack_dir else (folder,),
            settle_seconds=args.settle,
            max_wait=args.max_wait,
            acks=ack_folder(Catalog(folder), args.ack_dir),
            consumers=args.consumers,
        )
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    step_rows = args.micro_batch_size * size
    if args.global_batch_size % step_rows:
        raise FormatError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size"
            f" {args.micro_batch_size} x {size} data-parallel ranks"
        )
    config = LiveConfig(
        rank=rank,
        size=size,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        micro_batches=args.global_batch_size // step_rows,
        shuffle=args.live_window > 0,
        window=max(args.live_window, 1),
        seed=args.seed,
        at_end=args.live_end,
        sequence_multiple=multiple,
        consumer=args.consumer,
        ack_dir=args.ack_dir,
        ignore_media=getattr(args, "ignore_media", False),
    )
    leads = _leads() and not rank
    _require_first(args, shards)
    if args.save is None and leads:
        logger.warning(
            "%s: without --save, the run acknowledges nothing. So no completed shard is removed, and a producer with"
            " --max-ahead-shards or --max-ahead-gb will wait forever; pass --save",
            folder,
        )
    ending: AbstractContextManager[None] = nullcontext()
    if isinstance(shards, LiveChunks) and args.end_after is not None and leads:
        ending = declaring_end(folder, args.end_after, shards.end_folders)
    return LiveData(shards, config, ending)


def _require_first(args: argparse.Namespace, shards: LiveShards) -> None:
    """Raise FormatError if a run with ``--save`` would start over although an earlier run has acknowledged data."""
    goes_on = args.load is not None and not getattr(args, "finetune", False)
    if args.save is None or goes_on or args.fresh:
        return
    acks = newest_acks(ack_folder(Catalog(shards.folder), args.ack_dir), args.consumer)
    if any(ack.items_done or ack.deal != ack.deal.of_epoch(0) for ack in acks):
        raise FormatError(
            f"{shards.folder}: consumer {args.consumer!r} has acknowledged shards here, but --save {args.save}"
            " contains no checkpoint; pass the folder with the checkpoints, or --fresh to read everything again, or"
            " another --consumer"
        )


class LiveData(Iterator[Tensors]):
    """Micro-batches of this rank, and the collective steps for checkpoints; a context manager.

    Args:
        shards: the live data.
        config: how this rank reads it.
        ending: a context that is entered together with this one. On one process, it declares the end of the data if the
            producer does not.
    """

    def __init__(self, shards: LiveShards, config: LiveConfig, ending: AbstractContextManager[None]) -> None:
        self._shards, self._config, self._ending = shards, config, ending
        self._loader = LiveLoader(shards, config)
        self._saved, self._begun = self._loader.state, False
        # The last acknowledged states of all ranks; None before the first step.
        self._committed: list[RankState] | None = None

    def __next__(self) -> Tensors:
        if not self._begun:
            self._begun = True
            # An earlier job may have acknowledged shards after this point. They will be read again: do not remove them.
            if _leads():
                self._loader.commit()
        return next(self._loader)

    @property
    def vocab_size(self) -> int | None:
        """Number of ids of the tokenizer, from the newest shard or the producer's file; None if it is not recorded.

        Waits until the catalog is there.

        Raises:
            FormatError: training would block, because the producer may not run as far ahead as training needs.
        """
        shards = self._shards
        if isinstance(shards, LiveChunks):
            return None if shards.encoder is None else shards.encoder.tokenizer.vocab_size
        assert isinstance(shards, CatalogShards)  # open_live makes no other kind
        self._loader.require_room()
        # If a job that has completed all shards is restarted, there is no shard, but the producer's file still exists.
        header, producer = shards.newest(shards.header), shards.producer()
        said = header.metadata if header else producer.options if producer else {}
        return stated_in(said, "tokenizer", "vocab_size", int)

    def gather_states(self) -> list[dict[str, Any]]:
        """Return the states of all ranks, for the common part of a checkpoint; all ranks must call this together."""
        self._saved = self._loader.state
        return states_to_json(self._gather(self._saved))

    def _gather(self, state: RankState) -> list[RankState]:
        deal = state.deal
        states: list[Any] = [None] * parallel_state.get_data_parallel_world_size()
        # All ranks have the same deal, so it is not sent; it may have thousands of leftovers.
        small = replace(state, deal=Deal(deal.size))
        torch.distributed.all_gather_object(states, small, group=parallel_state.get_data_parallel_group())
        return [replace(each, deal=deal) for each in states]

    def commit(self) -> None:
        """Acknowledge the last gathered states when every process has written its part of the checkpoint."""
        torch.distributed.barrier()
        if _leads():
            self._loader.commit(self._saved.to_json())
        self._committed = self._gather(self._saved)

    def is_blocked(self) -> bool:
        """Return whether the next step may need a shard that the producer publishes only after another commit.

        All processes must call this together, between two steps. See ``LiveLoader.may_need_commit``.
        """
        loader = self._loader
        loader.prepare()
        if not loader.needs_acks:
            return False  # the same on all ranks, so that no communication is needed before every step
        if self._committed is None:
            self._committed = self._gather(loader.state)
        blocked = loader.may_need_commit(self._committed)
        flag = torch.tensor(int(blocked), device="cuda" if torch.cuda.is_available() else "cpu")
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)

    def deal_anew(self) -> None:
        """Redistribute the packs that no rank has trained on; all ranks must call this together right after a commit.

        A rank whose shards have more packs falls behind the others, and the producer waits for this rank to complete
        its shards. Every pack still comes exactly once.
        """
        states = self.gather_states()
        self._loader.close()
        self._loader = LiveLoader(self._shards, self._config)
        self._loader.load_state_dict(states)
        self._loader.prepare()
        self._begun = False
        self._committed = self._gather(self._loader.state)
        logger.info("%s: the remaining data is distributed again", self._shards.folder)

    def load_states(self, states: Any) -> None:
        """Continue from the states in a checkpoint, which may be from a job with another number of ranks.

        Raises:
            FormatError: the checkpoint has no such states, for example because its job used finished data.
        """
        if not isinstance(states, list):
            raise FormatError(
                "--load: the checkpoint contains no position in live data, because its run used other data"
            )
        now = self._loader.state
        found = zip(states, states_from_json(states), strict=True)
        own = [content for content, state in found if not state.difference(now)]
        self._loader.load_state_dict(own[0] if own else states)

    def __enter__(self) -> LiveData:
        self._ending.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.__exit__(None, None, None)
        self._loader.close()


def _leads() -> bool:
    """Return whether this process represents its data-parallel rank; all processes of the rank read the same data."""
    others = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    return not any(getattr(parallel_state, f"get_{other}_rank")() for other in others)


def _holds_chunks(folder: str, max_wait: float) -> bool:
    """Return whether a folder has chunks (True) or is a catalog of shards (False); wait until it is one of them."""
    catalog, waiter = Catalog(folder), Waiter(f"rank {parallel_state.get_data_parallel_rank()}")
    for waited in waiter.looks(lambda: f"{folder}: no catalog and no chunks yet"):
        if waited > max_wait:
            break
        if catalog.producer() is not None or catalog.numbers():
            return False
        if chunks_in(folder):
            return True
    raise SFTIndexError(
        f"{folder}: still no _producer.json and no chunk_00000.jsonl after {max_wait:g} s (--max-wait); start the"
        " producer, or pass its folder"
    )
