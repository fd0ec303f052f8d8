"""One writer a place: the lock on a file that a living writer holds, and that a killed one leaves without."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage.publish import describe, head_of

__all__ = ["check_lock", "lock_file"]

# What file systems answer that have no locks: Lustre mounted without them, some FUSE and NFS mounts.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def lock_file(path: str, magics: tuple[bytes, ...], *, create: bool, shared: bool = False, busy: str | None) -> int:
    """Open a file and lock it. What is under its name but is not of this package is left alone.

    Args:
        path: of the file; a link there is refused.
        magics: what the file may begin with, all of one length; it may also be empty.
        create: make the file where there is none.
        shared: only look: keeps writers out, not other lookers, and needs no right to write.
        busy: the error where another process holds it; None waits for that process.

    Returns:
        The descriptor; the lock is given up when it is closed.

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
            _lock(fd, path, shared=shared, busy=busy)
            check_lock(path, magics, shared=shared)
            # A writer that was done between the two calls has removed the file this lock is on.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.lstat(path)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def check_lock(path: str, magics: tuple[bytes, ...], *, shared: bool = False) -> None:
    """FormatError where what is at a path is nothing that ``lock_file`` would take."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path}: {describe(path)} is here, {_expected(path)}")
    found = head_of(path, max(map(len, magics), default=1))
    if found and not any(magic.startswith(found) for magic in magics):
        raise FormatError(f"{path}: a file that megatron-sft-idx did not write is here, {_expected(path)}")
    if status.st_nlink > 1 and not shared:
        raise FormatError(f"{path}: this file has another name too (a hard link), {_expected(path)}")


def _expected(path: str) -> str:
    return f"where {os.path.basename(path)} of this command would be; move it away, or choose another name"


def _lock(fd: int, path: str, *, shared: bool, busy: str | None) -> None:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if busy is None else fcntl.LOCK_NB))
    except BlockingIOError:
        raise FormatError(busy) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        with contextlib.suppress(OSError):
            if not os.fstat(fd).st_size:
                os.unlink(path)  # made by the attempt
        raise FormatError(
            f"{path}: this file system has no locks ({error.strerror}), and without one two builds could write"
            " the same files; build on a local disk and copy the five files, or mount it with locks (Lustre: -o flock)"
        ) from None
