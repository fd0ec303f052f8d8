"""One chunk that its producer is done with: its lines by number, and what each of them is called in an error."""

from __future__ import annotations

import os

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.jsonl_chunks.chunks import line_bounds, read_line
from megatron_sft_idx.storage import open_regular

__all__ = ["ChunkFile"]


class ChunkFile:
    """An open chunk. Opening reads it once to find its lines; 16 bytes a line are kept of them.

    Args:
        path: the chunk.

    Raises:
        FormatError: its last line is half a line, or it changed while it was read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open_regular(path) as file:
            self._fd = os.dup(file.fileno())
        self._nbytes = os.fstat(self._fd).st_size
        self._starts, self._stops = line_bounds(path)
        self._require_unchanged()

    def __len__(self) -> int:
        return len(self._starts)

    def line(self, index: int) -> bytes:
        """Line ``index``, blank ones not counted.

        Raises:
            FormatError: the chunk is not as long as when it was opened.
        """
        self._require_unchanged()
        return read_line(self._fd, self.path, int(self._starts[index]), int(self._stops[index]))

    def line_number(self, index: int) -> int:
        """What an editor calls line ``index``: from 1, blank ones counted. Reads all that is before it."""
        newlines, at, start = 0, 0, int(self._starts[index])
        while at < start:
            block = os.pread(self._fd, min(1 << 20, start - at), at)
            newlines, at = newlines + block.count(b"\n"), at + max(len(block), 1)
        return newlines + 1

    def _require_unchanged(self) -> None:
        if (now := os.fstat(self._fd).st_size) != self._nbytes:
            raise FormatError(
                f"{self.path}: it has {now:,} bytes and had {self._nbytes:,} when it was taken as whole; its producer"
                " was still writing it: give it more time to settle (--settle), and go on from the last checkpoint"
            )

    def __del__(self) -> None:
        # A constructor that failed has no descriptor to close.
        if (fd := self.__dict__.pop("_fd", None)) is not None:
            os.close(fd)
