"""The dataset provider for Megatron-LM's ``pretrain()`` to train on packed SFT data.

All settings are Megatron's own arguments; ``training.megatron_arguments`` has the tables. Arguments that would hang or
train on other tokens than those in the shards are refused on every rank before anything is built. The problems differ
between releases of Megatron; ``docs/megatron.md`` has the table.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.utils import log_single_rank

from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.lines import get_logger
from megatron_sft_idx.training.media import MediaStep
from megatron_sft_idx.training.megatron_arguments import (
    FIELDS,
    is_scheduled,
    require_arguments,
    require_rows,
    require_splits,
    require_whole_rows,
    sharing_ranks,
)
from megatron_sft_idx.training.rows import MediaCosts
from megatron_sft_idx.training.sft_dataset import PackedSFTDataset, PackedSFTDatasetConfig

logger = get_logger(__name__)

_SPLITS = ("train", "valid", "test")
# Options of the provider in addition to columns and media: fields of the configuration without a Megatron argument.
_OPTIONS = (
    *("index_only_packing", "packing_method", "max_sequences_per_pack", "padding_mask", "pad_id", "plan_cache"),
)


def train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int | None],
    vp_stage: int | None = None,
    *,
    args: Namespace | None = None,
    columns: Sequence[str] = (),
    media: MediaStep | None = None,
    media_costs: MediaCosts | None = None,
    ignore_media: bool = False,
    **options: Any,
) -> list[Any]:
    """Return training, validation and test data for ``pretrain()``.

    Args:
        train_val_test_num_samples: requested rows of each split; None is one epoch, 0 is none.
        vp_stage: the virtual pipeline stage; it makes no difference, because every stage needs the boundaries.
        args: Megatron's arguments; None gets them from ``megatron.training``.
        columns: names of the columns to return with each row.
        media: makes model inputs from the images and audio of each batch, which are added to the batch:
            ``training.media.MediaInputs``.
        media_costs: the work of the model's encoders; see ``PackedSFTDatasetConfig``.
        ignore_media: train on shards with images and audio as if their placeholder tokens were text. Not needed if the
            script adds ``--ignore-media`` to Megatron's arguments.
        options: other fields of ``PackedSFTDatasetConfig`` without a Megatron argument: ``index_only_packing``,
            ``packing_method``, ``max_sequences_per_pack``, ``padding_mask``, ``pad_id``, ``plan_cache``.

    Raises:
        FormatError: arguments or shards cannot be used for training; raised on every rank.

    Example:
        >>> from argparse import Namespace
        >>> args = Namespace(data_path=["data/chats"], split="90,10,0", seq_length=16, seed=1)  # from get_args()
        >>> train, valid, test = train_valid_test_datasets_provider([None, None, 0], args=args)
        >>> len(train), len(valid), test  # one epoch of each split
        (6, 1, None)
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
        "media": media,
        "media_costs": media_costs,
        "single_sequences": is_scheduled(args),
        "tokenizer_fingerprint": _tokenizer_fingerprint(args),
        "vocab_size": getattr(args, "padded_vocab_size", None),
        "ignore_media": ignore_media or getattr(args, "ignore_media", False),
    }
    wanted = list(train_val_test_num_samples)
    config = config_from_args(args, num_samples=tuple(wanted), **given)
    require_splits(args, config, wanted)
    require_whole_rows(args, config.pretraining)
    built = _build(config, wanted, lambda: parallel_state.get_tensor_model_parallel_rank() == 0)
    require_rows(built, wanted)
    return built


# With this attribute, Megatron calls the provider on every rank, and the builder decides where data sets are built.
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def build_datasets(
    args: Namespace,
    num_samples: Sequence[int | None],
    is_built_on_rank: Callable[[], bool] = lambda: True,
    **options: Any,
) -> list[Any]:
    """Build the data sets for training, validation and test with Megatron's builder, outside of ``pretrain()``.

    Args:
        args: Megatron's arguments; only the ones about data are needed, such as ``data_path`` and ``split``.
        num_samples: requested rows of each split; None is one epoch, 0 is none.
        is_built_on_rank: whether this rank reads data; called by Megatron's builder.
        options: other fields of ``PackedSFTDatasetConfig``, such as ``columns`` or ``index_only_packing``.

    Returns:
        Three ``PackedSFTDataset``, or a blend of several; None for a split without rows.

    Raises:
        FormatError: arguments or shards cannot be used for training.
        ShardNotFoundError: there is no shard at a path.

    Example:
        >>> from argparse import Namespace
        >>> args = Namespace(data_path=["data/chats"], split="90,10,0", seq_length=16, seed=1)
        >>> train, valid, test = build_datasets(args, [12, None, 0])
        >>> len(train), len(valid), test  # two epochs of the training split, one of the validation split
        (12, 1, None)
        >>> {name: list(tensor.shape) for name, tensor in train[0].items()}
        {'tokens': [16], 'labels': [16], 'position_ids': [16], 'loss_mask': [16], 'cu_seqlens': [6], 'max_seqlen': []}
    """
    return _build(config_from_args(args, num_samples=tuple(num_samples), **options), num_samples, is_built_on_rank)


def _build(
    config: PackedSFTDatasetConfig, num_samples: Sequence[int | None], is_built_on_rank: Callable[[], bool]
) -> list[Any]:
    _keep_blends_in_memory_without_shared_cache(config)
    built: list[Any] = BlendedMegatronDatasetBuilder(
        PackedSFTDataset, list(num_samples), is_built_on_rank, config
    ).build()
    return built


def config_from_args(args: Namespace, **options: Any) -> PackedSFTDatasetConfig:
    """Return the configuration of the data sets for Megatron's arguments.

    Args:
        args: Megatron's arguments; arguments unknown to a version or a script can be missing.
        options: fields of ``PackedSFTDatasetConfig`` without a Megatron argument, such as ``index_only_packing``.
            ``ignore_media`` is read from ``args`` if a script has added it there.
    """
    known = {each.name for each in fields(PackedSFTDatasetConfig)}
    given: dict[str, Any] = {field: getattr(args, name, None) for name, field in FIELDS.items() if field in known}
    given = {field: value for field, value in given.items() if value is not None}
    blend, per_split = _blends(args)
    tensor_parallel = getattr(args, "tensor_model_parallel_size", 1)
    return PackedSFTDatasetConfig(
        **given,
        blend=blend,
        blend_per_split=per_split,
        split=args.split if blend else None,
        context_parallel_size=sharing_ranks(args),
        sequence_parallel_size=tensor_parallel * bool(getattr(args, "sequence_parallel", False)),
        **{"ignore_media": getattr(args, "ignore_media", False), **options},
    )


def _keep_blends_in_memory_without_shared_cache(config: PackedSFTDatasetConfig) -> None:
    """Make Megatron build the indices of blends in memory on ranks that do not see the cache folder of rank 0.

    Megatron writes such an index only on global rank 0 and reads it on all other ranks. With a local folder on each
    node, the other nodes would find no file. All ranks must call this together. Packing plans stay in the folder of the
    node.

    FormatError: there is pretraining data; Megatron cannot build its index in memory.
    """
    # With either of these two options, the user guarantees that the files are in the folder of every node.
    folder, vouched_for = config.path_to_cache, config.fast_cache_load or config.defer_npy_index_mmap
    if not folder or vouched_for or not torch.distributed.is_initialized():
        return
    probe: list[str | None] = [None]
    if torch.distributed.get_rank() == 0:
        name = f"sft-probe-{uuid.uuid4().hex}"
        # If rank 0 cannot write, it cannot build an index either: the indices exist, or Megatron reports the error.
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
            "%s: not the folder of rank 0, so this rank builds the indices of blends in memory; use a folder that"
            " all nodes share to avoid that",
            folder,
        )
        config.path_to_cache = None
    if torch.distributed.get_rank() == 0:
        os.remove(path)
    if config.pretraining and not all(everywhere):
        raise FormatError(
            f"--data-cache-path {folder}: not shared by all nodes, but Megatron builds the index of"
            f" {config.pretraining[0]} on one node only; use a folder that all nodes share"
        )


def _tokenizer_fingerprint(args: Namespace) -> str | None:
    """Return the fingerprint of Megatron's tokenizer; None unless its files are local and readable by this package."""
    path = getattr(args, "tokenizer_model", None)
    if path is None or not Path(path).exists():
        return None
    from megatron_sft_idx.chat.tokenizer import load_tokenizer

    try:
        return load_tokenizer(path, backend="tokenizers").fingerprint
    except FormatError as error:
        log_single_rank(logger, logging.WARNING, "the tokenizer is not compared with the shards: %s", error)
        return None


# ---- blends ----


Blend = tuple[list[str], list[float] | None]


def _blends(args: Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """Return one blend to split, or one blend per split, from the arguments or the files given in them."""
    paths, option = args.data_path, "--data-path"
    if file := getattr(args, "data_args_path", None):
        option = "--data-args-path"
        paths = _text_of(file, option).split()
    if paths:
        return _blend_of(paths, option), None
    blends = [getattr(args, f"{split}_data_path", None) for split in _SPLITS]
    if file := getattr(args, "per_split_data_args_path", None):
        option = "--per-split-data-args-path"
        try:
            named = json.loads(_text_of(file, option))
        except ValueError:
            named = None
        blends = _blends_of_json(named, f"{option} {file}")
    each = [_blend_of(blend, f"--{split}-data-path") for split, blend in zip(_SPLITS, blends, strict=True)]
    return None, each if any(each) else None


def _blends_of_json(named: Any, where: str) -> list[list[str] | None]:
    """Return the words of the blend of each split. FormatError: the file has something else."""
    form = 'such as {"train": ["0.3", "data/a", "0.7", "data/b"], "valid": "data/c"}'
    if not isinstance(named, dict) or not named.keys() <= {*_SPLITS}:
        raise FormatError(f"{where}: expected a JSON object with keys of {', '.join(_SPLITS)}, {form}")
    blends: list[list[str] | None] = []
    for split in _SPLITS:
        words = named.get(split) or []
        words = words.split() if isinstance(words, str) else words
        if not isinstance(words, list) or any(type(word) not in (str, int, float) for word in words):
            raise FormatError(f"{where}: {split} is {brief(words)}, expected a list of weights and paths, {form}")
        blends.append([str(word) for word in words] or None)
    return blends


def _text_of(file: str, option: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text"
        raise FormatError(f"{option} {file}: {why}; expected a file with a list of shards") from None


def _blend_of(words: Sequence[str] | None, option: str) -> Blend | None:
    """Return paths and weights. FormatError: only some paths have a weight; Megatron would read weights as paths."""
    if not words:
        return None
    at_weights = words[::2]
    if any(map(_is_number, at_weights)):
        for number, word in enumerate(at_weights):
            if not _is_number(word):
                raise FormatError(f"{option}: {word} has no weight; write WEIGHT PATH for every path, or only paths")
            if 2 * number + 1 == len(words):
                raise FormatError(
                    f"{option}: no path follows the weight {word}; write WEIGHT PATH for every path, or only paths"
                )
    elif numbers := [word for word in words[1::2] if _is_number(word) and not os.path.exists(f"{word}.seq.idx")]:
        raise FormatError(f"{option}: {numbers[0]} comes after a path; write each weight in front of its path")
    blend: Blend | None = get_blend_from_list(list(words))
    return blend


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
