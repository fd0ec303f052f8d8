"""Files held to the checksums of the shard's header."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import xxhash

from megatron_sft_idx.errors import CorruptShardError
from megatron_sft_idx.layout.header import FileDigest

__all__ = ["checked", "corrupt"]


def checked(
    chunks: Iterable[bytes | memoryview], digest: FileDigest, path: str, on_progress: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    """The chunks as they come, and CorruptShardError (rule F3) after the last one unless they are what they must be.

    Args:
        chunks: the whole file ``path``.
        digest: its size and checksum.
        path: named in the error.
        on_progress: told the size of every chunk.
    """
    hashed, nbytes = xxhash.xxh3_128(), 0
    for chunk in chunks:
        hashed.update(chunk)
        nbytes += len(chunk)
        yield chunk
        on_progress(len(chunk))
    if nbytes != digest.nbytes or hashed.digest() != digest.checksum:
        raise corrupt(path, digest)


def corrupt(path: str, digest: FileDigest) -> CorruptShardError:
    """What is wrong with a file that is not what its digest says."""
    expected = f"{digest.nbytes:,} bytes with checksum {digest.checksum.hex()}"
    detail = f"its bytes are not the {expected} that the header says; it was changed or damaged: restore it"
    return CorruptShardError(path, 0, "F3", detail)
