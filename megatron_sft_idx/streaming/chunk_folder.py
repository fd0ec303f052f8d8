"""Chunks that somebody is writing, line by line and without a rename at the end: which of them are whole.

A chunk is whole when a later chunk or the declared end is there, as its producer then is done with it; half a line at
its end is an error then. The newest chunk has neither. It is taken as whole when it has not changed for a while and
ends with a line, which is said, as a producer that paused for longer would be mistaken for one that is done. Its size
is then held against what it was until it has a successor, so such a mistake is an error and no loss.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.jsonl_chunks import chunk_name, chunk_numbers, ends_whole
from megatron_sft_idx.storage import require_local

__all__ = ["ChunkFolder"]


@dataclass(slots=True)
class _Look:
    """What a chunk without a successor was like, and since when, on this process's own clock."""

    nbytes: int
    mtime_ns: int
    since: float
    settled: bool = False


class ChunkFolder:
    """A folder of chunks, looked at by one process.

    Args:
        path: the folder.
        settle_seconds: the newest chunk is whole when it has not changed for so long.
        log: takes the line that says so.
    """

    def __init__(self, path: str, *, settle_seconds: float, log: Callable[[str], None]) -> None:
        require_local(path, "a folder of chunks", "keep it where who writes them and trainers share a file system")
        self.path, self.settle_seconds, self._log = path, settle_seconds, log
        self._looks: dict[int, _Look] = {}

    def path_of(self, number: int) -> str:
        """The file of a chunk."""
        return os.path.join(self.path, chunk_name(number))

    def newest(self) -> int | None:
        """Number of the newest chunk; None where there is none."""
        try:
            return max(chunk_numbers(self.path), default=None)
        except FileNotFoundError:
            return None  # its producer makes it

    def is_whole(self, number: int, end: int | None) -> bool:
        """Whether a chunk is there and its producer is done with it.

        Args:
            number: of the chunk; below the end where that is known.
            end: how many chunks there are in all; None while that is not known.

        Raises:
            FormatError: the chunk is missing though later ones are there, or ends in the middle of a line.
        """
        path = self.path_of(number)
        # The successor first: whatever is seen of the chunk after that is final.
        followed = end is not None or self._is_followed(number)
        try:
            status = os.stat(path)
        except FileNotFoundError:
            if followed:
                raise FormatError(self._missing(number)) from None
            return False
        if not followed:
            return self._is_settled(number, status)
        if not ends_whole(path):
            raise FormatError(
                f"{path}: its last line ends in the middle though"
                f" {'the end is declared' if end is not None else 'a later chunk is there'}: torn, as when its producer"
                " died; write the chunk again, or remove the half line"
            )
        return True

    def require_unchanged(self) -> None:
        """FormatError where a chunk that was taken as whole has grown since."""
        for number, look in list(self._looks.items()):
            if not look.settled:
                continue
            followed = self._is_followed(number)
            try:
                now = os.stat(self.path_of(number)).st_size
            except FileNotFoundError:
                now, followed = look.nbytes, True  # consumed, and freed
            if now != look.nbytes:
                raise FormatError(
                    f"{self.path_of(number)}: it has {now:,} bytes and had {look.nbytes:,} when it was taken as whole,"
                    f" having not changed for {self.settle_seconds:g} s; its producer pauses longer: raise --settle,"
                    " and go on from a checkpoint that does not include it"
                )
            if followed:
                del self._looks[number]

    def describe(self, number: int) -> str:
        """Why a chunk is waited for, as a clause."""
        path, name = self.path_of(number), chunk_name(number)
        if (look := self._looks.get(number)) is not None:
            age = time.monotonic() - look.since
            if look.nbytes and not ends_whole(path):
                return f"{name} ends in the middle of a line, and has not changed for {age:.0f} s"
            return f"{name} is there, {look.nbytes:,} bytes, and has not changed for {age:.0f} s"
        newest = self.newest()
        there = "no chunk is there" if newest is None else f"the newest one is {chunk_name(newest)}"
        return f"{name} is not there, {there}"

    def _is_followed(self, number: int) -> bool:
        if os.path.exists(self.path_of(number + 1)):
            return True
        newest = self.newest()  # the next one may have been consumed by another rank, and freed
        return newest is not None and newest > number

    def _missing(self, number: int) -> str:
        return (
            f"{self.path_of(number)}: missing, and later chunks are there or the end is declared; it was freed or"
            " removed: put it back, or start where it was consumed already, from the checkpoint that includes it"
        )

    def _is_settled(self, number: int, status: os.stat_result) -> bool:
        """Whether the newest chunk has not changed for long enough, and ends with a line."""
        now, look = time.monotonic(), self._looks.get(number)
        if look is None or (look.nbytes, look.mtime_ns) != (status.st_size, status.st_mtime_ns):
            look = self._looks[number] = _Look(status.st_size, status.st_mtime_ns, now)
        # A producer that has written nothing yet has not ended a line either.
        if now - look.since < self.settle_seconds or not look.nbytes or not ends_whole(self.path_of(number)):
            return False
        if not look.settled:
            look.settled = True
            self._log(
                f"{chunk_name(number)} is taken as whole: it ends with a line and has not changed for"
                f" {self.settle_seconds:g} s"
            )
        return True
