"""Packs as a pickled ``.npy``: what NeMo and Megatron-Bridge wrote before Parquet.

The file is an object array of dicts, one a pack: ``input_ids``, ``loss_mask`` (label-aligned, one entry a token) and
``seq_start_id`` (where the sequences start; 0 comes first), as lists or arrays. It holds a pickle, and unpickling calls
whatever the file names. Here the names that plain packs need stand for classes and functions of this module that only
keep what they are given, and every other name is refused: no numpy function that takes a buffer, a shape or a type is
within a file's reach. The whole file is read into memory: that is this format's nature.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError

__all__ = ["LegacyPacks", "read_legacy", "write_legacy"]

_KEYS = ("input_ids", "loss_mask", "seq_start_id")


@dataclass(frozen=True)
class LegacyPacks:
    """Packs end to end.

    Attributes:
        tokens: int32 [tokens].
        loss: uint8, or float32 where there are weights, [tokens]; label-aligned and 0 at the end of every sequence.
        token_offsets: int64 [packs + 1], where each pack begins.
        sequence_offsets: int64 [packs + 1], CSR of the sequences by pack.
        starts: uint32 [sequences], where each sequence begins in its pack.
    """

    tokens: NDArray[np.int32]
    loss: NDArray[Any]
    token_offsets: NDArray[np.int64]
    sequence_offsets: NDArray[np.int64]
    starts: NDArray[np.uint32]


def read_legacy(path: str | os.PathLike[str]) -> LegacyPacks:
    """Read a legacy ``.npy``.

    Raises:
        FormatError: not a ``.npy`` of objects, or its pickle names anything but plain data.
        SequenceError: a pack that breaks the format's rules, with its number.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        rows = _unpickle(file, name)
    ids: list[NDArray[np.int32]] = []
    masks: list[NDArray[Any]] = []
    starts: list[NDArray[np.uint32]] = []
    for number, row in enumerate(rows):
        try:
            part = _pack_of(row)
        except (ValueError, TypeError, OverflowError) as error:
            raise SequenceError(name, number, f"{error}; every pack is a dict of lists {', '.join(_KEYS)}") from None
        ids.append(part[0])
        masks.append(part[1])
        starts.append(part[2])
    return LegacyPacks(
        tokens=_joined(ids, np.int32),
        loss=_joined(masks, np.uint8 if all(mask.dtype == np.uint8 for mask in masks) else np.float32),
        token_offsets=_offsets(ids),
        sequence_offsets=_offsets(starts),
        starts=_joined(starts, np.uint32),
    )


def write_legacy(path: str | os.PathLike[str], packs: Iterable[Mapping[str, Any]]) -> None:
    """Write packs, such as those of a shard, as a legacy ``.npy`` of lists.

    Args:
        path: the file to write.
        packs: with ``input_ids``, ``loss_mask`` (label-aligned) and ``seq_boundaries``, whose last entry is left out.
    """
    rows = [
        {
            "input_ids": pack["input_ids"].tolist(),
            "loss_mask": pack["loss_mask"].tolist(),
            "seq_start_id": pack["seq_boundaries"][:-1].tolist(),
        }
        for pack in packs
    ]
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    with open(path, "wb") as file:
        np.save(file, array, allow_pickle=True)


def _pack_of(row: Any) -> tuple[NDArray[np.int32], NDArray[Any], NDArray[np.uint32]]:
    """Ids, mask and starts of one pack; ValueError says what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError(f"found {type(row).__name__}")
    if missing := [key for key in _KEYS if key not in row]:
        raise ValueError(f"no {', '.join(missing)}")
    ids, mask, starts = (_numbers(row[key], key) for key in _KEYS)
    if not len(ids) or len(ids) != len(mask):
        raise ValueError(f"{len(ids)} ids and {len(mask)} mask entries, expected as many and at least one")
    if not (len(starts) and starts[0] == 0 and (np.diff(starts) > 0).all() and starts[-1] < len(ids)):
        raise ValueError(f"seq_start_id must begin with 0 and ascend to less than {len(ids)}")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ValueError(f"token ids from {ids.min()} to {ids.max()}, outside int32")
    if not (mask >= 0).all() or not np.isfinite(mask).all():
        raise ValueError("loss_mask holds negative or non-finite weights")
    flags = bool(((mask == 0) | (mask == 1)).all())
    mask = mask.astype(np.uint8 if flags else np.float32)
    # Readers of this format never look at a sequence's last entry, and some writers set it.
    mask[np.append(starts[1:], len(ids)) - 1] = 0
    return ids.astype(np.int32), mask, starts.astype(np.uint32)


def _numbers(value: Any, key: str) -> NDArray[Any]:
    """A list or a kept array as a one-dimensional array of numbers; ids and starts are whole ones."""
    array = value.array() if isinstance(value, _Array) else np.asarray(value)
    if array.dtype == object:
        array = np.asarray(array.tolist())
    kinds = "biuf" if key == "loss_mask" or not array.size else "iu"
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ValueError(f"{key} is no list of numbers")
    return array


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)


def _offsets(parts: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)


def _unpickle(file: BinaryIO, name: str) -> list[Any]:
    """The elements of the object array in a ``.npy``."""
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        dtype = headers[np.lib.format.read_magic(file)](file)[2]
    except Exception as error:
        # numpy lets its tokenizer's and parser's errors through.
        raise FormatError(f"{name}: not a .npy file of version 1 or 2: {error}") from None
    if not dtype.hasobject:
        raise FormatError(f"{name}: an array of {dtype}, expected one of objects: a dict a pack")
    try:
        whole = _Unpickler(file).load()
        rows = whole.array().tolist() if isinstance(whole, _Array) else whole
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    except Exception as error:
        # A damaged or hostile pickle may fail in any way that its few names allow.
        raise FormatError(f"{name}: no readable pickle: {type(error).__name__}: {error}") from None
    if not isinstance(rows, list):
        raise FormatError(f"{name}: found {type(rows).__name__}, expected a list of packs")
    return rows


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


class _Array:
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
        dtype = self._dtype.dtype()
        if dtype.hasobject:
            flat = np.empty(len(self._data), dtype=object)
            flat[:] = list(self._data)
        else:
            flat = np.frombuffer(self._data, dtype)
        return flat.reshape(self._shape, order="F" if self._fortran else "C")


def _from_buffer(data: Any, dtype: _Dtype, shape: Sequence[int], order: str) -> _Array:
    array = _Array()
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
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    **{(f"{core}.multiarray", "_reconstruct"): _Array for core in _CORES},
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
