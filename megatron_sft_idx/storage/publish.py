"""The one way to write: files and folders that appear whole or not at all, and never in the place of a stranger's.

What is written lies under a temporary name beside its place, made exclusively and never through a link, until it is
whole and synced. What is at the place must then still be what was looked at before the first byte: nothing, something
empty, or something that is recognised as what is being written and may be replaced. Links are followed above the last
component of a path and never at it. Where more than one process may write, a lock on a file says which does: a killed
one leaves the file, and no lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NamedTuple

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage.local import OutputFile, name_in_errors, sync_folder

Identity = tuple[int, int]
"""Device and inode of what is at a path, links not followed."""

MAX_NAME_NBYTES = 255
_OTHER_NAME = "choose another name"
_SHOWN_NBYTES = 16
# Of renameat2, as Linux defines them.
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
    """What is being written, as sentences call it, and whether a regular file is an older one of the kind.

    Of a folder every entry is asked for. ``recognize`` opens without following links or waiting (``head_of``), and
    answers False rather than raise.
    """

    name: str
    recognize: Callable[[str], bool]


class Place(NamedTuple):
    """A path that a run reads or writes, its role in sentences, and whether it is a folder, written as a whole."""

    path: str
    role: str
    folder: bool = False


def resolve(path: str | os.PathLike[str], *, folder: bool = False) -> str:
    """The absolute name of what is to be written, links followed above it; makes nothing.

    Args:
        path: as the user gave it.
        folder: a folder is to be written: slashes at the end are dropped, and ``.`` and ``..`` are followed.

    Raises:
        FormatError: no name that could be written, or something above it is no folder.
    """
    text = os.fspath(path)
    what = "a folder" if folder else "a file"
    if not text or "\0" in text:
        raise FormatError(f"{text!r}: expected the name of {what}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FormatError(f"{text!a}: a name that is not UTF-8; {_OTHER_NAME}") from None
    base = os.path.basename(text.rstrip("/") if folder else text)
    if base in ("", ".", ".."):
        if not folder:
            raise FormatError(f"{text}: names a folder, expected the name of a file")
        text = os.path.realpath(text)
        if text == "/":
            raise FormatError(f"{path}: the root of all folders is never written; {_OTHER_NAME}")
        base = os.path.basename(text)
    if max(len(os.fsencode(name)) for name in text.split("/")) > MAX_NAME_NBYTES:
        raise FormatError(f"{text}: a name of more than {MAX_NAME_NBYTES} bytes; choose a shorter one")
    parent = os.path.dirname(text.rstrip("/"))
    above = parent or "."
    while above and not os.path.lexists(above):
        above = os.path.dirname(above)
    if above and not os.path.isdir(above):
        raise FormatError(f"{text}: {above} is {describe(above)}, expected a folder; {_OTHER_NAME}")
    return os.path.join(os.path.realpath(parent), base)


def places_at(path: str, role: str) -> list[Place]:
    """What is read of a path, for ``require_apart``: the file, or the files that lie right in the folder."""
    try:
        return [Place(os.path.join(path, name), role) for name in sorted(os.listdir(path))]
    except OSError:
        return [Place(path, role)]


def identity(path: str) -> Identity | None:
    """Device and inode of what is at a path, which may be a link; None for nothing."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def describe(path: str) -> str:
    """What is at a path, for sentences."""
    return _TYPES.get(stat.S_IFMT(os.lstat(path).st_mode), "a device")


def head_of(path: str, nbytes: int) -> bytes:
    """The first bytes of a regular file; none of anything else, of a link, or of what cannot be read."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return os.read(fd, nbytes)
        finally:
            os.close(fd)
    return b""


def require_apart(writes: Iterable[Place], reads: Iterable[Place] = ()) -> None:
    """FormatError where a run would write what it reads, or two things to one place.

    Files are compared by their resolved names and, where they exist, by device and inode, so that links and hard links
    count. A folder that is written may neither hold anything else of the run nor be, or hold, the working folder.
    A verb calls this once, before its first byte, with all files that it touches.
    """
    writes = list(writes)
    seen: dict[str | Identity, Place] = {}
    names: list[tuple[str, Place]] = []
    for place in (*writes, *reads):
        head, base = os.path.split(place.path.rstrip("/"))
        # The last component of what is written is not followed, since a link there is refused.
        followed = len(names) >= len(writes) or base in ("", ".", "..")
        name = os.path.realpath(place.path) if followed else os.path.join(os.path.realpath(head), base)
        keys: list[str | Identity] = [name]
        with contextlib.suppress(OSError, ValueError):
            found = os.stat(name)
            keys.append((found.st_dev, found.st_ino))
        for key in keys:
            other = seen.setdefault(key, place)
            if other is not place and (len(names) < len(writes) or other in writes):
                both = f"both {other.role} and {place.role}" if other.role != place.role else f"{place.path} too"
                raise FormatError(f"{other.path}: is {both}; {_OTHER_NAME}")
        names.append((name, place))
    for folder, outer in names[: len(writes)]:
        if outer.folder and _holds(folder, os.getcwd()):
            raise FormatError(
                f"{outer.path or repr('')}: holds the working folder, which would be replaced; {_OTHER_NAME}"
            )
        for name, inner in names if outer.folder else ():
            if inner is not outer and _holds(folder, name):
                raise FormatError(
                    f"{outer.path}: {inner.role} ({inner.path}) lies in this folder, which would be replaced;"
                    f" {_OTHER_NAME}"
                )


def _holds(folder: str, name: str) -> bool:
    return os.path.commonpath([folder, name]) == folder


def check_place(path: str, kind: Kind, *, overwrite: bool, folder: bool = False) -> Identity | None:
    """Find out whether something may be written at a path, which is as ``resolve`` gives it.

    With ``overwrite`` it may replace one of its kind; a folder is of the kind if all its files are.

    Returns:
        What is there now, to be held against what is there in the end; None for nothing.

    Raises:
        FormatError: what is there is no file (or folder), is not of the kind, or may not be replaced. Says which.
    """
    found = identity(path)
    if found is None:
        return None
    wanted = stat.S_IFDIR if folder else stat.S_IFREG
    if stat.S_IFMT(os.lstat(path).st_mode) != wanted:
        raise FormatError(f"{path}: {describe(path)} is here, expected {kind.name} or nothing; {_OTHER_NAME}")
    files = _files_in(path, kind) if folder else [path]
    if not files or (not folder and not os.lstat(path).st_size):
        return found
    for file in files:
        if not kind.recognize(file):
            head = head_of(file, _SHOWN_NBYTES)
            what = f"a file of {os.path.getsize(file)} bytes that begins with {head!r}"
            holds = f"holds {os.path.basename(file)}, {what}" if folder else f"holds {what}"
            raise FormatError(f"{path}: {holds}; expected {kind.name}, anything else is never replaced: {_OTHER_NAME}")
    if not overwrite:
        raise FormatError(f"{path}: exists already; {_OTHER_NAME}, or pass overwrite (--overwrite)")
    return found


def _files_in(folder: str, kind: Kind) -> list[str]:
    """All entries of a folder, which are files; FormatError at anything else, folders among it."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if not entry.is_file(follow_symlinks=False):
            raise FormatError(
                f"{folder}: holds {entry.name}, {describe(entry.path)}, which no {kind.name.split(' ', 1)[-1]} has;"
                f" {_OTHER_NAME}"
            )
    return [entry.path for entry in found]


def make_folders(path: str) -> None:
    """Make the folder that a path lies in, and those above it. FormatError where something else is in the way."""
    parent = os.path.dirname(path) or "."
    try:
        os.makedirs(parent, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise FormatError(f"{path}: something above it is no folder; {_OTHER_NAME}") from None


class PendingOutput:
    """A file or folder in the making, at ``temporary``; a context that removes it again unless it was published."""

    def __init__(self, path: str, kind: Kind, *, overwrite: bool, folder: bool) -> None:
        self.path, self._kind, self._overwrite, self._folder = path, kind, overwrite, folder
        self._found = check_place(path, kind, overwrite=overwrite, folder=folder)
        require_space(path, 0)
        make_folders(path)
        parent, base = os.path.split(path)
        # Room for what is added to it; hidden, so that no pattern for the finished thing finds it.
        stem = os.path.join(parent, "." + os.fsencode(base)[:200].decode(errors="ignore"))
        self.temporary = f"{stem}.{secrets.token_hex(8)}.tmp"
        self._lock = -1
        self._files: list[OutputFile] = []
        if folder:
            os.mkdir(self.temporary)
        elif (lock := _take_left_over(f"{stem}.tmp", kind)) is not None:
            self.temporary, self._lock = f"{stem}.tmp", lock
        else:
            OutputFile(self.temporary).close()
        self._closed = False

    def __enter__(self) -> PendingOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def open(self, name: str = "", *, durable: bool = True) -> OutputFile:
        """The file, or a new file of the folder, to write to; closed in the end."""
        path = os.path.join(self.temporary, name) if self._folder else self.temporary
        self._files.append(OutputFile(path, durable=durable, append=not self._folder))
        return self._files[-1]

    def sync(self) -> None:
        """Bring all of it to the disk, which ``publish`` does too: for what has to be there before other steps."""
        for file in self._files:
            file.close()
        for path in [*(_files_in(self.temporary, self._kind) if self._folder else ()), self.temporary]:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                with name_in_errors(path):
                    os.fsync(fd)
            finally:
                os.close(fd)

    def publish(self) -> None:
        """Sync all of it, put it in its place, and remove what it replaces.

        Raises:
            FormatError: what is at the place is not what was there before the first byte.
            OSError: the disk says no.
        """
        self.sync()
        old = move_into_place(self.temporary, self.path, self._found)
        self._close()
        if old is None:
            sync_folder(os.path.dirname(self.path))
            return
        try:
            sync_folder(os.path.dirname(self.path))
            check_place(old, self._kind, overwrite=True, folder=True)
        except (OSError, FormatError):
            # Bring the old folder back: the disk says no, or a stranger's file has come into it.
            if _rename(old, self.path, _EXCHANGE):
                shutil.rmtree(old, ignore_errors=True)  # it holds the new one now
            raise
        _remove_files(old)

    def abandon(self) -> None:
        """Remove what was written; nothing where it is published or abandoned already."""
        if self._closed:
            return
        if self._folder:
            shutil.rmtree(self.temporary, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.temporary)
        self._close()

    def _close(self) -> None:
        self._closed = True
        for file in self._files:
            file.close()
        if self._lock >= 0:
            os.close(self._lock)


def _remove_files(folder: str) -> None:
    """Remove a folder of files, as far as that goes; what a busy network file system refuses is tried once more."""
    for _ in range(2):
        try:
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))
            return os.rmdir(folder)
        except OSError as error:
            failed = error
    raise OSError(failed.errno, f"{failed.strerror}: it was replaced, and can be removed now", folder)


def _take_left_over(path: str, kind: Kind) -> int | None:
    """Make a temporary file, or take what a killed writer of the same thing left, so that there is never more than one.

    Returns:
        Its descriptor, locked: the file is empty. None where a living writer has it, or something else is there.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | os.O_CREAT, 0o666)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(fd)
        # Whoever had it may have published it between the two calls.
        named = (found.st_dev, found.st_ino) == identity(path) and stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if named and (not found.st_size or kind.recognize(path)):
            if found.st_size:  # ext4 hurries the bytes of a file that was ever truncated to disk as it is closed
                os.ftruncate(fd, 0)
            return fd
    except BlockingIOError:
        pass
    except OSError:  # no locks here, and so nobody who uses this name
        if stat.S_ISREG(os.fstat(fd).st_mode) and not os.fstat(fd).st_size:
            os.unlink(path)
    os.close(fd)
    return None


def new_file(path: str | os.PathLike[str], kind: Kind, *, overwrite: bool) -> PendingOutput:
    """A file to be written. FormatError as in ``resolve`` and ``check_place``."""
    return PendingOutput(resolve(path), kind, overwrite=overwrite, folder=False)


def new_folder(path: str | os.PathLike[str], kind: Kind, *, overwrite: bool) -> PendingOutput:
    """A folder of files to be written. FormatError as in ``resolve`` and ``check_place``, or it holds where we are."""
    name = resolve(path, folder=True)
    require_apart([Place(name, "the output", folder=True)])
    return PendingOutput(name, kind, overwrite=overwrite, folder=True)


def write_file(path: str | os.PathLike[str], data: bytes, kind: Kind, *, overwrite: bool) -> None:
    """Write a small file whole: pages, summaries, catalogs, acknowledgements. Errors as of ``new_file``."""
    with new_file(path, kind, overwrite=overwrite) as new:
        new.open().write(data)
        new.publish()


def remove_file(path: str, found: Identity | None) -> None:
    """Remove a file for good, provided that it is what was found there before; nothing where nothing is.

    Raises:
        FormatError: something else is there now, which is left alone.
    """
    if (now := identity(path)) is None:
        return
    if now != found:
        raise _changed(path)
    os.unlink(path)
    sync_folder(os.path.dirname(path))


def move_into_place(temporary: str, path: str, found: Identity | None) -> str | None:
    """Give a file or folder its name, provided that what has the name now is what was found there before.

    Returns:
        Where the folder is that it took the place of; None for a file, which is gone, or for nothing.

    Raises:
        FormatError: something else is there now. All is left as it was.
    """
    folder = os.path.isdir(temporary)
    if found is not None and (now := identity(path)) != found:
        if now is not None:
            raise _changed(path)
        found = None
    try:
        if found is None:
            _put_in_free_place(temporary, path, folder=folder)
            return None
        if not folder:
            os.rename(temporary, path)
            return None
        if _rename(temporary, path, _EXCHANGE):
            return temporary
        os.rename(path, old := f"{temporary}.old")
        try:
            os.rename(temporary, path)
        except OSError:
            os.rename(old, path)
            raise
        return old
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        raise _changed(path) from None


def _put_in_free_place(temporary: str, path: str, *, folder: bool) -> None:
    if _rename(temporary, path, _NOREPLACE):
        return
    if folder:
        os.rename(temporary, path)  # replaces nothing but an empty folder
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise _changed(path) from None
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


def _changed(path: str) -> FormatError:
    return FormatError(
        f"{path}: something else has appeared here since this command began; it was left alone: {_OTHER_NAME}"
    )


def _rename(old: str, new: str, flags: int) -> bool:
    """``renameat2``; False where the library, the kernel or the file system does not have it."""
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
    """OSError (ENOSPC) where the disk of a path has too little room, or too few inodes; nothing need be there yet."""
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    room = os.statvfs(folder)
    free, full = room.f_bavail * room.f_frsize, os.strerror(errno.ENOSPC)
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"{full}: {nbytes:,} bytes are needed and {free:,} are free", path)
    # File systems without a fixed number of inodes say that they have none at all.
    if room.f_files and room.f_favail < files:
        raise OSError(errno.ENOSPC, f"{full}: {files:,} files are needed and {room.f_favail:,} inodes are free", path)


# ---- one writer a place ----

# What file systems answer that have no locks: Lustre mounted without them, some FUSE and NFS mounts.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def lock_file(path: str, magics: tuple[bytes, ...], *, create: bool, shared: bool = False, busy: str | None) -> int:
    """Open a file and lock it, until the descriptor is closed. What is not of this package is left alone.

    Args:
        path: of the file; a link there is refused.
        magics: what the file may begin with, all of one length; it may also be empty.
        create: make the file where there is none.
        shared: only look: keeps writers out, not other lookers, and needs no right to write.
        busy: the error where another process holds it; None waits for that process.

    Raises:
        FormatError: another process holds it, the file system knows no locks, or something else is at ``path``.
        FileNotFoundError: there is no file, and none is to be made.
    """
    # Not to wait for the other end where somebody has put a pipe there.
    access = (os.O_RDONLY if shared else os.O_RDWR) | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    while True:
        check_lock(path, magics, shared=shared)
        fd = os.open(path, access | (os.O_CREAT if create else 0), 0o666)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if busy is None else fcntl.LOCK_NB))
            check_lock(path, magics, shared=shared)
            # A writer that was done between the two calls has removed the file this lock is on.
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
            if empty:  # made by the attempt
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise FormatError(
                f"{path}: this file system has no locks ({error.strerror}), and without one two builds could write"
                " the same files; build on a local disk and copy the five files, or mount it with locks (Lustre: -o"
                " flock)"
            ) from None
        os.close(fd)


def check_lock(path: str, magics: tuple[bytes, ...], *, shared: bool = False) -> None:
    """FormatError where what is at a path is nothing that ``lock_file`` would take."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    found = head_of(path, max(map(len, magics), default=1))
    what = ""
    if not stat.S_ISREG(status.st_mode):
        what = f"{describe(path)} is here"
    elif found and not any(magic.startswith(found) for magic in magics):
        what = "a file that megatron-sft-idx did not write is here"
    elif status.st_nlink > 1 and not shared:
        what = "this file has another name too (a hard link)"
    if what:
        wanted = f"where {os.path.basename(path)} of this command would be"
        raise FormatError(f"{path}: {what}, {wanted}; move it away, or choose another name")
