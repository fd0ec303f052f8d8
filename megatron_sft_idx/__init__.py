"""Packed SFT data for Megatron: five memory-mapped files per shard, exact loss masks.

This file exports the public names. Each is imported when it is first used, so programs that only read or pack do not
import torch or Megatron. Modules of the package import from each other, never from here. The docstring of each
subpackage describes its purpose; docs/development.md shows how they fit together.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers know the names below by
    from megatron_sft_idx.builder import SFTIndexedDatasetBuilder as SFTIndexedDatasetBuilder
    from megatron_sft_idx.check import verify_shard as verify_shard
    from megatron_sft_idx.dataset import MMapIndexedDataset as MMapIndexedDataset
    from megatron_sft_idx.dataset import SFTIndexedDataset as SFTIndexedDataset
    from megatron_sft_idx.errors import CorruptShardError as CorruptShardError
    from megatron_sft_idx.errors import FormatError as FormatError
    from megatron_sft_idx.errors import SequenceError as SequenceError
    from megatron_sft_idx.errors import SFTIndexError as SFTIndexError
    from megatron_sft_idx.errors import ShardNotFoundError as ShardNotFoundError
    from megatron_sft_idx.errors import StorageError as StorageError
    from megatron_sft_idx.errors import UnsupportedVersionError as UnsupportedVersionError
    from megatron_sft_idx.formats.memmap import MemmapShardWriter as MemmapShardWriter
    from megatron_sft_idx.formats.npy import LegacyPickleWriter as LegacyPickleWriter
    from megatron_sft_idx.formats.packed_dataset import PackedDataset as PackedDataset
    from megatron_sft_idx.formats.packed_dataset import open_dataset as open_dataset
    from megatron_sft_idx.inspect.text import show_pack as show_pack
    from megatron_sft_idx.layout.column import ColumnSpec as ColumnSpec
    from megatron_sft_idx.layout.media_layout import MediaItem as MediaItem
    from megatron_sft_idx.live.live_loader import LiveConfig as LiveConfig
    from megatron_sft_idx.live.live_loader import LiveLoader as LiveLoader
    from megatron_sft_idx.packing import PackPlan as PackPlan
    from megatron_sft_idx.packing import pack_sequences as pack_sequences
    from megatron_sft_idx.shard import Shard as Shard
    from megatron_sft_idx.shard import ShardWriter as ShardWriter
    from megatron_sft_idx.shard import write_column as write_column
    from megatron_sft_idx.tokenize import preprocess as preprocess
    from megatron_sft_idx.training.losses import dpo_loss as dpo_loss
    from megatron_sft_idx.training.sft_dataset import PackedSFTDataset as PackedSFTDataset
    from megatron_sft_idx.training.sft_dataset import PackedSFTDatasetConfig as PackedSFTDatasetConfig
    from megatron_sft_idx.training.torch_packs import as_torch as as_torch

__version__ = "0.1.0"

# Where each public name lives. They are imported when first used: importing Megatron costs seconds, and reading or
# packing does not need it.
_HOMES = {
    "ColumnSpec": "layout.column",
    "CorruptShardError": "errors",
    "FormatError": "errors",
    "LegacyPickleWriter": "formats.npy",
    "LiveConfig": "live.live_loader",
    "LiveLoader": "live.live_loader",
    "MMapIndexedDataset": "dataset",
    "MediaItem": "layout.media_layout",
    "MemmapShardWriter": "formats.memmap",
    "PackPlan": "packing",
    "PackedDataset": "formats.packed_dataset",
    "PackedSFTDataset": "training.sft_dataset",
    "PackedSFTDatasetConfig": "training.sft_dataset",
    "SFTIndexError": "errors",
    "SFTIndexedDataset": "dataset",
    "SFTIndexedDatasetBuilder": "builder",
    "SequenceError": "errors",
    "Shard": "shard",
    "ShardNotFoundError": "errors",
    "ShardWriter": "shard",
    "StorageError": "errors",
    "UnsupportedVersionError": "errors",
    "as_torch": "training.torch_packs",
    "dpo_loss": "training.losses",
    "open_dataset": "formats.packed_dataset",
    "pack_sequences": "packing",
    "preprocess": "tokenize",
    "show_pack": "inspect.text",
    "verify_shard": "check",
    "write_column": "shard",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if (missing := (error.name or "").split(".")[0]) not in ("torch", "megatron"):
            raise
        way_out = "pip install 'megatron-sft-idx[megatron]'"
        raise ImportError(f"{__name__}.{name} needs {missing}, which is not installed: {way_out}") from None
    return getattr(home, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def _installed() -> ModuleSpec:
    """The same package where it is installed, with its C++ compiled, for a folder of sources that has none.

    Raises:
        ImportError: there is none.
    """
    clone = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    other_folders = [entry for entry in sys.path if os.path.realpath(entry) != clone]
    for finder in sys.meta_path:
        spec = finder.find_spec(__name__, other_folders)
        if spec and PathFinder.find_spec(f"{__name__}._native", spec.submodule_search_locations):
            return spec
    version = "Python {}.{}".format(*sys.version_info)
    raise ImportError(f"{clone}: sources whose C++ is not compiled for {version}: pip install --editable {clone}")


# In the folder of a clone, Python finds these sources before the package that was installed from them.
if PathFinder.find_spec(f"{__name__}._native", __path__) is None:
    _spec = _installed()
    sys.modules[__name__] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])  # type: ignore[union-attr]
