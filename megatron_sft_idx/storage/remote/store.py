"""``RemoteStore``: range reads and writes of one bucket's objects, with retries and readable errors.

It uses a transport, which makes one attempt at each request. The end of this module provides the objects of a bucket as
paths, arrays and files.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import io
import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SFTIndexError, StorageError
from megatron_sft_idx.storage.local import SCHEME_STARTS, CopiedArray
from megatron_sft_idx.storage.remote.transport import (
    AccessDenied,
    Chunks,
    EtagMismatch,
    Failure,
    NoSuchObject,
    ObjectInfo,
    RangePastEnd,
    RetryPolicy,
    TemporaryFailure,
    request_pool,
)

if TYPE_CHECKING:
    from megatron_sft_idx.storage.remote.msc import MultiStorage
    from megatron_sft_idx.storage.remote.s3 import S3


class RemotePath(NamedTuple):
    """A path in an object store: scheme (``s3`` or ``msc``), bucket (or profile), and key, which may be empty."""

    scheme: str
    bucket: str
    key: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> RemotePath:
        """Parse a path; ``str`` is the inverse.

        Raises:
            FormatError: another scheme, no bucket, or a key that libraries interpret differently.
        """
        text = os.fspath(path)
        scheme, found, rest = text.partition("://")
        if not found or f"{scheme}://" not in SCHEME_STARTS:
            raise FormatError(
                f"{text}: not a path in an object store; such a path begins with {' or '.join(SCHEME_STARTS)}"
            )
        bucket, _, key = rest.partition("/")
        if not bucket:
            what = "bucket" if scheme == "s3" else "profile"
            raise FormatError(f"{text}: the {what} is missing; expected {scheme}://{what.upper()}/path")
        # Some libraries resolve these like a file system, others reject them. For a store they are part of the key.
        folders = key.split("/")[:-1]
        if "" in folders or {".", ".."} & {*folders, key.rpartition("/")[2]} or not key.isprintable():
            raise FormatError(
                f"{text!r}: libraries treat //, /./, /../ and control characters in a key differently; use a key"
                " without them"
            )
        return cls(scheme, bucket, key)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"


# ---- a bucket ----

# The problem and the remedy, for a command that reads and for one that writes.
_REMEDIES: dict[type[Failure], tuple[str, str]] = {
    NoSuchObject: (
        "no such object; check the path, and that nobody has removed it",
        "no such bucket; create it first, or check its name",
    ),
    AccessDenied: (
        "access denied ({}); check the credentials, which are taken from {whose}, and their permissions",
        "access denied ({}); check the credentials, and that they permit writing",
    ),
    TemporaryFailure: (
        "no complete answer ({}); check that the store is running, and that the endpoint is right",
        "could not be written ({}); check that the store is running, and that the endpoint is right. The same command"
        " continues where this one stopped",
    ),
}

_connecting = threading.Lock()


def _renew_lock() -> None:
    global _connecting  # noqa: PLW0603
    _connecting = threading.Lock()


# A thread of the parent process may hold it.
os.register_at_fork(after_in_child=_renew_lock)


class RemoteStore:
    """The objects of one bucket. Threads can share one; unpickling makes a new transport in the other process.

    Methods retry according to the policy. In the end they raise

    - StorageError: the store is unreachable, rejects the credentials, or has no such object;
    - FormatError: the object does not have the requested etag, or ends before the requested range.

    Args:
        scheme: ``s3`` or ``msc``.
        bucket: bucket of S3, or profile of multi-storage-client.
        policy: policy for retries; None for ``RetryPolicy.from_environment``.
    """

    def __init__(self, scheme: str, bucket: str, policy: RetryPolicy | None = None) -> None:
        self.scheme, self.bucket = scheme, bucket
        self.policy = policy or RetryPolicy.from_environment()
        self._transport: tuple[int, S3 | MultiStorage] | None = None

    def __reduce__(self) -> tuple[type[RemoteStore], tuple[str, str, RetryPolicy]]:
        return RemoteStore, (self.scheme, self.bucket, self.policy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scheme!r}, {self.bucket!r})"

    @property
    def transport(self) -> S3 | MultiStorage:
        """The transport of this process, made on first use by one thread, because that takes longer than a request."""
        with _connecting:
            if self._transport is None or self._transport[0] != os.getpid():
                self._transport = os.getpid(), self._connect()
            return self._transport[1]

    def _connect(self) -> S3 | MultiStorage:
        if self.scheme == "msc":
            from megatron_sft_idx.storage.remote.msc import MultiStorage

            return MultiStorage(self.bucket)
        from megatron_sft_idx.storage.remote.s3 import S3

        return S3(self.bucket)

    def path(self, key: str) -> str:
        """Return the path of an object, as users write it."""
        return str(RemotePath(self.scheme, self.bucket, key))

    def head(self, key: str, *, writing: bool = False) -> ObjectInfo | None:
        """Return information about the object at a key, or None. ``writing`` selects the error texts for writers."""
        with self._errors_of(key, writing=writing):
            try:
                return self.policy.retry(lambda: self.transport.head(key))
            except NoSuchObject:
                return None

    def read(self, key: str, offset: int, nbytes: int, *, etag: str | None = None) -> bytes | memoryview:
        """Read exactly these bytes of an object; with ``etag``, only of the object with that etag."""
        return self.read_many(key, [(offset, nbytes)], etag=etag)[0]

    def read_many(
        self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None
    ) -> list[bytes | memoryview]:
        """Do the same as ``read``, for many (offset, nbytes) in parallel."""
        # A single range is read in this thread. It may be one of the pool's threads, which must not wait for the pool.
        each = request_pool().map if len(ranges) > 1 else map
        blocks = list(each(lambda extent: self.fetch(key, *extent, etag=etag), ranges))
        if etag is not None:
            self.confirm_unchanged(key, etag)
        return blocks

    def fetch(self, key: str, offset: int, nbytes: int, *, etag: str | None) -> bytes | memoryview:
        """Do the same as ``read``.

        The caller must call ``confirm_unchanged`` afterwards, once for any number of fetches.
        """
        if not nbytes:
            return b""

        def attempt() -> bytes | memoryview:
            block = self.transport.get(key, offset, nbytes, etag)
            # After a broken connection, libraries have returned the bytes so far, or none, without an error.
            if len(block) != nbytes:
                if etag is not None:
                    self.confirm_unchanged(key, etag)  # an object that was replaced by a shorter one stays short
                raise TemporaryFailure(f"received {len(block)} bytes instead of {nbytes}, at byte {offset}")
            return block

        with self._errors_of(key):
            return self.policy.retry(attempt)

    def confirm_unchanged(self, key: str, etag: str) -> None:
        """Raise FormatError unless everything fetched so far is from the object with this etag.

        Objects are replaced as a whole, so comparing the etag after reading is enough. This takes a request only if the
        transport cannot require the etag with each read.
        """
        if self.transport.conditional:
            return
        info = self.head(key)
        if info is None:
            raise self._error(key, NoSuchObject("removed"))
        if info.etag != etag:
            raise self._error(key, EtagMismatch(info.etag))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose keys begin with ``prefix``, in no particular order."""
        with self._errors_of(prefix):
            try:
                return iter(self.policy.retry(lambda: list(self.transport.list(prefix))))
            except NoSuchObject:
                where = f"{self.scheme}://{self.bucket}"
                raise StorageError(where, "no such bucket; check its name", missing=True) from None

    def put(self, key: str, chunks: Chunks, nbytes: int, checksum: str) -> None:
        """Write or replace an object of ``nbytes``.

        If ``chunks`` raises an error, nothing is written, and the error passes.
        """
        with self._errors_of(key, writing=True):
            self.transport.put(key, chunks, nbytes, checksum, self.policy.total_seconds)

    def create(self, key: str, data: bytes, checksum: str) -> bool:
        """Write an object unless it exists.

        Return whether it was written. If two calls run at once, only one succeeds.
        """
        with self._errors_of(key, writing=True):
            try:
                self.policy.retry(lambda: self.transport.create(key, data, checksum))
            except EtagMismatch:
                return False
        return True

    def delete(self, key: str) -> None:
        """Remove an object if it exists."""
        with self._errors_of(key, writing=True):
            self.policy.retry(lambda: self.transport.delete(key))

    def abort_uploads(self, key: str) -> int:
        """Remove the stored parts of unfinished uploads to ``key``. Return the number of uploads."""
        with self._errors_of(key, writing=True):
            return self.policy.retry(lambda: self.transport.abort_uploads(key))

    @contextlib.contextmanager
    def _errors_of(self, key: str, *, writing: bool = False) -> Iterator[None]:
        """Convert failures to errors, with the text for a command that reads, or writes, at a key."""
        try:
            yield
        except ModuleNotFoundError as error:
            if not writing:
                raise
            needs = f"writing needs {error.name}; install it with: pip install 'megatron-sft-idx[cloud]'"
            raise StorageError(self.path(key), needs) from None
        except Failure as failure:
            raise self._error(key, failure, writing=writing) from None

    def _error(self, key: str, failure: Failure, *, writing: bool = False) -> SFTIndexError:
        path = self.path(key)
        if isinstance(failure, EtagMismatch) and not writing:
            return FormatError(
                f"{path}: the object was replaced after it was opened (for a shard, this breaks rule W3); start again"
            )
        if isinstance(failure, RangePastEnd):
            return FormatError(f"{path}: the object ends before the requested bytes (rule F2); restore it from a copy")
        reading, to_write = _REMEDIES.get(type(failure), ("the store rejects the request ({})",) * 2)
        whose = "the same places as for the AWS tools" if self.scheme == "s3" else "the profile"
        why = (to_write if writing else reading).format(failure, whose=whose)
        return StorageError(path, why, missing=isinstance(failure, NoSuchObject))


_stores: dict[tuple[str, str], RemoteStore] = {}


def open_store(path: str | os.PathLike[str]) -> tuple[RemoteStore, str]:
    """Return the store of a path (one per bucket and process) and the path's key in it. Makes no request.

    Raises:
        FormatError: the path is not in an object store.
    """
    scheme, bucket, key = RemotePath.of(path)
    if (store := _stores.get((scheme, bucket))) is None:
        store = _stores.setdefault((scheme, bucket), RemoteStore(scheme, bucket))
    return store, key


def forget_stores() -> None:
    """Make the next ``open_store`` look up endpoint and credentials again. Open arrays and files keep theirs."""
    _stores.clear()


# ---- existing objects ----


def object_exists(path: str) -> bool:
    """Return whether there is an object at a path."""
    store, key = open_store(path)
    return bool(key) and store.head(key) is not None


def objects_in_folder(path: str) -> list[str]:
    """Return the paths of the objects directly in a folder (keys with no further slash)."""
    store, key = open_store(path)
    start = key.rstrip("/") + "/" if key.strip("/") else ""
    return [store.path(info.key) for info in store.list(start) if "/" not in info.key[len(start) :]]


def matching_objects(pattern: str, *endings: str) -> list[str]:
    """Return the paths of the objects that match a glob, with or without one of ``endings``, in one listing.

    ``*`` and ``?`` do not match a slash.
    """
    store, key = open_store(pattern)
    folders = key.split("/")[:-1]
    # Only the deepest folder that holds all matches is listed.
    num_plain = next((i for i, name in enumerate(folders) if glob.has_magic(name)), len(folders))
    patterns = [(key + ending).split("/") for ending in ("", *endings)]
    paths = []
    for info in store.list("".join(name + "/" for name in folders[:num_plain])):
        names = info.key.split("/")
        if any(len(names) == len(each) and all(map(fnmatch.fnmatchcase, names, each)) for each in patterns):
            paths.append(store.path(info.key))
    return paths


# ---- objects as arrays and files ----


class RemoteArray(CopiedArray):
    """An array of ``count`` items in an object, from byte ``offset`` on. Each slice is one request and a new copy.

    A slice comes from the object with this etag; otherwise it is an error of ``RemoteStore.read``.
    """

    def __init__(
        self, store: RemoteStore, key: str, dtype: np.dtype[Any], count: int, etag: str, *, offset: int = 0
    ) -> None:
        super().__init__(store.path(key), dtype, count)
        self._store, self._key, self._etag, self._offset = store, key, etag, offset

    def read_items(self, start: int, stop: int) -> NDArray[Any]:
        """See ``CopiedArray``, and ``RemoteStore.read`` for errors."""
        items = self.fetch(start, stop)
        self.confirm_unchanged()
        return items

    def fetch(self, start: int, stop: int) -> NDArray[Any]:
        """Fetch items ``[start, stop)``. The caller must call ``confirm_unchanged`` before using them."""
        size = self.dtype.itemsize
        raw = self._store.fetch(self._key, self._offset + start * size, (stop - start) * size, etag=self._etag)
        out = np.frombuffer(raw, self.dtype)
        if not out.flags.aligned:
            out = out.copy()
        out.flags.writeable = False
        return out

    def confirm_unchanged(self) -> None:
        """Raise FormatError unless all items fetched so far are from the object with the etag."""
        self._store.confirm_unchanged(self._key, self._etag)


_RANGE_NBYTES = 8 << 20
_RANGES_AHEAD = 4


def read_ahead(
    store: RemoteStore, info: ObjectInfo, *, offset: int = 0, range_nbytes: int = _RANGE_NBYTES
) -> Generator[bytes | memoryview, None, None]:
    """Yield the bytes of an object from ``offset`` on, in order, while fetching the next ``_RANGES_AHEAD`` ranges.

    See ``RemoteStore.read``, with the etag of ``info``, for errors.
    """
    offsets = iter(range(offset, info.nbytes, range_nbytes))
    fetched: deque[Future[bytes | memoryview]] = deque()

    def fetch_next() -> None:
        if (begin := next(offsets, None)) is not None:
            nbytes = min(range_nbytes, info.nbytes - begin)
            fetched.append(request_pool().submit(store.read, info.key, begin, nbytes, etag=info.etag))

    try:
        for _ in range(_RANGES_AHEAD):
            fetch_next()
        while fetched:
            block = fetched.popleft().result()
            fetch_next()
            yield block
    finally:
        for future in fetched:
            future.cancel()


class ObjectFile(io.RawIOBase):
    """An object as a file. Each read is one request, so the caller should wrap it in ``io.BufferedReader``.

    See ``RemoteStore.read``, with the etag of ``info``, for errors.
    """

    def __init__(self, store: RemoteStore, info: ObjectInfo) -> None:
        self._store, self._info = store, info
        self._position = 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position, which may be after the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._info.nbytes}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is before the beginning of the object")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, or its beginning if the object ends before. Return the number of bytes."""
        view = memoryview(buffer).cast("B")
        nbytes = max(0, min(len(view), self._info.nbytes - self._position))
        if nbytes:
            view[:nbytes] = self._store.read(self._info.key, self._position, nbytes, etag=self._info.etag)
        self._position += nbytes
        return nbytes
