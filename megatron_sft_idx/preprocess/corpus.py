"""Inputs to a tokenised corpus: an unpacked shard, one sequence a pack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_sft_idx.chat.inputs.files import InputFile, total_bytes
from megatron_sft_idx.chat.inputs.pieces import Piece
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.preprocess.encoding import EncodedPiece, EncodingOptions, RowEncoder
from megatron_sft_idx.preprocess.progress import Progress
from megatron_sft_idx.preprocess.source import Source
from megatron_sft_idx.preprocess.workers import map_in_order
from megatron_sft_idx.shard import ShardWriter

__all__ = [
    "MAX_LISTED",
    "CorpusReport",
    "CorpusRun",
    "add_piece",
    "build_corpus",
    "corpus_report",
    "make_encode_task",
    "name_of_piece",
    "note_bad_row",
    "note_rows",
]

MAX_LISTED = 10_000


@dataclass(slots=True)
class CorpusReport:
    """What became of the input.

    Attributes:
        rows: rows read, bad ones included.
        skipped: rows that could not be used.
        bad_rows: the first ten thousand of them, as messages.
        notes: counts by name: tokens that straddle a span's edge, control tokens kept as text, and so on.
        reused: the corpus was there already, made from the same input and options.
        straddling: a token that brought characters of a header into what is trained on, once one was met.
    """

    rows: int = 0
    skipped: int = 0
    bad_rows: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    reused: bool = False
    straddling: str = ""


@dataclass(slots=True)
class CorpusRun:
    """A corpus in the making: where it is written, where its input comes from, and how far it has come.

    What ``mark`` notes is all that a later run needs to go on from there, once it has read the input up to there.

    Attributes:
        writer: of the corpus.
        source: the pieces of input; those that are done have been taken from it.
        report: of the pieces that are done, but for its notes.
        notes: theirs.
        num_bytes: theirs, of the input files, for progress.
        num_pieces: how many they are.
        fingerprint: of their content.
    """

    writer: ShardWriter
    source: Source
    report: CorpusReport = field(default_factory=CorpusReport)
    notes: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    num_pieces: int = 0
    fingerprint: str = ""

    def add(self, piece: EncodedPiece, on_bad_row: str, log: Callable[[str], None]) -> None:
        """Take in one piece, and mark that it is done."""
        add_piece(self.writer, piece)
        listed = len(self.report.bad_rows)
        note_rows(self.report, piece, on_bad_row, log)
        self.notes.update(piece.notes)
        self.num_bytes += piece.num_bytes
        self.num_pieces += 1
        self.fingerprint = self.source.done()
        self.mark(bad_rows=self.report.bad_rows[listed:])

    def mark(self, **more: Any) -> None:
        """Note in the corpus's journal how far this has come, and what is new since the last mark."""
        report = self.report
        state = {
            "pieces": self.num_pieces,
            "fingerprint": self.fingerprint,
            "num_bytes": self.num_bytes,
            "rows": report.rows,
            "skipped": report.skipped,
            "notes": dict(self.notes),
        }
        self.writer.mark(state | more)


def add_piece(writer: ShardWriter, piece: EncodedPiece) -> None:
    """Add the sequences of a piece, one a pack; masks become float32 from the first weight on that needs it."""
    if piece.loss_mask.dtype == np.float32:
        writer.promote_mask_dtype()
    ones = np.ones(len(piece.lengths), np.int64)
    writer.add_packs(piece.input_ids, piece.loss_mask, np.zeros_like(ones), piece.lengths, ones, mask_alignment="token")


def make_encode_task(options: EncodingOptions) -> Callable[[Piece], EncodedPiece]:
    """What a worker does."""
    return RowEncoder(options).encode


def name_of_piece(piece: Piece) -> str:
    """The piece's first row, as errors about it say."""
    return f"{piece.path}:{piece.first}"


def build_corpus(
    run: CorpusRun,
    files: Sequence[InputFile],
    encoder: RowEncoder,
    *,
    workers: int,
    log_interval: int,
    log: Callable[[str], None],
) -> CorpusReport:
    """Tokenise what is left of the input, in its order, and publish the corpus.

    The bytes do not depend on ``workers``. Masks become float32 from the first weight on that needs it. When
    interrupted, what is done stays, to be gone on with; an error removes it.

    Raises:
        SequenceError: a bad row, with its file and line, unless bad rows are skipped.
        FormatError: the input has no usable row.
    """
    results = map_in_order(make_encode_task, (encoder.options,), run.source, workers=workers, name_of=name_of_piece)
    progress = Progress("tokenising", total_bytes(files), unit="B", log_interval=log_interval, items="rows")
    report, writer = run.report, run.writer
    rows_kept = report.rows
    try:
        with writer, progress:
            progress.start_at(run.num_bytes, report.rows)
            for piece in results:
                run.add(piece, encoder.options.on_bad_row, log)
                rows_kept = report.rows
                progress.update(piece.num_bytes, piece.rows)
            if not writer.num_packs:
                raise FormatError(
                    f"{files[0].path}: no usable row in the input ({report.rows} rows, {report.skipped} skipped)"
                )
            run.notes["first_token_masks_dropped"] += writer.dropped_first_tokens
            report.notes = {name: count for name, count in sorted(run.notes.items()) if count}
            sources = {"fingerprint": run.source.fingerprint, "rows": report.rows, "skipped": report.skipped}
            writer.metadata = encoder.describe() | {"sources": sources, "notes": report.notes}
    except (KeyboardInterrupt, SystemExit):
        log(
            f"interrupted; {rows_kept:,} rows are kept at {writer.prefix}: pass --resume to go on,"
            " or --overwrite to start anew"
        )
        raise
    return report


def note_rows(report: CorpusReport, piece: EncodedPiece, on_bad_row: str, log: Callable[[str], None]) -> None:
    """Count the rows of a piece, and say which are skipped.

    Raises:
        SequenceError: there is a bad row, and bad rows are not skipped.
    """
    report.rows += piece.rows
    if piece.straddling and not report.straddling:
        report.straddling = piece.straddling
        log(
            f"warning: tokens such as {piece.straddling!r} begin in what the chat template writes before an answer and"
            " are trained on, as transformers trains on them; --straddling exclude leaves them out"
        )
    for error in piece.bad_rows:
        note_bad_row(report, error, on_bad_row, log)


def note_bad_row(report: CorpusReport, error: SequenceError, on_bad_row: str, log: Callable[[str], None]) -> None:
    """Count and list a row that cannot be used. SequenceError unless bad rows are skipped."""
    if on_bad_row == "error":
        raise SequenceError(error.source, error.position, f"{error.reason}; --on-bad-row skip goes on without it")
    report.skipped += 1
    if len(report.bad_rows) < MAX_LISTED:
        report.bad_rows.append(str(error))
    if report.skipped <= 20:
        log(f"skipped {error}")
    elif report.skipped == 21:
        log("skipped more rows, which are not shown")


def corpus_report(header: Header) -> CorpusReport:
    """What the header of a finished corpus, or of a shard packed from it, remembers."""
    sources = header.metadata["sources"]
    return CorpusReport(sources["rows"], sources["skipped"], [], header.metadata["notes"], reused=True)
