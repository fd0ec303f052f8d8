"""What Megatron-LM's ``pretrain()`` is handed so that it trains on packed SFT data.

Megatron's own arguments say everything: ``--data-path`` and its kin, ``--split``, ``--seq-length``, ``--seed``,
``--data-cache-path``, ``--object-storage-cache-path``, ``--no-mmap-bin-files`` and the parallel sizes. Those that would
train on something else than what the shards say, or hang, are refused on every rank before anything is built. What
goes wrong differs from release to release: ``docs/megatron.md`` has the table.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import os
import sys
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import package_info, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.utils import log_single_rank

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.lines import get_logger
from megatron_sft_idx.training.sft_dataset import PackedSFTDataset, PackedSFTDatasetConfig

logger = get_logger(__name__)

# Of megatron-core, which is Megatron-LM's too.
RELEASE = (package_info.MAJOR, package_info.MINOR)
_SPLITS = ("train", "valid", "test")
# Arguments about data that would be ignored, or train on something else: name, the value that is taken, and why.
_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("fim_data", False, "cuts texts apart to train on their middle, for which packs have no place; leave it out"),
    ("eod_mask_loss", False, "would take ends of turns out of the loss; leave it out: the masks of shards are final"),
    (
        "dataloader_type",
        "single",
        "draws rows in another order, of which a resumed run repeats some; leave it out: each epoch is shuffled anyway",
    ),
    ("varlen_sbhd_validation", False, "validates on rows of another layout than single sequences have; leave it out"),
)
# What the provider takes beside columns and media: fields of the configuration without an argument of Megatron's.
_OPTIONS = (
    *("index_only_packing", "packing_method", "max_sequences_per_pack", "padding_mask", "pad_id", "plan_cache"),
)


def train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int | None],
    vp_stage: int | None = None,
    *,
    args: Namespace | None = None,
    columns: Sequence[str] = (),
    ignore_media: bool = False,
    **options: Any,
) -> list[Any]:
    """Training, validation and test data, as ``pretrain()`` asks for them.

    Args:
        train_val_test_num_samples: rows wanted of each; None is one epoch, 0 is none.
        vp_stage: the virtual pipeline stage, which makes no difference: every stage needs the boundaries.
        args: Megatron's arguments; None asks ``megatron.training`` for them.
        columns: names of columns that rows come with.
        ignore_media: train on shards with images and audio, as if their placeholder tokens were text. A script that
            adds ``--ignore-media`` to Megatron's arguments need not pass it.
        options: other fields of ``PackedSFTDatasetConfig`` that Megatron has no argument for: ``index_only_packing``,
            ``packing_method``, ``max_sequences_per_pack``, ``padding_mask``, ``pad_id``, ``plan_cache``.

    Raises:
        FormatError: arguments or shards that cannot be trained on, on every rank.
    """
    if args is None:
        from megatron.training import get_args

        args = get_args()
    require_arguments(args)
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise FormatError(f"the provider has no option {unknown[0]!r}; it takes {', '.join(_OPTIONS)}")
    given: dict[str, Any] = {
        **options,
        "columns": tuple(columns),
        "single_sequences": _is_scheduled(args),
        "tokenizer_fingerprint": _tokenizer_fingerprint(args),
        "vocab_size": getattr(args, "padded_vocab_size", None),
        "ignore_media": ignore_media or getattr(args, "ignore_media", False),
    }
    is_built_on_rank = lambda: parallel_state.get_tensor_model_parallel_rank() == 0  # noqa: E731
    return build_datasets(args, train_val_test_num_samples, is_built_on_rank, **given)


# Megatron then calls it on every rank, and lets the dataset builder decide where data sets are built.
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def build_datasets(
    args: Namespace,
    num_samples: Sequence[int | None],
    is_built_on_rank: Callable[[], bool] = lambda: True,
    **options: Any,
) -> list[Any]:
    """Build the three data sets with Megatron's builder, on all ranks; ``options`` as for ``config_from_args``."""
    config = config_from_args(args, num_samples=tuple(num_samples), **options)
    _keep_blends_in_memory_without_shared_cache(config)
    built: list[Any] = BlendedMegatronDatasetBuilder(
        PackedSFTDataset, list(num_samples), is_built_on_rank, config
    ).build()
    return built


def config_from_args(args: Namespace, **options: Any) -> PackedSFTDatasetConfig:
    """The data sets' configuration as Megatron's arguments give it.

    Args:
        args: Megatron's arguments; those that a version or a script does not know may be missing.
        options: fields of ``PackedSFTDatasetConfig`` that Megatron has no argument for, such as
            ``index_only_packing``. ``ignore_media`` is taken from ``args`` where a script has added it there.
    """
    options = {"ignore_media": getattr(args, "ignore_media", False), **options}
    blend, per_split = _blends(args)
    tensor_parallel = getattr(args, "tensor_model_parallel_size", 1)
    return PackedSFTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split if blend else None,
        multiple_validation_sets=getattr(args, "multiple_validation_sets", None),
        full_validation=getattr(args, "full_validation", None),
        num_dataset_builder_threads=getattr(args, "num_dataset_builder_threads", 1),
        path_to_cache=args.data_cache_path,
        object_storage_cache_path=getattr(args, "object_storage_cache_path", None),
        context_parallel_size=_sharing_ranks(args),
        sequence_parallel_size=tensor_parallel * bool(getattr(args, "sequence_parallel", False)),
        global_batch_size=getattr(args, "global_batch_size", None),
        mmap_bin_files=getattr(args, "mmap_bin_files", True),
        **options,
    )


def _keep_blends_in_memory_without_shared_cache(config: PackedSFTDatasetConfig) -> None:
    """On ranks that do not see the cache folder of rank 0, have Megatron build the indices of blends in memory.

    Megatron writes such an index on global rank 0 alone and reads it everywhere else. With a folder on each node, the
    other nodes would find no file. All ranks must call this together. Plans of packs stay in the folder of the node.

    FormatError: there is pretraining data, whose index Megatron cannot build in memory.
    """
    # With either of these two options the user vouches for the files in every node's folder.
    folder, vouched_for = config.path_to_cache, config.fast_cache_load or config.defer_npy_index_mmap
    if not folder or vouched_for or not torch.distributed.is_initialized():
        return
    probe: list[str | None] = [None]
    if torch.distributed.get_rank() == 0:
        name = f"sft-probe-{uuid.uuid4().hex}"
        # Where rank 0 cannot write, it builds no index either: the indices are there, or Megatron says what is wrong.
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, name), "xb"):
                probe = [name]
    torch.distributed.broadcast_object_list(probe, src=0)
    if probe[0] is None:
        return
    path = os.path.join(folder, probe[0])
    sees = os.path.exists(path)
    everywhere: list[bool] = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, sees)
    if not sees:
        logger.info(
            "%s: not the folder of rank 0, so this rank builds the indices of blends in memory; a folder that all"
            " nodes share saves that",
            folder,
        )
        config.path_to_cache = None
    if torch.distributed.get_rank() == 0:
        os.remove(path)
    if config.pretraining and not all(everywhere):
        raise FormatError(
            f"--data-cache-path {folder}: not one folder for all nodes, and of {config.pretraining[0]} Megatron builds"
            " the index on one node alone; give a folder that all nodes share"
        )


# ---- arguments that would go wrong ----


def require_arguments(args: Namespace, release: tuple[int, int] = RELEASE) -> None:
    """FormatError, a sentence each, where Megatron-LM would hang with its arguments or train on something else.

    Args:
        args: Megatron's arguments; those that a release does not know may be missing.
        release: major and minor number of Megatron.
    """
    if complaints := [*_complaints(args, release), *_refused(args)]:
        raise FormatError("\n".join(complaints))


def _refused(args: Namespace) -> Iterator[str]:
    for name, taken, why in _REFUSED:
        if (value := getattr(args, name, taken)) not in (taken, None):
            yield f"--{name.replace('_', '-')}{'' if value is True else f' {value}'} {why}"


def _complaints(args: Namespace, release: tuple[int, int]) -> Iterator[str]:
    def of(name: str, default: Any) -> Any:
        value = getattr(args, name, default)
        return default if value is None else value

    number = ".".join(map(str, release))
    tensor, context = of("tensor_model_parallel_size", 1), of("context_parallel_size", 1)
    scheduled, rows = _is_scheduled(args), of("micro_batch_size", 1)
    if not of("sft", True) and not scheduled and release >= (0, 17):
        yield (
            "--sft is missing: without it Megatron does not hand the boundaries of sequences to every rank, and"
            " sequences of a row see each other there; add --sft"
        )
    if of("create_attention_mask_in_dataloader", False):
        yield (
            "--no-create-attention-mask-in-dataloader is missing: with tensor parallelism Megatron waits for ever for"
            " a mask that rows with boundaries do not have; add --no-create-attention-mask-in-dataloader"
        )
    if not of("calculate_per_token_loss", True):
        yield (
            "--calculate-per-token-loss is missing: every micro-batch would weigh the same, however few tokens it"
            " trains; add --calculate-per-token-loss"
        )
    if rows > 1 and release < (0, 19):
        yield (
            f"--micro-batch-size {rows}: Megatron {number} takes the boundaries of one row a micro-batch; give"
            " --micro-batch-size 1, or take Megatron 0.19 or later"
        )
    if (evaluated := of("eval_micro_batch_size", rows)) != rows and tensor > 1:
        yield (
            f"--eval-micro-batch-size {evaluated}: with tensor parallelism Megatron receives evaluation batches in the"
            f" shape of --micro-batch-size {rows}; make them equal"
        )
    if context > 1 and release < (0, 18):
        yield (
            f"--context-parallel-size {context}: Megatron {number} drops the boundaries of padded sequences; give"
            " --context-parallel-size 1, or take Megatron 0.18 or later"
        )
    if tensor > 1 and release < (0, 17) and not _makes_room():
        yield (
            f"--tensor-model-parallel-size {tensor}: Megatron {number} waits for ever on ranks that make no room for"
            " max_seqlen; change get_batch_on_this_tp_rank as docs/megatron.md says, or take Megatron 0.17 or later"
        )
    if (stages := of("pipeline_model_parallel_size", 1)) > 2 and release < (0, 17):
        yield (
            f"--pipeline-model-parallel-size {stages}: Megatron {number} hands boundaries to the first and the last"
            " stage only; give 2 at most, or take Megatron 0.17 or later"
        )
    if of("hybrid_context_parallel", False):
        yield (
            "--hybrid-context-parallel cuts rows apart by boundaries without padding, and loses sequences; leave it"
            " out, and give --context-parallel-size"
        )
    scheduler, dynamic = getattr(args, "sequence_packing_scheduler", None), of("dynamic_context_parallel", False)
    if (scheduled or dynamic) and scheduler != (wanted := "default_dynamic_cp" if dynamic else "dp_balanced"):
        yield (
            f"--sequence-packing-scheduler {scheduler}: sequences are handed out one by one for dp_balanced, or with"
            f" --dynamic-context-parallel for default_dynamic_cp; give --sequence-packing-scheduler {wanted}, or leave"
            " it and --use-varlen-dataset out"
        )
    ranks = _sharing_ranks(args)
    if dynamic and ranks & (ranks - 1):
        yield (
            f"--dynamic-context-parallel: data-parallel x context-parallel size is {ranks}; Megatron divides sequences"
            " among 2, 4, 8 ... of these ranks, so take a number of ranks that makes it a power of two"
        )
    if scheduled and (room := of("max_seqlen_per_dp_cp_rank", args.seq_length) * ranks) < args.seq_length:
        yield (
            f"--max-seqlen-per-dp-cp-rank leaves room for {room} tokens on the {ranks} ranks that share a sequence,"
            f" sequences have up to --seq-length {args.seq_length}; raise the one or lower the other"
        )


def _sharing_ranks(args: Namespace) -> int:
    """Among how many ranks a sequence may be divided."""
    names = ["context_parallel_size"]
    if getattr(args, "dynamic_context_parallel", False):
        names.append("data_parallel_size")
    return math.prod(getattr(args, name, None) or 1 for name in names)


def _makes_room() -> bool:
    """Whether all ranks of Megatron 0.16 receive ``max_seqlen``, which it has to be taught."""
    receive = getattr(sys.modules.get("megatron.training.utils"), "get_batch_on_this_tp_rank", None)
    # Two things are received under hybrid context parallelism alone; the other one is not ours.
    return receive is None or inspect.getsource(receive).count("if args.hybrid_context_parallel else None") < 2


def _is_scheduled(args: Namespace) -> bool:
    """Whether Megatron packs, as it trains, and wants single sequences."""
    return bool(getattr(args, "sequence_packing_scheduler", None) or getattr(args, "use_varlen_dataset", False))


def _tokenizer_fingerprint(args: Namespace) -> str | None:
    """The fingerprint of Megatron's tokenizer; None unless its files are local and this package reads them."""
    path = getattr(args, "tokenizer_model", None)
    if path is None or not Path(path).exists():
        return None
    from megatron_sft_idx.chat.tokenizer import load_tokenizer

    try:
        return load_tokenizer(path, backend="tokenizers").fingerprint
    except FormatError as error:
        log_single_rank(logger, logging.WARNING, "the tokenizer is not compared with the shards: %s", error)
        return None


# ---- what is blended ----


Blend = tuple[list[str], list[float] | None]


def _blends(args: Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """One blend that is split, or one for each split, from the arguments or from the files that they name."""
    paths = args.data_path
    if file := getattr(args, "data_args_path", None):
        paths = Path(file).read_text(encoding="utf-8").split()
    if paths:
        return _blend_of(paths, "--data-path"), None
    blends = [getattr(args, f"{split}_data_path", None) for split in _SPLITS]
    if file := getattr(args, "per_split_data_args_path", None):
        named = json.loads(Path(file).read_text(encoding="utf-8"))
        blends = [named.get(split) for split in _SPLITS]
        blends = [blend.split() if isinstance(blend, str) else blend for blend in blends]
    each = [_blend_of(blend, f"--{split}-data-path") for split, blend in zip(_SPLITS, blends, strict=True)]
    return None, each if any(each) else None


def _blend_of(words: Sequence[str] | None, option: str) -> Blend | None:
    """Paths and weights; FormatError where only some paths have a weight, which Megatron takes for paths in silence."""
    if not words:
        return None
    at_weights = words[::2]
    if any(map(_is_number, at_weights)):
        for number, word in enumerate(at_weights):
            if not _is_number(word):
                raise FormatError(f"{option}: {word} has no weight; write WEIGHT PATH for every path, or paths alone")
            if 2 * number + 1 == len(words):
                raise FormatError(
                    f"{option}: {word} stands for no path; write WEIGHT PATH for every path, or paths alone"
                )
    elif numbers := [word for word in words[1::2] if _is_number(word) and not os.path.exists(f"{word}.seq.idx")]:
        raise FormatError(f"{option}: a weight comes in front of its path, and {numbers[0]} stands behind one")
    blend: Blend | None = get_blend_from_list(list(words))
    return blend


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
