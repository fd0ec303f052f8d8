"""Modalities' files: ``.pbin`` of tokenised documents in all its generations, and the raw index over JSONL."""

from megatron_sft_idx.formats.modalities.pbin import FORMAT, Reader, Writer, recognise
from megatron_sft_idx.formats.modalities.raw_index import RawRows, RowRange, create_raw_index
from megatron_sft_idx.formats.modalities.views import PackedMemMapDatasetContinuous, PackedMemMapDatasetMegatron

__all__ = [
    "FORMAT",
    "PackedMemMapDatasetContinuous",
    "PackedMemMapDatasetMegatron",
    "RawRows",
    "Reader",
    "RowRange",
    "Writer",
    "create_raw_index",
    "recognise",
]
