"""What ``preprocess`` and ``pack`` do: chats to a tokenised corpus, a corpus to a packed shard."""

from megatron_sft_idx.preprocess.corpus import CorpusReport, add_piece, make_encode_task, name_of_piece, note_rows
from megatron_sft_idx.preprocess.encoding import EncodedPiece, EncodingOptions, RowEncoder
from megatron_sft_idx.preprocess.identity import option_differences, packing_differences
from megatron_sft_idx.preprocess.outputs import output_prefixes
from megatron_sft_idx.preprocess.pack import PackOptions, PackReport, pack_shard
from megatron_sft_idx.preprocess.pipeline import PreprocessOptions, corpus_prefix, preprocess
from megatron_sft_idx.preprocess.preview import Preview, preview
from megatron_sft_idx.preprocess.summary import Summary, check_summary
from megatron_sft_idx.preprocess.workers import NOT_YET, NotYet, available_cpus, map_in_order

__all__ = [
    "NOT_YET",
    "CorpusReport",
    "EncodedPiece",
    "EncodingOptions",
    "NotYet",
    "PackOptions",
    "PackReport",
    "PreprocessOptions",
    "Preview",
    "RowEncoder",
    "Summary",
    "add_piece",
    "available_cpus",
    "check_summary",
    "corpus_prefix",
    "make_encode_task",
    "map_in_order",
    "name_of_piece",
    "note_rows",
    "option_differences",
    "output_prefixes",
    "pack_shard",
    "packing_differences",
    "preprocess",
    "preview",
]
