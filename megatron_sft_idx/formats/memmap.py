"""Packs as a folder of padded NumPy arrays, ``memmap_padded_v1``: every pack a row of fixed width.

===================  ======================  ========================================================
``input_ids.npy``    [packs, pack_size]      ids; what follows a pack's tokens in its row is never read
``loss_mask.npy``    [packs, pack_size]      uint8, 0 or 1
``packed_len.npy``   [packs]                 uint32, tokens in each pack
``seq_offsets.npy``  [packs + 1]             uint32, CSR offsets of the sequences by pack
``seq_starts.npy``   [sequences]             uint32, where each sequence starts in its pack
``manifest.json``    written last            format, counts, dtypes; here also alignment, padding id, checksums
===================  ======================  ========================================================

A plain manifest does not say how its masks are aligned. The plan this format comes from rolls them right over whole
packs before they are written, which trains the wrong tokens: such folders need ``mask_alignment="rolled-right"``.

Reading is pointer arithmetic: rows and their lengths, never a guess at padding. The ``.npy`` files hold arrays of
numbers that are mapped or read in order; nothing in them is ever unpickled.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import RUN_TOKENS, PackedReader, PackedSpec, PackRun
from megatron_sft_idx.formats.checks import MaskAlignment, alignment_note, checked_alignment, checked_run
from megatron_sft_idx.formats.runs import IndexedRun, file_identity, note_unplaced, stated_alignment, stated_int
from megatron_sft_idx.layout.values import MAX_CAPACITY
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage import open_array, open_regular, read_most

__all__ = ["ARRAYS", "FORMAT", "MANIFEST", "NAME", "STATED", "Reader", "encode_header", "read_manifest", "recognise"]

FORMAT = "memmap"
NAME = "memmap_padded_v1"
MANIFEST = "manifest.json"
# The manifest's key for what the plain one does not say.
STATED = "megatron_sft_idx"
ARRAYS = ("input_ids", "loss_mask", "packed_len", "seq_offsets", "seq_starts")
_MOST_MANIFEST_NBYTES = 64 << 20
# Of the short arrays: entries looked at together.
_SCAN = 1 << 20


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def recognise(path: str) -> str | None:
    """Evidence that a folder holds padded memmap arrays: what its manifest says."""
    try:
        read_manifest(path)
    except (FormatError, OSError, ValueError):
        return None
    return f'{MANIFEST} says "format": "{NAME}"'


def read_manifest(folder: str) -> dict[str, Any]:
    """The manifest of a folder, with its fingerprint.

    Raises:
        FormatError: there is none, or it is of another format or version.
        OSError: it cannot be read.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        raw = read_most(path, _MOST_MANIFEST_NBYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(
            f"{folder}: no {MANIFEST}, which is written last; the folder is another thing, or was not finished"
        ) from None
    if len(raw) > _MOST_MANIFEST_NBYTES:
        raise FormatError(f"{path}: more than {_MOST_MANIFEST_NBYTES} bytes, which is no manifest")
    try:
        manifest = orjson.loads(raw)
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != NAME:
        raise FormatError(f"{path}: format {found!r}, expected {NAME!r}")
    version = str(manifest.get("version", "1.0"))
    if version.partition(".")[0] != "1":
        raise FormatError(f"{path}: version {version}, this package reads 1.x; upgrade megatron-sft-idx")
    return {**manifest, "fingerprint": xxhash.xxh3_128_hexdigest(raw)}


class _NpyHeader(NamedTuple):
    """What a ``.npy`` says of its array, and where that begins, in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size that the whole file must have; a Python int, whatever the shape claims."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def _read_header(path: str) -> _NpyHeader:
    """The header of a ``.npy`` of numbers, held against the file's size.

    Raises:
        FormatError: no such file, another kind of file, an array of objects, an impossible shape, or a size that
            does not fit the shape.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
            header = _NpyHeader(shape, dtype, file.tell())
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(f"{path}: not there; a memmap folder has five .npy files and a manifest") from None
    except (OSError, FormatError):
        raise
    except Exception as error:
        # numpy evaluates the header as a literal and lets its parser's errors through.
        raise FormatError(f"{path}: not a .npy file of version 1 or 2: {type(error).__name__}: {error}") from None
    if dtype.kind not in "biuf" or dtype.names is not None:
        raise FormatError(f"{path}: an array of {dtype}, expected numbers; objects are never unpickled")
    if any(type(side) is not int or side < 0 for side in shape):
        raise FormatError(f"{path}: shape {shape}, expected whole numbers of 0 or more")
    if fortran and len(shape) > 1 and min(shape) > 1:
        raise FormatError(f"{path}: stored by columns (fortran_order), expected by rows; save it with order='C'")
    if size != header.nbytes:
        raise FormatError(
            f"{path}: {size} bytes, expected {header.nbytes} for {dtype} of shape {shape}; it was cut short or is"
            " still being written: copy or write it again"
        )
    return header


def _open_npy(path: str, header: _NpyHeader) -> NDArray[Any]:
    """The array as a read-only map, in the file's byte order."""
    count = math.prod(header.shape)
    array = open_array(path, header.dtype, count, nbytes=header.nbytes, offset=header.offset)
    return np.asarray(array).reshape(header.shape)


def encode_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The bytes before the array, as ``numpy.save`` writes them."""
    out = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, description)
    return out.getvalue()


class Reader(PackedReader):
    """One memmap folder. Each process opens its own reader; threads may share one.

    Args:
        path: the folder.
        mask_alignment: of its masks, where the manifest does not say.

    Raises:
        FormatError: no such folder, or its manifest and arrays do not go together.
    """

    format = "memmap"

    def __init__(self, path: str | os.PathLike[str], *, mask_alignment: MaskAlignment = "label") -> None:
        self.path = os.fspath(path)
        self.notes: list[str] = []
        asked = checked_alignment(self.path, mask_alignment)
        manifest = self._manifest = read_manifest(self.path)
        self._alignment = stated_alignment(self.path, manifest.get("mask_alignment"), asked)
        headers = {name: _read_header(os.path.join(self.path, f"{name}.npy")) for name in ARRAYS}
        self._num_packs, self._pack_size = self._check_shapes(headers)
        arrays = {name: _open_npy(os.path.join(self.path, f"{name}.npy"), header) for name, header in headers.items()}
        self._ids, self._mask = arrays["input_ids"], arrays["loss_mask"]
        self._lengths, self._offsets, self._starts = (arrays[name] for name in ARRAYS[2:])
        self._check_ends()
        # Ids of other types are held to the range of int32.
        token = np.uint16 if self._ids.dtype.newbyteorder("=") == np.uint16 else np.int32
        mask = np.float32 if self._mask.dtype.kind == "f" else np.uint8
        self._dtypes: tuple[np.dtype[Any], np.dtype[Any]] = (np.dtype(token), np.dtype(mask))
        self._spec: PackedSpec | None = None
        if note := alignment_note(self._alignment):
            self.notes.append(note)

    def _check_shapes(self, headers: dict[str, _NpyHeader]) -> tuple[int, int]:
        """Number of packs and width of a row; FormatError unless the five arrays and the manifest agree on them."""
        num_packs, pack_size = self._manifest.get("num_bins"), self._manifest.get("pack_size")
        if type(num_packs) is not int or type(pack_size) is not int or num_packs < 0:
            raise self._wrong(f"num_bins {num_packs!r} and pack_size {pack_size!r}, expected whole numbers")
        if not 0 < pack_size <= MAX_CAPACITY:
            raise self._wrong(f"pack_size {pack_size}, expected 1 to {MAX_CAPACITY}")
        if (written := self._manifest.get("bins_written", num_packs)) != num_packs:
            raise self._wrong(
                f"{written} of {num_packs} packs written (bins_written); rows are missing: write it again"
            )
        rows = (num_packs, pack_size)
        expected: dict[str, tuple[int, ...]] = {"input_ids": rows, "loss_mask": rows, "packed_len": (num_packs,)}
        expected["seq_offsets"] = (num_packs + 1,)
        for name, shape in expected.items():
            if (found := headers[name].shape) != shape:
                raise self._wrong(f"{name}.npy has shape {found}, expected {shape}; it is of another folder")
        if len(headers["seq_starts"].shape) != 1:
            raise self._wrong(f"seq_starts.npy has shape {headers['seq_starts'].shape}, expected one dimension")
        for name in ARRAYS:
            kinds = "biuf" if name == "loss_mask" else "iu"
            if headers[name].dtype.kind not in kinds:
                raise self._wrong(f"{name}.npy holds {headers[name].dtype}, expected integers")
        return num_packs, pack_size

    def _wrong(self, reason: str) -> FormatError:
        return FormatError(f"{self.path}: {reason}")

    def _check_ends(self) -> None:
        first, last = int(self._offsets[0]), int(self._offsets[-1])
        if (first, last) != (0, len(self._starts)):
            raise self._wrong(f"seq_offsets go from {first} to {last}, expected 0 to {len(self._starts)} (seq_starts)")

    @property
    def spec(self) -> PackedSpec:
        """Counts; costs one pass over the lengths, 4 bytes a pack."""
        if self._spec is None:
            tokens = longest = 0
            for first in range(0, self._num_packs, _SCAN):
                lengths = self._lengths_of(first, min(first + _SCAN, self._num_packs))
                tokens += int(lengths.sum())
                longest = max(longest, int(lengths.max()))
            stated = self._manifest.get(STATED)
            stated = stated if isinstance(stated, dict) else {}
            metadata = stated.get("metadata")
            self._spec = PackedSpec(
                num_packs=self._num_packs,
                num_sequences=len(self._starts),
                num_tokens=tokens,
                longest_pack=longest,
                token_dtype=self._dtypes[0],
                mask_dtype=self._dtypes[1],
                capacity=max(stated_int(stated, "capacity") or self._pack_size, longest),
                sequence_multiple=stated_int(stated, "sequence_multiple") or 1,
                pad_id=stated_int(stated, "pad_id", 0),
                metadata=metadata if isinstance(metadata, dict) else {},
            )
        return self._spec

    def _lengths_of(self, first: int, last: int) -> NDArray[np.int64]:
        """Lengths of some packs; SequenceError unless each fits its row and has one token at least."""
        lengths = self._lengths[first:last].astype(np.int64)
        if (wrong := (lengths < 1) | (lengths > self._pack_size)).any():
            pack = int(np.argmax(wrong))
            reason = f"packed_len is {lengths[pack]}, expected 1 to {self._pack_size} (rule P1)"
            raise SequenceError(self.path, first + pack, reason)
        return lengths

    @property
    def identity(self) -> str:
        """Of the manifest, which has checksums of all arrays where this package wrote it; else sizes and times too."""
        fingerprint = str(self._manifest["fingerprint"])
        if isinstance(self._manifest.get("checksums"), dict):
            return fingerprint
        return f"{fingerprint} {file_identity(*(os.path.join(self.path, f'{name}.npy') for name in ARRAYS))}"

    def __len__(self) -> int:
        return self._num_packs

    def read(self, index: int) -> Pack:
        """Pack ``index``, checked; its ids are a view of the row where their type is uint16 or int32.

        Raises:
            SequenceError: the pack breaks a rule.
        """
        return IndexedRun(self._run(index, index + 1)).pack(0)

    def runs(self) -> Iterator[PackRun]:
        """All packs, so many rows at a time that they hold ``RUN_TOKENS`` tokens at most.

        Raises:
            SequenceError: a pack breaks a rule, with its number.
        """
        rows, unplaced = max(1, RUN_TOKENS // self._pack_size), 0
        for first in range(0, self._num_packs, rows):
            run = self._run(first, min(first + rows, self._num_packs))
            unplaced += run.unplaced
            yield run
        note_unplaced(self.notes, unplaced, self._alignment)

    def _run(self, first: int, last: int) -> PackRun:
        lengths = self._lengths_of(first, last)
        offsets = self._offsets[first : last + 1].astype(np.int64)
        if (wrong := (np.diff(offsets) < 1) | (offsets[1:] > len(self._starts)) | (offsets[:-1] < 0)).any():
            pack = int(np.argmax(wrong))
            found = f"{offsets[pack]}, {offsets[pack + 1]}"
            reason = f"seq_offsets {found}, expected ascending and at most {len(self._starts)}"
            raise SequenceError(self.path, first + pack, reason)
        token_dtype, mask_dtype = self._dtypes
        return checked_run(
            self.path,
            first,
            self._gathered(self._ids, first, lengths),
            self._gathered(self._mask, first, lengths),
            self._starts[offsets[0] : offsets[-1]],
            lengths,
            np.diff(offsets),
            mask_alignment=self._alignment,
            token_dtype=token_dtype,
            mask_dtype=mask_dtype,
        )

    def _gathered(self, rows: NDArray[Any], first: int, lengths: NDArray[np.int64]) -> NDArray[Any]:
        """What is before the padding in some rows, end to end, in native byte order."""
        parts = [rows[first + i, :length] for i, length in enumerate(lengths.tolist())]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return values.astype(values.dtype.newbyteorder("="), copy=False)
