"""Rows of Parquet and Arrow files (Hugging Face ``save_to_disk`` folders hold the latter), through pyarrow.

The reading process cuts a file into batches of about a piece's size and hands each on as a small Arrow
stream; a worker turns it into Python rows. So memory does not depend on how large row groups are.

Arrow cannot tell an absent key from a null one: a struct column has the keys of all rows. Keys that are null
are therefore left out of the rows, at every depth.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_sft_idx.chat.inputs.json_value import parse_json
from megatron_sft_idx.chat.inputs.opening import open_object
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.storage import is_remote

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = [
    "KNOWN_FILES",
    "SAVED_DATASET_NAMES",
    "arrow_batches",
    "files_of_folder",
    "is_saved_dataset",
    "parquet_batches",
    "rows_of_stream",
]


# An Arrow stream, the rows in it, and the bytes of the file consumed up to its end.
_Cut = tuple[bytes, int, int]

# Rows that pyarrow decodes at once, and that become Python objects at once (several times their size).
_ROWS_READ = 1024
_ROWS_AT_ONCE = 256
_READ_NBYTES = 1 << 20
# The same for objects, where a request takes 10 to 100 ms whatever its size.
_FETCH_NBYTES = 4 << 20


def parquet_batches(path: str, piece_nbytes: int, etag: str | None = None) -> Iterator[_Cut]:
    """Yields about ``piece_nbytes`` of rows at a time, whatever the row groups are.

    Args:
        path: the file, local or remote.
        piece_nbytes: how much data.
        etag: for a remote one, which object it must be.

    Raises:
        FormatError: not a readable Parquet file.
    """
    with _pyarrow_errors(path, "Parquet"):
        import pyarrow.parquet as pq

        # A buffer makes pyarrow read column chunks bit by bit instead of whole.
        remote = is_remote(path)
        source = open_object(path, etag) if remote else path
        read_nbytes = _FETCH_NBYTES if remote else _READ_NBYTES
        with pq.ParquetFile(source, buffer_size=read_nbytes, pre_buffer=False) as file:
            yield from _pieces_of(_parquet_batches(file, piece_nbytes), piece_nbytes)


def arrow_batches(path: str, piece_nbytes: int, etag: str | None = None) -> Iterator[_Cut]:
    """As ``parquet_batches``, for Arrow IPC streams (what ``save_to_disk`` writes) and Arrow IPC files."""
    with _pyarrow_errors(path, "Arrow"):
        import pyarrow as pa

        # Not a memory map: its pages would count as memory of this process, the whole file in the end.
        with pa.PythonFile(open_object(path, etag), "r") if is_remote(path) else pa.OSFile(path) as source:
            yield from _pieces_of(_arrow_batches(source), piece_nbytes)


def rows_of_stream(payload: bytes) -> Iterator[dict[str, Any] | ValueError]:
    """The rows of one such Arrow stream; an error stands in for a row that Python has no form for."""
    import pyarrow as pa

    with pa.ipc.open_stream(payload) as reader:
        for batch in reader:
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield from _to_python(batch.slice(start, _ROWS_AT_ONCE))


def _to_python(batch: pa.RecordBatch) -> list[dict[str, Any] | ValueError]:
    import pyarrow as pa

    try:
        return [_without_nulls(row) for row in batch.to_pylist()]
    except (ValueError, OverflowError, pa.ArrowException) as error:  # not UTF-8, times out of Python's range
        if batch.num_rows == 1:
            return [ValueError(str(error))]
    return [row for i in range(batch.num_rows) for row in _to_python(batch.slice(i, 1))]


def _parquet_batches(file: pq.ParquetFile, piece_nbytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    consumed = 0
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        group_nbytes = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
        at_once = min(_ROWS_READ, _rows_that_fit(group.num_rows, group.total_byte_size, piece_nbytes))
        done = 0
        for batch in file.iter_batches(at_once, row_groups=[number], use_threads=False):
            done += batch.num_rows
            yield batch, consumed + group_nbytes * done // group.num_rows
        consumed += group_nbytes


def _arrow_batches(source: pa.NativeFile) -> Iterator[tuple[pa.RecordBatch, int]]:
    import pyarrow as pa

    magic = source.read(6)
    source.seek(0)
    if magic == b"ARROW1":
        with pa.ipc.open_file(source) as file:
            count = file.num_record_batches
            yield from ((file.get_batch(i), source.size() * (i + 1) // count) for i in range(count))
    else:
        with pa.ipc.open_stream(source) as stream:
            yield from ((batch, source.tell()) for batch in stream)


def _pieces_of(batches: Iterator[tuple[pa.RecordBatch, int]], piece_nbytes: int) -> Iterator[_Cut]:
    """Splits and gathers batches greedily, so that their data fits a piece where its rows do."""
    held: list[pa.RecordBatch] = []
    nbytes = position = 0
    for whole, at in batches:
        at_once = min(_ROWS_AT_ONCE, _rows_that_fit(whole.num_rows, whole.nbytes, piece_nbytes))
        for start in range(0, whole.num_rows, at_once):
            batch = whole.slice(start, at_once)
            if held and nbytes + batch.nbytes > piece_nbytes:
                yield _to_stream(held), sum(part.num_rows for part in held), position
                held, nbytes = [], 0
            held.append(batch)
            nbytes += batch.nbytes
            position = at
    if held:
        yield _to_stream(held), sum(part.num_rows for part in held), position


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
    except SFTIndexError:
        raise  # of an object store, whose errors are OSErrors too
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"{path}: not a readable {kind} file: {reason}") from None


KNOWN_FILES = ".json, .jsonl (each also .gz or .zst), .parquet, .arrow, or a folder made by datasets' save_to_disk"

_STATE = "state.json"
_INFO = "dataset_info.json"
_SPLITS = "dataset_dict.json"
# One of these in a folder tells that it is a saved dataset, or a folder of splits.
SAVED_DATASET_NAMES = {_STATE, _INFO, _SPLITS}


def is_saved_dataset(folder: str | os.PathLike[str]) -> bool:
    """Whether ``files_of_folder`` has something to say about this folder; a folder of splits included."""
    path = Path(folder)
    return any((path / name).is_file() for name in SAVED_DATASET_NAMES)


def files_of_folder(folder: str) -> list[str]:
    """The Arrow files of a saved dataset, in the dataset's own order.

    Raises:
        FormatError: another kind of folder, one with several splits, or a dataset that is not complete.
    """
    path = Path(folder)
    if (path / _SPLITS).is_file():
        splits = _read(path / _SPLITS).get("splits")
        names = splits if isinstance(splits, list) else []
        choices = ", ".join(os.path.join(folder, str(name)) for name in names)
        raise FormatError(f"{folder}: a dataset with several splits; name the one you mean: {choices}")
    if (path / _STATE).is_file():
        names = _listed(path / _STATE)
    elif (path / _INFO).is_file():
        names = sorted(file.name for file in path.glob("*.arrow"))
    else:
        raise FormatError(
            f"{folder}: a folder, but not one made by save_to_disk; name the files in it by a glob, "
            f"such as {os.path.join(folder, '*.jsonl')!r}"
        )
    missing = [name for name in names if not (path / name).is_file()]
    if missing or not names:
        raise FormatError(f"{folder}: this saved dataset lacks its data: {', '.join(missing) or 'no .arrow files'}")
    return [os.path.join(folder, name) for name in names]


def _listed(path: Path) -> list[str]:
    state = _read(path)
    if state.get("_indices_data_files"):
        raise FormatError(f"{path}: the dataset is a selection of rows; call flatten_indices() and save it again")
    try:
        return [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise FormatError(f"{path}: expected a list of file names under '_data_files'") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: expected a JSON object")
    return content
