"""Writing a memmap folder: ``MemmapShardWriter`` pack by pack, ``Writer`` run by run on top of it."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.formats.base import PackedSpec, PackedWriter, PackRun
from megatron_sft_idx.formats.checks import MaskAlignment, checked_alignment, checked_run, require_same_length
from megatron_sft_idx.formats.memmap import ARRAYS, MANIFEST, NAME, STATED, Reader, encode_header, read_manifest
from megatron_sft_idx.formats.runs import BinaryMasks, Counts
from megatron_sft_idx.layout.values import MAX_CAPACITY
from megatron_sft_idx.storage.hashing import HashedFile
from megatron_sft_idx.storage.publish import Kind, New, head_of, new_folder

__all__ = ["KIND", "MemmapShardWriter", "Writer"]

_VERSION = "1.0"
_INDEX = np.dtype("<u4")
_MOST_INDEX = np.iinfo(np.uint32).max
_MOST_FILE_NBYTES = 2**63 - 1
_FILES = {f"{name}.npy" for name in ARRAYS}
_NPY_MAGIC = b"\x93NUMPY"
# Small arrays gather this many bytes between writes.
_GATHER_NBYTES = 1 << 16


def _is_part(path: str) -> bool:
    """Whether a file is the manifest of such a folder, or an array that such a manifest beside it speaks of."""
    folder, name = os.path.split(path)
    try:
        read_manifest(folder)
    except (SFTIndexError, OSError):
        return False
    return name == MANIFEST or (name in _FILES and head_of(path, len(_NPY_MAGIC)) == _NPY_MAGIC)


KIND = Kind("a folder of padded arrays", _is_part)


class _ArrayFile:
    """A ``.npy`` being filled from front to end, its space reserved from the start.

    Reserved and written, not mapped: on a full disk that is an OSError here and now, where a write into a sparse map
    is a SIGBUS.
    """

    def __init__(self, folder: New, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._file = HashedFile(folder.open(f"{name}.npy"))
        self._gathered = bytearray()
        header = encode_header(dtype, shape)
        nbytes = len(header) + math.prod(shape) * dtype.itemsize
        try:
            if nbytes > _MOST_FILE_NBYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            os.posix_fallocate(self._file.file.fileno(), 0, nbytes)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} ({nbytes} bytes)", self._file.file.path) from error
        self.write(header)

    def write(self, data: bytes | memoryview) -> None:
        self._gathered += data
        if len(self._gathered) >= _GATHER_NBYTES:
            self.flush()

    def flush(self) -> None:
        self._file.write(bytes(self._gathered))
        self._gathered.clear()

    def close(self) -> str:
        """Checksum of the file."""
        self.flush()
        self._file.file.close()
        return self._file.hex()


class MemmapShardWriter:
    """Writes a memmap folder whose sizes are known from the start, in memory for one pack.

    The folder appears when ``finalize`` is done, its manifest last; until then it is a hidden one beside it.

    Args:
        output_dir: the folder; one that exists must be empty.
        num_bins: packs.
        pack_size: most tokens in a pack, the width of a row.
        total_seq_starts: sequences in all packs.
        dtype: of the ids on disk: an integer type; ids are held to its range and to int32.
        mask_alignment: what the masks are that come in. They are stored as they come, and the manifest says this, so
            that readers shift them once. None writes a manifest that does not say it.
        overwrite: replace such a folder.
        extra: more keys for the manifest, JSON-able.

    Attributes:
        path: the folder, its name resolved.
        temporary: where it is until then.

    Raises:
        FormatError: sizes or a dtype that the format does not have, or something is at ``output_dir``.
        OSError: no space for the whole of it, among others.
    """

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
    ) -> None:
        self._path = os.fspath(output_dir)
        self._dtype = self._checked_dtype(dtype)
        for what, value, least, most in (
            ("num_bins", num_bins, 0, _MOST_INDEX),
            ("pack_size", pack_size, 1, MAX_CAPACITY),
            ("total_seq_starts", total_seq_starts, num_bins, _MOST_INDEX),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
                raise FormatError(f"{self._path}: {what} {value!r}, expected a whole number from {least} to {most}")
        self._num_bins, self._pack_size, self._total = int(num_bins), int(pack_size), int(total_seq_starts)
        self._alignment = checked_alignment(self._path, mask_alignment) if mask_alignment is not None else None
        self._extra = dict(extra or {})
        self._written = self._num_starts = 0
        self._row = np.zeros(self._pack_size, self._dtype)
        self._mask_row = np.zeros(self._pack_size, np.uint8)
        self._output = new_folder(self._path, KIND, overwrite=overwrite)
        self.path, self.temporary = self._output.path, self._output.temporary
        self._files: dict[str, _ArrayFile] = {}
        self._manifest: dict[str, Any] | None = None
        self._closed = False
        try:
            self._reserve()
        except BaseException:
            self.abandon()
            raise

    def _checked_dtype(self, dtype: DTypeLike) -> np.dtype[Any]:
        found = np.dtype(dtype)
        if found.kind not in "iu":
            raise FormatError(f"{self._path}: dtype {found} for ids, expected an integer type")
        return found.newbyteorder("<")

    def _reserve(self) -> None:
        rows, index = (self._num_bins, self._pack_size), self._num_bins
        for name, dtype, shape in (
            ("input_ids", self._dtype, rows),
            ("loss_mask", np.dtype(np.uint8), rows),
            ("packed_len", _INDEX, (index,)),
            ("seq_offsets", _INDEX, (index + 1,)),
            ("seq_starts", _INDEX, (self._total,)),
        ):
            self._files[name] = _ArrayFile(self._output, name, dtype, shape)
        self._files["seq_offsets"].write(bytes(_INDEX.itemsize))

    def write_bin(self, bin_id: int, input_ids: ArrayLike, loss_mask: ArrayLike, seq_start_id: ArrayLike) -> None:
        """Write one pack.

        Args:
            bin_id: its number; packs come in order, from 0 on.
            input_ids: ids [length].
            loss_mask: 0 or 1 [length].
            seq_start_id: start of each sequence in the pack, the first 0, ascending.

        Raises:
            SequenceError: the pack breaks a rule; nothing of it is written.
            FormatError: another number than the next one, or more sequences than ``total_seq_starts``.
        """
        self._require_open()
        if bin_id != self._written or self._written == self._num_bins:
            raise FormatError(
                f"{self._path}: pack {bin_id}, expected {self._written} of {self._num_bins}; packs are written once"
                " each and in order"
            )
        columns = [np.asarray(values) for values in (input_ids, loss_mask, seq_start_id)]
        if any(column.ndim != 1 for column in columns):
            raise SequenceError(self._path, bin_id, "ids, mask and sequence starts have one dimension each")
        ids, mask, starts = columns
        require_same_length(self._path, bin_id, input_ids=len(ids), loss_mask=len(mask))
        # The mask is held to 0 and 1 as it comes, not moved: label is the alignment that changes nothing but ends.
        run = checked_run(self._path, bin_id, ids, mask, starts, [len(ids)], [len(starts)], mask_dtype=np.uint8)
        self.write_run(run, mask.astype(np.uint8))

    def write_run(self, run: PackRun, mask: NDArray[np.uint8] | None = None) -> None:
        """Write packs that are known to keep the rules, in order.

        Args:
            run: the packs.
            mask: what to store instead of the run's own mask, 0 or 1.

        Raises:
            SequenceError: a pack does not fit ``pack_size`` or ``dtype``.
            FormatError: more packs or sequences than announced.
        """
        self._require_room(run)
        mask = run.loss_mask if mask is None else mask
        token_end = 0
        for length in run.pack_lengths.tolist():
            tokens = slice(token_end, token_end + length)
            token_end += length
            for row, values, name in (
                (self._row, run.tokens[tokens], "input_ids"),
                (self._mask_row, mask[tokens], "loss_mask"),
            ):
                row[:length] = values
                row[length:] = 0
                self._files[name].write(row.view(np.uint8).data)
        sequence_ends = self._num_starts + np.cumsum(run.pack_sequences)
        self._files["packed_len"].write(run.pack_lengths.astype(_INDEX).tobytes())
        self._files["seq_offsets"].write(sequence_ends.astype(_INDEX).tobytes())
        self._files["seq_starts"].write(run.seq_starts.astype(_INDEX).tobytes())
        self._written += len(run.pack_lengths)
        self._num_starts += len(run.seq_starts)

    def _require_open(self) -> None:
        if self._closed:
            raise FormatError(f"{self._path}: this writer is finished or was abandoned; open another one")

    def _require_room(self, run: PackRun) -> None:
        self._require_open()
        first, packs, starts = self._written, len(run.pack_lengths), len(run.seq_starts)
        if first + packs > self._num_bins or self._num_starts + starts > self._total:
            raise FormatError(
                f"{self._path}: packs {first} to {first + packs - 1} with {starts} sequences, expected at most"
                f" {self._num_bins} packs (num_bins) and {self._total - self._num_starts} more sequences"
                " (total_seq_starts); announce as many as there are"
            )
        if (over := run.pack_lengths > self._pack_size).any():
            pack = int(np.argmax(over))
            reason = f"{run.pack_lengths[pack]} tokens in rows of {self._pack_size} (pack_size); nothing is truncated"
            raise SequenceError(self._path, first + pack, reason)
        largest = min(np.iinfo(self._dtype).max, MAX_CAPACITY)
        if len(run.tokens) and run.tokens.max() > largest:
            at = int(np.argmax(run.tokens > largest))
            pack = int(np.searchsorted(np.cumsum(run.pack_lengths), at, side="right"))
            raise SequenceError(self._path, first + pack, f"id {run.tokens[at]} in {self._dtype}, at most {largest}")

    def complete(self) -> dict[str, Any]:
        """Write the manifest, so that the folder at ``temporary`` can be read; may be called twice. Returns it.

        Raises:
            FormatError: packs or sequences are missing; the writer stays open for them.
        """
        self._require_open()
        if self._manifest is not None:
            return self._manifest
        if (self._written, self._num_starts) != (self._num_bins, self._total):
            raise FormatError(
                f"{self._path}: {self._written} packs with {self._num_starts} sequences, expected {self._num_bins}"
                f" (num_bins) with {self._total} (total_seq_starts); write the missing ones, or announce fewer"
            )
        checksums = {f"{name}.npy": file.close() for name, file in self._files.items()}
        manifest = {
            "version": _VERSION,
            "format": NAME,
            "num_bins": self._num_bins,
            "pack_size": self._pack_size,
            "dtype": self._dtype.str,
            "loss_mask_dtype": np.dtype(np.uint8).str,
            "index_dtype": _INDEX.str,
            "bins_written": self._written,
            **({"mask_alignment": self._alignment} if self._alignment else {}),
            **self._extra,
            "checksums": {"algorithm": "xxh3_128", **checksums},
        }
        with contextlib.closing(self._output.open(MANIFEST)) as file:
            file.write((json.dumps(manifest, indent=2) + "\n").encode())
        self._manifest = manifest
        return manifest

    def finalize(self) -> dict[str, Any]:
        """Write the manifest, and put the folder in its place.

        Returns:
            The manifest.

        Raises:
            FormatError: packs or sequences are missing; the writer stays open for them.
        """
        manifest = self.complete()
        try:
            self._output.publish()
        except BaseException:
            self.abandon()
            raise
        self._closed = True
        return manifest

    def abandon(self) -> None:
        """Remove what was written; nothing where it is finalized or abandoned already."""
        self._closed = True
        self._output.abandon()

    def __enter__(self) -> MemmapShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A clean exit without ``finalize`` has no manifest to return: the folder is not complete then either.
        self.abandon()


class Writer(PackedWriter):
    """Writes a memmap folder; its rows are as wide as the capacity.

    Args:
        path: the folder.
        spec: what is going to be written.
        overwrite: replace such a folder.
        allow_loss: write loss weights above 0 as 1.
        pack_size: width of the rows where not the capacity, such as the longest pack, to save space.

    Raises:
        FormatError: sizes that the format does not have, or something is at ``path``.
        OSError: no space for the whole of it, among others.
    """

    format = "memmap"

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: PackedSpec,
        *,
        overwrite: bool = False,
        allow_loss: bool = False,
        pack_size: int | None = None,
    ) -> None:
        self._path, self._spec = os.fspath(path), spec
        self._counts, self._masks = Counts(), BinaryMasks(self._path, allow_loss=allow_loss)
        self.lost = self._masks.lost
        stated = {
            "capacity": spec.capacity,
            "num_tokens": spec.num_tokens,
            "longest_pack": spec.longest_pack,
            "sequence_multiple": spec.sequence_multiple,
            "pad_id": spec.pad_id,
            "metadata": dict(spec.metadata),
        }
        self._writer = MemmapShardWriter(
            path,
            spec.num_packs,
            max(spec.capacity, 1) if pack_size is None else pack_size,  # an empty shard's capacity may be 0
            spec.num_sequences,
            np.uint16 if spec.token_dtype == np.uint16 else np.int32,
            mask_alignment="label",
            overwrite=overwrite,
            extra={STATED: stated},
        )

    def write(self, run: PackRun) -> None:
        """Append packs.

        Raises:
            FormatError: loss weights that are neither 0 nor 1, without ``allow_loss``.
            SequenceError: a pack is longer than a row.
        """
        mask = self._masks.of(run, self._counts.packs)
        self._writer.write_run(run, mask)
        self._counts.add(run)

    def complete(self) -> None:
        """Write the manifest. FormatError where packs are missing."""
        self._counts.require(self._path, self._spec)
        self._writer.complete()

    def reread(self) -> Reader:
        """A reader of all of it."""
        return Reader(self._writer.temporary)

    def publish(self) -> None:
        """Put the folder in its place."""
        self._writer.finalize()

    def abandon(self) -> None:
        """Remove what was written; nothing where it is finalized or abandoned already."""
        self._writer.abandon()
