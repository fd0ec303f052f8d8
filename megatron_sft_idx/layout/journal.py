"""``X.journal``: what a build has written so far. It exists only while a build runs, or after one was killed.

::

    head    8 bytes  b"SFTJRNL1", uint32 size of the JSON, uint32 zero, JSON (the builder's options), zeros to 8,
            uint64 xxh3_64 of all that
    block   4 bytes  b"PACK", uint32 n, uint64 xxh3_64 of the records, n records: uint32 length in tokens,
            uint32 sequences
    block   4 bytes  b"MASK", uint32 n = 1, uint64 xxh3_64, uint32 dtype code the loss file has from its first byte on,
            uint32 zero; while X.loss.bin.tmp.float32 exists, it is that file, about to take the other's name
    block   4 bytes  b"DONE", uint32 n = 0, uint64 xxh3_64 of nothing: all files are complete and synced, and only
            renames are left

A block is appended after the data of its packs has been written, so whoever finds a journal may count on the packs
of its complete blocks. It is also the spill of the index: a builder keeps no list of its packs in memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError
from megatron_sft_idx.layout.values import align

__all__ = ["DONE", "MASK", "MAX_RECORDS", "PACK", "Block", "encode_block", "encode_head", "read_blocks", "read_head"]

_MAGIC = b"SFTJRNL1"
_HEAD = struct.Struct("<8sII")
_BLOCK = struct.Struct("<4sIQ")
_RECORD_NBYTES = 8
_CHECKSUM = struct.Struct("<Q")
PACK, MASK, DONE = b"PACK", b"MASK", b"DONE"
_MAX_HEAD_NBYTES = 16 << 20
MAX_RECORDS = 1 << 24  # in one block


class Block(NamedTuple):
    """One complete block: its kind, and records uint32 [n, 2]."""

    kind: bytes
    records: NDArray[np.uint32]


def encode_head(options: Mapping[str, Any]) -> bytes:
    """The journal's first bytes."""
    block = json.dumps(options, sort_keys=True, ensure_ascii=False).encode()
    raw = _HEAD.pack(_MAGIC, len(block), 0) + block
    raw = raw.ljust(align(len(raw), 8), b"\0")
    return raw + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(raw))


def encode_block(kind: bytes, records: NDArray[np.uint32]) -> bytes:
    """One block; ``records`` uint32 [n, 2]."""
    raw = np.ascontiguousarray(records, dtype="<u4").tobytes()
    return _BLOCK.pack(kind, len(records), xxhash.xxh3_64_intdigest(raw)) + raw


def read_head(stream: BinaryIO, path: str) -> dict[str, Any]:
    """The builder's options; leaves the stream at the first block.

    Raises:
        CorruptShardError: the head is torn or changed.
    """
    raw = stream.read(_HEAD.size)
    if len(raw) == _HEAD.size:
        magic, size, _ = _HEAD.unpack(raw)
        if magic == _MAGIC and size <= _MAX_HEAD_NBYTES:
            raw += stream.read(align(_HEAD.size + size, 8) - _HEAD.size)
            checksum = stream.read(_CHECKSUM.size)
            if checksum == _CHECKSUM.pack(xxhash.xxh3_64_intdigest(raw)):
                options = _json_object(raw[_HEAD.size : _HEAD.size + size])
                if options is not None:
                    return options
    raise CorruptShardError(path, 0, "J1", "the journal's head is torn or changed; the build left nothing to recover")


def read_blocks(stream: BinaryIO) -> Iterator[Block]:
    """Complete blocks in order; ends without an error at the first torn one, as a kill leaves it."""
    while len(head := stream.read(_BLOCK.size)) == _BLOCK.size:
        kind, count, checksum = _BLOCK.unpack(head)
        if kind not in (PACK, MASK, DONE) or count > MAX_RECORDS:
            return
        raw = stream.read(count * _RECORD_NBYTES)
        if len(raw) != count * _RECORD_NBYTES or xxhash.xxh3_64_intdigest(raw) != checksum:
            return
        yield Block(kind, np.frombuffer(raw, dtype="<u4").reshape(count, 2))


def _json_object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
