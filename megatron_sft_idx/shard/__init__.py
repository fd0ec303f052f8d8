"""One shard, read and written: numpy and the native kernels only, no torch, no megatron."""

from megatron_sft_idx.shard.reader import Pack, Shard
from megatron_sft_idx.shard.writer import ShardWriter

__all__ = ["Pack", "Shard", "ShardWriter"]
