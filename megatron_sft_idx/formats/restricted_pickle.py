"""Pickles read without running them: the opcodes that packs, or pairs of integers, need and no other; pairs written."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx._native import parse_pickled_pairs
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.base import npy_header

__all__ = ["LIST_HEADS", "KeptArray", "read_pairs", "unpickle_rows", "write_pairs"]


def unpickle_rows(file: BinaryIO, name: str) -> list[Any]:
    """The elements of the object array in a ``.npy``.

    Raises:
        FormatError: not such a file, or its pickle names anything but plain data.
    """
    shape, _, dtype = npy_header(file, name)
    if not dtype.hasobject:
        if shape == (0,):
            return []  # numpy.save of an empty list: an array of float64
        raise FormatError(f"{name}: an array of {dtype}, expected one of objects: a dict a pack")
    try:
        _check_opcodes(file)
        whole = _Unpickler(file).load()
        rows = whole.array().tolist() if isinstance(whole, KeptArray) else whole
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    except Exception as error:
        # A damaged or hostile pickle may fail in any way that its few names allow.
        raise FormatError(f"{name}: no readable pickle: {type(error).__name__}: {error}") from None
    if not isinstance(rows, list):
        raise FormatError(f"{name}: found {type(rows).__name__}, expected a list of packs")
    return rows


def _check_opcodes(file: BinaryIO) -> None:
    """ValueError where the pickle that begins here would have the unpickler take memory that it has no use for."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = np.frombuffer(mapped, np.uint8)
        try:
            _native.check_pickle(data[file.tell() :])
        finally:
            del data  # or the map cannot be closed


class _Dtype:
    """What a pickled numpy dtype says, and no more."""

    _PLAIN = frozenset({"O8", "b1", "f2", "f4", "f8", *(kind + size for kind in "iu" for size in "1248")})

    def __init__(self, name: str, *_: Any) -> None:
        if name not in self._PLAIN:
            raise FormatError(f"an array of {name!r}, only numbers and objects are read")
        self._name, self._order = name, ""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in "<>":
            self._order = state[1]

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(object) if self._name == "O8" else np.dtype(self._order + self._name)


class KeptArray:
    """What a pickled numpy array says; ``array`` makes one of it, checked by numpy's safe constructors."""

    def __init__(self, *_: Any) -> None:
        self._shape: Sequence[int] = (0,)
        self._dtype = _Dtype("u1")
        self._fortran = False
        self._data: Any = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self._shape, dtype, self._fortran, self._data = state
        if not isinstance(dtype, _Dtype):
            raise FormatError(f"an array of {type(dtype).__name__}, expected a dtype")
        self._dtype = dtype

    def array(self) -> NDArray[Any]:
        """The array. ValueError, TypeError: what was said of it does not go together."""
        dtype = self._dtype.dtype()
        if dtype.hasobject:
            flat = np.empty(len(self._data), dtype=object)
            flat[:] = list(self._data)
        else:
            flat = np.frombuffer(self._data, dtype)
        return flat.reshape(self._shape, order="F" if self._fortran else "C")


def _from_buffer(data: Any, dtype: _Dtype, shape: Sequence[int], order: str) -> KeptArray:
    array = KeptArray()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    return np.frombuffer(data, dtype.dtype())[0].item()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != "latin1":
        raise FormatError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


_CORES = ("numpy.core", "numpy._core")  # numpy's older and newer name
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): KeptArray,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    **{(f"{core}.multiarray", "_reconstruct"): KeptArray for core in _CORES},
    **{(f"{core}.multiarray", "scalar"): _scalar for core in _CORES},
    **{(f"{core}.numeric", "_frombuffer"): _from_buffer for core in _CORES},
}


class _Unpickler(pickle.Unpickler):
    """Finds a stand-in for each name that packs need, and refuses every other."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _STAND_INS[module_name, global_name]
        except KeyError:
            raise FormatError(
                f"its pickle calls {module_name}.{global_name}, which plain packs do not need and which could run any"
                " code: refused; write the packs again as lists with numpy.save if they are yours"
            ) from None


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
