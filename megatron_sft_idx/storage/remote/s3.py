"""S3 through boto3, whose usual chain finds endpoint, region and credentials; data through obstore where it is there.

Reading a range costs boto3 some 3 ms of processor time under the interpreter's lock, obstore a sixth of that and no
lock. What obstore needs to know it is told by boto3, so that both go by the same configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage.remote.threads import CONNECTIONS
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

__all__ = ["CONNECT_SECONDS", "READ_SECONDS", "S3", "connect", "failure_of", "failure_of_status", "translated"]

_T = TypeVar("_T")
CONNECT_SECONDS, READ_SECONDS = 5, 20

_BY_STATUS: dict[int, type[Failure]] = {
    401: Denied, 403: Denied, 404: Missing, 408: Temporary, 412: Changed, 416: Beyond, 429: Temporary
}  # fmt: skip
# Some stores say these with a status of 400.
_PASSING = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException"}
# Credentials that were good once.
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}


def connect(bucket: str) -> Transport:
    """The fastest transport that is installed and runs in this process.

    Raises:
        FormatError: boto3 is not installed.
    """
    try:
        boto3 = S3(bucket)
    except ModuleNotFoundError:
        raise FormatError(
            f"s3://{bucket}: reading from S3 needs boto3; pip install 'megatron-sft-idx[cloud]'"
        ) from None
    try:
        from megatron_sft_idx.storage.remote.s3_obstore import FastS3, usable

        return FastS3(boto3) if usable() else boto3
    except ModuleNotFoundError:
        return boto3


class S3:
    """One bucket, through boto3.

    Args:
        bucket: its name.
    """

    conditional = True

    def __init__(self, bucket: str) -> None:
        import boto3
        from botocore.config import Config

        self.bucket = bucket
        self.session = boto3.session.Session()
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            max_pool_connections=CONNECTIONS,
            retries={"total_max_attempts": 1},  # the store retries
        )
        self.client = translated(lambda: self.session.client("s3", config=config))

    def head(self, key: str) -> ObjectInfo:
        """What is at a key."""
        found = translated(lambda: self.client.head_object(Bucket=self.bucket, Key=key))
        return ObjectInfo(key, int(found["ContentLength"]), found["ETag"].strip('"'))

    def get(self, key: str, offset: int, nbytes: int, etag: str | None) -> bytes:
        """Bytes of an object."""
        wanted: dict[str, Any] = {"Range": f"bytes={offset}-{offset + nbytes - 1}"}
        if etag is not None:
            wanted["IfMatch"] = f'"{etag}"'

        def request() -> bytes:
            found = self.client.get_object(Bucket=self.bucket, Key=key, **wanted)
            body = found["Body"]
            # A server that knows no ranges sends the whole object: that is not read.
            if found["ContentLength"] > nbytes:
                body.close()
                raise Refused(f"{found['ContentLength']} bytes for a range of {nbytes}")
            raw: bytes = body.read()
            return raw

        return translated(request)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with a prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        for page in _translated_each(pages):
            for found in page.get("Contents", ()):
                yield ObjectInfo(found["Key"], int(found["Size"]), found["ETag"].strip('"'))


def translated(request: Callable[[], _T]) -> _T:
    """What a request gives; its exceptions as failures."""
    try:
        return request()
    except (Failure, ModuleNotFoundError):
        raise
    except Exception as error:
        if (failure := failure_of(error)) is None:
            raise
        raise failure from None


def _translated_each(pages: Any) -> Iterator[Any]:
    iterator = iter(pages)
    while (page := translated(lambda: next(iterator, None))) is not None:
        yield page


def failure_of(error: BaseException | None) -> Failure | None:
    """What an exception of botocore, or one that it caused, means; None for those that are of something else."""
    from botocore import exceptions
    from urllib3.exceptions import HTTPError

    while error is not None:
        name = type(error).__name__
        if isinstance(error, exceptions.ClientError):
            return _of_answer(error.response)
        if isinstance(
            error,
            exceptions.NoCredentialsError
            | exceptions.PartialCredentialsError
            | exceptions.CredentialRetrievalError
            | exceptions.ProfileNotFound
            | exceptions.TokenRetrievalError,
        ):
            return Denied(name)
        if isinstance(
            error,
            exceptions.HTTPClientError
            | exceptions.ConnectionError
            | exceptions.IncompleteReadError
            | HTTPError
            | OSError,
        ):
            return Temporary(name)
        if isinstance(error, exceptions.BotoCoreError | ValueError):
            return Refused(name)
        error = error.__cause__
    return None


def _of_answer(answer: Any) -> Failure:
    code = str(answer.get("Error", {}).get("Code", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code.isdigit():  # of a HEAD, whose answer has no body
        # There is nothing in it that could be wrong but who asks.
        return Denied("HTTP 400") if status == 400 else failure_of_status(status, "")
    return failure_of_status(status, code)


def failure_of_status(status: int, code: str) -> Failure:
    """What an answer of S3 means; ``code`` is the word in its body, empty where there is none."""
    kind = _BY_STATUS.get(status, Temporary if status >= 500 or code in _PASSING else Refused)
    if code in _EXPIRED:
        kind = Denied
    return kind(f"HTTP {status} {code}".rstrip())
