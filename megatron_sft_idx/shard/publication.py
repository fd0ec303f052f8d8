"""Publication: the files of a shard appear together, or none does.

Files are written under temporary names in the shard's own folder. ``publish`` syncs them and renames the data files,
then ``.idx``, then columns, then ``.seq.idx``, whose presence is what makes a shard. When a shard is replaced, its
``.seq.idx`` goes first, then its columns, so that no mix of old and new files ever looks like a shard. The
journal is removed last: from then on nothing of the build is left but the shard.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.journal import DONE, MAGICS, Head, encode_head, encode_json, read_head
from megatron_sft_idx.shard.prefix import (
    SHORTER,
    check_free,
    empty_journal,
    inode_of,
    is_only_name,
    lock_journal,
    named_by,
    remove_shorter,
    remove_temporaries,
    rename_all,
    settle,
    suffix_of,
    unlink_locked,
)
from megatron_sft_idx.storage import OutputFile, open_regular, sync_folder
from megatron_sft_idx.storage.publish import lock_file, make_folders

__all__ = ["Publication"]

_COPY_NBYTES = 1 << 20


class Publication:
    """The temporary files of one shard in the making, its journal, and the lock on its prefix.

    Args:
        paths: where the shard will be, with the columns that it will have.
        content: what the journal's head says of the work.
        work: ``build``, ``copy`` or ``rebuild``.
        overwrite: whether a shard may be there already.
        durable: whether to wait for the disk.
        only: the files that are written, by path, and columns that are not among ``paths`` and go; None for all, and
            the columns of a shard that is replaced go with it.
        nbytes: what will be written at least, for which room is looked for.
        drops: what half done work may be dropped without leave to overwrite.
        lock: of the journal, where the caller has it already (``held``); the files at the prefix are then any files.

    Raises:
        FormatError: something is at the prefix, or another process is writing it.
        OSError: the disk says no, or will.
    """

    def __init__(
        self,
        paths: ShardPaths,
        content: Mapping[str, Any],
        *,
        work: str = "build",
        overwrite: bool,
        durable: bool = True,
        only: Collection[str] | None = None,
        nbytes: int = 0,
        drops: Collection[str] = (),
        lock: int | None = None,
    ) -> None:
        self._set(paths, durable, borrowed=lock is not None)
        options: dict[str, Any] = {"overwrite": overwrite, "only": only, "any_file": lock is not None, "nbytes": nbytes}
        check_free(paths, **options)
        make_folders(paths.prefix)
        self._lock = lock_journal(paths, create=True) if lock is None else os.dup(lock)
        try:
            if lock is None:
                settle(paths, self._lock, overwrite=overwrite, drops=drops)
            # Once more: now nobody else of this package writes here.
            self._replaced = check_free(paths, **options)
            remove_temporaries(paths, None)
            self.journal = OutputFile(paths.journal, durable=durable, keep=True)
            self.closed = False
            names = [paths.temporary(path) for path in paths.all if only is None or path in only]
            files = {}
            for name in names:
                self._files[name] = OutputFile(name, durable=durable)
                inode = files[suffix_of(paths, name)] = os.fstat(self._files[name].fileno()).st_ino
                self._inodes.add(inode)
            self._head = Head({}, work, files, None)
            self.journal.write(encode_head({**content, "work": work, "overwrite": overwrite, "files": files}))
            self.journal.sync()
            self._sync_folder()
        except BaseException:
            if self.closed:
                if not os.fstat(self._lock).st_size:
                    unlink_locked(paths.journal, self._lock)
                os.close(self._lock)
            self.abandon()
            raise

    def _set(self, paths: ShardPaths, durable: bool, *, borrowed: bool) -> None:
        self.paths, self.durable, self._borrowed = paths, durable, borrowed
        self._files: dict[str, OutputFile] = {}
        self._inodes: set[int] = set()
        self._process = os.getpid()
        self.closed = True

    @classmethod
    def take_up(
        cls, paths: ShardPaths, *, overwrite: bool, copied: bool = False, only: Collection[str] | None = None
    ) -> Publication:
        """What an interrupted writer left, under lock: nothing is changed, and files are opened as they are asked for.

        Args:
            paths: of the shard.
            overwrite: whether a shard that is there now may be replaced.
            copied: take the temporary files that lie beside the journal for those that it names, and name them.
            only: as when it was begun.

        Raises:
            FileNotFoundError: there is no journal.
            CorruptShardError: its head is torn.
            FormatError: a living writer is at work, or a temporary file is not the one that the journal names.
        """
        self = cls.__new__(cls)
        self._set(paths, durable=True, borrowed=False)
        self._lock = lock_journal(paths, create=False)
        try:
            head = Head.read(paths.journal)
            if head is None:
                raise FileNotFoundError(paths.journal)
            self._head, self._inodes = head, set(head.files.values())
            self.paths = paths = named_by(paths, head)
            for path in paths.unpublished.all:
                if not copied and not is_only_name(path, self._inodes):
                    raise FormatError(
                        f"{path}: not the file that {paths.journal} names, or one that has another name too (a hard"
                        " link); recover the build where it was made, or, where all of it was copied, with"
                        f" megatron-sft-idx rebuild --copied {paths.prefix}"
                    )
            if overwrite and head.done is None:
                self._replaced = check_free(paths, overwrite=True, only=only)
            else:
                self._replaced = {}
            self.journal = OutputFile(paths.journal, keep=True)
        except BaseException:
            os.close(self._lock)
            raise
        self.closed = False
        if copied:
            self.name_files()
        return self

    def require_owner(self) -> None:
        """Refuse to write from a forked process: it shares the files' positions with the one that opened them."""
        if os.getpid() != self._process:
            raise FormatError(
                f"{self.paths.prefix}: this writer belongs to process {self._process} and this is a fork of it;"
                " let every process write a prefix of its own"
            )

    def open(self, path: str, *, keep: bool = False) -> OutputFile:
        """A temporary file of this build, by the name it will have; emptied unless it is to be kept."""
        name = self.paths.temporary(path)
        if name not in self._files:
            try:
                self._files[name] = OutputFile(name, durable=self.durable, keep=True)
            except FileNotFoundError:  # taken up without
                self._files[name] = OutputFile(name, durable=self.durable)
                self.name_files()
        if not keep:
            self._files[name].cut(0)
        return self._files[name]

    def drop(self, path: str) -> None:
        """Do without the new file for ``path``."""
        if (file := self._files.pop(self.paths.temporary(path), None)) is not None:
            file.close()
            os.unlink(file.path)

    def name_files(self) -> None:
        """Let the journal name the temporary files that are there now."""
        there = {path: inode for path in self.paths.unpublished.all if (inode := inode_of(path)) is not None}
        files = {suffix_of(self.paths, path): inode for path, inode in there.items()}
        with open_regular(self.paths.journal) as stream:
            content = read_head(stream, self.paths.journal) | {"files": files}
            begin = stream.tell()
        self._head, self._inodes = self._head._replace(files=files), set(files.values())
        old, end = self.journal, self.journal.nbytes
        remove_shorter(self.paths)
        new = OutputFile(self.paths.journal + SHORTER, durable=self.durable)
        new.write(encode_head(content))
        for offset in range(begin, end, _COPY_NBYTES):
            new.write(old.read_at(offset, min(_COPY_NBYTES, end - offset)))
        new.sync()
        lock = lock_file(new.path, MAGICS, create=False, busy="")
        os.rename(new.path, old.path)
        new.path = old.path
        old.close()
        os.close(self._lock)
        self.journal, self._lock = new, lock

    def complete(self) -> None:
        """Sync all files and say in the journal that they are complete: from here on only renames are left.

        Raises:
            FormatError: a file has appeared at the prefix, or another one than was there.
        """
        paths = self.paths
        written = [path for path in paths.all if paths.temporary(path) in self._files]
        for path in written:
            self._files[paths.temporary(path)].sync()
        goes = [path for path in self._replaced if path not in paths.all]
        found = {path: inode for path in (*written, *goes) if (inode := inode_of(path)) is not None}
        if strange := [path for path in found if found[path] != self._replaced.get(path)]:
            raise FormatError(
                f"{paths.prefix}: {', '.join(strange)} exist already, which were not there when this was begun;"
                " choose another prefix"
            )
        # The journal is believed from here on: before it says so, the files and their names are on disk.
        self._sync_folder()
        self._head = self._head._replace(done={suffix_of(paths, path): inode for path, inode in found.items()})
        self.journal.write(encode_json(DONE, self._head.done or {}))
        self.journal.sync()

    def set_aside(self) -> None:
        """``complete``, and leave the shard to ``publish_all``: under temporary names, whole, its lock given up."""
        self.complete()
        self.close()

    def publish(self) -> None:
        """``complete``, then ``finish``."""
        self.complete()
        self.finish()

    def finish(self) -> None:
        """Take the steps that are left once the journal says DONE.

        A failure leaves the rest of the files and the journal in place: with a replaced shard gone already, they are
        all there is.
        """
        try:
            rename_all(self.paths, self._head, durable=self.durable)
            remove_temporaries(self.paths, self._head)
            self._end_journal()
        finally:
            self.close()

    def abandon(self) -> None:
        """Remove the temporary files and the journal; nothing where it is published or abandoned already.

        In a forked process, where an object may be collected that the parent still writes with, only close.
        """
        if self.closed:
            return
        if os.getpid() == self._process:
            for path in self.paths.unpublished.all:
                with contextlib.suppress(FileNotFoundError):
                    if os.lstat(path).st_ino in self._inodes:
                        os.unlink(path)
            self._end_journal()
        self.close()

    def _end_journal(self) -> None:
        """Remove the journal, or leave it empty to whoever has its lock."""
        if self._borrowed:
            empty_journal(self.paths, self._lock)
        else:
            unlink_locked(self.paths.journal, self._lock)

    def close(self) -> None:
        """Close all files and give up the lock; what is on disk stays. May be called twice."""
        if self.closed:
            return
        self.closed = True
        for file in (*self._files.values(), self.journal):
            file.close()
        os.close(self._lock)

    def _sync_folder(self) -> None:
        if self.durable:
            sync_folder(self.paths.folder)
