"""Packs as a folder of padded NumPy arrays, ``memmap_padded_v1``: every pack a row of fixed width.

===================  ======================  ========================================================
``input_ids.npy``    [packs, pack_size]      ids; what follows a pack's tokens in its row is never read
``loss_mask.npy``    [packs, pack_size]      uint8, 0 or 1
``packed_len.npy``   [packs]                 uint32, tokens in each pack
``seq_offsets.npy``  [packs + 1]             uint32, CSR offsets of the sequences by pack
``seq_starts.npy``   [sequences]             uint32, where each sequence starts in its pack
``manifest.json``    written last            format, counts, dtypes; here also alignment, padding id, checksums
===================  ======================  ========================================================

A plain manifest does not say how its masks are aligned. The plan this format comes from rolls them right over whole
packs before they are written, which trains the wrong tokens: such folders need ``mask_alignment="rolled-right"``.
"""

from megatron_sft_idx.formats.memmap.reader import Reader, recognise
from megatron_sft_idx.formats.memmap.writer import KIND, MemmapShardWriter, Writer

__all__ = ["FORMAT", "KIND", "MemmapShardWriter", "Reader", "Writer", "recognise"]

FORMAT = "memmap"
