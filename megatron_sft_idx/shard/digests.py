"""Files as the header knows them: by size and checksum."""

from __future__ import annotations

import os
from collections.abc import Callable

import xxhash

from megatron_sft_idx.layout import FileDigest

__all__ = ["digest_file", "has_digest"]

_PIECE_NBYTES = 1 << 18


def _ignore(_nbytes: int) -> None: ...


def digest_file(path: str, offset: int = 0, *, advance: Callable[[int], None] = _ignore) -> FileDigest:
    """Size and checksum of a file from a byte offset on.

    Args:
        path: the file, which is local.
        offset: in bytes.
        advance: told how many bytes were read since it was last called.
    """
    checksum, nbytes = xxhash.xxh3_128(), 0
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while piece := file.read(_PIECE_NBYTES):
            checksum.update(piece)
            nbytes += len(piece)
            advance(len(piece))
    return FileDigest(nbytes, checksum.digest())


def has_digest(path: str, digest: FileDigest) -> bool:
    """Whether a local file is what a digest says; it is read only where the size fits."""
    return os.stat(path).st_size == digest.nbytes and digest_file(path) == digest
