"""Read a shard's files once, in order and in bounded memory, and walk all their packs.

Files are read into buffers, from a disk or an object store, and never mapped. A map would kill the process if the file
shrinks, and the pages of a map look like memory use that grows with the shard.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.storage import as_bytes, is_remote, name_in_errors
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.progress import Advance
from megatron_sft_idx.storage.remote import ObjectInfo, RemoteStore, open_store
from megatron_sft_idx.storage.remote.store import read_ahead

# Maximum number of packs whose offsets are in memory at once.
RUN_PACKS = 1 << 15
# Size of the chunks that are hashed and checked: small enough to stay in the CPU cache in between.
_CHUNK_NBYTES = 1 << 20
_CHUNK_SEQUENCES = 1 << 15
# Size of one request for an object that is read in order. The next few requests run in parallel.
_FETCH_NBYTES = 4 << 20


# ---- reading ----


class Meter:
    """Calls ``advance`` with the bytes that threads read, one call at a time, and can stop all of them."""

    def __init__(self, advance: Advance = lambda nbytes: None) -> None:
        self._advance, self._stopped, self._lock = advance, False, Lock()

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` more. CancelledError after ``stop``: the thread must stop reading."""
        with self._lock:
            if self._stopped:
                raise CancelledError
            self._advance(nbytes)

    def stop(self) -> None:
        """Make the next ``add`` of every thread raise an error."""
        self._stopped = True


class CheckedFile:
    """A file of a shard on a disk or in an object store, open for reading.

    Attributes:
        path: path or URL.
        nbytes: its size when it was opened.
        close: function that closes it.

    Raises:
        FileNotFoundError: the path does not exist, or is not a regular file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.close: Callable[[], None]
        self._object: tuple[RemoteStore, ObjectInfo] | None
        if is_remote(path):
            store, key = open_store(path)
            info = store.head(key)
            if info is None:
                raise FileNotFoundError(0, "no such object", path)
            self._object = store, info
            self.nbytes = info.nbytes
            self.close = lambda: None
            return
        self._object = None
        # O_NONBLOCK: opening a FIFO would wait for its other end.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self.close = partial(os.close, self._fd)
        status = os.fstat(self._fd)
        self.nbytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise FileNotFoundError(0, "not a regular file", path)

    def read_into(self, out: NDArray[Any], offset: int) -> int:
        """Fill an array from byte ``offset`` of the file on. Return the number of complete items read."""
        view = as_bytes(out)
        num_read = 0
        if self._object:
            store, info = self._object
            num_read = max(min(len(view), self.nbytes - offset), 0)
            view[:num_read] = store.read(info.key, offset, num_read, etag=info.etag) if num_read else b""
            return num_read // out.itemsize
        with name_in_errors(self.path):
            while num_read < len(view) and (count := os.preadv(self._fd, [view[num_read:]], offset + num_read)):
                num_read += count
        return num_read // out.itemsize

    def array(self, dtype: Any, offset: int, count: int) -> NDArray[Any]:
        """Return up to ``count`` items from byte ``offset`` on, or fewer if the file ends before."""
        # A damaged header may ask for more items than the file has, or for items before its beginning.
        count = max(min(count, (self.nbytes - offset) // np.dtype(dtype).itemsize), 0) if offset >= 0 else 0
        out = np.empty(count, dtype)
        return out[: self.read_into(out, offset)]

    def fetched(self, offset: int) -> Iterator[bytes | memoryview] | None:
        """Yield the bytes of an object from byte ``offset`` on, with read-ahead; None for a file."""
        return self._object and read_ahead(*self._object, offset=offset, range_nbytes=_FETCH_NBYTES)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return up to ``nbytes`` bytes from byte ``offset`` on, or fewer if the file ends before."""
        return self.array(np.uint8, offset, nbytes).tobytes()


class Stream:
    """A file that is read once, in order, from byte ``begin`` on. Each chunk is hashed before it is returned.

    ``position`` is the end of the bytes returned so far. ``meter`` counts all bytes.
    """

    def __init__(self, file: CheckedFile, meter: Meter, begin: int = 0) -> None:
        self.file, self.begin, self.position, self._meter = file, begin, begin, meter
        self._buffer = np.empty(_CHUNK_NBYTES, np.uint8)
        self._hash = StreamHash()
        # For an object: the blocks being fetched, and the rest of the most recent one.
        self._fetched = file.fetched(begin)
        self._block = memoryview(b"")

    def chunks(self, dtype: Any, count: int | None = None) -> Iterator[NDArray[Any]]:
        """Yield the next ``count`` items, or all remaining ones; fewer if the file ends before.

        All chunks share one buffer, so each is overwritten when the next one is requested.
        """
        dtype = np.dtype(dtype)
        buffer = self._buffer[: len(self._buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
        remaining = (self.file.nbytes - self.position) // dtype.itemsize
        remaining = remaining if count is None else min(remaining, count)
        while remaining > 0 and len(chunk := self._fill(buffer[:remaining])):
            yield chunk
            remaining -= len(chunk)

    def take(self, dtype: Any, count: int) -> NDArray[Any]:
        """Return the next ``count`` items in a new array, or fewer if the file ends before."""
        remaining = max((self.file.nbytes - self.position) // np.dtype(dtype).itemsize, 0)
        return self._fill(np.empty(max(min(count, remaining), 0), dtype))

    def _fill(self, out: NDArray[Any]) -> NDArray[Any]:
        count = self.file.read_into(out, self.position) if self._fetched is None else self._take_fetched(out)
        out = out[:count]
        self._hash.update(out)
        self._meter.add(out.nbytes)
        self.position += out.nbytes
        return out

    def _take_fetched(self, out: NDArray[Any]) -> int:
        """Fill an array from the blocks of an object. Return the number of complete items read."""
        assert self._fetched is not None
        view, num_taken = as_bytes(out), 0
        while num_taken < len(view):
            if not len(self._block):
                if (block := next(self._fetched, None)) is None:
                    break
                self._block = memoryview(block)
            part = self._block[: len(view) - num_taken]
            view[num_taken : num_taken + len(part)] = part
            self._block = self._block[len(part) :]
            num_taken += len(part)
        return num_taken // out.itemsize

    def finish(self) -> bytes:
        """Read the rest, and return the xxh3_128 of all bytes from ``begin`` to the end, in the form of headers."""
        for _ in self.chunks(np.uint8):
            pass
        return self._hash.checksum()


# ---- the walk ----


class OffsetRun(NamedTuple):
    """Offsets of a run of ``packs`` packs: int64 [packs + 1] of each kind, or one more if packs follow.

    The additional one is the end of the next pack. It shows which of two neighbours has the wrong offset between them.
    """

    token_offsets: NDArray[np.int64]
    sequence_offsets: NDArray[np.int64]
    packs: int


def walk_packs(
    walk: _native.PackWalk, runs: Iterable[OffsetRun], starts: Stream | None, masks: Stream | None, mask_dtype: Any
) -> None:
    """Check all packs, given in order, against rules O1, O2 and P1 to P7; ``walk`` collects the violations.

    ``starts`` and ``masks`` are ``.seq.bin`` and ``.loss.bin`` from their beginnings. Without ``starts``, only the
    lengths of packs are checked. Without ``masks``, masks are not checked.
    """
    itemsize = np.dtype(mask_dtype).itemsize
    for run in runs:
        walk.packs(*run)
        while starts and (num_starts := walk.wanted_sequences - walk.next_sequence) > 0:
            chunk = starts.take("<u4", min(num_starts, _CHUNK_SEQUENCES))
            if not len(chunk):
                break  # the file ends early, which is reported as a wrong size
            walk.starts(chunk)
            if masks:  # for the tokens of the sequences that these starts end
                for mask in masks.chunks(mask_dtype, walk.known - masks.position // itemsize):
                    walk.mask(mask)
    for mask in masks.chunks(mask_dtype) if masks else ():
        walk.mask(mask)
