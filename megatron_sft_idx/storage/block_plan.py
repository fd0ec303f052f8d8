"""Which blocks of files are used next, and which one is used last: what a cache reads ahead and gives up by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEVER", "UsePlan", "block_keys", "block_of", "file_of", "key_of"]

# After every use: a Python int, which compares fast.
NEVER = 1 << 62
# Blocks are named by one number, for numpy to sort them: the file above, the block in it below.
_FILE_SHIFT = 40


def key_of(file: int, block: int) -> int:
    """The name of a block of a file."""
    return file << _FILE_SHIFT | block


def file_of(key: int) -> int:
    """The file of a block."""
    return key >> _FILE_SHIFT


def block_of(key: int) -> int:
    """The number of a block in its file."""
    return key & (1 << _FILE_SHIFT) - 1


def block_keys(
    files: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64], block_nbytes: int
) -> NDArray[np.int64]:
    """The blocks that ranges of bytes ``[begin, end)`` of files touch, range by range in their order."""
    some = ends > begins
    first = begins[some] // block_nbytes
    counts = (ends[some] - 1) // block_nbytes - first + 1
    names = (files[some] << _FILE_SHIFT) + first
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    keys: NDArray[np.int64] = np.repeat(names, counts) + within
    return keys


class UsePlan:
    """Blocks in the order of their use.

    Args:
        keys: int64 [uses], the block of each use.

    Attributes:
        keys: as given, as a buffer of Python ints.
    """

    def __init__(self, keys: NDArray[np.int64]) -> None:
        self.array = keys
        self.keys = keys.data
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]
        again = np.full(len(keys), NEVER)
        same = self._sorted[1:] == self._sorted[:-1]
        again[self._order[:-1][same]] = self._order[1:][same]
        self._again = again.data

    def __len__(self) -> int:
        return len(self.array)

    def next_use(self, use: int) -> int:
        """The use of the same block after this one; NEVER where there is none."""
        return self._again[use]

    def first_uses(self, keys: Sequence[int]) -> list[int]:
        """The first use of each of some blocks; NEVER for one that has none."""
        if not len(self.array):
            return [NEVER] * len(keys)
        wanted = np.array(keys, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(self.array) - 1)
        uses: list[int] = np.where(self._sorted[at] == wanted, self._order[at], NEVER).tolist()
        return uses

    def first_use(self, key: int, since: int) -> int:
        """The first use of a block that is not before ``since``; NEVER where there is none."""
        first, last = np.searchsorted(self._sorted, [key, key + 1])
        uses = self._order[first:last]
        at = int(np.searchsorted(uses, since))
        return int(uses[at]) if at < len(uses) else NEVER
