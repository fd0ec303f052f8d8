"""Paths of objects: ``s3://bucket/key`` and ``msc://profile/key``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from megatron_sft_idx.errors import FormatError

__all__ = ["SCHEMES", "RemotePath", "is_remote", "require_local"]

# msc is NVIDIA's multi-storage-client, whose profiles reach S3, GCS, Azure, OCI and plain folders.
SCHEMES = ("s3", "msc")
_STARTS = tuple(scheme + "://" for scheme in SCHEMES)
_ANY_START = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path names something in an object store rather than a file.

    Raises:
        FormatError: it names something in a store of another kind, where a folder called ``gs:`` would surprise.
    """
    text = os.fspath(path)
    if text.startswith(_STARTS):
        return True
    if _ANY_START.match(text):
        raise FormatError(
            f"{text}: object stores are reached by {' or '.join(_STARTS)}; Google's, Microsoft's and others by a"
            " profile of multi-storage-client: msc://PROFILE/path"
        )
    return False


_WORK_THERE = "work there, and let megatron-sft-idx copy bring the shard from the bucket or to it"


def require_local(path: str | os.PathLike[str], what: str, remedy: str = _WORK_THERE) -> None:
    """FormatError for a path in an object store, where ``what`` needs files on a disk."""
    if is_remote(path):
        raise FormatError(f"{os.fspath(path)}: {what} needs files on a local disk; {remedy}")


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A path in an object store, taken apart.

    Attributes:
        scheme: ``s3`` or ``msc``.
        bucket: of S3, or the profile of multi-storage-client.
        key: of the object, without a slash before it; empty for the bucket itself.
    """

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
        if not found or scheme not in SCHEMES:
            raise FormatError(f"{text}: not a path in an object store; it begins with {' or '.join(_STARTS)}")
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
