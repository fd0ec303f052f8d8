"""Packs as Parquet: one row a pack, three list columns, as Megatron-Bridge and Nemotron's data preparation have it.

=============  ==========================================================================
``input_ids``  list of int32 (Nemotron) or int64 (Megatron-Bridge)
``loss_mask``  list of uint8 (Nemotron) or int8 (Megatron-Bridge), one value a token
``seq_start_id``  list of int32 or int64: where the pack's sequences start, the first 0
=============  ==========================================================================

Other columns are left alone, and so are row groups of any size, compression and encoding that pyarrow reads. What the
columns cannot say (capacity, padding id, dtypes) is in the schema's metadata, written here and optional when reading.

Masks are label-aligned in what Megatron-Bridge's own packer writes, and in what its collate expects. Nemotron's data
preparation first rolled them right over whole packs and later shifted them left inside sequences; its files do not say
which, so that its older ones need ``mask_alignment="rolled-right"``.
"""

from megatron_sft_idx.formats.parquet.reader import Opener, Reader, recognise
from megatron_sft_idx.formats.parquet.writer import KIND, Writer

__all__ = ["FORMAT", "KIND", "Opener", "Reader", "Writer", "recognise"]

FORMAT = "parquet"
