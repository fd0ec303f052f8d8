"""Files read with pread into buffers of our own.

A map would kill the process where a file shrinks, and its pages would look like memory that grows with the shard.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from threading import Lock
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.storage import as_bytes
from megatron_sft_idx.storage.hashing import StreamHash

__all__ = ["CheckedFile", "Meter", "Stream"]

# Small enough to stay in the processor's cache between the checksum and the check.
_CHUNK_NBYTES = 1 << 20


class Meter:
    """Bytes read so far, told to a callback. Threads may share one.

    Args:
        total: bytes to read in all.
        on_progress: called with bytes read so far and in all, in whichever thread read the last ones.
    """

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self._total, self._on_progress = total, on_progress
        self._done, self._stopped, self._lock = 0, False, Lock()

    def add(self, nbytes: int) -> None:
        """``nbytes`` more are read.

        Raises:
            CancelledError: there is to be no more reading.
        """
        with self._lock:
            if self._stopped:
                raise CancelledError
            self._done += nbytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)

    def stop(self) -> None:
        """Let every thread end where it is."""
        self._stopped = True


class CheckedFile:
    """One file of a shard, open for reading.

    Attributes:
        path: of the file.
        nbytes: its size when it was opened.
        shrunk: where it ended, if that was before ``nbytes`` and before what was asked of it.

    Raises:
        FileNotFoundError: nothing is there, or something that is no regular file.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.shrunk: int | None = None
        # Not to wait for the other end where somebody has put a pipe there.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        self.nbytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise FileNotFoundError(0, "not a regular file", path)

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close; may be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def read_into(self, out: NDArray[Any], offset: int) -> int:
        """Fill an array from a position in bytes on; how many whole items there were."""
        view, done = as_bytes(out), 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror} at byte {offset + done}", self.path) from error
            if not got:
                if offset + done < self.nbytes:
                    self.shrunk = offset + done
                break
            done += got
        return done // out.itemsize

    def array(self, dtype: Any, offset: int, count: int) -> NDArray[Any]:
        """Items from a position in bytes on, as many as there are of ``count``."""
        # What a file says of itself is never what gets allocated.
        # Counts of zero beside others that are not put the last item before the file.
        count = max(min(count, (self.nbytes - offset) // np.dtype(dtype).itemsize), 0) if offset >= 0 else 0
        out = np.empty(count, dtype)
        return out[: self.read_into(out, offset)]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes from a position on, as many as there are."""
        return self.array(np.uint8, offset, nbytes).tobytes()


class Stream:
    """A file read once in order: hashed and handed out while it is in the processor's cache.

    Args:
        file: the file.
        meter: told of every byte.
        begin: first byte.

    Attributes:
        position: one past the last byte handed out.
    """

    def __init__(self, file: CheckedFile, meter: Meter, begin: int = 0) -> None:
        self.file, self._meter, self.position = file, meter, begin
        self._buffer = np.empty(_CHUNK_NBYTES, np.uint8)
        self._hash = StreamHash()

    def pieces(self, dtype: Any, count: int | None = None) -> Iterator[NDArray[Any]]:
        """The next items, all that are left or this many, as far as the file has them.

        A piece is good until the next one is asked for.
        """
        dtype = np.dtype(dtype)
        buffer = self._buffer[: len(self._buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
        left = (self.file.nbytes - self.position) // dtype.itemsize
        left = left if count is None else min(left, count)
        while left > 0 and len(piece := self._fill(buffer[:left])):
            yield piece
            left -= len(piece)

    def take(self, dtype: Any, count: int) -> NDArray[Any]:
        """The next items in an array of their own, as many as there are of ``count``."""
        left = max((self.file.nbytes - self.position) // np.dtype(dtype).itemsize, 0)
        return self._fill(np.empty(max(min(count, left), 0), dtype))

    def _fill(self, out: NDArray[Any]) -> NDArray[Any]:
        out = out[: self.file.read_into(out, self.position)]
        self._hash.update(out)
        self._meter.add(out.nbytes)
        self.position += out.nbytes
        return out

    def finish(self) -> bytes:
        """xxh3_128 of all bytes, as it is stored, those included that nobody asked for."""
        for _ in self.pieces(np.uint8):
            pass
        return self._hash.checksum()
