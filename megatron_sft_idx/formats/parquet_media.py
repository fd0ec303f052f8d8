"""Images and audio of packs in Parquet: one more field, ``media``, a list of structs for each pack.

==========  ===========================================================
``kind``    string: ``image`` or ``audio``
``start``   integer: its first position in the pack
``length``  integer: how many placeholder tokens it has
``bytes``   binary: the encoded file (JPEG, PNG, WAV, ...), byte for byte
==========  ===========================================================

A file that several items show is stored with each of them, so that every row is complete. Items are in the order of
their positions, and a pack without any has an empty list. Other members of the structs are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError, brief
from megatron_sft_idx.layout.files import MAX_CAPACITY
from megatron_sft_idx.layout.media_layout import KIND_NAMES, KINDS, Items, broken_items
from megatron_sft_idx.packs.run import PackRun, first_true
from megatron_sft_idx.packs.run_media import BlobsInMemory, RunMedia

if TYPE_CHECKING:
    import pyarrow as pa

MEDIA_FIELD: Final = "media"
_MEMBERS: Final = ("kind", "start", "length", "bytes")
_EXPECTED: Final = "a list of structs of kind (string), start and length (integers), and bytes (binary)"


def media_type() -> pa.DataType:
    """Return the type of the field for writing."""
    import pyarrow as pa

    # Large, because the files of one row can have more than 2 GiB. It makes no difference in the file.
    types = zip(_MEMBERS, (pa.string(), pa.int32(), pa.int32(), pa.large_binary()), strict=True)
    return pa.list_(pa.struct([*types]))


def has_media_field(schema: pa.Schema, path: str, *, announced: bool) -> bool:
    """Return whether the rows of a file have images and audio.

    Args:
        schema: schema of the file.
        path: path of the file, for errors.
        announced: whether the package metadata announce them.

    Raises:
        FormatError: the field is announced but missing, is duplicate, or has another type.
    """
    import pyarrow as pa

    if (count := schema.names.count(MEDIA_FIELD)) != 1:
        if count or announced:
            reason = (
                f"no column {MEDIA_FIELD}, although its metadata lists one" if not count else f"{count} columns media"
            )
            raise FormatError(f"{path}: {reason}; copy or write it again")
        return False
    found = schema.field(MEDIA_FIELD).type
    value = found.value_type if pa.types.is_list(found) or pa.types.is_large_list(found) else None
    if value is None or not pa.types.is_struct(value) or not _has_members(value):
        raise FormatError(
            f"{path}: column {MEDIA_FIELD} is {found}, expected {_EXPECTED}: the images and audio of the packs; rename"
            " the column if it is something else"
        )
    return True


def _has_members(struct: pa.StructType) -> bool:
    import pyarrow as pa

    types = {struct.field(i).name: struct.field(i).type for i in range(struct.num_fields)}
    if len(types) != struct.num_fields or not types.keys() >= {*_MEMBERS}:
        return False
    texts, files = types["kind"], types["bytes"]
    return (
        (pa.types.is_string(texts) or pa.types.is_large_string(texts))
        and all(pa.types.is_integer(types[name]) for name in ("start", "length"))
        and (pa.types.is_binary(files) or pa.types.is_large_binary(files))
    )


def media_of_rows(rows: pa.Table | pa.RecordBatch, path: str, first_pack: int, run: PackRun) -> RunMedia:
    """Return the images and audio of several rows.

    Args:
        rows: rows of the file.
        path: path of the file, for errors.
        first_pack: the number of the first row in the file, for errors.
        run: the rows as valid packs with label-aligned masks.

    Raises:
        SequenceError: a rule is broken (M6 to M8, M12), or a value is null; with the number of the pack.
    """
    import pyarrow as pa

    column = rows.column(MEDIA_FIELD)
    counts: list[NDArray[np.int64]] = []
    members: dict[str, list[Any]] = {name: [] for name in _MEMBERS}
    first = first_pack
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        if chunk.null_count:
            row = first + int(np.argmax(chunk.is_null().to_numpy(zero_copy_only=False)))
            raise SequenceError(
                path, row, f"{MEDIA_FIELD} is null; use an empty list for a pack without images and audio"
            )
        counts.append(np.diff(chunk.offsets.to_numpy()).astype(np.int64))
        packs = first + np.repeat(np.arange(len(chunk)), counts[-1])
        structs = chunk.flatten()
        for name, values in members.items():
            of_all = (
                structs.field(name) if not structs.null_count else structs.flatten()[structs.type.get_field_index(name)]
            )
            if of_all.null_count:
                at = int(np.argmax(of_all.is_null().to_numpy(zero_copy_only=False)))
                what = MEDIA_FIELD if not structs[at].is_valid else f"{MEDIA_FIELD}.{name}"
                raise SequenceError(path, int(packs[at]), f"{what} contains a null; every item needs all four values")
            values.append(of_all)
        first += len(chunk)
    packs = np.repeat(np.arange(len(run)), np.concatenate([*counts, np.empty(0, np.int64)]).astype(np.int64))
    starts, lengths = (_positions(members[name], path, first_pack, packs, name) for name in ("start", "length"))
    kinds = _kinds(members["kind"], path, first_pack, packs)
    blobs = BlobsInMemory(memoryview(value.as_buffer()) for chunk in members["bytes"] for value in chunk)
    for number, data in enumerate(blobs):
        if not len(data):
            raise SequenceError(path, first_pack + int(packs[number]), f"{MEDIA_FIELD}.bytes is empty, expected a file")
    items = Items(starts, lengths, kinds, np.arange(len(blobs), dtype=np.uint32))
    if broken := next(broken_items(items, packs, run.token_offsets, run.bounds, run.loss_mask), None):
        reason = f"{MEDIA_FIELD}: {broken.found}, expected {broken.expected} (rule {broken.rule})"
        raise SequenceError(path, first_pack + int(packs[broken.item]), reason)
    items = items._replace(lengths=lengths.astype(np.uint32))
    return RunMedia.of_packs(items, packs, run.sequence_offsets, run.seq_starts, blobs)


def _positions(
    chunks: Sequence[pa.Array], path: str, first_pack: int, packs: NDArray[np.int64], name: str
) -> NDArray[np.int64]:
    """Return starts or lengths, int64 [items]. SequenceError: one cannot be a position in a pack (rule M6)."""
    values = np.concatenate([np.empty(0, np.int64), *(_within(chunk) for chunk in chunks)])
    if (at := first_true((values < 0) | (values > MAX_CAPACITY))) is not None:
        given = [value for chunk in chunks for value in chunk][at].as_py()
        reason = f"{MEDIA_FIELD}.{name} is {given}, expected positions of the pack (rule M6)"
        raise SequenceError(path, first_pack + int(packs[at]), reason)
    return values


def _within(chunk: pa.Array) -> NDArray[np.int64]:
    """Return integers of any kind as int64; -1 for larger ones."""
    values = chunk.to_numpy(zero_copy_only=False)
    if values.dtype == np.uint64:
        values = np.where(values > MAX_CAPACITY, np.uint64(MAX_CAPACITY + 1), values)
    wide: NDArray[np.int64] = values.astype(np.int64)
    return wide


def _kinds(chunks: Sequence[pa.Array], path: str, first_pack: int, packs: NDArray[np.int64]) -> NDArray[np.uint8]:
    names = [name for chunk in chunks for name in chunk.to_pylist()]
    known: dict[str, int] = {str(name): code for name, code in KINDS.items()}
    if (at := next((i for i, name in enumerate(names) if name not in known), None)) is not None:
        reason = f"{MEDIA_FIELD}.kind is {brief(names[at])}, expected {' or '.join(known)} (rule M8)"
        raise SequenceError(path, first_pack + int(packs[at]), reason)
    return np.array([known[name] for name in names], np.uint8)


def media_array(run: PackRun) -> pa.Array:
    """Return the field for the packs of a run with images and audio. Each file is read and checked against its hash.

    CorruptShardError: a file read from a shard does not match its hash.
    """
    import pyarrow as pa

    media = run.media
    assert media is not None
    starts = media.starts_in_packs(run.seq_starts)
    files = [media.blobs.data(number) for number in media.items.blobs.tolist()]
    ends = np.append(0, np.cumsum([len(data) for data in files], dtype=np.int64)).astype(np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(files))]
    kind = media_type()
    structs = pa.StructArray.from_arrays(
        [
            pa.array([KIND_NAMES[code] for code in media.items.kinds.tolist()], pa.string()),
            pa.array(starts.astype(np.int32)),
            pa.array(media.items.lengths.astype(np.int32)),
            pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(files), buffers),
        ],
        fields=[kind.value_type.field(i) for i in range(len(_MEMBERS))],
    )
    offsets = np.append(0, np.cumsum(run.sums_by_pack(media.counts))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), structs, type=kind)
