"""Training while the data is still being made: shards are consumed as they are published."""

from megatron_sft_idx.streaming.dataset import LiveDataset
from megatron_sft_idx.streaming.live import LiveLimits, LiveShards, OpenPacks, Stopped, Waiter
from megatron_sft_idx.streaming.loader import LiveLoader
from megatron_sft_idx.streaming.shards import CatalogShards

__all__ = [
    "CatalogShards",
    "LiveDataset",
    "LiveLimits",
    "LiveLoader",
    "LiveShards",
    "OpenPacks",
    "Stopped",
    "Waiter",
]
