"""An object as an array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.storage.remote.store import ObjectStore

__all__ = ["RemoteArray"]


class RemoteArray:
    """An array in an object: every slice is one request, and a fresh copy.

    Slices are of the object that was there when the array was made, or an error: see ``ObjectStore.read``.

    Args:
        store: that holds the object.
        key: of the object.
        dtype: of its items, which begin at its first byte.
        count: how many items there are.
        etag: of the object.
    """

    def __init__(self, store: ObjectStore, key: str, dtype: np.dtype[Any], count: int, etag: str) -> None:
        self._store, self._key, self._etag = store, key, etag
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
        raw = self._store.fetch(self._key, start * size, (stop - start) * size, etag=self._etag)
        out = np.frombuffer(raw, self.dtype)
        if not out.flags.aligned:
            out = out.copy()
        out.flags.writeable = False
        return out

    def confirm(self) -> None:
        """FormatError unless all that was fetched so far is of the object that the etag names."""
        self._store.confirm(self._key, self._etag)
