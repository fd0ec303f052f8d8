"""S3 through boto3, whose usual chain finds endpoint, region and credentials; data through obstore where it is there.

Reading a range costs boto3 some 3 ms of processor time under the interpreter's lock, obstore a sixth of that and no
lock. What obstore needs to know it is told by boto3, so that both go by the same configuration.
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
from megatron_sft_idx.storage.remote.store import (
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
# Amazon takes 10,000 parts an object; other stores, where nobody has told them to, 1,000.
_MAX_PARTS = 1000
_PARTS_AT_ONCE = 6
# How long one part may take: a minute, and what it takes at a quarter of a MiB a second.
_SECONDS, _SECONDS_A_MIB = 60, 4
_SMALL_SECONDS = 5.0
# The process that obstore's threads run in. A fork has none of them, and would wait for them for ever.
_runs_in: int | None = None

# For the largest ranges that are read, at a quarter of a MiB a second.
_TRANSFER_SECONDS = 32
_STATUS = re.compile(r"\b(?:status|response error)\D{0,20}([45]\d\d)\b", re.IGNORECASE)
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")

_BY_STATUS: dict[int, type[Failure]] = {
    401: AccessDenied, 403: AccessDenied, 404: NoSuchObject, 408: TemporaryFailure, 412: EtagMismatch,
    416: RangePastEnd, 429: TemporaryFailure,
}  # fmt: skip
# Some stores say these with a status of 400.
_PASSING = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException"}
# Credentials that were good once.
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}


class S3:
    """One bucket.

    Args:
        bucket: its name.
        fast: read ranges through obstore; None where it is installed, and runs in this process.

    Raises:
        FormatError: boto3 is not installed.
    """

    conditional = True

    def __init__(self, bucket: str, *, fast: bool | None = None) -> None:
        try:
            import boto3
            from botocore.config import Config
        except ModuleNotFoundError:
            raise FormatError(
                f"s3://{bucket}: reading from S3 needs boto3; pip install 'megatron-sft-idx[cloud]'"
            ) from None
        self.bucket = bucket
        self.session = boto3.session.Session()
        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            max_pool_connections=CONNECTIONS,
            retries={"total_max_attempts": 1},  # the store retries
        )
        self.client = _translated(lambda: self.session.client("s3", config=config))
        self.fast = _usable() and find_spec("obstore") is not None if fast is None else fast
        if self.fast:
            # The retries are the store's own. The timeout is of the whole answer: 8 MiB over a slow line take a while.
            seconds = _READ_SECONDS + _TRANSFER_SECONDS
            self._ranges = self._obstore(timeout=f"{seconds}s", retry_config={"max_retries": 0})

    def head(self, key: str) -> ObjectInfo:
        """What is at a key."""
        found = _translated(lambda: self.client.head_object(Bucket=self.bucket, Key=key))
        checksum = found.get("Metadata", {}).get(CHECKSUM)
        return ObjectInfo(key, int(found["ContentLength"]), found["ETag"].strip('"'), checksum)

    def get(self, key: str, offset: int, nbytes: int, etag: str | None) -> bytes | memoryview:
        """Bytes of an object."""
        if self.fast:
            import obstore

            options: dict[str, Any] = {"range": (offset, offset + nbytes)}
            options |= {"if_match": f'"{etag}"'} if etag is not None else {}
            try:
                found = obstore.get(self._ranges, key, options=options)
                begin, end = found.range
                if (begin, end) != (offset, offset + nbytes):
                    raise TemporaryFailure(f"bytes {begin} to {end} for {offset} to {offset + nbytes}")
                return memoryview(found.bytes())
            except (obstore.exceptions.BaseError, OSError) as error:
                raise _obstore_failure(error) from None
        wanted = {"Range": f"bytes={offset}-{offset + nbytes - 1}"}
        wanted |= {"IfMatch": f'"{etag}"'} if etag is not None else {}

        def request() -> bytes:
            found = self.client.get_object(Bucket=self.bucket, Key=key, **wanted)
            body = found["Body"]
            # A server that knows no ranges sends the whole object: that is not read.
            if found["ContentLength"] > nbytes:
                body.close()
                raise RequestRefused(f"{found['ContentLength']} bytes for a range of {nbytes}")
            raw: bytes = body.read()
            return raw

        return _translated(request)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with a prefix."""
        pages = iter(self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix))
        while (page := _translated(lambda: next(pages, None))) is not None:
            for found in page.get("Contents", ()):
                yield ObjectInfo(found["Key"], int(found["Size"]), found["ETag"].strip('"'))

    def put(self, key: str, chunks: Chunks, nbytes: int, checksum: str, seconds: float) -> None:
        """Write an object; in parts where it is large."""
        part_nbytes = max(_PART_NBYTES, -(-nbytes // _MAX_PARTS // _MIB) * _MIB)
        if nbytes <= part_nbytes:
            self._put(key, b"".join(chunks), checksum, part_nbytes, seconds, mode="overwrite")
            return
        try:
            self._put(key, iter(chunks), checksum, part_nbytes, seconds, chunk_size=part_nbytes)
        except BaseException:
            # obstore gives parts up, but may have met the same trouble doing so; then the next upload clears them.
            with contextlib.suppress(Failure):
                self.abort_uploads(key)
            raise

    def create(self, key: str, data: bytes, checksum: str) -> None:
        """Write an object where there is none."""
        self._put(key, data, checksum, len(data), _SMALL_SECONDS, mode="create")

    def _put(self, key: str, data: Any, checksum: str, part_nbytes: int, seconds: float, **options: Any) -> None:
        import obstore

        if not _usable():
            raise RequestRefused("obstore, which sends, cannot be used in a fork of a process that has used it")
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
                raise  # of the disk that they are read from
            raise _obstore_failure(error) from None

    def delete(self, key: str) -> None:
        """Remove an object; nothing where there is none."""
        _translated(lambda: self.client.delete_object(Bucket=self.bucket, Key=key))

    def abort_uploads(self, key: str) -> int:
        """Remove the parts of uploads to a key that never ended."""
        pages = self.client.get_paginator("list_multipart_uploads").paginate(Prefix=key, Bucket=self.bucket)
        found = _translated(lambda: [upload for page in pages for upload in page.get("Uploads", ())])
        left = [upload["UploadId"] for upload in found if upload["Key"] == key]
        for upload in left:
            abort = functools.partial(self.client.abort_multipart_upload, Key=key, UploadId=upload, Bucket=self.bucket)
            with contextlib.suppress(NoSuchObject):  # ended meanwhile
                _translated(abort)
        return len(left)

    def _obstore(self, *, timeout: str, **options: Any) -> Any:
        """The S3Store of obstore for the bucket, which goes where boto3 does, as the same user.

        Args:
            timeout: of one request, such as ``20s``.
            **options: others that S3Store takes.
        """
        from obstore.auth.boto3 import Boto3CredentialProvider
        from obstore.store import S3Store

        global _runs_in  # noqa: PLW0603
        _runs_in = os.getpid()
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
    """Whether obstore runs here: not in a fork of a process that has used it."""
    return _runs_in in (None, os.getpid())


# ---- what their errors mean ----


def _translated(request: Callable[[], _T]) -> _T:
    """What a request gives; its exceptions as failures."""
    try:
        return request()
    except (Failure, ModuleNotFoundError):
        raise
    except Exception as error:
        if (failure := failure_of(error)) is None:
            raise
        raise failure from None


def failure_of(error: BaseException | None) -> Failure | None:
    """What an exception of botocore, or one that it caused, means; None for those that are of something else."""
    from botocore import exceptions as of
    from urllib3.exceptions import HTTPError

    denied = of.NoCredentialsError, of.PartialCredentialsError, of.CredentialRetrievalError, of.ProfileNotFound
    passing = of.HTTPClientError, of.ConnectionError, of.IncompleteReadError, HTTPError, OSError
    while error is not None:
        name = type(error).__name__
        if isinstance(error, of.ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            if code.isdigit():  # of a HEAD, whose answer has no body
                # There is nothing in it that could be wrong but who asks.
                return AccessDenied("HTTP 400") if status == 400 else _failure_of_status(status, "")
            return _failure_of_status(status, code)
        if isinstance(error, (*denied, of.TokenRetrievalError)):
            return AccessDenied(name)
        if isinstance(error, passing):
            return TemporaryFailure(name)
        if isinstance(error, of.BotoCoreError | ValueError):
            return RequestRefused(name)
        error = error.__cause__
    return None


def _failure_of_status(status: int, code: str) -> Failure:
    """What an answer of S3 means; ``code`` is the word in its body, empty where there is none."""
    kind = _BY_STATUS.get(status, TemporaryFailure if status >= 500 or code in _PASSING else RequestRefused)
    return (AccessDenied if code in _EXPIRED else kind)(f"HTTP {status} {code}".rstrip())


def _obstore_failure(error: Exception) -> Failure:
    """What obstore's exceptions mean, some by the status in the message, which is all that it tells of them."""
    from obstore import exceptions

    if isinstance(error, exceptions.PreconditionError | exceptions.AlreadyExistsError):
        return EtagMismatch("HTTP 412")
    if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
        return NoSuchObject("HTTP 404")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return AccessDenied(type(error).__name__)
    found, code = _STATUS.search(str(error)), _CODE.search(str(error))
    if not found:
        return TemporaryFailure(type(error).__name__)
    return _failure_of_status(int(found[1]), code[1] if code else "")
