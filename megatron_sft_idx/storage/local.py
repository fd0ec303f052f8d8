"""Local files: how they are opened, read as arrays, written and hashed.

No file is mapped or read as an array before its size was checked (``open_array``, ``ReopenedArray``): a file that was
cut short is then an error when it is opened, and does not kill the process with a SIGBUS later.
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
# Hashed and read or written at once. Larger writes take several times as long now and then: ext4 asks for large folios.
_CHUNK_NBYTES = 1 << 18
# A file longer than a chunk reserves its room on disk in steps: ext4 then takes a tenth less time to write it. Larger
# steps are no faster, and on a disk that is almost full take the room of the other files.
_RESERVED_NBYTES = 1 << 20
_FALLOC_FL_KEEP_SIZE = 1
_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)

# ---- what is local ----

# What paths in object stores begin with. msc is NVIDIA's multi-storage-client.
SCHEME_STARTS = ("s3://", "msc://")
_ANY_START = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path names an object, or several, in an object store rather than a local file.

    Raises:
        FormatError: it names an object in a store of another kind. As a local path it would make a folder ``gs:``.
    """
    text = os.fspath(path)
    if text.startswith(SCHEME_STARTS):
        return True
    if _ANY_START.match(text):
        raise FormatError(
            f"{text}: object stores are reached by {' or '.join(SCHEME_STARTS)}; Google's, Microsoft's and others by a"
            " profile of multi-storage-client: msc://PROFILE/path"
        )
    return False


_COPY = "work there, and let megatron-sft-idx copy bring the shard from the bucket or to it"


def require_local(path: str | os.PathLike[str], what: str, remedy: str = _COPY) -> None:
    """FormatError for a path in an object store; ``what``, such as ``merge``, names what needs local files."""
    if is_remote(path):
        raise FormatError(f"{os.fspath(path)}: {what} needs files on a local disk; {remedy}")


# ---- how bytes are read ----

Backend = Literal["mmap", "pread", "reopen"]
BackendName = Literal["mmap", "os", "pread", "reopen"]  # as users may say it: "os" is another name of "mmap"
Advice = Literal["normal", "sequential", "random"]


class ReadOptions(NamedTuple):
    """How the tokens and masks of shards are read.

    Attributes:
        backend: ``mmap`` gives views of memory maps: nothing is copied, and processes share the pages. ``pread``
            copies, for file systems where mapping is slow or refused. ``reopen`` copies too, and holds neither maps nor
            descriptors between reads. ``mmap`` is several times faster on warm pages, and the default.
        advice: the order of reads, as a hint to the kernel. ``random`` switches its read-ahead off, which makes cold
            reads slower unless they are announced (``schedule``), so ``normal`` is the default.
        huge_pages: ask the kernel to map by huge pages. On a file system that has them, a fault reads 2 MiB: cold packs
            in random order took twice as long, warm ones no less time. So it is off by default.
    """

    backend: Backend = "mmap"
    advice: Advice = "normal"
    huge_pages: bool = False

    @classmethod
    def of(cls, where: str, backend: BackendName | ReadOptions = "mmap", **options: Any) -> ReadOptions:
        """Checked options, from all of them at once, or from the name of a backend and the other fields.

        Raises:
            FormatError: no such choice; the message begins with ``where`` and lists the choices.
        """
        read = backend if isinstance(backend, ReadOptions) else cls(cast(Backend, backend), **options)
        if cast(str, read.backend) == "os":
            read = read._replace(backend="mmap")
        if cast(str, read.backend) == "process":
            raise FormatError(
                f"{where}: backend 'process' was removed, as reading by pread what is announced is faster: choose pread"
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
    """An array whose slices are fresh, read-only copies; a subclass reads them in ``read_bytes`` or ``read_items``.

    ``path`` is that of the file or object, for error messages.
    """

    def __init__(self, path: str, dtype: np.dtype[Any], count: int) -> None:
        self._path, self.dtype, self._count = path, dtype, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, step = index.indices(self._count)
        if step != 1:
            raise ValueError(f"items of a file or an object are read one after the other, not in steps of {step}")
        return self.read_items(start, max(start, stop))

    def read_items(self, start: int, stop: int) -> NDArray[Any]:
        """Items ``[start, stop)``, which the array must have. OSError (ENOMEM): they are too many for the memory."""
        try:
            out = np.empty(stop - start, self.dtype)
        except MemoryError as error:  # a sparse file may be larger than any memory
            raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {error}", self._path) from None
        self.read_bytes(start * self.dtype.itemsize, out.view(np.uint8))
        out.flags.writeable = False
        return out

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` with the array's bytes from ``offset`` on; the caller must not ask for more than it has."""
        raise NotImplementedError


class PreadArray(CopiedArray):
    """An array read by ``pread``, whose first item begins at byte ``offset`` of the file.

    Threads and forked processes may share it, since ``pread`` uses no file position. ``fd`` is a descriptor of the
    file, which the array then owns; None to open the file at ``path``.
    """

    def __init__(self, path: str, dtype: np.dtype[Any], count: int, offset: int, fd: int | None = None) -> None:
        super().__init__(path, dtype, count)
        self._offset = offset
        self._fd = open_descriptor(path)[0] if fd is None else fd

    def advise(self, advice: int, offset: int = 0, nbytes: int = 0) -> None:
        """Call ``posix_fadvise`` for the array's bytes from ``offset`` on; ``nbytes`` 0 means to the file's end."""
        os.posix_fadvise(self._fd, self._offset + offset, nbytes, advice)

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """As ``CopiedArray``. CorruptShardError: the file was cut short since it was opened (rule F2)."""
        view, offset, num_read = out.data, self._offset + offset, 0
        while num_read < len(view):
            with name_in_errors(self._path):
                count = os.preadv(self._fd, [view[num_read:]], offset + num_read)
            if not count:
                detail = "the file ends here since it was opened; it was cut short: restore it"
                raise CorruptShardError(self._path, os.fstat(self._fd).st_size, "F2", detail)
            num_read += count

    def __del__(self) -> None:
        # A constructor that failed has no descriptor to close.
        if (fd := self.__dict__.pop("_fd", None)) is not None:
            os.close(fd)


class PartOfArray(CopiedArray):
    """Items that lie in an array of bytes, from byte ``begin`` on: it reads only what it is asked for.

    So several arrays in one file share its descriptor.
    """

    def __init__(self, path: str, whole: Array, dtype: np.dtype[Any], count: int, begin: int) -> None:
        super().__init__(path, dtype, count)
        self._whole, self._begin = whole, begin

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """As ``CopiedArray``. Errors as of a slice of the whole array."""
        begin = self._begin + offset
        out[:] = self._whole[begin : begin + len(out)]


def part_of(path: str, whole: Array, dtype: np.dtype[Any], count: int, begin: int) -> Array:
    """The ``count`` items that lie in an array of bytes from byte ``begin`` on: a view where it is mapped.

    ``path`` is of the file, for errors.
    """
    if isinstance(whole, np.ndarray):
        return whole[begin : begin + count * dtype.itemsize].view(dtype)
    return PartOfArray(path, whole, dtype, count, begin)


def as_bytes(data: bytes | memoryview | NDArray[Any]) -> memoryview:
    """The bytes of a one-dimensional, contiguous buffer. Unlike ``memoryview.cast`` it takes an empty array."""
    if isinstance(data, np.ndarray):
        return data.view(np.uint8).data
    return memoryview(data)


def check_size(path: str, found: int, expected: int) -> None:
    """CorruptShardError (rule F2) unless a file has the size that its shard's header says."""
    if found != expected:
        detail = f"file has {found} bytes, expected {expected}; it was cut short, changed, or is of another shard"
        raise CorruptShardError(path, min(found, expected), "F2", f"{detail}: restore it")


class name_in_errors:  # noqa: N801
    """A context that adds a path to each OSError that names no file, as errors of calls on a descriptor do not."""

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
    """Up to ``max_nbytes`` first bytes of a file. Errors as of ``open_regular``."""
    with open_regular(path) as file:
        # Python allocates what is asked for before it reads.
        return file.read(min(max_nbytes, os.fstat(file.fileno()).st_size))


class _NamedFile(io.FileIO):
    """A file whose path is in all of its errors, also in those of reading."""

    def readinto(self, buffer: Any, /) -> int | None:
        with name_in_errors(self.name):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with name_in_errors(self.name):
            return super().readall()


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file that a user named for reading. Errors as of ``open_descriptor``."""
    return io.BufferedReader(_NamedFile(path, "rb", opener=lambda name, _: open_descriptor(name)[0]), _BUFFER_NBYTES)


def open_descriptor(path: str | os.PathLike[str]) -> tuple[int, os.stat_result]:
    """Open a file for reading; return its descriptor, which the caller must close, and its status.

    Never waits, as opening a FIFO otherwise does for its other end.

    Raises:
        FormatError: a FIFO, a socket or a device is there.
        OSError: nothing or a folder is there, or the file may not be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status
    os.close(fd)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise FormatError(f"{os.fspath(path)}: neither a file nor a folder, expected a file; name one")


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """What tells a file from another one that takes its name, and from itself after a change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def open_array(
    path: str, dtype: np.dtype[Any], count: int, *, nbytes: int, offset: int = 0, backend: Backend = "mmap"
) -> NDArray[Any] | PreadArray:
    """Open a file as a read-only array.

    With ``mmap`` the map lives as long as the array or any slice of it, also after the file was removed or replaced.

    Args:
        path: the file.
        dtype: of the items.
        count: number of items.
        nbytes: the size that the whole file must have.
        offset: byte where the items begin; a multiple of the item size.
        backend: ``mmap`` or ``pread``, as in ``ReadOptions``.

    Raises:
        CorruptShardError: the file has another size (rule F2).
        FormatError: another backend.
        OSError: the file cannot be opened, or not be mapped.
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
    """A file being written, without a buffer; ``nbytes`` is its size. Errors of the disk are OSError with its path.

    Args:
        path: the file. A link there is refused.
        durable: whether ``sync`` waits for the disk.
        append: go on at the end of the regular file that is there. Else the file is made, and nothing may be there.

    Raises:
        FileExistsError: without ``append``: something is there, if only a link.
        FormatError: with ``append``: what is there is no regular file.
    """

    def __init__(self, path: str, *, durable: bool = True, append: bool = False) -> None:
        self.path = path
        self._durable = durable
        # O_NONBLOCK: opening a FIFO would wait for its other end.
        how = os.O_NONBLOCK if append else os.O_CREAT | os.O_EXCL
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | how, 0o666)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode) and path != os.devnull:
            self.close()
            raise FormatError(f"{path}: no regular file; remove it, or choose another name")
        self.nbytes = os.lseek(self._fd, 0, os.SEEK_END)
        self._reserved, self._process = 0, os.getpid()

    def truncate(self, nbytes: int) -> None:
        """Remove all but the first ``nbytes``, and go on writing there."""
        assert nbytes <= self.nbytes
        if nbytes == self.nbytes:
            return  # not for nothing: when a file closes that was ever truncated to 0, ext4 writes it to disk at once
        with name_in_errors(self.path):
            os.ftruncate(self._fd, nbytes)
        self._reserved = 0
        self.nbytes = os.lseek(self._fd, 0, os.SEEK_END)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes from ``offset`` on, fewer if the file ends before."""
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
            # Where the disk has no such call, or less room, of which it may have reserved a part, writes go on without.
            if _fallocate(self._fd, _FALLOC_FL_KEEP_SIZE, *step):
                self._give_back()
                self._reserved = sys.maxsize
        with name_in_errors(self.path):
            while view:
                written = os.write(self._fd, view)
                self.nbytes += written
                view = view[written:]

    def write_at(self, data: bytes, offset: int) -> None:
        """Replace bytes from ``offset`` on that were written before."""
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
        """Free what was reserved in vain; not in a fork, whose parent may have written on."""
        if self._reserved > self.nbytes and self._process == os.getpid():
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.nbytes)
            self._reserved = 0

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def close(self) -> None:
        """Close; may be called twice."""
        if self._fd >= 0:
            self._give_back()
            fd, self._fd = self._fd, -1
            os.close(fd)


def sync_folder(folder: str | Path, durable: bool = True) -> None:
    """Wait until renames and unlinks in ``folder`` are on disk; does nothing if they need not be ``durable``."""
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
    """The xxh3_128 of a stream of bytes, the checksum of all headers; ``nbytes`` is the number of bytes so far."""

    def __init__(self) -> None:
        self.nbytes, self._hash = 0, xxhash.xxh3_128()

    def update(self, data: bytes | memoryview | NDArray[Any]) -> None:
        """Hash the next bytes: a buffer, or a one-dimensional, contiguous array."""
        raw = as_bytes(data) if isinstance(data, np.ndarray) else data
        self._hash.update(raw)
        self.nbytes += len(raw)

    def checksum(self) -> bytes:
        """The checksum as headers store it, 16 bytes."""
        return self._hash.digest()

    def hex(self) -> str:
        """The checksum in hex, for people and JSON."""
        return self._hash.hexdigest()

    def digest(self) -> FileDigest:
        """Number of bytes and checksum, as a header has them of a file."""
        return FileDigest(self.nbytes, self.checksum())


class HashedFile(StreamHash):
    """Hashes what it writes to ``file``. If that has bytes already, the caller must ``update`` with them first."""

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
    """Size and checksum of a local file from byte ``offset`` on; ``advance`` is called with the bytes of each read."""
    stream = StreamHash()
    with open_regular(path) as file:
        file.seek(offset)
        while chunk := file.read(_CHUNK_NBYTES):
            stream.update(chunk)
            advance(len(chunk))
    return stream.digest()


def has_digest(path: str, digest: FileDigest) -> bool:
    """Whether a local file has this size and checksum; it is read only if it has the size."""
    return os.stat(path).st_size == digest.nbytes and digest_file(path) == digest


# ---- files that are opened for each read ----

# A file that has changed at so many looks in a row is being written all the time.
_MAX_LOOKS = 5


class ReopenedArray(CopiedArray):
    """An array in a file that is opened for each slice; between slices no descriptor and no map is held.

    At each read the file must be the same as at the last look, by device, inode, size and times (``StampedFile``). If
    it is not, for example because the shard was copied over itself, ``confirm`` decides whether the array is still what
    it was. If so, the file is looked at and read again.

    Args:
        path: the file.
        dtype: of the items.
        count: number of items.
        nbytes: the size that the file must have (rule F2).
        confirm: must raise if other content has been published at the path. It is called after a look at the file, so
            that what it confirms is what was looked at.
        offset: byte of the file where the first item begins.
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
        """Look at the file after a read that found it changed; ``looks`` is how often that was in vain for this read.

        Raises:
            FormatError, OSError: what is there now is not this array, or changes at every look.
        """
        if looks == _MAX_LOOKS:
            raise FormatError(f"{self._path}: the file was changed at every one of {looks} looks; let its writer end")
        try:
            file = self._look()
        finally:
            self._confirm()
        self.file = file

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """As ``CopiedArray``. FormatError, OSError: what is in the file now is not this array."""
        looks = 0
        while not self.file.read(self.offset + offset, out):
            self.look_again(looks)
            looks += 1


def read_extents(
    arrays: Sequence[Array], starts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]
) -> None:
    """Fill ``out`` with items ``[start, start + count)`` of each array, end to end.

    Takes one native call if all arrays are ``ReopenedArray``.

    Raises:
        ValueError: an extent lies outside its array, or all of them together do not fill ``out``.
        FormatError, OSError: as of a slice of an array.
    """
    lengths = np.array([len(array) for array in arrays], np.int64)
    if (outside := (starts < 0) | (counts < 0) | (counts > lengths) | (starts > lengths - counts)).any():
        i = int(outside.argmax())
        raise ValueError(
            f"extent {i} begins at {starts[i]} and has {counts[i]} items, its array holds {lengths[i]};"
            " the index is damaged, or of another shard"
        )
    if int(counts.sum()) != len(out):
        raise ValueError(f"extents of {counts.sum()} items do not fill an output of {len(out)}")
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
        # It ends before the first file that has changed.
        more = _native.read_ranges(files, begins[num_read:], nbytes[num_read:], room)
        num_read, looks = num_read + more, 0 if more else looks
        if num_read < len(reopened):
            reopened[num_read].look_again(looks)
            looks += 1
