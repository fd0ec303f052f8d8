"""The input as one stream of pieces, each with the position behind it, from which a later run goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from megatron_sft_idx.chat.inputs.pieces import Piece
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Record
from megatron_sft_idx.produce.inputs import Input, PiecesOfAFile
from megatron_sft_idx.tokenize import NOT_YET, NotYet

__all__ = ["Feed", "Position"]


@dataclass(frozen=True, slots=True)
class Position(Record):
    """A place in the input. No path and no time: it is in the shards' headers.

    Attributes:
        file: number of the file it is in, from 0.
        pieces: of this file before it.
        file_fingerprint: of all content before this file.
        fingerprint: of all content before this place.
    """

    file: int = 0
    pieces: int = 0
    file_fingerprint: str = ""
    fingerprint: str = ""


class Feed:
    """Pieces of an input from a position on.

    Only the file that the position is in is read again, as far as the position, and compared with what it was.
    Workers take pieces ahead of those that are done: the position behind what is done is asked for with ``done``.

    Args:
        source: of the pieces.
        start: the place to go on from.
        name: of the catalog, in errors.

    Attributes:
        skipped_nbytes: of the file that was read again, for progress.
    """

    def __init__(self, source: Input, start: Position, name: str) -> None:
        self._start, self._name = start, name
        self._behind: deque[tuple[Position, str, int]] = deque()
        self.skipped_nbytes = 0
        self._stream = self._pieces(source)

    def __iter__(self) -> Iterator[Piece | NotYet]:
        return self._stream

    def done(self) -> tuple[Position, str, int]:
        """The next piece that is done: the position behind it, its file and first row; called once each, in order."""
        return self._behind.popleft()

    def _pieces(self, source: Input) -> Iterator[Piece | NotYet]:
        before = self._start.file_fingerprint
        number = self._start.file
        for pieces in source.files(number):
            if isinstance(pieces, NotYet):
                yield NOT_YET
                continue
            count, fingerprint = 0, before
            if number == self._start.file and self._start.pieces:
                yield from self._skip(pieces)
                count, fingerprint = self._start.pieces, self._start.fingerprint
            for piece in pieces:
                if isinstance(piece, NotYet):
                    yield NOT_YET
                    continue
                count, fingerprint = count + 1, _chained(fingerprint, piece)
                self._behind.append((Position(number, count, before, fingerprint), piece.path, piece.first))
                yield piece
            number, before = number + 1, fingerprint
        if number <= self._start.file and self._start.pieces:
            raise FormatError(f"{self._name}: the input has no file {self._start.file + 1} any more; restore it")

    def _skip(self, pieces: PiecesOfAFile) -> Iterator[NotYet]:
        """Read what was read before; it must be the same."""
        fingerprint, name = self._start.file_fingerprint, "the input"
        left = self._start.pieces
        while left and (piece := next(pieces, None)) is not None:
            if isinstance(piece, NotYet):
                yield NOT_YET
                continue
            left -= 1
            fingerprint, name = _chained(fingerprint, piece), piece.path
            self.skipped_nbytes += piece.num_bytes
        if left or fingerprint != self._start.fingerprint:
            raise FormatError(
                f"{self._name}: {name} is not what the shards so far were made from; give the same input again, from"
                " its beginning, or name another catalog"
            )


def _chained(fingerprint: str, piece: Piece) -> str:
    """The fingerprint of what came before and this piece; unlike a hash's inner state it can be stored."""
    return xxhash.xxh3_128_hexdigest((fingerprint + piece.fingerprint()).encode())
