"""Hints to the kernel about reads: their order, the bytes that are read next, and bytes that are no longer needed.

A hint changes when bytes are read from the disk and what stays in memory, never the data that is read. The kernel may
ignore any hint. For huge pages, ``huge_nbytes_of`` returns how many the kernel provided.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.storage.local import Advice, Array, PreadArray, ReopenedArray

# Constants of madvise, for maps, and of posix_fadvise, for files.
_ADVICE = {
    "normal": (mmap.MADV_NORMAL, os.POSIX_FADV_NORMAL),
    "sequential": (mmap.MADV_SEQUENTIAL, os.POSIX_FADV_SEQUENTIAL),
    "random": (mmap.MADV_RANDOM, os.POSIX_FADV_RANDOM),
}


class Extents(NamedTuple):
    """Extents: each is a range of consecutive items of one of several arrays.

    Attributes:
        arrays: the arrays.
        slots: int [extents], the index in ``arrays`` of each extent's array.
        starts: int64 [extents], the first item of each extent in that array.
        counts: int64 [extents], the number of items of each extent.
    """

    arrays: Sequence[Array]
    slots: NDArray[Any]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]


def _map_of(array: Array) -> mmap.mmap | None:
    """Return the memory map that an array is a view of, or None."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) else None


def advise_order(array: Array, advice: Advice, *, huge_pages: bool = False) -> None:
    """Tell the kernel in which order an array will be read. It may be in a memory map or read by ``pread``.

    No effect for a ``ReopenedArray``, because the kernel keeps this advice only for an open file. ``huge_pages`` also
    asks for huge pages, which only a map can have.
    """
    if isinstance(array, PreadArray):
        array.advise(_ADVICE[advice][1])
    elif (mapped := _map_of(array)) is not None:
        mapped.madvise(_ADVICE[advice][0])
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            if huge_pages:
                mapped.madvise(mmap.MADV_HUGEPAGE)


def announce(extents: Extents) -> None:
    """Make the kernel read extents of maps and files in the background. Extents of other arrays are ignored."""
    sizes = np.array([array.dtype.itemsize for array in extents.arrays], np.int64)[extents.slots]
    begins, nbytes = extents.starts * sizes, extents.counts * sizes
    in_reopened = np.zeros(len(extents.slots), np.bool_)
    for slot, array in enumerate(extents.arrays):
        in_array = extents.slots == slot
        if isinstance(array, np.ndarray):
            _native.will_need(array, extents.starts[in_array], (extents.starts + extents.counts)[in_array])
        elif isinstance(array, PreadArray):
            for offset, count in zip(begins[in_array].tolist(), nbytes[in_array].tolist(), strict=True):
                array.advise(os.POSIX_FADV_WILLNEED, offset, count)
        elif isinstance(array, ReopenedArray):
            in_reopened |= in_array
    if in_reopened.any():
        reopened = [extents.arrays[slot] for slot in extents.slots[in_reopened].tolist()]
        files, offsets = zip(*((a.file, a.offset) for a in reopened if isinstance(a, ReopenedArray)), strict=True)
        _native.advise_ranges(files, begins[in_reopened] + np.array(offsets, np.int64), nbytes[in_reopened])


def drop_pages(path: str, array: Array, start: int = 0, stop: int | None = None) -> None:
    """Drop the pages of items ``[start, stop)`` from this process's map of a file and from the page cache.

    A page stays if it also holds other items, if it is not written to disk yet, or if another process maps it.

    Args:
        path: the file.
        array: its items. With ``stop``, the array must begin at the beginning of the file.
        start: first item.
        stop: one past the last item; None for the whole file, wherever the array begins in it.
    """
    mapped, size = _map_of(array), array.dtype.itemsize
    if stop is None:
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)
        drop_cached(path)
        return
    begin, end = start * size, stop * size
    if mapped is not None:
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end if stop == len(array) else end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)
    if begin < end:
        drop_cached(path, begin, end - begin)


def drop_cached(path: str | os.PathLike[str], offset: int = 0, nbytes: int = 0) -> None:
    """Drop a range of a file from the page cache; ``nbytes`` 0 means up to the end. A missing file is not an error."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # removed, or being replaced: the pages of a removed file are dropped automatically
        return
    try:
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


_ADDRESSES = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def huge_nbytes_of(arrays: Sequence[Array]) -> int:
    """Return how many bytes are mapped with huge pages now, in the kernel's mappings that hold these arrays."""
    return mapped_nbytes(arrays, "AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")


def mapped_nbytes(arrays: Sequence[Array], *names: str) -> int:
    """Sum the named counts of ``/proc/self/smaps``, such as ``Rss``, over the mappings that hold these arrays.

    In bytes. Arrays that are not in memory count 0.
    """
    spans = [(array.ctypes.data, array.nbytes) for array in arrays if isinstance(array, np.ndarray) and array.nbytes]
    total, holds_array = 0, False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if addresses := _ADDRESSES.match(line):
                first, last = int(addresses[1], 16), int(addresses[2], 16)
                holds_array = any(first < begin + size and begin < last for begin, size in spans)
            elif holds_array and line.partition(":")[0] in names:
                total += int(line.split()[1]) << 10
    return total
