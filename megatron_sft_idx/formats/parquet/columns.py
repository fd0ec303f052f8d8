"""Between Arrow's list columns and numpy arrays: no value ever becomes a Python object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.formats.base import PackRun
from megatron_sft_idx.formats.checks import checked_run, require_same_length
from megatron_sft_idx.formats.masks import MaskAlignment

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COLUMNS", "PackColumns", "checked_schema", "list_array", "pyarrow_errors"]

COLUMNS = ("input_ids", "loss_mask", "seq_start_id")


@contextlib.contextmanager
def pyarrow_errors(path: str) -> Iterator[None]:
    """What pyarrow raises of a file's content, as FormatError; errors of the system, which have a number, stay.

    Raises:
        SFTIndexError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise SFTIndexError(f"{path}: Parquet files need pyarrow: pip install 'megatron-sft-idx[parquet]'") from None
    try:
        yield
    except (pa.ArrowException, MemoryError, OverflowError, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FormatError(f"{path}: not a readable Parquet file: {reason}; copy or write it again") from None


def checked_schema(schema: pa.Schema, path: str) -> None:
    """FormatError unless the three columns are there, once each, and are lists of numbers."""
    import pyarrow as pa

    names = schema.names
    if wrong := [name for name in COLUMNS if names.count(name) != 1]:
        found = ", ".join(names[:20]) or "none"
        raise FormatError(
            f"{path}: no column {', '.join(wrong)} (or more than one of that name), expected one each of"
            f" {', '.join(COLUMNS)}; found {found}. Chats that are not tokenised yet go through preprocess"
        )
    for name in COLUMNS:
        kind = schema.field(name).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        value = kind.value_type if is_list else None
        good = value is not None and (
            pa.types.is_integer(value)
            or (name == "loss_mask" and (pa.types.is_boolean(value) or pa.types.is_floating(value)))
        )
        if not good:
            numbers = "numbers" if name == "loss_mask" else "integers"
            raise FormatError(f"{path}: column {name} is {kind}, expected a list of {numbers}: one a token")


class _Lists(NamedTuple):
    """A list column: all values end to end, and how many belong to each row."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]


class PackColumns(NamedTuple):
    """Some rows of the three columns."""

    input_ids: _Lists
    loss_mask: _Lists
    seq_start_id: _Lists

    @classmethod
    def of(cls, rows: pa.Table | pa.RecordBatch, path: str, first_pack: int) -> PackColumns:
        """The columns of rows that were read.

        Raises:
            SequenceError: a list, or a value in one, is null.
        """
        return cls(*(_lists(rows.column(name), path, name, first_pack) for name in COLUMNS))

    def run(self, path: str, first_pack: int, alignment: MaskAlignment, dtypes: tuple[Any, Any]) -> PackRun:
        """The rows as packs that keep every rule; ids and mask of these dtypes.

        Raises:
            SequenceError: a row that breaks a rule, with its number.
        """
        ids, mask, starts = self
        if (wrong := ids.lengths != mask.lengths).any():
            row = int(np.argmax(wrong))
            lengths = {"input_ids": int(ids.lengths[row]), "loss_mask": int(mask.lengths[row])}
            require_same_length(path, first_pack + row, **lengths)
        token_dtype, mask_dtype = dtypes
        return checked_run(
            path,
            first_pack,
            ids.values,
            mask.values,
            starts.values,
            ids.lengths,
            starts.lengths,
            mask_alignment=alignment,
            token_dtype=token_dtype,
            mask_dtype=mask_dtype,
        )


def _lists(column: pa.ChunkedArray | pa.Array, path: str, name: str, first_pack: int) -> _Lists:
    """One column. Arrow cuts what has more than 2^31 values into chunks, and files come with chunks of their own."""
    import pyarrow as pa

    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = []
    for chunk in chunks:
        parts.append(_lists_of_chunk(chunk, path, name, first_pack))
        first_pack += len(chunk)
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return _Lists(np.empty(0, np.int64), np.empty(0, np.int64))
    return _Lists(np.concatenate([p.values for p in parts]), np.concatenate([p.lengths for p in parts]))


def _lists_of_chunk(chunk: pa.Array, path: str, name: str, first_pack: int) -> _Lists:
    if chunk.null_count:
        row = int(np.argmax(chunk.is_null().to_numpy(zero_copy_only=False)))
        raise SequenceError(path, first_pack + row, f"{name} is null; every pack has a list of numbers")
    lengths = np.diff(chunk.offsets.to_numpy()).astype(np.int64)
    values = chunk.flatten()
    if values.null_count:
        at = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise SequenceError(path, first_pack + row, f"{name} holds a null; every token has a value")
    # Without a copy but for booleans, which Arrow keeps as bits.
    return _Lists(values.to_numpy(zero_copy_only=False), lengths)


def list_array(values: NDArray[Any], lengths: NDArray[np.int64], kind: pa.DataType) -> pa.ListArray:
    """An Arrow list column over a numpy array."""
    import pyarrow as pa

    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(values)), type=kind)
