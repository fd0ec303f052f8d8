"""The input as one stream of pieces, each with the position behind it, from which a later run goes on.

It is files that are all there, a pipe, or a folder that grows: then its files in the order of their names, each once it
is whole.
"""

from __future__ import annotations

import json
import os
import queue
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypeAlias

import xxhash

from megatron_sft_idx.chat.inputs import InputFile, expand_inputs, iter_pieces, stream_pieces
from megatron_sft_idx.chat.types import Piece
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Record, Unchanged
from megatron_sft_idx.shard.shard_set import natural_key
from megatron_sft_idx.storage import OutputFile, read_beginning, require_local, sync_folder
from megatron_sft_idx.storage.publish import describe
from megatron_sft_idx.tokenize import NOT_YET, NotYet

# The pieces of every file that is left, NOT_YET wherever one has to wait.
Files: TypeAlias = Iterator[Iterator[Piece | NotYet] | NotYet]


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


class Fed(NamedTuple):
    """Where a piece is in the input.

    Attributes:
        path: its file.
        first: the number of its first row.
        behind: the position behind it.
        nbytes: of the input, from the beginning of the file that this run began in to there.
    """

    path: str
    first: int
    behind: Position
    nbytes: int


def feed(files: Files, start: Position, name: str) -> Iterator[tuple[Fed, Piece] | NotYet]:
    """Pieces of an input from a position on.

    Only the file that the position is in is read again, as far as the position, and compared with what it was.

    Args:
        files: from that of the position on.
        start: the place to go on from.
        name: of the catalog, in errors.

    Raises:
        FormatError: the content before the position is another.
    """
    number, before, nbytes, path = start.file, start.file_fingerprint, 0, "the input"
    for pieces in files:
        if isinstance(pieces, NotYet):
            yield NOT_YET
            continue
        count, fingerprint = 0, before
        known = start.pieces if number == start.file else 0
        for piece in pieces:
            if isinstance(piece, NotYet):
                yield NOT_YET
                continue
            # Chained: unlike a hash's inner state it can be stored.
            fingerprint = xxhash.xxh3_128_hexdigest((fingerprint + piece.fingerprint()).encode())
            count, nbytes, path = count + 1, nbytes + piece.num_bytes, piece.path
            if count == known and fingerprint != start.fingerprint:
                raise _other_input(name, path)
            if count > known:
                yield Fed(path, piece.first, Position(number, count, before, fingerprint), nbytes), piece
        if count < known:
            raise _other_input(name, path)
        number, before = number + 1, fingerprint
    if number <= start.file and start.pieces:
        raise FormatError(f"{name}: the input has no file {start.file + 1} any more; restore it")


def _other_input(name: str, path: str) -> FormatError:
    return FormatError(
        f"{name}: {path} is not what the shards so far were made from; give the same input again, from its beginning,"
        " or name another catalog"
    )


# ---- what it is read from ----


def fixed_files(files: Sequence[InputFile], piece_nbytes: int, log: InputLog, first: int) -> Files:
    """Files that are all there, from the ``first`` on; ``log`` is that of an earlier run over the same, or empty.

    Raises:
        FormatError: the earlier run had other files.
    """
    now = [TakenFile(file.path, file.num_bytes) for file in files]
    for number, (found, wanted) in enumerate(zip_longest(log.files, now), 1):
        # How many there are is among the options: a shorter log is one that was being written.
        if found is not None and (wanted is None or found.num_bytes != wanted.num_bytes):
            shown = f"{wanted.name} of {wanted.num_bytes:,} bytes" if wanted else "none"
            raise FormatError(
                f"{log.path}: this catalog is made from other input: file {number} was {found.name} of"
                f" {found.num_bytes:,} bytes, is {shown}; name the same files, or another catalog"
            )
    if missing := now[len(log.files) :]:
        log.add(*missing)
    return (iter_pieces([file], piece_nbytes=piece_nbytes) for file in files[first:])


# Pieces read ahead from a pipe.
_AHEAD = 2
# Until a pipe is said to have nothing now: long enough that a fast one is never said to.
_PATIENCE_SECONDS = 0.05


def standard_input(piece_nbytes: int) -> Iterator[Piece | NotYet]:
    """JSON lines from a pipe, read by a thread, so that nobody who asks for a piece waits long for the pipe."""
    taken: queue.Queue[Piece | BaseException | None] = queue.Queue(_AHEAD)
    stream = open(0, "rb", closefd=False)  # noqa: SIM115 - the thread that reads it may outlive us

    def take() -> None:
        try:
            for piece in stream_pieces(stream, name="standard input", piece_nbytes=piece_nbytes):
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


_END_OF_INPUT = "_END"
_BEING_WRITTEN = (".tmp", ".part", ".partial")
_SECONDS_BETWEEN_LOOKS = 0.2


class GrowingFolder:
    """Files of a folder as they appear, until a file named ``_END`` does, or nothing new for too long.

    The first file by name is taken when another one follows it, when ``_END`` is there, or when it has not changed
    for ``settle`` seconds of this process's own clock; then its size is held against what it was until another file
    or the end is there. Names that begin with ``.`` or ``_`` or end in ``.tmp``,
    ``.part`` or ``.partial`` are being written; folders are passed over.

    Args:
        folder: to be watched.
        piece_nbytes: see ``iter_pieces``.
        taken: the files taken so far, by earlier runs too.
        settle: seconds.
        end_after: seconds without anything new; None waits for ``_END`` alone.
        log: takes lines for people.
        clock: seconds since some moment.

    Raises:
        FormatError: there is no such folder.
    """

    def __init__(
        self,
        folder: str,
        piece_nbytes: int,
        taken: InputLog,
        *,
        settle: float,
        end_after: float | None,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_local(folder, "watching a folder", "name a local one, and copy what appears in the bucket to it")
        if not os.path.isdir(folder):
            raise FormatError(f"{folder}: no such folder to watch; make it, or name the one where input appears")
        self._folder, self._piece_nbytes, self._taken = folder, piece_nbytes, taken
        self._settle, self._end_after, self._log, self._clock = settle, end_after, log, clock
        self._names = {file.name for file in taken.files}
        # Whole ones of the last look, in order: looking costs as much as there are files.
        self._whole: deque[str] = deque()
        # Taken for its age alone.
        self._settled: TakenFile | None = None
        # What the first file looks like, and when anything was last new.
        self._first = Unchanged(clock)
        self._news_at, self._looked_at = clock(), float("-inf")

    def files(self, first: int) -> Files:
        """The pieces of every file from the ``first`` on, counted from 0."""
        number = first
        while True:
            if number >= len(self._taken.files):
                found = self._look()
                if found is None:
                    return
                if isinstance(found, NotYet):
                    yield NOT_YET
                    continue
                self._names.add(found.name)
                self._taken.add(found)
            yield self._pieces(self._taken.files[number])
            number += 1
            self._news_at = self._clock()

    def _look(self) -> TakenFile | NotYet | None:
        """The next file that is whole; None at the end."""
        now = self._clock()
        if not self._whole:
            if now - self._looked_at < _SECONDS_BETWEEN_LOOKS:
                return NOT_YET
            # In this order no file is missed that was there before the end was.
            ended = os.path.lexists(os.path.join(self._folder, _END_OF_INPUT))
            names = sorted(filter(self._is_new, os.listdir(self._folder)), key=natural_key)
            # One that was taken for its age may be gone, it was read; it must not have grown since.
            if self._settled is not None and os.path.exists(os.path.join(self._folder, self._settled.name)):
                self._require_same_size(self._settled)
            if not names:
                self._looked_at = now
                silent = self._end_after is not None and now - self._news_at >= self._end_after
                return None if ended or silent else NOT_YET
            self._settled = None
            self._whole.extend(names if ended else names[:-1])
        is_whole = bool(self._whole)
        name = self._whole.popleft() if is_whole else names[0]
        path = os.path.join(self._folder, name)
        try:
            status = os.stat(path)
        except FileNotFoundError:  # renamed or removed since it was listed
            return NOT_YET
        file = TakenFile(name, status.st_size)
        if is_whole:
            return file
        if self._first.sight != (seen := (*file, status.st_mtime_ns)):
            self._news_at = now
        if (unchanged := self._first.seconds(seen)) >= self._settle:
            self._log(f"{path}: taken, its size has not changed for {unchanged:.0f} s")
            self._settled = file
            return file
        self._looked_at = now
        return NOT_YET

    def _is_new(self, name: str) -> bool:
        if name in self._names or name.startswith((".", "_")) or name.endswith(_BEING_WRITTEN):
            return False
        try:
            return stat.S_ISREG(os.stat(os.path.join(self._folder, name)).st_mode)
        except OSError:
            return False

    def _pieces(self, file: TakenFile) -> Iterator[Piece | NotYet]:
        path = self._require_same_size(file)
        yield from iter_pieces(expand_inputs([path]), piece_nbytes=self._piece_nbytes)
        self._require_same_size(file)

    def _require_same_size(self, file: TakenFile) -> str:
        """Its path. A file that grows after it was taken was not whole: what was added would be lost without a word."""
        path = os.path.join(self._folder, file.name)
        found = os.stat(path).st_size if os.path.exists(path) else None
        if found != file.num_bytes:
            shown = "is not there any more" if found is None else f"has {found:,} bytes"
            raise FormatError(
                f"{path}: had {file.num_bytes:,} bytes when it was taken, and {shown}; restore it and start again."
                f" Write input under a name that begins with '.' or '_' and rename it when it is whole, or raise"
                f" --settle"
            )
        return path


# ---- the files that were taken, noted on disk ----

_MAX_NBYTES = 1 << 30
_LINE = b'{"name":'


class TakenFile(NamedTuple):
    """Name in the folder that is watched, or path as it was found; and size when it was taken."""

    name: str
    num_bytes: int


class InputLog:
    """The list of files, on disk as soon as ``add`` returns; the file is made with the first of them.

    Raises:
        FormatError: what is there was not written by this class.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: OutputFile | None = None
        self._found = os.path.lexists(path)  # one that appears later is not this one
        if self._found and describe(path) != "a file":
            raise FormatError(f"{path}: {describe(path)} is here, expected a file or nothing; move it away")
        content = read_beginning(path, _MAX_NBYTES + 1) if self._found else b""
        if len(content) > _MAX_NBYTES:
            raise FormatError(f"{path}: more than {_MAX_NBYTES} bytes, which it never has; make another catalog")
        # A line without its end was being written when the producer was killed: its file was not read yet.
        self._nbytes = content.rfind(b"\n") + 1
        torn = content[self._nbytes :]
        if not (_LINE.startswith(torn) or torn.startswith(_LINE)):
            raise FormatError(f"{path}: a file that no producer wrote is here; move it away, or name another folder")
        self.files: list[TakenFile] = []
        for line in content[: self._nbytes].splitlines():
            try:
                file = TakenFile(**json.loads(line))
                if list(map(type, file)) != [str, int]:
                    raise TypeError
            except (ValueError, TypeError, RecursionError):
                raise FormatError(
                    f"{path}: line {len(self.files) + 1} is {line[:60]!r}, expected a name and a number of bytes; the"
                    " file is damaged: make another catalog"
                ) from None
            self.files.append(file)

    def add(self, *files: TakenFile) -> None:
        """Note files that come after those noted."""
        if self._file is None:
            self._file = OutputFile(self.path, append=self._found)
            self._file.truncate(self._nbytes)
            sync_folder(Path(self.path).parent)
        self._file.write(b"".join(json.dumps(file._asdict()).encode() + b"\n" for file in files))
        self._file.sync()
        self.files += files

    def clear(self) -> None:
        """Forget all files: nothing was made of them."""
        self.files, self._nbytes = [], 0

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
