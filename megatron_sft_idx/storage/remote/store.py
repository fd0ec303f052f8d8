"""``RemoteStore``: objects by key, read by ranges and written, with retries and errors that people understand.

Below it is a transport, ``S3`` or ``MultiStorage``: what one library can do with one bucket, a single attempt at a
time. Threads may share one, processes may not. It translates between its library and some failures, which say what
whoever called can do. They carry a status or the name of an exception, never a library's own message: those may quote
request headers. Above it are objects as arrays and as files.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import io
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SFTIndexError, StorageError
from megatron_sft_idx.storage.local import SCHEME_STARTS

if TYPE_CHECKING:
    from megatron_sft_idx.storage.remote.msc import MultiStorage
    from megatron_sft_idx.storage.remote.s3 import S3


class RemotePath(NamedTuple):
    """A path in an object store, taken apart: ``s3`` or ``msc``, bucket (or profile), and key, empty for the bucket."""

    scheme: str
    bucket: str
    key: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> RemotePath:
        """Take a path apart; ``str`` puts it together again.

        Raises:
            FormatError: another scheme, no bucket, or a key that not every library can send as it is.
        """
        text = os.fspath(path)
        scheme, found, rest = text.partition("://")
        if not found or f"{scheme}://" not in SCHEME_STARTS:
            raise FormatError(f"{text}: not a path in an object store; it begins with {' or '.join(SCHEME_STARTS)}")
        bucket, _, key = rest.partition("/")
        if not bucket:
            what = "bucket" if scheme == "s3" else "profile"
            raise FormatError(f"{text}: no {what} is named; expected {scheme}://{what.upper()}/path")
        # Some libraries take these for steps through folders, others refuse them, and stores know no folders.
        folders = key.split("/")[:-1]
        if "" in folders or {".", ".."} & {*folders, key.rpartition("/")[2]} or not key.isprintable():
            raise FormatError(
                f"{text!r}: //, /./, /../ and control characters in a key mean one thing to one library and another to"
                " the next; name it without"
            )
        return cls(scheme, bucket, key)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"


# ---- what a library does ----

Chunks = Iterable["bytes | memoryview"]

# Under this name an object's metadata holds the xxh3_128 of its bytes, in hex.
CHECKSUM = "xxh3-128"


class ObjectInfo(NamedTuple):
    """An object without its content.

    Attributes:
        key: inside its bucket.
        nbytes: its size.
        etag: differs where the content does; without quotes.
        checksum: the hex xxh3_128 that its writer recorded; None in a listing, or where something else wrote it.
    """

    key: str
    nbytes: int
    etag: str
    checksum: str | None = None


class Failure(Exception):  # noqa: N818 - it never reaches a caller
    """What came of a request instead of an answer; its text is a status or the name of an exception."""


class TemporaryFailure(Failure):
    """No answer, or half of one: the same request may do next time."""


class NoSuchObject(Failure):
    """There is no such object, or no such bucket."""


class AccessDenied(Failure):
    """The credentials are not accepted, are not enough, or there are none."""


class EtagMismatch(Failure):
    """The object is another one than the etag names, or there is one where none should be."""


class RangePastEnd(Failure):
    """The object ends before the range begins."""


class RequestRefused(Failure):
    """Any other answer, which the same request would get again."""


# ---- trying again ----

_T = TypeVar("_T")
_SECONDS = "SFT_IDX_STORAGE_SECONDS"


class RetryPolicy(NamedTuple):
    """Back-off that doubles, with jitter, under a bound of the whole.

    Attributes:
        total_seconds: no attempt begins later than this after the first one.
        first_delay: seconds before the second attempt, at most.
        longest_delay: seconds between two attempts, at most.
    """

    total_seconds: float = 120.0
    first_delay: float = 0.1
    longest_delay: float = 5.0

    @classmethod
    def from_environment(cls) -> RetryPolicy:
        """The usual one, with the total bound that ``SFT_IDX_STORAGE_SECONDS`` names, where it does."""
        if not (text := os.environ.get(_SECONDS, "")):
            return cls()
        with contextlib.suppress(ValueError):
            if (seconds := float(text)) >= 0:
                return cls(total_seconds=seconds)
        raise FormatError(f"{_SECONDS}={text!r}: expected seconds, such as 120")

    def run(self, attempt: Callable[[], _T]) -> _T:
        """What ``attempt`` gives once it does not raise ``TemporaryFailure``.

        Raises:
            TemporaryFailure: the last one's, with the number of attempts and the time they took.
            Failure: any other kind, at once.
        """
        begin, delay, attempts = time.monotonic(), self.first_delay, 0
        while True:
            attempts += 1
            # The interpreter waits for this thread before it exits: nothing is worth another attempt.
            if _ending and threading.current_thread() is not threading.main_thread():
                raise TemporaryFailure("the process ends")
            try:
                return attempt()
            except TemporaryFailure as failure:
                spent = time.monotonic() - begin
                # Half of it is by chance, so that many readers do not come back together.
                pause = delay * random.uniform(0.5, 1)
                if spent + pause > self.total_seconds:
                    raise TemporaryFailure(f"{attempts} attempts in {spent:.1f} s, the last one: {failure}") from None
            time.sleep(pause)
            delay = min(2 * delay, self.longest_delay)


# Requests under way at once. A request to S3 takes 10 to 100 ms whatever its size, so it takes many to fill a network.
CONNECTIONS = 64

_pool: tuple[int, ThreadPoolExecutor] | None = None
_ending = False


def request_pool() -> ThreadPoolExecutor:
    """The pool of this process; a fork makes its own, as threads stay behind in the parent.

    What runs in it must not wait for more that runs in it.
    """
    global _pool  # noqa: PLW0603
    pool = _pool
    if pool is None or pool[0] != os.getpid():
        pool = _pool = os.getpid(), ThreadPoolExecutor(CONNECTIONS, "storage")
    return pool[1]


def _end() -> None:
    """Drop what is queued: else the interpreter exits once each request has been tried for as long as they may be."""
    global _ending  # noqa: PLW0603
    _ending = True
    if _pool is not None and _pool[0] == os.getpid():
        _pool[1].shutdown(wait=False, cancel_futures=True)


# What atexit calls comes after the interpreter has waited for the pool; this comes before, in Python 3.9 and later.
if register := getattr(threading, "_register_atexit", None):
    register(_end)


# ---- a bucket ----


class RemoteStore:
    """Objects of one bucket. Threads may share one; it pickles as its address, and makes a transport in each process.

    Every method retries what may pass, under the policy's bound, and then raises

    - StorageError: the store could not be reached, or does not let these credentials in, or there is no such object;
    - FormatError: the object is another one than ``etag`` names, or ends before the range does.

    ``bucket`` is of S3, or the profile of multi-storage-client; ``policy`` says how long to try.
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
        """This process's; made by the thread that comes first, as that takes longer than a request."""
        made = self._transport
        if made is None or made[0] != os.getpid():
            with _connecting:
                made = self._transport
                if made is None or made[0] != os.getpid():
                    made = self._transport = os.getpid(), self._connect()
        return made[1]

    def _connect(self) -> S3 | MultiStorage:
        if self.scheme == "msc":
            from megatron_sft_idx.storage.remote.msc import MultiStorage

            return MultiStorage(self.bucket)
        from megatron_sft_idx.storage.remote.s3 import S3

        return S3(self.bucket)

    def path(self, key: str) -> str:
        """Of an object, as people write it."""
        return str(RemotePath(self.scheme, self.bucket, key))

    def head(self, key: str, *, writing: bool = False) -> ObjectInfo | None:
        """What is at a key; None for nothing. With ``writing`` errors are worded for whoever writes there."""
        with self._telling(key, writing=writing):
            try:
                return self.policy.run(lambda: self.transport.head(key))
            except NoSuchObject:
                return None

    def read(self, key: str, offset: int, nbytes: int, *, etag: str | None = None) -> bytes | memoryview:
        """Exactly these bytes of an object; with ``etag``, of the object that it names and no other."""
        return self.read_many(key, [(offset, nbytes)], etag=etag)[0]

    def read_many(
        self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None
    ) -> list[bytes | memoryview]:
        """As ``read``, for many (offset, nbytes) at once."""
        # What runs in the pool must not wait for more that runs in it: one is fetched here.
        run = request_pool().map if len(ranges) > 1 else map
        found = list(run(lambda wanted: self.fetch(key, *wanted, etag=etag), ranges))
        if etag is not None:
            self.confirm_unchanged(key, etag)
        return found

    def fetch(self, key: str, offset: int, nbytes: int, *, etag: str | None) -> bytes | memoryview:
        """As ``read``, but of the object that ``etag`` names only if ``confirm_unchanged`` says so afterwards."""
        if not nbytes:
            return b""

        def attempt() -> bytes | memoryview:
            found = self.transport.get(key, offset, nbytes, etag)
            # Libraries have answered with nothing, or with what came before the connection broke, and no error.
            if len(found) != nbytes:
                if etag is not None:
                    self.confirm_unchanged(key, etag)  # one that was replaced by a shorter one stays short
                raise TemporaryFailure(f"{len(found)} bytes for the {nbytes} at {offset}")
            return found

        with self._telling(key):
            return self.policy.run(attempt)

    def confirm_unchanged(self, key: str, etag: str) -> None:
        """FormatError unless all that was fetched so far is of the object that ``etag`` names.

        One request for many ranges where the transport could not hold each to its etag, none where it could. Objects
        are replaced as a whole: one that is the same after reading was so all along.
        """
        if self.transport.conditional:
            return
        found = self.head(key)
        if found is None:
            raise self._error(key, NoSuchObject("removed"))
        if found.etag != etag:
            raise self._error(key, EtagMismatch(found.etag))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with ``prefix``, in any order."""
        with self._telling(prefix):
            try:
                return iter(self.policy.run(lambda: list(self.transport.list(prefix))))
            except NoSuchObject:
                where = f"{self.scheme}://{self.bucket}"
                raise StorageError(where, "there is no such bucket; check its name", missing=True) from None

    # Each of what follows raises StorageError only.

    def put(self, key: str, chunks: Chunks, nbytes: int, checksum: str) -> None:
        """Write an object of ``nbytes``, or replace it.

        What ``chunks`` raises, at its end too, keeps the object from being written and comes out as it is.
        """
        with self._telling(key, writing=True):
            self.transport.put(key, chunks, nbytes, checksum, self.policy.total_seconds)

    def create(self, key: str, data: bytes, checksum: str) -> bool:
        """Write an object only if there is none; False where there is. Of two that try at once one succeeds."""
        with self._telling(key, writing=True):
            try:
                self.policy.run(lambda: self.transport.create(key, data, checksum))
            except EtagMismatch:
                return False
        return True

    def delete(self, key: str) -> None:
        """Remove an object; nothing where there is none."""
        with self._telling(key, writing=True):
            self.policy.run(lambda: self.transport.delete(key))

    def abort_uploads(self, key: str) -> int:
        """Remove the parts of uploads to ``key`` that never ended; returns how many uploads there were."""
        with self._telling(key, writing=True):
            return self.policy.run(lambda: self.transport.abort_uploads(key))

    @contextlib.contextmanager
    def _telling(self, key: str, *, writing: bool = False) -> Iterator[None]:
        """Failures become errors, worded for whoever reads or writes at a key."""
        try:
            yield
        except ModuleNotFoundError as error:
            if not writing:
                raise
            needs = f"writing needs {error.name}; pip install 'megatron-sft-idx[cloud]'"
            raise StorageError(self.path(key), needs) from None
        except Failure as failure:
            raise self._error(key, failure, writing=writing) from None

    def _error(self, key: str, failure: Failure, *, writing: bool = False) -> SFTIndexError:
        path = self.path(key)
        if isinstance(failure, EtagMismatch) and not writing:
            return FormatError(
                f"{path}: the object was replaced since it was opened (of a shard, that is rule W3): start again"
            )
        if isinstance(failure, RangePastEnd):
            return FormatError(f"{path}: the object ends before the bytes that are wanted (rule F2); restore it")
        reading, to_write = _REMEDIES.get(type(failure), ("the store refuses the request ({})",) * 2)
        whose = "the AWS tools look" if self.scheme == "s3" else "the profile says"
        why = (to_write if writing else reading).format(failure, whose=whose)
        return StorageError(path, why, missing=isinstance(failure, NoSuchObject))


# What to say to whoever reads, and to whoever writes.
_REMEDIES: dict[type[Failure], tuple[str, str]] = {
    NoSuchObject: (
        "no such object; check the path, and that nobody removed it",
        "there is no such bucket; make it first, or check its name",
    ),
    AccessDenied: (
        "access denied ({}); check the credentials, which come from where {whose}, and what they allow",
        "access denied ({}); check the credentials, and that they allow writing",
    ),
    TemporaryFailure: (
        "no complete answer ({}); is the store up, and the endpoint right?",
        "could not be written ({}); is the store up, and the endpoint right? The same command goes on where this one"
        " stopped",
    ),
}


_connecting = threading.Lock()


def _renew_lock() -> None:
    global _connecting  # noqa: PLW0603
    _connecting = threading.Lock()


# A thread that stays behind in the parent may hold it.
os.register_at_fork(after_in_child=_renew_lock)


_stores: dict[tuple[str, str], RemoteStore] = {}


def open_store(path: str | os.PathLike[str]) -> tuple[RemoteStore, str]:
    """The store that a path lies in, one a bucket and process, and the path's key in it; no request is made.

    Raises:
        FormatError: not a path in an object store.
    """
    where = RemotePath.of(path)
    place = where.scheme, where.bucket
    if (store := _stores.get(place)) is None:
        store = _stores.setdefault(place, RemoteStore(*place))
    return store, where.key


def forget_stores() -> None:
    """Let the next ``open_store`` look for endpoint and credentials anew; what is open stays as it is."""
    _stores.clear()


# ---- what is there ----


def object_exists(path: str) -> bool:
    """Whether there is an object at a path."""
    store, key = open_store(path)
    return bool(key) and store.head(key) is not None


def objects_in_folder(path: str) -> list[str]:
    """Paths of the objects right in a folder; empty where there is none."""
    store, key = open_store(path)
    start = key.rstrip("/") + "/" if key.strip("/") else ""
    return [store.path(found.key) for found in store.list(start) if "/" not in found.key[len(start) :]]


def matching_objects(pattern: str, *endings: str) -> list[str]:
    """Paths of the objects that a glob matches, or the glob with one of these endings: all are found in one listing.

    ``*`` and ``?`` stop at a slash.
    """
    store, key = open_store(pattern)
    folders = key.split("/")[:-1]
    # The longest folder in which all matches lie.
    plain = next((i for i, part in enumerate(folders) if glob.has_magic(part)), len(folders))
    wanted = [(key + ending).split("/") for ending in ("", *endings)]
    found = []
    for one in store.list("".join(part + "/" for part in folders[:plain])):
        parts = one.key.split("/")
        if any(len(parts) == len(each) and all(map(fnmatch.fnmatchcase, parts, each)) for each in wanted):
            found.append(store.path(one.key))
    return found


# ---- objects as arrays and files ----


class RemoteArray:
    """An array of ``count`` items in an object, from ``offset`` bytes on: every slice is one request, and a fresh copy.

    Slices are of the object that the etag names, or an error: see ``RemoteStore.read``.
    """

    def __init__(
        self, store: RemoteStore, key: str, dtype: np.dtype[Any], count: int, etag: str, *, offset: int = 0
    ) -> None:
        self._store, self._key, self._etag, self._offset = store, key, etag, offset
        self.dtype, self._count = dtype, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, _ = index.indices(self._count)
        found = self.fetch(start, max(start, stop))
        self.confirm_unchanged()
        return found

    def fetch(self, start: int, stop: int) -> NDArray[Any]:
        """Items from ``start`` on and before ``stop``, which are only known to be right after ``confirm_unchanged``."""
        size = self.dtype.itemsize
        raw = self._store.fetch(self._key, self._offset + start * size, (stop - start) * size, etag=self._etag)
        out = np.frombuffer(raw, self.dtype)
        if not out.flags.aligned:
            out = out.copy()
        out.flags.writeable = False
        return out

    def confirm_unchanged(self) -> None:
        """FormatError unless all that was fetched so far is of the object that the etag names."""
        self._store.confirm_unchanged(self._key, self._etag)


_RANGE_NBYTES = 8 << 20
_RANGES_AHEAD = 4


def read_ahead(
    store: RemoteStore, info: ObjectInfo, *, offset: int = 0, range_nbytes: int = _RANGE_NBYTES
) -> Generator[bytes | memoryview, None, None]:
    """The bytes of an object from ``offset`` on, in order; ``_RANGES_AHEAD`` ranges are being fetched at any time.

    Raises:
        FormatError: the object is no longer the one that ``info`` tells of.
        StorageError: the store cannot be read.
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
    """An object as a file that can be sought in; each read is one request, so wrap it in ``io.BufferedReader``.

    Reading another object than ``info`` tells of is an error.
    """

    def __init__(self, store: RemoteStore, info: ObjectInfo) -> None:
        self._store, self._info = store, info
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

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
