"""A folder of padded arrays: for any headers, manifest and numbers, packs come from inside their rows.

The input is the manifest, then the five arrays.
"""

from __future__ import annotations

from fuzz.contract import refused, scratch
from fuzz.packed import packs_of
from fuzz.pieces import split
from fuzz.repair import repair_arrays

from megatron_sft_idx.formats.memmap import Reader, recognise

NAMES = ("manifest.json", "input_ids.npy", "loss_mask.npy", "packed_len.npy", "seq_offsets.npy", "seq_starts.npy")


def run(data: bytes) -> None:
    folder = scratch("memmap")
    files = dict(zip(NAMES, split(data, len(NAMES)), strict=True))
    for whole in (files, repair_arrays(files)):
        for name, content in whole.items():
            (folder / name).write_bytes(content)
        recognise(str(folder))
        with refused(str(folder)):
            packs = packs_of(Reader(folder))
            for alignment in ("label", "token", "rolled-right"):
                with refused(str(folder)):
                    again = packs_of(Reader(folder, mask_alignment=alignment))
                    assert [(ids, bounds) for ids, _, bounds in again] == [(ids, bounds) for ids, _, bounds in packs]
