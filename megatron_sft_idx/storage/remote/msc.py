"""NVIDIA's multi-storage-client: profiles that reach S3, GCS, Azure, OCI and plain folders."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage.remote.store import (
    CHECKSUM,
    AccessDenied,
    Chunks,
    EtagMismatch,
    Failure,
    NoSuchObject,
    ObjectInfo,
    RequestRefused,
    TemporaryFailure,
)

_T = TypeVar("_T")


class MultiStorage:
    """One profile.

    Args:
        profile: its name in the configuration of multi-storage-client.

    Raises:
        FormatError: the library is not installed, or does not know the profile.
    """

    # Its reads take no condition.
    conditional = False

    def __init__(self, profile: str) -> None:
        try:
            import multistorageclient
        except ModuleNotFoundError:
            raise FormatError(
                f"msc://{profile}: needs multi-storage-client; pip install 'megatron-sft-idx[cloud]'"
            ) from None
        self._range = multistorageclient.types.Range
        try:
            self._client, _ = multistorageclient.resolve_storage_client(f"msc://{profile}/")
        except (ValueError, KeyError) as error:
            # Without its message, which may quote the configuration.
            raise FormatError(
                f"msc://{profile}: multi-storage-client does not take this profile ({type(error).__name__});"
                " check the file that MSC_CONFIG names"
            ) from None

    def head(self, key: str) -> ObjectInfo:
        """What is at a key."""
        found = translated(lambda: self._client.info(key, strict=False))
        if found.type != "file":
            raise NoSuchObject(found.type)
        return _info(key, found)

    def get(self, key: str, offset: int, nbytes: int, etag: str | None) -> bytes:
        """Bytes of an object; ``etag`` is left to the store."""
        del etag
        wanted = self._range(offset=offset, size=nbytes)
        return translated(lambda: bytes(self._client.read(key, byte_range=wanted)))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with a prefix."""
        # It lists folders, not prefixes.
        folder = prefix.rpartition("/")[0]
        for found in translated(lambda: list(self._client.list(path=folder + "/" if folder else ""))):
            key = found.key.lstrip("/")
            if found.type == "file" and key.startswith(prefix):
                yield _info(key, found)

    def put(self, key: str, chunks: Chunks, nbytes: int, checksum: str, seconds: float) -> None:
        """Write an object; the library knows when in parts, and how long to try."""
        del nbytes, seconds
        # It sends parts from files only, and all of the data has been checked before the first byte is sent.
        with tempfile.NamedTemporaryFile(prefix="megatron-sft-idx-") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            translated(lambda: self._client.upload_file(key, file.name, attributes={CHECKSUM: checksum}))

    def create(self, key: str, data: bytes, checksum: str) -> None:
        """Write an object where there is none.

        The library has no way to ask for that, so this looks first: of two that try in the same moment both may believe
        that they succeeded.
        """
        try:
            self.head(key)
        except NoSuchObject:
            translated(lambda: self._client.write(key, data, attributes={CHECKSUM: checksum}))
        else:
            raise EtagMismatch("there already")

    def delete(self, key: str) -> None:
        """Remove an object; nothing where there is none."""
        try:
            translated(lambda: self._client.delete(key))
        except NoSuchObject:
            return

    def abort_uploads(self, key: str) -> int:
        """None: profiles do not tell of uploads that never ended. Stores have rules that remove their parts."""
        del key
        return 0


def _info(key: str, found: Any) -> ObjectInfo:
    # Plain folders have no etags: size and time of change tell as much as they can.
    etag = found.etag or f"{found.content_length}-{found.last_modified.timestamp()}"
    return ObjectInfo(key, int(found.content_length), etag.strip('"'), (found.metadata or {}).get(CHECKSUM))


def translated(request: Callable[[], _T]) -> _T:
    """What a request gives; its exceptions as failures."""
    try:
        return request()
    except Exception as error:
        raise _failure_of(error) from None


def _failure_of(error: Exception) -> Failure:
    from multistorageclient.types import PreconditionFailedError, RetryableError

    name = type(error).__name__
    if isinstance(error, FileNotFoundError):
        return NoSuchObject(name)
    if isinstance(error, PermissionError):
        return AccessDenied(name)
    if isinstance(error, PreconditionFailedError):
        return EtagMismatch(name)
    if isinstance(error, RetryableError):
        return TemporaryFailure(name)
    # Whatever else S3 answers comes as a RuntimeError over botocore's own, which says more.
    try:
        from megatron_sft_idx.storage.remote.s3 import failure_of

        known = failure_of(error)
    except ModuleNotFoundError:
        known = None
    if known is not None:
        return known
    return TemporaryFailure(name) if isinstance(error, OSError) else RequestRefused(name)
