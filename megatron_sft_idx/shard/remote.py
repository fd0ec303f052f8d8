"""A shard in an object store: index files through the local cache, tokens and masks by ranges.

As on disk, whoever replaces a shard removes its ``.seq.idx`` first and puts the new one last (rules W2, W3). So the
etag of ``.seq.idx`` is noted first and asked for again when all is open: what was found in between belongs to it. From
then on every range is read under the etag that its object had.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import FileDigest, peek_nbytes
from megatron_sft_idx.storage import Backend, check_size, open_array
from megatron_sft_idx.storage.local import HashedFile, has_digest
from megatron_sft_idx.storage.publish import Kind, new_file
from megatron_sft_idx.storage.remote import ObjectInfo, RemoteArray, RemoteStore, open_store
from megatron_sft_idx.storage.remote.store import read_ahead, threads

__all__ = ["find_missing", "open_remote", "read_raw_header"]

# ---- copies of index files, by their checksums, in a folder that processes share ----

_VARIABLE = "SFT_IDX_CACHE"
_KIND = Kind("an index file of a shard", lambda path: False)
_COPY = re.compile(r"([0-9a-f]{32})(\.\d+)?\.index")
_DAY = 86_400
_KEPT_DAYS = 30
# Copies that were found good: their paths and checksums, and what the system said of the files then.
_found_good: set[tuple[Any, ...]] = set()


def _cache_folder(named: str | None) -> Path:
    """Where copies are kept: in ``named``, else in what ``SFT_IDX_CACHE`` names, else in the user's cache folder."""
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named or os.environ.get(_VARIABLE) or Path(users) / "megatron-sft-idx")


def _local_copy(
    folder: Path, digest: FileDigest, fetch: Callable[[], Iterable[bytes | memoryview]], source: str
) -> str:
    """The path of a local copy of some bytes, whole and checked.

    Args:
        folder: where copies are kept.
        digest: of the bytes.
        fetch: gives them, piece by piece; called where there is no good copy.
        source: where they are from, for messages.

    Raises:
        CorruptShardError: what was fetched has another checksum (rule F3).
        FormatError: the folder cannot be written, or is full.
    """
    # Something else under the name may be anybody's: it is passed over.
    names = (f"{digest.checksum.hex()}{f'.{number}' if number else ''}.index" for number in count())
    for local in map(folder.joinpath, names):
        if _is_good(local, digest):
            return str(local)
        if not os.path.lexists(local):
            break
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with new_file(local, _KIND, overwrite=False) as new:
            file = HashedFile(new.open(durable=False))
            for piece in fetch():
                file.write(piece)
            if file.digest() != digest:
                raise CorruptShardError(
                    source, 0, "F3", f"checksum is not {digest.checksum.hex()}, which the header expects; restore it"
                )
            new.publish()
        _prune(folder)
    except OSError as error:
        raise FormatError(
            f"{folder}: index files of remote shards cannot be kept here ({error.strerror}); name another folder with"
            f" {_VARIABLE}, or --object-storage-cache-path in training"
        ) from None
    except FormatError:
        if not _is_good(local, digest):  # else another process's, which was faster
            raise
    return str(local)


def _prune(folder: Path) -> None:
    """Remove copies that were not opened for a month; what has such a name and other content is not ours."""
    for path in folder.iterdir():
        named = _COPY.fullmatch(path.name)
        with contextlib.suppress(OSError, FormatError):  # another process may remove it too
            stat = path.lstat()
            old = S_ISREG(stat.st_mode) and time.time() - stat.st_mtime > _KEPT_DAYS * _DAY
            if named and old and has_digest(str(path), FileDigest(stat.st_size, bytes.fromhex(named[1]))):
                path.unlink()


def _is_good(path: Path, digest: FileDigest) -> bool:
    try:
        if (stamp := _stamp(path, digest)) in _found_good:
            return True
        if not has_digest(str(path), digest):
            return False
        if time.time() - path.stat().st_mtime > _DAY:
            with contextlib.suppress(OSError):  # a folder that is only read is not pruned either
                os.utime(path)
                stamp = _stamp(path, digest)
        _found_good.add(stamp)
    except (OSError, FormatError):
        return False
    return True


def _stamp(path: Path, digest: FileDigest) -> tuple[Any, ...]:
    stat = path.stat()
    return path, digest, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


# ---- the shard ----

# One request reads the whole header of nearly every shard: 256 bytes and a few KiB of JSON.
_HEADER_NBYTES = 16 << 10


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
    """Which of the files are not there."""
    # One after another: headers of many shards are read by the threads, which must not wait for each other.
    return [path for path in paths.all if _head(path) is None]


def _head(path: str) -> ObjectInfo | None:
    store, key = open_store(path)
    return store.head(key)


def open_remote(
    paths: ShardPaths, index_cache: str | None, backend: Backend
) -> tuple[Header, RemoteArray, RemoteArray, NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    """Open a shard: seven small requests, and the index files where there are no copies of them.

    Args:
        paths: of the shard.
        index_cache: local folder for copies of its index files; None for what ``SFT_IDX_CACHE`` names, else
            ``megatron-sft-idx`` in the user's cache folder.
        backend: how those are read; ``reopen`` holds neither maps nor descriptors.

    Returns:
        Header, tokens, masks, starts, sequence offsets, token offsets.

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

    def index(digest: FileDigest, info: ObjectInfo, offset: int, source: str) -> NDArray[np.uint8]:
        folder = _cache_folder(index_cache)
        local = _local_copy(folder, digest, lambda: read_ahead(store, info, offset=offset), source)
        # The copies of pread need no open file.
        how: Backend = "mmap" if backend == "mmap" else "pread"
        return open_array(local, np.dtype("u1"), digest.nbytes, nbytes=digest.nbytes, backend=how)[:]

    arrays = FileDigest(header.seq_idx_nbytes - header.nbytes, header.arrays_checksum)
    offsets = index(arrays, seq_idx, header.nbytes, paths.seq_idx)
    starts = index(header.digests[3], found[paths.starts], 0, paths.starts).view(np.dtype("<u4"))
    again = store.head(seq_idx.key)
    if again is None or again.etag != seq_idx.etag:
        raise FormatError(f"{paths.prefix}: another shard was published here while it was opened; open it again")
    tokens, loss = array(paths.tokens, header.token_dtype), array(paths.loss, header.mask_dtype)
    first, second = offsets[: 8 * (header.num_packs + 1)], offsets[header.token_offsets_offset - header.nbytes :]
    return header, tokens, loss, starts, first.view(np.dtype("<i8")), second.view(np.dtype("<i8"))
