"""Packs as Parquet: one row per pack, with three lists, as in Megatron-Bridge and Nemotron's data preparation.

=============  ==========================================================================
``input_ids``  list of int32 (Nemotron) or int64 (Megatron-Bridge)
``loss_mask``  list of uint8 (Nemotron) or int8 (Megatron-Bridge), one value per token
``seq_start_id``  list of int32 or int64: where the pack's sequences start, the first 0
=============  ==========================================================================

A Parquet column is called a *field* here; a *column* is a column of a shard. A column is stored as one more field of
lists, of the same name: each row has the concatenated values of the pack's tokens, of its sequences, or of the pack,
``width`` values for each. Images and audio are another field, ``media`` (``formats.parquet_media``).

The schema's metadata contain the package metadata: which fields are columns, and everything without a field: capacity,
padding id, dtypes. Files of other writers have none. Other fields are never read. Row groups can have any size,
compression and encoding that pyarrow reads.

Masks are label-aligned in the output of Megatron-Bridge's own packer, and its collate function expects that. Nemotron's
data preparation at first rolled them right over whole packs, and later shifted them left inside sequences. Its files do
not say which, so the older ones need ``mask_alignment="rolled-right"``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.formats.base import (
    PackCounts,
    PackedReader,
    PackedSpec,
    PackedWriter,
    column_specs_of,
    encode_json,
    int_within,
    recogniser,
)
from megatron_sft_idx.formats.bridge import BRIDGE_PADDING_KEY, SUMMARY_KIND, SUMMARY_SUFFIX
from megatron_sft_idx.formats.parquet_media import MEDIA_FIELD, has_media_field, media_array, media_of_rows, media_type
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import MAX_CAPACITY, MAX_COUNT
from megatron_sft_idx.packs.run import (
    RUN_TOKENS,
    Column,
    PackRun,
    count_fitting,
    fewer_tokens,
    first_true,
    require_same_length,
    run_bounds,
)
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage import name_in_errors, open_regular
from megatron_sft_idx.storage.publish import Kind

if TYPE_CHECKING:
    import pyarrow as pa

FIELDS = ("input_ids", "loss_mask", "seq_start_id")
# The key of the package metadata in the schema's metadata, and the version of its content.
KEY = b"megatron_sft_idx"
VERSION = 1
# The fields whose value counts in the footer are the numbers of tokens and sequences of a row group.
_COUNTED_FIELDS = ("input_ids", "seq_start_id")

_MAGIC = b"PAR1"
# Memory for decoded row groups; the most recent one is kept at any size.
_CACHE_NBYTES = 256 << 20
_READ_NBYTES = 1 << 20
# Row groups with more values in a field are not decoded: a few bytes of run lengths can claim any number of values.
_MAX_GROUP_VALUES = 1 << 31


@recogniser
def recognise(path: str) -> bool:
    """Return whether a file is packed Parquet, from its magic and its three fields."""
    with open_regular(path) as file:
        if file.read(4) != _MAGIC or file.seek(-4, os.SEEK_END) < 8 or file.read(4) != _MAGIC:
            return False
    with pyarrow_errors(path):
        import pyarrow.parquet as pq

        checked_schema(pq.read_schema(path), path)
    return True


@contextlib.contextmanager
def pyarrow_errors(path: str, kind: str = "Parquet") -> Iterator[None]:
    """Convert pyarrow's errors about a file's content to FormatError. System errors, with an errno, pass.

    ``kind`` is the name of such files in messages.

    Raises:
        SFTIndexError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise SFTIndexError(f"{path}: {kind} files need pyarrow: pip install 'megatron-sft-idx[parquet]'") from None
    try:
        yield
    except (pa.ArrowException, MemoryError, OverflowError, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FormatError(f"{path}: not a readable {kind} file: {reason}; copy or write it again") from None


def checked_schema(schema: pa.Schema, path: str, columns: Mapping[str, ColumnSpec] | None = None) -> None:
    """Raise FormatError unless the three fields, and one per column, occur once and are lists of numbers."""
    import pyarrow as pa

    names, columns = schema.names, columns or {}
    if wrong := [name for name in (*FIELDS, *columns) if names.count(name) != 1]:
        found = ", ".join(names[:20]) or "none"
        raise FormatError(
            f"{path}: no column {', '.join(wrong)} (or more than one of that name), expected exactly one of each of"
            f" {', '.join((*FIELDS, *columns))}, found {found}. To tokenize chats, use megatron-sft-idx preprocess"
        )
    for name, spec in columns.items():
        kind = schema.field(name).type
        if kind != (expected := pa.list_(pa.from_numpy_dtype(spec.dtype))):
            raise FormatError(f"{path}: column {name} is {kind}, expected {expected} according to its metadata")
    for name in FIELDS:
        kind = schema.field(name).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        value = kind.value_type if is_list else None
        good = value is not None and (
            pa.types.is_integer(value)
            or (name == "loss_mask" and (pa.types.is_boolean(value) or pa.types.is_floating(value)))
        )
        if not good:
            numbers = "numbers" if name == "loss_mask" else "integers"
            raise FormatError(f"{path}: column {name} is {kind}, expected a list of {numbers}, one per token")


def _column_of(
    rows: pa.Table | pa.RecordBatch, path: str, name: str, spec: ColumnSpec, first_pack: int, counts: NDArray[np.int64]
) -> Column:
    """Return a column of the packs in some rows; ``counts`` has its number of rows in each pack: int64 [packs].

    Raises:
        SequenceError: the number of values in a pack is not ``width`` for each row of the column.
    """
    values, lengths = list_field(rows.column(name), path, name, first_pack)
    if (pack := first_true(lengths != counts * spec.width)) is not None:
        reason = (
            f"{lengths[pack]} values in {name}, expected {counts[pack]} x {spec.width}: {spec.width} per {spec.per}"
        )
        raise SequenceError(path, first_pack + pack, reason)
    return Column(spec, values.astype(spec.dtype, copy=False).reshape(spec.shape(int(counts.sum()))))


def list_field(
    field: pa.ChunkedArray | pa.Array, path: str, name: str, first_pack: int
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the concatenated values of a field of lists, and the length of each row's list: int64 [rows].

    A field has several chunks if it has more than 2^31 values, or if the file was written that way.

    Raises:
        SequenceError: a list, or a value in one, is null.
    """
    import pyarrow as pa

    values, lengths = [], []
    for chunk in field.chunks if isinstance(field, pa.ChunkedArray) else [field]:
        if chunk.null_count:
            row = int(np.argmax(chunk.is_null().to_numpy(zero_copy_only=False)))
            raise SequenceError(path, first_pack + row, f"{name} is null; every pack needs a list of numbers")
        lengths.append(np.diff(chunk.offsets.to_numpy()).astype(np.int64))
        flat = chunk.flatten()
        if flat.null_count:
            at = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False)))
            row = int(np.searchsorted(np.cumsum(lengths[-1]), at, side="right"))
            raise SequenceError(path, first_pack + row, f"{name} contains a null; every token needs a value")
        # No copy is made except for booleans, which Arrow stores as bits.
        values.append(flat.to_numpy(zero_copy_only=False))
        first_pack += len(chunk)
    if len(values) == 1:
        return values[0], lengths[0]
    no_chunks = [np.empty(0, np.int64)]
    return np.concatenate(values or no_chunks), np.concatenate(lengths or no_chunks)


def _media_nbytes(group: pa.RowGroupMetaData) -> int:
    """Return the decoded size of a row group's images and audio in bytes, from the footer; 0 without media."""
    leaves = (group.column(i) for i in range(group.num_columns))
    return sum(
        leaf.total_uncompressed_size
        for leaf in leaves
        if leaf.path_in_schema.startswith(f"{MEDIA_FIELD}.") and leaf.path_in_schema.endswith(".bytes")
    )


def _nbytes_of(run: PackRun) -> int:
    """Bytes of memory that a decoded run takes."""
    return run.nbytes + (int(run.media.file_sizes().sum()) if run.media is not None else 0)


class Reader(PackedReader):
    """One packed Parquet file.

    Reading one pack decodes its whole row group, which is the unit that Parquet compresses. The group is checked once,
    and cached for further reads. Each process opens its own reader; threads can share one.

    Raises:
        SFTIndexError: pyarrow is not installed.
    """

    def _open(self, *, columns: Sequence[str] | None = ()) -> None:
        self._decoded_groups: OrderedDict[int, PackRun] = OrderedDict()
        self._decoded_nbytes = 0
        self._lock = threading.Lock()
        with pyarrow_errors(self.path):
            import pyarrow as pa
            import pyarrow.parquet as pq

            # Not a memory map: if the file is truncated during reading, that is an error, not a SIGBUS.
            open_regular(self.path).close()
            source = pa.OSFile(self.path)
            # A group is read buffer by buffer instead of at once, for passes over files with large row groups.
            self._file = pq.ParquetFile(
                source, buffer_size=_READ_NBYTES, pre_buffer=False, page_checksum_verification=True
            )
            # Equal for copies. A footer has size, counts and value range of each field in each group.
            size = source.size()
            source.seek(size - 8)
            nbytes = int.from_bytes(source.read(4), "little")
            source.seek(size - 8 - nbytes)
            self.identity = f"{size}-{xxhash.xxh3_128_hexdigest(source.read(nbytes))}"
            schema = self._file.schema_arrow
            self._package_metadata = self._read_package_metadata(schema.metadata)
            self.columns = column_specs_of(self._package_metadata, self.path, columns)
            checked_schema(schema, self.path, self.columns)
            self.has_media = has_media_field(schema, self.path, announced=bool(self._package_metadata.get("media")))
            self._fields = [*FIELDS, *self.columns, *([MEDIA_FIELD] if self.has_media else [])]
            self._count_groups()
            mask_type = str(schema.field("loss_mask").type.value_type)
        self._take_alignment(self._package_metadata.get("mask_alignment"))
        token_dtype = np.uint16 if self._package_metadata.get("token_dtype") == "uint16" else np.int32
        # Arrow's names for floats are halffloat, float and double.
        mask_dtype = np.float32 if mask_type in ("halffloat", "float", "double") else np.uint8
        self._dtypes = np.dtype(token_dtype), np.dtype(mask_dtype)

    def _read_package_metadata(self, metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
        """Return the package metadata in the schema's metadata; empty in files of other writers."""
        raw = (metadata or {}).get(KEY)
        if raw is None:
            return {}
        try:
            values = orjson.loads(raw)
        except ValueError as error:
            raise FormatError(f"{self.path}: schema metadata {KEY.decode()!r} is not JSON: {error}") from None
        if not isinstance(values, dict) or values.get("version") != VERSION:
            raise FormatError(
                f"{self.path}: schema metadata {KEY.decode()!r} is not of version {VERSION}; upgrade megatron-sft-idx,"
                " or remove the key to read only the columns"
            )
        return values

    def _count_groups(self) -> None:
        """Read from the footer the first pack of each row group, and the number of values in each of its fields.

        Groups have different sizes, and may be empty.
        """
        metadata = self._file.metadata
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        # The values of list ``a`` are at path ``a.list.element``; a field named ``a.b`` has the path ``a.b``.
        leaves = {
            name: min(
                (path.count("."), i)
                for i, path in enumerate(paths)
                if f"{path}.".startswith(f"{name}.") and metadata.schema.column(i).max_repetition_level == 1
            )[1]
            for name in self._fields
        }
        self._num_values = {name: [group.column(leaves[name]).num_values for group in groups] for name in self._fields}
        rows = [group.num_rows for group in groups]
        for shown, counts in ("rows", rows), *self._num_values.items():
            if wrong := [group for group, count in enumerate(counts) if not 0 <= count <= MAX_COUNT]:
                group = wrong[0]
                raise FormatError(
                    f"{self.path}: row group {group} has {counts[group]} {shown} according to the footer, which"
                    " is damaged"
                )
        self._media_nbytes = [_media_nbytes(group) for group in groups]
        self._num_tokens, self._num_sequences = (sum(self._num_values[name]) for name in _COUNTED_FIELDS)
        self._first_packs: list[int] = [0, *accumulate(rows)]
        self.num_packs = self._first_packs[-1]
        if self.num_packs != metadata.num_rows:
            raise FormatError(
                f"{self.path}: row groups have {self.num_packs} rows, but the footer has {metadata.num_rows}; the file"
                " is damaged"
            )

    @cached_property
    def spec(self) -> PackedSpec:
        """The spec from the footer and the package metadata.

        If those do not have the longest pack, or are about other packs, the first access needs one pass over the masks.
        """
        longest = self._stated_longest
        if longest is None:
            # From the masks, which are the fastest field to decode.
            offsets = (batch.column("loss_mask").offsets.to_numpy() for batch in self._batches(["loss_mask"]))
            longest = max((int(np.diff(each).max(initial=0)) for each in offsets), default=0)
            if longest > MAX_CAPACITY:
                raise FormatError(f"{self.path}: a pack of {longest} tokens, expected at most {MAX_CAPACITY} (rule P1)")
        return self._make_spec(self._num_sequences, self._num_tokens, longest, media=self.has_media)

    @cached_property
    def _stated_longest(self) -> int | None:
        """Return the longest pack from the package metadata; None if they do not have it, or are about other packs."""
        values = self._package_metadata
        found = len(self), self._num_sequences, self._num_tokens
        if tuple(values.get(key) for key in ("num_packs", "num_sequences", "num_tokens")) == found:
            return int_within(values, "longest_pack", 0)
        if values:
            self.notes.append("the counts in its schema metadata do not match its rows, so the rows were counted")
        return None

    def read(self, index: int) -> Pack:
        """Return pack ``index``, as views of the decoded row group. All packs of the group are checked."""
        group = bisect_right(self._first_packs, index) - 1
        with self._lock:
            run = self._decoded_groups.get(group)
            if run is None:
                run = self._decode_group(group)
                self._decoded_groups[group] = run
                self._decoded_nbytes += _nbytes_of(run)
                while self._decoded_nbytes > _CACHE_NBYTES and len(self._decoded_groups) > 1:
                    self._decoded_nbytes -= _nbytes_of(self._decoded_groups.popitem(last=False)[1])
            self._decoded_groups.move_to_end(group)
        return run.pack(index - self._first_packs[group])

    def _run_of_rows(self, rows: pa.Table | pa.RecordBatch, first_pack: int) -> PackRun:
        """Convert rows to packs; the first one has number ``first_pack``. SequenceError: one breaks a rule."""
        fields = [list_field(rows.column(name), self.path, name, first_pack) for name in FIELDS]
        (ids, lengths), (mask, mask_lengths), (starts, sequences) = fields
        if (pack := first_true(lengths != mask_lengths)) is not None:
            require_same_length(self.path, first_pack + pack, input_ids=lengths[pack], loss_mask=mask_lengths[pack])
        run = PackRun(ids, mask, starts, lengths, sequences)
        columns = {
            name: _column_of(rows, self.path, name, spec, first_pack, run.rows_by_pack(spec.per))
            for name, spec in self.columns.items()
        }
        run = self._checked(first_pack, dataclasses.replace(run, columns=columns))
        if self.has_media:
            run = dataclasses.replace(run, media=media_of_rows(rows, self.path, first_pack, run))
        # If the longest pack was not stated but counted, no pack exceeds the capacity.
        capacity = MAX_CAPACITY if self._stated_longest is None else self.spec.capacity
        if (pack := first_true(run.pack_lengths > capacity)) is not None:
            reason = f"{lengths[pack]} tokens, but the capacity of the file is {capacity} (rule P1)"
            raise SequenceError(self.path, first_pack + pack, reason)
        return run

    def _decode_group(self, group: int) -> PackRun:
        """The packs of a row group, all checked."""
        first = self._first_packs[group]
        for name in self._fields:
            if (count := self._num_values[name][group]) > _MAX_GROUP_VALUES:
                raise FormatError(
                    f"{self.path}: row group {group} has {count} values in {name}, expected at most"
                    f" {_MAX_GROUP_VALUES}; write it again with smaller row groups"
                )
        if (nbytes := self._media_nbytes[group]) > _MAX_GROUP_VALUES:
            raise FormatError(
                f"{self.path}: row group {group} has {nbytes:,} bytes of images and audio, expected at most"
                f" {_MAX_GROUP_VALUES:,}; write it again with smaller row groups"
            )
        with pyarrow_errors(self.path):
            # Without threads: a forked process does not have the threads of pyarrow's pool.
            rows = self._file.read_row_group(group, columns=self._fields, use_threads=False)
            run = self._run_of_rows(rows, first)
        expected = (self._first_packs[group + 1] - first, *(self._num_values[name][group] for name in _COUNTED_FIELDS))
        self._require_counts(f"row group {group}", (len(run), len(run.tokens), len(run.seq_starts)), expected)
        return run

    def _require_counts(self, shown: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        """Raise FormatError unless the numbers of packs, tokens and sequences match the footer."""
        if found != expected:
            raise FormatError(
                f"{self.path}: {shown} has {found[0]} packs, {found[1]} tokens and {found[2]} sequences, expected"
                f" {expected[0]}, {expected[1]} and {expected[2]} according to the footer; the file is damaged: copy"
                " or write it again"
            )

    def _batches(self, fields: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield fields of all rows in batches of about ``RUN_TOKENS`` tokens, or fewer if token columns are wide."""
        with pyarrow_errors(self.path):
            import pyarrow as pa

            for groups, rows in self._groups_at_once():
                for batch in self._file.iter_batches(rows, row_groups=groups, columns=fields, use_threads=False):
                    yield batch
                    pa.default_memory_pool().release_unused()

    def _groups_at_once(self) -> Iterator[tuple[list[int], int]]:
        """Yield row groups to read together and the rows per batch: small groups together, large ones separately."""
        max_tokens = fewer_tokens(RUN_TOKENS, self.columns)
        offsets = [0, *accumulate(self._num_values["input_ids"])]
        for first, last in run_bounds(np.array(offsets), max_tokens):
            if sum(self._media_nbytes[first:last]) > _MAX_GROUP_MEDIA_NBYTES:
                yield from (([group], self._rows_at_once(group, max_tokens)) for group in range(first, last))
                continue
            tokens, packs = offsets[last] - offsets[first], self._first_packs[last] - self._first_packs[first]
            yield [*range(first, last)], max(1, packs * max_tokens // max(tokens, max_tokens))

    def _rows_at_once(self, group: int, max_tokens: int) -> int:
        """Return the rows per batch for a row group whose images and audio need much memory."""
        packs, nbytes = self._first_packs[group + 1] - self._first_packs[group], self._media_nbytes[group]
        parts = max(nbytes / _MAX_GROUP_MEDIA_NBYTES, self._num_values["input_ids"][group] / max_tokens, 1)
        return max(1, int(packs / parts))

    def _runs(self) -> Iterator[PackRun]:
        """Yield all packs. Memory depends on the mean size of the packs in a row group, not on its own size."""
        counts = PackCounts()
        for batch in self._batches(self._fields):
            run = self._run_of_rows(batch, counts.num_packs)
            counts.add(run)
            yield run
        expected = len(self), self._num_tokens, self._num_sequences
        self._require_counts("the file", (counts.num_packs, counts.num_tokens, counts.num_sequences), expected)


# Maximum number of tokens in a row group. The writer holds it in memory, and reading one pack decodes it: 1000 packs of
# 4096. A token takes 5 bytes in memory, and 25 more in pyarrow's encoder.
_MAX_GROUP_TOKENS = 4 << 20
# Maximum size of images and audio in a row group in bytes; they are in memory several times during writing.
_MAX_GROUP_MEDIA_NBYTES = 32 << 20


def _media_nbytes_by_pack(run: PackRun) -> NDArray[np.int64]:
    """Return the size of each pack's images and audio in bytes, each item with its own file: int64 [packs]."""
    if run.media is None:
        return np.zeros(len(run), np.int64)
    ends = np.append(0, np.cumsum(run.media.file_sizes()))
    return run.sums_by_pack(np.diff(ends[run.media.offsets]))


class Writer(PackedWriter):
    """Writes one packed Parquet file: int32 ids, uint8 masks, int32 starts, as written by Nemotron and read by Bridge.

    The same packs give the same bytes with the same version of pyarrow, which stores its name in the file.

    Args:
        row_group_size: maximum number of packs in a row group, which has fewer if packs are long. Small groups make
            random reads fast, large ones make the file small.
    """

    format = "parquet"
    reader, kind = Reader, Kind("a Parquet file of packs", recognise)
    binary_masks = True
    stores_columns = True
    stores_media = True

    def _begin(self, spec: PackedSpec, *, row_group_size: int = 1000) -> None:
        if BRIDGE_PADDING_KEY in spec.metadata:  # Bridge reads no columns
            self.stores_columns, self._layout = False, " padded for Megatron-Bridge"
        spec = spec if self.stores_columns else dataclasses.replace(spec, columns={})
        if taken := sorted(spec.columns.keys() & set(FIELDS)):
            raise FormatError(
                f"{self._path}: column {taken[0]}: Parquet packs already have a field with this name; rename the column"
            )
        if row_group_size < 1:
            raise FormatError(f"{self._path}: row group size {row_group_size}, expected at least 1 pack")
        self._row_group_size = row_group_size
        self._held: list[PackRun] = []
        self._num_held, self._held_media_nbytes = PackCounts(), 0
        with pyarrow_errors(self._path):
            import pyarrow as pa
            import pyarrow.parquet as pq
        self._max_group_tokens = fewer_tokens(_MAX_GROUP_TOKENS, spec.columns)
        self._types = [pa.list_(pa.int32()), pa.list_(pa.uint8()), pa.list_(pa.int32())]
        self._types += [pa.list_(pa.from_numpy_dtype(column.dtype)) for column in spec.columns.values()]
        package_metadata = {
            "format": "packed-sft",
            "version": VERSION,
            "mask_alignment": "label",
            "token_dtype": spec.token_dtype.name,
            "num_packs": spec.num_packs,
            "num_sequences": spec.num_sequences,
            **spec.package_metadata(),
        }
        metadata = {KEY: encode_json(self._path, package_metadata)}
        names = [*FIELDS, *spec.columns]
        encoding: dict[str, Any] = {}
        if spec.media:
            # With a dictionary of files, readers could not know the size of a row group.
            encoding["write_page_checksum"] = True  # a changed byte could be another image
            encoding["use_dictionary"] = [f"{name}.list.element" for name in names]
            names.append(MEDIA_FIELD)
            self._types.append(media_type())
        self._schema = pa.schema(list(zip(names, self._types, strict=True)), metadata=metadata)
        temporary = self._make_output().temporary
        with name_in_errors(temporary):
            self._writer: Any = pq.ParquetWriter(temporary, self._schema, compression="zstd", **encoding)

    def _append(self, run: PackRun) -> None:
        first, media_offsets = 0, np.append(0, np.cumsum(_media_nbytes_by_pack(run)))
        while first < len(run):
            # The end of a group depends only on its packs: runs of any size give the same file.
            room = min(
                count_fitting(run.token_offsets[first:], self._max_group_tokens - self._num_held.num_tokens),
                count_fitting(media_offsets[first:], _MAX_GROUP_MEDIA_NBYTES - self._held_media_nbytes),
                len(run) - first,
            )
            last = first + max(0, min(room, self._row_group_size - self._num_held.num_packs))
            if last == first and not self._held:
                last = first + 1  # a pack larger than the limit is a separate group
            self._hold(run.subrun(first, last))
            self._held_media_nbytes += int(media_offsets[last] - media_offsets[first])
            if last < len(run) or self._num_held.num_packs == self._row_group_size:
                self._write_group()
            first = last

    def _hold(self, packs: PackRun) -> None:
        """Keep packs for the next row group."""
        if len(packs):
            # Copies: a view would keep a whole run in memory, and the caller may reuse its arrays.
            packs = PackRun.joined([packs])
            self._held.append(dataclasses.replace(packs, tokens=packs.tokens.astype(np.int32, copy=False)))
            self._num_held.add(packs)

    def _write_group(self) -> None:
        import pyarrow as pa

        held, self._held, self._num_held, self._held_media_nbytes = self._held, [], PackCounts(), 0
        if not held:
            return
        run = PackRun.joined(held)
        held.clear()  # before the encoder runs, which needs several times as much
        starts = run.seq_starts.astype(np.int32)
        fields = [(run.tokens, run.pack_lengths), (run.loss_mask, run.pack_lengths), (starts, run.pack_sequences)]
        for spec, values in run.columns.values():
            fields.append((values.reshape(-1), run.rows_by_pack(spec.per) * spec.width))
        arrays = []
        for (flat, lengths), type_ in zip(fields, self._types, strict=False):
            offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
            arrays.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(flat)), type=type_))
        if run.media is not None:
            arrays.append(media_array(run))
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        with name_in_errors(self._output.temporary):
            self._writer.write_table(table, row_group_size=len(run))
        pa.default_memory_pool().release_unused()

    def _finish(self) -> None:
        self._write_group()
        with name_in_errors(self._output.temporary):
            self._writer.close()

    def set_summary(self, summary: bytes | None) -> None:
        """Publish a summary of the packs for Megatron-Bridge with the file; None removes that of an older file."""
        self._output.write_beside(SUMMARY_SUFFIX, summary, SUMMARY_KIND)

    def abandon(self) -> None:
        """Remove the output. Does nothing after ``finalize`` or another ``abandon``."""
        with contextlib.suppress(Exception):  # on a full disk, the footer cannot be written either
            self._writer.close()
        super().abandon()
