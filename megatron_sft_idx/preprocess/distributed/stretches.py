"""What one task reads of the input: a range of bytes of JSON lines, or a file of another kind.

Ranges end where pieces end, so that the pieces of all tasks are those of ``iter_pieces``, whoever reads them. To find
these ends, only the few bytes before each are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_sft_idx.chat.inputs.byte_stream import UTF8_BOM
from megatron_sft_idx.chat.inputs.cutting import MAX_ROW_NBYTES, cut_lines
from megatron_sft_idx.chat.inputs.files import InputFile
from megatron_sft_idx.chat.inputs.pieces import JsonPiece, Piece, iter_pieces
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import is_remote

__all__ = ["Cutting", "Stretch", "cut_file", "read_pieces"]

# Most rows are shorter, so that the end before a given byte is found at once.
_TAIL_NBYTES = 1 << 14
_READ_NBYTES = 1 << 20


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
    def of(cls, total_nbytes: int, piece_nbytes: int) -> Cutting:
        """Parts of a size that makes some thousands of them: files are neither tiny nor too large to hold."""
        return cls(piece_nbytes, min(max(total_nbytes // piece_nbytes // 4096, 4), 128))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Part of the input that one task reads; picklable.

    Attributes:
        file: the file, its path absolute.
        name: the file's path as messages name it.
        number: of the file.
        part: number of the stretch's first part in the file.
        offset: where the range begins.
        nbytes: of the range; None where the whole file is read.
    """

    file: InputFile
    name: str
    number: int
    part: int = 0
    offset: int = 0
    nbytes: int | None = None


def cut_file(file: InputFile, number: int, cutting: Cutting) -> Iterator[Stretch]:
    """The stretches of one file: a part each where it is cut by byte ranges, as local JSON lines are, else one."""
    if is_remote(file.path):
        # One task reads it from front to back: to find the ends of ranges would take the driver a request each.
        yield Stretch(file, file.path, number)
        return
    whole = Stretch(replace(file, path=os.path.abspath(file.path)), file.path, number)
    if file.kind != "lines" or file.compression:
        yield whole
        return
    with open(file.path, "rb", buffering=0) as source:
        start = len(UTF8_BOM) if source.read(len(UTF8_BOM)) == UTF8_BOM else 0
        part = 0
        while start < file.num_bytes:
            end = start
            for _ in range(cutting.pieces):
                end = _piece_end(source.fileno(), end, file.num_bytes, cutting.piece_nbytes)
            yield replace(whole, part=part, offset=start, nbytes=end - start)
            start, part = end, part + 1


def _piece_end(descriptor: int, start: int, size: int, piece_nbytes: int) -> int:
    """Behind the last line that ends within a piece's bytes, or behind the first one where it is longer."""
    if size - start <= piece_nbytes:
        return size
    stop = start + piece_nbytes + 1
    while stop > start:
        begin = max(start, stop - _TAIL_NBYTES)
        newline = os.pread(descriptor, stop - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        stop = begin
    at = start + piece_nbytes + 1
    while block := os.pread(descriptor, _READ_NBYTES, at):
        newline = block.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        at += len(block)
        if at - start > MAX_ROW_NBYTES:
            break  # whoever reads it says so
    return size


def read_pieces(stretch: Stretch, cutting: Cutting) -> Iterator[Piece]:
    """The pieces of a stretch. Rows of a range are numbered from 1 on, those of a whole file as they are there.

    Raises:
        FormatError: as ``iter_pieces``; or the file is shorter than it was.
    """
    if stretch.nbytes is None:
        for piece in iter_pieces([stretch.file], piece_nbytes=cutting.piece_nbytes):
            yield replace(piece, path=stretch.name)
        return
    first, consumed = 1, 0
    path = f"{stretch.name} (rows counted from byte {stretch.offset} on)" if stretch.part else stretch.name
    for run in cut_lines(_blocks(stretch), path=path, piece_nbytes=cutting.piece_nbytes, max_row_nbytes=MAX_ROW_NBYTES):
        yield JsonPiece(stretch.name, first, run.position - consumed, run.payload, run.ends, False)
        first, consumed = first + len(run.ends), run.position


def _blocks(stretch: Stretch) -> Iterator[tuple[bytes, int]]:
    """The bytes of a range, and how far each block reaches in it."""
    assert stretch.nbytes is not None
    done = 0
    try:
        with open(stretch.file.path, "rb", buffering=0) as source:
            source.seek(stretch.offset)
            while done < stretch.nbytes:
                block = source.read(min(_READ_NBYTES, stretch.nbytes - done))
                if not block:
                    raise FormatError(
                        f"{stretch.name}: ends at byte {stretch.offset + done}, had {stretch.file.num_bytes} when the"
                        " run began; it was changed meanwhile: run again"
                    )
                done += len(block)
                yield block, done
    except FileNotFoundError:
        raise FormatError(
            f"{stretch.file.path}: not on this node; every node of the cluster has to see the input, at one path"
        ) from None
