"""Parquet and Arrow files, among them those of ``save_to_disk`` folders, in pieces of whole rows.

Each piece is a small Arrow stream of about the size that is asked for, so that memory does not depend on how large the
file's row groups are. Arrow cannot tell an absent key from a null one, so null values are left out of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_sft_idx.chat.types import Piece
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.remote.store import ObjectFile

if TYPE_CHECKING:
    import pyarrow as pa

# Rows that pyarrow decodes at once, and that become Python objects at once (several times their size).
_ROWS_READ = 1024
_ROWS_AT_ONCE = 256
_READ_NBYTES = 1 << 20
# The same for objects, where a request takes 10 to 100 ms whatever its size.
_FETCH_NBYTES = 4 << 20

# Record batches, each with how many bytes of the file end with it.
_Batches = Iterator[tuple["pa.RecordBatch", int]]


@dataclass(frozen=True, slots=True, eq=False)
class TablePiece(Piece):
    """Rows of a Parquet or Arrow file; the payload is an Arrow stream."""

    def rows(self) -> Iterator[tuple[int, Any | SequenceError]]:
        """See ``Piece.rows``."""
        import pyarrow as pa

        position = self.first
        with pa.ipc.open_stream(self.payload) as reader:
            for batch in reader:
                for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                    for row in _to_python(batch.slice(start, _ROWS_AT_ONCE)):
                        bad = isinstance(row, ValueError)
                        yield position, SequenceError(self.path, position, f"cannot be read: {row}") if bad else row
                        position += 1

    def fingerprint(self) -> str:
        """A hash of the values alone, since the bytes of an Arrow stream depend on the release of pyarrow.

        Dictionary encoding, 32-bit or 64-bit offsets, the width of numbers, chunks and fields of nothing but nulls make
        no difference to it, because they make none to the rows.
        """
        import pyarrow as pa

        with pa.ipc.open_stream(self.payload) as reader:
            table = reader.read_all()
        stream = StreamHash()
        stream.update(table.num_rows.to_bytes(8, "little"))
        for name, values in zip(table.column_names, table.columns, strict=True):
            if values.null_count < len(values):
                stream.update(f"column {name}".encode())
                _hash_values(stream, pa.concat_arrays(_plain(chunk) for chunk in values.chunks))
        return stream.hex()


def table_pieces(
    path: str, kind: Literal["parquet", "arrow"], remote: ObjectFile | None, piece_nbytes: int
) -> Iterator[TablePiece]:
    """The rows of a file in pieces of about ``piece_nbytes``, whatever its row groups are.

    Args:
        path: of the file, for error messages too.
        kind: an Arrow file is an IPC stream (which ``save_to_disk`` writes) or an IPC file.
        remote: the object to read where the file lies in an object store; else None.
        piece_nbytes: at most so many bytes of rows a piece, but one row at least.

    Raises:
        FormatError: not a readable file of its kind.
        SFTIndexError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError:
        extra = "pip install 'megatron-sft-idx[parquet]'"
        raise SFTIndexError(f"{path}: reading {kind.title()} files needs pyarrow: {extra}") from None

    first, consumed, nbytes, position = 1, 0, 0, 0
    held: list[pa.RecordBatch] = []

    def piece() -> TablePiece:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, held[0].schema) as writer:
            for batch in held:
                writer.write_batch(batch)
        return TablePiece(path, first, position - consumed, sink.getvalue().to_pybytes())

    try:
        batches = _arrow_batches(path, remote) if kind == "arrow" else _parquet_batches(path, remote, piece_nbytes)
        for whole, at in batches:
            at_once = min(_ROWS_AT_ONCE, _rows_that_fit(whole.num_rows, whole.nbytes, piece_nbytes))
            for start in range(0, whole.num_rows, at_once):
                batch = whole.slice(start, at_once)
                if held and nbytes + batch.nbytes > piece_nbytes:
                    yield piece()
                    first, consumed = first + sum(one.num_rows for one in held), position
                    held, nbytes = [], 0
                held.append(batch)
                nbytes += batch.nbytes
                position = at
        if held:
            yield piece()
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{path}: not a readable {kind.title()} file: {str(error).splitlines()[0]}") from None


def _parquet_batches(path: str, remote: ObjectFile | None, piece_nbytes: int) -> _Batches:
    import pyarrow.parquet as pq

    consumed = 0
    # A buffer makes pyarrow read column chunks bit by bit instead of whole.
    with pq.ParquetFile(
        remote or path, buffer_size=_FETCH_NBYTES if remote else _READ_NBYTES, pre_buffer=False
    ) as table:
        for number in range(table.metadata.num_row_groups):
            group = table.metadata.row_group(number)
            group_nbytes = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
            at_once = min(_ROWS_READ, _rows_that_fit(group.num_rows, group.total_byte_size, piece_nbytes))
            num_read = 0
            for batch in table.iter_batches(at_once, row_groups=[number], use_threads=False):
                num_read += batch.num_rows
                yield batch, consumed + group_nbytes * num_read // group.num_rows
            consumed += group_nbytes


def _arrow_batches(path: str, remote: ObjectFile | None) -> _Batches:
    import pyarrow as pa

    # Not a memory map: its pages would count as memory of this process, the whole file in the end.
    with pa.PythonFile(remote, "r") if remote else pa.OSFile(path) as source:
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


# ---- values ----


def _plain(array: pa.Array) -> pa.Array:
    """An array without the dictionary encoding and the extension type that it may have."""
    import pyarrow as pa

    while pa.types.is_dictionary(array.type) or isinstance(array, pa.ExtensionArray):
        array = array.storage if isinstance(array, pa.ExtensionArray) else array.dictionary_decode()
    return array


def _hash_values(stream: StreamHash, array: pa.Array) -> None:
    """Adds to a hash which values are null, how long those of variable length are, and their content.

    The form that is hashed is defined here alone, so that it does not change with pyarrow.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    array = _plain(array)
    kind = pa.types
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
    else:  # floats, booleans, times, bytes and maps, which are rare in chats, by Python's text of them
        stream.update("\n".join(map(repr, array.to_pylist())).encode())


def _to_python(batch: pa.RecordBatch) -> list[dict[str, Any] | ValueError]:
    """The rows; in place of one whose values Python cannot hold stands the error."""
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
