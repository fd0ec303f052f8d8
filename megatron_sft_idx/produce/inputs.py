"""Where pieces of input come from: files that are all there, a pipe, or (``growing``) a folder that grows."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Protocol, TypeAlias

from megatron_sft_idx.chat.inputs.files import InputFile, total_bytes
from megatron_sft_idx.chat.inputs.pieces import Piece, iter_pieces, stream_pieces
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.produce.input_log import InputLog, TakenFile
from megatron_sft_idx.tokenize import NOT_YET, NotYet

__all__ = ["FixedFiles", "Input", "PiecesOfAFile", "StandardInput"]

PiecesOfAFile: TypeAlias = Iterator[Piece | NotYet]

_STDIN = "standard input"
# Pieces read ahead from a pipe.
_AHEAD = 2
# Until a pipe is said to have nothing now: long enough that a fast one is never said to.
_PATIENCE_SECONDS = 0.05


class Input(Protocol):
    """Files, one after the other; NOT_YET in their place, or among their pieces, where one has to wait."""

    def num_bytes(self, first: int) -> int | None:
        """Of the files from the ``first`` on, for progress; None where nobody knows."""

    def files(self, first: int) -> Iterator[PiecesOfAFile | NotYet]:
        """The pieces of every file from the ``first`` on, counted from 0."""


class FixedFiles:
    """Files that are all there.

    Args:
        files: in their order.
        piece_nbytes: see ``iter_pieces``.
        log: of an earlier run over the same files, or empty.

    Raises:
        FormatError: the earlier run had other files.
    """

    def __init__(self, files: Sequence[InputFile], piece_nbytes: int, log: InputLog) -> None:
        self._files, self._piece_nbytes = files, piece_nbytes
        now = [TakenFile(file.path, file.num_bytes) for file in files]
        for number, (found, wanted) in enumerate(zip_longest(log.files, now), 1):
            # How many there are is among the options: a shorter log is one that was being written.
            if found is not None and (wanted is None or found.num_bytes != wanted.num_bytes):
                raise FormatError(
                    f"{log.path}: this catalog is made from other input: file {number} was {found.name} of"
                    f" {found.num_bytes:,} bytes, is {_shown(wanted)}; name the same files, or another catalog"
                )
        self._log, self._now = log, now

    def num_bytes(self, first: int) -> int | None:
        """See ``Input``."""
        return total_bytes(self._files[first:])

    def files(self, first: int) -> Iterator[PiecesOfAFile | NotYet]:
        """See ``Input``."""
        if missing := self._now[len(self._log.files) :]:
            self._log.add(*missing)
        for file in self._files[first:]:
            yield iter_pieces([file], piece_nbytes=self._piece_nbytes)


def _shown(file: TakenFile | None) -> str:
    return f"{file.name} of {file.num_bytes:,} bytes" if file else "none"


class StandardInput:
    """JSON lines from a pipe, read by a thread, so that nobody who asks for a piece waits long for the pipe."""

    def __init__(self, piece_nbytes: int) -> None:
        self._piece_nbytes = piece_nbytes

    def num_bytes(self, first: int) -> int | None:
        """See ``Input``: nobody knows."""
        return None

    def files(self, first: int) -> Iterator[PiecesOfAFile | NotYet]:
        """The one stream there is."""
        if first == 0:
            stream = open(0, "rb", closefd=False)  # noqa: SIM115 - the thread that reads it may outlive us
            yield _in_background(stream_pieces(stream, name=_STDIN, piece_nbytes=self._piece_nbytes))


def _in_background(pieces: Iterator[Piece]) -> PiecesOfAFile:
    """What another thread takes from ``pieces``; NOT_YET while it has nothing."""
    taken: queue.Queue[Piece | BaseException | None] = queue.Queue(_AHEAD)

    def take() -> None:
        try:
            for piece in pieces:
                taken.put(piece)
            taken.put(None)
        except BaseException as error:  # whoever takes from the queue raises it
            taken.put(error)

    # A daemon: nobody waits for a pipe that stays open when the work is over.
    threading.Thread(target=take, name="standard input", daemon=True).start()
    while True:
        try:
            piece = taken.get(timeout=_PATIENCE_SECONDS)
        except queue.Empty:
            yield NOT_YET
            continue
        if piece is None:
            return
        if isinstance(piece, BaseException):
            raise piece
        yield piece
