"""What the kernel is told of reads: their order, what comes next, what is no longer needed, and huge pages.

And what it tells: how much of an array is mapped by huge pages, and which file system a path lies on.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.storage.local import Advice, Array, PreadArray, ReopenedArray

# Of maps and of files.
_ADVICE = {
    "normal": (mmap.MADV_NORMAL, os.POSIX_FADV_NORMAL),
    "sequential": (mmap.MADV_SEQUENTIAL, os.POSIX_FADV_SEQUENTIAL),
    "random": (mmap.MADV_RANDOM, os.POSIX_FADV_RANDOM),
}


class Extents(NamedTuple):
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


def _map_of(array: Array) -> mmap.mmap | None:
    """The memory map that an array is a view of; None for any other."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) else None


def advise_order(array: Array, advice: Advice, *, huge_pages: bool = False) -> None:
    """Tell the kernel in which order a map, or an open file, will be read; a file that is opened each time forgets.

    Maps may ask for huge pages; ``huge_nbytes_of`` says what came of it.
    """
    if isinstance(array, PreadArray):
        array.advise(_ADVICE[advice][1])
    elif (mapped := _map_of(array)) is not None:
        if advice != "normal":  # which a new map has
            mapped.madvise(_ADVICE[advice][0])
        with contextlib.suppress(OSError):  # a kernel without them
            if huge_pages:
                mapped.madvise(mmap.MADV_HUGEPAGE)


def announce(runs: Extents) -> None:
    """Have the kernel read runs of maps and files in the background; nothing happens to any other array."""
    sizes = np.array([array.dtype.itemsize for array in runs.arrays], np.int64)[runs.slots]
    begins, nbytes = runs.starts * sizes, runs.counts * sizes
    of_files = np.zeros(len(runs.slots), np.bool_)
    for slot, array in enumerate(runs.arrays):
        mine = runs.slots == slot
        if isinstance(array, np.ndarray):
            _native.will_need(array, runs.starts[mine], (runs.starts + runs.counts)[mine])
        elif isinstance(array, PreadArray):
            for offset, count in zip(begins[mine].tolist(), nbytes[mine].tolist(), strict=True):
                array.advise(os.POSIX_FADV_WILLNEED, offset, count)
        elif isinstance(array, ReopenedArray):
            of_files |= mine
    if of_files.any():
        reopened = [runs.arrays[slot] for slot in runs.slots[of_files].tolist()]
        files, offsets = zip(*((a.file, a.offset) for a in reopened if isinstance(a, ReopenedArray)), strict=True)
        _native.advise_ranges(files, begins[of_files] + np.array(offsets, np.int64), nbytes[of_files])


# Items of a stretch, as a power of two: some MiB, as much as is read around a fault where disks are set up for that.
STRETCH_SHIFT = 20
# Ranges of a stretch that come by themselves; then all of it does, which takes as long as some twenty of them do, most
# of that while the reader goes on.
APART = 8


class FirstReads:
    """What the kernel is told of ranges of two maps, read for the first time, that nobody has announced.

    A fault on a map brings in what lies around it, megabytes on disks that are set up for large reads, and a range that
    is read alone waits for them, once in each map. So the first ranges of a stretch are asked for as they are, in both
    maps at once. Where more of them are read all of the stretch is asked for: in an epoch over what memory keeps, large
    reads are faster. Ranges that follow each other are left to the kernel, which reads ahead of them.

    The maps are read together, the same items of each. ``told`` has a byte a stretch of ``1 << STRETCH_SHIFT`` items:
    how many of its ranges were read, up to ``APART``.
    """

    def __init__(self, *arrays: NDArray[Any]) -> None:
        self._arrays = arrays
        # Counted up from zeros, whose pages take no memory before they are written to.
        self.told = np.zeros((len(arrays[0]) >> STRETCH_SHIFT) + 1, np.uint8).data
        self._end = -1

    def tell(self, start: int, stop: int) -> None:
        """Items ``[start, stop)`` are about to be read. Threads may do so at once: then one is counted for two."""
        stretch = start >> STRETCH_SHIFT
        told = self.told[stretch] = min(self.told[stretch] + 1, APART)
        follows, self._end = start == self._end, stop
        if not follows:
            self._ask(start, stop)
            if told == APART:
                first = stretch << STRETCH_SHIFT
                self._ask(first, min(first + (1 << STRETCH_SHIFT), len(self._arrays[0])))

    def _ask(self, start: int, stop: int) -> None:
        for array in self._arrays:
            _native.will_need(array, np.array([start]), np.array([stop]))


def drop_pages(path: str, array: Array, start: int = 0, stop: int | None = None) -> None:
    """Let go of items ``[start, stop)`` of an array that begins with its file, here and in the page cache.

    Pages that lie in part outside are kept, as are those that are not on disk yet and those that others have mapped.
    Without ``stop`` all of the file goes, wherever the array begins in it.
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
    """Have the page cache let go of a part of a file; 0 bytes are all that follow."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # another shard is being published here, or it was removed: whose pages go by themselves
        return
    try:
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


# ---- huge pages ----

_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def huge_nbytes_of(arrays: Sequence[Array]) -> int:
    """Bytes of the ranges of addresses that arrays lie in that are mapped by huge pages now."""
    return mapped_nbytes(arrays, "AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")


def mapped_nbytes(arrays: Sequence[Array], *names: str) -> int:
    """The sum of some counts of ``/proc/self/smaps``, such as ``Rss``, over the ranges that arrays in memory lie in."""
    spans = [(array.ctypes.data, array.nbytes) for array in arrays if isinstance(array, np.ndarray) and array.nbytes]
    total, wanted = 0, False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if at := _RANGE.match(line):
                first, last = int(at[1], 16), int(at[2], 16)
                wanted = any(first < begin + size and begin < last for begin, size in spans)
            elif wanted and line.partition(":")[0] in names:
                total += int(line.split()[1]) << 10
    return total


# ---- which file system a path lies on ----


class Mount(NamedTuple):
    """A line of ``/proc/self/mountinfo``: what (``root``) of which file system is mounted at a folder, its device."""

    folder: str
    root: str
    filesystem: str
    source: str
    options: list[str]


def mounts(table: str = "/proc/self/mountinfo") -> Iterator[Mount]:
    """What is mounted, as the kernel lists it."""
    with open(table, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            head, _, tail = line.rstrip("\n").partition(" - ")
            names = [*head.split(" ")[3:5], *tail.split(" ")[:2]]
            # A blank is a backslash and 040 there.
            root, folder, filesystem, source = (
                re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name) for name in names
            )
            yield Mount(folder, root, filesystem, source, tail.split(" ")[2].split(","))


def mount_of(path: str, table: str = "/proc/self/mountinfo") -> Mount:
    """The mount a path lies on: of the longest folder above it, the last one."""
    real = os.path.realpath(path)
    above = [mount for mount in mounts(table) if os.path.commonpath([mount.folder, real]) == mount.folder]
    return max(reversed(above), key=lambda mount: len(mount.folder))
