"""Packs as a pickled ``.npy``: what NeMo and Megatron-Bridge wrote before Parquet.

The file is an object array of dicts, one a pack: ``input_ids``, ``loss_mask`` (one entry a token) and ``seq_start_id``
(where the sequences start; 0 comes first), as lists or arrays. Reading takes the whole file into memory: that is this
format's nature. Writing does not: the pickle is made pack by pack.
"""

from __future__ import annotations

import mmap
import os
import pickle
import pickletools
import struct
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import (
    MaskAlignment,
    PackedReader,
    PackedSpec,
    PackedWriter,
    checked_pack,
    checked_run,
    file_identity,
    npy_header,
    npy_header_bytes,
    pickle_opcodes,
    unplaced_note,
)
from megatron_sft_idx.packs.run import PackRun
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage import open_regular
from megatron_sft_idx.storage.publish import Kind

KEYS = ("input_ids", "loss_mask", "seq_start_id")

# Types of the numbers in a list.
_PLAIN = {int, float, bool}
# The number of packs as an eight-byte number, whatever it is.
_COUNT = struct.Struct("<2sq")
# What may stand between a list and its first element.
_BETWEEN = ("MARK", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT")


# What numpy.ndarray.__reduce__ gives: _reconstruct(ndarray, (0,), b"b"), then its state up to the list of elements.
# The module has its older name, which newer numpy knows too.
_ARRAY = b"".join(
    (
        pickle.PROTO + b"\x02",
        pickle.GLOBAL + b"numpy.core.multiarray\n_reconstruct\n",
        pickle.GLOBAL + b"numpy\nndarray\n",
        pickle_opcodes((0,)),
        pickle_opcodes("b"),
        pickle.TUPLE3 + pickle.REDUCE,
        pickle.MARK + pickle_opcodes(1),
    )
)
_AFTER_SHAPE = pickle.TUPLE1 + pickle_opcodes(np.dtype(object)) + pickle.NEWFALSE + pickle.EMPTY_LIST
_END = pickle.TUPLE + pickle.BUILD + pickle.STOP


def _beginning(num_packs: int) -> bytes:
    """Everything before the elements; equally long for any number of packs."""
    return (
        npy_header_bytes(np.dtype(object), (num_packs,))
        + _ARRAY
        + _COUNT.pack(pickle.LONG1 + b"\x08", num_packs)
        + _AFTER_SHAPE
    )


def _holds_packs(path: str) -> bool:
    """Whether a file is an array of objects, none or the first of them a pack; reads no further, unpickles nothing."""
    try:
        with open_regular(path) as file:
            shape, _, dtype = npy_header(file, path)
            return dtype.hasobject and (shape == (0,) or (len(shape) == 1 and {*KEYS} <= _first_keys(file)))
    except Exception:  # whatever a stranger's pickle does to its reader
        return False


def _first_keys(file: BinaryIO) -> set[str]:
    """The strings in the dict that comes first in the pickled list that begins here; none in anything else."""
    keys: set[str] = set()
    in_list = in_dict = False
    for opcode, value, _ in pickletools.genops(file):
        if in_dict:
            if opcode.name.startswith("SETITEM"):
                break
            if isinstance(value, str):
                keys.add(value)
        elif in_list and opcode.name not in _BETWEEN:
            if opcode.name != "EMPTY_DICT":
                break
            in_dict = True
        in_list = in_list or opcode.name == "EMPTY_LIST"
    return keys


def recognise(path: str) -> bool:
    """Whether a file is a ``.npy`` of objects, or of nothing; what its pickle holds is seen when it is opened."""
    try:
        with open_regular(path) as file:
            shape, _, dtype = npy_header(BytesIO(file.read(1 << 16)), path)
    except (OSError, FormatError):
        return False
    return bool(dtype.hasobject) or shape == (0,)  # for an empty list numpy takes another dtype


def read_legacy(path: str | os.PathLike[str], *, mask_alignment: MaskAlignment = "label") -> PackRun:
    """All packs of a legacy ``.npy``: int32 ids, and a mask that is float32 where there are weights, else uint8.

    Raises:
        FormatError: not a ``.npy`` of objects, or its pickle names anything but plain data.
        SequenceError: a pack that breaks the format's rules, with its number.
    """
    name = os.fspath(path)
    with open_regular(path) as file:
        rows = unpickle_packs(file, name)
    packs = [checked_run(name, 0, [], [], [], [], [], token_dtype=np.int32, mask_dtype=np.uint8)]
    rows.reverse()
    while rows:  # each row is let go as soon as it is taken over: as Python numbers it is many times larger
        packs.append(_pack_of(rows.pop(), name, len(packs) - 1, mask_alignment))
    return PackRun.joined(packs)


def _pack_of(row: Any, name: str, number: int, alignment: MaskAlignment) -> PackRun:
    """One pack, checked. SequenceError says what is wrong with it."""
    try:
        if not isinstance(row, dict):
            raise ValueError(f"found {type(row).__name__}")
        if missing := [key for key in KEYS if key not in row]:
            raise ValueError(f"no {', '.join(missing)}")
        ids, mask, starts = (_numbers(row[key], key) for key in KEYS)
    except (ValueError, TypeError, OverflowError) as error:
        raise SequenceError(name, number, f"{error}; every pack is a dict of lists {', '.join(KEYS)}") from None
    if mask.dtype.kind == "f" and ((mask == 0) | (mask == 1)).all():
        mask = mask.astype(np.uint8)
    return checked_pack(name, number, ids, mask, starts, mask_alignment=alignment, token_dtype=np.int32)


def _numbers(value: Any, key: str) -> NDArray[Any]:
    """A list or a kept array as a one-dimensional array of numbers; ids and starts are whole ones."""
    array = value.array() if isinstance(value, PickledArray) else value
    if isinstance(array, np.ndarray) and array.dtype == object:
        array = [_number(one) for one in array.tolist()]
    # A few nested lists that repeat each other unfold to any size, so nothing but numbers is handed to numpy.
    if isinstance(array, (list, tuple)) and not set(map(type, array)) <= _PLAIN:
        array = None
    array = np.asarray(array)
    kinds = "biuf" if key == "loss_mask" or not array.size else "iu"
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ValueError(f"{key} is no list of numbers")
    return array


def _number(value: Any) -> Any:
    """An array without dimensions, as iterating over some tensors gives, as the number in it."""
    if not isinstance(value, PickledArray):
        return value
    array = value.array()
    if array.ndim:
        raise ValueError("lists in a list")
    return array.item()


class Reader(PackedReader):
    """Packs of a legacy ``.npy``, all in memory.

    Args:
        capacity: what its packs were packed for, where that is known. Packers of this format count a sequence as its
            length - 1, so packs may exceed it by one token a sequence; more than that is refused.
    """

    def _open(self, *, capacity: int | None = None) -> None:
        self.identity = file_identity(self.path)
        self.packs = read_legacy(self.path, mask_alignment=self.alignment)
        self._dtypes = self.packs.tokens.dtype, self.packs.loss_mask.dtype
        self._take_alignment()
        if self.packs.unplaced:
            self.notes.append(unplaced_note(self.packs.unplaced, self.alignment))
        self._token_offsets = self.packs.token_offsets
        self._capacity = self._true_capacity(capacity)

    def _true_capacity(self, said: int | None) -> int:
        """The capacity that holds for every pack, and a note that says where it comes from."""
        lengths, sequences = self.packs.pack_lengths, self.packs.pack_sequences
        longest = int(lengths.max(initial=0))
        if said is None:
            self.notes.append(f"the file does not say its capacity: taken to be its longest pack, {longest} tokens")
            return longest
        if longest <= said:
            return said
        bad = lengths > said + sequences
        if bad.any():
            pack = int(np.argmax(bad))
            reason = f"has {lengths[pack]} tokens in {sequences[pack]} sequences, too many for a capacity of {said}"
            raise SequenceError(self.path, pack, f"{reason}; give a larger capacity, or none for the longest pack")
        self.notes.append(
            f"{int((lengths > said).sum())} of {len(lengths)} packs exceed the capacity {said} by up to one token a"
            f" sequence, as packers do that count length - 1: all tokens are kept, the capacity is set to {longest}"
        )
        return longest

    @property
    def spec(self) -> PackedSpec:
        """Counts and dtypes; ids are int32, as the format does not say how large they may be."""
        packs = self.packs
        longest = int(packs.pack_lengths.max(initial=0))
        return self._make_spec(len(packs.seq_starts), len(packs.tokens), longest, capacity=self._capacity)

    def __len__(self) -> int:
        return len(self.packs)

    def read(self, index: int) -> Pack:
        """Pack ``index``: views of what is in memory."""
        return self.packs.pack(index)

    def _run(self, first: int, last: int) -> PackRun:
        return self.packs.part(first, last)


class LegacyPickleWriter(PackedWriter):
    """Writes packs as a pickled ``.npy`` of dicts of lists, holding one pack in memory.

    Nothing is lost in this format but what it never says: capacity, dtypes and metadata.
    """

    format = "npy"
    reader, kind = Reader, Kind("a pickled .npy of packs", _holds_packs)

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: PackedSpec | None = None,
        *,
        overwrite: bool = False,
        allow_loss: bool = False,
    ) -> None:
        super().__init__(path, spec, overwrite=overwrite, allow_loss=allow_loss)

    def _begin(self) -> None:
        # An opcode and a byte for each id and each mask.
        self._file = self._make_output(4 * self._spec.num_tokens if self._spec else 0).open()
        self._file.write(_beginning(0))

    def write_bin(self, bin_id: int, input_ids: ArrayLike, loss_mask: ArrayLike, seq_start_id: ArrayLike) -> None:
        """Append pack number ``bin_id``: packs are written in order.

        Args:
            bin_id: how many packs were written before.
            input_ids: ids [length].
            loss_mask: label-aligned, 0/1 or weights [length].
            seq_start_id: where each sequence begins [sequences]; the first is 0.

        Raises:
            SequenceError: a rule of packs is broken, or the pack is not the next one.
        """
        if bin_id != self._counts.num_packs:
            raise SequenceError(
                self._path, bin_id, f"the next pack is number {self._counts.num_packs}; write packs in order"
            )
        self.write(checked_pack(self._path, bin_id, input_ids, loss_mask, seq_start_id))

    def _append(self, run: PackRun) -> None:
        for i in range(len(run)):
            pack = run.part(i, i + 1)
            values = (pack.tokens.tolist(), pack.loss_mask.tolist(), pack.seq_starts.tolist())
            self._file.write(pickle_opcodes(dict(zip(KEYS, values, strict=True))) + pickle.APPEND)

    def _finish(self) -> None:
        self._file.write(_END)
        self._file.write_at(_beginning(self._counts.num_packs), 0)
        self._file.close()

    def finalize(self) -> dict[str, Any]:
        """Put the file in its place; returns what it is and how many packs it holds. May be called twice."""
        return {"format": "legacy_pickle", "num_bins": super().finalize()["num_packs"]}


Writer = LegacyPickleWriter


# ---- pickles read without running them: the opcodes that packs need and no other ----


def unpickle_packs(file: BinaryIO, name: str) -> list[Any]:
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
        # An opcode that would have the unpickler take memory which it has no use for is a ValueError.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = np.frombuffer(mapped, np.uint8)
            try:
                _native.check_pickle(data[file.tell() :])
            finally:
                del data  # or the map cannot be closed
        whole = _Unpickler(file).load()
        rows = whole.array().tolist() if isinstance(whole, PickledArray) else whole
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    except Exception as error:
        # A damaged or hostile pickle may fail in any way that its few names allow.
        raise FormatError(f"{name}: no readable pickle: {type(error).__name__}: {error}") from None
    if not isinstance(rows, list):
        raise FormatError(f"{name}: found {type(rows).__name__}, expected a list of packs")
    return rows


class _PickledDtype:
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


class PickledArray:
    """What a pickled numpy array says; ``array`` makes one of it, checked by numpy's safe constructors."""

    def __init__(self, *_: Any) -> None:
        self._shape: Sequence[int] = (0,)
        self._dtype = _PickledDtype("u1")
        self._fortran = False
        self._data: Any = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self._shape, dtype, self._fortran, self._data = state
        if not isinstance(dtype, _PickledDtype):
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


def _from_buffer(data: Any, dtype: _PickledDtype, shape: Sequence[int], order: str) -> PickledArray:
    array = PickledArray()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


def _scalar(dtype: _PickledDtype, data: bytes) -> Any:
    return np.frombuffer(data, dtype.dtype())[0].item()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
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
    """Finds a stand-in for each name that packs need, and refuses every other."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _STAND_INS[module_name, global_name]
        except KeyError:
            raise FormatError(
                f"its pickle calls {module_name}.{global_name}, which plain packs do not need and which could run any"
                " code: refused; write the packs again as lists with numpy.save if they are yours"
            ) from None
