"""Chats become packed shards, on this machine or on a Ray cluster; ``pipeline`` is the whole way.

The input is cut into stretches (``cut``); a task makes a part of each (``parts``); packs are planned from the lengths
of the selected sequences (``plan``), and shards are written from the parts (``gather``). Tasks run in processes of this
machine (``local``) or on a cluster (``ray``); ``begin`` decides what of an interrupted job can be used. Only
``encoding`` may know how a chat becomes tokens, and no module may know how a shard lies on disk.
"""

from megatron_sft_idx.tokenize.begin import (
    PartsFolder,
    PreprocessOptions,
    differences,
    option_differences,
    packing_differences,
)
from megatron_sft_idx.tokenize.dry_run import preview
from megatron_sft_idx.tokenize.encoding import EncodedPiece, EncodingOptions, RowEncoder
from megatron_sft_idx.tokenize.gather import PartsReader, PartsTable, make_packs, pack_shard
from megatron_sft_idx.tokenize.job import (
    FROM_ZERO,
    Destination,
    Rows,
    downloaded,
    encoding_options,
    inputs_of,
    packing_options,
    preprocess,
    preprocess_options,
    reads_of,
    run_job,
)
from megatron_sft_idx.tokenize.local import NOT_YET, Local, NotYet, available_cpus
from megatron_sft_idx.tokenize.parts import PartInfo, encode_piece, remember_encoder, write_part
from megatron_sft_idx.tokenize.pipeline import make_shards
from megatron_sft_idx.tokenize.plan import PackOptions, num_kept_tokens
from megatron_sft_idx.tokenize.report import CorpusReport, PackReport, Summary, check_summary
