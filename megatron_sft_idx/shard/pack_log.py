"""The log ``X.building/packs``: one record for each pack that a writer has written.

A sequence of blocks, all numbers little-endian::

    4 bytes  b"PACK", uint32 n, uint64 xxh3_64 of the records, n records, one for each pack: uint32 length in tokens,
             uint32 number of sequences

The logs of images and audio consist of blocks of the same form, with other records (``media_writer``). A block is
appended after the data of its packs was written, so after a kill the data of all complete blocks is present. After a
power failure, unsynced data may be missing at the end of any file; then only packs that are complete in all data files
count. An incomplete or damaged block ends the log.

A writer keeps no list of its packs in memory. It makes the indexes from the log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.storage import OutputFile, open_regular

_BLOCK = struct.Struct("<4sIQ")
_PACK_MAGIC, _PACK = b"PACK", np.dtype(("<u4", 2))
_MAX_RECORDS = 1 << 24  # in one block
# Maximum number of packs in a chunk, which is a few MiB of arrays.
CHUNK_PACKS = 1 << 15


class PackChunk(NamedTuple):
    """Consecutive packs: the length in tokens and the number of sequences of each, int64 [packs]."""

    lengths: NDArray[np.int64]
    sequences: NDArray[np.int64]


def append_records(log: OutputFile, magic: bytes, records: NDArray[Any]) -> None:
    """Append records, [n] or [n, fields], in blocks that begin with ``magic``."""
    for start in range(0, len(records), _MAX_RECORDS):
        part = records[start : start + _MAX_RECORDS]
        raw = np.ascontiguousarray(part).tobytes()
        log.write(_BLOCK.pack(magic, len(part), xxhash.xxh3_64_intdigest(raw)) + raw)


def read_records(stream: BinaryIO, magic: bytes, record: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Read the records of each block, up to a block that is incomplete, damaged, or from another log."""
    while len(head := stream.read(_BLOCK.size)) == _BLOCK.size:
        found, count, checksum = _BLOCK.unpack(head)
        if found != magic or count > _MAX_RECORDS:
            return
        raw = stream.read(count * record.itemsize)
        if len(raw) != count * record.itemsize or xxhash.xxh3_64_intdigest(raw) != checksum:
            return
        yield np.frombuffer(raw, record)


def append_packs(log: OutputFile, records: NDArray[Any]) -> None:
    """Log packs whose data is in the files: the number of tokens and of sequences of each, integers [packs, 2]."""
    append_records(log, _PACK_MAGIC, records.astype("<u4", copy=False))


def read_blocks(stream: BinaryIO) -> Iterator[NDArray[np.uint32]]:
    """Read the records of each block of packs, uint32 [packs, 2], up to an incomplete or damaged block."""
    return read_records(stream, _PACK_MAGIC, _PACK)


class LoggedPacks:
    """The first packs of a log, in chunks of about 32 thousand. It can be iterated several times.

    Args:
        path: path of the log.
        num_packs: maximum number of packs.
    """

    def __init__(self, path: str, num_packs: int) -> None:
        self._path, self._num_packs = path, num_packs

    def __iter__(self) -> Iterator[PackChunk]:
        records: list[NDArray[np.uint32]] = []  # records of the next chunk
        count, remaining = 0, self._num_packs
        with open_regular(self._path) as stream:
            for block in read_blocks(stream):
                records.append(block[:remaining])
                count, remaining = count + len(records[-1]), remaining - len(records[-1])
                if count >= CHUNK_PACKS:
                    yield _chunk(records)
                    records, count = [], 0
        if count:
            yield _chunk(records)


def _chunk(records: list[NDArray[np.uint32]]) -> PackChunk:
    # One field after the other, so that memory does not hold an array of both next to the result.
    return PackChunk(*(np.concatenate([each[:, field] for each in records], dtype=np.int64) for field in (0, 1)))
