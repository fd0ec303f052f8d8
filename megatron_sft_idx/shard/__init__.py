"""One shard, or many as one: opened, read, written, published whole, and recovered when a writer was killed.

Numpy and the native kernels only, no torch and no Megatron. Every file of ours at a prefix appears, is replaced and is
removed by the code here, so that what a killed process leaves can always be told from what belongs to somebody else.
"""

from megatron_sft_idx.shard.columns import ShardColumn, pair_numbers, write_column
from megatron_sft_idx.shard.opening import read_header
from megatron_sft_idx.shard.publication import check_free, remove_shard
from megatron_sft_idx.shard.reader import Pack, Shard
from megatron_sft_idx.shard.recovery import Remains, find_remains, recover
from megatron_sft_idx.shard.writer import ShardWriter
