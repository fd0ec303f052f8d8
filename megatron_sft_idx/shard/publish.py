"""Publication: five files appear together, or none does.

Files are written under temporary names in the shard's own folder. ``publish`` syncs them and renames the data files,
then ``.idx``, then ``.seq.idx``, whose presence is what makes a shard. When a shard is replaced, its ``.seq.idx`` goes
first, so that no mix of old and new files ever looks like a shard. The journal is removed last: from then on nothing
of the build is left but the shard.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.storage import OutputFile, sync_folder

__all__ = ["WIDENED", "Publication", "check_free", "remove_shard"]

# Added to the temporary name of a loss file that is being rewritten with wider masks.
WIDENED = ".float32"


def check_free(paths: ShardPaths, *, overwrite: bool) -> None:
    """FormatError where any of the five files exists and may not be replaced."""
    if not overwrite and (present := paths.present()):
        raise FormatError(
            f"{paths.prefix}: {', '.join(present)} exist already;"
            " choose another prefix, or pass overwrite (--overwrite)"
        )


def remove_shard(paths: ShardPaths) -> None:
    """Remove the five files, ``.seq.idx`` first: what is left of a removal that was killed is no shard."""
    for path in reversed(paths.all):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class Publication:
    """The temporary files of one build, its journal, and the lock on its prefix.

    Args:
        paths: where the shard will be.
        overwrite: whether something may be there already.
        durable: whether to wait for the disk.

    Raises:
        FormatError: something is at the prefix, or another process is writing it.
    """

    def __init__(self, paths: ShardPaths, *, overwrite: bool, durable: bool) -> None:
        self._paths, self._overwrite, self._durable = paths, overwrite, durable
        self._files: list[OutputFile] = []
        self._process = os.getpid()
        self.closed = True
        check_free(paths, overwrite=overwrite)
        paths.folder.mkdir(parents=True, exist_ok=True)
        self.journal = self._claim()
        self.closed = False

    def _claim(self) -> OutputFile:
        """The journal, locked: a living writer holds the lock, a killed one left only the file."""
        path = self._paths.journal
        # The lock belongs to the open file description behind ``fd``; it is given up when this one is closed.
        fd = self._locked(path)
        try:
            if os.fstat(fd).st_size:
                if not self._overwrite:
                    raise FormatError(
                        f"{path}: left by a build that was interrupted; pass overwrite (--overwrite) to start anew"
                        " (its data is dropped)"
                    )
                self._remove_remains()
            journal = OutputFile(path, durable=self._durable)
        except BaseException:
            os.close(fd)
            raise
        self._lock = fd
        return journal

    def _locked(self, path: str) -> int:
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except IsADirectoryError:
                raise FormatError(f"{path}: a folder is where the journal of the build would be; remove it") from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise FormatError(
                    f"{self._paths.prefix}: another writer is at work here now; wait for it, or choose another prefix"
                ) from None
            # A writer that was done between the two calls has removed the file this lock is on.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
            os.close(fd)

    def _remove_remains(self) -> None:
        """Temporary files of a killed build; the new one does not open all of them, and may end before it does."""
        for path in self._paths.all:
            for remains in (self._paths.temporary(path), self._paths.temporary(path) + WIDENED):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(remains)

    def require_owner(self) -> None:
        """Refuse to write from a forked process: it shares the files' positions with the one that opened them."""
        if os.getpid() != self._process:
            raise FormatError(
                f"{self._paths.prefix}: this writer belongs to process {self._process} and this is a fork of it;"
                " let every process write a prefix of its own"
            )

    def own(self, file: OutputFile) -> None:
        """Make a temporary file part of this build: published or removed with it."""
        self._files.append(file)

    def replace(self, new: OutputFile, old: OutputFile) -> None:
        """Let ``new`` take the name and place of ``old``."""
        os.rename(new.path, old.path)
        self._files.remove(old)
        old.close()
        new.path = old.path

    def publish(self) -> None:
        """Sync, rename in order, sync the folder, and drop the journal.

        From the first step that cannot be taken back on, a failure leaves the rest of the files and the journal in
        place: with a replaced shard gone already, they are all there is.
        """
        for file in (*self._files, self.journal):
            file.sync()
        paths = self._paths
        check_free(paths, overwrite=self._overwrite)
        try:
            if self._overwrite:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(paths.seq_idx)
                    self._sync_folder()
            for path in paths.all:
                os.rename(paths.temporary(path), path)
            self._sync_folder()
        except BaseException:
            self._close()
            raise
        os.unlink(paths.journal)
        self._close()

    def abandon(self) -> None:
        """Remove the temporary files and the journal; nothing where it is published or abandoned already.

        In a forked process, where an object may be collected that the parent still writes with, only close.
        """
        if self.closed:
            return
        if os.getpid() != self._process:
            self._close()
            return
        for file in self._files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._paths.journal)
        self._close()

    def _sync_folder(self) -> None:
        if self._durable:
            sync_folder(self._paths.folder)

    def _close(self) -> None:
        self.closed = True
        for file in (*self._files, self.journal):
            file.close()
        os.close(self._lock)
