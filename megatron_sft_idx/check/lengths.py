"""Lengths of packs as files tell them: an index, even a damaged one, and how many sequences start in each pack.

Nothing in these files is trusted. Each source is checked from end to end when it is made, and streams afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError
from megatron_sft_idx.layout import TOKEN_DTYPES
from megatron_sft_idx.layout.files import IDX_HEADER, IDX_HEADER_NBYTES, MAX_CAPACITY, idx_places, pack_idx_header
from megatron_sft_idx.shard.writer import CHUNK_PACKS, PackChunk
from megatron_sft_idx.storage import Array, open_array, open_regular

__all__ = ["Lengths", "Repeated", "Starts", "idx_lengths", "offset_lengths", "started"]

_CHUNK = 1 << 16
_T = TypeVar("_T")


class Repeated(Generic[_T]):
    """Chunks that speak of all packs in order, and may be iterated again and again.

    Attributes:
        origin: where they come from, for people.
        num_packs: how many packs there are.
    """

    def __init__(self, origin: str, num_packs: int, chunks: Callable[[], Iterator[_T]]) -> None:
        self.origin, self.num_packs, self._chunks = origin, num_packs, chunks

    def __iter__(self) -> Iterator[_T]:
        return self._chunks()


# In tokens, int64.
Lengths: TypeAlias = Repeated[NDArray[np.int64]]


def idx_lengths(path: str, tokens_nbytes: int) -> tuple[Lengths, np.dtype[Any]]:
    """The lengths in a ``.idx`` made by this package, or by Megatron itself for the same packs; and the token dtype.

    Args:
        path: the file.
        tokens_nbytes: size of ``.bin`` in bytes, which the lengths must add up to.

    Raises:
        CorruptShardError: not an index of such a file (rules I1, P1, F2).
        OSError: the file cannot be read.
    """
    nbytes = os.stat(path).st_size

    def corrupt(offset: int, what: str, rule: str = "I1") -> CorruptShardError:
        detail = f"{what}; this file of {nbytes} bytes is damaged, or not the index of the .bin beside it"
        return CorruptShardError(path, offset, rule, detail)

    with open_regular(path) as file:
        raw = file.read(IDX_HEADER_NBYTES)
    if len(raw) < IDX_HEADER_NBYTES:
        raise corrupt(len(raw), f"file ends after {len(raw)} bytes, an index has {IDX_HEADER_NBYTES} or more")
    _, _, code, num_packs, documents = IDX_HEADER.unpack(raw)
    if code not in TOKEN_DTYPES:
        raise corrupt(17, f"dtype code {code}, expected 4 (int32) or 8 (uint16)")
    if raw[:17] != pack_idx_header(code, 0)[:17]:
        raise corrupt(0, f"begins with {raw[:17]!r}, which is not Megatron's index of version 1")
    # Python's numbers do not overflow, so a count near 2^63 is only one that does not fit the file.
    if nbytes != (expected := IDX_HEADER_NBYTES + 12 * num_packs + 8 * documents):
        raise corrupt(18, f"{num_packs} packs and {documents} documents take {expected} bytes")
    _, base, _ = idx_places(num_packs)
    stored, pointers = (
        open_array(path, np.dtype(dtype), num_packs, nbytes=nbytes, offset=offset, backend="pread")
        for dtype, offset in (("<i4", IDX_HEADER_NBYTES), ("<i8", base))
    )

    def chunks() -> Iterator[NDArray[np.int64]]:
        for first in range(0, num_packs, CHUNK_PACKS):
            yield stored[first : first + CHUNK_PACKS].astype(np.int64)

    first = end = 0
    for lengths in chunks():
        if (lengths <= 0).any():
            bad = int(np.argmax(lengths <= 0))
            at, what = IDX_HEADER_NBYTES + 4 * (first + bad), f"pack {first + bad} has length {lengths[bad]}"
            raise corrupt(at, f"{what}, expected 1 or more", "P1")
        begins = _native.offsets_from_lengths(lengths, TOKEN_DTYPES[code].itemsize, end)
        found = pointers[first : first + len(lengths)]
        if (wrong := found != begins[:-1]).any():
            bad = int(np.argmax(wrong))
            what = f"pack {first + bad} begins at byte {found[bad]}, by the lengths before it at {begins[bad]}"
            raise corrupt(base + 8 * (first + bad), what)
        first, end = first + len(lengths), int(begins[-1])
    if end != tokens_nbytes:
        raise corrupt(IDX_HEADER_NBYTES, f"packs of {end} bytes in all, .bin has {tokens_nbytes}", "F2")
    return Repeated(".idx", num_packs, chunks), TOKEN_DTYPES[code]


def offset_lengths(path: str, offset: int, num_packs: int) -> Lengths:
    """The lengths between offsets of a ``.seq.idx``, or of what is left of it: of packs, or sequences of each.

    Args:
        path: the file.
        offset: where the offsets begin in it, in bytes.
        num_packs: one offset less than the file holds there.

    Raises:
        CorruptShardError: the offsets do not begin with 0 or do not ascend (rule O2), or the file ends before them.
    """
    nbytes = os.stat(path).st_size
    if offset + 8 * (num_packs + 1) > nbytes:
        raise CorruptShardError(path, nbytes, "F2", "the file ends before its token offsets do")
    offsets = open_array(path, np.dtype("<i8"), num_packs + 1, nbytes=nbytes, offset=offset, backend="pread")
    if (first := int(offsets[:1][0])) != 0:
        raise CorruptShardError(path, offset, "O2", f"token offsets begin with {first}, expected 0")

    def chunks() -> Iterator[NDArray[np.int64]]:
        for first in range(0, num_packs, CHUNK_PACKS):
            lengths = np.diff(offsets[first : min(first + CHUNK_PACKS, num_packs) + 1])
            if (wrong := (lengths <= 0) | (lengths > MAX_CAPACITY)).any():
                bad = int(np.argmax(wrong))
                detail = f"token offsets give pack {first + bad} a length of {lengths[bad]}"
                raise CorruptShardError(path, offset + 8 * (first + bad), "O2", detail)
            yield lengths

    for _ in chunks():
        pass
    return Repeated(".seq.idx", num_packs, chunks)


class Starts:
    """``.seq.bin``: every pack's first sequence starts at 0 and no other one does, so its zeros are the packs.

    Raises:
        CorruptShardError: a size that is not of uint32, a first start that is not 0, or one that is not above the one
            before it in its pack (rules F2, P2, P3).
    """

    def __init__(self, path: str) -> None:
        nbytes = os.stat(path).st_size
        if nbytes % 4:
            raise CorruptShardError(path, nbytes, "F2", f"file has {nbytes} bytes, starts have 4 each; restore it")
        self.path, self.num_sequences, self.num_packs = path, nbytes // 4, 0
        self.array: Array = open_array(path, np.dtype("<u4"), self.num_sequences, nbytes=nbytes, backend="pread")
        before = np.zeros(1, np.uint32)
        for first in range(0, self.num_sequences, _CHUNK):
            starts = np.concatenate([before, self.array[first : first + _CHUNK]])
            if not first and starts[1]:
                raise CorruptShardError(path, 0, "P2", f"the first start is {starts[1]}, expected 0; restore the file")
            wrong = (starts[1:] != 0) & (starts[1:] <= starts[:-1])
            if wrong.any():
                at = int(np.argmax(wrong))
                what = f"a start of {starts[at + 1]} after {starts[at]}, expected a larger one or 0; restore the file"
                raise CorruptShardError(path, 4 * (first + at), "P3", what)
            self.num_packs += int((starts[1:] == 0).sum())
            before = starts[-1:]

    def counts(self) -> Iterator[NDArray[np.int64]]:
        """Sequences in each pack, in chunks of any size."""
        for _, offsets in self.packs():
            yield np.diff(offsets)

    def packs(self) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        """All packs: starts of some, which are known to ascend in each, and int64 offsets of each one's."""
        held = np.empty(0, np.uint32)
        for first in range(0, self.num_sequences, _CHUNK):
            held = np.concatenate([held, self.array[first : first + _CHUNK]], dtype=np.uint32)
            offsets = np.flatnonzero(held == 0)
            yield held, offsets
            held = held[offsets[-1] :]
        yield held, np.array([0, len(held)] if len(held) else [0])


def started(lengths: Lengths, starts: Starts) -> Repeated[PackChunk]:
    """Packs by lengths from one file and starts of another. CorruptShardError where they differ in number."""
    if lengths.num_packs != starts.num_packs:
        raise CorruptShardError(
            starts.path,
            0,
            "P2",
            f"{starts.num_packs} packs begin here (starts of 0), {lengths.num_packs} by {lengths.origin};"
            " one of the two is damaged or of another shard: restore it",
        )

    def chunks() -> Iterator[PackChunk]:
        counts, held = starts.counts(), np.empty(0, np.int64)
        for some in lengths:
            while len(held) < len(some):
                held = np.concatenate([held, next(counts)])
            yield PackChunk(some, held[: len(some)])
            held = held[len(some) :]

    return Repeated(lengths.origin, lengths.num_packs, chunks)
