"""Writing to S3: obstore sends, in threads of its own; boto3 looks, removes and finds parts that were left."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.storage.remote.s3 import S3, translated
from megatron_sft_idx.storage.remote.s3_obstore import failure_of, make_store, usable
from megatron_sft_idx.storage.remote.transport import Failure, Missing, Refused
from megatron_sft_idx.storage.remote.writing import CHECKSUM, Stored

__all__ = ["S3Writer"]

_MIB = 1 << 20
PART_NBYTES = 8 * _MIB
# Amazon takes 10,000 parts an object; other stores, where nobody has told them to, 1,000.
_MAX_PARTS = 1000
_PARTS_AT_ONCE = 6
# How long one part may take: a minute, and what it takes at a quarter of a MiB a second.
_SECONDS, _SECONDS_A_MIB = 60, 4
_SMALL_SECONDS = 5.0


class S3Writer:
    """One bucket.

    Args:
        bucket: its name.

    Raises:
        ModuleNotFoundError: boto3 or obstore is not installed.
    """

    def __init__(self, bucket: str) -> None:
        import obstore

        self._obstore = obstore
        self._boto3 = S3(bucket)
        self._client = self._boto3.client

    def put(self, key: str, chunks: Iterable[bytes | memoryview], nbytes: int, checksum: str, seconds: float) -> None:
        """Write an object; in parts where it is large."""
        part_nbytes = max(PART_NBYTES, -(-nbytes // _MAX_PARTS // _MIB) * _MIB)
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
        if not usable():
            raise Refused("obstore, which sends, cannot be used in a fork of a process that has used it")
        store = make_store(
            self._boto3,
            timeout=f"{_SECONDS + _SECONDS_A_MIB * part_nbytes // _MIB}s",
            retry_config={"max_retries": 20, "retry_timeout": timedelta(seconds=seconds)},
            checksum_algorithm="SHA256",
        )
        try:
            self._obstore.put(
                store,
                key,
                data,
                attributes={CHECKSUM: checksum},
                use_multipart="chunk_size" in options,
                max_concurrency=_PARTS_AT_ONCE,
                **options,
            )
        except SFTIndexError:
            raise  # of what the data are read from
        except (self._obstore.exceptions.BaseError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # of the disk that they are read from
            raise failure_of(error) from None

    def delete(self, key: str) -> None:
        """Remove an object; nothing where there is none."""
        translated(lambda: self._client.delete_object(Bucket=self._boto3.bucket, Key=key))

    def stored(self, key: str) -> Stored:
        """What is there."""
        found = translated(lambda: self._client.head_object(Bucket=self._boto3.bucket, Key=key))
        return Stored(int(found["ContentLength"]), found.get("Metadata", {}).get(CHECKSUM))

    def abort_uploads(self, key: str) -> int:
        """Remove the parts of uploads to a key that never ended."""
        where = {"Bucket": self._boto3.bucket}
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Prefix=key, **where)
        found = translated(lambda: [upload for page in pages for upload in page.get("Uploads", ())])
        left = [upload["UploadId"] for upload in found if upload["Key"] == key]
        for upload in left:
            abort = functools.partial(self._client.abort_multipart_upload, Key=key, UploadId=upload, **where)
            with contextlib.suppress(Missing):  # ended meanwhile
                translated(abort)
        return len(left)
