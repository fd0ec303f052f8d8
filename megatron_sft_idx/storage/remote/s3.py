"""One bucket of S3: requests through boto3; ranges and uploads through obstore if that is installed.

boto3 finds endpoint, region and credentials in its usual places, and obstore gets the same. Reading a range with boto3
takes about 3 ms of CPU time under the interpreter lock; obstore takes a sixth of that, without the lock.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage.remote.transport import (
    CHECKSUM,
    CONNECTIONS,
    AccessDenied,
    Chunks,
    EtagMismatch,
    Failure,
    NoSuchObject,
    ObjectInfo,
    RangePastEnd,
    RequestRefused,
    TemporaryFailure,
)

_T = TypeVar("_T")
_CONNECT_SECONDS, _READ_SECONDS = 5, 20
_MIB = 1 << 20
_PART_NBYTES = 8 * _MIB
# Amazon allows 10,000 parts per object; other stores, unless configured otherwise, 1,000.
_MAX_PARTS = 1000
_PARTS_AT_ONCE = 6
# The timeout of one part: a minute, plus 4 seconds per MiB for slow connections.
_SECONDS, _SECONDS_A_MIB = 60, 4
_SMALL_SECONDS = 5.0
# The process that runs obstore's threads. A fork does not have them, and would wait for them forever.
_obstore_process: int | None = None

# The largest range, 8 MiB, takes this long at a quarter of a MiB per second.
_TRANSFER_SECONDS = 32
_STATUS = re.compile(r"\b(?:status|response error)\D{0,20}([45]\d\d)\b", re.IGNORECASE)
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")

_BY_STATUS: dict[int, type[Failure]] = {
    401: AccessDenied, 403: AccessDenied, 404: NoSuchObject, 408: TemporaryFailure, 412: EtagMismatch,
    416: RangePastEnd, 429: TemporaryFailure
}  # fmt: skip
# Error codes that some stores send with status 400.
_TEMPORARY = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException"}
# Error codes for expired credentials.
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}


class S3:
    """The transport of one bucket of S3. Every method makes one attempt and raises a ``Failure``.

    Args:
        bucket: name of the bucket.
        fast: whether to read ranges through obstore; None to do so if it is installed and usable in this process.

    Raises:
        FormatError: boto3 is not installed.
    """

    # Reads require the etag.
    conditional = True

    def __init__(self, bucket: str, *, fast: bool | None = None) -> None:
        try:
            import boto3
            from botocore.config import Config
        except ModuleNotFoundError:
            raise FormatError(
                f"s3://{bucket}: reading from S3 needs boto3; install it with: pip install 'megatron-sft-idx[cloud]'"
            ) from None
        self.bucket = bucket
        self.session = boto3.session.Session()
        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            max_pool_connections=CONNECTIONS,
            retries={"total_max_attempts": 1},  # ``RemoteStore`` retries
        )
        self.client = _translated(lambda: self.session.client("s3", config=config))
        self.fast = _usable() and find_spec("obstore") is not None if fast is None else fast
        if self.fast:
            # ``RemoteStore`` retries. obstore's timeout is for the whole response.
            seconds = _READ_SECONDS + _TRANSFER_SECONDS
            self._ranges = self._obstore(timeout=f"{seconds}s", retry_config={"max_retries": 0})

    def head(self, key: str) -> ObjectInfo:
        """Return information about the object at a key."""
        answer = _translated(lambda: self.client.head_object(Bucket=self.bucket, Key=key))
        checksum = answer.get("Metadata", {}).get(CHECKSUM)
        return ObjectInfo(key, int(answer["ContentLength"]), answer["ETag"].strip('"'), checksum)

    def get(self, key: str, offset: int, nbytes: int, etag: str | None) -> bytes | memoryview:
        """Read bytes of an object, with ``etag`` of exactly that version. The result may have fewer than ``nbytes``."""
        if self.fast:
            import obstore

            options: dict[str, Any] = {"range": (offset, offset + nbytes)}
            options |= {"if_match": f'"{etag}"'} if etag is not None else {}
            try:
                answer = obstore.get(self._ranges, key, options=options)
                begin, end = answer.range
                if (begin, end) != (offset, offset + nbytes):
                    raise TemporaryFailure(f"received bytes {begin} to {end} instead of {offset} to {offset + nbytes}")
                return memoryview(answer.bytes())
            except (obstore.exceptions.BaseError, OSError) as error:
                raise _obstore_failure(error) from None
        headers = {"Range": f"bytes={offset}-{offset + nbytes - 1}"}
        headers |= {"IfMatch": f'"{etag}"'} if etag is not None else {}

        def request() -> bytes:
            answer = self.client.get_object(Bucket=self.bucket, Key=key, **headers)
            body = answer["Body"]
            # A server without support for ranges sends the whole object, which may be large.
            if answer["ContentLength"] > nbytes:
                body.close()
                raise RequestRefused(f"received {answer['ContentLength']} bytes instead of a range of {nbytes}")
            raw: bytes = body.read()
            return raw

        return _translated(request)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose keys begin with a prefix."""
        pages = iter(self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix))
        while (page := _translated(lambda: next(pages, None))) is not None:
            for entry in page.get("Contents", ()):
                yield ObjectInfo(entry["Key"], int(entry["Size"]), entry["ETag"].strip('"'))

    def put(self, key: str, chunks: Chunks, nbytes: int, checksum: str, seconds: float) -> None:
        """Write an object, a large one in parts. obstore retries for at most ``seconds``."""
        part_nbytes = max(_PART_NBYTES, -(-nbytes // _MAX_PARTS // _MIB) * _MIB)
        if nbytes <= part_nbytes:
            self._put(key, b"".join(chunks), checksum, part_nbytes, seconds, mode="overwrite")
            return
        try:
            self._put(key, iter(chunks), checksum, part_nbytes, seconds, chunk_size=part_nbytes)
        except BaseException:
            # obstore removes the parts itself, but that request may have failed, too. Then the next upload to the key
            # removes them.
            with contextlib.suppress(Failure):
                self.abort_uploads(key)
            raise

    def create(self, key: str, data: bytes, checksum: str) -> None:
        """Write an object. EtagMismatch: it already exists."""
        self._put(key, data, checksum, len(data), _SMALL_SECONDS, mode="create")

    def _put(self, key: str, data: Any, checksum: str, part_nbytes: int, seconds: float, **options: Any) -> None:
        import obstore

        if not _usable():
            raise RequestRefused(
                "obstore, which uploads, cannot be used in a forked process if the parent has used it; start the"
                " process with spawn"
            )
        store = self._obstore(
            timeout=f"{_SECONDS + _SECONDS_A_MIB * part_nbytes // _MIB}s",
            retry_config={"max_retries": 20, "retry_timeout": timedelta(seconds=seconds)},
            checksum_algorithm="SHA256",
        )
        options |= {"use_multipart": "chunk_size" in options, "max_concurrency": _PARTS_AT_ONCE}
        try:
            obstore.put(store, key, data, attributes={CHECKSUM: checksum}, **options)
        except (obstore.exceptions.BaseError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # of the disk with the source files
            raise _obstore_failure(error) from None

    def delete(self, key: str) -> None:
        """Remove an object if it exists."""
        _translated(lambda: self.client.delete_object(Bucket=self.bucket, Key=key))

    def abort_uploads(self, key: str) -> int:
        """Remove the stored parts of unfinished uploads to a key. Return the number of uploads."""
        pages = self.client.get_paginator("list_multipart_uploads").paginate(Prefix=key, Bucket=self.bucket)
        uploads = _translated(lambda: [upload for page in pages for upload in page.get("Uploads", ())])
        ids = [upload["UploadId"] for upload in uploads if upload["Key"] == key]
        for each in ids:
            abort = functools.partial(self.client.abort_multipart_upload, Key=key, UploadId=each, Bucket=self.bucket)
            with contextlib.suppress(NoSuchObject):  # it has ended in the meantime
                _translated(abort)
        return len(ids)

    def _obstore(self, *, timeout: str, **options: Any) -> Any:
        """Return the bucket as S3Store of obstore, with boto3's endpoint, region and credentials.

        Args:
            timeout: timeout of one request, such as ``20s``.
            **options: further options of S3Store.
        """
        from obstore.auth.boto3 import Boto3CredentialProvider
        from obstore.store import S3Store

        global _obstore_process  # noqa: PLW0603
        _obstore_process = os.getpid()
        meta = self.client.meta
        if self.session.get_credentials() is None:
            options["skip_signature"] = True
        else:
            options["credential_provider"] = Boto3CredentialProvider(self.session)
        return S3Store(
            self.bucket,
            endpoint=meta.endpoint_url,
            region=meta.region_name or "us-east-1",
            virtual_hosted_style_request=False,
            client_options={
                "allow_http": meta.endpoint_url.startswith("http://"),
                "connect_timeout": f"{_CONNECT_SECONDS}s",
                "timeout": timeout,
            },
            **options,
        )


def _usable() -> bool:
    """Return whether obstore can be used: not in a fork of a process that has used it."""
    return _obstore_process in (None, os.getpid())


# ---- failures ----


def _translated(request: Callable[[], _T]) -> _T:
    """Make a request with boto3, and convert its exceptions to failures. Exceptions of other code pass unchanged."""
    try:
        return request()
    except (Failure, ModuleNotFoundError):
        raise
    except Exception as error:
        if (failure := failure_of(error)) is None:
            raise
        raise failure from None


def failure_of(error: BaseException | None) -> Failure | None:
    """Return the failure for an exception of botocore, or one caused by it; None for any other exception."""
    from botocore import exceptions as of
    from urllib3.exceptions import HTTPError

    denied = of.NoCredentialsError, of.PartialCredentialsError, of.CredentialRetrievalError, of.ProfileNotFound
    temporary = of.HTTPClientError, of.ConnectionError, of.IncompleteReadError, HTTPError, OSError
    while error is not None:
        name = type(error).__name__
        if isinstance(error, of.ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            if code.isdigit():  # no code: the response to a HEAD has no body
                # the only possible cause of status 400 for a HEAD is its signature
                return AccessDenied("HTTP 400") if status == 400 else _failure_of_status(status, "")
            return _failure_of_status(status, code)
        if isinstance(error, (*denied, of.TokenRetrievalError)):
            return AccessDenied(name)
        if isinstance(error, temporary):
            return TemporaryFailure(name)
        if isinstance(error, of.BotoCoreError | ValueError):
            return RequestRefused(name)
        error = error.__cause__
    return None


def _failure_of_status(status: int, code: str) -> Failure:
    """Return the failure for a response of S3; ``code`` is the one in its body, "" if there is none."""
    kind = _BY_STATUS.get(status, TemporaryFailure if status >= 500 or code in _TEMPORARY else RequestRefused)
    return (AccessDenied if code in _EXPIRED_CODES else kind)(f"HTTP {status} {code}".rstrip())


def _obstore_failure(error: Exception) -> Failure:
    """Return the failure for an exception of obstore; some have the status only in their message."""
    from obstore import exceptions

    if isinstance(error, exceptions.PreconditionError | exceptions.AlreadyExistsError):
        return EtagMismatch("HTTP 412")
    if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
        return NoSuchObject("HTTP 404")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return AccessDenied(type(error).__name__)
    status, code = _STATUS.search(str(error)), _CODE.search(str(error))
    if not status:
        return TemporaryFailure(type(error).__name__)
    return _failure_of_status(int(status[1]), code[1] if code else "")
