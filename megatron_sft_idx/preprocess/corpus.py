"""Inputs to a tokenised corpus: an unpacked shard, one sequence a pack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from megatron_sft_idx.chat.inputs.files import InputFile, total_bytes
from megatron_sft_idx.chat.inputs.pieces import Piece, iter_pieces
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.preprocess.encoding import EncodedPiece, EncodingOptions, RowEncoder
from megatron_sft_idx.preprocess.progress import Progress
from megatron_sft_idx.preprocess.workers import map_in_order
from megatron_sft_idx.shard import Shard, ShardWriter

__all__ = ["CorpusReport", "build_corpus", "corpus_report", "find_corpus", "source_fingerprint"]

# What a worker gets at a time. Part of no result: the corpus is the same for any size.
_PIECE_NBYTES = 1 << 20
_MAX_LISTED = 10_000


@dataclass(slots=True)
class CorpusReport:
    """What became of the input.

    Attributes:
        rows: rows read, bad ones included.
        skipped: rows that could not be used.
        bad_rows: the first ten thousand of them, as messages.
        notes: counts by name: tokens that straddle a span's edge, control tokens kept as text, and so on.
        reused: the corpus was there already, made from the same input and options.
    """

    rows: int = 0
    skipped: int = 0
    bad_rows: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    reused: bool = False


class _Fingerprint:
    """One hash over the content of all input, taken as the pieces go by."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self._hash.update(piece.fingerprint().encode())
            yield piece

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def source_fingerprint(files: Sequence[InputFile]) -> str:
    """Hash of the content of all inputs in order: reads them, tokenises nothing."""
    fingerprint = _Fingerprint()
    for _ in fingerprint.watch(iter_pieces(files, piece_nbytes=_PIECE_NBYTES)):
        pass
    return fingerprint.hexdigest()


def _make_task(options: EncodingOptions) -> Callable[[Piece], EncodedPiece]:
    return RowEncoder(options).encode


def _name_of(piece: Piece) -> str:
    return f"{piece.path}:{piece.first}"


def build_corpus(
    files: Sequence[InputFile],
    encoder: RowEncoder,
    prefix: str,
    *,
    workers: int,
    log_interval: int,
    overwrite: bool,
    log: Callable[[str], None],
) -> CorpusReport:
    """Tokenise the inputs into an unpacked shard at ``prefix``, in the order of the input.

    The bytes do not depend on ``workers``. Masks become float32 from the first weight on that needs it.

    Raises:
        SequenceError: a bad row, with its file and line, unless bad rows are skipped.
        FormatError: the input has no usable row.
    """
    report = CorpusReport()
    fingerprint = _Fingerprint()
    pieces = fingerprint.watch(iter_pieces(files, piece_nbytes=_PIECE_NBYTES))
    results = map_in_order(_make_task, (encoder.options,), pieces, workers=workers, name_of=_name_of)
    writer = ShardWriter(prefix, token_dtype=encoder.token_dtype, pad_id=encoder.tokenizer.pad_id, overwrite=overwrite)
    progress = Progress("tokenising", total_bytes(files), unit="B", log_interval=log_interval, items="rows")
    with writer, progress:
        notes: Counter[str] = Counter()
        for piece in results:
            _add(writer, piece)
            _note(report, piece, encoder.options.on_bad_row, log)
            notes.update(piece.notes)
            progress.update(piece.num_bytes, piece.rows)
        if not writer.num_packs:
            raise FormatError(
                f"{files[0].path}: no usable row in the input ({report.rows} rows, {report.skipped} skipped)"
            )
        notes["first_token_masks_dropped"] += writer.dropped_first_tokens
        report.notes = {name: count for name, count in sorted(notes.items()) if count}
        writer.metadata = encoder.describe() | {
            "sources": {
                "fingerprint": fingerprint.hexdigest(),
                "rows": report.rows,
                "skipped": report.skipped,
            },
            "notes": report.notes,
        }
    return report


def _add(writer: ShardWriter, piece: EncodedPiece) -> None:
    if piece.loss_mask.dtype == np.float32:
        writer.promote_mask_dtype()
    ones = np.ones(len(piece.lengths), np.int64)
    writer.add_packs(piece.input_ids, piece.loss_mask, np.zeros_like(ones), piece.lengths, ones, mask_alignment="token")


def _note(report: CorpusReport, piece: EncodedPiece, on_bad_row: str, log: Callable[[str], None]) -> None:
    report.rows += piece.rows
    for error in piece.bad_rows:
        if on_bad_row == "error":
            raise SequenceError(error.source, error.position, f"{error.reason}; --on-bad-row skip goes on without it")
        report.skipped += 1
        if len(report.bad_rows) < _MAX_LISTED:
            report.bad_rows.append(str(error))
        if report.skipped <= 20:
            log(f"skipped {error}")
        elif report.skipped == 21:
            log("skipped more rows; the summary file lists them")


def find_corpus(prefix: str, encoder: RowEncoder, files: Sequence[InputFile], *, overwrite: bool) -> Shard | None:
    """The corpus an earlier run left at ``prefix``, if it is what this run would make.

    Raises:
        FormatError: it is another one, and ``overwrite`` is False; says what differs.
    """
    if ShardPaths.of(prefix).missing():
        return None
    shard = Shard(prefix)
    found, wanted = shard.header.metadata, encoder.describe()
    differs = sorted(key for key in wanted if found.get(key) != wanted[key])
    if not differs and found.get("sources", {}).get("fingerprint") != source_fingerprint(files):
        differs = ["input"]
    if not differs:
        return shard
    if overwrite:
        return None
    raise FormatError(
        f"{prefix}: a tokenised corpus is here, made with another {', '.join(differs)}; pass --overwrite to replace it"
    )


def corpus_report(shard: Shard) -> CorpusReport:
    """What the header of a reused corpus remembers."""
    metadata: dict[str, Any] = shard.header.metadata
    sources = metadata["sources"]
    return CorpusReport(sources["rows"], sources["skipped"], [], metadata["notes"], reused=True)
