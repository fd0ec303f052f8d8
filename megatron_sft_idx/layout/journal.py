"""``X.journal``: what a build has written so far. It exists only while a build runs, or after one was interrupted.

::

    head    8 bytes  b"SFTJRNL1", uint32 size of the JSON, uint32 zero, JSON (``BuildOptions``), zeros to 8,
            uint64 xxh3_64 of all that
    block   4 bytes  b"PACK", uint32 n, uint64 xxh3_64 of the records, n records: uint32 length in tokens,
            uint32 sequences
    block   4 bytes  b"MASK", uint32 n = 1, uint64 xxh3_64, uint32 dtype code the loss file has from its first byte on,
            uint32 zero; while X.loss.bin.tmp.float32 exists, it is that file, about to take the other's name
    block   4 bytes  b"MARK", uint32 n, uint64 xxh3_64 of what follows, n times 8 bytes: JSON of whoever feeds the
            builder, spaces to 8; all that it stands for lies in the blocks before it
    block   4 bytes  b"DONE", uint32 n = 0, uint64 xxh3_64 of nothing: all files are complete and synced, and only
            renames are left

A block is appended after the data of its packs has been written, so whoever finds a journal may count on the packs
of its complete blocks, except after a power failure: what had not been synced may then be missing from the end of any
file, and packs count as far as the three data files reach. MASK and DONE are synced before anything that follows from
them. A torn block ends the journal; a build that is taken up again cuts it back, by renaming a shorter copy of it,
synced and locked, over it.

The journal is also the spill of the index: a builder keeps no list of its packs in memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError
from megatron_sft_idx.layout.values import MASK_DTYPES, MAX_CAPACITY, TOKEN_DTYPES, align, mask_dtype_of, token_dtype_of

__all__ = [
    "DONE",
    "MARK",
    "MASK",
    "MAX_RECORDS",
    "PACK",
    "Block",
    "BuildOptions",
    "encode_block",
    "encode_head",
    "encode_mark",
    "read_blocks",
    "read_head",
]

_MAGIC = b"SFTJRNL1"
_HEAD = struct.Struct("<8sII")
_BLOCK = struct.Struct("<4sIQ")
_RECORD_NBYTES = 8
_CHECKSUM = struct.Struct("<Q")
PACK, MASK, MARK, DONE = b"PACK", b"MASK", b"MARK", b"DONE"
_MAX_HEAD_NBYTES = 16 << 20
MAX_RECORDS = 1 << 24  # in one block


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a build was begun with: the journal's head.

    Attributes:
        token_dtype: of the token file: uint16 or int32.
        mask_dtype: of the loss file at the beginning: uint8 or float32.
        capacity: most token positions a pack may hold; None for the longest pack.
        sequence_multiple: each sequence counts as its length rounded up to this.
        pad_id: the tokenizer's padding id; None where unknown.
        metadata: JSON object, as far as it was known when the build began.
    """

    token_dtype: np.dtype[Any]
    mask_dtype: np.dtype[Any]
    capacity: int | None
    sequence_multiple: int
    pad_id: int | None
    metadata: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """As JSON values; dtypes by their codes."""
        return {
            "token_dtype": token_dtype_of(self.token_dtype)[0],
            "mask_dtype": mask_dtype_of(self.mask_dtype)[0],
            "capacity": self.capacity,
            "sequence_multiple": self.sequence_multiple,
            "pad_id": self.pad_id,
            "metadata": self.metadata,
        }

    @classmethod
    def decode(cls, options: Mapping[str, Any], path: str) -> BuildOptions:
        """From a journal's head. CorruptShardError where a value is none that a builder writes."""

        def whole(name: str, least: int, *, optional: bool = True) -> Any:
            value = options.get(name)
            if (value is None and optional) or (type(value) is int and least <= value <= MAX_CAPACITY):
                return value
            raise _torn(path, f"{name} {value!r}")

        codes = options.get("token_dtype"), options.get("mask_dtype")
        metadata = options.get("metadata")
        if type(codes[0]) is not int or codes[0] not in TOKEN_DTYPES:
            raise _torn(path, f"token dtype code {codes[0]!r}")
        if type(codes[1]) is not int or codes[1] not in MASK_DTYPES:
            raise _torn(path, f"mask dtype code {codes[1]!r}")
        if not isinstance(metadata, dict):
            raise _torn(path, "no metadata")
        return cls(
            TOKEN_DTYPES[codes[0]],
            MASK_DTYPES[codes[1]],
            whole("capacity", 1),
            whole("sequence_multiple", 1, optional=False),
            whole("pad_id", 0),
            metadata,
        )


class Block(NamedTuple):
    """One complete block: its kind, and records uint32 [n, 2]."""

    kind: bytes
    records: NDArray[np.uint32]

    def mark(self) -> dict[str, Any] | None:
        """What a MARK block says; None where it is no JSON object."""
        return _json_object(self.records.tobytes())


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


def encode_mark(mark: Mapping[str, Any]) -> bytes:
    """A MARK block."""
    raw = json.dumps(mark, ensure_ascii=False).encode()
    raw = raw.ljust(align(len(raw), _RECORD_NBYTES), b" ")
    return encode_block(MARK, np.frombuffer(raw, "<u4").reshape(-1, 2))


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
    raise _torn(path, "the journal's head is torn or changed")


def read_blocks(stream: BinaryIO) -> Iterator[Block]:
    """Complete blocks in order; ends without an error at the first torn one, as a kill leaves it."""
    while len(head := stream.read(_BLOCK.size)) == _BLOCK.size:
        kind, count, checksum = _BLOCK.unpack(head)
        if kind not in (PACK, MASK, MARK, DONE) or count > MAX_RECORDS:
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


def _torn(path: str, found: str) -> CorruptShardError:
    return CorruptShardError(
        path,
        0,
        "J1",
        f"{found}; the build left nothing to recover: build it again with overwrite (--overwrite)",
    )
