"""Many shards read as one dataset: a shard, a folder, a glob, or a list of these."""

from megatron_sft_idx.shards.find import Source, find_prefixes, natural_key
from megatron_sft_idx.shards.shard_set import OPENED_AT_ONCE, ShardSet

__all__ = ["OPENED_AT_ONCE", "ShardSet", "Source", "find_prefixes", "natural_key"]
