"""Writing a memmap folder pack by pack."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PackRun
from megatron_sft_idx.formats.checks import checked_alignment, checked_run, require_same_length
from megatron_sft_idx.formats.masks import MaskAlignment
from megatron_sft_idx.formats.memmap.npy import encode_header
from megatron_sft_idx.formats.output import output_folder
from megatron_sft_idx.layout.values import MAX_CAPACITY
from megatron_sft_idx.storage import OutputFile

__all__ = ["MANIFEST", "NAME", "MemmapShardWriter"]

NAME = "memmap_padded_v1"
MANIFEST = "manifest.json"
_VERSION = "1.0"
_INDEX = np.dtype("<u4")
_MOST_INDEX = np.iinfo(np.uint32).max
_MOST_FILE_NBYTES = 2**63 - 1
# Small arrays gather this many bytes between writes.
_GATHER_NBYTES = 1 << 16


class _ArrayFile:
    """A ``.npy`` being filled from front to end, its space reserved from the start.

    Reserved and written, not mapped: on a full disk that is an OSError here and now, where a write into a sparse map
    is a SIGBUS.
    """

    def __init__(self, folder: str, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._file = OutputFile(os.path.join(folder, f"{name}.npy"))
        self._hash = xxhash.xxh3_128()
        self._gathered = bytearray()
        header = encode_header(dtype, shape)
        nbytes = len(header) + math.prod(shape) * dtype.itemsize
        try:
            if nbytes > _MOST_FILE_NBYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            self._file.close()
            raise OSError(error.errno, f"{error.strerror} ({nbytes} bytes)", self._file.path) from error
        self.write(header)

    def write(self, data: bytes | memoryview) -> None:
        self._gathered += data
        if len(self._gathered) >= _GATHER_NBYTES:
            self.flush()

    def flush(self) -> None:
        data = bytes(self._gathered)
        self._gathered.clear()
        self._hash.update(data)
        self._file.write(data)

    def close(self) -> str:
        """Checksum of the file."""
        self.flush()
        self._file.close()
        return self._hash.hexdigest()

    def discard(self) -> None:
        self._file.close()


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
        overwrite: replace a folder that is not empty.
        extra: more keys for the manifest, JSON-able.

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
        self._path = os.path.abspath(os.fspath(output_dir))
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
        self._overwrite, self._extra = overwrite, dict(extra or {})
        self._written = self._num_starts = 0
        self._row = np.zeros(self._pack_size, self._dtype)
        self._mask_row = np.zeros(self._pack_size, np.uint8)
        self._output = output_folder(self._path, overwrite=overwrite or self._is_empty_folder())
        self._files: dict[str, _ArrayFile] = {}
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

    def _is_empty_folder(self) -> bool:
        return os.path.isdir(self._path) and not os.listdir(self._path)

    def _reserve(self) -> None:
        rows, index = (self._num_bins, self._pack_size), self._num_bins
        for name, dtype, shape in (
            ("input_ids", self._dtype, rows),
            ("loss_mask", np.dtype(np.uint8), rows),
            ("packed_len", _INDEX, (index,)),
            ("seq_offsets", _INDEX, (index + 1,)),
            ("seq_starts", _INDEX, (self._total,)),
        ):
            self._files[name] = _ArrayFile(self._output.temporary, name, dtype, shape)
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

    def finalize(self) -> dict[str, Any]:
        """Write the manifest, and put the folder in its place.

        Returns:
            The manifest.

        Raises:
            FormatError: packs or sequences are missing; the writer stays open for them.
        """
        self._require_open()
        if (self._written, self._num_starts) != (self._num_bins, self._total):
            raise FormatError(
                f"{self._path}: {self._written} packs with {self._num_starts} sequences, expected {self._num_bins}"
                f" (num_bins) with {self._total} (total_seq_starts); write the missing ones, or announce fewer"
            )
        try:
            return self._publish()
        except BaseException:
            self.abandon()
            raise

    def _publish(self) -> dict[str, Any]:
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
        text = json.dumps(manifest, indent=2) + "\n"
        Path(self._output.temporary, MANIFEST).write_text(text, encoding="utf-8")
        if not self._overwrite and os.path.isdir(self._path) and not self._is_empty_folder():
            raise FormatError(f"{self._path}: files appeared in it while it was written; choose another folder")
        self._output.publish()
        self._closed = True
        return manifest

    def abandon(self) -> None:
        """Remove what was written; nothing where it is finalized or abandoned already."""
        if self._closed:
            return
        self._closed = True
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.discard()
        self._output.abandon()

    def __enter__(self) -> MemmapShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A clean exit without ``finalize`` has no manifest to return: the folder is not complete then either.
        self.abandon()
