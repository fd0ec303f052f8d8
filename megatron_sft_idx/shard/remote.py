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
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.header import FileDigest, peek_nbytes
from megatron_sft_idx.storage import Backend, check_size, open_array
from megatron_sft_idx.storage.hashing import has_digest
from megatron_sft_idx.storage.publish import Kind, new_file
from megatron_sft_idx.storage.remote import ObjectInfo, RemoteArray, RemoteStore, open_store
from megatron_sft_idx.storage.remote.files import read_ahead
from megatron_sft_idx.storage.remote.store import threads

__all__ = ["IndexCache", "RemoteFiles", "find_missing", "open_remote", "read_raw_header"]


_VARIABLE = "SFT_IDX_CACHE"
_KIND = Kind("an index file of a shard", lambda path: False)
_COPY = re.compile(r"([0-9a-f]{32})(\.\d+)?\.index")
_DAY = 86_400
_KEPT_DAYS = 30
# Copies that were found good: their paths and checksums, and what the system said of the files then.
_found_good: set[tuple[Any, ...]] = set()

_Fetch = Callable[[], Iterable["bytes | memoryview"]]


class IndexCache:
    """A folder of index files by checksum; processes may share one.

    Args:
        folder: where; None for what ``SFT_IDX_CACHE`` names, else ``megatron-sft-idx`` in the user's cache folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = Path(folder or os.environ.get(_VARIABLE) or _users() / "megatron-sft-idx")

    def path(self, checksum: bytes, nbytes: int, fetch: _Fetch, *, source: str) -> str:
        """The local copy of some bytes, whole and checked.

        Args:
            checksum: their xxh3_128.
            nbytes: how many there are.
            fetch: gives them, piece by piece; called where there is no good copy.
            source: where they are from, for messages.

        Raises:
            CorruptShardError: what was fetched has another checksum (rule F3).
            FormatError: the folder cannot be written, or is full.
        """
        # Something else under the name may be anybody's: it is passed over.
        names = (f"{checksum.hex()}{f'.{number}' if number else ''}.index" for number in count())
        for local in map(self.folder.joinpath, names):
            if _is_good(local, checksum, nbytes):
                return str(local)
            if not os.path.lexists(local):
                break
        try:
            self._keep(local, checksum, nbytes, fetch, source)
        except _NoPlaceError as error:
            if not _is_good(local, checksum, nbytes):  # else another process's, which was faster
                raise self._useless(str(error)) from None
        except OSError as error:
            raise self._useless(str(error.strerror)) from None
        return str(local)

    def _useless(self, reason: str) -> FormatError:
        return FormatError(
            f"{self.folder}: index files of remote shards cannot be kept here ({reason}); name another folder with"
            f" {_VARIABLE}, or --object-storage-cache-path in training"
        )

    def _keep(self, local: Path, checksum: bytes, nbytes: int, fetch: _Fetch, source: str) -> None:
        with _placing():
            new = new_file(local, _KIND, overwrite=False)
        with new:
            with contextlib.closing(new.open(durable=False)) as file:
                for piece in fetch():
                    file.write(piece)
            if not _is_good(Path(new.temporary), checksum, nbytes):
                raise CorruptShardError(
                    source, 0, "F3", f"checksum is not {checksum.hex()}, which the header expects; restore the file"
                )
            with _placing():
                new.publish()
        self._prune()

    def _prune(self) -> None:
        """Remove copies that were not opened for a month; what has such a name and other content is not ours."""
        for path in self.folder.iterdir():
            named = _COPY.fullmatch(path.name)
            with contextlib.suppress(OSError, FormatError):  # another process may remove it too
                stat = path.lstat()
                old = S_ISREG(stat.st_mode) and time.time() - stat.st_mtime > _KEPT_DAYS * _DAY
                if named and old and has_digest(str(path), FileDigest(stat.st_size, bytes.fromhex(named[1]))):
                    path.unlink()


class _NoPlaceError(Exception):
    """Nothing can be put at the place of a copy, or something has appeared there."""


@contextlib.contextmanager
def _placing() -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        raise _NoPlaceError(error) from None


def _is_good(path: Path, checksum: bytes, nbytes: int) -> bool:
    try:
        if (stamp := _stamp(path, checksum)) in _found_good:
            return True
        if not has_digest(str(path), FileDigest(nbytes, checksum)):
            return False
        if time.time() - path.stat().st_mtime > _DAY:
            with contextlib.suppress(OSError):  # a folder that is only read is not pruned either
                os.utime(path)
                stamp = _stamp(path, checksum)
        _found_good.add(stamp)
    except (OSError, FormatError):
        return False
    return True


def _stamp(path: Path, checksum: bytes) -> tuple[Any, ...]:
    stat = path.stat()
    return path, checksum, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _users() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


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
