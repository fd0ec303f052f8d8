"""Reading a shard's files once, in order and in bounded memory, and walking over all packs that they hold.

Files are read into buffers, from a disk or an object store, and never mapped: a map would kill the process if its file
shrinks, and the pages of a map look like memory that grows with the shard.
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
from megatron_sft_idx.storage.remote.transport import request_pool

# Packs whose offsets are held at once.
RUN_PACKS = 1 << 15
# What is hashed and checked at once: small enough to stay in the processor's cache in between.
_CHUNK_NBYTES = 1 << 20
_CHUNK_SEQUENCES = 1 << 15
# An object is fetched in buffers. ``.seq.idx`` is read at two places at once, and each needs its own and the next one.
_FETCH_NBYTES, _MAX_FETCHED = 4 << 20, 4
# A read up to this size outside the fetched buffers is a request of its own: such reads look at the ends of a file.
_SMALL_NBYTES = 64 << 10


# ---- reading ----


class Meter:
    """Calls ``advance`` with the bytes that threads read, one call at a time, and can stop all of them."""

    def __init__(self, advance: Advance = lambda nbytes: None) -> None:
        self._advance, self._stopped, self._lock = advance, False, Lock()

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` more. CancelledError after ``stop``: the thread must read no more."""
        with self._lock:
            if self._stopped:
                raise CancelledError
            self._advance(nbytes)

    def stop(self) -> None:
        """Let the next ``add`` of every thread raise."""
        self._stopped = True


class _FetchedObject:
    """An object in a store, read from buffers: the next buffer is being fetched while one is checked.

    FormatError from a read if the object was replaced since this was made.
    """

    def __init__(self, path: str) -> None:
        self._store, self._key = open_store(path)
        info = self._store.head(self._key)
        if info is None:
            raise FileNotFoundError(0, "no such object", path)
        self.nbytes, self._etag = info.nbytes, info.etag
        # By number, in the order of their last use.
        self._buffers: dict[int, Future[bytes | memoryview]] = {}

    def read_some(self, out: memoryview, offset: int) -> int:
        """Fill the beginning of ``out``, which may not be empty; return the number of bytes, 0 at the object's end."""
        number, begin = divmod(offset, _FETCH_NBYTES)
        count = max(min(len(out), self.nbytes - offset), 0)
        if count > _SMALL_NBYTES or number in self._buffers:
            data = memoryview(self._buffer(number))[begin : begin + count]
        else:
            data = memoryview(self._read(offset, count) if count else b"")
        out[: len(data)] = data
        return len(data)

    def _buffer(self, number: int) -> bytes | memoryview:
        for wanted in (number, number + 1):
            buffer = self._buffers.pop(wanted, None)
            begin = wanted * _FETCH_NBYTES
            if buffer is None and begin < self.nbytes:
                buffer = request_pool().submit(self._read, begin, min(_FETCH_NBYTES, self.nbytes - begin))
            if buffer is not None:
                self._buffers[wanted] = buffer
        while len(self._buffers) > _MAX_FETCHED:
            del self._buffers[next(iter(self._buffers))]
        return self._buffers[number].result()

    def _read(self, offset: int, nbytes: int) -> bytes | memoryview:
        return self._store.read(self._key, offset, nbytes, etag=self._etag)

    def close(self) -> None:
        for buffer in self._buffers.values():
            buffer.cancel()


class CheckedFile:
    """A file of a shard, or an object of one, that is open for reading.

    Attributes:
        path: path or URL.
        nbytes: its size when it was opened.
        shrunk: where it ended when it was read, in bytes, if that was before ``nbytes``; None as long as it was not.
        close: closes it.

    Raises:
        FileNotFoundError: nothing is at the path, or no regular file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.shrunk: int | None = None
        self._object = _FetchedObject(path) if is_remote(path) else None
        if self._object:
            self.nbytes, self.close = self._object.nbytes, self._object.close
            return
        # O_NONBLOCK: opening a FIFO would wait for its other end.
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
        """Fill an array from byte ``offset`` of the file on; return the number of whole items that the file has."""
        view, num_read = as_bytes(out), 0
        while num_read < len(view):
            count = self._read_some(view[num_read:], offset + num_read)
            if not count:
                if offset + num_read < self.nbytes:
                    self.shrunk = offset + num_read
                break
            num_read += count
        return num_read // out.itemsize

    def array(self, dtype: Any, offset: int, count: int) -> NDArray[Any]:
        """Up to ``count`` items from byte ``offset`` on, fewer if the file ends before."""
        # A damaged header may ask for more items than the file has, or for some before its beginning.
        count = max(min(count, (self.nbytes - offset) // np.dtype(dtype).itemsize), 0) if offset >= 0 else 0
        out = np.empty(count, dtype)
        return out[: self.read_into(out, offset)]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes from byte ``offset`` on, fewer if the file ends before."""
        return self.array(np.uint8, offset, nbytes).tobytes()


class Stream:
    """A file read once, in order, from byte ``begin`` on; each chunk is hashed before it is handed out.

    ``position`` is one past the last byte that was handed out. ``meter`` counts all bytes.
    """

    def __init__(self, file: CheckedFile, meter: Meter, begin: int = 0) -> None:
        self.file, self.begin, self.position, self._meter = file, begin, begin, meter
        self._buffer = np.empty(_CHUNK_NBYTES, np.uint8)
        self._hash = StreamHash()

    def chunks(self, dtype: Any, count: int | None = None) -> Iterator[NDArray[Any]]:
        """The next ``count`` items, or all that follow, fewer if the file ends before.

        All chunks are in one buffer: each is overwritten when the next one is asked for.
        """
        dtype = np.dtype(dtype)
        buffer = self._buffer[: len(self._buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
        remaining = (self.file.nbytes - self.position) // dtype.itemsize
        remaining = remaining if count is None else min(remaining, count)
        while remaining > 0 and len(chunk := self._fill(buffer[:remaining])):
            yield chunk
            remaining -= len(chunk)

    def take(self, dtype: Any, count: int) -> NDArray[Any]:
        """The next ``count`` items in an array of their own, fewer if the file ends before."""
        remaining = max((self.file.nbytes - self.position) // np.dtype(dtype).itemsize, 0)
        return self._fill(np.empty(max(min(count, remaining), 0), dtype))

    def _fill(self, out: NDArray[Any]) -> NDArray[Any]:
        out = out[: self.file.read_into(out, self.position)]
        self._hash.update(out)
        self._meter.add(out.nbytes)
        self.position += out.nbytes
        return out

    def finish(self) -> bytes:
        """Read what follows, and return the xxh3_128 of all bytes from ``begin`` to the end, as headers store it."""
        for _ in self.chunks(np.uint8):
            pass
        return self._hash.checksum()


# ---- the walk ----


class OffsetRun(NamedTuple):
    """A run of ``packs`` packs by their offsets: int64 [packs + 1] of each kind, or one more where packs follow.

    The one more is the end of the next pack; it tells which of two neighbours has the wrong offset between them.
    """

    token_offsets: NDArray[np.int64]
    sequence_offsets: NDArray[np.int64]
    packs: int


def walk_packs(
    walk: _native.PackWalk, runs: Iterable[OffsetRun], starts: Stream | None, masks: Stream | None, mask_dtype: Any
) -> None:
    """Hold all packs, given in order, to rules O1, O2 and P1 to P7; ``walk`` keeps the breaches.

    ``starts`` and ``masks`` are ``.seq.bin`` and ``.loss.bin`` from their beginnings. Only lengths of packs are checked
    without ``starts``, and no masks without ``masks``.
    """
    itemsize = np.dtype(mask_dtype).itemsize
    for run in runs:
        walk.packs(*run)
        while starts and (num_starts := walk.wanted_sequences - walk.next_sequence) > 0:
            chunk = starts.take("<u4", min(num_starts, _CHUNK_SEQUENCES))
            if not len(chunk):
                break  # the file ends early, which is a finding about its size
            walk.starts(chunk)
            if masks:  # of the tokens whose sequences these starts end
                for mask in masks.chunks(mask_dtype, walk.known - masks.position // itemsize):
                    walk.mask(mask)
    for mask in masks.chunks(mask_dtype) if masks else ():
        walk.mask(mask)
