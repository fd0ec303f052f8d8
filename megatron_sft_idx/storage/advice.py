"""What the kernel is told of coming reads, and what it holds of a file.

Advice changes what is in memory, never what is read. A map takes ``madvise``, a descriptor ``posix_fadvise``; dropping
takes both, as the kernel keeps a page in its cache while somebody has it mapped, and keeps it in the cache when it is
only unmapped.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.storage.block_cache import CachedArray
from megatron_sft_idx.storage.local import Array, PreadArray
from megatron_sft_idx.storage.options import Advice
from megatron_sft_idx.storage.reopened import ReopenedArray

__all__ = ["Runs", "advise_order", "announce", "drop_cached", "drop_file", "drop_pages", "map_of"]

_MADVISE = {"normal": mmap.MADV_NORMAL, "sequential": mmap.MADV_SEQUENTIAL, "random": mmap.MADV_RANDOM}
_FADVISE = {
    "normal": os.POSIX_FADV_NORMAL,
    "sequential": os.POSIX_FADV_SEQUENTIAL,
    "random": os.POSIX_FADV_RANDOM,
}


class Runs(NamedTuple):
    """Items that lie together, in some of several arrays.

    Attributes:
        arrays: the arrays.
        slots: int [runs], which of them each run lies in.
        starts: int64 [runs], its first item there.
        counts: int64 [runs], its items.
    """

    arrays: Sequence[Array]
    slots: NDArray[Any]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]


def map_of(array: Array) -> mmap.mmap | None:
    """The memory map that an array is a view of; None for any other."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) else None


def advise_order(array: Array, advice: Advice) -> None:
    """Tell the kernel in which order a map, or an open file, will be read; a file that is opened each time forgets."""
    if isinstance(array, PreadArray):
        array.advise(_FADVISE[advice])
    elif (mapped := map_of(array)) is not None:
        mapped.madvise(_MADVISE[advice])


def announce(runs: Runs, *, more: bool = False) -> None:
    """Have runs read in the background, in this order where a cache reads them; returns at once.

    Args:
        runs: of maps, files or cached arrays; nothing happens to any other.
        more: a cache goes on with them after what it was told before, rather than instead.
    """
    for slot, array in enumerate(runs.arrays):
        if isinstance(array, np.ndarray | PreadArray):
            mine = runs.slots == slot
            _will_need(array, runs.starts[mine], runs.counts[mine])
    _announce_reopened(runs)
    _announce_cached(runs, more)


def _will_need(array: NDArray[Any] | PreadArray, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    if isinstance(array, np.ndarray):
        _native.will_need(array, starts, starts + counts)
        return
    size = array.dtype.itemsize
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        array.advise(os.POSIX_FADV_WILLNEED, start * size, count * size)


def _announce_reopened(runs: Runs) -> None:
    at = [i for i, slot in enumerate(runs.slots.tolist()) if isinstance(runs.arrays[slot], ReopenedArray)]
    if not at:
        return
    arrays = [runs.arrays[slot] for slot in runs.slots[at].tolist()]
    files = tuple([array.file for array in arrays if isinstance(array, ReopenedArray)])
    sizes = np.array([array.dtype.itemsize for array in arrays], np.int64)
    _native.advise_ranges(files, runs.starts[at] * sizes, runs.counts[at] * sizes)


def _announce_cached(runs: Runs, more: bool) -> None:
    # What lies outside its array is an error of whoever reads it.
    room = np.array([len(array) for array in runs.arrays], np.int64)[runs.slots]
    sound = (runs.starts >= 0) & (runs.counts > 0) & (runs.counts <= room - runs.starts)
    caches = {id(array.cache): array.cache for array in runs.arrays if isinstance(array, CachedArray)}
    sizes = np.array([array.dtype.itemsize for array in runs.arrays], np.int64)[runs.slots]
    for cache in caches.values():
        own = [array.file if isinstance(array, CachedArray) and array.cache is cache else -1 for array in runs.arrays]
        files = np.array(own, np.int64)[runs.slots]
        mine = (files >= 0) & sound
        begins = (runs.starts * sizes)[mine]
        cache.schedule(files[mine], begins, begins + (runs.counts * sizes)[mine], more=more)


def drop_pages(path: str, array: Array, start: int, stop: int) -> None:
    """Let go of items ``[start, stop)`` of an array that begins with its file, here and in the page cache.

    Pages that lie in part outside are kept, as are those that are not on disk yet and those that others have mapped.
    """
    size = array.dtype.itemsize
    begin, end = start * size, stop * size
    if isinstance(array, CachedArray):
        array.cache.forget(array.file, begin, end)
    if (mapped := map_of(array)) is not None:
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end if stop == len(array) else end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)
    if begin < end:
        drop_cached(path, begin, end - begin)


def drop_file(path: str, array: Array) -> None:
    """As ``drop_pages``, of all of the file that an array lies in."""
    if (mapped := map_of(array)) is not None:
        mapped.madvise(mmap.MADV_DONTNEED)
    drop_cached(path)


def drop_cached(path: str | os.PathLike[str], offset: int = 0, nbytes: int = 0) -> None:
    """Have the page cache let go of a part of a file; 0 bytes are all that follow."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # another shard is being published here, or it was removed: whose pages go by themselves
        return
    try:
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
