"""Packed SFT data for Megatron: five memory-mapped files a shard, exact loss masks."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Where each public name lives. They are imported when first used: importing Megatron costs seconds, and reading or
# packing does not need it.
_HOMES = {
    "CorruptShardError": "errors",
    "FormatError": "errors",
    "LegacyPickleWriter": "formats.npy",
    "LiveDataset": "streaming",
    "LiveLoader": "streaming",
    "MMapIndexedDataset": "dataset",
    "MemmapShardWriter": "formats.memmap_writer",
    "PackPlan": "packing",
    "PackedDataset": "formats.dataset",
    "PackedSFTDataset": "training.dataset",
    "PackedSFTDatasetConfig": "training.dataset",
    "SFTIndexError": "errors",
    "SFTIndexedDataset": "dataset",
    "SFTIndexedDatasetBuilder": "builder",
    "SequenceError": "errors",
    "Shard": "shard",
    "ShardNotFoundError": "errors",
    "ShardWriter": "shard",
    "StorageError": "errors",
    "UnsupportedVersionError": "errors",
    "open_dataset": "formats.dataset",
    "pack_sequences": "packing",
    "verify_shard": "verify",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
