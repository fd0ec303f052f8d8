"""Open one shard, or many as one; write and publish shards; recover a shard after its writer was killed.

Writing: ``writer`` fills the files (``build_options``, ``pack_log``), ``publication`` renames them to the prefix
(``at_prefix``), ``recovery`` resumes after a kill. Reading: ``opening`` finds the files (``index_cache`` for remote
ones), ``reader`` returns packs, ``columns`` reads and attaches columns, ``shard_set`` joins shards. Nothing here may
import torch or Megatron. Only this folder writes, replaces or removes files of shards on a disk.
"""

from megatron_sft_idx.shard.build_options import BuildOptions
from megatron_sft_idx.shard.columns import ShardColumn, pair_numbers, write_column
from megatron_sft_idx.shard.opening import read_header
from megatron_sft_idx.shard.publication import check_free, remove_shard
from megatron_sft_idx.shard.reader import Pack, Shard
from megatron_sft_idx.shard.recovery import Remains, find_remains, recover
from megatron_sft_idx.shard.writer import ShardWriter
