"""Packs as lines of JSON in numbered chunks, as Megatron-SWIFT's packing producer writes them.

A folder of ``chunk_00000.jsonl``, ``chunk_00001.jsonl``, ...; one pack a line:

================  ===================================================================================
``input_ids``     ids of all sequences end to end
``labels``        the id at the same place where it is trained on, else -100: token-aligned, not shifted
``position_ids``  0, 1, 2, ... from the start of every sequence
``lengths``       tokens in each sequence
``pack_length``   their sum
``num_samples``   how many sequences
================  ===================================================================================

Other fields are left alone. There is no place for loss weights, capacity or padding id.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import RUN_TOKENS, PackedReader, PackedSpec, PackedWriter, PackRun
from megatron_sft_idx.formats.checks import MaskAlignment, checked_alignment
from megatron_sft_idx.formats.chunk_lines import (
    COMPLETED,
    FIELDS,
    UNTRAINED,
    Line,
    chunk_name,
    chunk_paths,
    is_chunk_name,
    line_bounds,
    parse,
    read_line,
    run_of,
)
from megatron_sft_idx.formats.runs import BinaryMasks, Counts, IndexedRun, file_identity, note_unplaced
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage import OutputFile, open_regular
from megatron_sft_idx.storage.publish import Kind, new_folder, require_space

__all__ = ["FORMAT", "KIND", "Reader", "Writer", "recognise"]

FORMAT = "jsonl-chunks"
# Longest first line that is looked at to tell what a file is.
_MOST_HEAD_NBYTES = 32 << 20


def recognise(path: str) -> str | None:
    """Evidence that a folder or file holds pre-packed chunks: the fields of its first line."""
    try:
        if not os.path.isdir(path):
            return f"its first line has {', '.join(FIELDS)}" if _begins_packed(path) else None
        paths, _ = chunk_paths(path, allow_gaps=True)
        # Chunks may be empty, and a dataset without packs has no other.
        first = next((chunk for chunk in paths if os.path.getsize(chunk)), None)
        if first is None:
            return f"{len(paths)} empty files named as chunks"
        return f"the first line of {os.path.basename(first)} has {', '.join(FIELDS)}" if _begins_packed(first) else None
    except (OSError, ValueError, RecursionError):
        return None


def _begins_packed(path: str) -> bool:
    with open_regular(path) as file:
        if file.read(1) != b"{":
            return False
        row = orjson.loads(b"{" + file.readline(_MOST_HEAD_NBYTES))
    return all(name in row for name in FIELDS)


def _is_chunk(path: str) -> bool:
    """Whether a file is a chunk by its name and its first line, an empty one, or the mark beside a chunk."""
    name = os.path.basename(path)
    try:
        if name.endswith(COMPLETED):
            return is_chunk_name(name.removesuffix(COMPLETED)) and not os.path.getsize(path)
        return is_chunk_name(name) and (not os.path.getsize(path) or _begins_packed(path))
    except (OSError, ValueError, RecursionError):
        return False


KIND = Kind("a folder of pre-packed JSONL chunks", _is_chunk)


class Reader(PackedReader):
    """One folder of chunks, or a single chunk. Each process opens its own reader; threads may share one.

    Opening reads all bytes once to find the lines; 16 bytes a pack are kept of them.

    Args:
        path: the folder, or one file.
        mask_alignment: labels say themselves which tokens are trained on; only the default is taken.
        allow_gaps: chunks in between are missing because their producer freed them.

    Raises:
        FormatError: no chunks, a gap between them, or a chunk that ends in the middle of a line.
    """

    format = "jsonl-chunks"

    def __init__(
        self, path: str | os.PathLike[str], *, mask_alignment: MaskAlignment = "label", allow_gaps: bool = False
    ) -> None:
        self.path = os.fspath(path)
        if checked_alignment(self.path, mask_alignment) != "label":
            raise FormatError(
                f"{self.path}: labels name the tokens that are trained on and are shifted once here in any case;"
                f" leave mask alignment {mask_alignment!r} out"
            )
        self.notes: list[str] = []
        self._paths = [self.path]
        if os.path.isdir(self.path):
            self._paths, self.notes = chunk_paths(self.path, allow_gaps=allow_gaps)
        try:
            bounds = [line_bounds(chunk) for chunk in self._paths]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FormatError(f"{error.filename}: not there; expected a folder of chunks, or one chunk") from None
        self._starts = np.concatenate([starts for starts, _ in bounds])
        self._stops = np.concatenate([stops for _, stops in bounds])
        self._first_packs = np.cumsum([0, *(len(starts) for starts, _ in bounds)]).tolist()
        identity = file_identity(*self._paths)
        names = [os.path.basename(chunk) for chunk in self._paths]
        self._identity = xxhash.xxh3_128_hexdigest(f"{names} {identity}".encode())
        self._spec: PackedSpec | None = None

    @property
    def spec(self) -> PackedSpec:
        """Counts; costs one pass over everything. Capacity is the longest pack: the format does not say it."""
        if self._spec is None:
            counts = Counts()
            for run in self.runs():
                counts.add(run)
            self._spec = PackedSpec(
                num_packs=counts.packs,
                num_sequences=counts.sequences,
                num_tokens=counts.tokens,
                longest_pack=counts.longest,
                token_dtype=np.dtype(np.int32),
                mask_dtype=np.dtype(np.uint8),
                capacity=max(counts.longest, 1),
            )
        return self._spec

    @property
    def identity(self) -> str:
        """Of the names, sizes and times of all chunks."""
        return self._identity

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int) -> Pack:
        """Pack ``index``, parsed and checked.

        Raises:
            SequenceError: a field of the pack is wrong.
            FormatError: the chunk is shorter than when it was opened.
        """
        chunk = bisect_right(self._first_packs, index) - 1
        with open_regular(self._paths[chunk]) as file:
            line = self._line(file.fileno(), chunk, index)
        return IndexedRun(run_of(self.path, index, [line])).pack(0)

    def runs(self) -> Iterator[PackRun]:
        """All packs, chunk by chunk.

        Raises:
            SequenceError: a field of a pack is wrong, with the pack's number.
            FormatError: a chunk is shorter than when it was opened.
        """
        held: list[Line] = []
        first = tokens = unplaced = 0
        for chunk, path in enumerate(self._paths):
            with open_regular(path) as file:
                for index in range(self._first_packs[chunk], self._first_packs[chunk + 1]):
                    held.append(self._line(file.fileno(), chunk, index))
                    tokens += len(held[-1].tokens)
                    if tokens >= RUN_TOKENS:
                        run = run_of(self.path, first, held)
                        held, first, tokens, unplaced = [], index + 1, 0, unplaced + run.unplaced
                        yield run
        if held:
            run = run_of(self.path, first, held)
            unplaced += run.unplaced
            yield run
        note_unplaced(self.notes, unplaced, "token")

    def _line(self, fd: int, chunk: int, index: int) -> Line:
        start, stop = int(self._starts[index]), int(self._stops[index])
        raw = read_line(fd, self._paths[chunk], start, stop)
        try:
            return parse(raw)
        except (ValueError, RecursionError) as error:
            line = f"{os.path.basename(self._paths[chunk])}, pack {index - self._first_packs[chunk]} in it"
            raise SequenceError(self.path, index, f"{line}: {error}") from None


class Writer(PackedWriter):
    """Writes a folder of chunks; it appears when the last one is written. Without packs, its one chunk is empty.

    Args:
        path: the folder.
        spec: what is going to be written; held against what came in the end.
        overwrite: replace a folder of chunks.
        allow_loss: write loss weights above 0 as 1.
        samples_per_chunk: packs in a chunk, the last one may have fewer; what the consumer has to be told.

    Raises:
        FormatError: something is at ``path``, or there are no packs in a chunk.
    """

    format = "jsonl-chunks"

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: PackedSpec,
        *,
        overwrite: bool = False,
        allow_loss: bool = False,
        samples_per_chunk: int = 100,
    ) -> None:
        self._path, self._spec, self._samples_per_chunk = os.fspath(path), spec, samples_per_chunk
        if samples_per_chunk < 1:
            raise FormatError(f"{self._path}: samples_per_chunk {samples_per_chunk}, expected at least 1 pack")
        self._counts, self._masks = Counts(), BinaryMasks(self._path, allow_loss=allow_loss)
        self.lost = self._masks.lost
        self._num_chunks = self._num_lines = 0
        # A digit and a comma for every id, label and position.
        require_space(self._path, 6 * spec.num_tokens, -(-spec.num_packs // samples_per_chunk))
        self._output, self._complete = new_folder(path, KIND, overwrite=overwrite), False
        self._chunk = self._next_chunk()

    def _next_chunk(self) -> OutputFile:
        name = chunk_name(self._num_chunks)
        self._num_chunks, self._num_lines = self._num_chunks + 1, 0
        return self._output.open(name)

    def write(self, run: PackRun) -> None:
        """Append packs.

        Raises:
            FormatError: loss weights that are neither 0 nor 1, without ``allow_loss``.
        """
        mask = self._masks.of(run, self._counts.packs)
        self._counts.add(run)
        tokens = run.tokens.astype(np.int64)
        # A label mask is 0 at every sequence's end, so that one shift right is right in all sequences at once.
        trained = np.zeros(len(mask), np.bool_)
        trained[1:] = mask[:-1]
        labels = np.where(trained, tokens, UNTRAINED)
        lengths = run.sequence_lengths()
        positions = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        token = sequence = 0
        for length, count in zip(run.pack_lengths.tolist(), run.pack_sequences.tolist(), strict=True):
            here, sequences = slice(token, token + length), slice(sequence, sequence + count)
            token, sequence = here.stop, sequences.stop
            self._write_line(
                {
                    "input_ids": tokens[here],
                    "labels": labels[here],
                    "position_ids": positions[here],
                    "lengths": lengths[sequences],
                    "pack_length": length,
                    "num_samples": count,
                }
            )

    def _write_line(self, pack: dict[str, NDArray[np.int64] | int]) -> None:
        if self._num_lines == self._samples_per_chunk:
            self._chunk.close()
            self._chunk = self._next_chunk()
        self._chunk.write(orjson.dumps(pack, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        self._num_lines += 1

    def complete(self) -> None:
        """Close the last chunk.

        Raises:
            FormatError: other packs were written than the spec announced.
        """
        if not self._complete:
            self._counts.require(self._path, self._spec)
            self._chunk.close()
            self._complete = True

    def reread(self) -> Reader:
        """A reader of all of it."""
        return Reader(self._output.temporary)
