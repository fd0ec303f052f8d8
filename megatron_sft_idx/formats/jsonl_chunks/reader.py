"""Reading pre-packed JSONL chunks: an index of lines in memory, one line parsed a read."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import orjson
import xxhash

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import RUN_TOKENS, PackedReader, PackedSpec, PackRun
from megatron_sft_idx.formats.checks import checked_alignment
from megatron_sft_idx.formats.jsonl_chunks.chunks import COMPLETED, chunk_paths, is_chunk_name, line_bounds, read_line
from megatron_sft_idx.formats.jsonl_chunks.lines import FIELDS, Line, parse, run_of
from megatron_sft_idx.formats.masks import MaskAlignment
from megatron_sft_idx.formats.reading import file_identity
from megatron_sft_idx.formats.runs import Counts, IndexedRun, note_unplaced
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage import open_regular
from megatron_sft_idx.storage.publish import Kind

__all__ = ["KIND", "Reader", "recognise"]

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
