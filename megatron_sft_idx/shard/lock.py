"""One writer a prefix: the lock on a build's journal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths

__all__ = ["lock_file", "lock_journal"]

# What file systems answer that have no locks: Lustre mounted without them, some FUSE and NFS mounts.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def lock_journal(paths: ShardPaths, *, create: bool, shared: bool = False, busy: str | None = None) -> int:
    """Open the journal and lock it: a living writer holds the lock, a killed one left only the file.

    Args:
        paths: of the shard.
        create: make the journal where there is none.
        shared: only look: keeps writers out, not other lookers, and needs no right to write.
        busy: the error where another process is at work here; None for a shard's.

    Returns:
        The descriptor; the lock is given up when it is closed.

    Raises:
        FormatError: another process is writing here, the file system knows no locks, or the journal is no file.
        FileNotFoundError: there is no journal, and none is to be made.
    """
    path = paths.journal
    # Not to wait for the other end where somebody has put a pipe there.
    access = (os.O_RDONLY if shared else os.O_RDWR) | os.O_CLOEXEC | os.O_NONBLOCK
    while True:
        try:
            fd = os.open(path, access | (os.O_CREAT if create else 0), 0o666)
        except IsADirectoryError:
            raise _no_file(path) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _no_file(path)
            lock_file(fd, paths, shared=shared, busy=busy)
            # A writer that was done between the two calls has removed the file this lock is on.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _no_file(path: str) -> FormatError:
    return FormatError(f"{path}: something that is no file is where the journal of the build would be; remove it")


def lock_file(fd: int, paths: ShardPaths, *, shared: bool = False, busy: str | None = None) -> None:
    """Lock an open journal. FormatError as in ``lock_journal``."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FormatError(
            busy or f"{paths.prefix}: another writer is at work here now; wait for it, or choose another prefix"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        with contextlib.suppress(OSError):
            if not os.fstat(fd).st_size:
                os.unlink(paths.journal)  # made by the attempt
        raise FormatError(
            f"{paths.prefix}: this file system has no locks ({error.strerror}), and without one two builds could write"
            " the same files; build on a local disk and copy the five files, or mount it with locks (Lustre: -o flock)"
        ) from None
