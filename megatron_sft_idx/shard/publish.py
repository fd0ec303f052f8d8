"""Publication: five files appear together, or none does.

Files are written under temporary names in the shard's own folder. ``publish`` syncs them and renames the data files,
then ``.idx``, then ``.seq.idx``, whose presence is what makes a shard. When a shard is replaced, its ``.seq.idx`` goes
first, so that no mix of old and new files ever looks like a shard. The journal is removed last: from then on nothing
of the build is left but the shard.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.journal import DONE, encode_block
from megatron_sft_idx.shard.lock import lock_file, lock_journal
from megatron_sft_idx.storage import OutputFile, require_local, sync_folder

__all__ = ["WIDENED", "Publication", "check_free", "remove_shard", "remove_temporaries"]

# Added to the temporary name of a loss file that is being rewritten with wider masks.
WIDENED = ".float32"
# Added to the name of a journal that is being cut back.
_SHORTER = ".tmp"
_COPY_NBYTES = 1 << 20


def check_free(paths: ShardPaths, *, overwrite: bool) -> None:
    """FormatError where any of the five files exists and may not be replaced, or where none can be written."""
    require_local(paths.prefix, "writing a shard")
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


def remove_temporaries(paths: ShardPaths) -> None:
    """Remove the temporary files of a build that nobody will take up; the journal stays, and with it the lock."""
    for path in map(paths.temporary, paths.all):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    _remove_strays(paths)


def _remove_strays(paths: ShardPaths) -> None:
    """What a kill may have left half written, and what was taken up went on without."""
    for path in (paths.temporary(paths.loss) + WIDENED, paths.journal + _SHORTER):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class Publication:
    """The temporary files of one build, its journal, and the lock on its prefix.

    Args:
        paths: where the shard will be.
        overwrite: whether something may be there already.
        durable: whether to wait for the disk.
        take_up: go on with what an interrupted build left, rather than begin anew; the journal is kept.

    Raises:
        FormatError: something is at the prefix, or another process is writing it.
        FileNotFoundError: there is no journal to take up.
    """

    def __init__(self, paths: ShardPaths, *, overwrite: bool, durable: bool, take_up: bool = False) -> None:
        self.paths, self.durable = paths, durable
        self._overwrite = overwrite
        self._files: list[OutputFile] = []
        self._process = os.getpid()
        self.closed = True
        if not take_up:
            check_free(paths, overwrite=overwrite)
            paths.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_journal(paths, create=not take_up)
        try:
            if not take_up:
                self._drop_remains()
            self.journal = OutputFile(paths.journal, durable=durable, keep=True)
        except BaseException:
            os.close(self._lock)
            raise
        self.closed = False

    def _drop_remains(self) -> None:
        """Temporary files of a killed build; the new one does not open all of them, and may end before it does."""
        if os.fstat(self._lock).st_size and not self._overwrite:
            raise FormatError(
                f"{self.paths.journal}: left by a build that was interrupted; pass overwrite (--overwrite) to start"
                f" anew (its data is dropped), or recover its packs: megatron-sft-idx rebuild {self.paths.prefix}"
            )
        # In this order nobody finds a journal that speaks of files which are gone.
        os.ftruncate(self._lock, 0)
        remove_temporaries(self.paths)

    def require_owner(self) -> None:
        """Refuse to write from a forked process: it shares the files' positions with the one that opened them."""
        if os.getpid() != self._process:
            raise FormatError(
                f"{self.paths.prefix}: this writer belongs to process {self._process} and this is a fork of it;"
                " let every process write a prefix of its own"
            )

    def open(self, path: str, suffix: str = "", *, keep: bool = False) -> OutputFile:
        """A temporary file of this build, by the name it will have: published or removed with the others."""
        name = self.paths.temporary(path) + suffix
        if not keep:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        file = OutputFile(name, durable=self.durable, keep=keep)
        self._files.append(file)
        return file

    def close_files(self) -> None:
        """Close the temporary files, to open them again; the lock and the journal stay."""
        for file in self._files:
            file.close()
        self._files = []

    def replace(self, new: OutputFile, old: OutputFile) -> None:
        """Let ``new`` take the name and place of ``old``."""
        os.rename(new.path, old.path)
        self._files.remove(old)
        old.close()
        new.path = old.path

    def cut_journal(self, nbytes: int, tail: bytes) -> None:
        """Make the journal its first ``nbytes`` and ``tail``, all at once: a kill leaves the old one or the new one."""
        old = self.journal
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.paths.journal + _SHORTER)
        new = OutputFile(self.paths.journal + _SHORTER, durable=self.durable)
        for offset in range(0, nbytes, _COPY_NBYTES):
            new.write(old.read_at(offset, min(_COPY_NBYTES, nbytes - offset)))
        new.write(tail)
        new.sync()
        lock_file(new.fileno(), self.paths)
        os.rename(new.path, old.path)
        new.path = old.path
        old.close()
        os.close(self._lock)
        self.journal, self._lock = new, os.dup(new.fileno())

    def publish(self) -> None:
        """Sync all files, say in the journal that they are complete, and ``finish``.

        Raises:
            FormatError: a shard has appeared at the prefix that may not be replaced.
        """
        for file in self._files:
            file.sync()
        check_free(self.paths, overwrite=self._overwrite)
        # The journal is believed from here on: before it says so, the files and their names are on disk.
        self._sync_folder()
        self.journal.write(encode_block(DONE, np.empty((0, 2), np.uint32)))
        self.journal.sync()
        self.finish()

    def finish(self) -> None:
        """Take the steps that are left once the journal says DONE; those taken before a kill are passed over.

        A failure leaves the rest of the files and the journal in place: with a replaced shard gone already, they are
        all there is. The folder is synced wherever a later step must not reach the disk before an earlier one.
        """
        paths = self.paths
        try:
            if os.path.lexists(paths.temporary(paths.seq_idx)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(paths.seq_idx)
                    self._sync_folder()
            for path in paths.all:
                if path == paths.seq_idx:
                    self._sync_folder()
                if os.path.lexists(paths.temporary(path)) or not os.path.lexists(path):
                    os.rename(paths.temporary(path), path)
            self._sync_folder()
        except BaseException:
            self.close()
            raise
        _remove_strays(paths)
        os.unlink(paths.journal)
        self.close()

    def abandon(self) -> None:
        """Remove the temporary files and the journal; nothing where it is published or abandoned already.

        In a forked process, where an object may be collected that the parent still writes with, only close.
        """
        if self.closed:
            return
        if os.getpid() == self._process:
            remove_temporaries(self.paths)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.paths.journal)
        self.close()

    def close(self) -> None:
        """Close all files and give up the lock; what is on disk stays. May be called twice."""
        if self.closed:
            return
        self.closed = True
        for file in (*self._files, self.journal):
            file.close()
        os.close(self._lock)

    def _sync_folder(self) -> None:
        if self.durable:
            sync_folder(self.paths.folder)
