"""The two index files, written in bounded memory from what is known of each pack: its length and its sequence count."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.layout import FileDigest, Header
from megatron_sft_idx.layout.journal import PACK, read_blocks, read_head
from megatron_sft_idx.layout.mmididx import pack_idx_header
from megatron_sft_idx.storage import OutputFile, open_regular
from megatron_sft_idx.storage.hashing import HashedFile

__all__ = ["CHUNK_PACKS", "JournalPacks", "PackChunk", "write_idx", "write_seq_idx"]

# Packs handled at once: a few MiB of arrays.
CHUNK_PACKS = 1 << 15


class PackChunk(NamedTuple):
    """Consecutive packs: ``lengths`` in tokens and ``sequences`` counted, both int64 [packs]."""

    lengths: NDArray[np.int64]
    sequences: NDArray[np.int64]


class JournalPacks:
    """The first packs that a journal records, in chunks of some 32 thousand; may be iterated again and again."""

    def __init__(self, journal: str, num_packs: int) -> None:
        self._journal, self._num_packs = journal, num_packs

    def __iter__(self) -> Iterator[PackChunk]:
        held: list[NDArray[np.uint32]] = []
        count, left = 0, self._num_packs
        with open_regular(self._journal) as stream:
            read_head(stream, self._journal)
            for block in read_blocks(stream):
                if block.kind == PACK and left:
                    held.append(block.records[:left])
                    count, left = count + len(held[-1]), left - len(held[-1])
                    if count >= CHUNK_PACKS:
                        yield _chunk(held)
                        held, count = [], 0
        if held:
            yield _chunk(held)


def _chunk(records: list[NDArray[np.uint32]]) -> PackChunk:
    lengths, sequences = (np.concatenate([block[:, column] for block in records], dtype=np.int64) for column in (0, 1))
    return PackChunk(lengths, sequences)


def _offsets(counts: Iterable[NDArray[np.int64]], scale: int = 1) -> Iterator[NDArray[np.int64]]:
    """Running sums: chunks of positions, then the total."""
    total = 0
    for chunk in counts:
        offsets = _native.offsets_from_lengths(chunk, scale, total)
        total = int(offsets[-1])
        yield offsets[:-1]
    yield np.array([total])


def write_idx(
    file: OutputFile, packs: Iterable[PackChunk], dtype_code: int, itemsize: int, num_packs: int
) -> FileDigest:
    """Write Megatron's ``.idx``; ``packs`` is iterated twice, ``itemsize`` is of a token in bytes."""
    out = HashedFile(file)
    out.write(pack_idx_header(dtype_code, num_packs))
    for chunk in packs:
        out.write(chunk.lengths.astype("<i4"))
    left = num_packs
    for pointers in _offsets((chunk.lengths for chunk in packs), itemsize):
        out.write(pointers[:left])  # the total at the end is no pack's pointer
        left -= len(pointers[:left])
    for start in range(0, num_packs + 1, CHUNK_PACKS):
        out.write(np.arange(start, min(start + CHUNK_PACKS, num_packs + 1), dtype="<i8"))
    return out.digest()


def write_seq_idx(file: OutputFile, packs: Iterable[PackChunk], header: Header) -> Header:
    """Write ``.seq.idx``: arrays first, then the header with their checksum; returns the header as written.

    ``packs`` is iterated twice.
    """
    file.write(bytes(header.nbytes))
    out = HashedFile(file)
    for offsets in _offsets(chunk.sequences for chunk in packs):
        out.write(offsets)
    out.write(bytes(header.token_offsets_offset - file.nbytes))
    for offsets in _offsets(chunk.lengths for chunk in packs):
        out.write(offsets)
    header = dataclasses.replace(header, arrays_checksum=out.checksum())
    file.write_at(header.encode(), 0)
    assert file.nbytes == header.seq_idx_nbytes
    return header
