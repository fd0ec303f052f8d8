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

from megatron_sft_idx._native import scan_json_array
from megatron_sft_idx.chat.inputs.columnar import arrow_batches, parquet_batches, rows_of_stream
from megatron_sft_idx.chat.inputs.files import InputFile
from megatron_sft_idx.chat.inputs.json_value import parse_json
from megatron_sft_idx.chat.inputs.opening import read_blocks, stream_blocks
from megatron_sft_idx.errors import FormatError, SequenceError

__all__ = [
    "MAX_ROW_NBYTES",
    "ColumnarPiece",
    "JsonPiece",
    "Piece",
    "Run",
    "cut_array",
    "cut_lines",
    "iter_pieces",
    "stream_pieces",
]

# No chat is this long; a file without line ends must not fill the memory before it is found out.
MAX_ROW_NBYTES = 1 << 30


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


_JSON_SPACE = b" \t\r\n"

Blocks = Iterator[tuple[bytes, int]]
# A block, where rows end in it (at these separator bytes), and the bytes of the file read so far.
_Marked = Iterator[tuple[bytes, NDArray[np.int64], int]]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Rows end to end with one separator byte between them.

    Attributes:
        payload: the rows' bytes.
        ends: where each row ends in ``payload``, int64 [rows]; the next one starts a byte later.
        position: bytes of the file read when the run was cut.
    """

    payload: bytes
    ends: NDArray[np.int64]
    position: int


def cut_lines(blocks: Blocks, *, path: str, piece_nbytes: int, max_row_nbytes: int) -> Iterator[Run]:
    """Cuts at newlines; blank lines are rows too. The last line may lack its newline."""
    marked = ((block, np.flatnonzero(np.frombuffer(block, np.uint8) == 10), at) for block, at in blocks)
    return _cut(marked, path=path, piece_nbytes=piece_nbytes, max_row_nbytes=max_row_nbytes)


def cut_array(blocks: Blocks, *, path: str, piece_nbytes: int, max_row_nbytes: int) -> Iterator[Run]:
    """Cuts between the elements of the one JSON array that the stream holds.

    Only brackets and strings are followed: what stands between two commas may be anything, blank included.

    Raises:
        FormatError: no array, or it is never closed, or something follows it.
    """
    marked = _mark_elements(blocks, path)
    runs = _cut(marked, path=path, piece_nbytes=piece_nbytes, max_row_nbytes=max_row_nbytes)
    first = next(runs)
    # ``[]`` looks like one blank element. A blank one before others is a comma too many.
    if len(first.ends) == 1 and not first.payload.strip(_JSON_SPACE):
        if (second := next(runs, None)) is None:
            return
        yield first
        first = second
    yield first
    yield from runs


def _mark_elements(blocks: Blocks, path: str) -> _Marked:
    depth, in_string, escaped = 0, False, False
    offset = 0
    for whole, at in blocks:
        block = whole
        if depth == 0:
            block = whole.lstrip(_JSON_SPACE)
            if block and not block.startswith(b"["):
                raise FormatError(f"{path}: expected a JSON array, it starts with {block[:20]!r}")
            depth, block = int(bool(block)), block[1:]
        if depth:
            ends, depth, in_string, escaped = scan_json_array(np.frombuffer(block, np.uint8), depth, in_string, escaped)
            if depth == 0:
                close = int(ends[-1])
                if block[close : close + 1] != b"]":
                    raise FormatError(f"{path}: the JSON array ends with '}}', expected ']'; a bracket is missing")
                position = _require_blank(block[close + 1 :], blocks, path, at)
                yield block[: close + 1], ends, position
                return
            yield block, ends, at
        offset += len(whole)
    raise FormatError(
        f"{path}: the JSON array is not closed after {offset} bytes; the file was cut short, or a quote or "
        "bracket is missing"
    )


def _require_blank(rest: bytes, blocks: Blocks, path: str, position: int) -> int:
    while not (found := rest.strip(_JSON_SPACE)):
        following = next(blocks, None)
        if following is None:
            return position
        rest, position = following
    raise FormatError(
        f"{path}: something follows the end of the JSON array: {found[:20]!r}; keep one array a file, "
        "or write one object a line (.jsonl)"
    )


def _cut(marked: _Marked, *, path: str, piece_nbytes: int, max_row_nbytes: int) -> Iterator[Run]:
    buffer = bytearray()
    start = 0  # of the buffer, in the stream
    ends = np.empty(0, np.int64)  # of the rows in the buffer, in the stream
    num_cut = 0
    position = 0

    def cut_one() -> Run:
        """As many rows as fit a piece, or one that does not fit."""
        nonlocal start, ends, num_cut
        take = max(1, int(np.searchsorted(ends, start + piece_nbytes, side="right")))
        chosen, ends = ends[:take] - start, ends[take:]
        cut = int(chosen[-1])
        if cut > max(piece_nbytes, max_row_nbytes):
            raise _too_long(path, num_cut, max_row_nbytes)
        with memoryview(buffer) as view:
            payload = bytes(view[:cut])
        del buffer[: cut + 1]
        start += cut + 1
        num_cut += take
        return Run(payload, chosen, position)

    for block, marks, at in marked:
        position = at
        ends = np.concatenate([ends, marks + (start + len(buffer))])
        buffer += block
        while len(buffer) > piece_nbytes and ends.size:
            yield cut_one()
        if len(buffer) > max_row_nbytes and not ends.size:
            raise _too_long(path, num_cut, max_row_nbytes)
    end = start + len(buffer)
    if buffer and (not ends.size or ends[-1] != end - 1):
        ends = np.append(ends, end)
    while ends.size:
        yield cut_one()


def _too_long(path: str, num_before: int, limit: int) -> FormatError:
    return FormatError(
        f"{path}: row {num_before + 1} is longer than {limit} bytes; expected one JSON object a line, "
        "or one array of objects"
    )
