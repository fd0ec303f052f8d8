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
        size = self.dtype.itemsize
        raw = self._store.read(self._key, start * size, max(stop - start, 0) * size, etag=self._etag)
        out = np.frombuffer(raw, self.dtype)
        if not out.flags.aligned:
            out = out.copy()
        out.flags.writeable = False
        return out
