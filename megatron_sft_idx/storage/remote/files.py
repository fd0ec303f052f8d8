"""Objects read like files: from front to back with requests ahead of the reader, or anywhere."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import StorageError
from megatron_sft_idx.storage.remote.store import ObjectStore, RemotePath, RetryPolicy, threads
from megatron_sft_idx.storage.remote.transport import Changed, Denied, Failure, Missing, ObjectInfo, Temporary

__all__ = [
    "CHECKSUM",
    "ObjectFile",
    "ObjectWriter",
    "RemoteArray",
    "Stored",
    "WritingTransport",
    "open_writer",
    "read_ahead",
]


class RemoteArray:
    """An array in an object: every slice is one request, and a fresh copy.

    Slices are of the object that was there when the array was made, or an error: see ``ObjectStore.read``.

    Args:
        store: that holds the object.
        key: of the object.
        dtype: of its items, which begin at its first byte.
        count: how many items there are.
        etag: of the object.
    """

    def __init__(self, store: ObjectStore, key: str, dtype: np.dtype[Any], count: int, etag: str) -> None:
        self._store, self._key, self._etag = store, key, etag
        self.dtype, self._count = dtype, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, _ = index.indices(self._count)
        found = self.fetch(start, max(start, stop))
        self.confirm()
        return found

    def fetch(self, start: int, stop: int) -> NDArray[Any]:
        """Items from ``start`` on and before ``stop``, which are only known to be right after ``confirm``."""
        size = self.dtype.itemsize
        raw = self._store.fetch(self._key, start * size, (stop - start) * size, etag=self._etag)
        out = np.frombuffer(raw, self.dtype)
        if not out.flags.aligned:
            out = out.copy()
        out.flags.writeable = False
        return out

    def confirm(self) -> None:
        """FormatError unless all that was fetched so far is of the object that the etag names."""
        self._store.confirm(self._key, self._etag)


_RANGE_NBYTES = 8 << 20
_RANGES_AHEAD = 4


def read_ahead(
    store: ObjectStore,
    info: ObjectInfo,
    *,
    offset: int = 0,
    range_nbytes: int = _RANGE_NBYTES,
    ahead: int = _RANGES_AHEAD,
) -> Generator[bytes | memoryview, None, None]:
    """The bytes of an object from ``offset`` on, in order; ``ahead`` ranges are being fetched at any time.

    Raises:
        FormatError: the object is no longer the one that ``info`` tells of.
        StorageError: the store cannot be read.
    """
    offsets = iter(range(offset, info.nbytes, range_nbytes))
    fetched: deque[Future[bytes | memoryview]] = deque()

    def fetch_next() -> None:
        if (begin := next(offsets, None)) is not None:
            nbytes = min(range_nbytes, info.nbytes - begin)
            fetched.append(threads().submit(store.read, info.key, begin, nbytes, etag=info.etag))

    try:
        for _ in range(ahead):
            fetch_next()
        while fetched:
            block = fetched.popleft().result()
            fetch_next()
            yield block
    finally:
        for future in fetched:
            future.cancel()


class ObjectFile(io.RawIOBase):
    """An object as a file that can be sought in; each read is one request, so wrap it in ``io.BufferedReader``.

    Args:
        store: where it lies.
        info: the object; reading another one under its name is an error.
    """

    def __init__(self, store: ObjectStore, info: ObjectInfo) -> None:
        self._store, self._info = store, info
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes before the next one that is read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a position, which may lie behind the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._info.nbytes}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, or as much of it as the object reaches."""
        view = memoryview(buffer).cast("B")
        nbytes = max(0, min(len(view), self._info.nbytes - self._position))
        if nbytes:
            view[:nbytes] = self._store.read(self._info.key, self._position, nbytes, etag=self._info.etag)
        self._position += nbytes
        return nbytes


_T = TypeVar("_T")
Chunks = Iterable["bytes | memoryview"]

# Under this name an object's metadata holds the xxh3_128 of its bytes, in hex.
CHECKSUM = "xxh3-128"


class Stored(NamedTuple):
    """What a store says of an object.

    Attributes:
        nbytes: its size.
        checksum: the hex xxh3_128 that its writer recorded; None where it was written by something else.
    """

    nbytes: int
    checksum: str | None


class WritingTransport(Protocol):
    """What one library can do to one bucket, a single attempt at a time; raises the failures of ``transport``."""

    def put(self, key: str, chunks: Chunks, nbytes: int, checksum: str, seconds: float) -> None:
        """As ``ObjectWriter.put``; sends a part again by itself, for so many seconds."""

    def create(self, key: str, data: bytes, checksum: str) -> None:
        """Write an object where there is none; ``Changed`` where there is."""

    def delete(self, key: str) -> None:
        """Remove an object; nothing where there is none."""

    def stored(self, key: str) -> Stored:
        """What is there; ``Missing`` for nothing."""

    def abort_uploads(self, key: str) -> int:
        """As ``ObjectWriter.abort_uploads``."""


class ObjectWriter:
    """Writes objects of one bucket, retrying what may pass, under the policy's bound.

    Every method raises StorageError where the store cannot be reached, or does not let these credentials.

    Args:
        where: a path in the bucket.
        policy: how long to try; None for the usual one.
    """

    def __init__(self, where: RemotePath, policy: RetryPolicy | None = None) -> None:
        self._where = where
        self._policy = policy or RetryPolicy.from_environment()
        self._transport = _connect(where)

    def put(self, key: str, chunks: Chunks, nbytes: int, checksum: str) -> None:
        """Write an object of ``nbytes``, or replace it.

        What ``chunks`` raises, at its end too, keeps the object from being written and comes out as it is.
        """
        try:
            self._transport.put(key, chunks, nbytes, checksum, self._policy.total_seconds)
        except Failure as failure:
            raise self._error(key, failure) from None

    def create(self, key: str, data: bytes, checksum: str) -> bool:
        """Write an object only if there is none; False where there is. Of two that try at once one succeeds."""
        try:
            self._policy.run(lambda: self._transport.create(key, data, checksum))
        except Changed:
            return False
        except Failure as failure:
            raise self._error(key, failure) from None
        return True

    def delete(self, key: str) -> None:
        """Remove an object; nothing where there is none."""
        self._run(key, lambda: self._transport.delete(key))

    def stored(self, key: str) -> Stored | None:
        """What is there; None for nothing."""
        try:
            return self._policy.run(lambda: self._transport.stored(key))
        except Missing:
            return None
        except Failure as failure:
            raise self._error(key, failure) from None

    def abort_uploads(self, key: str) -> int:
        """Remove the parts of uploads to ``key`` that never ended; returns how many uploads there were."""
        return self._run(key, lambda: self._transport.abort_uploads(key))

    def _run(self, key: str, attempt: Callable[[], _T]) -> _T:
        try:
            return self._policy.run(attempt)
        except Failure as failure:
            raise self._error(key, failure) from None

    def _error(self, key: str, failure: Failure) -> StorageError:
        path = str(RemotePath(self._where.scheme, self._where.bucket, key))
        why = {
            Missing: "there is no such bucket; make it first, or check its name",
            Denied: f"access denied ({failure}); check the credentials, and that they allow writing",
            Temporary: f"could not be written ({failure}); is the store up, and the endpoint right?"
            " The same command goes on where this one stopped",
        }
        return StorageError(path, why.get(type(failure), f"the store refuses the request ({failure})"))


def _connect(where: RemotePath) -> WritingTransport:
    try:
        if where.scheme == "msc":
            from megatron_sft_idx.storage.remote.msc import MultiStorageWriter

            return MultiStorageWriter(where.bucket)
        from megatron_sft_idx.storage.remote.s3 import S3Writer

        return S3Writer(where.bucket)
    except ModuleNotFoundError as error:
        why = f"writing needs {error.name}; pip install 'megatron-sft-idx[cloud]'"
        raise StorageError(str(where), why) from None


_writers: dict[tuple[int, str, str], ObjectWriter] = {}


def open_writer(path: str | os.PathLike[str]) -> tuple[ObjectWriter, str]:
    """The writer for the bucket that a path lies in, one a bucket and process, and the path's key in it.

    Raises:
        FormatError: not a path in an object store.
        StorageError: a library is missing.
    """
    where = RemotePath.of(path)
    place = os.getpid(), where.scheme, where.bucket
    if (writer := _writers.get(place)) is None:
        writer = _writers.setdefault(place, ObjectWriter(where))
    return writer, where.key
