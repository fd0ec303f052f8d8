"""Lines of a chunk to packs, when a batch needs them: pre-packed ones parsed, raw chats tokenised.

Every line is one pack, whatever is wrong with it: a line that cannot be used is an error, or, where that is asked for,
a pack of one token whose loss is masked. So a chunk's packs are counted without reading them, and the order of
everything behind a bad line is the same on all ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from megatron_sft_idx.chat.inputs.pieces import JsonPiece
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PackRun
from megatron_sft_idx.formats.checks import checked_run
from megatron_sft_idx.formats.jsonl_chunks import ChunkFile, parse, recognise, run_of
from megatron_sft_idx.preprocess import EncodingOptions, RowEncoder

__all__ = ["ChunkRows", "LineKind", "OnBadRow", "PackedLines", "RawLines", "RowLimits"]

OnBadRow = Literal["error", "skip"]

logger = logging.getLogger("megatron_sft_idx.streaming")


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What a pack has to keep to, as nothing can be known of packs that are not written yet.

    Attributes:
        capacity: most token positions.
        sequence_multiple: each sequence counts as its length rounded up to this.
        max_sequences: most sequences.
        vocab_size: ids are below this; None for any.
    """

    capacity: int
    sequence_multiple: int
    max_sequences: int
    vocab_size: int | None = None

    def check(self, run: PackRun) -> None:
        """ValueError unless a run of one pack keeps to them."""
        multiple = self.sequence_multiple
        positions = int((-(-run.sequence_lengths() // multiple) * multiple).sum())
        if positions > self.capacity:
            padded = f" with sequences padded to multiples of {multiple}" if multiple > 1 else ""
            raise ValueError(
                f"{positions:,} tokens{padded}, a pack holds {self.capacity:,}; raise --seq-length, or shorten it"
            )
        if (sequences := len(run.seq_starts)) > self.max_sequences:
            raise ValueError(
                f"{sequences:,} sequences, a pack holds {self.max_sequences:,}; raise --max-sequences-per-pack"
            )
        if self.vocab_size is not None and (largest := int(run.tokens.max())) >= self.vocab_size:
            raise ValueError(f"id {largest}, the vocabulary has {self.vocab_size:,}; raise --vocab-size")


class LineKind(Protocol):
    """One line to one pack. Pickles small: what is heavy is made where lines are read."""

    @property
    def pad_id(self) -> int | None:
        """The tokenizer's padding id, None where unknown."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """Of the tokenizer, None where unknown."""
        ...

    def check(self, path: str) -> None:
        """FormatError where a chunk's first line shows that it is of another kind."""
        ...

    def pack(self, chunk: ChunkFile, index: int) -> PackRun:
        """The pack of one line; ValueError says what is wrong with it."""
        ...


class PackedLines:
    """Lines that a packing producer wrote."""

    pad_id: int | None = None
    vocab_size: int | None = None

    def check(self, path: str) -> None:
        """Every line says by itself whether it is one."""

    def pack(self, chunk: ChunkFile, index: int) -> PackRun:
        """The pack of one line; ValueError says what is wrong with it."""
        return run_of(chunk.path, index, [parse(chunk.line(index))])


class RawLines:
    """Raw chats, each a pack of one sequence.

    Args:
        options: how a chat becomes ids and a mask; the policy on bad rows in them has no say here.
    """

    def __init__(self, options: EncodingOptions) -> None:
        self.options = options

    def __reduce__(self) -> tuple[Any, ...]:
        made: RowEncoder | None = self.__dict__.get("encoder")
        return RawLines, (self.options if made is None else made.options,)

    @cached_property
    def encoder(self) -> RowEncoder:
        """Made by the process that tokenises."""
        return RowEncoder(self.options)

    @property
    def pad_id(self) -> int | None:
        """The tokenizer's padding id, None where it names none."""
        return self.encoder.tokenizer.pad_id

    @property
    def vocab_size(self) -> int | None:
        """Of the tokenizer."""
        return self.encoder.tokenizer.vocab_size

    def check(self, path: str) -> None:
        """FormatError where a chunk is pre-packed: its packs would be read as single sequences."""
        if (evidence := recognise(path)) is not None and os.path.getsize(path):
            raise FormatError(f"{path}: {evidence}: it is packed already; leave --tokenizer-model out")

    def pack(self, chunk: ChunkFile, index: int) -> PackRun:
        """The pack of one line; ValueError says what is wrong with it."""
        raw = chunk.line(index)
        piece = self.encoder.encode(JsonPiece(chunk.path, index, len(raw), raw, np.array([len(raw)]), False))
        if piece.bad_rows:
            raise piece.bad_rows[0]
        tokens, mask = piece.input_ids, piece.loss_mask
        return checked_run(chunk.path, index, tokens, mask, [0], [len(tokens)], [1], mask_alignment="token")


class ChunkRows:
    """Packs of chunks, within limits; one object a process, which counts what it had to leave out.

    Args:
        kind: of the lines.
        limits: of the packs.
        on_bad_row: ``error`` stops at the first line that cannot be used or does not fit; ``skip`` serves a pack of
            one padding token with its loss masked in place of each, and says so.

    Attributes:
        skipped: lines that this process could not use.
    """

    def __init__(self, kind: LineKind, limits: RowLimits, *, on_bad_row: OnBadRow = "error") -> None:
        self.kind, self.limits, self.on_bad_row = kind, limits, on_bad_row
        self.skipped = 0

    def packs(self, chunk: ChunkFile, indices: Sequence[int]) -> PackRun:
        """The packs of these lines, end to end.

        Raises:
            SequenceError: a line that cannot be used, with its file and line.
            FormatError: the chunk changed since it was opened.
        """
        return _joined([self._pack(chunk, index) for index in indices])

    def _pack(self, chunk: ChunkFile, index: int) -> PackRun:
        try:
            run = self.kind.pack(chunk, index)
            self.limits.check(run)
        except FormatError:
            raise
        except (ValueError, RecursionError) as error:
            reason = error.reason if isinstance(error, SequenceError) else str(error)
            bad = SequenceError(chunk.path, chunk.line_number(index), reason)
            if self.on_bad_row == "error":
                raise SequenceError(
                    bad.source, bad.position, f"{reason}; --on-bad-row skip trains on without it"
                ) from None
            self.skipped += 1
            logger.warning("skipped %s; %d left out by this process", bad, self.skipped)
            return _masked(self.kind.pad_id or 0)
        return run


def _masked(pad_id: int) -> PackRun:
    one = np.ones(1, np.int64)
    return PackRun(np.array([pad_id], np.int32), np.zeros(1, np.uint8), np.zeros(1, np.int64), one, one)


def _joined(runs: Sequence[PackRun]) -> PackRun:
    if len(runs) == 1:
        return runs[0]
    return PackRun(
        np.concatenate([run.tokens for run in runs]),
        np.concatenate([run.loss_mask for run in runs]),
        np.concatenate([run.seq_starts for run in runs]),
        np.concatenate([run.pack_lengths for run in runs]),
        np.concatenate([run.pack_sequences for run in runs]),
    )
