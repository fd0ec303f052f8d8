"""A shard's files read once, in order and in bounded memory, and the walk over all packs that they hold.

Files are read into buffers of our own, from a disk or an object store. A map would kill the process where a file
shrinks, and its pages would look like memory that grows with the shard.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.storage import as_bytes, is_remote
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.progress import Advance
from megatron_sft_idx.storage.remote import open_store
from megatron_sft_idx.storage.remote.store import request_pool

# Packs whose offsets are held at once.
RUN_PACKS = 1 << 15
# Small enough to stay in the processor's cache between the checksum and the check.
_CHUNK_NBYTES = 1 << 20
_PIECE_SEQUENCES = 1 << 15
# Of an object: the walk reads one file at two places; each has a window, and the one after it.
_WINDOW_NBYTES, _WINDOWS = 4 << 20, 4
# Reads up to this size that no window covers are corners, not a walk.
_SMALL_NBYTES = 64 << 10


# ---- reading ----


class Meter:
    """Tells ``advance`` of bytes as they are read, in whichever thread; none reads on once it is stopped."""

    def __init__(self, advance: Advance = lambda nbytes: None) -> None:
        self._advance, self._stopped, self._lock = advance, False, Lock()

    def add(self, nbytes: int) -> None:
        """``nbytes`` more are read. CancelledError where there is to be no more reading."""
        with self._lock:
            if self._stopped:
                raise CancelledError
            self._advance(nbytes)

    def stop(self) -> None:
        """Let every thread end where it is."""
        self._stopped = True


class _Object:
    """One object, the same for as long as it is read, in windows: the next one is on its way while one is checked."""

    def __init__(self, path: str) -> None:
        self._store, self._key = open_store(path)
        found = self._store.head(self._key)
        if found is None:
            raise FileNotFoundError(0, "no such object", path)
        self.nbytes, self._etag = found.nbytes, found.etag
        self._windows: dict[int, Future[bytes | memoryview]] = {}

    def read_some(self, out: memoryview, offset: int) -> int:
        """Fill the beginning of a buffer, which is not empty; how many bytes, 0 at the object's end."""
        number, begin = divmod(offset, _WINDOW_NBYTES)
        count = max(min(len(out), self.nbytes - offset), 0)
        if count > _SMALL_NBYTES or number in self._windows:
            piece = memoryview(self._window(number))[begin : begin + count]
        else:
            piece = memoryview(self._read(offset, count) if count else b"")
        out[: len(piece)] = piece
        return len(piece)

    def _window(self, number: int) -> bytes | memoryview:
        for ahead in (number, number + 1):
            # Taken out and put in again, so that those used last are kept.
            window = self._windows.pop(ahead, None)
            begin = ahead * _WINDOW_NBYTES
            if window is None and begin < self.nbytes:
                window = request_pool().submit(self._read, begin, min(_WINDOW_NBYTES, self.nbytes - begin))
            if window is not None:
                self._windows[ahead] = window
        while len(self._windows) > _WINDOWS:
            del self._windows[next(iter(self._windows))]
        return self._windows[number].result()

    def _read(self, offset: int, nbytes: int) -> bytes | memoryview:
        return self._store.read(self._key, offset, nbytes, etag=self._etag)

    def close(self) -> None:
        for window in self._windows.values():
            window.cancel()


class CheckedFile:
    """One file of a shard or URL of an object, open for reading: ``nbytes`` is its size when it was opened.

    ``shrunk`` says where it ended, if that was before ``nbytes`` and before what was asked of it. FileNotFoundError
    where nothing is there, or no regular file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.shrunk: int | None = None
        self._object = _Object(path) if is_remote(path) else None
        if self._object:
            self.nbytes, self.close = self._object.nbytes, self._object.close
            return
        # Not to wait for the other end where somebody has put a pipe there.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status, self.close = os.fstat(self._fd), partial(os.close, self._fd)
        self.nbytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise FileNotFoundError(0, "not a regular file", path)

    def _read_some(self, out: memoryview, offset: int) -> int:
        if self._object:
            return self._object.read_some(out, offset)
        try:
            return os.preadv(self._fd, [out], offset)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} at byte {offset}", self.path) from error

    def read_into(self, out: NDArray[Any], offset: int) -> int:
        """Fill an array from a position in bytes on; how many whole items there were."""
        view, done = as_bytes(out), 0
        while done < len(view):
            got = self._read_some(view[done:], offset + done)
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

    ``meter`` is told of every byte from ``begin`` on; ``position`` is one past the last byte handed out.
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


# ---- the walk ----


class OffsetRun(NamedTuple):
    """Consecutive packs by their int64 offsets: ``packs`` + 1 of each kind, or one more where packs follow.

    The one more tells which of two neighbours is wrong.
    """

    token_offsets: NDArray[np.int64]
    sequence_offsets: NDArray[np.int64]
    packs: int


def walk_packs(
    walk: _native.PackWalk, runs: Iterable[OffsetRun], starts: Stream | None, masks: Stream | None, mask_dtype: Any
) -> None:
    """Hold all packs, given in order, against rules O1, O2 and P1 to P7, in step; the kernel keeps what it finds.

    ``starts`` and ``masks`` are ``.seq.bin`` and ``.loss.bin`` from their beginnings; without starts, which may be
    missing as masks may, the insides of packs are left alone.
    """
    itemsize = np.dtype(mask_dtype).itemsize
    for run in runs:
        walk.packs(*run)
        while starts and (wanted := walk.wanted_sequences - walk.next_sequence) > 0:
            piece = starts.take("<u4", min(wanted, _PIECE_SEQUENCES))
            if not len(piece):
                break  # the file ends here, which its size or its reader says
            walk.starts(piece)
            if masks:  # of all tokens that the starts make known
                for mask in masks.pieces(mask_dtype, walk.known - masks.position // itemsize):
                    walk.mask(mask)
    for mask in masks.pieces(mask_dtype) if masks else ():
        walk.mask(mask)
