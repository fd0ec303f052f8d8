"""Attach a column to a published shard, and open and read the columns of a shard."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import (
    COLUMN,
    FIXED_NBYTES,
    PAIR,
    Alignment,
    ColumnHeader,
    ColumnSpec,
    NamedRows,
    Per,
    check_named_spec,
    num_rows_in,
    torn_pairs,
)
from megatron_sft_idx.layout.files import CHECKSUM_NBYTES, check_column_name, listed_columns, no_column, plain_array
from megatron_sft_idx.shard.opening import column_names, has_column, open_items, read_header, read_start, require_same
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.storage import Array, Backend, check_size, require_local
from megatron_sft_idx.storage.local import HashedFile, stamp_of
from megatron_sft_idx.storage.remote import RemoteArray, open_store

if TYPE_CHECKING:
    from megatron_sft_idx.shard.reader import Shard

# ---- writing ----


@checked
def write_column(
    prefix: str | os.PathLike[str],
    name: str,
    values: NDArray[Any] | Iterable[NDArray[Any]],
    *,
    per: Per,
    alignment: Alignment = "token",
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> ColumnHeader:
    """Attach a column to a published shard. The file ``X.<name>.col`` appears completely or not at all.

    The column is removed when another shard is published at the prefix. Returns its header.

    Args:
        prefix: prefix of the shard, on a local disk.
        name: lowercase letters, digits and underscores.
        values: [rows] or [rows, width]: one row for each token, sequence or pack of the shard, in the shard's order. If
            they do not fit in memory, pass an iterable of arrays of some rows each; the first one determines the dtype.
        per: the unit of a row: ``token``, ``sequence`` or ``pack``.
        alignment: for a column of tokens, what row j belongs to: ``token`` j, or the ``label`` at j, which is token j +
            1.
        metadata: JSON object to store with the column.
        overwrite: replace a column of this name that was attached before.

    Raises:
        FormatError: the shard was written with a column of this name, or another file has this name; the number of rows
            does not fit the shard; the format does not allow the name, dtype or shape; or ``source`` or ``pair`` does
            not have its required form.
        ShardNotFoundError: the shard does not exist.

    Example:
        >>> from megatron_sft_idx import Shard
        >>> scores = np.linspace(0, 1, 16, dtype=np.float32)  # one for each of the 16 sequences
        >>> header = write_column("data/chats", "score", scores, per="sequence")
        >>> Shard("data/chats", columns=["score"])[6]["score"].round(2)  # of the three sequences in this pack
        array([0.87, 0.93, 1.  ], dtype=float32)
    """
    paths = ShardPaths.of(prefix).with_columns([check_column_name(name)])
    require_local(paths.prefix, "attaching a column")
    path = paths.column(name)
    header = read_header(paths)
    is_array = hasattr(values, "dtype") or not isinstance(values, Iterable)
    arrays: Iterator[Any] = iter([values]) if is_array else iter(cast(Iterable[Any], values))
    first = _array_of_rows(next(arrays, ()), name, f"{path}: from row 0")
    spec = ColumnSpec.of(per, first, alignment=alignment, metadata=metadata)
    with Publication(paths, {"work": "column"}, overwrite=overwrite, only=(path,)) as new:
        if read_header(paths) != header:
            raise FormatError(f"{paths.prefix}: another shard was published here in the meantime; try again")
        if name in listed_columns(header.metadata):
            raise FormatError(f"{path}: the shard was written with this column; choose another name")
        check_named_spec(name, spec)
        named_rows, expected = NamedRows(name, spec), num_rows_in(header, per)
        file = new.open(path)
        file.write(bytes(spec.header_nbytes))
        hashed, rows = HashedFile(file), 0
        for values_of_rows in chain([first], arrays):
            where = f"{path}: from row {rows}"
            array = _array_of_rows(values_of_rows, name, where)
            try:
                stored = spec.array(name, array, len(array))
                named_rows.require(stored)
            except ValueError as error:
                raise FormatError(f"{where}: {error}") from None
            named_rows.accept(stored)
            rows += len(stored)
            hashed.write(stored.reshape(-1))
        try:
            named_rows.finish()
        except ValueError as error:
            raise FormatError(f"{path}: {error}") from None
        if rows != expected:
            raise FormatError(f"{path}: {rows} rows, expected {expected}: one per {per} of {paths.prefix}")
        column = ColumnHeader(spec, header.shard_id, rows, hashed.checksum())
        file.write_at(column.encode(), 0)
        new.complete()
        new.finish()
    return column


def _array_of_rows(values: Any, name: str, where: str) -> NDArray[Any]:
    """Convert the values of some rows to an array. FormatError, which begins with ``where``: numpy cannot do that."""
    try:
        array = plain_array(values)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor that numpy cannot convert
        raise FormatError(f"{where}: column {name}: the values cannot be converted to an array ({error})") from None
    if not array.ndim:
        raise FormatError(f"{where}: column {name} has shape (); expected an array of some rows")
    return array


# ---- reading ----


class UnmappedRows:
    """The rows of a column that is not mapped. Each slice is read again. ``items`` has one item per row."""

    def __init__(self, items: Array, spec: ColumnSpec) -> None:
        self._items, self._spec = items, spec

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        return _as_rows(self._items[index], self._spec)


def _as_rows(items: NDArray[Any], spec: ColumnSpec) -> NDArray[Any]:
    rows: NDArray[Any] = items.view(spec.dtype).reshape(spec.shape(len(items)))
    return rows


@dataclasses.dataclass(frozen=True)
class ShardColumn:
    """A column of an open shard.

    Attributes:
        name: name of the column.
        header: header of the column's file.
        items: the rows, one item each; of dtype void if a row has several values.
    """

    name: str
    header: ColumnHeader
    items: Array

    @cached_property
    def values(self) -> NDArray[Any] | UnmappedRows:
        """The rows, [rows] or [rows, width]: a view if the file is mapped, else ``UnmappedRows``."""
        is_mapped = isinstance(self.items, np.ndarray)
        return _as_rows(self.items[:], self.spec) if is_mapped else UnmappedRows(self.items, self.spec)

    @cached_property
    def items_in_memory(self) -> NDArray[Any]:
        """All ``items``: a view if the file is mapped, else read once and cached in memory."""
        return self.items[:]

    @property
    def spec(self) -> ColumnSpec:
        """The column's spec: dtype and width of a row, unit of a row, and metadata."""
        return self.header.spec

    def __len__(self) -> int:
        return self.header.rows


def open_column(paths: ShardPaths, name: str, header: Header, backend: Backend = "mmap") -> ShardColumn:
    """Open a column of the shard at ``paths`` with this header.

    Raises:
        ShardNotFoundError: the shard has no such column.
        CorruptShardError: a rule of FORMAT.md is broken (C1 to C6, C8).
        StorageError: an object store does not answer.
    """
    path = paths.column(name)
    listed = listed_columns(header.metadata).get(name)
    if (file := read_start(path, COLUMN)) is None:
        remedy = f"{no_column(name, column_names(paths, header))}; attach it with write_column"
        if listed is not None:
            remedy = f"missing {path}: the shard was written with column {name} (rule C8): restore the file"
        raise ShardNotFoundError(paths.prefix, [path], remedy)
    column = ColumnHeader.decode(file.raw, path)
    checksum = file.raw[-CHECKSUM_NBYTES:].hex()
    if column.shard_id != header.shard_id:
        detail = (
            f"the column belongs to shard {column.shard_id.hex()}, but this is shard {header.shard_id.hex()}; attach"
            " it to the right shard"
        )
        raise CorruptShardError(path, 16, "C6", detail)
    if column.rows != (expected := num_rows_in(header, column.spec.per)):
        detail = f"{column.rows} rows, expected {expected}: one per {column.spec.per}; restore the file"
        raise CorruptShardError(path, 40, "C5", detail)
    if listed not in (None, checksum):
        detail = (
            f"header checksum {checksum}, but .seq.idx lists {listed}; restore the file that was written with this"
            " shard"
        )
        raise CorruptShardError(path, column.spec.header_nbytes - CHECKSUM_NBYTES, "C8", detail)
    check_size(path, file.nbytes, column.nbytes)

    def confirm() -> None:
        require_same(paths.prefix, read_header(paths).shard_id, header.shard_id)
        if (present := read_start(path, COLUMN)) is None or present.raw != file.raw:
            raise FormatError(f"{path}: another column was attached after this one was opened; open the shard again")

    begin = column.spec.header_nbytes
    item = column.spec.dtype if column.spec.width == 1 else np.dtype((np.void, column.spec.row_nbytes))
    if file.info is not None:
        remote = RemoteArray(*open_store(path), item, column.rows, file.info.etag, offset=begin)
        return ShardColumn(name, column, remote)
    items = open_items(path, item, column.rows, file.nbytes, backend, confirm, begin)
    if not os.path.exists(path) or stamp_of(os.stat(path)) != file.stamp:
        confirm()
    return ShardColumn(name, column, items)


class _NoColumnError(KeyError):
    """A shard has no column of this name. The text lists the other columns. ``get`` and ``in`` use this error, too."""

    def __init__(self, name: str, columns: ShardColumns) -> None:
        super().__init__(name)
        self._columns = columns

    def __str__(self) -> str:
        return f"{self._columns.prefix}: {no_column(self.args[0], self._columns)}"


class ShardColumns(Mapping[str, ShardColumn]):
    """The columns of a shard by name, both listed and attached ones. Each is opened on first use."""

    # This object must not refer to the Shard that holds it. Without a reference cycle, files are closed as soon as the
    # last reference to the Shard is gone.
    def __init__(self, paths: ShardPaths, header: Header, backend: Backend) -> None:
        self._paths, self._header, self._backend = paths, header, backend
        self._opened: dict[str, ShardColumn] = {}

    @property
    def prefix(self) -> str:
        """Prefix of the shard."""
        return self._paths.prefix

    def open(self, name: str) -> ShardColumn:
        """Return the column of this name. See ``open_column`` for errors."""
        if name not in self._opened:
            self._opened[name] = open_column(self._paths, name, self._header, self._backend)
        return self._opened[name]

    def __getitem__(self, name: str) -> ShardColumn:
        if name not in self._opened and not has_column(self._paths, self._header, name):
            raise _NoColumnError(name, self)
        return self.open(name)

    def __iter__(self) -> Iterator[str]:
        return iter(column_names(self._paths, self._header))

    def __len__(self) -> int:
        return len(column_names(self._paths, self._header))


def pair_numbers(shard: Shard) -> NDArray[np.uint32] | None:
    """Return the pair number of each sequence, [sequences], or None if the shard has no column ``pair``.

    CorruptShardError: the column does not form pairs of the sequences (rule C10).
    """
    if (column := shard.columns.get("pair")) is None:
        return None
    rows, path = column.values[:], ShardPaths.of(shard.prefix).column("pair")
    if column.spec.kind != PAIR.kind:
        raise CorruptShardError(path, FIXED_NBYTES, "C10", f"{column.spec}, expected {PAIR}")
    if (torn := torn_pairs(rows)).size:
        at, pair = int(torn[0]), rows[torn[0] : torn[0] + 2].tolist()
        offset = column.spec.header_nbytes + at * column.spec.row_nbytes
        detail = f"sequences {at} and {at + 1} have {pair}, expected chosen [n, 0] followed by its rejected [n, 1]"
        raise CorruptShardError(path, offset, "C10", detail)
    numbers: NDArray[np.uint32] = rows[:, 0]
    return numbers
