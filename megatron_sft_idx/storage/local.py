"""Local bytes: how they may be read, a file as an array, writing that is really on disk, and hashing what goes by.

Every read goes through ``open_array``: the file's size is checked before the first byte is touched, so a file that
was cut short is an error when opening and not a SIGBUS later.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import re
import stat
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
_PIECE_NBYTES = 1 << 18

# ---- what is local ----

# What paths in object stores begin with. msc is NVIDIA's multi-storage-client, whose profiles reach S3, GCS, Azure, OCI
# and plain folders.
SCHEME_STARTS = ("s3://", "msc://")
_ANY_START = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path names something in an object store rather than a file.

    Raises:
        FormatError: it names something in a store of another kind, where a folder called ``gs:`` would surprise.
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


_WORK_THERE = "work there, and let megatron-sft-idx copy bring the shard from the bucket or to it"


def require_local(path: str | os.PathLike[str], what: str, remedy: str = _WORK_THERE) -> None:
    """FormatError for a path in an object store, where ``what`` needs files on a disk."""
    if is_remote(path):
        raise FormatError(f"{os.fspath(path)}: {what} needs files on a local disk; {remedy}")


# ---- how bytes are read ----

Backend = Literal["mmap", "pread", "reopen"]
BackendName = Literal["mmap", "os", "pread", "reopen"]  # as users may say it: "os" is another name of "mmap"
Advice = Literal["normal", "sequential", "random"]


class ReadOptions(NamedTuple):
    """How the tokens and masks of a shard, or of several together, are read.

    Attributes:
        backend: ``mmap`` for views of memory maps: nothing is copied, and processes share the pages. ``pread`` where
            mapping is slow or refused. ``reopen`` to hold neither maps nor descriptors. ``mmap`` is the default, being
            several times faster on warm pages.
        advice: what the kernel is told of the order of reads. ``random`` switches its read-ahead off, which makes cold
            reads slower unless what comes is announced (``schedule``), so ``normal`` is the default.
        huge_pages: ask for huge pages for maps. Where a file system has them the kernel reads 2 MiB at a fault: cold
            packs in random order took twice as long, warm ones no less time. So it is off by default.
    """

    backend: Backend = "mmap"
    advice: Advice = "normal"
    huge_pages: bool = False

    @classmethod
    def of(cls, where: str, backend: BackendName | ReadOptions = "mmap", **options: Any) -> ReadOptions:
        """Options as users give them: all of them, or the name of a backend and the other fields.

        Raises:
            FormatError: no such choice; the message begins with ``where`` and lists those there are.
        """
        made = backend if isinstance(backend, ReadOptions) else cls(cast(Backend, backend), **options)
        if cast(str, made.backend) == "os":
            made = made._replace(backend="mmap")
        if cast(str, made.backend) == "process":
            raise FormatError(
                f"{where}: backend 'process' was removed, as reading by pread what is announced is faster: choose pread"
            )
        for what, value, choices in (
            ("backend", made.backend, get_args(BackendName)),
            ("advice", made.advice, get_args(Advice)),
        ):
            if value not in choices:
                raise FormatError(f"{where}: {what} {value!r}, choose one of {', '.join(choices)}")
        return made


# ---- arrays in files ----


class Array(Protocol):
    """A one-dimensional array on disk: slices give numpy arrays."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its items."""
        ...

    def __getitem__(self, index: slice, /) -> NDArray[Any]: ...
    def __len__(self) -> int: ...


class CopiedArray:
    """An array whose slices are fresh copies: ``count`` items of a dtype, read by ``read_bytes``."""

    def __init__(self, dtype: np.dtype[Any], count: int) -> None:
        self.dtype, self._count = dtype, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, _ = index.indices(self._count)
        out = np.empty(max(stop - start, 0), self.dtype)
        self.read_bytes(start * self.dtype.itemsize, out.view(np.uint8))
        out.flags.writeable = False
        return out

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Bytes from ``offset`` on, counted from the first item and all there, into ``out``."""
        raise NotImplementedError


class PreadArray(CopiedArray):
    """An array read with ``pread``: every slice is a fresh copy.

    For file systems where mapping is slow or refused. The descriptor is shared by threads and forked processes:
    pread has no file position. The first item begins at ``offset``, in bytes.
    """

    def __init__(self, path: str, dtype: np.dtype[Any], count: int, offset: int) -> None:
        super().__init__(dtype, count)
        self._path, self._offset = path, offset
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def advise(self, advice: int, offset: int = 0, nbytes: int = 0) -> None:
        """Give the kernel ``posix_fadvise`` on bytes from ``offset`` on; 0 bytes are all that follow."""
        os.posix_fadvise(self._fd, self._offset + offset, nbytes, advice)

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See ``CopiedArray``. CorruptShardError: the file ends before (rule F2). OSError, with its path."""
        view, offset, done = out.data, self._offset + offset, 0
        while done < len(view):
            with name_in_errors(self._path):
                got = os.preadv(self._fd, [view[done:]], offset + done)
            if not got:
                detail = "the file ends here since it was opened; it was cut short: restore it"
                raise CorruptShardError(self._path, os.fstat(self._fd).st_size, "F2", detail)
            done += got

    def __del__(self) -> None:
        # A constructor that failed has no descriptor to close.
        if (fd := self.__dict__.pop("_fd", None)) is not None:
            os.close(fd)


def as_bytes(data: bytes | memoryview | NDArray[Any]) -> memoryview:
    """The bytes of a buffer, which is one-dimensional and contiguous; it may be empty, which ``cast`` refuses."""
    if isinstance(data, np.ndarray):
        return data.view(np.uint8).data
    return memoryview(data)


def check_size(path: str, found: int, expected: int) -> None:
    """CorruptShardError (rule F2) unless a file has the size that the header says."""
    if found != expected:
        detail = f"file has {found} bytes, expected {expected}; it was cut short, changed, or is of another shard"
        raise CorruptShardError(path, min(found, expected), "F2", f"{detail}: restore it")


class name_in_errors:  # noqa: N801
    """A context in which errors of the disk that name no file, as those of a descriptor, get the path of one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename, error.strerror = os.fspath(self._path), os.strerror(error.errno)


def read_beginning(path: str | os.PathLike[str], nbytes: int) -> bytes:
    """The first bytes of a file, in no more memory than it has bytes; errors as ``open_regular``."""
    with open_regular(path) as file:
        return file.read(min(nbytes, os.fstat(file.fileno()).st_size))


class _NamedFile(io.FileIO):
    """A file whose errors name it, those of reading too."""

    def readinto(self, buffer: Any, /) -> int | None:
        with name_in_errors(self.name):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with name_in_errors(self.name):
            return super().readall()


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A file that a user named, open for reading. Errors as ``open_descriptor``."""
    return io.BufferedReader(_NamedFile(path, "rb", opener=lambda name, _: open_descriptor(name)[0]), _BUFFER_NBYTES)


def open_descriptor(path: str | os.PathLike[str]) -> tuple[int, os.stat_result]:
    """A file open for reading, which the caller closes; never waits, as opening a FIFO does for its other end.

    Raises:
        FormatError: what is there is no file.
        OSError: there is nothing, a folder, or what may not be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status
    os.close(fd)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise FormatError(f"{os.fspath(path)}: neither a file nor a folder, expected a file; name one")


def open_array(
    path: str, dtype: np.dtype[Any], count: int, *, nbytes: int, offset: int = 0, backend: Backend = "mmap"
) -> NDArray[Any] | PreadArray:
    """A file's items as a read-only array.

    With ``mmap`` the array and every slice of it keep the map alive, and nothing else does: views stay valid after
    whoever opened the file is gone, also when another file is renamed over it.

    Args:
        path: the file.
        dtype: of the items.
        count: number of items.
        nbytes: size the whole file must have.
        offset: where the items begin, in bytes; a multiple of the item size.
        backend: ``mmap`` for zero-copy views, ``pread`` for copies.

    Raises:
        CorruptShardError: the file has another size (rule F2).
        FormatError: another backend.
        OSError: the file cannot be opened.
    """
    if backend not in ("mmap", "pread"):
        raise FormatError(f"{path}: backend {backend!r}, choose mmap or pread")
    fd, status = open_descriptor(path)
    try:
        check_size(path, status.st_size, nbytes)
        if backend == "pread":
            return PreadArray(path, dtype, count, offset)
        if not count:
            return np.frombuffer(b"", dtype)
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
        # Not to wait for the other end where somebody has put a pipe there.
        how = os.O_NONBLOCK if append else os.O_CREAT | os.O_EXCL
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | how, 0o666)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode) and path != os.devnull:
            self.close()
            raise FormatError(f"{path}: no regular file; remove it, or choose another name")
        self.nbytes = os.lseek(self._fd, 0, os.SEEK_END)

    def truncate(self, nbytes: int) -> None:
        """Drop what lies behind the first ``nbytes``, and go on there."""
        assert nbytes <= self.nbytes
        if nbytes == self.nbytes:
            return  # ext4 writes a file out when it is closed that was ever cut to nothing
        with name_in_errors(self.path):
            os.ftruncate(self._fd, nbytes)
        self.nbytes = os.lseek(self._fd, 0, os.SEEK_END)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes already written; fewer where the file ends before."""
        pieces = []
        with name_in_errors(self.path):
            while nbytes and (piece := os.pread(self._fd, nbytes, offset)):
                pieces.append(piece)
                offset, nbytes = offset + len(piece), nbytes - len(piece)
        return b"".join(pieces)

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        view = memoryview(data)
        with name_in_errors(self.path):
            while view:
                written = os.write(self._fd, view)
                self.nbytes += written
                view = view[written:]

    def write_at(self, data: bytes, offset: int) -> None:
        """Replace bytes already written."""
        assert offset + len(data) <= self.nbytes
        done = 0
        with name_in_errors(self.path):
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)

    def sync(self) -> None:
        """Wait until the bytes are on disk, unless the file was opened with ``durable=False``."""
        if self._durable:
            with name_in_errors(self.path):
                os.fsync(self._fd)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def close(self) -> None:
        """Close; may be called twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def sync_folder(folder: str | Path, durable: bool = True) -> None:
    """Make renames and unlinks in ``folder`` durable, unless they need not be."""
    if not durable:
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with name_in_errors(folder):
            os.fsync(fd)
    finally:
        os.close(fd)


# ---- hashing: xxh3_128, the checksum that every header of the package stores ----


class StreamHash:
    """The hash of bytes that come one after the other; ``nbytes`` is how many there were."""

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
    """Writes to ``file`` and hashes what it writes; ``update`` takes in what the file held before."""

    def __init__(self, file: OutputFile) -> None:
        super().__init__()
        self.file = file

    def write(self, data: bytes | memoryview | NDArray[Any]) -> None:
        """Append all of ``data``."""
        raw = as_bytes(data)
        self.file.write(raw)
        self.update(raw)


def digest_file(path: str, offset: int = 0, *, advance: Callable[[int], None] = lambda nbytes: None) -> FileDigest:
    """Size and checksum of a local file from a byte offset on; ``advance`` is told how many bytes more were read."""
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


# ---- files that are opened for each read ----

# A file that is another one at every look is being written over and over.
_MOST_LOOKS = 5


class ReopenedArray(CopiedArray):
    """An array in a file that is opened for each slice, which is a fresh copy; between them nothing is held open.

    Each time the file must be the one that was looked at when this was made, by device, inode, size and times. Where
    it is not, ``confirm`` decides: it raises if the array is not what it was; else the file is looked at again.

    ``confirm`` raises where other content was published at the path. It is called after a look at the file, so what it
    finds published is what was looked at, or the file changes again. ``nbytes`` is the size that the file must have
    (rule F2), and ``offset`` where the first item begins in it.
    """

    def __init__(
        self, path: str, dtype: np.dtype[Any], count: int, nbytes: int, confirm: Callable[[], None], offset: int = 0
    ) -> None:
        super().__init__(dtype, count)
        self._path, self._file_nbytes, self._confirm, self.offset = path, nbytes, confirm, offset
        self.file = self._look()

    def _look(self) -> _native.StampedFile:
        file = _native.StampedFile(os.fsencode(self._path))
        check_size(self._path, file.nbytes, self._file_nbytes)
        return file

    def look_again(self, looks: int) -> None:
        """After a read that met another file, and so many looks in vain.

        Raises:
            FormatError, OSError: what is there now is not this array, or is another file at every look.
        """
        if looks == _MOST_LOOKS:
            raise FormatError(f"{self._path}: the file was changed at every one of {looks} looks; let its writer end")
        try:
            file = self._look()
        finally:
            self._confirm()
        self.file = file

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See ``CopiedArray``. FormatError, OSError: what is there now is not this array."""
        looks = 0
        while not self.file.read(self.offset + offset, out):
            self.look_again(looks)
            looks += 1


def read_extents(
    arrays: Sequence[Array], starts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]
) -> None:
    """Items ``[start, start + count)`` of each array, end to end, into ``out``, which they fill.

    One native call where all files are opened for each read.

    Raises:
        ValueError: runs that lie outside their arrays, or do not fill ``out``.
        FormatError, OSError: as of a slice of one.
    """
    lengths = np.array([len(array) for array in arrays], np.int64)
    if (outside := (starts < 0) | (counts < 0) | (counts > lengths) | (starts > lengths - counts)).any():
        run = int(outside.argmax())
        raise ValueError(
            f"run {run} begins at {starts[run]} and has {counts[run]} items, its array holds {lengths[run]};"
            " the index is damaged, or of another shard"
        )
    if int(counts.sum()) != len(out):
        raise ValueError(f"runs of {counts.sum()} items do not fill an output of {len(out)}")
    files = [array for array in arrays if isinstance(array, ReopenedArray)]
    size, end, done, looks = out.dtype.itemsize, 0, 0, 0
    if len(files) < len(arrays):
        for array, start, count in zip(arrays, starts.tolist(), counts.tolist(), strict=True):
            if isinstance(array, CopiedArray):
                array.read_bytes(start * array.dtype.itemsize, out[end : end + count].view(np.uint8))
            else:
                out[end : end + count] = array[start : start + count]
            end += count
        return
    begins, nbytes = np.array([array.offset for array in files], np.int64) + starts * size, counts * size
    while done < len(files):
        stamped = tuple([array.file for array in files[done:]])
        room = out[int(counts[:done].sum()) :] if done else out
        more = _native.read_ranges(stamped, begins[done:], nbytes[done:], room)
        done, looks = done + more, 0 if more else looks
        if done < len(files):
            files[done].look_again(looks)
            looks += 1
