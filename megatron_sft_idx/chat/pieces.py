"""Input files to pieces, the units of work that worker processes turn into rows.

Which pieces there are depends on the content of the files and on ``piece_nbytes`` alone, so the number of
workers changes nothing. Parquet and Arrow files (Hugging Face ``save_to_disk`` folders hold the latter) are cut into
batches of about a piece's size, each a small Arrow stream, so that memory does not depend on how large row groups are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx._native import scan_json_array
from megatron_sft_idx.chat.inputs import InputFile, open_object, parse_json, read_blocks, stream_blocks
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.local import StreamHash

if TYPE_CHECKING:
    import pyarrow as pa

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
        """Says whether two pieces hold the same rows, wherever they come from: xxh3_128 in hex."""
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
                try:
                    row = parse_json(raw)
                except ValueError as error:
                    row = SequenceError(self.path, position, str(error))
                yield position, row
            elif self.is_array:
                reason = "nothing where an element should be: a comma too many in the array"
                yield position, SequenceError(self.path, position, reason)


@dataclass(frozen=True, slots=True, eq=False)
class ColumnarPiece(Piece):
    """Rows of a Parquet or Arrow file; the payload is an Arrow stream."""

    def rows(self) -> Iterator[tuple[int, Any | SequenceError]]:
        """Yields (position, row); keys that are null are left out."""
        import pyarrow as pa

        position = self.first
        with pa.ipc.open_stream(self.payload) as reader:
            for batch in reader:
                for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                    for row in _to_python(batch.slice(start, _ROWS_AT_ONCE)):
                        if isinstance(row, ValueError):
                            yield position, SequenceError(self.path, position, f"cannot be read: {row}")
                        else:
                            yield position, row
                        position += 1

    def fingerprint(self) -> str:
        """Of the values, not of the stream, whose bytes are those of one release of pyarrow.

        Dictionaries, 32-bit or 64-bit offsets, the width of numbers, chunks and columns of nothing but nulls make no
        difference: the rows are the same.
        """
        import pyarrow as pa

        with pa.ipc.open_stream(self.payload) as reader:
            table = reader.read_all()
        stream = StreamHash()
        stream.update(table.num_rows.to_bytes(8, "little"))
        for name, column in zip(table.column_names, table.columns, strict=True):
            if column.null_count < len(column):
                stream.update(f"column {name}".encode())
                _hash_values(stream, pa.concat_arrays(_plain(chunk) for chunk in column.chunks))
        return stream.hex()


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
        if file.kind in ("parquet", "arrow"):
            yield from _columnar_pieces(file, piece_nbytes)
            continue
        cut = cut_array if file.kind == "array" else cut_lines
        yield from cut(read_blocks(file), path=file.path, piece_nbytes=piece_nbytes, max_row_nbytes=max_row_nbytes)


def stream_pieces(
    stream: BufferedReader, *, name: str, piece_nbytes: int, max_row_nbytes: int = MAX_ROW_NBYTES
) -> Iterator[Piece]:
    """As ``iter_pieces``, of JSON lines that come in a pipe.

    Where the pieces are cut depends on the bytes alone, not on how they came.

    Raises:
        FormatError: the pipe cannot be read, holds compressed data, or a row longer than ``max_row_nbytes``.
    """
    blocks = stream_blocks(stream, name)
    yield from cut_lines(blocks, path=name, piece_nbytes=piece_nbytes, max_row_nbytes=max_row_nbytes)


# ---- JSON ----


_JSON_SPACE = b" \t\r\n"

Blocks = Iterator[tuple[bytes, int]]
# A block, where rows end in it (at these separator bytes), and the bytes of the file read so far.
_Marked = Iterator[tuple[bytes, NDArray[np.int64], int]]


def cut_lines(blocks: Blocks, *, path: str, piece_nbytes: int, max_row_nbytes: int) -> Iterator[JsonPiece]:
    """Cuts at newlines; blank lines are rows too. The last line may lack its newline."""
    marked = ((block, np.flatnonzero(np.frombuffer(block, np.uint8) == 10), at) for block, at in blocks)
    return _cut(marked, path, piece_nbytes, max_row_nbytes, is_array=False)


def cut_array(blocks: Blocks, *, path: str, piece_nbytes: int, max_row_nbytes: int) -> Iterator[JsonPiece]:
    """Cuts between the elements of the one JSON array that the stream holds.

    Only brackets and strings are followed: what stands between two commas may be anything, blank included.

    Raises:
        FormatError: no array, or it is never closed, or something follows it.
    """
    marked = _mark_elements(blocks, path)
    pieces = _cut(marked, path, piece_nbytes, max_row_nbytes, is_array=True)
    first = next(pieces)
    # ``[]`` looks like one blank element. A blank one before others is a comma too many.
    if len(first.ends) == 1 and not first.payload.strip(_JSON_SPACE):
        if (second := next(pieces, None)) is None:
            return
        yield first
        first = second
    yield first
    yield from pieces


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


def _cut(marked: _Marked, path: str, piece_nbytes: int, max_row_nbytes: int, *, is_array: bool) -> Iterator[JsonPiece]:
    buffer = bytearray()
    start = 0  # of the buffer, in the stream
    ends = np.empty(0, np.int64)  # of the rows in the buffer, in the stream
    num_cut = position = consumed = 0

    def cut_one() -> JsonPiece:
        """As many rows as fit a piece, or one that does not fit."""
        nonlocal start, ends, num_cut, consumed
        take = max(1, int(np.searchsorted(ends, start + piece_nbytes, side="right")))
        chosen, ends = ends[:take] - start, ends[take:]
        cut = int(chosen[-1])
        if cut > max(piece_nbytes, max_row_nbytes):
            raise _too_long(path, num_cut, max_row_nbytes)
        with memoryview(buffer) as view:
            payload = bytes(view[:cut])
        del buffer[: cut + 1]
        start += cut + 1
        piece = JsonPiece(path, num_cut + 1, position - consumed, payload, chosen, is_array)
        num_cut, consumed = num_cut + take, position
        return piece

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


# ---- Parquet and Arrow ----

# Rows that pyarrow decodes at once, and that become Python objects at once (several times their size).
_ROWS_READ = 1024
_ROWS_AT_ONCE = 256
_READ_NBYTES = 1 << 20
# The same for objects, where a request takes 10 to 100 ms whatever its size.
_FETCH_NBYTES = 4 << 20

# With the bytes of the file consumed up to its end.
_Batches = Iterator[tuple["pa.RecordBatch", int]]


def _columnar_pieces(file: InputFile, piece_nbytes: int) -> Iterator[Piece]:
    """About ``piece_nbytes`` of rows at a time, whatever the row groups are; batches are split and gathered greedily.

    Raises:
        FormatError: not a readable file of its kind.
    """
    first, consumed, nbytes, position = 1, 0, 0, 0
    held: list[pa.RecordBatch] = []
    with _pyarrow_errors(file):
        for whole, at in (_parquet_batches if file.kind == "parquet" else _arrow_batches)(file, piece_nbytes):
            at_once = min(_ROWS_AT_ONCE, _rows_that_fit(whole.num_rows, whole.nbytes, piece_nbytes))
            for start in range(0, whole.num_rows, at_once):
                batch = whole.slice(start, at_once)
                if held and nbytes + batch.nbytes > piece_nbytes:
                    yield ColumnarPiece(file.path, first, position - consumed, _to_stream(held))
                    first, consumed = first + sum(part.num_rows for part in held), position
                    held, nbytes = [], 0
                held.append(batch)
                nbytes += batch.nbytes
                position = at
        if held:
            yield ColumnarPiece(file.path, first, position - consumed, _to_stream(held))


def _parquet_batches(file: InputFile, piece_nbytes: int) -> _Batches:
    import pyarrow.parquet as pq

    # A buffer makes pyarrow read column chunks bit by bit instead of whole.
    remote, consumed = is_remote(file.path), 0
    source, read_nbytes = (open_object(file.path, file.etag), _FETCH_NBYTES) if remote else (file.path, _READ_NBYTES)
    with pq.ParquetFile(source, buffer_size=read_nbytes, pre_buffer=False) as table:
        for number in range(table.metadata.num_row_groups):
            group = table.metadata.row_group(number)
            group_nbytes = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
            at_once = min(_ROWS_READ, _rows_that_fit(group.num_rows, group.total_byte_size, piece_nbytes))
            done = 0
            for batch in table.iter_batches(at_once, row_groups=[number], use_threads=False):
                done += batch.num_rows
                yield batch, consumed + group_nbytes * done // group.num_rows
            consumed += group_nbytes


def _arrow_batches(file: InputFile, piece_nbytes: int) -> _Batches:
    """Of Arrow IPC streams (what ``save_to_disk`` writes) and Arrow IPC files."""
    import pyarrow as pa

    remote = is_remote(file.path)
    # Not a memory map: its pages would count as memory of this process, the whole file in the end.
    with pa.PythonFile(open_object(file.path, file.etag), "r") if remote else pa.OSFile(file.path) as source:
        magic = source.read(6)
        source.seek(0)
        if magic == b"ARROW1":
            with pa.ipc.open_file(source) as batches:
                count = batches.num_record_batches
                yield from ((batches.get_batch(i), source.size() * (i + 1) // count) for i in range(count))
        else:
            with pa.ipc.open_stream(source) as stream:
                yield from ((batch, source.tell()) for batch in stream)


def _rows_that_fit(num_rows: int, nbytes: int, piece_nbytes: int) -> int:
    return max(1, min(num_rows, num_rows * piece_nbytes // max(1, nbytes)))


def _to_stream(batches: list[pa.RecordBatch]) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    payload: bytes = sink.getvalue().to_pybytes()
    return payload


def _plain(array: pa.Array) -> pa.Array:
    """An array without a dictionary and an extension type around it."""
    import pyarrow as pa

    while pa.types.is_dictionary(array.type) or isinstance(array, pa.ExtensionArray):
        array = array.storage if isinstance(array, pa.ExtensionArray) else array.dictionary_decode()
    return array


def _hash_values(stream: StreamHash, array: pa.Array) -> None:
    """Which values are null, how long those of variable length are, and what is in them, in a form of its own."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array, kind = _plain(array), pa.types
    stream.update(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)))
    array = array.drop_null()
    if kind.is_struct(array.type):
        for field, values in zip(array.type, array.flatten(), strict=True):
            if values.null_count < len(values):
                stream.update(f"field {field.name}".encode())
                _hash_values(stream, values)
    elif kind.is_list(array.type) or kind.is_large_list(array.type) or kind.is_fixed_size_list(array.type):
        stream.update(pc.list_value_length(array).cast(pa.int64()).to_numpy())
        _hash_values(stream, array.flatten())
    elif any(is_text(array.type) for is_text in (kind.is_string, kind.is_large_string, kind.is_string_view)):
        whole = array.cast(pa.large_string())
        ends = np.frombuffer(whole.buffers()[1], "<i8")[whole.offset :][: len(whole) + 1]
        stream.update(ends - ends[:1])
        stream.update(whole.buffers()[2][int(ends[0]) : int(ends[-1])] if len(ends) else b"")
    elif kind.is_integer(array.type) and array.type != pa.uint64():
        stream.update(array.cast(pa.int64()).to_numpy())
    else:  # rare in chats: floats, booleans, times, bytes, maps; as Python says them
        stream.update("\n".join(map(repr, array.to_pylist())).encode())


def _to_python(batch: pa.RecordBatch) -> list[dict[str, Any] | ValueError]:
    """The rows; an error stands in for one that Python has no form for.

    Arrow cannot tell an absent key from a null one: a struct column has the keys of all rows. Keys that are null are
    therefore left out, at every depth.
    """
    import pyarrow as pa

    try:
        return [_without_nulls(row) for row in batch.to_pylist()]
    except (ValueError, OverflowError, pa.ArrowException) as error:  # not UTF-8, times out of Python's range
        if batch.num_rows == 1:
            return [ValueError(str(error))]
    return [row for i in range(batch.num_rows) for row in _to_python(batch.slice(i, 1))]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


@contextmanager
def _pyarrow_errors(file: InputFile) -> Iterator[None]:
    try:
        import pyarrow as pa
    except ImportError:
        raise SFTIndexError(
            f"{file.path}: reading {file.kind.title()} files needs pyarrow: pip install 'megatron-sft-idx[parquet]'"
        ) from None
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"{file.path}: not a readable {file.kind.title()} file: {reason}") from None
