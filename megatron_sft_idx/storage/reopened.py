"""Files opened for each read and closed again: what a dataset of thousands of shards is read through."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage.local import Array, CopiedArray, check_size

__all__ = ["ReopenedArray", "read_runs"]

# A file that is another one at every look is being written over and over.
_MOST_LOOKS = 5


class ReopenedArray(CopiedArray):
    """An array in a file that is opened for each slice, which is a fresh copy; between them nothing is held open.

    Each time the file must be the one that was looked at when this was made, by device, inode, size and times. Where
    it is not, ``confirm`` decides: it raises if the array is not what it was; else the file is looked at again.

    Args:
        path: the file.
        dtype: of its items.
        count: how many items there are, from the first byte on.
        nbytes: size the file must have.
        confirm: raises where other content was published at the path. It is called after a look at the file, so what
            it finds published is what was looked at, or the file changes again.

    Raises:
        CorruptShardError: the file has another size (rule F2).
        OSError: there is no such file.
    """

    def __init__(self, path: str, dtype: np.dtype[Any], count: int, nbytes: int, confirm: Callable[[], None]) -> None:
        super().__init__(dtype, count)
        self._path, self._file_nbytes, self._confirm = path, nbytes, confirm
        self.file = self._look()

    def _look(self) -> _native.StampedFile:
        file = _native.StampedFile(os.fsencode(self._path))
        check_size(self._path, file.nbytes, self._file_nbytes)
        return file

    def look_again(self) -> None:
        """After a read that met another file. FormatError, OSError: what is there now is not this array."""
        try:
            file = self._look()
        except FileNotFoundError:
            self._confirm()
            raise
        self._confirm()
        self.file = file

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See ``CopiedArray``. FormatError, OSError: what is there now is not this array."""
        for _ in range(_MOST_LOOKS):
            if self.file.read(offset, out):
                return
            self.look_again()
        raise self.restless()

    def restless(self) -> FormatError:
        """What to say of a file that never was the one that had just been looked at."""
        return FormatError(
            f"{self._path}: the file was changed at every one of {_MOST_LOOKS} looks; let its writer end"
        )


def read_runs(arrays: Sequence[Array], starts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Items ``[start, start + count)`` of each array, end to end, into ``out``, which they fill.

    One native call where all files are opened for each read.

    Raises:
        ValueError: runs that lie outside their arrays, or do not fill ``out``.
        FormatError, OSError: as of a slice of one.
    """
    room = np.array([len(array) for array in arrays], np.int64)
    if (outside := (starts < 0) | (counts < 0) | (counts > room) | (starts > room - counts)).any():
        run = int(outside.argmax())
        raise ValueError(
            f"run {run} begins at {starts[run]} and has {counts[run]} items, its array holds {room[run]};"
            " the index is damaged, or of another shard"
        )
    if int(counts.sum()) != len(out):
        raise ValueError(f"runs of {counts.sum()} items do not fill an output of {len(out)}")
    files = [array for array in arrays if isinstance(array, ReopenedArray)]
    if len(files) == len(arrays):
        _read_files(files, starts, counts, out)
        return
    end = 0
    for array, start, count in zip(arrays, starts.tolist(), counts.tolist(), strict=True):
        if isinstance(array, CopiedArray):
            array.read_bytes(start * array.dtype.itemsize, out[end : end + count].view(np.uint8))
        else:
            out[end : end + count] = array[start : start + count]
        end += count


def _read_files(
    arrays: Sequence[ReopenedArray], starts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]
) -> None:
    size = out.dtype.itemsize
    done, looks = 0, 0
    while True:
        files = tuple([array.file for array in arrays[done:]])
        room = out[int(counts[:done].sum()) :] if done else out
        more = _native.read_ranges(files, starts[done:] * size, counts[done:] * size, room)
        done, looks = done + more, 0 if more else looks
        if done == len(arrays):
            return
        if looks == _MOST_LOOKS:
            raise arrays[done].restless()
        arrays[done].look_again()
        looks += 1
