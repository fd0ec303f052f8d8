"""Divide the input into stretches, one per task, and stretches into pieces of about a MiB.

The division depends only on the content of the input, not on the engine or the number of workers. Files of JSON lines
are divided into byte ranges, and the task of a stretch reads its range. Ranges end at the ends of pieces, so the tasks
together have the same pieces as ``iter_pieces``. To find an end, only the bytes before it are read. All other files
(compressed ones, JSON arrays, tables) are read by the process of the job, which distributes the pieces to tasks, or
each by one task.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

from megatron_sft_idx.chat.inputs import (
    MAX_ROW_NBYTES,
    UTF8_BOM,
    InputFile,
    cut_lines,
    find_object,
    iter_pieces,
    open_object,
    total_bytes,
)
from megatron_sft_idx.chat.types import Piece
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import is_remote, name_in_errors, open_regular
from megatron_sft_idx.storage.remote import open_store

# Number of bytes of decompressed data in a piece. The input fingerprint in headers depends on it.
PIECE_NBYTES = 1 << 20
# Number of bytes to search at a time for the end of a line; most rows are shorter.
_TAIL_NBYTES = 1 << 14
_READ_NBYTES = 1 << 20
# For an object in a bucket, where each request takes 10 to 100 ms: request size, and piece ends searched per request.
_FETCH_NBYTES = 8 << 20
_ENDS_PER_REQUEST = 16

_ReadAt = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Cutting:
    """Sizes for dividing the input.

    Attributes:
        piece_nbytes: number of bytes of decompressed data in a piece.
        pieces: number of pieces in a stretch, and therefore in a part.
    """

    piece_nbytes: int
    pieces: int

    @classmethod
    def of(cls, files: Sequence[InputFile]) -> Cutting:
        """Choose hundreds of parts, so that workers finish at about the same time; thousands for large inputs."""
        pieces = total_bytes(files) // PIECE_NBYTES
        return cls(PIECE_NBYTES, min(max(min(pieces // 256, 4), pieces // 4096, 1), 128))


@dataclass(frozen=True, slots=True)
class Stretch:
    """The input of one task: a range of a file, some of its pieces, or a whole file; picklable.

    Attributes:
        file: the file, with its absolute path.
        name: the file's path in messages.
        number: number of the file in the input.
        part: number, in the file, of the stretch's first part.
        offset: start of the range in bytes.
        nbytes: size of the range in bytes; None if the stretch is not a range.
        dealt: the pieces themselves; empty if the stretch is a range or a whole file.
    """

    file: InputFile
    name: str
    number: int
    part: int = 0
    offset: int = 0
    nbytes: int | None = None
    dealt: tuple[Piece, ...] = ()

    def before(self, lines: int) -> int:
        """Return the difference between row numbers here and in the file, after ``lines`` lines.

        See ``read_pieces``.
        """
        return lines if self.nbytes is not None else 0

    def __str__(self) -> str:
        if self.nbytes is not None:
            return f"{self.name}, from byte {self.offset} on"
        return f"{self.name}:{self.dealt[0].first}" if self.dealt else self.name


def cut_input(files: Sequence[InputFile], cutting: Cutting, *, readers: int = 0) -> Iterator[Stretch]:
    """Yield the stretches of all files, in order. A stretch makes one part; a whole file makes several.

    Args:
        files: the input.
        cutting: sizes for dividing them.
        readers: number of tasks that could read in parallel. If at least this many files are remote or cannot be read
            in ranges, each of them is a stretch, instead of being read by this process; 0 for never. The parts are the
            same in both cases.
    """
    may_be_whole = [is_remote(file.path) or not _has_ranges(file) for file in files]
    are_whole = 0 < readers <= sum(may_be_whole)
    for number, file in enumerate(files):
        path = file.path if is_remote(file.path) else os.path.abspath(file.path)
        stretch = Stretch(replace(file, path=path), file.path, number)
        if are_whole and may_be_whole[number]:
            yield stretch
        elif _has_ranges(file):
            size, part = file.num_bytes, 0
            with closing(_Ends(stretch.file, cutting.piece_nbytes)) as ends:
                start = len(UTF8_BOM) if ends.read_at(0, len(UTF8_BOM)) == UTF8_BOM else 0
                while start < size:
                    end = start
                    for _ in range(cutting.pieces):
                        end = _piece_end(ends.read_at, end, size, cutting.piece_nbytes)
                    yield replace(stretch, part=part, offset=start, nbytes=end - start)
                    start, part = end, part + 1
        else:
            pieces = iter_pieces([file], piece_nbytes=cutting.piece_nbytes)
            part = 0
            while dealt := tuple(islice(pieces, cutting.pieces)):
                yield replace(stretch, part=part, dealt=dealt)
                part += 1


def _has_ranges(file: InputFile) -> bool:
    return file.kind == "lines" and not file.compression


def _piece_end(read_at: _ReadAt, start: int, size: int, piece_nbytes: int) -> int:
    """Return the end of the piece that starts at ``start``: after the last line within its bytes, or its first line."""
    if size - start <= piece_nbytes:
        return size
    stop = start + piece_nbytes + 1
    while stop > start:
        begin = max(start, stop - _TAIL_NBYTES)
        newline = read_at(begin, stop - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        stop = begin
    at = start + piece_nbytes + 1
    while at < size and (block := read_at(at, min(_READ_NBYTES, size - at))):
        newline = block.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        at += len(block)
        if at - start > MAX_ROW_NBYTES:
            break  # the task that reads it raises the error
    return size


class _Ends:
    """Reads the bytes before the ends of a file's pieces; for an object, before many ends in one request."""

    def __init__(self, file: InputFile, piece_nbytes: int) -> None:
        self._file, self._piece_nbytes = file, piece_nbytes
        self._blocks: list[tuple[int, bytes]] = []
        self._local = None if is_remote(file.path) else open_regular(file.path)
        if self._local is None:
            self._store, self._key = open_store(file.path)
            find_object(file.path, file.etag)

    def close(self) -> None:
        if self._local is not None:
            self._local.close()

    def read_at(self, offset: int, nbytes: int) -> bytes:
        if self._local is not None:
            with name_in_errors(self._file.path):
                return os.pread(self._local.fileno(), nbytes, offset)
        nbytes = min(nbytes, self._file.num_bytes - offset)
        while True:
            for begin, block in self._blocks:
                if begin <= offset and offset + nbytes <= begin + len(block):
                    return block[offset - begin : offset - begin + nbytes]
            # This range, and the expected ends of the next pieces: each is shorter than its full size by part of a
            # line.
            ranges = [(offset, nbytes)]
            for ahead in range(1, _ENDS_PER_REQUEST):
                stop = offset + nbytes + ahead * self._piece_nbytes
                begin = max(stop - (ahead + 1) * _TAIL_NBYTES, offset + nbytes)
                if nbytes > _TAIL_NBYTES or stop > self._file.num_bytes:
                    break
                ranges.append((begin, stop - begin))
            blocks = self._store.read_many(self._key, ranges, etag=self._file.etag)
            self._blocks = [(begin, bytes(block)) for (begin, _), block in zip(ranges, blocks, strict=True)]


def read_pieces(stretch: Stretch, cutting: Cutting) -> Iterator[Piece]:
    """Yield the pieces of a stretch. Rows of a range are numbered from 1, rows of other stretches as in the file.

    Raises:
        FormatError: see ``iter_pieces``; or the file is shorter than at the beginning of the job.
    """
    if stretch.dealt:
        yield from stretch.dealt
        return
    if stretch.nbytes is None:
        for piece in iter_pieces([stretch.file], piece_nbytes=cutting.piece_nbytes):
            yield replace(piece, path=stretch.name)
        return
    path = f"{stretch.name} (row numbers count from byte {stretch.offset})" if stretch.part else stretch.name
    for piece in cut_lines(_blocks(stretch), path=path, piece_nbytes=cutting.piece_nbytes):
        yield replace(piece, path=stretch.name)


def _blocks(stretch: Stretch) -> Iterator[tuple[bytes, int]]:
    """Yield the blocks of a range, each with the number of bytes up to its end."""
    assert stretch.nbytes is not None
    file, num_read = stretch.file, 0
    remote = is_remote(file.path)
    try:
        with open_object(file.path, file.etag) if remote else open_regular(file.path) as source:
            source.seek(stretch.offset)
            while num_read < stretch.nbytes:
                block = source.read(min(_FETCH_NBYTES if remote else _READ_NBYTES, stretch.nbytes - num_read))
                if not block:
                    raise FormatError(
                        f"{stretch.name}: ends at byte {stretch.offset + num_read}, but had {file.num_bytes} bytes"
                        " when the run began; it was changed during the run: run the command again"
                    )
                num_read += len(block)
                yield block, num_read
    except FileNotFoundError:
        raise FormatError(
            f"{file.path}: not found on this node; the input must be at the same path on every node of the cluster"
        ) from None


def first_pieces(files: Sequence[InputFile], count: int | None) -> Iterator[Piece]:
    """Yield the first ``count`` pieces of all files in order, as a job reads them; None for all."""
    return islice(iter_pieces(files, piece_nbytes=PIECE_NBYTES), count)
