"""Read untrusted pickles without running anything that they refer to, and write pickles with opcodes.

Two things are read: a list of pairs of integers, which is the index of a ``.pbin`` and Modalities' raw index
(``read_pairs``), and the list of objects in a legacy ``.npy`` (``unpickle_list``). For the second, an unpickler has
substitutes for the few names that packs need, and rejects every other name. Nothing else in this folder may unpickle.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError


def pickle_opcodes(value: Any) -> bytes:
    """Return the opcodes of a value inside a protocol 2 pickle, without the first and last opcode and without memo."""
    file = BytesIO()
    pickler = pickle.Pickler(file, 2)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()[2:-1]


# ---- pairs of integers ----

# Number of pairs that are pickled at once, as Python tuples.
_PAIRS_AT_ONCE = 1 << 12


def read_pairs(path: str, data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Read a pickle of one list of pairs, of any protocol, without unpickling it: int64 [pairs, 2].

    Args:
        path: path of the file that contains the pickle, for errors.
        data: the bytes of the pickle.

    Raises:
        FormatError: the pickle has anything except pairs of 64-bit integers.
    """
    try:
        return _native.parse_pickled_pairs(data)
    except ValueError as error:
        raise FormatError(
            f"{path}: its index is not a pickled list of pairs of integers: {error} of the pickle; none of it was"
            " executed: do not unpickle the file with other tools unless you know who made it"
        ) from None


def write_pairs(write: Callable[[bytes], object], blocks: Iterable[NDArray[np.int64]]) -> None:
    """Write a pickled list of pairs of integers, block by block.

    Args:
        write: function that takes the bytes in order.
        blocks: the pairs, int64 [some, 2].
    """
    beginning, empty_list = b"\x80\x02", b"]"
    write(beginning + empty_list)
    for block in blocks:
        for i in range(0, len(block), _PAIRS_AT_ONCE):
            pairs = list(zip(*block[i : i + _PAIRS_AT_ONCE].T.tolist(), strict=True))
            # Without the opcode for a new list, the others append the pairs to the existing one.
            write(pickle_opcodes(pairs).removeprefix(empty_list))
    write(b".")


# ---- plain objects ----


def unpickle_list(file: BinaryIO, name: str) -> list[Any]:
    """Return the list, or the elements of the array, pickled at the file's position; ``name`` is for errors.

    Arrays in it become ``PickledArray``.

    Raises:
        FormatError: the pickle is damaged, refers to anything except plain data, or has no list.
    """
    try:
        # ValueError: an opcode would make the unpickler allocate memory for nothing.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = np.frombuffer(mapped, np.uint8)
            try:
                _native.check_pickle(data[file.tell() :])
            finally:
                del data  # otherwise the map cannot be closed
        content = _Unpickler(file).load()
        objects = content.array().tolist() if isinstance(content, PickledArray) else content
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    except Exception as error:
        # A damaged or hostile pickle can make the substitutes and the unpickler fail in any way.
        raise FormatError(f"{name}: not a readable pickle: {type(error).__name__}: {error}") from None
    if not isinstance(objects, list):
        raise FormatError(f"{name}: expected a list of packs, found {type(objects).__name__}")
    return objects


class _PickledDtype:
    """The substitute for ``numpy.dtype``: name and byte order of a type of numbers, or of objects.

    The attributes of a substitute are also set on its class, because a pickle can create an object without
    ``__init__``.
    """

    _NAMES = frozenset({"O8", "b1", "f2", "f4", "f8", *(kind + size for kind in "iu" for size in "1248")})
    _name, _order = "u1", ""

    def __init__(self, name: str, *_: Any) -> None:
        if name not in self._NAMES:
            raise FormatError(f"an array of {name!r}, expected numbers or objects")
        self._name = name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in "<>":
            self._order = state[1]

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(object) if self._name == "O8" else np.dtype(self._order + self._name)


class PickledArray:
    """The substitute for ``numpy.ndarray``: the data of a pickled array, from which ``array`` makes an array."""

    _shape: Sequence[int] = (0,)
    _dtype = _PickledDtype("u1")
    _fortran = False
    _data: Any = b""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self._shape, dtype, self._fortran, self._data = state
        if not isinstance(dtype, _PickledDtype):
            raise FormatError(f"an array of {type(dtype).__name__}, expected a dtype")
        self._dtype = dtype

    def array(self) -> NDArray[Any]:
        """Make the array with numpy's safe constructors. ValueError or TypeError: the data is invalid."""
        dtype = self._dtype.dtype()
        if dtype.hasobject:
            flat = np.empty(len(self._data), dtype=object)
            flat[:] = list(self._data)
        else:
            flat = np.frombuffer(self._data, dtype)
        return flat.reshape(self._shape, order="F" if self._fortran else "C")


def _from_buffer(data: Any, dtype: _PickledDtype, shape: Sequence[int], order: str) -> PickledArray:
    array = PickledArray()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


def _scalar(dtype: _PickledDtype, data: bytes) -> Any:
    return np.frombuffer(data, dtype.dtype())[0].item()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """The substitute for ``codecs.encode``, with which protocol 2 writes bytes."""
    if encoding != "latin1":
        raise FormatError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


_CORES = ("numpy.core", "numpy._core")  # numpy's older and newer name
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): PickledArray,
    ("numpy", "dtype"): _PickledDtype,
    ("_codecs", "encode"): _encode,
    **{(f"{core}.multiarray", "_reconstruct"): PickledArray for core in _CORES},
    **{(f"{core}.multiarray", "scalar"): _scalar for core in _CORES},
    **{(f"{core}.numeric", "_frombuffer"): _from_buffer for core in _CORES},
}


class _Unpickler(pickle.Unpickler):
    """An unpickler with a substitute for each name that packs need; any other name is a FormatError."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            stand_in = _STAND_INS[module_name, global_name]
        except KeyError:
            raise FormatError(
                f"its pickle calls {module_name}.{global_name}, which plain packs do not need and which could run any"
                " code, so it is rejected; if the packs are yours, write them again as lists with numpy.save"
            ) from None
        if isinstance(stand_in, type):
            return stand_in

        # A pickle can set attributes of a function that it refers to, so it gets a copy.
        def call(*arguments: Any) -> Any:
            return stand_in(*arguments)

        return call
