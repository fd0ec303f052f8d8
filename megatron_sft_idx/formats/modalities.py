"""Two features for users of Modalities: its raw index of JSON lines, and its two datasets over a ``.pbin``.

The raw index has the start and length of each row of a JSON-lines file, for random access. ``X.idx`` next to
``X.jsonl`` is a pickled list of (offset, length) in bytes, without the newline. Modalities' ``create_raw_index`` writes
it, and its tools read it. It has nothing in common with Megatron's ``.idx`` except the suffix; the first bytes
distinguish them. As in Modalities, a carriage return belongs to its row, and rows that are not JSON are errors or
dropped. Unlike there, blank lines are not rows. From February to December 2024, Modalities wrote indexes whose lengths
count characters: with any non-ASCII text they truncate rows. An index does not show which kind it is, so every read
checks the bytes before and after the row.

The datasets read the token stream of a ``.pbin`` in blocks of one size, with documents concatenated. They are for users
who migrate and want to see what their model was trained on. Both have no masks, and blocks cross documents. To train on
chats, use ``open_dataset``.
"""

from __future__ import annotations

import contextlib
import operator
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs import cut_lines, expand_inputs
from megatron_sft_idx.chat.values import parse_json
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import file_identity, first_bad_range, recogniser
from megatron_sft_idx.formats.pbin import Framing, native_tokens, read_document_index, require_framings
from megatron_sft_idx.formats.pickles import read_pairs, write_pairs
from megatron_sft_idx.layout.files import IDX_MAGIC
from megatron_sft_idx.storage import Array, Backend, open_array, open_regular
from megatron_sft_idx.storage.outputs import new_file
from megatron_sft_idx.storage.progress import Update
from megatron_sft_idx.storage.publish import Kind, Place, require_apart

_BLOCK_NBYTES = 1 << 23
_JSON_SPACE = b" \t\r\n"
_NEWLINE = 10


class RawIndexReport(NamedTuple):
    """Counts of the lines of an indexed file.

    Attributes:
        index_path: path of the index.
        num_rows: number of rows in the index.
        num_blank: number of blank lines, which are not rows.
        num_faulty: number of lines that are not JSON and were dropped.
    """

    index_path: str
    num_rows: int
    num_blank: int
    num_faulty: int


class RowRange(NamedTuple):
    """A byte range of a file that does not divide any row.

    Attributes:
        start: first byte.
        stop: the end of the range (exclusive); its last byte is a newline or the file's last byte.
        first_row: number of the first row in the range.
        num_rows: number of rows in the range, which can be 0.
    """

    start: int
    stop: int
    first_row: int
    num_rows: int


def _index_path(path: str, index_path: str | os.PathLike[str] | None) -> str:
    """Return the given path of an index, or ``X.idx`` for ``X.jsonl``, where Modalities looks for it."""
    return os.fspath(Path(path).with_suffix(".idx") if index_path is None else index_path)


def _read_index(path: str) -> NDArray[np.int64]:
    """Return offset and length of each row in bytes, int64 [rows, 2], from an index.

    FormatError: it is not an index.
    """
    size = os.stat(path).st_size
    raw = np.asarray(open_array(path, np.dtype(np.uint8), size, nbytes=size))
    if raw[: len(IDX_MAGIC)].tobytes() == IDX_MAGIC:
        raise FormatError(f"{path}: this is the index of a Megatron .bin, not of JSON lines; pass the raw index")
    return read_pairs(path, raw)


@recogniser
def _is_raw_index(path: str) -> bool:
    """Return whether a file is a pickled list of pairs and nothing else. Reads the whole file."""
    return _read_index(path).ndim == 2


def create_raw_index(
    path: str | os.PathLike[str],
    index_path: str | os.PathLike[str] | None = None,
    *,
    drop_faulty: bool = False,
    overwrite: bool = False,
    on_progress: Update | None = None,
) -> RawIndexReport:
    """Index the rows of a JSON-lines file, in one pass and with 16 bytes of memory per row.

    Args:
        path: an uncompressed ``.jsonl``; compressed files do not allow random access.
        index_path: where to write; None for ``X.idx`` next to ``X.jsonl``.
        drop_faulty: drop lines that are not JSON instead of rejecting the file.
        overwrite: replace another raw index; nothing else is ever replaced, for example an index of Megatron.
        on_progress: called periodically with the bytes and the rows since its last call.

    Raises:
        FormatError: not a JSON-lines file, or ``index_path`` exists.
        SequenceError: a line is not JSON; with its number.
        OSError: an error of the system, such as a full disk.

    Example:
        >>> create_raw_index("tools/demo/chats.jsonl", "data/demo.idx")
        RawIndexReport(index_path='data/demo.idx', num_rows=318, num_blank=0, num_faulty=0)
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise FormatError(f"{name}: no such file; pass one JSON-lines file (each file gets its own index)")
    target = _index_path(name, index_path)
    require_apart([Place(target, "the index")], [Place(name, "the file to be indexed")])
    (file,) = expand_inputs([name])
    if file.kind != "lines" or file.compression:
        raise FormatError(
            f"{name}: {file.compression or file.kind} data; expected plain JSON lines, because only these allow random"
            " access by byte offset"
        )
    counts = Counter[str]()
    with new_file(target, Kind("a raw index", _is_raw_index), overwrite=overwrite) as output:
        blocks = list(_row_ranges(name, drop_faulty, on_progress, counts))
        with contextlib.closing(output.open()) as out:
            write_pairs(out.write, blocks)
        output.publish()
    return RawIndexReport(target, counts["rows"], counts["blank"], counts["faulty"])


def _row_ranges(
    path: str, drop_faulty: bool, progress: Update | None, counts: Counter[str]
) -> Iterator[NDArray[np.int64]]:
    """Yield offset and length of rows, int64 [some, 2], in one pass over a file; adds to ``counts`` by kind."""
    offset = 0
    with open_regular(path) as file:
        blocks = ((block, file.tell()) for block in iter(lambda: file.read(_BLOCK_NBYTES), b""))
        for piece in cut_lines(blocks, path=path, piece_nbytes=_BLOCK_NBYTES):
            starts = np.append(0, piece.ends[:-1] + 1)
            kinds = [
                _line_kind(piece.payload[start:end], piece.first + i, path, drop_faulty)
                for i, (start, end) in enumerate(zip(starts.tolist(), piece.ends.tolist(), strict=True))
            ]
            counts.update(kinds)
            are_rows = [kind == "rows" for kind in kinds]
            yield np.stack([starts + offset, piece.ends - starts], axis=1)[are_rows]
            if progress is not None:
                progress(piece.num_bytes, sum(are_rows))
            offset += len(piece.payload) + 1


def _line_kind(raw: bytes, line: int, path: str, drop_faulty: bool) -> str:
    """Return ``"rows"``, ``"blank"`` or ``"faulty"``. SequenceError: the line is faulty and must not be dropped."""
    content = raw.strip(_JSON_SPACE)
    if not content:
        return "blank"
    try:
        parse_json(content.removeprefix(b"\xef\xbb\xbf") if line == 1 else content)
    except ValueError as error:
        if not drop_faulty:
            raise SequenceError(path, line, f"{error}; or drop such lines (--drop-faulty)") from None
        return "faulty"
    return "rows"


class RawRows(Sequence[bytes]):
    """Random access to the rows of a JSON-lines file.

    ``rows[i]`` is the row's bytes, for ``json.loads``; ``rows[a:b]`` is a list of them. The files are opened on first
    use, and again after unpickling. Threads can share one object.

    Args:
        path: the file.
        index_path: its raw index; None for ``X.idx`` next to ``X.jsonl``.
        backend: ``mmap``, or ``pread`` if mapping is slow or not allowed.

    Raises:
        FormatError: on first use, the index is invalid or belongs to another file, or the file has changed; while
            reading, the index divides a row.
        OSError: a file cannot be read.

    Example:
        >>> from megatron_sft_idx.formats.modalities import create_raw_index
        >>> import json
        >>> from megatron_sft_idx.formats.modalities import create_raw_index
        >>> report = create_raw_index("tools/demo/chats.jsonl", "data/demo.idx")
        >>> rows = RawRows("tools/demo/chats.jsonl", "data/demo.idx")
        >>> len(rows), json.loads(rows[0])["messages"][0]["content"]
        (318, 'Regex for a time like 09:45?')
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        index_path: str | os.PathLike[str] | None = None,
        *,
        backend: Backend = "mmap",
    ) -> None:
        self.path = os.fspath(path)
        self.index_path = _index_path(self.path, index_path)
        self._backend: Backend = backend
        self._num_bytes = os.stat(self.path).st_size

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_opened"}

    def __len__(self) -> int:
        return len(self._opened[0])

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        rows, data = self._opened
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(rows)))]
        number = operator.index(index)
        if not -len(rows) <= number < len(rows):
            raise IndexError(f"{self.path}: there is no row {number}; the file has {len(rows)} rows")
        start, length = rows[number].tolist()
        stop = start + length
        # One more byte on either side, which must be a newline.
        raw = data[max(start - 1, 0) : stop + 1].tobytes()
        row = raw[start > 0 :][:length]
        if (start and raw[0] != _NEWLINE) or (stop < self._num_bytes and raw[-1] != _NEWLINE) or b"\n" in row:
            raise FormatError(
                f"{self.index_path}: row {number} is bytes {start} to {stop} of {self.path} according to this index,"
                " but that is not a complete line: the index belongs to another file, or counts characters instead of"
                " bytes, like Modalities in 2024; create it again"
            )
        return row

    def ranges(self, num_ranges: int) -> list[RowRange]:
        """Divide the file into ranges of about equally many bytes, one per reader; every byte is in exactly one.

        The first range begins with the file, every other one with a row. Lines that are not rows belong to the range of
        the previous row. With fewer rows than ranges, some ranges are empty.
        """
        if num_ranges < 1:
            raise FormatError(f"{self.path}: {num_ranges} ranges, expected at least 1")
        starts = self._opened[0][:, 0]
        targets = np.arange(1, num_ranges, dtype=np.float64) * (self._num_bytes / num_ranges)
        inner = np.searchsorted(starts, targets)
        cuts = [0, *inner.tolist(), len(starts)]
        edges = [0, *np.append(starts, self._num_bytes)[inner].tolist(), self._num_bytes]
        return [RowRange(edges[i], edges[i + 1], cuts[i], cuts[i + 1] - cuts[i]) for i in range(num_ranges)]

    @cached_property
    def _opened(self) -> tuple[NDArray[np.int64], Array]:
        """The index, int64 [rows, 2], and the bytes of the file; both are opened and checked on first use."""
        nbytes = self._num_bytes
        if (size := os.stat(self.path).st_size) != nbytes:
            raise FormatError(
                f"{self.path}: the file has {size} bytes, but had {nbytes} when this object was created; create its"
                " index again, then start again"
            )
        rows = _read_index(self.index_path)
        starts, lengths = rows[:, 0], rows[:, 1]
        # A row has at least a byte, and a newline is between two rows.
        number = first_bad_range(starts, np.where(lengths < 1, -1, lengths), nbytes, min_gap=1)
        if number is not None:
            raise FormatError(
                f"{self.index_path}: row {number} has {lengths[number]} bytes from {starts[number]} on; expected rows"
                f" in order, without overlap, within the {nbytes} bytes of {self.path}; the index belongs to another"
                " file: create it again"
            )
        return rows, open_array(self.path, np.dtype(np.uint8), nbytes, nbytes=nbytes, backend=self._backend)


# ---- blocks of tokens ----


class _TokenBlocks:
    """Blocks of ``block_size`` tokens of one file; ``_find_blocks`` returns the tokens at which they start.

    It pickles as path and options. After unpickling, for example in a DataLoader worker, the first use opens the file.
    """

    def __init__(self, path: str | os.PathLike[str], block_size: int) -> None:
        self.path = os.fspath(path)
        self.block_size = operator.index(block_size)
        if self.block_size < 2:
            raise FormatError(f"{self.path}: block_size {block_size}, expected at least 2: an input and its target")
        self._identity = file_identity(self.path)
        _ = self._opened  # raises its errors now

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_opened"}

    def __len__(self) -> int:
        return len(self._opened[1])

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Return block ``index``, possibly negative: ``{"input_ids": uint16 or int32 [block_size]}``, read-only."""
        tokens, starts = self._opened
        number = operator.index(index)
        if not -len(starts) <= number < len(starts):
            raise IndexError(f"{self.path}: there is no block {number}; the number of blocks is {len(starts)}")
        number %= len(starts)
        ids = native_tokens(self.path, number, tokens[starts[number] : starts[number] + self.block_size])
        ids.flags.writeable = False
        return {"input_ids": ids}

    @cached_property
    def _opened(self) -> tuple[NDArray[Any], Sequence[int]]:
        """All tokens [tokens], and the first token of each block."""
        if (identity := file_identity(self.path)) != self._identity:
            raise FormatError(
                f"{self.path}: size or modification time ({identity}) has changed since the dataset was created"
                f" ({self._identity}); start again"
            )
        framing, starts = self._find_blocks()
        if framing.num_tokens < self.block_size:
            raise FormatError(
                f"{self.path}: {framing.num_tokens} tokens in total, fewer than one block of {self.block_size}"
            )
        return framing.open_tokens(self.path), starts

    def _find_blocks(self) -> tuple[Framing, Sequence[int]]:
        """The framing of the file, and the first token of each block."""
        raise NotImplementedError


class PackedMemMapDatasetContinuous(_TokenBlocks):
    """The token stream divided every ``block_size`` tokens; the remainder at the end is not used.

    Args:
        path: a ``.pbin`` of any generation.
        block_size: number of tokens in a block.
        reuse_last_target: the last token of a block is also the first of the next, so that every token except the very
            first is a target once. Otherwise, the first token of each block is not a target.

    Raises:
        FormatError: not a ``.pbin``; a block of less than 2 tokens, or of more than there are.

    Example:
        >>> blocks = PackedMemMapDatasetContinuous("data/text.pbin", block_size=4)
        >>> [blocks[i]["input_ids"].tolist() for i in range(len(blocks))]
        [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 10]]
    """

    def __init__(self, path: str | os.PathLike[str], block_size: int, reuse_last_target: bool = True) -> None:
        self.reuse_last_target = reuse_last_target
        super().__init__(path, block_size)

    def _find_blocks(self) -> tuple[Framing, Sequence[int]]:
        framings = require_framings(self.path)
        # Reading the index is slow, but only the index distinguishes the two framings.
        framing = framings[0] if len(framings) == 1 else read_document_index(self.path).framing
        stride = self.block_size - bool(self.reuse_last_target)
        return framing, range(0, framing.num_tokens - self.block_size + 1, stride)


class PackedMemMapDatasetMegatron(_TokenBlocks):
    """Blocks that begin with a document if possible, so some tokens are in two blocks.

    Documents are added to a block until one fills it or extends past its end. A document that extends past the end is
    truncated there, and the next block begins with the whole document. Only if it is longer than a block, the next
    block begins directly after this one. The remainder at the end is not used.

    The arithmetic is that of Modalities up to June 2024. Later versions make the same number of blocks, but confuse
    offsets in the file with offsets in the data, and bytes with tokens, so they read blocks from the wrong bytes.

    Args:
        path: a ``.pbin`` of any generation.
        block_size: number of tokens in a block.
        repair_merge: read a file whose index was damaged by ``merge_packed_data`` (see ``pbin.DocumentIndex``).

    Raises:
        FormatError: not a ``.pbin``, a broken index, or a block of less than 2 tokens or more than there are.

    Example:
        >>> blocks = PackedMemMapDatasetMegatron("data/text.pbin", block_size=4)
        >>> # The documents of this file are [1, 2, 3], [4, 5, 6] and [7, 8, 9, 10].
        >>> [blocks[i]["input_ids"].tolist() for i in range(len(blocks))]
        [[1, 2, 3, 4], [4, 5, 6, 7]]
    """

    def __init__(self, path: str | os.PathLike[str], block_size: int, *, repair_merge: bool = False) -> None:
        self.repair_merge = repair_merge
        super().__init__(path, block_size)

    def _find_blocks(self) -> tuple[Framing, Sequence[int]]:
        index = read_document_index(self.path, repair_merge=self.repair_merge)
        starts = array("q")
        block_start = filled = 0
        for start, length in zip(index.starts.tolist(), index.lengths.tolist(), strict=True):
            if filled + length < self.block_size:
                filled += length
                continue
            starts.append(block_start)
            if filled + length == self.block_size or length > self.block_size:
                block_start, filled = block_start + self.block_size, 0
            else:
                block_start, filled = start, length
        return index.framing, starts
