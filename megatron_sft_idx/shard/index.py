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


def _column(journal: str, column: int) -> Iterator[NDArray[np.int64]]:
    """One column of the journal's pack records, in chunks of some 64 thousand packs."""
    held: list[NDArray[np.int64]] = []
    count = 0
    with open(journal, "rb") as stream:
        read_head(stream, journal)
        for block in read_blocks(stream):
            if block.kind == PACK:
                held.append(block.records[:, column].astype(np.int64))
                count += len(held[-1])
                if count >= _CHUNK_PACKS:
                    yield np.concatenate(held)
                    held, count = [], 0
    if held:
        yield np.concatenate(held)


def _offsets(journal: str, column: int, scale: int = 1) -> Iterator[NDArray[np.int64]]:
    """Running sums of a column: chunks of positions, then the total."""
    total = 0
    for lengths in _column(journal, column):
        offsets = _native.offsets_from_lengths(lengths, scale, total)
        total = int(offsets[-1])
        yield offsets[:-1]
    yield np.array([total])


class HashedFile:
    """Writes to a file and hashes what it writes, in large pieces."""

    def __init__(self, file: OutputFile) -> None:
        self.file, self._hash = file, xxhash.xxh3_128()

    def write(self, data: bytes | memoryview | NDArray[Any]) -> None:
        """Append all of ``data``."""
        raw = as_bytes(data)
        self.file.write(raw)
        self._hash.update(raw)

    def checksum(self) -> bytes:
        """Of what was written here."""
        return self._hash.digest()

    def digest(self) -> FileDigest:
        """Of the file, where all of it was written here."""
        return FileDigest(self.file.nbytes, self.checksum())


def write_idx(file: OutputFile, journal: str, dtype_code: int, itemsize: int, num_packs: int) -> FileDigest:
    """Write Megatron's ``.idx``; ``itemsize`` of a token in bytes."""
    out = HashedFile(file)
    out.write(pack_idx_header(dtype_code, num_packs))
    for lengths in _column(journal, _LENGTH):
        out.write(lengths.astype("<i4"))
    left = num_packs
    for pointers in _offsets(journal, _LENGTH, itemsize):
        out.write(pointers[:left])  # the total at the end is no pack's pointer
        left -= len(pointers[:left])
    for start in range(0, num_packs + 1, _CHUNK_PACKS):
        out.write(np.arange(start, min(start + _CHUNK_PACKS, num_packs + 1), dtype="<i8"))
    return out.digest()


def write_seq_idx(file: OutputFile, journal: str, header: Header) -> Header:
    """Write ``.seq.idx``: arrays first, then the header with their checksum; returns the header as written."""
    file.write(bytes(header.nbytes))
    out = HashedFile(file)
    for offsets in _offsets(journal, _SEQUENCES):
        out.write(offsets)
    out.write(bytes(header.token_offsets_offset - file.nbytes))
    for offsets in _offsets(journal, _LENGTH):
        out.write(offsets)
    header = dataclasses.replace(header, arrays_checksum=out.checksum())
    file.write_at(header.encode(), 0)
    assert file.nbytes == header.seq_idx_nbytes
    return header
