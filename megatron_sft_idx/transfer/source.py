"""A shard to be copied: its header, the whole ``.seq.idx``, and the other files in chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol

import xxhash

from megatron_sft_idx.errors import CorruptShardError, ShardNotFoundError
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths
from megatron_sft_idx.layout.files import DATA_SUFFIXES
from megatron_sft_idx.storage import check_size, is_remote
from megatron_sft_idx.storage.remote import ObjectInfo, open_store
from megatron_sft_idx.storage.remote.files import read_ahead
from megatron_sft_idx.storage.remote.store import threads

__all__ = ["Source", "digests_of", "open_source"]

_CHUNK_NBYTES = 8 << 20


class Source(Protocol):
    """A shard whose five files are there and have the sizes that its header says.

    Attributes:
        paths: where it is.
        header: its header, checked.
        seq_idx: its whole ``.seq.idx``, checked: 16 bytes a pack and the header.
    """

    paths: ShardPaths
    header: Header
    seq_idx: bytes

    def chunks(self, suffix: str, offset: int = 0) -> Iterator[bytes | memoryview]:
        """The bytes of one of the four other files from ``offset`` on, not checked."""


def open_source(prefix: str) -> Source:
    """The shard at a local or remote prefix.

    Raises:
        ShardNotFoundError: some of its files are missing.
        CorruptShardError: its ``.seq.idx`` breaks a rule, or a file has another size (rule F2).
        StorageError: the store cannot be read.
    """
    return _RemoteSource(prefix) if is_remote(prefix) else _LocalSource(prefix)


class _LocalSource:
    def __init__(self, prefix: str) -> None:
        self.paths = ShardPaths.of(prefix)
        if missing := self.paths.missing():
            raise ShardNotFoundError(self.paths.prefix, missing, "check the path, or restore what is missing")
        with open(self.paths.seq_idx, "rb") as file:
            self.seq_idx = file.read()
        self.header = checked_header(self.seq_idx, self.paths.seq_idx)
        for path, digest in zip(self.paths.data, self.header.digests, strict=True):
            check_size(path, os.stat(path).st_size, digest.nbytes)

    def chunks(self, suffix: str, offset: int = 0) -> Iterator[bytes]:
        with open(self.paths.prefix + suffix, "rb", buffering=0) as file:
            file.seek(offset)
            while chunk := file.read(_CHUNK_NBYTES):
                yield chunk


class _RemoteSource:
    def __init__(self, prefix: str) -> None:
        self.paths = ShardPaths.of(prefix)
        self._store, key = open_store(self.paths.prefix)
        suffixes = (*DATA_SUFFIXES, ".seq.idx")
        found = list(threads().map(self._store.head, [key + suffix for suffix in suffixes]))
        self._objects: dict[str, ObjectInfo] = {s: info for s, info in zip(suffixes, found, strict=True) if info}
        if missing := [self.paths.prefix + suffix for suffix in suffixes if suffix not in self._objects]:
            raise ShardNotFoundError(self.paths.prefix, missing, "check the path, or upload the shard again")
        self.seq_idx = b"".join(self.chunks(".seq.idx"))
        self.header = checked_header(self.seq_idx, self.paths.seq_idx)
        for suffix, path, digest in zip(DATA_SUFFIXES, self.paths.data, self.header.digests, strict=True):
            check_size(path, self._objects[suffix].nbytes, digest.nbytes)

    def chunks(self, suffix: str, offset: int = 0) -> Iterator[bytes | memoryview]:
        return read_ahead(self._store, self._objects[suffix], offset=offset, range_nbytes=_CHUNK_NBYTES)


def digests_of(source: Source) -> dict[str, FileDigest]:
    """Size and checksum of each of the five files, by suffix."""
    digests = dict(zip(DATA_SUFFIXES, source.header.digests, strict=True))
    digests[".seq.idx"] = FileDigest(len(source.seq_idx), xxhash.xxh3_128_digest(source.seq_idx))
    return digests


def checked_header(raw: bytes, path: str) -> Header:
    """The header of a whole ``.seq.idx``, and the arrays behind it held to their checksum.

    Raises:
        CorruptShardError: a rule is broken.
        UnsupportedVersionError: of another format version.
    """
    header = Header.decode(raw, path)
    check_size(path, len(raw), header.seq_idx_nbytes)
    if xxhash.xxh3_128_digest(memoryview(raw)[header.nbytes :]) != header.arrays_checksum:
        raise CorruptShardError(path, header.nbytes, "F3", "the arrays do not have their checksum; restore the file")
    return header
