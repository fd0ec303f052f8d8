"""Files held to the checksums of the shard's header."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megatron_sft_idx.errors import CorruptShardError
from megatron_sft_idx.layout.header import FileDigest
from megatron_sft_idx.storage.hashing import StreamHash

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
    stream = StreamHash()
    for chunk in chunks:
        stream.update(chunk)
        yield chunk
        on_progress(len(chunk))
    if stream.digest() != digest:
        raise corrupt(path, digest)


def corrupt(path: str, digest: FileDigest) -> CorruptShardError:
    """What is wrong with a file that is not what its digest says."""
    expected = f"{digest.nbytes:,} bytes with checksum {digest.checksum.hex()}"
    detail = f"its bytes are not the {expected} that the header says; it was changed or damaged: restore it"
    return CorruptShardError(path, 0, "F3", detail)
