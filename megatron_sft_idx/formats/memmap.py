"""Packs as a folder of padded NumPy arrays, ``memmap_padded_v1``: every pack is a row of the same width, the pack size.

===================  ======================  ========================================================
``input_ids.npy``    [packs, pack_size]      ids; what follows a pack's tokens in its row is never read
``loss_mask.npy``    [packs, pack_size]      uint8, 0 or 1
``packed_len.npy``   [packs]                 uint32, tokens in each pack
``seq_offsets.npy``  [packs + 1]             uint32, CSR offsets of the sequences by pack
``seq_starts.npy``   [sequences]             uint32, where each sequence starts in its pack
``NAME.col.npy``     see below               one for each column of a shard
``manifest.json``    written last            format, counts, dtypes; here also alignment, padding id, checksums
===================  ======================  ========================================================

The values of a column are [packs, pack_size], padded like the ids, [sequences] or [packs], with one more dimension if
the column is wider than 1. The manifest has the spec of each.

The manifest of another writer does not define the alignment of its masks. The original proposal for this format rolls
them right over whole packs before writing, which trains the wrong tokens. Such folders need
``mask_alignment="rolled-right"``.

A pack's tokens are found by its row and its length, never by the values of padding. The ``.npy`` files have arrays of
numbers that are mapped or read in order; nothing in them is ever unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import (
    PackedReader,
    PackedSpec,
    PackedWriter,
    checked_alignment,
    column_specs_of,
    encode_json,
    file_identity,
    joined_ranges,
    read_json_object,
    recogniser,
)
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import MAX_CAPACITY, require_dtype
from megatron_sft_idx.packs.run import (
    RUN_TOKENS,
    Column,
    MaskAlignment,
    PackRun,
    checked_pack,
    fewer_tokens,
    first_true,
)
from megatron_sft_idx.storage import open_array, open_regular
from megatron_sft_idx.storage.local import HashedFile
from megatron_sft_idx.storage.outputs import PendingOutput
from megatron_sft_idx.storage.publish import Kind, head_of

NAME = "memmap_padded_v1"
MANIFEST = "manifest.json"
# The manifest's key for the package metadata (``PackedSpec.package_metadata``).
PACKAGE_KEY = "megatron_sft_idx"
ARRAYS = ("input_ids", "loss_mask", "packed_len", "seq_offsets", "seq_starts")
# The file of a column has the column's name with this suffix.
_COLUMN_SUFFIX = ".col.npy"
# Number of packs whose lengths are summed together.
_PACKS_AT_ONCE = 1 << 20


@recogniser
def recognise(path: str) -> bool:
    """Return whether a folder has the manifest of padded memmap arrays."""
    return bool(read_manifest(path))


def read_manifest(folder: str) -> dict[str, Any]:
    """Return the manifest of a folder, with the xxh3_128 of its bytes in hex under the key ``fingerprint``.

    Raises:
        FormatError: there is no manifest, or it has another format or version.
        OSError: it cannot be read.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        manifest, raw = read_json_object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(
            f"{folder}: no {MANIFEST}, which is written last; either this is another kind of folder, or it was"
            " not finished"
        ) from None
    if (found := manifest.get("format")) != NAME:
        raise FormatError(f"{path}: format {found!r}, expected {NAME!r}")
    version = str(manifest.get("version", "1.0"))
    if version.partition(".")[0] != "1":
        raise FormatError(f"{path}: version {version}, but this package reads 1.x; upgrade megatron-sft-idx")
    return {**manifest, "fingerprint": xxhash.xxh3_128_hexdigest(raw)}


def _column_shape(spec: ColumnSpec, packs: int, pack_size: int, sequences: int) -> tuple[int, ...]:
    """Return the shape of the array of a column."""
    rows = {"token": (packs, pack_size), "sequence": (sequences,), "pack": (packs,)}[spec.per]
    return (*rows, spec.width) if spec.width > 1 else rows


def npy_header(file: BinaryIO, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a ``.npy``: its shape, whether it is in Fortran order, and its dtype; ``name`` is for errors.

    Raises:
        FormatError: the file does not begin with such a header.
    """
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        return headers[np.lib.format.read_magic(file)](file)
    except Exception as error:
        # numpy evaluates the header as a literal and does not catch the errors of its tokenizer and parser.
        raise FormatError(f"{name}: not a .npy file of version 1 or 2: {type(error).__name__}: {error}") from None


def npy_header_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of a ``.npy`` as written by ``numpy.save``. Its size does not depend on the first dimension.

    numpy pads it with spaces, so that the first dimension can grow.
    """
    out = BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, description)
    return out.getvalue()


def _map_npy(path: str) -> NDArray[Any]:
    """Return the array in a ``.npy`` as a read-only map, in the file's byte order.

    Raises:
        FormatError: the file does not exist or is of another kind, does not have numbers in C order, or its shape does
            not match its size.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            shape, fortran, dtype = npy_header(file, path)
            offset = file.tell()
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(f"{path}: not found; a memmap folder has five .npy files and a manifest") from None
    if dtype.kind not in "biuf" or dtype.names is not None:
        raise FormatError(f"{path}: an array of {dtype}, expected numbers; objects are not unpickled, for security")
    if fortran and len(shape) > 1 and min(shape) > 1:
        raise FormatError(f"{path}: stored in column order (fortran_order), expected row order; save it with order='C'")
    if any(type(side) is not int or side < 0 for side in shape):
        raise FormatError(f"{path}: shape {shape}, expected whole numbers of 0 or more")
    count = math.prod(shape)
    if size != offset + count * dtype.itemsize:
        raise FormatError(
            f"{path}: {size} bytes, expected {offset + count * dtype.itemsize} for {dtype} of shape {shape}; it is"
            " truncated or still being written: copy or write it again"
        )
    values = np.asarray(open_array(path, dtype, count, nbytes=size, offset=offset))
    try:
        return values.reshape(shape)
    except (OverflowError, ValueError) as error:  # with one dimension of 0, others may be larger than numpy allows
        raise FormatError(f"{path}: shape {shape}: {error}") from None


class Reader(PackedReader):
    """One memmap folder. Each process opens its own reader; threads can share one."""

    def _open(self, *, columns: Sequence[str] | None = ()) -> None:
        self._manifest = read_manifest(self.path)
        package_metadata = self._manifest.get(PACKAGE_KEY)
        self._package_metadata = package_metadata if isinstance(package_metadata, dict) else {}
        self.columns = column_specs_of(self._package_metadata, self.path, columns)
        self._take_alignment(self._manifest.get("mask_alignment"))
        files = {name: os.path.join(self.path, f"{name}.npy") for name in ARRAYS}
        arrays = {name: _map_npy(file) for name, file in files.items()}
        self.num_packs, self._pack_size = self._sizes()
        self._ids, self._mask, self._lengths, self._offsets, self._starts = arrays.values()
        packs, pack_size, sequences = sizes = self.num_packs, self._pack_size, self._starts.size
        shapes = (packs, pack_size), (packs, pack_size), (packs,), (packs + 1,), (sequences,)
        for (name, array), shape in zip(arrays.items(), shapes, strict=True):
            if array.shape != shape:
                raise self._error(f"{name}.npy has shape {array.shape}, expected {shape}; it belongs to another folder")
            if array.dtype.kind not in ("biuf" if name == "loss_mask" else "iu"):
                raise self._error(f"{name}.npy holds {array.dtype}, expected integers")
        first, last = int(self._offsets[0]), int(self._offsets[-1])
        if (first, last) != (0, len(self._starts)):
            raise self._error(f"seq_offsets go from {first} to {last}, expected 0 to {len(self._starts)} (seq_starts)")
        self._column_values: dict[str, NDArray[Any]] = {}
        for name, spec in self.columns.items():
            self._column_values[name] = values = _map_npy(os.path.join(self.path, f"{name}{_COLUMN_SUFFIX}"))
            expected = _column_shape(spec, *sizes)
            if (values.shape, values.dtype) != (expected, spec.dtype):
                found = f"{values.dtype} of shape {values.shape}"
                raise self._error(f"{name}{_COLUMN_SUFFIX} is {found}, expected {spec.dtype} of shape {expected}")
        # Ids of other types are checked against the range of int32.
        token_dtype = np.uint16 if self._ids.dtype.newbyteorder("=") == np.uint16 else np.int32
        self._dtypes = np.dtype(token_dtype), np.dtype(np.float32 if self._mask.dtype.kind == "f" else np.uint8)
        # A manifest of this package has checksums of all arrays, so its fingerprint shows any change. Manifests of
        # other writers have none, so sizes and times of the files are used.
        self.identity = str(self._manifest["fingerprint"])
        if not isinstance(self._manifest.get("checksums"), dict):
            self.identity += " " + file_identity(*files.values())

    def _sizes(self) -> tuple[int, int]:
        """Return number of packs and pack size from the manifest. FormatError: they are invalid."""
        num_packs, pack_size = self._manifest.get("num_bins"), self._manifest.get("pack_size")
        if type(num_packs) is not int or type(pack_size) is not int or num_packs < 0:
            raise self._error(f"num_bins {num_packs!r} and pack_size {pack_size!r}, expected whole numbers")
        if not 0 < pack_size <= MAX_CAPACITY:
            raise self._error(f"pack_size {pack_size}, expected 1 to {MAX_CAPACITY}")
        if (written := self._manifest.get("bins_written", num_packs)) != num_packs:
            raise self._error(
                f"{written} of {num_packs} packs written (bins_written); rows are missing: write it again"
            )
        return num_packs, pack_size

    def _error(self, reason: str) -> FormatError:
        return FormatError(f"{self.path}: {reason}")

    @cached_property
    def spec(self) -> PackedSpec:
        """The spec. The first access needs one pass over the lengths of packs, 4 bytes each."""
        tokens = longest = 0
        for first in range(0, self.num_packs, _PACKS_AT_ONCE):
            lengths = self._lengths_of(first, min(first + _PACKS_AT_ONCE, self.num_packs))
            tokens += int(lengths.sum())
            longest = max(longest, int(lengths.max()))
        sizes = len(self._starts), tokens, longest
        return self._make_spec(*sizes, self._pack_size)

    def _lengths_of(self, first: int, last: int) -> NDArray[np.int64]:
        """Return lengths of packs ``first`` up to ``last``. SequenceError: one is not from 1 to the pack size."""
        lengths = self._lengths[first:last].astype(np.int64)
        if (pack := first_true((lengths < 1) | (lengths > self._pack_size))) is not None:
            reason = f"packed_len is {lengths[pack]}, expected 1 to {self._pack_size} (rule P1)"
            raise SequenceError(self.path, first + pack, reason)
        return lengths

    def _runs(self) -> Iterator[PackRun]:
        packs = max(1, fewer_tokens(RUN_TOKENS, self.columns) // self._pack_size)
        return (self._run(i, min(i + packs, self.num_packs)) for i in range(0, self.num_packs, packs))

    def _run(self, first: int, last: int) -> PackRun:
        lengths = self._lengths_of(first, last)
        offsets = self._offsets[first : last + 1].astype(np.int64)
        sequences = np.diff(offsets)
        wrong = (sequences < 1) | (offsets[1:] > len(self._starts)) | (offsets[:-1] < 0)
        if (pack := first_true(wrong)) is not None:
            found = f"{offsets[pack]}, {offsets[pack + 1]}"
            reason = f"seq_offsets are {found}, expected ascending and at most {len(self._starts)}"
            raise SequenceError(self.path, first + pack, reason)
        rows = {"sequence": slice(offsets[0], offsets[-1]), "pack": slice(first, last)}
        columns = {}
        for name, spec in self.columns.items():
            values = self._column_values[name]
            values = self._unpadded(values, first, lengths) if spec.per == "token" else values[rows[spec.per]]
            columns[name] = Column(spec, values)
        ids, mask = (self._unpadded(values, first, lengths) for values in (self._ids, self._mask))
        starts = self._starts[offsets[0] : offsets[-1]]
        return self._checked(first, PackRun(ids, mask, starts, lengths, sequences, columns=columns))

    def _unpadded(self, rows: NDArray[Any], first: int, lengths: NDArray[np.int64]) -> NDArray[Any]:
        """Return the values before the padding of rows from ``first`` on, concatenated, in native byte order."""
        starts = np.arange(first, first + len(lengths)) * self._pack_size
        values = joined_ranges(rows.reshape(-1, *rows.shape[2:]), starts, starts + lengths)
        return values.astype(values.dtype.newbyteorder("="), copy=False)


_VERSION = "1.0"
_INDEX = np.dtype("<u4")
_MAX_INDEX = np.iinfo(np.uint32).max
_MAX_FILE_NBYTES = 2**63 - 1
_NPY_MAGIC = b"\x93NUMPY"
# Number of bytes of an array to buffer before writing.
_BUFFER_NBYTES = 1 << 16


@recogniser
def _is_file_of_folder(path: str) -> bool:
    """Return whether a file is the manifest of such a folder, one of its arrays, or has a checksum in the manifest."""
    folder, name = os.path.split(path)
    checksums = read_manifest(folder).get("checksums")
    is_array = name.removesuffix(".npy") in ARRAYS or (isinstance(checksums, dict) and name in checksums)
    return name == MANIFEST or (is_array and head_of(path, len(_NPY_MAGIC)) == _NPY_MAGIC)


class _ArrayFile:
    """A ``.npy`` that is written sequentially, with all of its space reserved at the start.

    It is not mapped: on a full disk, a write into a sparse map is a SIGBUS, but reserving space is an OSError.
    """

    def __init__(self, folder: PendingOutput, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._file = HashedFile(folder.open(name))
        header = npy_header_bytes(dtype, shape)
        self._buffer = bytearray(header)
        nbytes = len(header) + math.prod(shape) * dtype.itemsize
        try:
            if nbytes > _MAX_FILE_NBYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            os.posix_fallocate(self._file.file.fileno(), 0, nbytes)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} ({nbytes} bytes)", self._file.file.path) from error

    def write(self, data: bytes | memoryview) -> None:
        self._buffer += data
        if len(self._buffer) >= _BUFFER_NBYTES:
            self._flush()

    def _flush(self) -> None:
        self._file.write(bytes(self._buffer))
        self._buffer.clear()

    def close(self) -> str:
        """Write buffered data, and return the checksum of the whole file in hex."""
        self._flush()
        self._file.file.close()
        return self._file.hex()


class Writer(PackedWriter):
    """Writes a memmap folder of packs of a spec; its rows have the width of the capacity. It needs memory for one pack.

    The folder appears at the end of ``finalize``. Until then it is a hidden folder next to the path.

    Raises:
        FormatError: the format does not allow these sizes or this dtype.
        OSError: for example, not enough disk space for all of it.
    """

    format = "memmap"
    reader, kind = Reader, Kind("a folder of padded arrays", _is_file_of_folder)
    is_folder = True
    binary_masks = True
    stores_columns = True

    def _begin(self, spec: PackedSpec) -> None:
        package_metadata = spec.package_metadata()
        encode_json(self._path, package_metadata)  # reports now what the manifest could not store at the end
        # An empty shard's capacity may be 0.
        self._make_arrays(spec, max(spec.capacity, 1), {"mask_alignment": "label", PACKAGE_KEY: package_metadata})

    def _make_arrays(self, spec: PackedSpec, pack_size: int, more: Mapping[str, Any]) -> None:
        """Create all files except the manifest, which will contain ``more``."""
        self._dtype, mask_dtype = spec.token_dtype.newbyteorder("<"), np.dtype(np.uint8)
        if self._dtype.kind not in "iu":
            raise FormatError(f"{self._path}: dtype of ids is {self._dtype}, expected an integer type")
        for name, value, minimum, maximum in (
            ("num_bins", spec.num_packs, 0, _MAX_INDEX),
            ("pack_size", pack_size, 1, MAX_CAPACITY),
            ("total_seq_starts", spec.num_sequences, spec.num_packs, _MAX_INDEX),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not minimum <= value <= maximum:
                raise FormatError(
                    f"{self._path}: {name} {value!r}, expected a whole number from {minimum} to {maximum}"
                )
        sizes = int(spec.num_packs), int(pack_size), int(spec.num_sequences)
        self._num_bins, self._pack_size, self._total_sequences = sizes
        self._manifest: dict[str, Any] = {
            "version": _VERSION,
            "format": NAME,
            "num_bins": self._num_bins,
            "pack_size": self._pack_size,
            "dtype": self._dtype.str,
            "loss_mask_dtype": mask_dtype.str,
            "index_dtype": _INDEX.str,
            "bins_written": self._num_bins,
            **more,
        }
        kinds = {
            "input_ids.npy": (self._dtype, sizes[:2]),
            "loss_mask.npy": (mask_dtype, sizes[:2]),
            "packed_len.npy": (_INDEX, sizes[:1]),
            "seq_offsets.npy": (_INDEX, (sizes[0] + 1,)),
            "seq_starts.npy": (_INDEX, sizes[2:]),
            **{
                f"{name}{_COLUMN_SUFFIX}": (column.dtype, _column_shape(column, *sizes))
                for name, column in spec.columns.items()
            },
        }
        folder = self._make_output()
        self._files = {name: _ArrayFile(folder, name, dtype, shape) for name, (dtype, shape) in kinds.items()}
        self._files["seq_offsets.npy"].write(bytes(_INDEX.itemsize))
        # For each array with one row per pack, one row buffer that is reused for every pack.
        by_token = (f"{name}{_COLUMN_SUFFIX}" for name, column in spec.columns.items() if column.per == "token")
        padded = {name: kinds[name] for name in ("input_ids.npy", "loss_mask.npy", *by_token)}
        self._rows = {name: np.zeros(shape[1:], dtype) for name, (dtype, shape) in padded.items()}

    def _append(self, run: PackRun) -> None:
        self._require_room(run)
        files, by_row = self._files, {"input_ids.npy": run.tokens, "loss_mask.npy": run.loss_mask}
        for name, (spec, values) in run.columns.items():
            if spec.per == "token":
                by_row[f"{name}{_COLUMN_SUFFIX}"] = values
            else:
                files[f"{name}{_COLUMN_SUFFIX}"].write(values.tobytes())
        padded = [(files[name], self._rows[name], values) for name, values in by_row.items()]
        for start, length in zip(run.token_offsets.tolist(), run.pack_lengths.tolist(), strict=False):
            for file, row, values in padded:
                row[:length] = values[start : start + length]
                row[length:] = 0
                file.write(row.reshape(-1).view(np.uint8).data)
        sequence_ends = self._counts.num_sequences + run.sequence_offsets[1:]
        files["packed_len.npy"].write(run.pack_lengths.astype(_INDEX).tobytes())
        files["seq_offsets.npy"].write(sequence_ends.astype(_INDEX).tobytes())
        files["seq_starts.npy"].write(run.seq_starts.astype(_INDEX).tobytes())

    def _require_room(self, run: PackRun) -> None:
        """Raise FormatError or SequenceError unless a run matches the announced spec, and its ids the dtype."""
        first, packs, sequences = self._counts.num_packs, len(run), len(run.seq_starts)
        missing_sequences = self._total_sequences - self._counts.num_sequences
        if first + packs > self._num_bins or sequences > missing_sequences:
            raise FormatError(
                f"{self._path}: packs {first} to {first + packs - 1} with {sequences} sequences, expected at most"
                f" {self._num_bins} packs (num_bins) and {missing_sequences} more sequences (total_seq_starts); open"
                " the writer with the right numbers"
            )
        if (pack := first_true(run.pack_lengths > self._pack_size)) is not None:
            reason = (
                f"{run.pack_lengths[pack]} tokens, but rows have {self._pack_size} (pack_size), and packs are not"
                " truncated; raise pack_size"
            )
            raise SequenceError(self._path, first + pack, reason)
        self._require_ids_fit(run, self._dtype)

    def _finish(self) -> None:
        checksums = {name: file.close() for name, file in self._files.items()}
        self._manifest["checksums"] = {"algorithm": "xxh3_128", **checksums}
        with contextlib.closing(self._output.open(MANIFEST)) as file:
            file.write((json.dumps(self._manifest, indent=2) + "\n").encode())


class MemmapShardWriter(Writer):
    """The writer of a memmap folder with its own interface: sizes are known from the start, packs arrive one by one.

    The caller must call ``finalize``, which returns the manifest. This also holds for a context manager: leaving it
    does not finalize.

    Args:
        output_dir: the folder; an existing one must be empty.
        num_bins: number of packs.
        pack_size: maximum number of tokens in a pack, the width of a row.
        total_seq_starts: number of sequences in all packs.
        dtype: dtype of the ids on disk, an integer type; ids must fit in it and in int32.
        mask_alignment: alignment of the masks. They are stored unchanged; the manifest states the alignment, so that
            readers shift them once. None states nothing.
        overwrite: replace a folder of this format.
        extra: further keys of the manifest, with JSON values.
        columns: specs of the columns of every run passed to ``write``; ``write_bin`` then rejects packs.

    Raises:
        FormatError: the format does not allow these sizes or this dtype, or ``output_dir`` exists.
        OSError: for example, not enough disk space for all of it.

    Example:
        >>> from megatron_sft_idx import open_dataset
        >>> writer = MemmapShardWriter("data/memmap", num_bins=1, pack_size=8, total_seq_starts=2)
        >>> writer.write_bin(0, [5, 6, 7, 5, 8], [1, 1, 0, 1, 0], [0, 3])
        >>> manifest = writer.finalize()
        >>> manifest["bins_written"], manifest["pack_size"], manifest["dtype"]
        (1, 8, '<i4')
        >>> open_dataset("data/memmap")
        <PackedDataset memmap data/memmap: 1 packs of up to 8 tokens, 2 sequences, 5 tokens>
    """

    @checked
    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        num_bins: int,
        pack_size: int,
        total_seq_starts: int,
        dtype: DTypeLike = np.int32,
        *,
        mask_alignment: MaskAlignment | None = None,
        overwrite: bool = False,
        extra: Mapping[str, Any] | None = None,
        columns: Mapping[str, ColumnSpec] | None = None,
    ) -> None:
        alignment = mask_alignment and checked_alignment(os.fspath(output_dir), mask_alignment)
        self._extra = {**({"mask_alignment": alignment} if alignment else {}), **(extra or {})}
        dtypes = require_dtype("dtype", dtype), np.dtype(np.uint8)
        # The number of tokens is not announced, and not compared at the end.
        spec = PackedSpec(num_bins, total_seq_starts, 0, pack_size, *dtypes, pack_size, columns=columns or {})
        super().__init__(output_dir, spec, overwrite=overwrite)

    def _begin(self, spec: PackedSpec) -> None:
        self._make_arrays(spec, spec.capacity, self._extra)

    def write_bin(self, bin_id: int, input_ids: ArrayLike, loss_mask: ArrayLike, seq_start_id: ArrayLike) -> None:
        """Write one pack.

        Args:
            bin_id: number of the pack; packs must be written in order, from 0 on.
            input_ids: ids [length].
            loss_mask: 0 or 1 [length].
            seq_start_id: start of each sequence in the pack, ascending; the first is 0.

        Raises:
            SequenceError: the pack breaks a rule; nothing of it is written.
            FormatError: it is not the next pack, or there are more sequences than ``total_seq_starts``.
        """
        self._require_open()
        if bin_id != self._counts.num_packs or bin_id == self._num_bins:
            raise FormatError(
                f"{self._path}: pack {bin_id}, expected {self._counts.num_packs} of {self._num_bins}; write each pack"
                " once, in order"
            )
        # The mask is stored unchanged. It is checked as label-aligned, so that nothing in it is moved.
        run = checked_pack(self._path, bin_id, input_ids, loss_mask, seq_start_id, mask_dtype=np.uint8)
        self.write(dataclasses.replace(run, loss_mask=np.asarray(loss_mask).astype(np.uint8)))

    def _require_all(self) -> None:
        if (self._counts.num_packs, self._counts.num_sequences) != (self._num_bins, self._total_sequences):
            raise FormatError(
                f"{self._path}: {self._counts.num_packs} packs with {self._counts.num_sequences} sequences, expected"
                f" {self._num_bins} (num_bins) with {self._total_sequences} (total_seq_starts); write the missing"
                " packs, or open the writer with smaller numbers"
            )

    def finalize(self) -> dict[str, Any]:
        """Write the manifest, move the folder to ``output_dir``, and return the manifest. Can be called twice.

        Raises:
            FormatError: packs or sequences are missing; they can still be written.
        """
        self.complete()
        super().finalize()
        return self._manifest

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.abandon()
