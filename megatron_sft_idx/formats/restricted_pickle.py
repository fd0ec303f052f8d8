"""Pickles of packs, read without running anything.

A ``.npy`` of objects holds a pickle, and unpickling calls whatever the file names. Here the names that plain packs need
stand for classes and functions of this module that only keep what they are given, and every other name is refused: no
numpy function that takes a buffer, a shape or a type is within a file's reach. Before that, the opcodes are walked: an
unpickler takes any amount of memory that a few bytes ask for.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError

__all__ = ["KeptArray", "npy_header", "unpickle_rows"]


def npy_header(file: BinaryIO, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype that a ``.npy`` file says it holds; reads up to the end of its header.

    Raises:
        FormatError: not such a file.
    """
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        shape, _, dtype = headers[np.lib.format.read_magic(file)](file)
    except Exception as error:
        # numpy lets its tokenizer's and parser's errors through.
        raise FormatError(f"{name}: not a .npy file of version 1 or 2: {error}") from None
    return shape, dtype


def unpickle_rows(file: BinaryIO, name: str) -> list[Any]:
    """The elements of the object array in a ``.npy``.

    Raises:
        FormatError: not such a file, or its pickle names anything but plain data.
    """
    shape, dtype = npy_header(file, name)
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
