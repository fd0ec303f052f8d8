"""``X.journal``: what a build has written so far. It exists only while a build runs, or after one was interrupted.

::

    head    8 bytes  b"SFTJRNL3", uint32 size of the JSON, uint32 zero, JSON (``Head``), zeros to 8, uint64 xxh3_64 of
            all that
    block   4 bytes  b"PACK", uint32 n, uint64 xxh3_64 of the records, n records: uint32 length in tokens,
            uint32 sequences
    block   4 bytes  b"DONE", uint32 n, uint64 xxh3_64, n times 8 bytes: JSON, spaces to 8: the inodes of the files that
            are to be replaced, by suffix. All files are complete and synced, and only renames are left
    block   4 bytes  b"FILE", the same: the inodes of the temporary files, in place of those that the head names: they
            were copied here, or one was made anew

The head names every temporary file by suffix and inode (of the journal's own device, since they share a folder): what
lies under such a name and is another file is a stranger's. It is synced before anything is written to them.

A block is appended after the data of its packs has been written, so whoever finds a journal may count on the packs
of its complete blocks, except after a power failure: what had not been synced may then be missing from the end of any
file, and packs count as far as the three data files reach. DONE is synced before anything that follows from it. A torn
block ends the journal.

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

from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout.column import ColumnSpec, Per, check_name
from megatron_sft_idx.layout.files import (
    MASK_DTYPES,
    MAX_CAPACITY,
    SEQ_IDX,
    TOKEN_DTYPES,
    ShardPaths,
    align,
    mask_dtype_of,
    token_dtype_of,
)

_MAGIC, _OLD_MAGICS = b"SFTJRNL3", (b"SFTJRNL2", b"SFTJRNL1")
# What a file begins with that is a journal of this package, of whatever version.
MAGICS = (_MAGIC, *_OLD_MAGICS)
_HEAD, _BLOCK, _CHECKSUM = struct.Struct("<8sII"), struct.Struct("<4sIQ"), struct.Struct("<Q")
_RECORD_NBYTES = 8
PACK, DONE, FILE = b"PACK", b"DONE", b"FILE"
_MAX_HEAD_NBYTES = 16 << 20
MAX_RECORDS = 1 << 24  # in one block


class RowFile(NamedTuple):
    """A file of rows in the making, of tokens, masks, starts or a column, whose rows begin at ``begin`` (in bytes)."""

    path: str
    per: Per
    row_nbytes: int
    begin: int = 0


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a build was begun with: the journal's head.

    Attributes:
        token_dtype: of the token file: uint16 or int32.
        mask_dtype: of the loss file: uint8 or float32.
        capacity: most token positions a pack may hold; None for the longest pack.
        sequence_multiple: each sequence counts as its length rounded up to this.
        pad_id: the tokenizer's padding id; None where unknown.
        metadata: JSON object, as far as it was known when the build began.
        columns: what is written beside the tokens, by name.

    Raises:
        FormatError: a value that no shard can have, or that cannot be stored.
    """

    token_dtype: np.dtype[Any]
    mask_dtype: np.dtype[Any]
    capacity: int | None
    sequence_multiple: int
    pad_id: int | None
    metadata: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, ColumnSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_dtype", token_dtype_of(self.token_dtype)[1])
        object.__setattr__(self, "mask_dtype", mask_dtype_of(self.mask_dtype)[1])
        for name, least, optional in (("capacity", 1, True), ("sequence_multiple", 1, False), ("pad_id", 0, True)):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if type(value) is bool or not isinstance(value, int | np.integer) or not least <= value <= MAX_CAPACITY:
                raise FormatError(f"{name} {value!r}: expected a whole number from {least} to {MAX_CAPACITY}")
            object.__setattr__(self, name, int(value))
        SEQ_IDX.nbytes(self.metadata)  # refused now, not after hours of writing
        for name in self.columns:
            check_name(name)

    def files(self, paths: ShardPaths) -> list[RowFile]:
        """The files that are written as packs come: tokens, masks, starts, then the columns."""
        columns = ((paths.column(name), spec) for name, spec in self.columns.items())
        return [
            RowFile(paths.tokens, "token", self.token_dtype.itemsize),
            RowFile(paths.loss, "token", self.mask_dtype.itemsize),
            RowFile(paths.starts, "sequence", 4),
            *(RowFile(path, spec.per, spec.row_nbytes, spec.header_nbytes) for path, spec in columns),
        ]

    def encode(self) -> dict[str, Any]:
        """The options as a JSON object; dtypes by their codes."""
        return {
            "token_dtype": token_dtype_of(self.token_dtype)[0],
            "mask_dtype": mask_dtype_of(self.mask_dtype)[0],
            "capacity": self.capacity,
            "sequence_multiple": self.sequence_multiple,
            "pad_id": self.pad_id,
            "metadata": self.metadata,
            **({"columns": {name: spec.encode() for name, spec in self.columns.items()}} if self.columns else {}),
        }

    @classmethod
    def decode(cls, head: Mapping[str, Any], path: str) -> BuildOptions:
        """The options in a journal's head. CorruptShardError where a value is none that a builder writes."""
        try:
            dtypes = TOKEN_DTYPES[head["token_dtype"]], MASK_DTYPES[head["mask_dtype"]]
            numbers = head["capacity"], head["sequence_multiple"], head["pad_id"]
            columns = {name: ColumnSpec.decode(spec) for name, spec in head.get("columns", {}).items()}
            return cls(*dtypes, *numbers, {**head["metadata"]}, columns)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise torn(path, f"not the options of a build ({error})") from None


class Block(NamedTuple):
    """One complete block: its kind, and records uint32 [n, 2]."""

    kind: bytes
    records: NDArray[np.uint32]


def encode_head(content: Mapping[str, Any]) -> bytes:
    """The journal's first bytes."""
    block = _encoded(content, sort_keys=True)
    raw = _HEAD.pack(_MAGIC, len(block), 0) + block
    raw = raw.ljust(align(len(raw), 8), b"\0")
    return raw + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(raw))


def encode_block(kind: bytes, records: NDArray[np.uint32]) -> bytes:
    """One block; ``records`` uint32 [n, 2]."""
    raw = np.ascontiguousarray(records, dtype="<u4").tobytes()
    return _BLOCK.pack(kind, len(records), xxhash.xxh3_64_intdigest(raw)) + raw


def encode_inodes(kind: bytes, inodes: Mapping[str, int]) -> bytes:
    """A DONE or FILE block: inodes of files, by suffix."""
    raw = _encoded(inodes)
    return encode_block(kind, np.frombuffer(raw.ljust(align(len(raw), _RECORD_NBYTES), b" "), "<u4").reshape(-1, 2))


def read_head(stream: BinaryIO, path: str) -> dict[str, Any]:
    """The JSON object of the head; the stream then stands at the first block.

    Raises:
        CorruptShardError: the head is torn or changed.
        FormatError: an earlier version of this package wrote it.
    """
    raw = stream.read(_HEAD.size)
    if raw[: len(_MAGIC)] in _OLD_MAGICS:
        raise FormatError(
            f"{path}: the journal of a build by an earlier version of this package; recover it with that version, or"
            f" remove it with {path.removesuffix('.journal')}.*.tmp* and build again"
        )
    if raw.startswith(_MAGIC) and len(raw) == _HEAD.size and (size := _HEAD.unpack(raw)[1]) <= _MAX_HEAD_NBYTES:
        raw += stream.read(align(_HEAD.size + size, 8) - _HEAD.size)
        checksum = stream.read(_CHECKSUM.size)
        content = _json_object(raw[_HEAD.size : _HEAD.size + size])
        if content is not None and checksum == _CHECKSUM.pack(xxhash.xxh3_64_intdigest(raw)):
            return content
    raise torn(path, "the journal's head is torn or changed")


def read_blocks(stream: BinaryIO) -> Iterator[Block]:
    """Complete blocks in order; ends without an error at the first torn one, as a kill leaves it."""
    while len(head := stream.read(_BLOCK.size)) == _BLOCK.size:
        kind, count, checksum = _BLOCK.unpack(head)
        if kind not in (PACK, DONE, FILE) or count > MAX_RECORDS:
            return
        raw = stream.read(count * _RECORD_NBYTES)
        if len(raw) != count * _RECORD_NBYTES or xxhash.xxh3_64_intdigest(raw) != checksum:
            return
        yield Block(kind, np.frombuffer(raw, dtype="<u4").reshape(count, 2))


def _encoded(content: Mapping[str, Any], *, sort_keys: bool = False) -> bytes:
    # Paths may hold bytes that are no UTF-8, which JSON has an escape for.
    return json.dumps(content, sort_keys=sort_keys, ensure_ascii=False).encode(errors="backslashreplace")


def _json_object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Head(NamedTuple):
    """The head of a journal, and what blocks behind it changed of it.

    Attributes:
        content: the JSON object of the head; of a build it has ``BuildOptions`` too.
        work: ``build``, ``copy``, ``rebuild`` or ``removal``.
        files: inodes of the temporary files, or of the files to be removed, by path.
        replaced_inodes: what the DONE block says: inodes of the files that are replaced or go, by path; None before it.
    """

    content: dict[str, Any]
    work: str
    files: dict[str, int]
    replaced_inodes: dict[str, int] | None

    @property
    def inodes(self) -> set[int]:
        """The inodes of all files that the journal names."""
        return {*self.files.values(), *(self.replaced_inodes or {}).values()}

    @classmethod
    def read(cls, paths: ShardPaths) -> Head | None:
        """The head of a shard's journal; None where that is empty. Errors as ``read_head``."""

        def inodes(value: Any) -> dict[str, int]:
            if isinstance(value, dict) and all(type(inode) is int for inode in value.values()):
                return {paths.prefix + suffix: inode for suffix, inode in value.items()}
            raise torn(paths.journal, "no inodes of files")

        with open(paths.journal, "rb") as stream:
            if not stream.read(1):
                return None
            stream.seek(0)
            content = read_head(stream, paths.journal)
            files, replaced = inodes(content.get("files")), None
            for block in read_blocks(stream):
                if block.kind == FILE:
                    files = inodes(_json_object(block.records.tobytes()))
                else:
                    replaced = inodes(_json_object(block.records.tobytes())) if block.kind == DONE else None
        if (work := content.get("work")) not in ("build", "copy", "rebuild", "removal"):
            raise torn(paths.journal, f"work {work!r}")
        return cls(content, work, files, replaced)


def torn(path: str, reason: str) -> CorruptShardError:
    """The error about a journal that a kill of the machine, or somebody, has left without sense."""
    remedy = "the build left nothing to recover: remove this file and the .tmp files beside it, and build again"
    return CorruptShardError(path, 0, "J1", f"{reason}; {remedy}")
