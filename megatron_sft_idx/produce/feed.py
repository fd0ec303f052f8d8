"""The input of a producer as one stream of pieces, each with the position behind it, at which a later job goes on.

The input is a list of files that are all there, a pipe, or a folder that grows. Of such a folder the files come in the
order of their names, each as soon as it is whole.
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

from megatron_sft_idx.chat.inputs import InputFile, iter_pieces, stream_pieces
from megatron_sft_idx.chat.types import Piece
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Record, Settling, Unchanged, patiently, status_of
from megatron_sft_idx.shard.shard_set import natural_key
from megatron_sft_idx.storage import OutputFile, read_beginning, require_local, sync_folder
from megatron_sft_idx.storage.publish import describe
from megatron_sft_idx.tokenize import NOT_YET, NotYet, row_files

# For each file its pieces, in order; NOT_YET in place of a file or a piece that is not there yet.
Files: TypeAlias = Iterator[Iterator[Piece | NotYet] | NotYet]


@dataclass(frozen=True, slots=True)
class Position(Record):
    """A position in the input. It is stored in the headers of shards, so it holds no path and no time.

    Attributes:
        file: number of the file it is in, from 0.
        pieces: how many pieces of this file lie before it.
        file_fingerprint: hash of all content before this file.
        fingerprint: hash of all content before this position.
    """

    file: int = 0
    pieces: int = 0
    file_fingerprint: str = ""
    fingerprint: str = ""


class PieceOrigin(NamedTuple):
    """Where a piece lies in the input.

    Attributes:
        path: its file.
        first: number of its first row in that file.
        behind: the position behind it.
        nbytes: bytes of the input up to that position, from the beginning of the file that this job began in.
    """

    path: str
    first: int
    behind: Position
    nbytes: int


def feed(files: Files, start: Position, name: str) -> Iterator[tuple[PieceOrigin, Piece] | NotYet]:
    """The pieces of an input from a position on.

    The file that the position lies in is read again up to it, and its content compared by its hash; files before it
    are not read.

    Args:
        files: the files of the input, from that of the position on.
        start: the position to go on from.
        name: what errors call the catalog.

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
        raise FormatError(f"{name}: the input has no file {start.file + 1} any more; restore it")


def _other_input(name: str, path: str) -> FormatError:
    return FormatError(
        f"{name}: {path} is not what the shards so far were made from; give the same input again, from its beginning,"
        " or name another catalog"
    )


# ---- the three kinds of input ----


def fixed_files(files: Sequence[InputFile], piece_nbytes: int, taken: TakenFiles, first: int) -> Files:
    """The pieces of files that are all there, from the file ``first`` on.

    ``taken`` lists the files that an earlier job for the same catalog took; files that it lacks are added to it.

    Raises:
        FormatError: the earlier job took other files.
    """
    present = [TakenFile(file.path, file.num_bytes) for file in files]
    for number, (before, now) in enumerate(zip_longest(taken.files, present), 1):
        # A list that is shorter was cut short as it was written: the number of files is one of the job's options.
        if before is not None and (now is None or before.num_bytes != now.num_bytes):
            shown = f"{now.name} of {now.num_bytes:,} bytes" if now else "none"
            raise FormatError(
                f"{taken.path}: this catalog is made from other input: file {number} was {before.name} of"
                f" {before.num_bytes:,} bytes, is {shown}; name the same files, or another catalog"
            )
    if missing := present[len(taken.files) :]:
        taken.add(*missing)
    return (iter_pieces([file], piece_nbytes=piece_nbytes) for file in files[first:])


# How many pieces are read ahead from a pipe.
_AHEAD = 2
# How long to wait for the next piece of a pipe before answering NOT_YET; a pipe that is fast never takes so long.
_PATIENCE_SECONDS = 0.05


def standard_input(piece_nbytes: int) -> Iterator[Piece | NotYet]:
    """The pieces of JSON lines from standard input, which a thread reads, so that asking for one never takes long."""
    ready: queue.Queue[Piece | BaseException | None] = queue.Queue(_AHEAD)
    stream = open(0, "rb", closefd=False)  # noqa: SIM115 - the thread may read from it for longer than this function runs

    def read() -> None:
        try:
            for piece in stream_pieces(stream, name="standard input", piece_nbytes=piece_nbytes):
                ready.put(piece)
            ready.put(None)
        except BaseException as error:  # raised where the queue is emptied
            ready.put(error)

    # A daemon thread, since the process must end although the pipe may stay open.
    threading.Thread(target=read, name="standard input", daemon=True).start()
    while True:
        try:
            piece = ready.get(timeout=_PATIENCE_SECONDS)
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
    """The files of a folder as they appear, until a file named ``_END`` does, or nothing new comes for too long.

    A file is taken when another one follows it by name, when ``_END`` is there, or when it has not changed for
    ``settle`` seconds. A file that was taken for its age alone must keep its size until another file or the end is
    there. Files are still being written whose names begin with ``.`` or ``_`` or end in ``.tmp``, ``.part`` or
    ``.partial``. Folders in the folder are passed over.

    Args:
        folder: the folder to watch.
        piece_nbytes: as for ``iter_pieces``.
        taken: the files that were taken so far, by earlier jobs too; those that this one takes are added.
        settle: how long, in seconds, a file must have stayed the same to count as whole.
        end_after: how long, in seconds, to wait for anything new; None waits for ``_END`` alone.
        log: called with messages for the user.
        clock: seconds since some moment.

    Raises:
        FormatError: there is no such folder.
    """

    def __init__(
        self,
        folder: str,
        piece_nbytes: int,
        taken: TakenFiles,
        *,
        settle: float,
        end_after: float | None,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_local(folder, "watching a folder", "name a local one, and copy what appears in the bucket to it")
        if (status := status_of(folder)) is None or not stat.S_ISDIR(status.st_mode):
            raise FormatError(f"{folder}: no such folder to watch; make it, or name the one where input appears")
        self._folder, self._piece_nbytes, self._taken = folder, piece_nbytes, taken
        self._end_after, self._log, self._clock = end_after, log, clock
        self._names = {file.name for file in taken.files}
        # Names of whole files that the last listing found, in order; a listing takes long where files are many.
        self._whole: deque[str] = deque()
        # The last file, where it was taken for its age alone; of an earlier job's, nobody knows.
        self._settled = taken.files[-1] if taken.files else None
        # The last file of the folder, where it is not taken; how long the same file has been asked for, by its number;
        # and when the folder was last listed.
        self._last, self._asked, self._looked_at = Settling(settle, clock), Unchanged(clock), float("-inf")

    def files(self, first: int) -> Files:
        """For each file its pieces, from the file ``first`` on, counted from 0."""
        number = first
        while True:
            if number >= len(self._taken.files):
                file = self._next_file(number)
                if file is None:
                    return
                if isinstance(file, NotYet):
                    yield NOT_YET
                    continue
                self._names.add(file.name)
                self._taken.add(file)
                continue  # where the list was lost, files before the first one are taken again
            yield self._pieces(self._taken.files[number])
            number += 1

    def _next_file(self, number: int) -> TakenFile | NotYet | None:
        """The next file that is whole, which is asked for by its number; None at the end of the input."""
        now, asked_for = self._clock(), self._asked.seconds(number)
        if not self._whole:
            if now - self._looked_at < _SECONDS_BETWEEN_LOOKS:
                return NOT_YET
            # Look for the end first: then no file is missed that was there before it.
            ended = os.path.lexists(os.path.join(self._folder, _END_OF_INPUT))
            names = sorted(
                filter(self._is_new, patiently(self._folder, lambda: os.listdir(self._folder))), key=natural_key
            )
            # A file that was taken for its age may have been removed since, but it must not have grown.
            if self._settled is not None and status_of(os.path.join(self._folder, self._settled.name)) is not None:
                self._require_same_size(self._settled)
            if not names:
                self._looked_at = now
                silent = self._end_after is not None and min(asked_for, self._last.seconds()) >= self._end_after
                return None if ended or silent else NOT_YET
            self._settled = None
            self._whole.extend(names if ended else names[:-1])
        is_whole = bool(self._whole)
        name = self._whole.popleft() if is_whole else names[0]
        path = os.path.join(self._folder, name)
        if (status := status_of(path)) is None:  # it was renamed or removed after it was listed
            return NOT_YET
        file = TakenFile(name, status.st_size)
        if is_whole:
            return file
        if self._last.is_whole(name, status):
            self._log(f"{path}: taken, its size has not changed for {self._last.seconds():.0f} s")
            self._settled = file
            return file
        self._looked_at = now
        return NOT_YET

    def _is_new(self, name: str) -> bool:
        if name in self._names or name.startswith((".", "_")) or name.endswith(_BEING_WRITTEN):
            return False
        # To pass over a file for one bad look would be to take files in another order.
        try:
            status = status_of(os.path.join(self._folder, name))
        except OSError:
            return False
        return status is not None and stat.S_ISREG(status.st_mode)

    def _pieces(self, file: TakenFile) -> Iterator[Piece | NotYet]:
        path = self._require_same_size(file)
        yield from iter_pieces(row_files([path]), piece_nbytes=self._piece_nbytes)
        self._require_same_size(file)

    def _require_same_size(self, file: TakenFile) -> str:
        """The path of a file that was taken; FormatError where its size has changed, since more was written to it."""
        path = os.path.join(self._folder, file.name)
        nbytes = None if (status := status_of(path)) is None else status.st_size
        if nbytes != file.num_bytes:
            shown = "is not there any more" if nbytes is None else f"has {nbytes:,} bytes"
            raise FormatError(
                f"{path}: had {file.num_bytes:,} bytes when it was taken, and {shown}; restore it and start again."
                f" Write input under a name that begins with '.' or '_' and rename it when it is whole, or raise"
                f" --settle"
            )
        return path


# ---- the list of files that were taken, on disk ----

_MAX_NBYTES = 1 << 30
_LINE = b'{"name":'


class TakenFile(NamedTuple):
    """A file that was taken: its name in the watched folder, or its path; and its size then."""

    name: str
    num_bytes: int


class TakenFiles:
    """The list of the files that were taken, each a line of JSON; on disk as soon as ``add`` returns.

    Args:
        path: of the list. It need not exist: the first ``add`` makes it.

    Raises:
        FormatError: what is at ``path`` was not written by this class.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: OutputFile | None = None
        self._exists = os.path.lexists(path)  # a file that appears at this path later is somebody else's
        if self._exists and describe(path) != "a file":
            raise FormatError(f"{path}: {describe(path)} is here, expected a file or nothing; move it away")
        content = read_beginning(path, _MAX_NBYTES + 1) if self._exists else b""
        if len(content) > _MAX_NBYTES:
            raise FormatError(f"{path}: more than {_MAX_NBYTES} bytes, which it never has; make another catalog")
        # A last line without its end was being written when the producer was killed; its file was not read by then.
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
        """Add files to the end of the list, durably."""
        if self._file is None:
            self._file = OutputFile(self.path, append=self._exists)
            self._file.truncate(self._nbytes)
            sync_folder(Path(self.path).parent)
        self._file.write(b"".join(json.dumps(file._asdict()).encode() + b"\n" for file in files))
        self._file.sync()
        self.files += files

    def clear(self) -> None:
        """Empty the list. The caller must know that nothing was made of these files."""
        self.files, self._nbytes = [], 0

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
