"""A folder that grows: its files in the order of their names, each once it is whole."""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator

from megatron_sft_idx.chat.inputs import expand_inputs
from megatron_sft_idx.chat.pieces import iter_pieces
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.produce.feed import InputLog, PiecesOfAFile, TakenFile
from megatron_sft_idx.shard.shard_set import natural_key
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.tokenize import NOT_YET, NotYet

__all__ = ["END_OF_INPUT", "GrowingFolder"]

END_OF_INPUT = "_END"
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
        # What the first file looked like, since when, and when anything was last new.
        self._seen: tuple[str, int, int] | None = None
        self._seen_at = self._news_at = clock()
        self._looked_at = float("-inf")

    def num_bytes(self, first: int) -> int | None:
        """See ``Input``: nobody knows."""
        return None

    def files(self, first: int) -> Iterator[PiecesOfAFile | NotYet]:
        """See ``Input``."""
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
        if self._whole:
            return self._taken_now(self._whole.popleft())
        now = self._clock()
        if now - self._looked_at < _SECONDS_BETWEEN_LOOKS:
            return NOT_YET
        # In this order no file is missed that was there before the end was.
        ended = os.path.lexists(os.path.join(self._folder, END_OF_INPUT))
        names = sorted(filter(self._is_new, os.listdir(self._folder)), key=natural_key)
        self._require_settled()
        if not names:
            self._looked_at = now
            silent = self._end_after is not None and now - self._news_at >= self._end_after
            return None if ended or silent else NOT_YET
        self._settled = None
        self._whole.extend(names if ended else names[:-1])
        if self._whole:
            return self._taken_now(self._whole.popleft())
        path = os.path.join(self._folder, names[0])
        try:
            status = os.stat(path)
        except FileNotFoundError:  # renamed or removed since it was listed
            return NOT_YET
        file = TakenFile(names[0], status.st_size)
        if self._seen != (seen := (file.name, file.num_bytes, status.st_mtime_ns)):
            self._seen, self._seen_at, self._news_at = seen, now, now
        elif now - self._seen_at >= self._settle:
            self._log(f"{path}: taken, its size has not changed for {now - self._seen_at:.0f} s")
            self._settled = file
            return file
        self._looked_at = now
        return NOT_YET

    def _taken_now(self, name: str) -> TakenFile | NotYet:
        try:
            return TakenFile(name, os.stat(os.path.join(self._folder, name)).st_size)
        except FileNotFoundError:  # renamed or removed since it was listed
            return NOT_YET

    def _require_settled(self) -> None:
        """FormatError where a file that was taken for its age has grown since; it may be gone, it was read."""
        if self._settled is not None and os.path.exists(path := os.path.join(self._folder, self._settled.name)):
            self._require_same_size(path, self._settled)

    def _is_new(self, name: str) -> bool:
        if name in self._names or name.startswith((".", "_")) or name.endswith(_BEING_WRITTEN):
            return False
        try:
            return stat.S_ISREG(os.stat(os.path.join(self._folder, name)).st_mode)
        except OSError:
            return False

    def _pieces(self, file: TakenFile) -> PiecesOfAFile:
        path = os.path.join(self._folder, file.name)
        self._require_same_size(path, file)
        yield from iter_pieces(expand_inputs([path]), piece_nbytes=self._piece_nbytes)
        self._require_same_size(path, file)

    def _require_same_size(self, path: str, file: TakenFile) -> None:
        """A file that grows after it was taken was not whole; what was added would be lost without a word."""
        found = os.stat(path).st_size if os.path.exists(path) else None
        if found != file.num_bytes:
            shown = "is not there any more" if found is None else f"has {found:,} bytes"
            raise FormatError(
                f"{path}: had {file.num_bytes:,} bytes when it was taken, and {shown}; restore it and start again."
                f" Write input under a name that begins with '.' or '_' and rename it when it is whole, or raise"
                f" --settle"
            )
