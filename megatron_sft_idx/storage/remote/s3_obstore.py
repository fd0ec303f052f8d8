"""S3 data through obstore, which reads in threads of its own, outside the interpreter."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from megatron_sft_idx.storage.remote.s3 import CONNECT_SECONDS, READ_SECONDS, S3, failure_of_status
from megatron_sft_idx.storage.remote.transport import (
    Changed,
    Denied,
    Failure,
    Missing,
    ObjectInfo,
    Temporary,
)

__all__ = ["FastS3", "failure_of", "make_store", "usable"]

# The process that obstore's threads run in. A fork has none of them, and would wait for them for ever.
_runs_in: int | None = None

# For the largest ranges that are read, at a quarter of a MiB a second.
_TRANSFER_SECONDS = 32

_STATUS = re.compile(r"\b(?:status|response error)\D{0,20}([45]\d\d)\b", re.IGNORECASE)
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")


def usable() -> bool:
    """Whether obstore runs here: not in a fork of a process that has used it."""
    return _runs_in in (None, os.getpid())


def make_store(boto3: S3, *, timeout: str, retry_config: dict[str, Any], **options: Any) -> Any:
    """The S3Store of obstore for a bucket, which goes where boto3 does, as the same user.

    Args:
        boto3: the bucket through boto3, which knows endpoint, region and credentials.
        timeout: of one request, such as ``20s``.
        retry_config: how obstore retries by itself.
        **options: others that S3Store takes.
    """
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import S3Store

    global _runs_in  # noqa: PLW0603
    _runs_in = os.getpid()
    meta = boto3.client.meta
    endpoint = meta.endpoint_url
    if boto3.session.get_credentials() is None:
        options["skip_signature"] = True
    else:
        options["credential_provider"] = Boto3CredentialProvider(boto3.session)
    return S3Store(
        boto3.bucket,
        endpoint=endpoint,
        region=meta.region_name or "us-east-1",
        virtual_hosted_style_request=False,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": f"{CONNECT_SECONDS}s",
            "timeout": timeout,
        },
        retry_config=retry_config,
        **options,
    )


class FastS3:
    """One bucket: ranges through obstore, all else through boto3.

    Args:
        boto3: the bucket through boto3, which knows endpoint, region and credentials.
    """

    conditional = True

    def __init__(self, boto3: S3) -> None:
        import obstore

        self._boto3, self._obstore = boto3, obstore
        # The retries are the store's own. The timeout is of the whole answer: 8 MiB over a slow line take a while.
        self._store = make_store(boto3, timeout=f"{READ_SECONDS + _TRANSFER_SECONDS}s", retry_config={"max_retries": 0})

    def head(self, key: str) -> ObjectInfo:
        """What is at a key."""
        return self._boto3.head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with a prefix."""
        return self._boto3.list(prefix)

    def get(self, key: str, offset: int, nbytes: int, etag: str | None) -> memoryview:
        """Bytes of an object."""
        options: dict[str, Any] = {"range": (offset, offset + nbytes)}
        if etag is not None:
            options["if_match"] = f'"{etag}"'
        try:
            found = self._obstore.get(self._store, key, options=options)
            begin, end = found.range
            if (begin, end) != (offset, offset + nbytes):
                raise Temporary(f"bytes {begin} to {end} for {offset} to {offset + nbytes}")
            return memoryview(found.bytes())
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise failure_of(error) from None


def failure_of(error: Exception) -> Failure:
    """What obstore's exceptions mean, some by the status in the message, which is all that it tells of them."""
    from obstore import exceptions

    if isinstance(error, exceptions.PreconditionError | exceptions.AlreadyExistsError):
        return Changed("HTTP 412")
    if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
        return Missing("HTTP 404")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return Denied(type(error).__name__)
    found, code = _STATUS.search(str(error)), _CODE.search(str(error))
    if not found:
        return Temporary(type(error).__name__)
    return failure_of_status(int(found[1]), code[1] if code else "")
