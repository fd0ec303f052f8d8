"""Rows of a batch, made slowly and obviously: the twin of the native assembler."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class BatchTwin:
    """Has ``BatchAssembler``'s arguments and methods, and lays every token by itself."""

    def __init__(
        self, source: Any, seq_length: int, *, sequence_multiple: int = 1, width: int | None = None, pad_id: Any = None
    ) -> None:
        self.source, self.seq_length, self.multiple = source, seq_length, sequence_multiple
        self.width = source.most_sequences + 2 if width is None else width
        known = source.pad_id if pad_id is None else pad_id
        self.pad_id = 0 if known is None else known

    def sample(self, pack: int, masked: bool = False) -> dict[str, torch.Tensor]:
        found = self.source.segments(np.array([pack]))
        length, pad = self.seq_length, self.pad_id
        tokens, labels = np.full(length, pad, np.int64), np.full(length, pad, np.int64)
        loss, positions = np.zeros(length, np.float32), np.zeros(length, np.int64)
        logical, padded = [0], [0]
        for shard, start, size in zip(found.shards, found.starts, found.lengths, strict=True):
            ids, mask = (array[start : start + size] for array in self.source.arrays(int(shard)))
            room = -(-int(size) // self.multiple) * self.multiple
            at = padded[-1]
            for j in range(room):
                positions[at + j] = j
                if j < size:
                    tokens[at + j] = ids[j]
                if j < size - 1:
                    labels[at + j] = ids[j + 1]
                    loss[at + j] = 0 if masked else mask[j]
            logical.append(logical[-1] + int(size))
            padded.append(at + room)
        positions[padded[-1] :] = np.arange(length - padded[-1])
        row = {"tokens": tokens, "labels": labels, "loss_mask": loss, "position_ids": positions}
        bounds = logical if self.multiple == 1 else padded
        filled = np.full(self.width, length, np.int32)
        filled[: len(bounds)] = bounds
        row["cu_seqlens"] = filled
        row["max_seqlen"] = np.array(np.diff([*bounds, length]).max(), np.int32)
        return {key: torch.from_numpy(value) for key, value in row.items()}

    def assemble(self, packs: Any, out: Any = None) -> dict[str, torch.Tensor]:
        assert out is None
        rows = [self.sample(int(pack)) for pack in packs]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
