"""Convert chats to packed shards, on this machine or on a Ray cluster; ``pipeline`` is the whole process.

The input is divided into stretches (``cut``); a task makes a part from each (``parts``). Rows are selected
(``selection``), packs are planned from lengths (``plan``), and shards are written (``gather``) from the parts, or from
another shard (``corpus``). Tasks run in processes of this machine (``local``) or on a cluster (``ray``). ``begin``
decides what can be reused of an interrupted job. Only ``encoding`` knows how a chat becomes tokens, and only the folder
``shard`` knows the layout of a shard on disk.
"""

from megatron_sft_idx.tokenize.bad_rows import BadRowLimit
from megatron_sft_idx.tokenize.begin import PreprocessOptions, noted_differences
from megatron_sft_idx.tokenize.corpus import check_packing, pack_shard
from megatron_sft_idx.tokenize.dry_run import preview
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder, items_of
from megatron_sft_idx.tokenize.gather import ToPack, make_packs, output_prefixes
from megatron_sft_idx.tokenize.job import (
    FROM_ZERO,
    encoding_options,
    packing_options,
    preprocess,
    preprocess_options,
    run_job,
)
from megatron_sft_idx.tokenize.job_input import Rows, downloaded, inputs_of, reads_of
from megatron_sft_idx.tokenize.local import NOT_YET, Local, NotYet, available_cpus
from megatron_sft_idx.tokenize.parts import (
    MadePart,
    PartsSoFar,
    encode_to_part,
    remember_encoder,
)
from megatron_sft_idx.tokenize.pipeline import make_shards
from megatron_sft_idx.tokenize.plan import PackOptions, num_kept_tokens
from megatron_sft_idx.tokenize.report import CorpusReport, PackReport, Summary, check_summary
from megatron_sft_idx.tokenize.row_files import compare_libraries, look_at_rows, row_files
