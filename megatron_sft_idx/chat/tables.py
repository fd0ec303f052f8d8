"""Read Parquet and Arrow files, including the files of ``save_to_disk`` folders, in pieces of whole rows.

Each piece is a small Arrow stream of about the requested size, so memory does not depend on the size of the file's row
groups. ``values`` describes the values of rows. Values of types that JSON does not have are not decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.types import InputRow, Piece
from megatron_sft_idx.chat.values import Binary, JsonText, Undecoded, read_values
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.remote.store import ObjectFile

if TYPE_CHECKING:
    import pyarrow as pa

# Number of rows that pyarrow decodes at once, and that become Python objects at once (several times their size).
_ROWS_READ = 1024
_ROWS_AT_ONCE = 256
_READ_NBYTES = 1 << 20
# The same for objects in stores, where a request takes 10 to 100 ms for any size.
_FETCH_NBYTES = 4 << 20

# Record batches, each with the number of bytes of the file read at its end.
_Batches = Iterator[tuple["pa.RecordBatch", int]]


@dataclass(frozen=True, slots=True, eq=False)
class TablePiece(Piece):
    """Rows of a Parquet or Arrow file; the payload is an Arrow stream."""

    def rows(self) -> Iterator[InputRow]:
        """See ``Piece.rows``."""
        import pyarrow as pa

        position = self.first
        with pa.ipc.open_stream(self.payload) as reader:
            for batch in reader:
                for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                    for row in _rows_of(batch.slice(start, _ROWS_AT_ONCE)):
                        try:
                            data, notes = read_values(row)
                        except ValueError as error:
                            data, notes = SequenceError(self.path, position, str(error)), {}
                        yield InputRow(position, data, notes)
                        position += 1

    def fingerprint(self) -> str:
        """Return a hash of the values only, because the bytes of an Arrow stream depend on the version of pyarrow.

        Encodings, 32-bit or 64-bit offsets, the width of numbers, chunks, fields of only nulls and values that are not
        decoded do not affect it, because they do not affect the rows.
        """
        import pyarrow as pa

        with pa.ipc.open_stream(self.payload) as reader:
            table = reader.read_all()
        stream = StreamHash()
        stream.update(table.num_rows.to_bytes(8, "little"))
        for name, field, values in zip(table.column_names, table.schema, table.columns, strict=True):
            chunks = [_Column.of(chunk, field, name) for chunk in values.chunks]
            if _validity(chunks).any():
                stream.update(f"column {name}".encode())
                _hash_values(stream, chunks)
        return stream.hex()


def table_pieces(
    path: str, kind: Literal["parquet", "arrow"], remote: ObjectFile | None, piece_nbytes: int
) -> Iterator[TablePiece]:
    """Yield the rows of a file in pieces of about ``piece_nbytes``, independent of its row groups.

    Args:
        path: path of the file, also for error messages.
        kind: an Arrow file is an IPC stream (as written by ``save_to_disk``) or an IPC file.
        remote: the object to read if the file is in an object store, else None.
        piece_nbytes: maximum number of bytes of rows per piece, except that a piece has at least one row.

    Raises:
        FormatError: the file is not a readable file of its kind.
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
        for read, at in batches:
            whole = _without_deep(_without_views(read))
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
    # A buffer makes pyarrow read column chunks in small parts instead of as a whole.
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

    # Not a memory map: its pages would count as memory of this process, in the end for the whole file.
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

_EXTENSION_KEY = b"ARROW:extension:name"
_JSON, _BOOL8 = "arrow.json", "arrow.bool8"
# Not an extension type: the metadata has the original type of the replaced values (``_placeholders``).
_UNDECODED = "undecoded: "


class _Column(NamedTuple):
    """Values of one type, at any depth of a table.

    Attributes:
        array: the values, without encoding and extension type.
        field: name of the field, with the names of its parents.
        extension: name of its extension type; "" if it has none.
    """

    array: pa.Array
    field: str
    extension: str

    @classmethod
    def of(cls, array: pa.Array, field: pa.Field | None, name: str) -> _Column:
        """Return the values of a field. If the extension type is not registered, the field's metadata has its name."""
        import pyarrow as pa

        extension = ""
        if field is not None and field.metadata:
            extension = field.metadata.get(_EXTENSION_KEY, b"").decode(errors="replace")
        while isinstance(array, pa.ExtensionArray) or _is_encoded(array.type) or _has_views(array.type):
            if isinstance(array, pa.ExtensionArray):
                extension, array = array.type.extension_name, array.storage
                continue
            try:
                array = _without_encoding(array) if _is_encoded(array.type) else _array_without_views(array)
            except pa.ArrowException:  # pyarrow cannot decode all types
                break
        return cls(array, name, extension)

    @property
    def form(self) -> str:
        """The JSON type of the values; "binary" and "undecoded" for types that JSON does not have."""
        kind = self.array.type
        if not self.extension and _is(kind, "binary", "large_binary", "fixed_size_binary"):
            return "binary"
        if _is(kind, "string", "large_string", "string_view"):
            return "typed JSON" if self.extension == _JSON else "text"
        if _is(kind, "boolean") or (_is(kind, "int8") and self.extension == _BOOL8):
            return "boolean"
        if _is(kind, "map"):
            return "map" if _is(kind.key_type, "string", "large_string", "string_view") else "undecoded"
        forms = {"null": "null", "integer": "integer", "floating": "float", "struct": "struct"}
        lists = dict.fromkeys(("list", "large_list", "fixed_size_list"), "list")
        return next((form for name, form in (forms | lists).items() if _is(kind, name)), "undecoded")

    def children(self) -> list[_Column]:
        """Return struct fields, list items, or keys and values of maps. Leaves out children of nulls."""
        import pyarrow as pa

        array, kind = self.array, self.array.type
        if self.form == "struct":
            flat = zip(array.flatten(), kind, strict=True)
            return [_Column.of(child, field, f"{self.field}.{field.name}") for child, field in flat]
        if self.form == "list":
            return [_Column.of(array.flatten(), kind.value_field, f"{self.field}[]")]
        entries = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field]))).flatten()
        keys, items = entries.flatten()
        return [_Column.of(keys, kind.key_field, self.field), _Column.of(items, kind.item_field, f"{self.field}[]")]

    def lengths(self) -> pa.Array:
        """Return the number of items in each list or map; null for a null."""
        import pyarrow as pa
        import pyarrow.compute as pc

        array = self.array
        if self.form == "map":
            array = array.cast(pa.list_(pa.struct([array.type.key_field, array.type.item_field])))
        return pc.list_value_length(array).cast(pa.int64())


def _is_encoded(kind: pa.DataType) -> bool:
    return _is(kind, "dictionary", "run_end_encoded")


def _without_encoding(array: pa.Array) -> pa.Array:
    """Expand the values of a dictionary or of runs."""
    if _is(array.type, "dictionary"):
        values, indices = array.dictionary, array.indices
    else:
        values = array.values
        ends = array.run_ends.to_numpy()
        indices = np.searchsorted(ends, np.arange(len(array)) + array.offset, side="right")
    values = _without_encoding(values) if _is_encoded(values.type) else _array_without_views(values)  # nor are taken
    return values.take(indices)


def _is_valid(array: pa.Array) -> pa.Array:
    """Return which values are not null. A union has no nulls itself, and asking pyarrow 26 for them may crash."""
    import pyarrow as pa

    return pa.repeat(True, len(array)) if _is(array.type, "union") else array.is_valid()


def _is(kind: pa.DataType, *names: str) -> bool:
    """Return whether a type is one of these; older versions of pyarrow do not know all of them."""
    import pyarrow as pa

    return any(test(kind) for name in names if (test := getattr(pa.types, f"is_{name}", None)) is not None)


def _rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows, before ``read_values``. If two columns have the same name, the last one counts."""
    columns = [
        _values(_Column.of(array, field, field.name)) for array, field in zip(batch.columns, batch.schema, strict=True)
    ]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: _Column) -> list[Any]:
    """Return the values as Python objects, which do not depend on whether pandas is installed."""
    import pyarrow as pa

    try:
        return _decoded(column)
    except (ValueError, OverflowError, pa.ArrowException) as error:
        if len(column.array) == 1:
            reason = f"cannot be read: {str(error).splitlines()[0]}"
            return [Undecoded(column.field, reason, "write the column again")]
    one_by_one = (column._replace(array=column.array.slice(i, 1)) for i in range(len(column.array)))
    return [value for one in one_by_one for value in _values(one)]


def _decoded(column: _Column) -> list[Any]:
    array, form = column.array, column.form
    values: list[Any]
    if form in ("integer", "float", "boolean"):
        return _numbers(column)
    if form in ("text", "null"):
        values = array.to_pylist()
        return values
    if form == "typed JSON":
        return [None if text is None else JsonText(text, column.field) for text in array.to_pylist()]
    remedy = "cast the column to text, numbers, lists or structs"
    if form == "binary":
        reason = f"is {str(array.type)[:60]}"
        is_valid = array.is_valid().to_pylist()
        return [Binary(column.field, reason, remedy, array, at) if is_valid[at] else None for at in range(len(array))]
    if form == "undecoded":
        name = column.extension.removeprefix(_UNDECODED)
        kind = str(array.type)[:60] if name == column.extension else name
        value = Undecoded(column.field, f"is {kind}", remedy, is_time=_is(array.type, "temporal"))
        return [value if is_valid else None for is_valid in _is_valid(array).to_pylist()]
    children = [_values(child) for child in column.children()]
    if form == "struct":
        names = [field.name for field in array.type]
        values = [dict(zip(names, each, strict=True)) for each in zip(*children, strict=True)]
        values = values if children else [{} for _ in range(len(array))]
        if array.null_count:
            values = [v if is_valid else None for v, is_valid in zip(values, array.is_valid().to_pylist(), strict=True)]
        return values
    values, end = [], 0
    for length in column.lengths().to_pylist():
        if length is None:
            values.append(None)
            continue
        start, end = end, end + length
        items = [items[start:end] for items in children]
        values.append(items[0] if form == "list" else dict(zip(*items, strict=True)))
    return values


def _numbers(column: _Column) -> list[Any]:
    import pyarrow as pa

    array = column.array
    if column.form == "float":
        array = array.cast(pa.float64())
    elif column.form == "boolean":
        array = array.cast(pa.bool_())
    values: list[Any] = array.to_pylist() if array.null_count else array.to_numpy(zero_copy_only=False).tolist()
    return values


def _hash_values(stream: StreamHash, chunks: Sequence[_Column]) -> None:
    """Add everything to a hash that affects the rows: which values are null, and the decoded values.

    The hashed form is defined only here, so that it does not change with pyarrow.
    """
    form, kind = chunks[0].form, chunks[0].array.type
    stream.update(form.encode())
    stream.update(np.packbits(_validity(chunks)))
    if form == "undecoded":
        stream.update(str(kind).encode())
    elif form in ("struct", "list", "map"):
        if form != "struct":
            stream.update(np.concatenate([each.lengths().drop_null().to_numpy() for each in chunks]))
        fields = [f"field {field.name}" for field in kind] if form == "struct" else []
        names = {"struct": fields, "list": ["items"], "map": ["keys", "items"]}[form]
        for name, *children in zip(names, *(each.children() for each in chunks), strict=True):
            if _validity(children).any():
                stream.update(name.encode())
                _hash_values(stream, children)
    elif form != "null":
        _hash_leaves(stream, form, [each.array.drop_null() for each in chunks])


def _hash_leaves(stream: StreamHash, form: str, chunks: Sequence[pa.Array]) -> None:
    import pyarrow as pa

    if form in ("text", "typed JSON", "binary"):
        kind = pa.large_binary() if form == "binary" else pa.large_string()
        whole = pa.concat_arrays([chunk.cast(kind) for chunk in chunks])
        ends = np.frombuffer(whole.buffers()[1], "<i8")[whole.offset :][: len(whole) + 1]
        stream.update(ends - ends[:1])
        stream.update(whole.buffers()[2][int(ends[0]) : int(ends[-1])] if len(ends) else b"")
        return
    numbers = np.concatenate([chunk.to_numpy(zero_copy_only=False) for chunk in chunks])
    if form == "boolean":
        stream.update(np.packbits(numbers.astype(bool)))
    elif form == "float":
        numbers = numbers.astype(np.float64)
        stream.update(np.where(np.isnan(numbers), np.nan, numbers))
    elif len(numbers) and int(numbers.max()) > np.iinfo(np.int64).max:
        stream.update(b"large")
        stream.update(numbers)
    else:
        stream.update(numbers.astype(np.int64))


def _validity(chunks: Sequence[_Column]) -> NDArray[np.bool_]:
    return np.concatenate([_is_valid(each.array).to_numpy(zero_copy_only=False) for each in chunks])


# ---- columns that no stream can hold ----

# Number of nesting levels that every Arrow stream can hold; pyarrow stops at 64.
_MAX_LEVELS = 60


def _without_deep(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with undecoded values in place of columns that are nested too deeply for a stream."""
    import pyarrow as pa

    if not any(_levels(field.type) > _MAX_LEVELS for field in batch.schema):
        return batch
    columns = [
        _placeholders(array, field, f"nested more than {_MAX_LEVELS} levels deep")
        if _levels(field.type) > _MAX_LEVELS
        else (array, field)
        for array, field in zip(batch.columns, batch.schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays([array for array, _ in columns], schema=pa.schema([f for _, f in columns]))


def _placeholders(array: pa.Array, field: pa.Field, what: str) -> tuple[pa.Array, pa.Field]:
    """Return values that are read as undecoded, to replace others, and their field."""
    import pyarrow as pa

    values = pa.array([b"" if is_valid else None for is_valid in _is_valid(array).to_pylist()], pa.binary())
    return values, pa.field(field.name, pa.binary(), metadata={_EXTENSION_KEY: f"{_UNDECODED}{what}"})


def _levels(kind: pa.DataType) -> int:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _levels(kind.storage_type)
    if _is(kind, "dictionary", "run_end_encoded"):
        return 1 + _levels(kind.value_type)
    inner = [kind.field(at).type for at in range(kind.num_fields)]
    own = 2 if _is(kind, "map") else 1  # a map is a list of structs
    return own + max(map(_levels, inner)) if inner else 0


def _without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch without views of strings and lists: writing a slice of views would write the bytes of all."""
    import pyarrow as pa

    if not any(_has_views(field.type) for field in batch.schema):
        return batch
    arrays = [_array_without_views(array) for array in batch.columns]
    fields = [_field_of(field, array) for field, array in zip(batch.schema, arrays, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _field_of(field: pa.Field, array: pa.Array) -> pa.Field:
    """Return the field with the array's type; its metadata keeps the name of a lost extension type."""
    import pyarrow as pa

    if isinstance(field.type, pa.BaseExtensionType) and not isinstance(array.type, pa.BaseExtensionType):
        field = field.with_metadata({**(field.metadata or {}), _EXTENSION_KEY: field.type.extension_name})
    return field.with_type(array.type)


def _has_views(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _has_views(kind.storage_type)
    if _is(kind, "string_view", "binary_view", "list_view", "large_list_view"):
        return True
    if _is(kind, "struct", "map"):
        return any(_has_views(kind.field(at).type) for at in range(kind.num_fields))
    return _is(kind, "list", "large_list", "fixed_size_list") and _has_views(kind.value_type)


def _array_without_views(array: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if not _has_views(kind):
        return array
    if isinstance(array, pa.ExtensionArray):
        return _array_without_views(array.storage)
    if _is(kind, "string_view", "binary_view"):
        return array.cast(pa.large_string() if _is(kind, "string_view") else pa.large_binary())
    if _is(kind, "struct"):
        children = [_array_without_views(child) for child in array.flatten()]
        fields = [_field_of(field, child) for field, child in zip(kind, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    if _is(kind, "map"):
        keys, items = map(_array_without_views, (array.keys, array.items))
        of_entries = pa.map_(_field_of(kind.key_field, keys), _field_of(kind.item_field, items))
        offsets = pa.array(np.array(array.offsets, np.int32))
        return pa.MapArray.from_arrays(offsets, keys, items, type=of_entries, mask=array.is_null())
    # Neither cast nor flattened, because pyarrow 26 does that wrongly for views.
    items, is_null = array.values, array.is_null()
    lengths = pc.list_value_length(array).fill_null(0).cast(pa.int64()).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if _is(kind, "fixed_size_list"):
        items = items.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        offsets = np.arange(len(array) + 1) * kind.list_size
    elif _is(kind, "list", "large_list"):
        offsets = np.array(array.offsets, np.int64)
    items = _array_without_views(items)
    field = _field_of(kind.value_field, items)
    if _is(kind, "list_view", "large_list_view"):
        # Views may be in any order.
        firsts = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64) - offsets[:-1]
        indices = pa.array(np.repeat(firsts, lengths) + np.arange(offsets[-1]))
        items = _without_encoding(items) if _is_encoded(items.type) else items
        field = _field_of(field, items)
        try:
            items = items.take(indices)
        except pa.ArrowException:  # for types that pyarrow cannot take
            items, field = _placeholders(items, field, str(items.type)[:60])
            items = items.take(indices)
    of_items = pa.large_list(field)
    return pa.LargeListArray.from_arrays(offsets, items, type=of_items, mask=is_null)
