"""Where the lengths of the packs can be read: Megatron's ``.idx``, or the token offsets of ``.seq.idx``.

Nothing in these files is trusted. Each source is checked from end to end when it is made, and streams afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError
from megatron_sft_idx.layout import TOKEN_DTYPES
from megatron_sft_idx.layout.mmididx import IDX_HEADER, IDX_HEADER_NBYTES, pack_idx_header
from megatron_sft_idx.layout.values import MAX_CAPACITY
from megatron_sft_idx.shard.index import CHUNK_PACKS
from megatron_sft_idx.storage import Array, open_array, open_regular

__all__ = ["IdxLengths", "Lengths", "OffsetLengths"]


class Lengths(Protocol):
    """Lengths of all packs in tokens, in int64 chunks; may be iterated again and again.

    Attributes:
        origin: where they come from, for people.
        num_packs: how many there are.
    """

    origin: str
    num_packs: int

    def __iter__(self) -> Iterator[NDArray[np.int64]]: ...


class IdxLengths:
    """The lengths in a ``.idx`` made by this package, or by Megatron itself for the same packs.

    Args:
        path: the file.
        tokens_nbytes: size of ``.bin`` in bytes, which the lengths must add up to.

    Raises:
        CorruptShardError: not an index of such a file (rules I1, P1, F2).
        OSError: the file cannot be read.
    """

    origin = ".idx"

    def __init__(self, path: str, tokens_nbytes: int) -> None:
        self._path = path
        self._nbytes = os.stat(path).st_size
        with open_regular(path) as file:
            raw = file.read(IDX_HEADER_NBYTES)
        if len(raw) < IDX_HEADER_NBYTES:
            raise self._corrupt(len(raw), f"file ends after {len(raw)} bytes, an index has {IDX_HEADER_NBYTES} or more")
        _, _, code, self.num_packs, documents = IDX_HEADER.unpack(raw)
        if code not in TOKEN_DTYPES:
            raise self._corrupt(17, f"dtype code {code}, expected 4 (int32) or 8 (uint16)")
        self.token_dtype: np.dtype[Any] = TOKEN_DTYPES[code]
        if raw[:17] != pack_idx_header(code, 0)[:17]:
            raise self._corrupt(0, f"begins with {raw[:17]!r}, which is not Megatron's index of version 1")
        # Python's numbers do not overflow, so a count near 2^63 is only one that does not fit the file.
        expected = IDX_HEADER_NBYTES + 12 * self.num_packs + 8 * documents
        if self._nbytes != expected:
            raise self._corrupt(18, f"{self.num_packs} packs and {documents} documents take {expected} bytes")
        self.num_tokens = self._check(tokens_nbytes)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        lengths = self._array(np.dtype("<i4"), IDX_HEADER_NBYTES)
        for first in range(0, self.num_packs, CHUNK_PACKS):
            yield lengths[first : first + CHUNK_PACKS].astype(np.int64)

    def _array(self, dtype: np.dtype[Any], offset: int) -> Array:
        return open_array(self._path, dtype, self.num_packs, nbytes=self._nbytes, offset=offset, backend="pread")

    def _check(self, tokens_nbytes: int) -> int:
        """All tokens, once lengths, pointers and the size of ``.bin`` agree."""
        base = IDX_HEADER_NBYTES + 4 * self.num_packs
        pointers, first, end = self._array(np.dtype("<i8"), base), 0, 0
        for lengths in self:
            if (lengths <= 0).any():
                bad = int(np.argmax(lengths <= 0))
                at = IDX_HEADER_NBYTES + 4 * (first + bad)
                raise self._corrupt(at, f"pack {first + bad} has length {lengths[bad]}, expected 1 or more", "P1")
            expected = _native.offsets_from_lengths(lengths, self.token_dtype.itemsize, end)
            found = pointers[first : first + len(lengths)]
            if (wrong := found != expected[:-1]).any():
                bad = int(np.argmax(wrong))
                raise self._corrupt(
                    base + 8 * (first + bad),
                    f"pack {first + bad} begins at byte {found[bad]}, by the lengths before it at {expected[bad]}",
                )
            first, end = first + len(lengths), int(expected[-1])
        if end != tokens_nbytes:
            raise self._corrupt(IDX_HEADER_NBYTES, f"packs of {end} bytes in all, .bin has {tokens_nbytes}", "F2")
        return end // self.token_dtype.itemsize

    def _corrupt(self, offset: int, what: str, rule: str = "I1") -> CorruptShardError:
        detail = f"{what}; this file of {self._nbytes} bytes is damaged, or not the index of the .bin beside it"
        return CorruptShardError(self._path, offset, rule, detail)


class OffsetLengths:
    """The lengths between the token offsets of a ``.seq.idx``, or of what is left of it.

    Args:
        path: the file.
        offset: where the token offsets begin in it, in bytes.
        num_packs: one offset less than the file holds there.

    Raises:
        CorruptShardError: the offsets do not begin with 0 or do not ascend (rule O2), or the file ends before them.
    """

    origin = ".seq.idx"

    def __init__(self, path: str, offset: int, num_packs: int) -> None:
        self._path, self._offset, self.num_packs = path, offset, num_packs
        nbytes = os.stat(path).st_size
        if offset + 8 * (num_packs + 1) > nbytes:
            raise CorruptShardError(path, nbytes, "F2", "the file ends before its token offsets do")
        self._offsets = open_array(path, np.dtype("<i8"), num_packs + 1, nbytes=nbytes, offset=offset, backend="pread")
        if (first := int(self._offsets[:1][0])) != 0:
            raise CorruptShardError(path, offset, "O2", f"token offsets begin with {first}, expected 0")
        for _ in self:
            pass

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        for first in range(0, self.num_packs, CHUNK_PACKS):
            lengths = np.diff(self._offsets[first : min(first + CHUNK_PACKS, self.num_packs) + 1])
            if (wrong := (lengths <= 0) | (lengths > MAX_CAPACITY)).any():
                bad = first + int(np.argmax(wrong))
                detail = f"token offsets give pack {bad} a length of {lengths[bad - first]}"
                raise CorruptShardError(self._path, self._offset + 8 * bad, "O2", detail)
            yield lengths
