"""Objects as arrays, and as files that are read from front to back with requests ahead of the reader, or anywhere."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.storage.remote.store import ObjectInfo, RemoteStore, threads

__all__ = ["ObjectFile", "RemoteArray", "read_ahead"]


class RemoteArray:
    """An array in an object: every slice is one request, and a fresh copy.

    Slices are of the object that was there when the array was made, or an error: see ``RemoteStore.read``.

    Args:
        store: that holds the object.
        key: of the object.
        dtype: of its items.
        count: how many items there are.
        etag: of the object.
        offset: where the first item begins, in bytes.
    """

    def __init__(
        self, store: RemoteStore, key: str, dtype: np.dtype[Any], count: int, etag: str, *, offset: int = 0
    ) -> None:
        self._store, self._key, self._etag, self._offset = store, key, etag, offset
        self.dtype, self._count = dtype, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, _ = index.indices(self._count)
        found = self.fetch(start, max(start, stop))
        self.confirm()
        return found

    def fetch(self, start: int, stop: int) -> NDArray[Any]:
        """Items from ``start`` on and before ``stop``, which are only known to be right after ``confirm``."""
        size = self.dtype.itemsize
        raw = self._store.fetch(self._key, self._offset + start * size, (stop - start) * size, etag=self._etag)
        out = np.frombuffer(raw, self.dtype)
        if not out.flags.aligned:
            out = out.copy()
        out.flags.writeable = False
        return out

    def confirm(self) -> None:
        """FormatError unless all that was fetched so far is of the object that the etag names."""
        self._store.confirm(self._key, self._etag)


_RANGE_NBYTES = 8 << 20
_RANGES_AHEAD = 4


def read_ahead(
    store: RemoteStore,
    info: ObjectInfo,
    *,
    offset: int = 0,
    range_nbytes: int = _RANGE_NBYTES,
    ahead: int = _RANGES_AHEAD,
) -> Generator[bytes | memoryview, None, None]:
    """The bytes of an object from ``offset`` on, in order; ``ahead`` ranges are being fetched at any time.

    Raises:
        FormatError: the object is no longer the one that ``info`` tells of.
        StorageError: the store cannot be read.
    """
    offsets = iter(range(offset, info.nbytes, range_nbytes))
    fetched: deque[Future[bytes | memoryview]] = deque()

    def fetch_next() -> None:
        if (begin := next(offsets, None)) is not None:
            nbytes = min(range_nbytes, info.nbytes - begin)
            fetched.append(threads().submit(store.read, info.key, begin, nbytes, etag=info.etag))

    try:
        for _ in range(ahead):
            fetch_next()
        while fetched:
            block = fetched.popleft().result()
            fetch_next()
            yield block
    finally:
        for future in fetched:
            future.cancel()


class ObjectFile(io.RawIOBase):
    """An object as a file that can be sought in; each read is one request, so wrap it in ``io.BufferedReader``.

    Args:
        store: where it lies.
        info: the object; reading another one under its name is an error.
    """

    def __init__(self, store: RemoteStore, info: ObjectInfo) -> None:
        self._store, self._info = store, info
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes before the next one that is read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a position, which may lie behind the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._info.nbytes}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, or as much of it as the object reaches."""
        view = memoryview(buffer).cast("B")
        nbytes = max(0, min(len(view), self._info.nbytes - self._position))
        if nbytes:
            view[:nbytes] = self._store.read(self._info.key, self._position, nbytes, etag=self._info.etag)
        self._position += nbytes
        return nbytes
