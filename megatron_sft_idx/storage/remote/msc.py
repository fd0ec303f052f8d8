"""One profile of NVIDIA's multi-storage-client, which can use S3, GCS, Azure, OCI or a local folder."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage.local import name_in_errors
from megatron_sft_idx.storage.remote.transport import (
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
    """The transport of one profile. Every method makes one attempt and raises a ``Failure``.

    Args:
        profile: name of the profile in the configuration of multi-storage-client.

    Raises:
        FormatError: the library is not installed, or does not know the profile.
    """

    # Reads cannot require an etag.
    conditional = False

    def __init__(self, profile: str) -> None:
        try:
            import multistorageclient
        except ModuleNotFoundError:
            raise FormatError(
                f"msc://{profile}: needs multi-storage-client; install it with: pip install 'megatron-sft-idx[cloud]'"
            ) from None
        self._range = multistorageclient.types.Range
        try:
            self._client, _ = multistorageclient.resolve_storage_client(f"msc://{profile}/")
        except (ValueError, KeyError) as error:
            # Without its message, which may quote the configuration.
            raise FormatError(
                f"msc://{profile}: multi-storage-client rejects this profile ({type(error).__name__}); check the"
                " configuration file that MSC_CONFIG points to"
            ) from None

    def head(self, key: str) -> ObjectInfo:
        """Return information about the object at a key."""
        answer = _translated(lambda: self._client.info(key, strict=False))
        if answer.type != "file":
            raise NoSuchObject(answer.type)
        return _info(key, answer)

    def get(self, key: str, offset: int, nbytes: int, etag: str | None) -> bytes:
        """Read bytes of an object with any etag. The result may have fewer than ``nbytes``."""
        del etag
        extent = self._range(offset=offset, size=nbytes)
        return _translated(lambda: bytes(self._client.read(key, byte_range=extent)))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose keys begin with a prefix."""
        # The library lists a folder, not a prefix.
        folder = prefix.rpartition("/")[0]
        for entry in _translated(lambda: list(self._client.list(path=folder + "/" if folder else ""))):
            key = entry.key.lstrip("/")
            if entry.type == "file" and key.startswith(prefix):
                yield _info(key, entry)

    def put(self, key: str, chunks: Chunks, nbytes: int, checksum: str, seconds: float) -> None:
        """Write an object. The library decides whether it is sent in parts, and for how long."""
        del nbytes, seconds
        # The library can send only a file in parts. So all data is also checked before the first byte is sent.
        with tempfile.NamedTemporaryFile(prefix="megatron-sft-idx-") as file:
            with name_in_errors(file.name):
                file.writelines(chunks)
                file.flush()
            _translated(lambda: self._client.upload_file(key, file.name, attributes={CHECKSUM: checksum}))

    def create(self, key: str, data: bytes, checksum: str) -> None:
        """Write an object. EtagMismatch: it already exists.

        The library cannot require that it does not exist, so this method checks first. Two concurrent calls can both
        succeed.
        """
        try:
            self.head(key)
        except NoSuchObject:
            _translated(lambda: self._client.write(key, data, attributes={CHECKSUM: checksum}))
        else:
            raise EtagMismatch("there already")

    def delete(self, key: str) -> None:
        """Remove an object if it exists."""
        with contextlib.suppress(NoSuchObject):
            _translated(lambda: self._client.delete(key))

    def abort_uploads(self, key: str) -> int:
        """Do nothing: profiles do not list unfinished uploads. A rule of the store may remove their parts."""
        del key
        return 0


def _info(key: str, entry: Any) -> ObjectInfo:
    # A local folder has no etags: size and modification time replace them.
    etag = entry.etag or f"{entry.content_length}-{entry.last_modified.timestamp()}"
    return ObjectInfo(key, int(entry.content_length), etag.strip('"'), (entry.metadata or {}).get(CHECKSUM))


def _translated(request: Callable[[], _T]) -> _T:
    """Make a request with the library, and convert its exceptions to failures."""
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
    # Other responses of S3 come as a RuntimeError whose cause is botocore's own exception.
    with contextlib.suppress(ModuleNotFoundError):
        from megatron_sft_idx.storage.remote.s3 import failure_of

        if (failure := failure_of(error)) is not None:
            return failure
    return TemporaryFailure(name) if isinstance(error, OSError) else RequestRefused(name)
