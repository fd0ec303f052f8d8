"""Local files: open them, read them as arrays, write and hash them.

The size of a file is checked before it is mapped or read as an array (``open_array``, ``ReopenedArray``). A truncated
file is then an error when it is opened, and does not kill the process with a SIGBUS later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout.files import FileDigest

_BUFFER_NBYTES = 1 << 16
# Size of a chunk to hash, read or write. Larger writes sometimes take several times as long: ext4 asks for large
# folios.
_CHUNK_NBYTES = 1 << 18
# A file longer than a chunk reserves disk space in steps: on ext4, writing then takes 10% less time. Larger steps are
# not faster, and on an almost full disk they take the space of the other files.
_RESERVED_NBYTES = 1 << 20
_FALLOC_FL_KEEP_SIZE = 1
_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)

# ---- local and remote paths ----

# Schemes of paths in object stores. msc is NVIDIA's multi-storage-client.
SCHEME_STARTS = ("s3://", "msc://")
_ANY_START = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is one or several objects in an object store rather than a local file.

    Raises:
        FormatError: it is an object in an unsupported store. As a local path it would create a folder ``gs:``.
    """
    text = os.fspath(path)
    if text.startswith(SCHEME_STARTS):
        return True
    if _ANY_START.match(text):
        raise FormatError(
            f"{text}: unknown scheme; paths in object stores begin with {' or '.join(SCHEME_STARTS)}. Google Cloud"
            " Storage, Azure and others work through a profile of multi-storage-client: msc://PROFILE/path"
        )
    return False


_COPY = "use a local path, and transfer the shard from or to the bucket with megatron-sft-idx copy"


def require_local(path: str | os.PathLike[str], what: str, remedy: str = _COPY) -> None:
    """Raise FormatError for a path in an object store; ``what``, such as ``merge``, needs local files."""
    if is_remote(path):
        raise FormatError(f"{os.fspath(path)}: {what} needs files on a local disk; {remedy}")


# ---- ways of reading ----

Backend = Literal["mmap", "pread", "reopen"]
BackendName = Literal["mmap", "os", "pread", "reopen"]  # as users may write it: "os" is another name of "mmap"
Advice = Literal["normal", "sequential", "random"]


class ReadOptions(NamedTuple):
    """Options for reading the tokens and masks of shards.

    Attributes:
        backend: ``mmap`` returns views of memory maps: nothing is copied, and processes share the pages. ``pread``
            copies, for file systems on which mapping is slow or not allowed. ``reopen`` copies, too, and holds neither
            maps nor descriptors between reads. ``mmap`` is the default, and several times faster on warm pages.
        advice: the order of reads, as a hint to the kernel. ``random`` disables its read-ahead. This makes cold reads
            slower unless they are announced (``schedule``), so ``normal`` is the default.
        huge_pages: ask the kernel to map with huge pages. On a file system that supports them, a page fault reads 2
            MiB: cold packs in random order took twice as long, and warm ones were no faster. So it is off by default.
    """

    backend: Backend = "mmap"
    advice: Advice = "normal"
    huge_pages: bool = False

    @classmethod
    def of(cls, where: str, backend: BackendName | ReadOptions = "mmap", **options: Any) -> ReadOptions:
        """Return checked options, from a ``ReadOptions`` object, or from the name of a backend and the other fields.

        Raises:
            FormatError: a choice does not exist; the message begins with ``where`` and lists the choices.
        """
        read = backend if isinstance(backend, ReadOptions) else cls(cast(Backend, backend), **options)
        if cast(str, read.backend) == "os":
            read = read._replace(backend="mmap")
        if cast(str, read.backend) == "process":
            raise FormatError(
                f"{where}: backend 'process' was removed, because reading announced packs with pread is faster; choose"
                " pread"
            )
        for what, value, choices in (
            ("backend", read.backend, get_args(BackendName)),
            ("advice", read.advice, get_args(Advice)),
        ):
            if value not in choices:
                raise FormatError(f"{where}: {what} {value!r}, choose one of {', '.join(choices)}")
        return read


# ---- arrays in files ----


class Array(Protocol):
    """A one-dimensional array on disk or in a store, whose slices are numpy arrays."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the items."""
        ...

    def __getitem__(self, index: slice, /) -> NDArray[Any]: ...
    def __len__(self) -> int: ...


class CopiedArray:
    """An array whose slices are new, read-only copies. A subclass reads them in ``read_bytes`` or ``read_items``.

    ``path`` is the path of the file or object, for error messages.
    """

    def __init__(self, path: str, dtype: np.dtype[Any], count: int) -> None:
        self._path, self.dtype, self._count = path, dtype, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, step = index.indices(self._count)
        if step != 1:
            raise ValueError(f"the items of a file or an object can only be read with step 1, not {step}")
        return self.read_items(start, max(start, stop))

    def read_items(self, start: int, stop: int) -> NDArray[Any]:
        """Read items ``[start, stop)``, which the array must have. OSError (ENOMEM): not enough memory for them."""
        try:
            out = np.empty(stop - start, self.dtype)
        except MemoryError as error:  # a sparse file may be larger than the memory
            raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {error}", self._path) from None
        self.read_bytes(start * self.dtype.itemsize, out.view(np.uint8))
        out.flags.writeable = False
        return out

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` with the array's bytes from ``offset`` on. The caller must not ask for more than it has."""
        raise NotImplementedError


class PreadArray(CopiedArray):
    """An array read by ``pread``. Its first item begins at byte ``offset`` of the file.

    Threads and forked processes can share it, because ``pread`` uses no file position. ``fd`` is a descriptor of the
    file, which the array then owns; None to open the file at ``path``.
    """

    def __init__(self, path: str, dtype: np.dtype[Any], count: int, offset: int, fd: int | None = None) -> None:
        super().__init__(path, dtype, count)
        self._offset = offset
        self._fd = open_descriptor(path)[0] if fd is None else fd

    def advise(self, advice: int, offset: int = 0, nbytes: int = 0) -> None:
        """Call ``posix_fadvise`` for the array's bytes from ``offset`` on; ``nbytes`` 0 means up to the file's end."""
        os.posix_fadvise(self._fd, self._offset + offset, nbytes, advice)

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See ``CopiedArray``. CorruptShardError: the file was truncated after it was opened (rule F2)."""
        view, offset, num_read = out.data, self._offset + offset, 0
        while num_read < len(view):
            with name_in_errors(self._path):
                count = os.preadv(self._fd, [view[num_read:]], offset + num_read)
            if not count:
                detail = (
                    "the file ends here, but was longer when it was opened; it was cut short: restore it from a copy"
                )
                raise CorruptShardError(self._path, os.fstat(self._fd).st_size, "F2", detail)
            num_read += count

    def __del__(self) -> None:
        # If the constructor failed, there is no descriptor to close.
        if (fd := self.__dict__.pop("_fd", None)) is not None:
            os.close(fd)


class PartOfArray(CopiedArray):
    """Items inside an array of bytes, from byte ``begin`` on. Only the requested items are read.

    This lets several arrays in one file share its descriptor.
    """

    def __init__(self, path: str, whole: Array, dtype: np.dtype[Any], count: int, begin: int) -> None:
        super().__init__(path, dtype, count)
        self._whole, self._begin = whole, begin

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See ``CopiedArray``. Raises the same errors as a slice of the whole array."""
        begin = self._begin + offset
        out[:] = self._whole[begin : begin + len(out)]


def part_of(path: str, whole: Array, dtype: np.dtype[Any], count: int, begin: int) -> Array:
    """Return ``count`` items inside an array of bytes, from byte ``begin`` on; a view if it is mapped.

    ``path`` is the path of the file, for errors.
    """
    if isinstance(whole, np.ndarray):
        return whole[begin : begin + count * dtype.itemsize].view(dtype)
    return PartOfArray(path, whole, dtype, count, begin)


def as_bytes(data: bytes | memoryview | NDArray[Any]) -> memoryview:
    """Return the bytes of a one-dimensional, contiguous buffer.

    Unlike ``memoryview.cast``, this allows an empty array.
    """
    if isinstance(data, np.ndarray):
        return data.view(np.uint8).data
    return memoryview(data)


def check_size(path: str, found: int, expected: int) -> None:
    """Raise CorruptShardError (rule F2) unless a file has the size given by its shard's header."""
    if found != expected:
        detail = (
            f"file has {found} bytes, expected {expected}; it was cut short, was changed, or belongs to another shard"
        )
        raise CorruptShardError(path, min(found, expected), "F2", f"{detail}: restore it from a copy")


class name_in_errors:  # noqa: N801
    """A context manager that adds a path to OSErrors without a file name, such as those of calls on a descriptor."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename, error.strerror = os.fspath(self._path), os.strerror(error.errno)


def read_beginning(path: str | os.PathLike[str], max_nbytes: int) -> bytes:
    """Return up to ``max_nbytes`` first bytes of a file. See ``open_regular`` for errors."""
    with open_regular(path) as file:
        # Python allocates the requested size before it reads.
        return file.read(min(max_nbytes, os.fstat(file.fileno()).st_size))


class _NamedFile(io.FileIO):
    """A file whose errors all contain its path, including errors while reading."""

    def readinto(self, buffer: Any, /) -> int | None:
        with name_in_errors(self.name):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with name_in_errors(self.name):
            return super().readall()


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file given by the user for reading. See ``open_descriptor`` for errors."""
    return io.BufferedReader(_NamedFile(path, "rb", opener=lambda name, _: open_descriptor(name)[0]), _BUFFER_NBYTES)


def open_descriptor(path: str | os.PathLike[str]) -> tuple[int, os.stat_result]:
    """Open a file for reading. Return its descriptor, which the caller must close, and its status.

    Never blocks. Opening a FIFO would otherwise wait for its other end.

    Raises:
        FormatError: the path is a FIFO, a socket or a device.
        OSError: the path does not exist or is a folder, or the file is not readable.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status
    os.close(fd)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise FormatError(f"{os.fspath(path)}: expected a file, found something that is neither a file nor a folder")


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return values that change if another file takes a file's name, or if the file is modified."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def open_array(
    path: str, dtype: np.dtype[Any], count: int, *, nbytes: int, offset: int = 0, backend: Backend = "mmap"
) -> NDArray[Any] | PreadArray:
    """Open a file as a read-only array.

    With ``mmap`` the map lives as long as the array or any slice of it, also after the file was removed or replaced.

    Args:
        path: the file.
        dtype: dtype of the items.
        count: number of items.
        nbytes: the required size of the whole file.
        offset: byte where the items begin; a multiple of the item size.
        backend: ``mmap`` or ``pread``, as in ``ReadOptions``.

    Raises:
        CorruptShardError: the file has another size (rule F2).
        FormatError: the backend does not exist.
        OSError: the file cannot be opened or mapped.
    """
    if backend not in ("mmap", "pread"):
        raise FormatError(f"{path}: backend {backend!r}, choose mmap or pread")
    fd, status = open_descriptor(path)
    try:
        check_size(path, status.st_size, nbytes)
        if backend == "pread":
            return PreadArray(path, dtype, count, offset, os.dup(fd))
        if not count:
            return np.frombuffer(b"", dtype)
        with name_in_errors(path):
            return np.frombuffer(mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ), dtype, count, offset)
    finally:
        os.close(fd)


class OutputFile:
    """A file being written, without a buffer; ``nbytes`` is its size. Disk errors are OSErrors with its path.

    Args:
        path: the file. A link is rejected.
        durable: whether ``sync`` waits for the disk.
        append: continue at the end of an existing regular file. Otherwise the file is created, and must not exist.

    Raises:
        FileExistsError: without ``append``: the path exists, even if only as a link.
        FormatError: with ``append``: the path is not a regular file.
    """

    def __init__(self, path: str, *, durable: bool = True, append: bool = False) -> None:
        self.path = path
        self._durable = durable
        # O_NONBLOCK: opening a FIFO would wait for its other end.
        how = os.O_NONBLOCK if append else os.O_CREAT | os.O_EXCL
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | how, 0o666)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode) and path != os.devnull:
            self.close()
            raise FormatError(f"{path}: not a regular file; remove it, or choose another name")
        self.nbytes = os.lseek(self._fd, 0, os.SEEK_END)
        self._reserved, self._process = 0, os.getpid()

    def truncate(self, nbytes: int) -> None:
        """Remove everything after the first ``nbytes``, and continue writing there."""
        assert nbytes <= self.nbytes
        if nbytes == self.nbytes:
            return  # ext4 writes a file that was ever truncated to 0 to disk at once when it closes
        with name_in_errors(self.path):
            os.ftruncate(self._fd, nbytes)
        self._reserved = 0
        self.nbytes = os.lseek(self._fd, 0, os.SEEK_END)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return up to ``nbytes`` bytes from ``offset`` on, or fewer if the file ends before."""
        blocks = []
        with name_in_errors(self.path):
            while nbytes and (block := os.pread(self._fd, nbytes, offset)):
                blocks.append(block)
                offset, nbytes = offset + len(block), nbytes - len(block)
        return b"".join(blocks)

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        view = memoryview(data)
        while _fallocate and _CHUNK_NBYTES < self.nbytes + len(view) > self._reserved:
            start = max(self.nbytes, self._reserved)
            step = ctypes.c_int64(start), ctypes.c_int64(_RESERVED_NBYTES)
            self._reserved = start + _RESERVED_NBYTES
            # If the disk does not support this call or has less space (it may have reserved part), writing continues
            # without.
            if _fallocate(self._fd, _FALLOC_FL_KEEP_SIZE, *step):
                self._give_back()
                self._reserved = sys.maxsize
        with name_in_errors(self.path):
            while view:
                written = os.write(self._fd, view)
                self.nbytes += written
                view = view[written:]

    def write_at(self, data: bytes, offset: int) -> None:
        """Overwrite bytes that were written before, from ``offset`` on."""
        assert offset + len(data) <= self.nbytes
        num_written = 0
        with name_in_errors(self.path):
            while num_written < len(data):
                num_written += os.pwrite(self._fd, data[num_written:], offset + num_written)

    def sync(self) -> None:
        """Wait until all bytes are on disk, unless the file is not ``durable``."""
        self._give_back()
        if self._durable:
            with name_in_errors(self.path):
                os.fsync(self._fd)

    def _give_back(self) -> None:
        """Free unused reserved space. Not in a fork, because its parent may have continued writing."""
        if self._reserved > self.nbytes and self._process == os.getpid():
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.nbytes)
            self._reserved = 0

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def close(self) -> None:
        """Close the file. Can be called twice."""
        if self._fd >= 0:
            self._give_back()
            fd, self._fd = self._fd, -1
            os.close(fd)


def sync_folder(folder: str | Path, durable: bool = True) -> None:
    """Wait until renames and unlinks in ``folder`` are on disk. Does nothing if not ``durable``."""
    if not durable:
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with name_in_errors(folder):
            os.fsync(fd)
    finally:
        os.close(fd)


# ---- hashing ----


class StreamHash:
    """The xxh3_128 of a stream of bytes, the checksum in all headers; ``nbytes`` is the number of bytes so far."""

    def __init__(self) -> None:
        self.nbytes, self._hash = 0, xxhash.xxh3_128()

    def update(self, data: bytes | memoryview | NDArray[Any]) -> None:
        """Hash the next bytes: a buffer, or a one-dimensional, contiguous array."""
        raw = as_bytes(data) if isinstance(data, np.ndarray) else data
        self._hash.update(raw)
        self.nbytes += len(raw)

    def checksum(self) -> bytes:
        """Return the checksum in the form of headers, 16 bytes."""
        return self._hash.digest()

    def hex(self) -> str:
        """Return the checksum in hex, for people and JSON."""
        return self._hash.hexdigest()

    def digest(self) -> FileDigest:
        """Return number of bytes and checksum, as headers store them for a file."""
        return FileDigest(self.nbytes, self.checksum())


class HashedFile(StreamHash):
    """Hashes the bytes that it writes to ``file``.

    If that already has bytes, the caller must ``update`` with them first.
    """

    def __init__(self, file: OutputFile) -> None:
        super().__init__()
        self.file = file

    def write(self, data: bytes | memoryview | NDArray[Any]) -> None:
        """Append all of ``data``."""
        raw = as_bytes(data)
        for start in range(0, len(raw), _CHUNK_NBYTES):
            chunk = raw[start : start + _CHUNK_NBYTES]
            self.file.write(chunk)
            self.update(chunk)


def digest_file(path: str, offset: int = 0, *, advance: Callable[[int], None] = lambda nbytes: None) -> FileDigest:
    """Return size and checksum of a local file from byte ``offset`` on; ``advance`` gets the bytes of each read."""
    stream = StreamHash()
    with open_regular(path) as file:
        file.seek(offset)
        while chunk := file.read(_CHUNK_NBYTES):
            stream.update(chunk)
            advance(len(chunk))
    return stream.digest()


def has_digest(path: str, digest: FileDigest) -> bool:
    """Return whether a local file has this size and checksum. It is read only if its size is right."""
    return os.stat(path).st_size == digest.nbytes and digest_file(path) == digest


# ---- files opened for each read ----

# A file that has changed at this many checks in a row is being written continuously.
_MAX_LOOKS = 5


class ReopenedArray(CopiedArray):
    """An array in a file that is opened for each slice. Between slices, no descriptor and no map is held.

    At each read, the file must be the same as at the last check, by device, inode, size and times (``StampedFile``). If
    not, for example because the shard was copied over itself, ``confirm`` decides whether the array is unchanged. If
    so, the file is checked and read again.

    Args:
        path: the file.
        dtype: dtype of the items.
        count: number of items.
        nbytes: the required size of the file (rule F2).
        confirm: must raise an error if other content was published at the path. It is called after a check of the file,
            so that it confirms the checked file.
        offset: byte offset of the first item in the file.
    """

    def __init__(
        self, path: str, dtype: np.dtype[Any], count: int, nbytes: int, confirm: Callable[[], None], offset: int = 0
    ) -> None:
        super().__init__(path, dtype, count)
        self._file_nbytes, self._confirm, self.offset = nbytes, confirm, offset
        self.file = self._look()

    def _look(self) -> _native.StampedFile:
        file = _native.StampedFile(os.fsencode(self._path))
        check_size(self._path, file.nbytes, self._file_nbytes)
        return file

    def look_again(self, looks: int) -> None:
        """Check the file after a read that found it changed; ``looks`` is the number of failed checks for this read.

        Raises:
            FormatError, OSError: the file is no longer this array, or changes at every check.
        """
        if looks == _MAX_LOOKS:
            raise FormatError(
                f"{self._path}: the file changed during each of {looks} reads; wait until its writer has finished"
            )
        try:
            file = self._look()
        finally:
            self._confirm()
        self.file = file

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See ``CopiedArray``. FormatError, OSError: the file is no longer this array."""
        looks = 0
        while not self.file.read(self.offset + offset, out):
            self.look_again(looks)
            looks += 1


def read_extents(
    arrays: Sequence[Array], starts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]
) -> None:
    """Fill ``out`` with items ``[start, start + count)`` of each array, concatenated.

    Takes one native call if all arrays are ``ReopenedArray``.

    Raises:
        ValueError: an extent is outside its array, or the extents together do not fill ``out``.
        FormatError, OSError: an error of a slice of an array.
    """
    lengths = np.array([len(array) for array in arrays], np.int64)
    if (outside := (starts < 0) | (counts < 0) | (counts > lengths) | (starts > lengths - counts)).any():
        i = int(outside.argmax())
        raise ValueError(
            f"extent {i} begins at {starts[i]} and has {counts[i]} items, but its array has {lengths[i]} items; the"
            " index is damaged, or belongs to another shard"
        )
    if int(counts.sum()) != len(out):
        raise ValueError(f"the extents have {counts.sum()} items, but the output has {len(out)}")
    reopened = [array for array in arrays if isinstance(array, ReopenedArray)]
    size = out.dtype.itemsize
    if len(reopened) < len(arrays):
        end = 0
        for array, start, count in zip(arrays, starts.tolist(), counts.tolist(), strict=True):
            if isinstance(array, PreadArray | ReopenedArray):
                array.read_bytes(start * array.dtype.itemsize, out[end : end + count].view(np.uint8))
            else:
                out[end : end + count] = array[start : start + count]
            end += count
        return
    begins, nbytes = np.array([array.offset for array in reopened], np.int64) + starts * size, counts * size
    num_read = looks = 0
    while num_read < len(reopened):
        files = tuple([array.file for array in reopened[num_read:]])
        room = out[int(counts[:num_read].sum()) :] if num_read else out
        # It stops before the first file that has changed.
        more = _native.read_ranges(files, begins[num_read:], nbytes[num_read:], room)
        num_read, looks = num_read + more, 0 if more else looks
        if num_read < len(reopened):
            reopened[num_read].look_again(looks)
            looks += 1
