"""Lists of integer pairs as pickles, which is how Modalities stores its indexes: read and written without objects.

Reading admits the opcodes that such a list needs and no other, so that a file can neither run code nor make the reader
remember more than a few times its own size. Writing gives the bytes of ``pickle.dumps`` (protocol 4, the default of
Python 3.8 to 3.13) without ever holding the list.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx._native import parse_pickled_pairs
from megatron_sft_idx.errors import FormatError

__all__ = ["LIST_HEADS", "read_pairs", "write_pairs"]

# What a pickled list begins with: protocol 2 and later, then 0, then 1.
LIST_HEADS = (b"\x80", b"(l", b"]")

_PROTOCOL = 4
_HEAD = b"\x80\x04"
_FRAME_NBYTES = 1 << 16  # CPython closes a frame before the first value past this many bytes
_LEAST_FRAME_NBYTES = 4  # and gives shorter ones no header
_BATCH = 1000  # items CPython appends to a list at once
# Bytes of a non-negative integer: BININT1, BININT2, BININT, then LONG1 of 5 to 8 bytes.
_LIMITS = np.array([2**8, 2**16, 2**31, 2**39, 2**47, 2**55], np.int64)
_NBYTES = np.array([2, 3, 5, 7, 8, 9, 10], np.int64)


def read_pairs(path: str, data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The list in a pickle of any protocol, int64 [pairs, 2].

    Args:
        path: of the file the pickle is in, for the error.
        data: all of the pickle.

    Raises:
        FormatError: anything but one list of pairs of 64-bit integers.
    """
    try:
        return parse_pickled_pairs(data)
    except ValueError as error:
        raise FormatError(
            f"{path}: its index is no pickled list of pairs of integers: {error} of the pickle;"
            " nothing of it was run: do not unpickle the file by other means unless you know who made it"
        ) from None


def write_pairs(write: Callable[[bytes], None], count: int, blocks: Iterable[NDArray[np.int64]]) -> None:
    """Write a list of pairs of integers from 0 to 2**63 - 1, as ``pickle.dumps`` would.

    Args:
        write: takes the bytes in order.
        count: pairs in all.
        blocks: the pairs, int64 [some, 2].
    """
    frames = _Frames(write)
    write(_HEAD)
    frames.add(b"]\x94", np.empty(0, np.int64))
    for block in _rebatched(blocks):
        opcodes = _opcodes_of(block)
        sizes = _NBYTES[np.searchsorted(_LIMITS, block, side="right")]
        first = np.cumsum(sizes.sum(axis=1) + 2) - (sizes.sum(axis=1) + 2)
        values = np.stack([first, first + sizes[:, 0]], axis=1).reshape(-1)
        if count == 1:
            frames.add(opcodes + b"a", values)
        else:
            frames.add(b"(" + opcodes + b"e", values + 1)
    frames.add(b".", np.empty(0, np.int64))
    frames.close()


def _rebatched(blocks: Iterable[NDArray[np.int64]]) -> Iterable[NDArray[np.int64]]:
    """The same pairs, ``_BATCH`` at a time."""
    held = np.empty((0, 2), np.int64)
    for block in blocks:
        held = np.concatenate([held, block])
        whole = len(held) - len(held) % _BATCH
        yield from (held[i : i + _BATCH] for i in range(0, whole, _BATCH))
        held = held[whole:]
    if len(held):
        yield held


def _opcodes_of(block: NDArray[np.int64]) -> bytes:
    """What pushes the pairs; tuples are memoized without a number, so it is the same anywhere in a pickle."""
    pairs: list[Any] = list(zip(*block.T.tolist(), strict=True))
    # A batch is far smaller than a frame: head, frame header, empty list, [mark,] tuples, append, stop.
    start = len(_HEAD) + 9 + 2 + (len(pairs) > 1)
    return pickle.dumps(pairs, _PROTOCOL)[start:-2]


class _Frames:
    """Opcodes in frames, cut where CPython cuts them."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._frame = bytearray()

    def add(self, opcodes: bytes, values: NDArray[np.int64]) -> None:
        """``values``: where in ``opcodes`` a value begins, ascending; a frame ends nowhere else."""
        start = 0
        while True:
            missing = max(_FRAME_NBYTES - len(self._frame), 0)
            at = int(np.searchsorted(values, start + missing))
            if at == len(values):
                break
            cut = int(values[at])
            self._frame += opcodes[start:cut]
            self.close()
            start = cut
        self._frame += opcodes[start:]

    def close(self) -> None:
        if len(self._frame) >= _LEAST_FRAME_NBYTES:
            self._write(b"\x95" + len(self._frame).to_bytes(8, "little"))
        self._write(bytes(self._frame))
        self._frame.clear()
