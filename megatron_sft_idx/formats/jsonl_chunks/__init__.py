"""Packs as lines of JSON in numbered chunks, as Megatron-SWIFT's packing producer writes them.

A folder of ``chunk_00000.jsonl``, ``chunk_00001.jsonl``, ...; one pack a line:

================  ===================================================================================
``input_ids``     ids of all sequences end to end
``labels``        the id at the same place where it is trained on, else -100: token-aligned, not shifted
``position_ids``  0, 1, 2, ... from the start of every sequence
``lengths``       tokens in each sequence
``pack_length``   their sum
``num_samples``   how many sequences
================  ===================================================================================

Other fields are left alone. There is no place for loss weights, capacity or padding id.
"""

from megatron_sft_idx.formats.jsonl_chunks.reader import KIND, Reader, recognise
from megatron_sft_idx.formats.jsonl_chunks.writer import Writer

__all__ = ["FORMAT", "KIND", "Reader", "Writer", "recognise"]

FORMAT = "jsonl-chunks"
