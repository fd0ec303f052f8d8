"""The two index files, written from the journal's lengths in bounded memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.layout import FileDigest, Header
from megatron_sft_idx.layout.journal import PACK, read_blocks, read_head
from megatron_sft_idx.layout.mmididx import pack_idx_header
from megatron_sft_idx.storage import OutputFile, as_bytes

__all__ = ["HashedFile", "write_idx", "write_seq_idx"]

_LENGTH, _SEQUENCES = 0, 1
_CHUNK_PACKS = 1 << 16


def _column(journal: str, column: int, num_packs: int) -> Iterator[NDArray[np.int64]]:
    """One column of the journal's first pack records, in chunks of some 64 thousand packs."""
    held: list[NDArray[np.int64]] = []
    count, left = 0, num_packs
    with open(journal, "rb") as stream:
        read_head(stream, journal)
        for block in read_blocks(stream):
            if block.kind == PACK and left:
                held.append(block.records[:left, column].astype(np.int64))
                count, left = count + len(held[-1]), left - len(held[-1])
                if count >= _CHUNK_PACKS:
                    yield np.concatenate(held)
                    held, count = [], 0
    if held:
        yield np.concatenate(held)


def _offsets(journal: str, column: int, num_packs: int, scale: int = 1) -> Iterator[NDArray[np.int64]]:
    """Running sums of a column: chunks of positions, then the total."""
    total = 0
    for lengths in _column(journal, column, num_packs):
        offsets = _native.offsets_from_lengths(lengths, scale, total)
        total = int(offsets[-1])
        yield offsets[:-1]
    yield np.array([total])


class HashedFile:
    """Writes to a file and hashes what it writes, in large pieces.

    Attributes:
        file: the file.
        nbytes: bytes hashed: of all that is in the file, once what it held before was taken in.
    """

    def __init__(self, file: OutputFile) -> None:
        self.file, self.nbytes, self._hash = file, 0, xxhash.xxh3_128()

    def take(self, data: bytes) -> None:
        """Hash bytes that are in the file already, the next behind those hashed so far."""
        self.nbytes += len(data)
        self._hash.update(data)

    def write(self, data: bytes | memoryview | NDArray[Any]) -> None:
        """Append all of ``data``."""
        raw = as_bytes(data)
        self.file.write(raw)
        self.nbytes += len(raw)
        self._hash.update(raw)

    def checksum(self) -> bytes:
        """Of what was written or taken here."""
        return self._hash.digest()

    def digest(self) -> FileDigest:
        """Of the file, where all of it was written or taken here."""
        return FileDigest(self.nbytes, self.checksum())


def write_idx(file: OutputFile, journal: str, dtype_code: int, itemsize: int, num_packs: int) -> FileDigest:
    """Write Megatron's ``.idx`` of the journal's first packs; ``itemsize`` of a token in bytes."""
    out = HashedFile(file)
    out.write(pack_idx_header(dtype_code, num_packs))
    for lengths in _column(journal, _LENGTH, num_packs):
        out.write(lengths.astype("<i4"))
    left = num_packs
    for pointers in _offsets(journal, _LENGTH, num_packs, itemsize):
        out.write(pointers[:left])  # the total at the end is no pack's pointer
        left -= len(pointers[:left])
    for start in range(0, num_packs + 1, _CHUNK_PACKS):
        out.write(np.arange(start, min(start + _CHUNK_PACKS, num_packs + 1), dtype="<i8"))
    return out.digest()


def write_seq_idx(file: OutputFile, journal: str, header: Header) -> Header:
    """Write ``.seq.idx`` of as many of the journal's packs as the header says: arrays, then the header with their sum.

    Returns:
        The header as written.
    """
    file.write(bytes(header.nbytes))
    out = HashedFile(file)
    for offsets in _offsets(journal, _SEQUENCES, header.num_packs):
        out.write(offsets)
    out.write(bytes(header.token_offsets_offset - file.nbytes))
    for offsets in _offsets(journal, _LENGTH, header.num_packs):
        out.write(offsets)
    header = dataclasses.replace(header, arrays_checksum=out.checksum())
    file.write_at(header.encode(), 0)
    assert file.nbytes == header.seq_idx_nbytes
    return header
