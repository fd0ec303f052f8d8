"""Writing a legacy ``.npy`` pack by pack.

``numpy.save`` pickles an object array, which must be in memory whole: some 36 bytes a token. But the pickle of an array
is a fixed beginning (the array's type, shape and dtype), its elements one after another, and a fixed end; so it can be
written in a stream, with the number of packs, which comes first, filled in at the end. ``numpy.load`` of version 1
and 2 reads the result like any other.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
from io import BytesIO
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from megatron_sft_idx.errors import SequenceError
from megatron_sft_idx.formats.checks import checked_run, require_same_length
from megatron_sft_idx.formats.restricted_pickle import npy_header
from megatron_sft_idx.storage import open_regular
from megatron_sft_idx.storage.publish import Kind, new_file

__all__ = ["KEYS", "KIND", "LegacyPickleWriter"]

KEYS = ("input_ids", "loss_mask", "seq_start_id")

# Protocol 2: values stand in the stream as they are, without the frames of protocol 4.
_PROTOCOL = 2
# The number of packs as an eight-byte number, whatever it is.
_COUNT = struct.Struct("<2sq")
# What may stand between a list and its first element.
_BETWEEN = ("MARK", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT")


def _opcodes(value: Any) -> bytes:
    """The pickle of a value as it stands inside another: no first and last opcode, no memo entries."""
    file = BytesIO()
    pickler = pickle.Pickler(file, _PROTOCOL)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()[2:-1]


def _count(number: int) -> bytes:
    return _COUNT.pack(pickle.LONG1 + b"\x08", number)


# What numpy.ndarray.__reduce__ gives: _reconstruct(ndarray, (0,), b"b"), then its state up to the list of elements.
# The module has its older name, which newer numpy knows too.
_ARRAY = b"".join(
    (
        pickle.PROTO + bytes([_PROTOCOL]),
        pickle.GLOBAL + b"numpy.core.multiarray\n_reconstruct\n",
        pickle.GLOBAL + b"numpy\nndarray\n",
        _opcodes((0,)),
        _opcodes("b"),
        pickle.TUPLE3 + pickle.REDUCE,
        pickle.MARK + _opcodes(1),
    )
)
_AFTER_SHAPE = pickle.TUPLE1 + _opcodes(np.dtype(object)) + pickle.NEWFALSE + pickle.EMPTY_LIST
_END = pickle.TUPLE + pickle.BUILD + pickle.STOP


def _beginning(num_packs: int) -> bytes:
    """Everything before the elements; equally long for any number of packs."""
    header = BytesIO()
    # numpy leaves room for the shape to grow and fills it with spaces, so the header's size does not change.
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (num_packs,)})
    return header.getvalue() + _ARRAY + _count(num_packs) + _AFTER_SHAPE


def _holds_packs(path: str) -> bool:
    """Whether a file is an array of objects, none or the first of them a pack; reads no further, unpickles nothing."""
    try:
        with open_regular(path) as file:
            shape, dtype = npy_header(file, path)
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


KIND = Kind("a pickled .npy of packs", _holds_packs)


class LegacyPickleWriter:
    """Writes packs as a pickled ``.npy`` of dicts of lists, holding one pack in memory.

    A context manager: a clean exit finalizes, an exception leaves nothing behind.

    Args:
        path: the file; it appears when all of it is written.
        overwrite: replace a file of packs that is there.

    Attributes:
        path: the file, its name resolved.
        temporary: where it is until then.

    Raises:
        FormatError: something is at ``path`` that may not be replaced.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self._output = new_file(path, KIND, overwrite=overwrite)
        self.path, self.temporary = self._output.path, self._output.temporary
        self._file = self._output.open()
        self._complete = self._done = False
        self.num_packs = 0
        try:
            self._file.write(_beginning(0))
        except BaseException:
            self.abandon()
            raise

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
        path = self.path
        if bin_id != self.num_packs:
            raise SequenceError(path, bin_id, f"the next pack is number {self.num_packs}; write packs in order")
        ids, mask, starts = np.asarray(input_ids), np.asarray(loss_mask), np.asarray(seq_start_id)
        require_same_length(path, bin_id, input_ids=ids.size, loss_mask=mask.size)
        run = checked_run(path, bin_id, ids, mask, starts, [ids.size], [starts.size])
        row = {
            "input_ids": run.tokens.tolist(),
            "loss_mask": run.loss_mask.tolist(),
            "seq_start_id": run.seq_starts.tolist(),
        }
        self._file.write(_opcodes(row) + pickle.APPEND)
        self.num_packs += 1

    def complete(self) -> None:
        """Write the end, so that the file at ``temporary`` can be read; may be called twice."""
        if not self._complete:
            self._file.write(_END)
            self._file.write_at(_beginning(self.num_packs), 0)
            self._file.close()
            self._complete = True

    def finalize(self) -> dict[str, Any]:
        """Put the file in its place; returns what it is and how many packs it holds. May be called twice."""
        if not self._done:
            self.complete()
            self._output.publish()
            self._done = True
        return {"format": "legacy_pickle", "num_bins": self.num_packs}

    def abandon(self) -> None:
        """Remove what was written; nothing where it is finalized or abandoned already."""
        self._output.abandon()

    def __enter__(self) -> LegacyPickleWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abandon()
