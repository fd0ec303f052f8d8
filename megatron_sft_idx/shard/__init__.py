"""One shard, or many as one: opened, read, written, published whole, and recovered when a writer was killed.

``writer`` fills the files (``build_options``, ``pack_log``), ``publication`` lets them appear together (``at_prefix``),
``recovery`` makes a shard of what a killed writer left. ``opening`` finds the files (``index_cache`` for remote ones),
``reader`` finds packs in them, ``columns`` reads and attaches columns, ``shard_set`` reads many shards as one. Nothing
here may import torch or Megatron. Files of shards on a disk are written, replaced and removed by this folder alone.
"""

from megatron_sft_idx.shard.build_options import BuildOptions
from megatron_sft_idx.shard.columns import ShardColumn, pair_numbers, write_column
from megatron_sft_idx.shard.opening import read_header
from megatron_sft_idx.shard.publication import check_free, remove_shard
from megatron_sft_idx.shard.reader import Pack, Shard
from megatron_sft_idx.shard.recovery import Remains, find_remains, recover
from megatron_sft_idx.shard.writer import ShardWriter
