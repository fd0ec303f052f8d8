"""``.npy`` files whose arrays are mapped or written in order; nothing in them is ever unpickled."""

from __future__ import annotations

import io
import math
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import open_array

__all__ = ["NpyHeader", "encode_header", "open_npy", "read_header"]

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class NpyHeader(NamedTuple):
    """What a ``.npy`` says of its array, and where that begins, in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size that the whole file must have; a Python int, whatever the shape claims."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def read_header(path: str) -> NpyHeader:
    """The header of a ``.npy`` of numbers, held against the file's size.

    Raises:
        FormatError: no such file, another kind of file, an array of objects, an impossible shape, or a size that
            does not fit the shape.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            shape, fortran, dtype = _READERS[np.lib.format.read_magic(file)](file)
            header = NpyHeader(shape, dtype, file.tell())
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(f"{path}: not there; a memmap folder has five .npy files and a manifest") from None
    except OSError:
        raise
    except Exception as error:
        # numpy evaluates the header as a literal and lets its parser's errors through.
        raise FormatError(f"{path}: not a .npy file of version 1 or 2: {type(error).__name__}: {error}") from None
    if dtype.kind not in "biuf" or dtype.names is not None:
        raise FormatError(f"{path}: an array of {dtype}, expected numbers; objects are never unpickled")
    if any(type(side) is not int or side < 0 for side in shape):
        raise FormatError(f"{path}: shape {shape}, expected whole numbers of 0 or more")
    if fortran and len(shape) > 1 and min(shape) > 1:
        raise FormatError(f"{path}: stored by columns (fortran_order), expected by rows; save it with order='C'")
    if size != header.nbytes:
        raise FormatError(
            f"{path}: {size} bytes, expected {header.nbytes} for {dtype} of shape {shape}; it was cut short or is"
            " still being written: copy or write it again"
        )
    return header


def open_npy(path: str, header: NpyHeader) -> NDArray[Any]:
    """The array as a read-only map, in the file's byte order."""
    count = math.prod(header.shape)
    array = open_array(path, header.dtype, count, nbytes=header.nbytes, offset=header.offset)
    return np.asarray(array).reshape(header.shape)


def encode_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The bytes before the array, as ``numpy.save`` writes them."""
    out = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, description)
    return out.getvalue()
