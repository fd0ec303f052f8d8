"""A folder whose files are the input of a producer, in the order of their names, each as soon as it is whole.

Whoever writes the files need not say when one of them is whole: a later file says it, or the end of the input, or that
the file has not changed for a while (``live.Settling``). A file that was taken for this last reason, though its writer
had only paused, is an error as soon as it grows.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator

from megatron_sft_idx.chat.inputs import iter_pieces
from megatron_sft_idx.chat.types import Piece
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Settling, Unchanged, patiently, status_of
from megatron_sft_idx.produce.feed import Files
from megatron_sft_idx.produce.taken_files import TakenFile, TakenFiles
from megatron_sft_idx.shard.shard_set import natural_key
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.tokenize import NOT_YET, NotYet, row_files

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
            if number < len(self._taken.files):
                yield self._pieces(self._taken.files[number])
                number += 1
                continue
            file = self._next_file(number)
            if file is None:
                return
            if isinstance(file, NotYet):
                yield NOT_YET
                continue
            # Where the list was lost, files before the first one are taken again.
            self._names.add(file.name)
            self._taken.add(file)

    # ---- which file is next ----

    def _next_file(self, number: int) -> TakenFile | NotYet | None:
        """The next file that is whole, which is asked for by its number; None at the end of the input."""
        now, asked_for = self._clock(), self._asked.seconds(number)
        if not self._whole:
            if now - self._looked_at < _SECONDS_BETWEEN_LOOKS:
                return NOT_YET
            names, ended = self._look()
            if not names:
                self._looked_at = now
                silent = self._end_after is not None and min(asked_for, self._last.seconds()) >= self._end_after
                return None if ended or silent else NOT_YET
            self._settled = None
            self._whole.extend(names if ended else names[:-1])
            if not self._whole:
                file = self._last_file(names[0])
                if isinstance(file, NotYet):
                    self._looked_at = now
                return file
        name = self._whole.popleft()
        status = status_of(os.path.join(self._folder, name))
        return NOT_YET if status is None else TakenFile(name, status.st_size)

    def _look(self) -> tuple[list[str], bool]:
        """Names of the files that are not taken, in order, and whether the end is there."""
        # Look for the end first: then no file is missed that was there before it.
        ended = os.path.lexists(os.path.join(self._folder, _END_OF_INPUT))
        names = filter(self._is_new, patiently(self._folder, lambda: os.listdir(self._folder)))
        in_order = sorted(names, key=natural_key)
        # A file that was taken for its age may have been removed since, but it must not have grown.
        if self._settled is not None and status_of(os.path.join(self._folder, self._settled.name)) is not None:
            self._require_same_size(self._settled)
        return in_order, ended

    def _last_file(self, name: str) -> TakenFile | NotYet:
        """The file that no other one follows, where its age says that it is whole."""
        path = os.path.join(self._folder, name)
        status = status_of(path)
        # It may have been renamed or removed after it was listed.
        if status is None or not self._last.is_whole(name, status):
            return NOT_YET
        self._log(f"{path}: taken, its size has not changed for {self._last.seconds():.0f} s")
        self._settled = TakenFile(name, status.st_size)
        return self._settled

    def _is_new(self, name: str) -> bool:
        if name in self._names or name.startswith((".", "_")) or name.endswith(_BEING_WRITTEN):
            return False
        # To pass over a file for one bad look would be to take files in another order.
        try:
            status = status_of(os.path.join(self._folder, name))
        except OSError:
            return False
        return status is not None and stat.S_ISREG(status.st_mode)

    # ---- files that were taken ----

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
