"""Files of any compression opened as streams, here or in an object store, and read in blocks that know their end."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, BinaryIO, Literal, cast

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.storage import is_remote, open_regular
from megatron_sft_idx.storage.remote import ObjectInfo, open_store
from megatron_sft_idx.storage.remote.files import ObjectFile, read_ahead

__all__ = [
    "UTF8_BOM",
    "Compression",
    "compression_of",
    "find_object",
    "open_object",
    "open_stream",
    "read_blocks",
    "stream_blocks",
]


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


Compression = Literal["", "gzip", "zstd"]

_BLOCK_NBYTES = 1 << 20
# Compressed bytes fed at once; what one feed expands to is held in memory, so it is kept small.
_ZSTD_FEED_NBYTES = 1 << 15
UTF8_BOM = b"\xef\xbb\xbf"


def compression_of(head: bytes) -> Compression:
    """How a file that starts with these bytes is compressed; names lie, magic numbers do not."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    # A zstd file may start with a skippable frame, as pzstd writes them.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
        return "zstd"
    return ""


def read_blocks(
    path: str, compression: Compression, etag: str | None = None, *, peek: bool = False
) -> Iterator[tuple[bytes, int]]:
    """Yields non-empty blocks and the bytes read so far of the file as it is on disk.

    A UTF-8 byte order mark at the start is taken off. Gzip members and zstd frames one after another are read
    as one stream.

    Args:
        path: the file, local or remote.
        compression: how it is compressed.
        etag: for a remote one, which object it must be.
        peek: only the beginning is wanted, so that no more of a remote one is fetched.

    Raises:
        FormatError: the file cannot be read, or its compressed data is broken or ends early.
    """
    yield from _without_mark(_raw_blocks(path, compression, etag, peek))


def stream_blocks(stream: BufferedReader, name: str) -> Iterator[tuple[bytes, int]]:
    """As ``read_blocks``, of what comes in a pipe, as it comes.

    Raises:
        FormatError: it is compressed, or cannot be read.
    """
    yield from _without_mark(_arriving(stream, name))


def _arriving(stream: BufferedReader, name: str) -> Iterator[tuple[bytes, int]]:
    position = 0
    try:
        while block := stream.read1(_BLOCK_NBYTES):
            if not position and (compression := compression_of(block)):
                raise FormatError(f"{name}: {compression} data; unpack it on the way: {compression} -dc FILE | ...")
            position += len(block)
            yield block, position
    except OSError as error:
        raise FormatError(f"{name}: cannot be read: {error.strerror or error}") from None


def _without_mark(blocks: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    head, position = b"", 0
    for block, at in blocks:
        position = at
        head += block
        if len(head) >= len(UTF8_BOM):
            break
    if head := head.removeprefix(UTF8_BOM):
        yield head, position
    yield from blocks


def _raw_blocks(path: str, compression: Compression, etag: str | None, peek: bool) -> Iterator[tuple[bytes, int]]:
    try:
        with open_stream(path, etag, peek=peek) as file:
            if compression == "zstd":
                yield from _zstd_blocks(path, file)
                return
            source = gzip.GzipFile(fileobj=file) if compression == "gzip" else file
            while block := source.read(_BLOCK_NBYTES):
                yield block, file.tell()
    except SFTIndexError:
        raise  # of an object store, whose errors are OSErrors too
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"{path}: broken gzip data: {error}; make or download the file again") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None


def _zstd_blocks(path: str, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    try:
        import zstandard
    except ImportError:
        raise SFTIndexError(f"{path}: reading .zst needs zstandard: pip install 'megatron-sft-idx[zstd]'") from None
    # stream_reader() takes a file that ends inside a frame for a complete one; a decompressobj says.
    frame = None
    try:
        while data := file.read(_ZSTD_FEED_NBYTES):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                if block := frame.decompress(data):
                    yield block, file.tell()
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise FormatError(f"{path}: broken zstd data: {error}; make or download the file again") from None
    if frame is not None:
        raise FormatError(f"{path}: broken zstd data: ends inside a frame; make or download the file again")
