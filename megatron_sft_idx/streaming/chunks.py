"""Numbered chunks of JSON lines as a live catalog: ``chunk_00000.jsonl`` and on, written by anybody's producer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.catalog import Catalog, Patience
from megatron_sft_idx.catalog.folder import END
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.formats.base import PackRun
from megatron_sft_idx.formats.jsonl_chunks import ChunkFile, chunk_name, chunk_numbers
from megatron_sft_idx.streaming.chunk_folder import ChunkFolder
from megatron_sft_idx.streaming.chunk_rows import ChunkRows, LineKind, OnBadRow, RowLimits
from megatron_sft_idx.streaming.live import LiveLimits, Waiter

__all__ = ["ChunkOptions", "LiveChunks", "OpenChunk"]

logger = logging.getLogger("megatron_sft_idx.streaming")

_NOTHING = PackRun(
    np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
)


@dataclass(frozen=True)
class ChunkOptions:
    """How a folder of chunks is read; picklable, the same on all ranks.

    Attributes:
        folder: of the chunks.
        kind: of their lines.
        limits: of their packs.
        on_bad_row: what becomes of lines that cannot be used.
        samples_per_chunk: lines that every chunk but the last has; None for any number.
        num_chunks: how many there will be, where that is known beforehand.
        end_folders: where a document may say, once the last one is whole, how many there are; as in a catalog.
        settle_seconds: the newest chunk is whole when it has not changed for so long.
        max_wait: most seconds to wait for a chunk.
    """

    folder: str
    kind: LineKind
    limits: RowLimits
    on_bad_row: OnBadRow = "error"
    samples_per_chunk: int | None = None
    num_chunks: int | None = None
    end_folders: tuple[str, ...] = ()
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
        # A chunk is mostly opened right after it was counted, which has found its lines.
        self._counted: tuple[int, ChunkFile] | None = None
        # Chunks that are right only if they are the last one.
        self._uneven: dict[int, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return LiveChunks, (self.options, self._committed)

    def limits(self, waiter: Waiter) -> LiveLimits:
        """As the options say."""
        limits = self.options.limits
        return LiveLimits(limits.capacity, limits.max_sequences, limits.sequence_multiple, self.options.kind.pad_id)

    def end(self) -> int | None:
        """How many chunks there are in all, once somebody has said so.

        Raises:
            FormatError: there are more.
        """
        declared, promised = self._declared_end(), self.options.num_chunks
        end = min((count for count in (declared, promised) if count is not None), default=None)
        newest = None if end is None else self._chunks.newest()
        if newest is not None and end is not None and newest >= end:
            where = "--num-chunks" if end == promised else END
            raise FormatError(
                f"{self._chunks.path_of(newest)}: it is there though the end was declared at {end} chunks ({where}):"
                f" its producer was not through; resume with a longer --end-after, once {END} is removed"
            )
        return end

    def _declared_end(self) -> int | None:
        """How many chunks there are, where that was written down when the last one was whole."""
        ends = [Catalog(folder).end() for folder in self.options.end_folders]
        return min((end for end in ends if end is not None), default=None)

    def numbers(self) -> list[int]:
        """Chunks that are there, in order, the one that is being written included."""
        return chunk_numbers(self.folder) if os.path.isdir(self.folder) else []

    def wait(self, number: int, waiter: Waiter, uncommitted: Callable[[], int] = lambda: 0) -> bool:
        """Wait until a chunk is whole: True; or until it is known that it never will be: False.

        What is not committed makes no difference: nobody knows whether a producer of chunks waits for its consumers.

        Raises:
            FormatError: it is torn, or missing among others, or too many are there.
            SFTIndexError: it did not come in time.
            Stopped: the waiter stopped.
        """
        patience = Patience(waiter.pause_or_stop)
        while True:
            end = self.end()
            self._require_even()
            self._chunks.require_unchanged()
            if end is not None and number >= end:
                return False
            if self._chunks.is_whole(number, self._declared_end()):
                return True
            waited = patience.waited
            if waited >= self.options.max_wait:
                raise SFTIndexError(
                    f"{self._chunks.path_of(number)}: {waiter.who} waited {waited:.0f} s for it, as long as it may"
                    f" (--max-wait): {self._chunks.describe(number)}; see whether its producer is alive, have the end"
                    " declared (--end-after), or wait longer"
                )
            if waiter.speaks and patience.line_is_due():
                logger.info(
                    "%s waits %.0f s for %s; %s", waiter.who, waited, self.name(number), self._chunks.describe(number)
                )
            patience.pause()

    def count(self, number: int) -> int | None:
        """Lines of a chunk; None where it is not there, whole."""
        if number not in self._counts:
            path = self._chunks.path_of(number)
            if not os.path.exists(path) or not self._chunks.is_whole(number, self._declared_end()):
                return None
            chunk = self._opened(number)
            self._counted, self._counts[number] = (number, chunk), len(chunk)
        return self._counts[number]

    def open(self, number: int) -> OpenChunk:
        """Find the lines of a chunk that is whole, which reads all of it.

        Raises:
            FormatError: it is of another kind, or has another number of lines than every chunk should have.
        """
        self.options.kind.check(self._chunks.path_of(number))
        counted, self._counted = self._counted, None
        chunk = counted[1] if counted and counted[0] == number else self._opened(number)
        return OpenChunk(chunk, self._rows)

    def name(self, number: int) -> str:
        """``chunk 8``."""
        return f"chunk {number} ({chunk_name(number)})"

    def committed(self) -> None:
        """Mark what every consumer is done with."""
        if self._committed is not None:
            self._committed()

    def _opened(self, number: int) -> ChunkFile:
        chunk, expected = ChunkFile(self._chunks.path_of(number)), self.options.samples_per_chunk
        if expected is not None and len(chunk) != expected:
            self._uneven[number] = len(chunk)
            self._require_even()
        return chunk

    def _require_even(self) -> None:
        """FormatError where a chunk that is not the last one has another number of lines than it should have."""
        newest, expected = self._chunks.newest(), self.options.samples_per_chunk or 0
        for number, lines in self._uneven.items():
            # The last one may be freed already.
            if lines > expected or (newest is not None and newest > number):
                raise FormatError(
                    f"{self._chunks.path_of(number)}: it has {lines:,} lines, expected {expected:,}"
                    " (--samples-per-chunk) in every chunk but the last; counts are taken from the chunks themselves,"
                    " so the option may be left out"
                )
