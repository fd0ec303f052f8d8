"""Objects, read as files are: in windows, the next one on its way while one is checked."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from numpy.typing import NDArray

from megatron_sft_idx.storage import as_bytes
from megatron_sft_idx.storage.remote import open_store
from megatron_sft_idx.storage.remote.store import threads
from megatron_sft_idx.verify.files import CheckedFile

__all__ = ["RemoteFile"]

_WINDOW_NBYTES = 4 << 20
# The walk over the packs reads one file at two places; each has a window, and the one after it.
_WINDOWS = 4
# Reads up to this size that no window covers are corners, not a walk.
_SMALL_NBYTES = 64 << 10


class RemoteFile(CheckedFile):
    """One object of a shard; it is the same object for as long as it is read, or an error.

    Raises:
        FileNotFoundError: no such object.
        StorageError: the store does not answer, or not to these credentials.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.shrunk = None
        self._store, self._key = open_store(path)
        found = self._store.head(self._key)
        if found is None:
            raise FileNotFoundError(0, "no such object", path)
        self.nbytes, self._etag = found.nbytes, found.etag
        self._windows: dict[int, Future[bytes | memoryview]] = {}

    def close(self) -> None:
        """Let go what was read ahead; may be called twice."""
        for window in self._windows.values():
            window.cancel()
        self._windows = {}

    def read_into(self, out: NDArray[Any], offset: int) -> int:
        """Fill an array from a position in bytes on; how many whole items there were."""
        view = as_bytes(out)
        left = view[: max(self.nbytes - offset, 0)]
        wanted = len(left)
        while left:
            number, begin = divmod(offset, _WINDOW_NBYTES)
            if len(left) <= _SMALL_NBYTES and number not in self._windows:
                left[:] = self._read(offset, len(left))
                break
            piece = memoryview(self._window(number))[begin : begin + len(left)]
            left[: len(piece)] = piece
            left, offset = left[len(piece) :], offset + len(piece)
        return wanted // out.itemsize

    def _window(self, number: int) -> bytes | memoryview:
        for ahead in (number, number + 1):
            # Taken out and put in again, so that those used last are kept.
            window = self._windows.pop(ahead, None)
            begin = ahead * _WINDOW_NBYTES
            if window is None and begin < self.nbytes:
                window = threads().submit(self._read, begin, min(_WINDOW_NBYTES, self.nbytes - begin))
            if window is not None:
                self._windows[ahead] = window
        while len(self._windows) > _WINDOWS:
            del self._windows[next(iter(self._windows))]
        return self._windows[number].result()

    def _read(self, offset: int, nbytes: int) -> bytes | memoryview:
        return self._store.read(self._key, offset, nbytes, etag=self._etag)
