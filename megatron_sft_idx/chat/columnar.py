"""Rows of Parquet and Arrow files (Hugging Face ``save_to_disk`` folders hold the latter), through pyarrow.

The reading process cuts a file into batches of about a piece's size and hands each on as a small Arrow
stream; a worker turns it into Python rows. So memory does not depend on how large row groups are.

Arrow cannot tell an absent key from a null one: a struct column has the keys of all rows. Keys that are null
are therefore left out of the rows, at every depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_sft_idx.errors import FormatError, SFTIndexError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["arrow_batches", "parquet_batches", "rows_of_stream"]

# Rows made into Python objects at once: they take several times the space of their columns.
_ROWS_AT_ONCE = 256
_READ_NBYTES = 1 << 20


def parquet_batches(path: str, piece_nbytes: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields (Arrow stream, rows in it, bytes of the file consumed so far), row group by row group.

    Raises:
        FormatError: not a readable Parquet file.
    """
    with _pyarrow_errors(path, "Parquet"):
        import pyarrow.parquet as pq

        # A buffer makes pyarrow read column chunks bit by bit instead of whole.
        with pq.ParquetFile(path, buffer_size=_READ_NBYTES, pre_buffer=False) as file:
            consumed = 0
            for group in range(file.metadata.num_row_groups):
                about = file.metadata.row_group(group)
                if not about.num_rows:
                    continue
                at_once = _rows_that_fit(about.num_rows, about.total_byte_size, piece_nbytes)
                group_nbytes = sum(about.column(i).total_compressed_size for i in range(about.num_columns))
                done = 0
                for batch in file.iter_batches(at_once, row_groups=[group], use_threads=False):
                    done += batch.num_rows
                    share = group_nbytes * done // about.num_rows
                    yield _to_stream(batch), batch.num_rows, consumed + share
                consumed += group_nbytes


def arrow_batches(path: str, piece_nbytes: int) -> Iterator[tuple[bytes, int, int]]:
    """As ``parquet_batches``, for Arrow IPC streams (what ``save_to_disk`` writes) and Arrow IPC files."""
    with _pyarrow_errors(path, "Arrow"):
        import pyarrow as pa

        with pa.memory_map(path) as source:
            for whole in _record_batches(source):
                if not whole.num_rows:
                    continue
                at_once = _rows_that_fit(whole.num_rows, whole.nbytes, piece_nbytes)
                for start in range(0, whole.num_rows, at_once):
                    batch = whole.slice(start, at_once)
                    yield _to_stream(batch), batch.num_rows, source.tell()


def rows_of_stream(payload: bytes) -> Iterator[dict[str, Any] | ValueError]:
    """The rows of one such Arrow stream; an error stands in for a row that Python has no form for."""
    import pyarrow as pa

    with pa.ipc.open_stream(payload) as reader:
        for batch in reader:
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield from _to_python(batch.slice(start, _ROWS_AT_ONCE))


def _to_python(batch: pa.RecordBatch) -> list[dict[str, Any] | ValueError]:
    try:
        return [_without_nulls(row) for row in batch.to_pylist()]
    except (ValueError, OverflowError) as error:  # strings that are not UTF-8, times out of Python's range
        if batch.num_rows == 1:
            return [ValueError(str(error))]
    return [row for i in range(batch.num_rows) for row in _to_python(batch.slice(i, 1))]


def _record_batches(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    magic = source.read(6)
    source.seek(0)
    if magic == b"ARROW1":
        with pa.ipc.open_file(source) as file:
            yield from (file.get_batch(i) for i in range(file.num_record_batches))
    else:
        with pa.ipc.open_stream(source) as stream:
            yield from stream


def _rows_that_fit(num_rows: int, nbytes: int, piece_nbytes: int) -> int:
    return max(1, min(num_rows, num_rows * piece_nbytes // max(1, nbytes)))


def _to_stream(batch: pa.RecordBatch) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    payload: bytes = sink.getvalue().to_pybytes()
    return payload


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


@contextmanager
def _pyarrow_errors(path: str, kind: str) -> Iterator[None]:
    try:
        import pyarrow as pa
    except ImportError:
        raise SFTIndexError(
            f"{path}: reading {kind} files needs pyarrow: pip install 'megatron-sft-idx[parquet]'"
        ) from None
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"{path}: not a readable {kind} file: {reason}") from None
