"""Input files opened, wherever they lie: local ones as they are, objects by ranges and with requests ahead.

An object is known by its etag from when it is first looked at: one that was replaced meanwhile is an error, where its
rows would be of two files.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import is_remote, open_regular
from megatron_sft_idx.storage.remote import ObjectInfo, open_store
from megatron_sft_idx.storage.remote.files import ObjectFile, read_ahead

__all__ = ["find_object", "open_object", "open_stream"]

# For a look at the beginning.
_PEEK_NBYTES = 1 << 17


def find_object(path: str, etag: str | None = None) -> ObjectInfo:
    """The object at a path.

    Raises:
        FormatError: there is none, or it is not the one that ``etag`` names.
        StorageError: the store cannot be read.
    """
    store, key = open_store(path)
    info = store.head(key) if key else None
    if info is None:
        raise FormatError(f"{path}: no such object")
    if etag is not None and info.etag != etag:
        raise FormatError(f"{path}: was replaced since the run began (etag {etag}, now {info.etag}); start again")
    return info


@contextmanager
def open_stream(path: str, etag: str | None = None, *, peek: bool = False) -> Iterator[BinaryIO]:
    """A file to be read once, from front to back; ``tell`` is where reading has come to.

    Args:
        path: local or remote.
        etag: which object it must be; None for whichever is there.
        peek: only the beginning is wanted.
    """
    if not is_remote(path):
        with open_regular(path) as file:
            yield file
        return
    store, _ = open_store(path)
    sizes = {"range_nbytes": _PEEK_NBYTES, "ahead": 1} if peek else {}
    blocks = read_ahead(store, find_object(path, etag), **sizes)
    try:
        yield cast(BinaryIO, _BlockFile(blocks))
    finally:
        blocks.close()


def open_object(path: str, etag: str | None = None) -> ObjectFile:
    """An object to be read anywhere, each read a request; arguments as of ``open_stream``."""
    return ObjectFile(open_store(path)[0], find_object(path, etag))


class _BlockFile(io.RawIOBase):
    """Blocks of bytes as a file that is read once."""

    def __init__(self, blocks: Iterator[bytes | memoryview]) -> None:
        self._blocks, self._rest, self._position = blocks, memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._blocks, b""))
        view = memoryview(buffer).cast("B")
        taken = min(len(view), len(self._rest))
        view[:taken], self._rest = self._rest[:taken], self._rest[taken:]
        self._position += taken
        return taken
