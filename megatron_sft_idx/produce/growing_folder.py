"""A folder whose files are the input of a producer, in the order of their names, each as soon as it is complete.

The writer of the files need not mark complete files. A file is complete when a later file or the end of the input
exists, or when it has not changed for a while (``live.Settling``). If a file was taken for this last reason although
its writer had only paused, its growth is an error.
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

    A file is taken when another one follows it by name, when ``_END`` exists, or when it has not changed for ``settle``
    seconds. In the last case, it must keep its size until another file or the end exists. Files whose names begin with
    ``.`` or ``_`` or end in ``.tmp``, ``.part`` or ``.partial`` count as unfinished. Subfolders are ignored.

    Args:
        folder: the folder to watch.
        piece_nbytes: see ``iter_pieces``.
        taken: the files taken so far, including by earlier jobs; those taken by this job are added.
        settle: number of seconds without a change after which a file counts as complete.
        end_after: number of seconds to wait for anything new; None waits only for ``_END``.
        log: called with messages for the user.
        clock: seconds since any fixed time.

    Raises:
        FormatError: the folder does not exist.
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
            raise FormatError(
                f"{folder}: the folder to watch does not exist; create it, or pass the folder where input appears"
            )
        self._folder, self._piece_nbytes, self._taken = folder, piece_nbytes, taken
        self._end_after, self._log, self._clock = end_after, log, clock
        self._names = {file.name for file in taken.files}
        # Names of complete files from the last listing, in order. Listing takes long for very many files.
        self._whole: deque[str] = deque()
        # The last file, if it was taken because of its age; unknown for an earlier job.
        self._settled = taken.files[-1] if taken.files else None
        # The last file of the folder, if it is not taken; how long the same file has been requested, by its number; and
        # the time of the last listing.
        self._last, self._asked, self._looked_at = Settling(settle, clock), Unchanged(clock), float("-inf")

    def files(self, first: int) -> Files:
        """Yield for each file its pieces, from the file ``first`` on, counted from 0."""
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
            # If the list was lost, files before the first one are taken again.
            self._names.add(file.name)
            self._taken.add(file)

    # ---- which file is next ----

    def _next_file(self, number: int) -> TakenFile | NotYet | None:
        """Return the next complete file, requested by its number; None at the end of the input."""
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
        """Return the names of files that are not taken, in order, and whether the end exists."""
        # Check for the end first, so that no file is missed that existed before it.
        ended = os.path.lexists(os.path.join(self._folder, _END_OF_INPUT))
        names = filter(self._is_new, patiently(self._folder, lambda: os.listdir(self._folder)))
        in_order = sorted(names, key=natural_key)
        # A file that was taken because of its age may have been removed since, but it must not have grown.
        if self._settled is not None and status_of(os.path.join(self._folder, self._settled.name)) is not None:
            self._require_same_size(self._settled)
        return in_order, ended

    def _last_file(self, name: str) -> TakenFile | NotYet:
        """Return the last file if its age shows that it is complete."""
        path = os.path.join(self._folder, name)
        status = status_of(path)
        # It may have been renamed or removed after it was listed.
        if status is None or not self._last.is_whole(name, status):
            return NOT_YET
        self._log(f"{path}: taken as complete, because its size has not changed for {self._last.seconds():.0f} s")
        self._settled = TakenFile(name, status.st_size)
        return self._settled

    def _is_new(self, name: str) -> bool:
        if name in self._names or name.startswith((".", "_")) or name.endswith(_BEING_WRITTEN):
            return False
        # Skipping a file because of one failed check would change the order of files.
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
        """Return the path of a taken file. FormatError: its size has changed, because more was written to it."""
        path = os.path.join(self._folder, file.name)
        nbytes = None if (status := status_of(path)) is None else status.st_size
        if nbytes != file.num_bytes:
            shown = "no longer exists" if nbytes is None else f"now has {nbytes:,} bytes"
            raise FormatError(
                f"{path}: had {file.num_bytes:,} bytes when it was read, and {shown}; restore it and start again."
                " Write each input file under a name that begins with '.' or '_' and rename it when it is complete,"
                " or raise --settle"
            )
        return path
