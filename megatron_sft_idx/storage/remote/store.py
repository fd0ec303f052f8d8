"""``ObjectStore``: objects by key, read whole or by ranges, with retries and errors that people understand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from megatron_sft_idx.errors import FormatError, SFTIndexError, StorageError
from megatron_sft_idx.storage.remote.paths import RemotePath
from megatron_sft_idx.storage.remote.retry import RetryPolicy
from megatron_sft_idx.storage.remote.threads import threads
from megatron_sft_idx.storage.remote.transport import (
    Beyond,
    Changed,
    Denied,
    Failure,
    Missing,
    ObjectInfo,
    Refused,
    Temporary,
    Transport,
)

__all__ = ["ObjectStore", "RemoteStore", "forget_stores", "open_store"]

_T = TypeVar("_T")


class ObjectStore(Protocol):
    """Objects of one bucket. Threads may share one; it pickles as its address."""

    def head(self, key: str) -> ObjectInfo | None:
        """Size and etag of an object; None where there is none."""
        ...

    def read(self, key: str, offset: int, nbytes: int, *, etag: str | None = None) -> bytes | memoryview:
        """Exactly these bytes of an object; with ``etag``, of the object that it names and no other."""
        ...

    def read_many(
        self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None
    ) -> list[bytes | memoryview]:
        """As ``read``, for many (offset, nbytes) at once."""
        ...

    def fetch(self, key: str, offset: int, nbytes: int, *, etag: str) -> bytes | memoryview:
        """As ``read``, but of the object that ``etag`` names only if ``confirm`` says so afterwards."""
        ...

    def confirm(self, key: str, etag: str) -> None:
        """FormatError unless all that was fetched so far is of the object that ``etag`` names."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with ``prefix``, in any order."""
        ...


class RemoteStore:
    """An ``ObjectStore`` over a transport, which is made in each process that uses it.

    Every method retries what may pass, under the policy's bound, and then raises

    - StorageError: the store could not be reached, or does not let these credentials in, or there is no such object;
    - FormatError: the object is another one than ``etag`` names, or ends before the range does.

    Args:
        scheme: of the paths in it.
        bucket: of S3, or the profile of multi-storage-client.
        policy: how long to try; None for the usual one.
    """

    def __init__(self, scheme: str, bucket: str, policy: RetryPolicy | None = None) -> None:
        self.scheme, self.bucket = scheme, bucket
        self.policy = policy or RetryPolicy.from_environment()
        self._transport: tuple[int, Transport] | None = None

    def __reduce__(self) -> tuple[type[RemoteStore], tuple[str, str, RetryPolicy]]:
        return RemoteStore, (self.scheme, self.bucket, self.policy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scheme!r}, {self.bucket!r})"

    @property
    def transport(self) -> Transport:
        """This process's; made by the thread that comes first, as that takes longer than a request."""
        made = self._transport
        if made is None or made[0] != os.getpid():
            with _connecting:
                made = self._transport
                if made is None or made[0] != os.getpid():
                    made = self._transport = os.getpid(), _connect(self.scheme, self.bucket)
        return made[1]

    def path(self, key: str) -> str:
        """Of an object, as people write it."""
        return str(RemotePath(self.scheme, self.bucket, key))

    def head(self, key: str) -> ObjectInfo | None:
        """Size and etag of an object; None where there is none."""
        try:
            return self.policy.run(lambda: self.transport.head(key))
        except Missing:
            return None
        except Failure as failure:
            raise self._error(key, failure) from None

    def read(self, key: str, offset: int, nbytes: int, *, etag: str | None = None) -> bytes | memoryview:
        """Exactly these bytes of an object; with ``etag``, of the object that it names and no other."""
        found = self._read(key, offset, nbytes, etag)
        if etag is not None:
            self.confirm(key, etag)
        return found

    def read_many(
        self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None
    ) -> list[bytes | memoryview]:
        """As ``read``, for many (offset, nbytes) at once."""
        found = list(threads().map(lambda wanted: self._read(key, wanted[0], wanted[1], etag), ranges))
        if etag is not None:
            self.confirm(key, etag)
        return found

    def fetch(self, key: str, offset: int, nbytes: int, *, etag: str) -> bytes | memoryview:
        """As ``read``, but of the object that ``etag`` names only if ``confirm`` says so afterwards."""
        return self._read(key, offset, nbytes, etag)

    def _read(self, key: str, offset: int, nbytes: int, etag: str | None) -> bytes | memoryview:
        if not nbytes:
            return b""

        def attempt() -> bytes | memoryview:
            found = self.transport.get(key, offset, nbytes, etag)
            # Libraries have answered with nothing, or with what came before the connection broke, and no error.
            if len(found) != nbytes:
                if etag is not None:
                    self.confirm(key, etag)  # one that was replaced by a shorter one stays short
                raise Temporary(f"{len(found)} bytes for the {nbytes} at {offset}")
            return found

        return self._run(key, attempt)

    def confirm(self, key: str, etag: str) -> None:
        """FormatError unless all that was fetched so far is of the object that ``etag`` names.

        One request for many ranges where the transport could not hold each to its etag, none where it could. Objects
        are replaced as a whole: one that is the same after reading was so all along.
        """
        if self.transport.conditional:
            return
        found = self.head(key)
        if found is None:
            raise self._error(key, Missing("removed"))
        if found.etag != etag:
            raise self._error(key, Changed(found.etag))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with ``prefix``, in any order."""
        try:
            return iter(self._run(prefix, lambda: list(self.transport.list(prefix))))
        except StorageError as error:
            if error.missing:
                where = f"{self.scheme}://{self.bucket}"
                raise StorageError(where, "there is no such bucket; check its name", missing=True) from None
            raise

    def _run(self, key: str, attempt: Callable[[], _T]) -> _T:
        try:
            return self.policy.run(attempt)
        except Failure as failure:
            raise self._error(key, failure) from None

    def _error(self, key: str, failure: Failure) -> SFTIndexError:
        path = self.path(key)
        if isinstance(failure, Changed):
            return FormatError(
                f"{path}: the object was replaced since it was opened (of a shard, that is rule W3): start again"
            )
        if isinstance(failure, Beyond):
            return FormatError(f"{path}: the object ends before the bytes that are wanted (rule F2); restore it")
        why = {
            Missing: "no such object; check the path, and that nobody removed it",
            Denied: f"access denied ({failure}); check the credentials, which come from where"
            f" {'the AWS tools look' if self.scheme == 's3' else 'the profile says'}, and what they allow",
            Temporary: f"no complete answer ({failure}); is the store up, and the endpoint right?",
            Refused: f"the store refuses the request ({failure})",
        }[type(failure)]
        return StorageError(path, why, missing=isinstance(failure, Missing))


_connecting = threading.Lock()


def _renew_lock() -> None:
    global _connecting  # noqa: PLW0603
    _connecting = threading.Lock()


# A thread that stays behind in the parent may hold it.
os.register_at_fork(after_in_child=_renew_lock)


def _connect(scheme: str, bucket: str) -> Transport:
    if scheme == "msc":
        from megatron_sft_idx.storage.remote.msc import MultiStorage

        return MultiStorage(bucket)
    from megatron_sft_idx.storage.remote.s3 import connect

    return connect(bucket)


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
