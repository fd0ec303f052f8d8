"""Rules for output paths, and atomic renames: files appear completely, and never replace unrelated files.

``check_place`` checks whether a path may be written: it must be free, empty, or an older output of the same ``Kind``
that may be replaced. ``move_into_place`` renames a complete file if the path is unchanged since before the first byte.
In a path to write, links are followed except in the last component, where a link is rejected. ``lock_file`` lets one of
several processes write. When a process is killed its lock is released, but the lock file stays.

Outputs at paths that a user gave are written in building folders (``outputs``, and ``shard.publication`` for shards).
Small control files, such as catalogs, caches and plans, are not outputs: ``write_control_file`` writes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import NamedTuple

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage.local import OutputFile, name_in_errors, require_local, sync_folder

Identity = tuple[int, int]
"""Device and inode of what is at a path, links not followed."""

MAX_NAME_NBYTES = 255
_OTHER_NAME = "choose another name"
_SHOWN_NBYTES = 16
# Constants of renameat2, as Linux defines them.
_NOREPLACE, _EXCHANGE, _AT_FDCWD = 1, 2, -100
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_TYPES = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


class Kind(NamedTuple):
    """A kind of file, or of folder of files, that the package writes: its name, such as ``a page``, and its test.

    ``recognize`` returns whether the file at a path is of this kind, or is one of the files of such a folder. It must
    not follow links or wait for a FIFO, so it reads through ``head_of``. It must return False rather than raise an
    error.
    """

    name: str
    recognize: Callable[[str], bool]


class Place(NamedTuple):
    """A path that a command reads or writes, with its role in error messages, such as ``the input``.

    ``folder`` says whether it is a folder that is written and replaced as a whole.
    """

    path: str
    role: str
    folder: bool = False


def resolve(path: str | os.PathLike[str], *, folder: bool = False) -> str:
    """Return the absolute path of an output, with links followed except in the last component. Creates nothing.

    Args:
        path: as the user gave it.
        folder: whether the output is a folder. Its name may end with slashes, and may be ``.`` or ``..``.

    Raises:
        FormatError: the name cannot be written, or one of its parents is not a folder.
    """
    text = os.fspath(path)
    require_local(text, "writing", _OTHER_NAME)
    what = "a folder" if folder else "a file"
    if not text or "\0" in text:
        raise FormatError(f"{text!r}: expected the path of {what}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FormatError(f"{text!a}: the name is not valid UTF-8; {_OTHER_NAME}") from None
    base = os.path.basename(text.rstrip("/") if folder else text)
    if base in ("", ".", ".."):
        if not folder:
            raise FormatError(f"{text}: expected the path of a file, found a folder")
        text = os.path.realpath(text)
        if text == "/":
            raise FormatError(f"{path}: the root folder is never written to; {_OTHER_NAME}")
        base = os.path.basename(text)
    if max(len(os.fsencode(name)) for name in text.split("/")) > MAX_NAME_NBYTES:
        raise FormatError(
            f"{text}: longer than {MAX_NAME_NBYTES} bytes, the maximum for one name; choose a shorter one"
        )
    parent = os.path.dirname(text.rstrip("/"))
    above = parent or "."
    while above and not os.path.lexists(above):
        above = os.path.dirname(above)
    if above and not os.path.isdir(above):
        raise FormatError(f"{text}: {above} is {describe(above)}, not a folder; {_OTHER_NAME}")
    return os.path.join(os.path.realpath(parent), base)


def places_at(path: str, role: str) -> list[Place]:
    """Return the files that are read from a path, for ``require_apart``: the file, or those directly in the folder."""
    try:
        return [Place(os.path.join(path, name), role) for name in sorted(os.listdir(path))]
    except OSError:
        return [Place(path, role)]


def identity(path: str) -> Identity | None:
    """Return device and inode at a path, without following a link. None if nothing exists."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def describe(path: str) -> str:
    """Describe the object at a path for error messages: ``a folder``."""
    return _TYPES.get(stat.S_IFMT(os.lstat(path).st_mode), "a device")


def head_of(path: str, nbytes: int) -> bytes:
    """Return the first bytes of a regular file; b"" for anything else, including links and unreadable files."""
    with contextlib.suppress(OSError):
        return read_head(path, nbytes)
    return b""


def read_head(path: str, nbytes: int) -> bytes:
    """Return the first bytes of a regular file; b"" for anything else. OSError: a link, missing or unreadable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        return os.read(fd, min(nbytes, status.st_size)) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(fd)


def require_apart(writes: Iterable[Place], reads: Iterable[Place] = ()) -> None:
    """Raise FormatError if a command would write what it reads, or write two outputs to one path.

    Files are the same if their resolved paths are equal, or if device and inode are, as for hard links. An output
    folder must not hold another file of the command, and must not be or hold the working directory. Every command must
    call this once, before it writes its first byte, with all files that it reads and writes.
    """
    writes = list(writes)
    seen: dict[str | Identity, Place] = {}
    resolved: list[tuple[str, Place]] = []
    for place in (*writes, *reads):
        is_read = len(resolved) >= len(writes)
        head, base = os.path.split(place.path.rstrip("/"))
        # The last component of an output path is not followed: a link there is rejected.
        follow = is_read or base in ("", ".", "..")
        path = os.path.realpath(place.path) if follow else os.path.join(os.path.realpath(head), base)
        keys: list[str | Identity] = [path]
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(path)
            keys.append((status.st_dev, status.st_ino))
        for key in keys:
            same = seen.setdefault(key, place)
            if same is not place and (not is_read or same in writes):
                conflict = f"used as both {same.role} and {place.role}"
                if same.role == place.role:
                    conflict = f"the same file as {place.path}"
                raise FormatError(f"{same.path}: {conflict}; {_OTHER_NAME}")
        resolved.append((path, place))
    folders = {path: place for path, place in resolved[: len(writes)] if place.folder}
    for folder in _and_above(os.getcwd()):
        if (outer := folders.get(folder)) is not None:
            raise FormatError(
                f"{outer.path or repr('')}: contains the current folder, which would be replaced; {_OTHER_NAME}"
            )
    for path, inner in resolved:
        for folder in _and_above(path):
            if (outer := folders.get(folder)) not in (None, inner):
                assert outer is not None
                raise FormatError(
                    f"{outer.path}: this folder would be replaced, and contains {inner.role} ({inner.path});"
                    f" {_OTHER_NAME}"
                )


def _and_above(path: str) -> Iterator[str]:
    """Yield a path and its parents."""
    yield path
    while (above := os.path.dirname(path)) != path:
        yield (path := above)


def check_place(path: str, kind: Kind, *, overwrite: bool, folder: bool = False) -> Identity | None:
    """Check whether a file or folder of a kind may be written at a path from ``resolve``.

    With ``overwrite`` it may replace an output of that kind. Anything else that is not empty is never replaced.

    Returns:
        The identity of what is there now, for ``move_into_place``; None if nothing exists.

    Raises:
        FormatError: the existing object may not be replaced. The message describes it.
    """
    present = identity(path)
    if present is None:
        return None
    expected = stat.S_IFDIR if folder else stat.S_IFREG
    if stat.S_IFMT(os.lstat(path).st_mode) != expected:
        raise FormatError(f"{path}: expected {kind.name} or nothing, found {describe(path)}; {_OTHER_NAME}")
    files = _files_in(path, kind) if folder else [path]
    if not files or (not folder and not os.lstat(path).st_size):
        return present
    for file in files:
        if not kind.recognize(file):
            head = head_of(file, _SHOWN_NBYTES)
            what = f"a file of {os.path.getsize(file)} bytes that begins with {head!r}"
            found = f"{os.path.basename(file)}, {what}" if folder else what
            raise FormatError(f"{path}: expected {kind.name}, found {found}, which is never replaced; {_OTHER_NAME}")
    if not overwrite:
        raise FormatError(f"{path}: already exists; {_OTHER_NAME}, or pass overwrite (--overwrite)")
    return present


def _files_in(folder: str, kind: Kind) -> list[str]:
    """Return the paths of the files in a folder. FormatError: it holds anything except files."""
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        if not entry.is_file(follow_symlinks=False):
            raise FormatError(
                f"{folder}: contains {entry.name}, {describe(entry.path)}, which does not belong to {kind.name};"
                f" {_OTHER_NAME}"
            )
    return [entry.path for entry in entries]


def make_folders(path: str) -> None:
    """Create the parent folders of a path. FormatError: something else has one of their names."""
    require_local(path, "writing a shard")
    parent = os.path.dirname(path) or "."
    try:
        os.makedirs(parent, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise FormatError(f"{path}: one of its parents is not a folder; {_OTHER_NAME}") from None


class ControlFile:
    """A small control file, such as a catalog, a cache or a plan, written under a hidden name next to its path.

    ``publish`` renames it. The next writer replaces the remains of a killed one. As a context manager it removes the
    written file unless it was published.
    """

    def __init__(self, path: str, kind: Kind, *, overwrite: bool) -> None:
        self.path, self._kind = path, kind
        self._replaced = check_place(path, kind, overwrite=overwrite)
        require_space(path, 0)
        make_folders(path)
        parent, base = os.path.split(path)
        # Hidden, so that no pattern for finished files matches; truncated, to leave space for a suffix.
        stem = os.path.join(parent, "." + os.fsencode(base)[:200].decode(errors="ignore"))
        self._lock = _lock_leftover(f"{stem}.tmp", kind)
        self._file: OutputFile | None = None
        self._is_published = False
        self._temporary = f"{stem}.tmp" if self._lock is not None else f"{stem}.{secrets.token_hex(8)}.tmp"
        if self._lock is None:
            OutputFile(self._temporary).close()

    def __enter__(self) -> ControlFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_published:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            os.close(self._lock)

    def open(self) -> OutputFile:
        """Open the file for writing."""
        self._file = OutputFile(self._temporary, append=True)
        return self._file

    def publish(self) -> None:
        """Sync the written file, and rename it to ``path``, replacing the old one.

        Raises:
            FormatError: ``path`` has changed since before the first byte. It is left alone.
            OSError: an error of the disk.
        """
        if self._file is not None:
            self._file.close()
        fd = os.open(self._temporary, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            with name_in_errors(self._temporary):
                os.fsync(fd)
        finally:
            os.close(fd)
        if identity(self.path) == self._replaced:
            # The file may have been written to, or be another file that reuses the inode of a removed one.
            check_place(self.path, self._kind, overwrite=True)
        move_into_place(self._temporary, self.path, self._replaced)
        self._is_published = True
        sync_folder(os.path.dirname(self.path))


def remove_folder(folder: str) -> None:
    """Remove a folder of files. Failures are retried once, because network file systems can be busy for a moment."""
    for _ in range(2):
        try:
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))
            return os.rmdir(folder)
        except OSError as error:
            failed = error
    raise OSError(failed.errno, f"{failed.strerror}: this folder is no longer needed, remove it", folder)


def _lock_leftover(path: str, kind: Kind) -> int | None:
    """Create an empty temporary file, or empty the one that a killed writer left, so that they do not pile up.

    Returns:
        Its descriptor, locked. None if an active writer has the lock, the file system has no locks, or the file does
        not belong to the package.
    """
    try:
        fd = lock_file(path, (b"",), create=True, busy=f"{path}: another process is writing here")
    except (FormatError, OSError):
        return None
    if os.fstat(fd).st_size:
        if not kind.recognize(path):
            os.close(fd)
            return None
        os.ftruncate(fd, 0)  # never an empty file: ext4 writes a truncated one to disk when it closes
    return fd


def new_control_file(path: str | os.PathLike[str], kind: Kind, *, overwrite: bool) -> ControlFile:
    """Begin to write a control file. FormatError: see ``resolve`` and ``check_place``."""
    return ControlFile(resolve(path), kind, overwrite=overwrite)


def write_control_file(path: str | os.PathLike[str], data: bytes, kind: Kind, *, overwrite: bool) -> None:
    """Write and publish a control file. See ``new_control_file`` and ``publish`` for errors."""
    with new_control_file(path, kind, overwrite=overwrite) as new:
        new.open().write(data)
        new.publish()


def move_into_place(temporary: str, path: str, expected: Identity | None) -> str | None:
    """Rename a synced file or folder to ``path``, if nothing or the expected object is there.

    Returns:
        The new path of a replaced folder, which the caller must remove. None for a replaced file, which is gone, and if
        nothing was there.

    Raises:
        FormatError: something else is there. Nothing is changed.
    """
    folder = os.path.isdir(temporary)
    present = identity(path) if expected is not None else None
    if present is not None and present != expected:
        raise _changed(path)
    try:
        if present is None:
            _move_to_free_place(temporary, path, folder=folder)
            return None
        if not folder:
            os.rename(temporary, path)
            return None
        if _rename(temporary, path, _EXCHANGE):
            return temporary
        os.rename(path, old_folder := f"{temporary}.old")
        try:
            os.rename(temporary, path)
        except OSError:
            os.rename(old_folder, path)
            raise
        return old_folder
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        raise _changed(path) from None


def _move_to_free_place(temporary: str, path: str, *, folder: bool) -> None:
    """Rename a file or folder to ``path``.

    FileExistsError or FormatError: the path exists and is not an empty folder.
    """
    if _rename(temporary, path, _NOREPLACE):
        return
    if folder:
        os.rename(temporary, path)  # replaces nothing except an empty folder
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # the file system has no hard links
        if os.path.lexists(path):
            raise _changed(path) from None
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


def exchange(one: str, other: str) -> bool:
    """Exchange two folders. Return False if the file system cannot do that."""
    return _rename(one, other, _EXCHANGE)


def _changed(path: str) -> FormatError:
    return FormatError(
        f"{path}: something else was written here after this command began, and was not replaced; {_OTHER_NAME}"
    )


def _rename(old: str, new: str, flags: int) -> bool:
    """Call ``renameat2``; False if the C library, the kernel or the file system does not have it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if not call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags):
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), old, None, new)


def require_space(path: str, nbytes: int, files: int = 1) -> None:
    """Raise OSError (ENOSPC) if the disk of a path has too few free bytes, or too few inodes for ``files``."""
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    room = os.statvfs(folder)
    free, full = room.f_bavail * room.f_frsize, os.strerror(errno.ENOSPC)
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"{full}: {nbytes:,} bytes are needed, but only {free:,} are free", path)
    # A file system without a fixed number of inodes reports 0.
    if room.f_files and room.f_favail < files:
        raise OSError(
            errno.ENOSPC, f"{full}: {files:,} files are needed, but only {room.f_favail:,} inodes are free", path
        )


# ---- one writer per path ----

# Errors of file systems without locks: Lustre mounted without them, some FUSE and NFS mounts.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def lock_file(path: str, magics: tuple[bytes, ...], *, create: bool, shared: bool = False, busy: str | None) -> int:
    """Open a file and lock it. The lock lasts until the caller closes the descriptor or is killed.

    Args:
        path: path of the file. A link is rejected.
        magics: possible beginnings of a file of the package, all of one length; the file may also be empty.
        create: create the file if it does not exist.
        shared: for a reader: blocks writers but not other readers, and needs no write permission.
        busy: the message of the error if another process has the lock; None to wait for that process.

    Raises:
        FormatError: another process has the lock; the file system has no locks; or the file at ``path`` does not belong
            to the package, and is left alone.
        FileNotFoundError: the file does not exist, and ``create`` is false.
    """
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    access = (os.O_RDONLY if shared else os.O_RDWR) | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    while True:
        check_lock(path, magics, shared=shared)
        fd = os.open(path, access | (os.O_CREAT if create else 0), 0o666)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if busy is None else fcntl.LOCK_NB))
            check_lock(path, magics, shared=shared)
            # Between open and flock, the previous owner of the lock may have removed the file.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.lstat(path)):
                    return fd
        except BaseException as error:
            empty = not os.fstat(fd).st_size
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise FormatError(busy) from None
            if not isinstance(error, OSError) or error.errno not in _NO_LOCKS:
                raise
            if empty:  # most likely created by the call above
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise FormatError(
                f"{path}: this file system does not support locks ({error.strerror}), so two commands could write the"
                " same files; write to a local disk and copy the result, or mount the file system with locks (Lustre:"
                " -o flock)"
            ) from None
        os.close(fd)


def check_lock(path: str, magics: tuple[bytes, ...], *, shared: bool = False) -> None:
    """Raise FormatError if ``lock_file`` would reject the file at a path."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    head = head_of(path, max(map(len, magics), default=1))
    if not stat.S_ISREG(status.st_mode):
        what = f"{describe(path)} already exists"
    elif head and not any(magic.startswith(head) for magic in magics):
        what = "a file that megatron-sft-idx did not write already exists"
    elif status.st_nlink > 1 and not shared:
        what = "this file has a second name (a hard link)"
    else:
        return
    raise FormatError(f"{path}: {what}, but this command needs this path; move it away, or choose another name")
