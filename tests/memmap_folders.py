"""Folders of padded arrays (the memmap format), written like other tools write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sample_packs import Sample

ARRAYS = ("input_ids", "loss_mask", "packed_len", "seq_offsets", "seq_starts")
WHOLE = sorted(["manifest.json", *(f"{name}.npy" for name in ARRAYS)])


def loaded(folder: Path) -> dict[str, Any]:
    """Return the five arrays, as numpy reads them."""
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}


def expected_arrays(packs: Sequence[Sample], width: int, dtype: Any = np.int32) -> dict[str, Any]:
    ids, mask = np.zeros((len(packs), width), dtype), np.zeros((len(packs), width), np.uint8)
    for i, pack in enumerate(packs):
        ids[i, : len(pack.tokens)] = pack.tokens
        mask[i, : len(pack.tokens)] = pack.label_mask
    return {
        "input_ids": ids,
        "loss_mask": mask,
        "packed_len": np.array([len(p.tokens) for p in packs], np.uint32),
        "seq_offsets": np.cumsum([0, *(len(p.starts) for p in packs)]).astype(np.uint32),
        "seq_starts": np.array([s for p in packs for s in p.starts], np.uint32),
    }


def make_folder(folder: Path, packs: Sequence[Sample], width: int, **changes: Any) -> Path:
    """Make a folder like other tools: open_memmap, then a plain manifest.

    ``changes`` replace arrays or manifest keys.
    """
    folder.mkdir(exist_ok=True)
    for name, array in expected_arrays(packs, width).items():
        values = np.asarray(changes.pop(name, array))
        if values.size:
            out = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", values.dtype, values.shape)
            out[:] = values
        else:  # open_memmap cannot create an empty array
            np.save(folder / f"{name}.npy", values)
    manifest = {"version": "1.0", "format": "memmap_padded_v1", "num_bins": len(packs), "pack_size": width}
    manifest |= {"dtype": "<i4", "loss_mask_dtype": "<u1", "index_dtype": "<u4", "bins_written": len(packs)}
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}, indent=2))
    return folder
