"""xxh3_128 of what is written, read or passed on: the checksum that every header of the package stores."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.layout.files import FileDigest
from megatron_sft_idx.storage.local import OutputFile, as_bytes, open_regular
from megatron_sft_idx.storage.progress import Advance

__all__ = ["HashedFile", "StreamHash", "digest_file", "has_digest"]

_PIECE_NBYTES = 1 << 18


class StreamHash:
    """The hash of bytes that come one after the other, and how many they are.

    Attributes:
        nbytes: bytes so far.
    """

    def __init__(self) -> None:
        self.nbytes, self._hash = 0, xxhash.xxh3_128()

    def update(self, data: bytes | memoryview | NDArray[Any]) -> None:
        """The next bytes: of a buffer, or of an array that is one-dimensional and contiguous."""
        raw = as_bytes(data) if isinstance(data, np.ndarray) else data
        self._hash.update(raw)
        self.nbytes += len(raw)

    def checksum(self) -> bytes:
        """16 bytes, as headers store them."""
        return self._hash.digest()

    def hex(self) -> str:
        """The checksum for people and JSON."""
        return self._hash.hexdigest()

    def digest(self) -> FileDigest:
        """Size and checksum, of a file that is all that went by."""
        return FileDigest(self.nbytes, self.checksum())


class HashedFile(StreamHash):
    """Writes to a file and hashes what it writes; ``update`` takes in what the file held before.

    Attributes:
        file: the file.
    """

    def __init__(self, file: OutputFile) -> None:
        super().__init__()
        self.file = file

    def write(self, data: bytes | memoryview | NDArray[Any]) -> None:
        """Append all of ``data``."""
        raw = as_bytes(data)
        self.file.write(raw)
        self.update(raw)


def digest_file(path: str, offset: int = 0, *, advance: Advance = lambda nbytes: None) -> FileDigest:
    """Size and checksum of a local file from a byte offset on.

    Args:
        path: the file.
        offset: in bytes.
        advance: told how many bytes were read since it was last called.
    """
    stream = StreamHash()
    with open_regular(path) as file:
        file.seek(offset)
        while piece := file.read(_PIECE_NBYTES):
            stream.update(piece)
            advance(len(piece))
    return stream.digest()


def has_digest(path: str, digest: FileDigest) -> bool:
    """Whether a local file is what a digest says; it is read only where the size fits."""
    return os.stat(path).st_size == digest.nbytes and digest_file(path) == digest
