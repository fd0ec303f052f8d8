"""A shard in an object store: index files through the local cache, tokens and masks by ranges.

As on disk, whoever replaces a shard removes its ``.seq.idx`` first and puts the new one last (rules W2, W3). So the
etag of ``.seq.idx`` is noted first and asked for again when all is open: what was found in between belongs to it. From
then on every range is read under the etag that its object had.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.header import peek_nbytes
from megatron_sft_idx.shard.index_cache import IndexCache
from megatron_sft_idx.storage import Backend, check_size, open_array
from megatron_sft_idx.storage.remote import ObjectInfo, RemoteArray, RemoteStore, open_store
from megatron_sft_idx.storage.remote.files import read_ahead
from megatron_sft_idx.storage.remote.store import threads

__all__ = ["RemoteFiles", "find_missing", "open_remote", "read_raw_header"]

# One request reads the whole header of nearly every shard: 256 bytes and a few KiB of JSON.
_HEADER_NBYTES = 16 << 10


class RemoteFiles(NamedTuple):
    """The header and the five arrays of a shard."""

    header: Header
    tokens: RemoteArray
    loss: RemoteArray
    starts: NDArray[np.uint32]
    sequence_offsets: NDArray[np.int64]
    token_offsets: NDArray[np.int64]


def read_raw_header(paths: ShardPaths) -> bytes:
    """The bytes of the header; ShardNotFoundError where there is no ``.seq.idx``."""
    store, key = open_store(paths.seq_idx)
    return _read_raw_header(store, _require(store, paths, key))


def _require(store: RemoteStore, paths: ShardPaths, key: str) -> ObjectInfo:
    found = store.head(key)
    if found is None:
        missing = find_missing(paths) or [paths.seq_idx]
        whole = len(missing) == len(paths.all)
        remedy = "check the path: the prefix without .seq.idx" if whole else "copy all five files, .seq.idx last"
        raise ShardNotFoundError(paths.prefix, missing, remedy)
    return found


def _read_raw_header(store: RemoteStore, seq_idx: ObjectInfo) -> bytes:
    raw = bytes(store.read(seq_idx.key, 0, min(_HEADER_NBYTES, seq_idx.nbytes), etag=seq_idx.etag))
    size = peek_nbytes(raw, store.path(seq_idx.key))
    if len(raw) < size:
        more = min(size, seq_idx.nbytes) - len(raw)
        raw += store.read(seq_idx.key, len(raw), more, etag=seq_idx.etag)
    return raw[:size]


def find_missing(paths: ShardPaths) -> list[str]:
    """Which of the five files are not there."""
    # One after another: headers of many shards are read by the threads, which must not wait for each other.
    return [path for path in paths.all if _head(path) is None]


def _head(path: str) -> ObjectInfo | None:
    store, key = open_store(path)
    return store.head(key)


def open_remote(paths: ShardPaths, cache: IndexCache, backend: Backend) -> RemoteFiles:
    """Open a shard: seven small requests, and the index files where the cache does not have them.

    Args:
        paths: of the shard.
        cache: for its index files.
        backend: how those are read; ``reopen`` holds neither maps nor descriptors.

    Raises:
        ShardNotFoundError: some of the five files are missing.
        FormatError: a rule of FORMAT.md is broken, or the shard is replaced while it is opened.
        StorageError: the store does not answer, or not to these credentials.
    """
    store, key = open_store(paths.seq_idx)
    seq_idx = _require(store, paths, key)
    header = Header.decode(_read_raw_header(store, seq_idx), paths.seq_idx)
    check_size(paths.seq_idx, seq_idx.nbytes, header.seq_idx_nbytes)
    found: dict[str, ObjectInfo] = {}
    for path, info, digest in zip(paths.data, threads().map(_head, paths.data), header.digests, strict=True):
        if info is not None:
            check_size(path, info.nbytes, digest.nbytes)
            found[path] = info
    if missing := [path for path in paths.data if path not in found]:
        raise ShardNotFoundError(paths.prefix, missing, "copy all five files, .seq.idx last")

    def array(path: str, dtype: np.dtype[Any]) -> RemoteArray:
        return RemoteArray(store, found[path].key, dtype, header.num_tokens, found[path].etag)

    offsets, starts = _open_index(store, cache, backend, paths, header, seq_idx, found[paths.starts])
    count, second = header.num_packs + 1, header.token_offsets_offset - header.nbytes
    files = RemoteFiles(
        header,
        array(paths.tokens, header.token_dtype),
        array(paths.loss, header.mask_dtype),
        starts,
        offsets[: 8 * count].view(np.dtype("<i8")),
        offsets[second:].view(np.dtype("<i8")),
    )
    again = store.head(seq_idx.key)
    if again is None or again.etag != seq_idx.etag:
        raise FormatError(f"{paths.prefix}: another shard was published here while it was opened; open it again")
    return files


def _open_index(
    store: RemoteStore,
    cache: IndexCache,
    backend: Backend,
    paths: ShardPaths,
    header: Header,
    seq_idx: ObjectInfo,
    starts: ObjectInfo,
) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """The offsets behind the header, as bytes, and the starts."""
    backend = "mmap" if backend == "mmap" else "pread"  # the copies of pread need no open file
    nbytes = header.seq_idx_nbytes - header.nbytes
    local = cache.path(
        header.arrays_checksum, nbytes, lambda: read_ahead(store, seq_idx, offset=header.nbytes), source=paths.seq_idx
    )
    offsets = open_array(local, np.dtype("u1"), nbytes, nbytes=nbytes, backend=backend)[:]
    local = cache.path(
        header.digests[3].checksum, starts.nbytes, lambda: read_ahead(store, starts), source=paths.starts
    )
    count = header.num_sequences
    return offsets, open_array(local, np.dtype("<u4"), count, nbytes=starts.nbytes, backend=backend)[:]
