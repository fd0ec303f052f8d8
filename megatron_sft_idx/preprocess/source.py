"""The input as a stream of pieces, and fingerprints of its content on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from megatron_sft_idx.chat.inputs.files import InputFile
from megatron_sft_idx.chat.inputs.pieces import Piece, iter_pieces
from megatron_sft_idx.storage.hashing import StreamHash

__all__ = ["Source", "source_fingerprint"]

# What a worker gets at a time, and what a build is interrupted between.
PIECE_NBYTES = 1 << 20


class Source:
    """The pieces of all inputs, in order, and one hash over their content as they go by.

    Workers take pieces ahead of those that are done, so the hash of what is done is asked for with ``done``.
    """

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._pieces = iter_pieces(files, piece_nbytes=PIECE_NBYTES)
        self._hash = StreamHash()
        self._taken: deque[str] = deque()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = next(self._pieces)
        self._hash.update(piece.fingerprint().encode())
        self._taken.append(self.fingerprint)
        return piece

    @property
    def fingerprint(self) -> str:
        """Of all pieces taken."""
        return self._hash.hex()

    def done(self) -> str:
        """The fingerprint up to the next piece that is done; called once for each, in order."""
        return self._taken.popleft()


def source_fingerprint(files: Sequence[InputFile]) -> str:
    """Hash of the content of all inputs in order: reads them, tokenises nothing."""
    source = Source(files)
    for _ in source:
        source.done()
    return source.fingerprint
