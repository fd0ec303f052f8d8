"""A shard to be copied, wherever it lies: its header, the whole ``.seq.idx``, and the other files in chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from megatron_sft_idx.errors import CorruptShardError, ShardNotFoundError
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths
from megatron_sft_idx.layout.files import DATA_SUFFIXES, SUFFIXES
from megatron_sft_idx.storage import check_size, is_remote, open_regular
from megatron_sft_idx.storage.remote import ObjectInfo, open_store
from megatron_sft_idx.storage.remote.files import read_ahead
from megatron_sft_idx.storage.remote.store import threads

__all__ = ["Copied", "Source", "shard_nbytes"]

_CHUNK_NBYTES = 8 << 20


class Copied(NamedTuple):
    """One shard, copied.

    Attributes:
        prefix: where it is now.
        nbytes_sent: bytes of the files that were written.
        nbytes_found: bytes of those that were there already.
        uploads_aborted: unfinished uploads of earlier attempts that were removed.
    """

    prefix: str
    nbytes_sent: int
    nbytes_found: int
    uploads_aborted: int = 0


class Source:
    """A shard whose five files are there and have the sizes that its header says.

    Args:
        prefix: local or remote.

    Attributes:
        paths: where it is.
        header: its header, checked.
        seq_idx: its whole ``.seq.idx``, checked: 16 bytes a pack and the header.
        digests: size and checksum of each of the five files, by suffix.

    Raises:
        ShardNotFoundError: some of its files are missing.
        CorruptShardError: its ``.seq.idx`` breaks a rule, or a file has another size (rule F2).
        StorageError: the store cannot be read.
    """

    def __init__(self, prefix: str) -> None:
        self.paths = ShardPaths.of(prefix)
        self._objects = _objects(self.paths.prefix) if is_remote(self.paths.prefix) else None
        sizes = _local_sizes(self.paths) if self._objects is None else {s: o.nbytes for s, o in self._objects.items()}
        if missing := [self.paths.prefix + suffix for suffix in SUFFIXES if suffix not in sizes]:
            raise ShardNotFoundError(self.paths.prefix, missing, "check the path, or restore what is missing")
        self.seq_idx = b"".join(self.chunks(".seq.idx"))
        self.header = _checked_header(self.seq_idx, self.paths.seq_idx)
        self.digests = dict(zip(DATA_SUFFIXES, self.header.digests, strict=True))
        for suffix, digest in self.digests.items():
            check_size(self.paths.prefix + suffix, sizes[suffix], digest.nbytes)
        self.digests[".seq.idx"] = FileDigest(len(self.seq_idx), xxhash.xxh3_128_digest(self.seq_idx))

    def chunks(self, suffix: str, offset: int = 0) -> Iterator[bytes | memoryview]:
        """The bytes of one of the files from ``offset`` on, not checked."""
        if self._objects is not None:
            store = open_store(self.paths.prefix)[0]
            yield from read_ahead(store, self._objects[suffix], offset=offset, range_nbytes=_CHUNK_NBYTES)
            return
        with open_regular(self.paths.prefix + suffix) as file:
            file.seek(offset)
            while chunk := file.read(_CHUNK_NBYTES):
                yield chunk

    def corrupt(self, suffix: str) -> CorruptShardError:
        """What is wrong with a file whose bytes were not what its digest says (rule F3)."""
        digest = self.digests[suffix]
        expected = f"{digest.nbytes:,} bytes with checksum {digest.checksum.hex()}"
        detail = f"its bytes are not the {expected} that the header says; it was changed or damaged: restore it"
        return CorruptShardError(self.paths.prefix + suffix, 0, "F3", detail)


def shard_nbytes(prefix: str) -> int:
    """What a shard's files take together, for progress; those that are missing are for others to notice."""
    if is_remote(prefix):
        return sum(info.nbytes for info in _objects(prefix).values())
    return sum(_local_sizes(ShardPaths.of(prefix)).values())


def _local_sizes(paths: ShardPaths) -> dict[str, int]:
    found = dict(zip(SUFFIXES, paths.all, strict=True))
    return {suffix: os.path.getsize(path) for suffix, path in found.items() if os.path.isfile(path)}


def _objects(prefix: str) -> dict[str, ObjectInfo]:
    store, key = open_store(prefix)
    found = threads().map(store.head, [key + suffix for suffix in SUFFIXES])
    return {suffix: info for suffix, info in zip(SUFFIXES, found, strict=True) if info}


def _checked_header(raw: bytes, path: str) -> Header:
    """The header of a whole ``.seq.idx``, and the arrays behind it held to their checksum."""
    header = Header.decode(raw, path)
    check_size(path, len(raw), header.seq_idx_nbytes)
    if xxhash.xxh3_128_digest(memoryview(raw)[header.nbytes :]) != header.arrays_checksum:
        raise CorruptShardError(path, header.nbytes, "F3", "the arrays do not have their checksum; restore the file")
    return header
