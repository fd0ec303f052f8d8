"""``X.journal``: what a writer at the prefix ``X`` has done so far, and the lock that keeps other writers away.

A journal with content exists only while a writer is at work, or after one was interrupted. It consists of a head and
blocks, all numbers little-endian::

    head    8 bytes  b"SFTJRNL3", uint32 size of the JSON, uint32 zero, JSON (``JournalHead``), zeros up to a multiple
            of 8, uint64 xxh3_64 of all that
    block   4 bytes  b"PACK", uint32 n, uint64 xxh3_64 of the records, n records, one for each pack: uint32 length in
            tokens, uint32 number of sequences
    block   4 bytes  b"DONE", uint32 n, uint64 xxh3_64 of what follows, n times 8 bytes: JSON, filled up with spaces:
            the inodes of the files that will be replaced, by suffix
    block   4 bytes  b"FILE", and the rest as in DONE: the inodes of the temporary files, by suffix; they take the place
            of those in the head. Written when the files were copied to another folder

The head names every temporary file by suffix and inode. A file that lies under such a name and has another inode
belongs to somebody else. (The device is the journal's own, because the files share a folder.) The head is synced before
anything is written to the files.

A PACK block is appended after the data of its packs was written. So after a kill, the data of all complete blocks is
there. After a power failure, data that was not synced may be missing from the end of any file; then only those packs
count that lie wholly in all data files. DONE says that all files are complete and synced, and that only renames are
left; it is itself synced before the first of them. A block that is cut short or damaged ends the journal.

A writer keeps no list of its packs in memory: it makes the indexes from the journal.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError, brief
from megatron_sft_idx.layout.column import COLUMN_MAGIC, ColumnSpec, Per, check_named_spec
from megatron_sft_idx.layout.files import (
    MASK_DTYPES,
    MAX_CAPACITY,
    SEQ_IDX,
    TOKEN_DTYPES,
    ShardPaths,
    align,
    check_column_name,
    column_of,
    mask_dtype_of,
    token_dtype_of,
    vocab_size_of,
)
from megatron_sft_idx.storage import OutputFile
from megatron_sft_idx.storage.publish import describe, head_of, lock_file, make_folders

_MAGIC, _OLD_MAGICS = b"SFTJRNL3", (b"SFTJRNL2", b"SFTJRNL1")
# The first bytes of a journal, whichever version of this package wrote it.
MAGICS = (_MAGIC, *_OLD_MAGICS)
_HEAD, _BLOCK, _CHECKSUM = struct.Struct("<8sII"), struct.Struct("<4sIQ"), struct.Struct("<Q")
_RECORD_NBYTES = 8
PACK, DONE, FILE = b"PACK", b"DONE", b"FILE"
_MAX_HEAD_NBYTES = 16 << 20
MAX_RECORDS = 1 << 24  # in one block


# ---- what a build writes ----


class GrowingFile(NamedTuple):
    """A file of rows that grows as packs come: of tokens, masks, starts, or a column. Rows begin at byte ``begin``."""

    path: str
    per: Per
    row_nbytes: int
    begin: int = 0


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of a build, which the head of its journal holds.

    Attributes:
        token_dtype: of the token file: uint16 or int32.
        mask_dtype: of the loss file: uint8 or float32.
        capacity: most token positions a pack may hold; None for the longest pack.
        sequence_multiple: each sequence counts as its length rounded up to this.
        pad_id: the tokenizer's padding id; None if it is unknown.
        metadata: JSON object, as far as it was known when the build began.
        columns: the columns that are written beside the tokens, by name.

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
                raise FormatError(f"{name} {brief(value)}: expected a whole number from {least} to {MAX_CAPACITY}")
            object.__setattr__(self, name, int(value))
        # What cannot be stored is refused now, not after hours of writing.
        SEQ_IDX.nbytes(self.metadata)
        vocab_size_of(self.metadata)
        for name, spec in self.columns.items():
            check_column_name(name)
            if not isinstance(spec, ColumnSpec):
                raise FormatError(f"columns: {name} is {brief(spec)}, expected a ColumnSpec")
            check_named_spec(name, spec)

    def growing_files(self, paths: ShardPaths) -> list[GrowingFile]:
        """The files that grow as packs come: tokens, masks, starts, then the columns."""
        columns = ((paths.column(name), spec) for name, spec in self.columns.items())
        return [
            GrowingFile(paths.tokens, "token", self.token_dtype.itemsize),
            GrowingFile(paths.loss, "token", self.mask_dtype.itemsize),
            GrowingFile(paths.starts, "sequence", 4),
            *(GrowingFile(path, spec.per, spec.row_nbytes, spec.header_nbytes) for path, spec in columns),
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
        """The options in the head of the journal at ``path``. CorruptShardError: one that ``encode`` never gives."""
        try:
            dtypes = TOKEN_DTYPES[head["token_dtype"]], MASK_DTYPES[head["mask_dtype"]]
            numbers = head["capacity"], head["sequence_multiple"], head["pad_id"]
            columns = {name: ColumnSpec.decode(spec) for name, spec in head.get("columns", {}).items()}
            return cls(*dtypes, *numbers, {**head["metadata"]}, columns)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise journal_error(path, f"not the options of a build ({error})") from None


# ---- head and blocks, in bytes ----


class Block(NamedTuple):
    """One complete block: its kind, and its records uint32 [n, 2]."""

    kind: bytes
    records: NDArray[np.uint32]


def encode_head(content: Mapping[str, Any]) -> bytes:
    """The first bytes of a journal whose head is this JSON object."""
    block = _to_json(content, sort_keys=True)
    raw = _HEAD.pack(_MAGIC, len(block), 0) + block
    raw = raw.ljust(align(len(raw), 8), b"\0")
    return raw + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(raw))


def encode_block(kind: bytes, records: NDArray[np.uint32]) -> bytes:
    """The bytes of a block; ``records`` uint32 [n, 2]."""
    raw = np.ascontiguousarray(records, dtype="<u4").tobytes()
    return _BLOCK.pack(kind, len(records), xxhash.xxh3_64_intdigest(raw)) + raw


def encode_inodes(kind: bytes, inodes: Mapping[str, int]) -> bytes:
    """The bytes of a DONE or FILE block; ``inodes`` are by suffix."""
    raw = _to_json(inodes)
    return encode_block(kind, np.frombuffer(raw.ljust(align(len(raw), _RECORD_NBYTES), b" "), "<u4").reshape(-1, 2))


def read_head(stream: BinaryIO, path: str) -> dict[str, Any]:
    """Read the JSON object of a head from the start of a journal; the stream then stands at the first block.

    Raises:
        CorruptShardError: the head is cut short or was changed.
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
    raise journal_error(path, "the journal's head is torn or changed")


def read_blocks(stream: BinaryIO) -> Iterator[Block]:
    """Read blocks in order, up to the first that is cut short or damaged. That is no error: a kill leaves such one."""
    while len(head := stream.read(_BLOCK.size)) == _BLOCK.size:
        kind, count, checksum = _BLOCK.unpack(head)
        if kind not in (PACK, DONE, FILE) or count > MAX_RECORDS:
            return
        raw = stream.read(count * _RECORD_NBYTES)
        if len(raw) != count * _RECORD_NBYTES or xxhash.xxh3_64_intdigest(raw) != checksum:
            return
        yield Block(kind, np.frombuffer(raw, dtype="<u4").reshape(count, 2))


def _to_json(content: Mapping[str, Any], *, sort_keys: bool = False) -> bytes:
    # Paths may hold bytes that are not UTF-8; backslashreplace writes these as JSON's escapes.
    return json.dumps(content, sort_keys=sort_keys, ensure_ascii=False).encode(errors="backslashreplace")


def _json_object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# ---- the journal of a prefix ----


class JournalHead(NamedTuple):
    """The head of a journal, brought up to date by the DONE and FILE blocks behind it.

    Attributes:
        content: the JSON object of the head. The head of a build holds its ``BuildOptions`` too.
        work: ``build``, ``copy``, ``rebuild`` or ``removal``.
        files: inodes of the temporary files, or of the files to be removed, by path.
        replaced_inodes: inodes of the files that are replaced or removed, by path. None if there is no DONE block,
            because the files are not complete.
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
    def read(cls, paths: ShardPaths) -> JournalHead | None:
        """The head of a shard's journal; None if the journal is empty. Errors as of ``read_head``."""

        def inodes(value: Any) -> dict[str, int]:
            if isinstance(value, dict) and all(type(inode) is int for inode in value.values()):
                return {paths.prefix + suffix: inode for suffix, inode in value.items()}
            raise journal_error(paths.journal, "no inodes of files")

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
            raise journal_error(paths.journal, f"work {work!r}")
        return cls(content, work, files, replaced)


def journal_error(path: str, reason: str) -> CorruptShardError:
    """The error about a journal whose content makes no sense, and the remedy."""
    remedy = (
        "without it there is nothing to recover: remove this file, the .tmp files beside it and, where there is no"
        " .seq.idx, the other files of this prefix, and build again"
    )
    return CorruptShardError(path, 0, "J1", f"{reason}; {remedy}")


def is_journal(path: str) -> bool:
    """Whether a file is a journal with content; False for an empty one, which is only a lock."""
    return head_of(path, len(MAGICS[0])) in MAGICS


def read_journal(paths: ShardPaths) -> JournalHead | None:
    """The head of the journal at a prefix; None if there is no journal with content, or none that can be read."""
    with contextlib.suppress(FormatError, FileNotFoundError):
        if is_journal(paths.journal):
            return JournalHead.read(paths)
    return None


def cut_torn_block(journal: OutputFile) -> None:
    """Cut off the torn block at the end of a journal, if there is one: it would hide what is appended behind it."""
    with open(journal.path, "rb") as stream:
        read_head(stream, journal.path)
        end = stream.tell()
        for _ in read_blocks(stream):
            end = stream.tell()
    journal.truncate(end)


# ---- the files at a prefix ----


def inode_of(path: str) -> int | None:
    """Inode of the regular file at a path; None if nothing is there. FormatError: something else is there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        what = f"{describe(path)} is here, expected a file of a shard or nothing"
        raise FormatError(f"{path}: {what}; choose another prefix, or move it away")
    return status.st_ino


def inodes_of(paths: Iterable[str]) -> dict[str, int]:
    """Inodes of those files that are present, by path."""
    inodes = {path: inode_of(path) for path in paths}
    return {path: inode for path, inode in inodes.items() if inode is not None}


def by_suffix(paths: ShardPaths, inodes: Mapping[str, int]) -> dict[str, int]:
    """Inodes by suffix instead of by path: so a journal names files."""
    return {path.removeprefix(paths.prefix): inode for path, inode in inodes.items()}


def is_column(path: str) -> bool:
    """Whether a file is a column of a shard."""
    return head_of(path, len(COLUMN_MAGIC)) == COLUMN_MAGIC


def with_named_columns(paths: ShardPaths, head: JournalHead) -> ShardPaths:
    """``paths``, with the columns that a journal names."""
    return paths.with_columns_of((*head.files, *(head.replaced_inodes or {})))


def with_present_columns(paths: ShardPaths, *, refuse_strange: bool = False) -> ShardPaths:
    """``paths``, with the columns that lie at the prefix, temporary files of columns included; scans the folder once.

    A column is recognised by its magic, a temporary file of one by its name if it is empty.

    FormatError: with ``refuse_strange``, a file or link has the name of a column that is not among ``paths``, and is
    none. Next to a shard it would count as a damaged column.
    """
    folder, name = os.path.split(paths.prefix)
    found: list[str] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder or ".") as entries:
        for entry in entries:
            may_be = entry.name.startswith(name + ".") and ".col" in entry.name
            if not may_be or not entry.is_file():
                continue
            path = paths.prefix + entry.name.removeprefix(name)
            if not entry.is_symlink() and (is_column(path) if column_of(path) else is_named_or_empty(path, None)):
                found.append(path)
            elif refuse_strange and column_of(path) and path not in paths.all:
                raise FormatError(
                    f"{path}: it has the name of a column of {paths.prefix} and is no column; give it another name, or"
                    " choose another prefix"
                )
    return paths.with_columns_of(found)


def is_named_or_empty(path: str, head: JournalHead | None) -> bool:
    """Whether the journal names the file at a path, or it is empty, as a kill may leave it; True if there is none.

    Such a file may be removed. FormatError: something else than a file is there.
    """
    try:
        return inode_of(path) in ({None, *head.inodes} if head else {None}) or not os.lstat(path).st_size
    except FileNotFoundError:
        return True


# ---- locks ----


def lock_journal(paths: ShardPaths, *, create: bool, shared: bool = False) -> int:
    """Lock a prefix. Returns a descriptor of the journal, which the caller must close. Errors as of ``lock_file``."""
    busy = f"{paths.prefix}: another writer is at work here now; wait for it, or choose another prefix"
    return lock_file(paths.journal, MAGICS, create=create, shared=shared, busy=busy)


@contextlib.contextmanager
def locked_journal(paths: ShardPaths, *, shared: bool = False) -> Iterator[int]:
    """Hold the lock of a prefix that has a journal. FileNotFoundError: it has none."""
    lock = lock_journal(paths, create=False, shared=shared)
    try:
        yield lock
    finally:
        os.close(lock)


def wait_for_writer(paths: ShardPaths, seconds: float) -> None:
    """Wait until no writer is at work at a prefix; FormatError where one still is after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with locked_journal(paths):
                return
        except FileNotFoundError:
            return
        except FormatError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@contextlib.contextmanager
def closing_lock(path: str, lock: int) -> Iterator[int]:
    """At the end, close the lock on the file at ``path``, and remove the file unless it has content."""
    try:
        yield lock
    finally:
        try:
            if not os.fstat(lock).st_size:
                unlink_locked(path, lock)
        finally:
            os.close(lock)


def locked_name(path: str, busy: str) -> AbstractContextManager[int]:
    """Hold the lock of a file that is nothing but a lock. It must be empty, and is removed at the end."""
    return closing_lock(path, lock_file(path, (), create=True, busy=busy))


def locked_outputs(prefix: str) -> AbstractContextManager[int]:
    """Keep other commands from writing the outputs ``PREFIX-00000-of-...`` of a prefix."""
    make_folders(prefix)
    busy = f"{prefix}: another command writes shards of this name now; wait for it, or choose another prefix"
    return locked_name(f"{prefix}-parts.journal", busy)


def unlink_locked(path: str, lock: int) -> None:
    """Remove the file at a path, provided that it is the file that the lock is on."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock), os.lstat(path)):
            os.unlink(path)
