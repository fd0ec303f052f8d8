"""What ``preprocess`` and ``pack`` do: chats to a tokenised corpus, a corpus to a packed shard."""

from megatron_sft_idx.preprocess.encoding import EncodingOptions, RowEncoder
from megatron_sft_idx.preprocess.pack import PackOptions, pack_shard
from megatron_sft_idx.preprocess.pipeline import PreprocessOptions, corpus_prefix, preprocess
from megatron_sft_idx.preprocess.preview import Preview, preview
from megatron_sft_idx.preprocess.summary import Summary

__all__ = [
    "EncodingOptions",
    "PackOptions",
    "PreprocessOptions",
    "Preview",
    "RowEncoder",
    "Summary",
    "corpus_prefix",
    "pack_shard",
    "preprocess",
    "preview",
]
