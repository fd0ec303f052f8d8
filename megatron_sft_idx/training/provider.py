"""What Megatron-LM's ``pretrain()`` is handed so that it trains on packed SFT data.

Megatron's own arguments say everything: ``--data-path`` and its kin, ``--split``, ``--seq-length``, ``--seed``,
``--data-cache-path``, ``--object-storage-cache-path``, ``--no-mmap-bin-files`` and the parallel sizes.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list

from megatron_sft_idx.training.config import PackedSFTDatasetConfig
from megatron_sft_idx.training.sft_dataset import PackedSFTDataset

__all__ = ["build_datasets", "config_from_args", "train_valid_test_datasets_provider"]

_SPLITS = ("train", "valid", "test")


def train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int | None], vp_stage: int | None = None, *, args: Namespace | None = None
) -> list[Any]:
    """Training, validation and test data, as ``pretrain()`` asks for them.

    Args:
        train_val_test_num_samples: rows wanted of each; None is one epoch, 0 is none.
        vp_stage: the virtual pipeline stage, which makes no difference: every stage needs the boundaries.
        args: Megatron's arguments; None asks ``megatron.training`` for them.
    """
    if args is None:
        from megatron.training import get_args

        args = get_args()
    return build_datasets(
        args, train_val_test_num_samples, lambda: parallel_state.get_tensor_model_parallel_rank() == 0
    )


# Megatron then calls it on every rank, and lets the dataset builder decide where data sets are built.
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def build_datasets(
    args: Namespace,
    num_samples: Sequence[int | None],
    is_built_on_rank: Callable[[], bool] = lambda: True,
    **options: Any,
) -> list[Any]:
    """Build the three data sets with Megatron's builder; ``options`` as for ``config_from_args``."""
    config = config_from_args(args, **options)
    built: list[Any] = BlendedMegatronDatasetBuilder(
        PackedSFTDataset, list(num_samples), is_built_on_rank, config
    ).build()
    return built


def config_from_args(args: Namespace, **options: Any) -> PackedSFTDatasetConfig:
    """The data sets' configuration as Megatron's arguments give it.

    Args:
        args: Megatron's arguments; those that a version or a script does not know may be missing.
        options: fields of ``PackedSFTDatasetConfig`` that Megatron has no argument for, such as
            ``index_only_packing``.
    """
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
        context_parallel_size=getattr(args, "context_parallel_size", 1),
        sequence_parallel_size=tensor_parallel * bool(getattr(args, "sequence_parallel", False)),
        global_batch_size=getattr(args, "global_batch_size", None),
        mmap_bin_files=getattr(args, "mmap_bin_files", True),
        **options,
    )


Blend = tuple[list[str], list[float] | None]


def _blends(args: Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """One blend that is split, or one for each split, from the arguments or from the files that they name."""
    paths = args.data_path
    if file := getattr(args, "data_args_path", None):
        paths = Path(file).read_text(encoding="utf-8").split()
    if paths:
        return get_blend_from_list(paths), None
    parts = [getattr(args, f"{split}_data_path", None) for split in _SPLITS]
    if file := getattr(args, "per_split_data_args_path", None):
        named = json.loads(Path(file).read_text(encoding="utf-8"))
        parts = [named.get(split) for split in _SPLITS]
        parts = [part.split() if isinstance(part, str) else part for part in parts]
    return None, [get_blend_from_list(part) for part in parts] if any(parts) else None
