"""Write the golden shards of tests/golden/v1. Their bytes must never change for format version 1.

    python tests/golden/make.py tests/golden/v1
"""

import sys
from pathlib import Path

import numpy as np

from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard import ShardWriter, write_column
from megatron_sft_idx.layout.media_layout import MediaItem


def make(folder: Path) -> list[str]:
    """Write the shards into ``folder`` and return their prefixes."""
    flags, weights = str(folder / "flags"), str(folder / "weights")
    with ShardWriter(flags, token_dtype=np.uint16, capacity=16, sequence_multiple=2, pad_id=0,
                     metadata={"tokenizer": "demo", "é": [1, 2.5, None, True]}) as writer:
        writer.add_pack([11, 12, 13, 14, 15], [0, 1, 0, 1, 0], [0, 3])
        writer.add_pack([65535, 0, 1, 2, 3, 4, 5], [0, 1, 1, 0, 0, 0, 0], [0, 1, 4], mask_alignment="token")
        writer.add_pack([9], [0], [0])
        writer.add_pack(np.arange(100, 116), np.r_[np.ones(15, bool), False], [0])
    with ShardWriter(weights, token_dtype=np.int32, mask_dtype=np.float32) as writer:
        writer.add_pack([2**31 - 1, 0, 70000], [0.5, 1.25, 0.0], [0])
        writer.add_pack(range(300), [0.0, *[1.0] * 298, 0.0], [0, 1])
        writer.add_pack([1, 2, 3, 4], [0, 0, 0, 0], [0, 1, 2, 3])
    columns = str(folder / "columns")
    source = ColumnSpec("sequence", np.uint32, 2, metadata={"files": [{"name": "a.jsonl"}, {"name": "é.jsonl"}]})
    specs = {"source": source, "grade": ColumnSpec("pack", np.float16), "topk": ColumnSpec("token", np.int32, 3, "label")}
    with ShardWriter(columns, token_dtype=np.uint16, columns=specs) as writer:
        for packs in ((([5, 6, 7], [1, 0, 0], [0, 2]), [[0, 3], [1, 0]], [0.5], [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
                      (([8], [0], [0]), [[1, 1]], [1.5], [[10, 11, 12]])):  # fmt: skip
            pack, rows, grade, topk = packs
            writer.add_pack(*pack, columns={"source": rows, "grade": grade, "topk": topk})
    write_column(columns, "attached", np.array([-1, -2, -3], np.int64), per="sequence")
    media = str(folder / "media")
    image = b"\xff\xd8\xff\xd9"
    with ShardWriter(media, token_dtype=np.uint16, capacity=8, media=True) as writer:
        items = [MediaItem("image", 0, 2, image), MediaItem("audio", 2, 1, b"RIFF")]
        writer.add_pack([5, 5, 6, 7, 8], [0, 0, 1, 0, 0], [0, 4], media=items)
        writer.add_pack([1, 2, 3, 5], [1, 0, 0, 0], [0, 2], media=[MediaItem("image", 3, 1, image)])
    return [flags, weights, columns, media]


if __name__ == "__main__":
    make(Path(sys.argv[1]))
