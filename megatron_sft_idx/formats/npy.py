"""Packs as a pickled ``.npy``: the format of NeMo and Megatron-Bridge before Parquet, which Bridge still reads.

The file is an object array of dicts, one per pack: ``input_ids``, ``loss_mask`` (one entry per token) and
``seq_start_id`` (the starts of the sequences, beginning with 0), as lists or arrays. A pickle can only be read as a
whole, so reading loads the whole file into memory. Writing does not: the pickle is made pack by pack. Bridge's builder
does not open the file without the summary of its packs next to it (``bridge.summary_path``); readers here do not need
it.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import (
    PackedReader,
    PackedSpec,
    PackedWriter,
    file_identity,
    recogniser,
    unplaced_note,
)
from megatron_sft_idx.formats.bridge import SUMMARY_KIND, SUMMARY_SUFFIX, PackMeasure, Padding, check_summary_place
from megatron_sft_idx.formats.memmap import npy_header, npy_header_bytes
from megatron_sft_idx.formats.pickles import PickledArray, pickle_opcodes, unpickle_list
from megatron_sft_idx.packs.run import MaskAlignment, PackRun, checked_pack, first_true, has_weights
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage import open_regular
from megatron_sft_idx.storage.publish import Kind

KEYS = ("input_ids", "loss_mask", "seq_start_id")

_NUMBER_TYPES = {int, float, bool}
# The number of packs is always pickled as eight bytes, so that it can be overwritten.
_COUNT = struct.Struct("<2sq")
# Opcodes that may be between that of a list and that of its first element.
_BETWEEN = ("MARK", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT")


# The beginning of a pickled array, by numpy.ndarray.__reduce__: _reconstruct(ndarray, (0,), b"b"), then the state up to
# its list of elements. The module has its older name, which newer numpy versions also accept.
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
    """Return the bytes of the file before its first pack; their number does not depend on the number of packs."""
    return (
        npy_header_bytes(np.dtype(object), (num_packs,))
        + _ARRAY
        + _COUNT.pack(pickle.LONG1 + b"\x08", num_packs)
        + _AFTER_SHAPE
    )


@recogniser
def _holds_packs(path: str) -> bool:
    """Return whether a file is an object array that is empty or begins with a pack. Unpickles nothing."""
    with open_regular(path) as file:
        shape, _, dtype = npy_header(file, path)
        return dtype.hasobject and (shape == (0,) or (len(shape) == 1 and {*KEYS} <= _first_keys(file)))


def _first_keys(file: BinaryIO) -> set[str]:
    """Return the strings in the first element of the pickled list at the file's position; empty if it is not a dict."""
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


@recogniser
def recognise(path: str) -> bool:
    """Return whether a file is a ``.npy`` of objects, or an empty one. Only ``Reader`` checks the objects."""
    with open_regular(path) as file:
        shape, _, dtype = npy_header(BytesIO(file.read(1 << 16)), path)
    return bool(dtype.hasobject) or shape == (0,)  # numpy.save of an empty list: an array of float64


def read_legacy(path: str | os.PathLike[str], *, mask_alignment: MaskAlignment = "label") -> PackRun:
    """Return all packs of a legacy ``.npy``: int32 ids; the mask is float32 if there are weights, else uint8.

    Raises:
        FormatError: not a ``.npy`` of objects, or its pickle uses anything except plain data.
        SequenceError: a pack breaks a rule.
    """
    name = os.fspath(path)
    with open_regular(path) as file:
        shape, _, dtype = npy_header(file, name)
        if not dtype.hasobject and shape != (0,):
            raise FormatError(f"{name}: an array of {dtype}, expected an array of objects: one dict per pack")
        # numpy.save stores an empty list as an array of float64.
        objects = unpickle_list(file, name) if dtype.hasobject else []
    packs = [PackRun(np.empty(0, np.int32), np.empty(0, np.uint8), *np.empty((3, 0), np.int64))]
    objects.reverse()
    while objects:  # free each object before converting the next: as Python numbers it is many times larger
        packs.append(_pack_of(objects.pop(), name, len(packs) - 1, mask_alignment))
    return PackRun.joined(packs)


def _pack_of(unpickled: Any, name: str, number: int, alignment: MaskAlignment) -> PackRun:
    """Convert one unpickled object to a checked pack. SequenceError: it is not a pack, or breaks a rule."""
    try:
        if not isinstance(unpickled, dict):
            raise ValueError(f"found {type(unpickled).__name__}")
        if missing := [key for key in KEYS if key not in unpickled]:
            raise ValueError(f"no {', '.join(missing)}")
        ids, mask, starts = (_numbers(unpickled[key], key) for key in KEYS)
    except (ValueError, TypeError, OverflowError) as error:
        raise SequenceError(
            name, number, f"{error}; every pack must be a dict with the lists {', '.join(KEYS)}"
        ) from None
    if mask.dtype.kind == "f" and not has_weights(mask):
        mask = mask.astype(np.uint8)
    return checked_pack(name, number, ids, mask, starts, mask_alignment=alignment, token_dtype=np.int32)


def _numbers(value: Any, key: str) -> NDArray[Any]:
    """Convert a list or pickled array to a one-dimensional numeric array (integers, except in masks).

    Else ValueError.
    """
    array = value.array() if isinstance(value, PickledArray) else value
    if isinstance(array, np.ndarray) and array.dtype == object:
        array = [_number(one) for one in array.tolist()]
    # Nested lists that contain each other repeatedly would expand to any size in numpy, so it only gets lists of
    # numbers.
    if isinstance(array, (list, tuple)) and not set(map(type, array)) <= _NUMBER_TYPES:
        array = None
    array = np.asarray(array)
    kinds = "biuf" if key == "loss_mask" or not array.size else "iu"
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ValueError(f"{key} is not a list of numbers")
    return array


def _number(value: Any) -> Any:
    """Return the number in a zero-dimensional array, which some tensors give during iteration."""
    if not isinstance(value, PickledArray):
        return value
    array = value.array()
    if array.ndim:
        raise ValueError("a list of lists")
    return array.item()


class Reader(PackedReader):
    """Packs of a legacy ``.npy``, all in memory.

    Args:
        capacity: the capacity for which the packs were made, if it is known. Packers of this format count a sequence as
            its length - 1, so a pack may exceed the capacity by one token per sequence; more is an error.
    """

    def _open(self, *, capacity: int | None = None) -> None:
        self.identity = file_identity(self.path)
        self.packs = read_legacy(self.path, mask_alignment=self.alignment)
        self._dtypes = self.packs.tokens.dtype, self.packs.loss_mask.dtype
        self._take_alignment()
        self._refuse_token_masks(self.packs.unplaced, len(self.packs.seq_starts))
        if self.packs.unplaced:
            self.notes.append(unplaced_note(self.packs.unplaced, self.alignment))
        self.num_packs, self._token_offsets = len(self.packs), self.packs.token_offsets
        longest = int(self.packs.pack_lengths.max(initial=0))
        counts = len(self.packs.seq_starts), len(self.packs.tokens), longest
        self.spec = self._make_spec(*counts, capacity=self._true_capacity(capacity, longest))

    def _true_capacity(self, stated: int | None, longest: int) -> int | None:
        """Return the actual capacity of all packs, given the stated one; notes any difference."""
        lengths, sequences = self.packs.pack_lengths, self.packs.pack_sequences
        if stated is None or longest <= stated:
            return stated
        if (pack := first_true(lengths > stated + sequences)) is not None:
            reason = (
                f"has {lengths[pack]} tokens in {sequences[pack]} sequences, which is too many for a capacity of"
                f" {stated}"
            )
            raise SequenceError(self.path, pack, f"{reason}; pass a larger capacity, or none to use the longest pack")
        self.notes.append(
            f"{int((lengths > stated).sum())} of {len(lengths)} packs exceed the capacity {stated} by up to one token"
            " per sequence, because some packers count length - 1: all tokens are kept, and the capacity is set to"
            f" {longest}"
        )
        return longest

    def read(self, index: int) -> Pack:
        """Return pack ``index``, as views of the data in memory."""
        return self.packs.pack(index)

    def _run(self, first: int, last: int) -> PackRun:
        return self.packs.subrun(first, last)


class LegacyPickleWriter(PackedWriter):
    """Writes packs as a pickled ``.npy`` of dicts of lists, with one pack in memory, and their summary for Bridge.

    The format does not store capacity, dtypes, metadata or columns. It stores everything else.

    Args:
        path: the file to write, ``X.npy``; the summary is written next to it.
        spec: counts and dtypes of the packs; None if they are not known before.
        overwrite: replace a file of this format.
        lossy: accept that columns of ``spec``, or images and audio, are not stored.

    Raises:
        FormatError: something else is at the path, or the format cannot store what ``spec`` describes.

    Example:
        >>> with LegacyPickleWriter("data/packs.npy") as writer:
        ...     writer.write_bin(0, [5, 6, 7, 5, 8], [1, 1, 0, 1, 0], [0, 3])
        >>> np.load("data/packs.npy", allow_pickle=True)[0]
        {'input_ids': [5, 6, 7, 5, 8], 'loss_mask': [1, 1, 0, 1, 0], 'seq_start_id': [0, 3]}
    """

    format = "npy"
    reader, kind = Reader, Kind("a pickled .npy of packs", _holds_packs)

    # Explicit, so that type checkers reject unsupported arguments.
    @checked
    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: PackedSpec | None = None,
        *,
        overwrite: bool = False,
        lossy: bool = False,
    ) -> None:
        super().__init__(path, spec, overwrite=overwrite, lossy=lossy)

    def _begin(self, spec: PackedSpec | None) -> None:
        check_summary_place(self._path, overwrite=self._overwrite, written=True)
        self._measure = PackMeasure(self._path, Padding(1), spec.capacity if spec else None)
        # At least an opcode and a byte for each id and each mask value.
        self._file = self._make_output(4 * spec.num_tokens if spec else 0).open()
        self._file.write(_beginning(0))

    def write_bin(self, bin_id: int, input_ids: ArrayLike, loss_mask: ArrayLike, seq_start_id: ArrayLike) -> None:
        """Write one pack.

        Args:
            bin_id: number of the pack; packs must be written in order, from 0 on.
            input_ids: ids [length].
            loss_mask: label-aligned, 0/1 or weights [length].
            seq_start_id: start of each sequence [sequences]; the first is 0.

        Raises:
            SequenceError: a rule of packs is broken, or the pack is not the next one.
        """
        if bin_id != self._counts.num_packs:
            raise SequenceError(
                self._path, bin_id, f"the next pack is number {self._counts.num_packs}; write packs in order"
            )
        self.write(checked_pack(self._path, bin_id, input_ids, loss_mask, seq_start_id))

    def _append(self, run: PackRun) -> None:
        self._measure.add(run)
        for i in range(len(run)):
            pack = run.subrun(i, i + 1)
            values = (pack.tokens.tolist(), pack.loss_mask.tolist(), pack.seq_starts.tolist())
            self._file.write(pickle_opcodes(dict(zip(KEYS, values, strict=True))) + pickle.APPEND)

    def _finish(self) -> None:
        self._file.write(_END)
        self._file.write_at(_beginning(self._counts.num_packs), 0)
        self._file.close()
        self._output.write_beside(SUMMARY_SUFFIX, self._measure.summary(), SUMMARY_KIND)

    def finalize(self) -> dict[str, Any]:
        """Move the file to its path, and return ``{"format": "legacy_pickle", "num_bins": packs}``."""
        return {"format": "legacy_pickle", "num_bins": super().finalize()["num_packs"]}


Writer = LegacyPickleWriter
