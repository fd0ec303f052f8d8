"""One shard, read and written: numpy and the native kernels only, no torch, no megatron."""

from megatron_sft_idx.shard.prefix import check_free, remove_shard
from megatron_sft_idx.shard.reader import Pack, Shard, read_header
from megatron_sft_idx.shard.recovery import InterruptedBuild, Remains, find_remains, recover, remove_remains
from megatron_sft_idx.shard.writer import ShardWriter

__all__ = [
    "InterruptedBuild",
    "Pack",
    "Remains",
    "Shard",
    "ShardWriter",
    "check_free",
    "find_remains",
    "read_header",
    "recover",
    "remove_remains",
    "remove_shard",
]
