"""How the input is cut: into pieces, which a worker turns into rows, and stretches of pieces, one task each.

The cut depends on the content of the input alone, never on the engine or on how many work. JSON lines are cut by byte
ranges, wherever they lie: ranges end where pieces end, so that the pieces of all tasks are those of ``iter_pieces``,
whoever reads them. To find these ends, only the few bytes before each are read. What cannot be cut by bytes
(compressed files, JSON arrays, tables) is read by one process, which deals its pieces out.
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
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.remote import open_store

# Of decompressed data. The fingerprint of the input, which headers hold, is of such pieces.
PIECE_NBYTES = 1 << 20
# Most rows are shorter, so that the end before a given byte is found at once.
_TAIL_NBYTES = 1 << 14
_READ_NBYTES = 1 << 20
# Of an object, where a request takes 10 to 100 ms whatever its size; and ends looked for at once.
_FETCH_NBYTES = 8 << 20
_ENDS_AT_ONCE = 16

_ReadAt = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Cutting:
    """How finely the input is cut; the same wherever it is.

    Attributes:
        piece_nbytes: of decompressed data in a piece.
        pieces: in a part.
    """

    piece_nbytes: int
    pieces: int

    @classmethod
    def of(cls, files: Sequence[InputFile]) -> Cutting:
        """Hundreds of parts, so that no worker waits long for the last one; of large inputs some thousands."""
        pieces = total_bytes(files) // PIECE_NBYTES
        return cls(PIECE_NBYTES, min(max(min(pieces // 256, 4), pieces // 4096, 1), 128))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Part of the input that one task reads; picklable.

    Attributes:
        file: the file, its path absolute.
        name: the file's path as messages name it.
        number: of the file.
        part: number of the stretch's first part in the file.
        offset: where the range begins.
        nbytes: of the range; None where no range is read.
        dealt: the pieces themselves; where there are none and no range either, the whole file is read.
        attempts: file names of parts that an earlier job made of this stretch.
    """

    file: InputFile
    name: str
    number: int
    part: int = 0
    offset: int = 0
    nbytes: int | None = None
    dealt: tuple[Piece, ...] = ()
    attempts: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.nbytes is not None:
            return f"{self.name}, from byte {self.offset} on"
        return f"{self.name}:{self.dealt[0].first}" if self.dealt else self.name


def cut_input(files: Sequence[InputFile], cutting: Cutting, *, readers: int = 0) -> Iterator[Stretch]:
    """The stretches of all files, in order: a part each, but for files that are read whole.

    Args:
        files: the input.
        cutting: how finely.
        readers: whole files are handed out where there are so many or more that would have to be read here; 0 for
            never. Their parts are the same.
    """
    here = [file for file in files if is_remote(file.path) or not _has_ranges(file)]
    whole = bool(readers) and len(here) >= readers
    for number, file in enumerate(files):
        path = file.path if is_remote(file.path) else os.path.abspath(file.path)
        stretch = Stretch(replace(file, path=path), file.path, number)
        if whole and file in here:
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
    """Behind the last line that ends within a piece's bytes, or behind the first one where it is longer."""
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
            break  # whoever reads it says so
    return size


class _Ends:
    """The bytes before the ends of a file's pieces; of an object many at once, about where the next ones will be."""

    def __init__(self, file: InputFile, piece_nbytes: int) -> None:
        self._file, self._piece_nbytes = file, piece_nbytes
        self._held: list[tuple[int, bytes]] = []
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
            for begin, held in self._held:
                if begin <= offset and offset + nbytes <= begin + len(held):
                    return held[offset - begin : offset - begin + nbytes]
            # This range, and those of the pieces that follow: each ends somewhat earlier than it might.
            ranges = [(offset, nbytes)]
            for ahead in range(1, _ENDS_AT_ONCE):
                stop = offset + nbytes + ahead * self._piece_nbytes
                begin = max(stop - (ahead + 1) * _TAIL_NBYTES, offset + nbytes)
                if nbytes > _TAIL_NBYTES or stop > self._file.num_bytes:
                    break
                ranges.append((begin, stop - begin))
            found = self._store.read_many(self._key, ranges, etag=self._file.etag)
            self._held = [(begin, bytes(data)) for (begin, _), data in zip(ranges, found, strict=True)]


def read_pieces(stretch: Stretch, cutting: Cutting) -> Iterator[Piece]:
    """The pieces of a stretch. Rows of a range are numbered from 1 on, those of others as they are in the file.

    Raises:
        FormatError: as ``iter_pieces``; or the file is shorter than it was.
    """
    if stretch.dealt:
        yield from stretch.dealt
        return
    if stretch.nbytes is None:
        for piece in iter_pieces([stretch.file], piece_nbytes=cutting.piece_nbytes):
            yield replace(piece, path=stretch.name)
        return
    path = f"{stretch.name} (rows counted from byte {stretch.offset} on)" if stretch.part else stretch.name
    blocks, nbytes = _blocks(stretch), cutting.piece_nbytes
    for piece in cut_lines(blocks, path=path, piece_nbytes=nbytes):
        yield replace(piece, path=stretch.name)


def _blocks(stretch: Stretch) -> Iterator[tuple[bytes, int]]:
    """The bytes of a range, and how far each block reaches in it."""
    assert stretch.nbytes is not None
    file, done = stretch.file, 0
    remote = is_remote(file.path)
    try:
        with open_object(file.path, file.etag) if remote else open_regular(file.path) as source:
            source.seek(stretch.offset)
            while done < stretch.nbytes:
                block = source.read(min(_FETCH_NBYTES if remote else _READ_NBYTES, stretch.nbytes - done))
                if not block:
                    raise FormatError(
                        f"{stretch.name}: ends at byte {stretch.offset + done}, had {file.num_bytes} when the"
                        " run began; it was changed meanwhile: run again"
                    )
                done += len(block)
                yield block, done
    except FileNotFoundError:
        raise FormatError(
            f"{file.path}: not on this node; every node of the cluster has to see the input, at one path"
        ) from None


def source_fingerprint(files: Sequence[InputFile], pieces: int | None = None) -> str:
    """Hash of the content of all inputs in order, or of their first pieces: reads them, tokenises nothing."""
    stream = StreamHash()
    for piece in islice(iter_pieces(files, piece_nbytes=PIECE_NBYTES), pieces):
        stream.update(piece.fingerprint().encode())
    return stream.hex()
