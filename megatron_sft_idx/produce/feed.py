"""The input of a producer as one stream of pieces, each with the position after it, at which a later job can resume.

Here the input is a sequence of files, each an iterator of pieces; ``input_kinds`` provides them. A position is a number
of pieces in a file, and the hash of all content before it. So a later job only needs to read the file of its position
again, and can check whether the input is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import xxhash

from megatron_sft_idx.chat.types import Piece
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Record
from megatron_sft_idx.tokenize import NOT_YET, NotYet

# For each file its pieces, in order; NOT_YET in place of a file or a piece that does not exist yet.
Files: TypeAlias = Iterator[Iterator[Piece | NotYet] | NotYet]


@dataclass(frozen=True, slots=True)
class Position(Record):
    """A position in the input. It is stored in the headers of shards, so it has no paths and no times.

    Attributes:
        file: number of the file it is in, from 0.
        pieces: number of pieces of this file before it.
        file_fingerprint: hash of all content before this file.
        fingerprint: hash of all content before this position.
    """

    file: int = 0
    pieces: int = 0
    file_fingerprint: str = ""
    fingerprint: str = ""


class PieceOrigin(NamedTuple):
    """The location of a piece in the input.

    Attributes:
        path: its file.
        first: number of its first row in that file.
        behind: the position after it.
        nbytes: bytes of the input up to that position, from the beginning of the first file of this job.
    """

    path: str
    first: int
    behind: Position
    nbytes: int


def feed(files: Files, start: Position, name: str) -> Iterator[tuple[PieceOrigin, Piece] | NotYet]:
    """Yield the pieces of an input from a position on.

    The file of the position is read again up to it, and its content is checked by its hash. Files before it are not
    read.

    Args:
        files: the files of the input, from that of the position on.
        start: the position to resume from.
        name: name of the catalog in errors.

    Raises:
        FormatError: the content before the position has changed.
    """
    number, before, nbytes, path = start.file, start.file_fingerprint, 0, "the input"
    for pieces in files:
        if isinstance(pieces, NotYet):
            yield NOT_YET
            continue
        count, fingerprint = 0, before
        num_done = start.pieces if number == start.file else 0
        for piece in pieces:
            if isinstance(piece, NotYet):
                yield NOT_YET
                continue
            # A chain of hashes, which can be stored and continued, unlike the inner state of one hash.
            fingerprint = xxhash.xxh3_128_hexdigest((fingerprint + piece.fingerprint()).encode())
            count, nbytes, path = count + 1, nbytes + piece.num_bytes, piece.path
            if count == num_done and fingerprint != start.fingerprint:
                raise _other_input(name, path)
            if count > num_done:
                yield PieceOrigin(path, piece.first, Position(number, count, before, fingerprint), nbytes), piece
        if count < num_done:
            raise _other_input(name, path)
        number, before = number + 1, fingerprint
    if number <= start.file and start.pieces:
        raise FormatError(f"{name}: file {start.file + 1} of the input no longer exists; restore it")


def _other_input(name: str, path: str) -> FormatError:
    return FormatError(
        f"{name}: {path} differs from the input that the existing shards were made from; pass the same input from its"
        " beginning, or choose another catalog"
    )
