"""Input files to pieces, the units of work that worker processes turn into rows.

Which pieces there are depends on the content of the files and on ``piece_nbytes`` alone, so the number of
workers changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs.byte_stream import read_blocks, stream_blocks
from megatron_sft_idx.chat.inputs.columnar import arrow_batches, parquet_batches, rows_of_stream
from megatron_sft_idx.chat.inputs.cutting import MAX_ROW_NBYTES, Run, cut_array, cut_lines
from megatron_sft_idx.chat.inputs.files import InputFile
from megatron_sft_idx.chat.inputs.json_value import parse_json
from megatron_sft_idx.errors import SequenceError

__all__ = ["ColumnarPiece", "JsonPiece", "Piece", "iter_pieces", "stream_pieces"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece(ABC):
    """Some consecutive rows of one file; picklable.

    Attributes:
        path: the file, as error messages name it.
        first: position of the first row: the line number in JSON-lines files, else the row number; from 1.
        num_bytes: bytes of the file as it is on disk that went into this piece, for progress; over a file
            they sum to its size or less.
        payload: the bytes that hold the rows.
    """

    path: str
    first: int
    num_bytes: int
    payload: bytes

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, Any | SequenceError]]:
        """Yields (position, parsed row); the error in place of a row that cannot be parsed."""

    def fingerprint(self) -> str:
        """Says whether two pieces hold the same bytes, wherever they come from: xxh3_128 in hex."""
        return xxhash.xxh3_128_hexdigest(self.payload)


@dataclass(frozen=True, slots=True, eq=False)
class JsonPiece(Piece):
    """JSON lines, or elements of a JSON array.

    Attributes:
        ends: where each row ends in the payload, int64 [rows]; one separator byte follows.
        is_array: a blank row is then an error; a blank line is not.
    """

    ends: NDArray[np.int64]
    is_array: bool

    def rows(self) -> Iterator[tuple[int, Any | SequenceError]]:
        """Yields (position, parsed row); blank lines are counted but not yielded."""
        start = 0
        for position, end in enumerate(self.ends.tolist(), self.first):
            raw, start = self.payload[start:end].strip(b" \t\r\n"), end + 1
            if raw:
                yield position, self._parse(raw, position)
            elif self.is_array:
                reason = "nothing where an element should be: a comma too many in the array"
                yield position, SequenceError(self.path, position, reason)

    def _parse(self, raw: bytes, position: int) -> Any | SequenceError:
        try:
            return parse_json(raw)
        except ValueError as error:
            return SequenceError(self.path, position, str(error))


@dataclass(frozen=True, slots=True, eq=False)
class ColumnarPiece(Piece):
    """Rows of a Parquet or Arrow file; the payload is an Arrow stream."""

    def rows(self) -> Iterator[tuple[int, Any | SequenceError]]:
        """Yields (position, row); keys that are null are left out."""
        for position, row in enumerate(rows_of_stream(self.payload), self.first):
            if isinstance(row, ValueError):
                yield position, SequenceError(self.path, position, f"cannot be read: {row}")
            else:
                yield position, row


def iter_pieces(
    files: Iterable[InputFile], *, piece_nbytes: int = 8 << 20, max_row_nbytes: int = MAX_ROW_NBYTES
) -> Iterator[Piece]:
    """Cuts the files into pieces of about ``piece_nbytes`` of decompressed data, in order.

    A piece holds whole rows: a longer row is a piece of its own. Memory is bounded by the piece, or the
    longest row.

    Raises:
        FormatError: a file cannot be read, is broken, or has a row longer than ``max_row_nbytes``. Pieces
            before that were already yielded.
        SFTIndexError: an extra that the file needs is not installed.
    """
    if piece_nbytes < 1 or max_row_nbytes < 1:
        raise ValueError(f"piece and row sizes must be positive, got {piece_nbytes} and {max_row_nbytes}")
    for file in files:
        if file.kind in ("lines", "array"):
            yield from _json_pieces(file, piece_nbytes, max_row_nbytes)
        else:
            yield from _columnar_pieces(file, piece_nbytes)


def stream_pieces(
    stream: BufferedReader, *, name: str, piece_nbytes: int, max_row_nbytes: int = MAX_ROW_NBYTES
) -> Iterator[Piece]:
    """As ``iter_pieces``, of JSON lines that come in a pipe.

    Where the pieces are cut depends on the bytes alone, not on how they came.

    Raises:
        FormatError: the pipe cannot be read, holds compressed data, or a row longer than ``max_row_nbytes``.
    """
    blocks = stream_blocks(stream, name)
    runs = cut_lines(blocks, path=name, piece_nbytes=piece_nbytes, max_row_nbytes=max_row_nbytes)
    yield from _pieces_of_runs(runs, name, is_array=False)


def _json_pieces(file: InputFile, piece_nbytes: int, max_row_nbytes: int) -> Iterator[Piece]:
    is_array = file.kind == "array"
    cut = cut_array if is_array else cut_lines
    blocks = read_blocks(file.path, file.compression, file.etag)
    runs = cut(blocks, path=file.path, piece_nbytes=piece_nbytes, max_row_nbytes=max_row_nbytes)
    yield from _pieces_of_runs(runs, file.path, is_array=is_array)


def _pieces_of_runs(runs: Iterable[Run], path: str, *, is_array: bool) -> Iterator[Piece]:
    first, consumed = 1, 0
    for run in runs:
        num_bytes, consumed = run.position - consumed, run.position
        yield JsonPiece(path, first, num_bytes, run.payload, run.ends, is_array)
        first += len(run.ends)


def _columnar_pieces(file: InputFile, piece_nbytes: int) -> Iterator[Piece]:
    batches = parquet_batches if file.kind == "parquet" else arrow_batches
    first, consumed = 1, 0
    for payload, num_rows, position in batches(file.path, piece_nbytes, file.etag):
        yield ColumnarPiece(file.path, first, position - consumed, payload)
        first, consumed = first + num_rows, position
