"""``ObjectWriter``: objects written whole or not at all, each with its checksum recorded beside it.

Objects of many parts are sent in parallel; a part that fails is sent again, and an object that cannot be finished is
given up with its parts. What a killed process leaves are parts that no reader sees; ``abort_uploads`` removes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from megatron_sft_idx.errors import StorageError
from megatron_sft_idx.storage.remote.paths import RemotePath
from megatron_sft_idx.storage.remote.retry import RetryPolicy
from megatron_sft_idx.storage.remote.transport import Changed, Denied, Failure, Missing, Temporary

__all__ = ["CHECKSUM", "ObjectWriter", "Stored", "WritingTransport", "open_writer"]

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
            from megatron_sft_idx.storage.remote.msc_writing import MultiStorageWriter

            return MultiStorageWriter(where.bucket)
        from megatron_sft_idx.storage.remote.s3_writing import S3Writer

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
