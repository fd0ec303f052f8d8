"""Numbered chunks of JSON lines as a live catalog: ``chunk_00000.jsonl`` and on, written by anybody's producer."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.formats.base import PackRun
from megatron_sft_idx.formats.jsonl_chunks.chunk_file import ChunkFile
from megatron_sft_idx.formats.jsonl_chunks.chunks import chunk_name
from megatron_sft_idx.streaming.chunk_folder import ChunkFolder
from megatron_sft_idx.streaming.chunk_rows import ChunkRows, LineKind, OnBadRow, RowLimits
from megatron_sft_idx.streaming.live import LiveLimits, Stopped, Waiter

__all__ = ["ChunkOptions", "LiveChunks", "OpenChunk"]

logger = logging.getLogger("megatron_sft_idx.streaming")

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.05, 1.0
_LINE_EVERY_SECONDS = 60.0


@dataclass(frozen=True)
class ChunkOptions:
    """How a folder of chunks is read; picklable, the same on all ranks.

    Attributes:
        folder: of the chunks.
        kind: of their lines.
        limits: of their packs.
        on_bad_row: what becomes of lines that cannot be used.
        samples_per_chunk: lines that every chunk but the last has; None for any number.
        num_chunks: how many there will be, where that is known from elsewhere.
        end_files: documents that may say how many there are.
        settle_seconds: the newest chunk is whole when it has not changed for so long.
        max_wait: most seconds to wait for a chunk.
    """

    folder: str
    kind: LineKind
    limits: RowLimits
    on_bad_row: OnBadRow = "error"
    samples_per_chunk: int | None = None
    num_chunks: int | None = None
    end_files: Sequence[str] = ()
    settle_seconds: float = 5.0
    max_wait: float = 480.0


class OpenChunk:
    """One chunk, read line by line as batches need them: memory holds its line bounds and one batch's packs.

    Attributes:
        num_packs: its lines.
        num_tokens: not known without reading all.
    """

    num_tokens: int | None = None

    def __init__(self, chunk: ChunkFile, rows: ChunkRows) -> None:
        self._chunk, self._rows, self._run = chunk, rows, _NOTHING
        self.num_packs = len(chunk)

    def segments(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Read these packs; offsets of their sequences, and the first token and the tokens of each."""
        run = self._run = self._rows.packs(self._chunk, packs.tolist()) if len(packs) else _NOTHING
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(run.pack_sequences)])
        lengths = run.sequence_lengths()
        return offsets, np.cumsum(lengths) - lengths, lengths

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Tokens and label-aligned loss mask of the packs that were read last."""
        return self._run.tokens, self._run.loss_mask


class LiveChunks:
    """``LiveShards`` of a folder of chunks.

    Args:
        options: what and how.
        committed: called after an acknowledgement was written; None where nothing follows from it.
    """

    def __init__(self, options: ChunkOptions, committed: Callable[[], None] | None = None) -> None:
        self.options, self.folder = options, options.folder
        self._committed = committed
        self._rows = ChunkRows(options.kind, options.limits, on_bad_row=options.on_bad_row)
        self._chunks = ChunkFolder(options.folder, settle_seconds=options.settle_seconds, log=logger.info)
        self._counts: dict[int, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return LiveChunks, (self.options, self._committed)

    def limits(self, waiter: Waiter) -> LiveLimits:
        """As the options say."""
        limits = self.options.limits
        return LiveLimits(limits.capacity, limits.max_sequences, limits.sequence_multiple, self.options.kind.pad_id)
