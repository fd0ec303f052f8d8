"""Publication: five files appear together, or none does.

Files are written under temporary names in the shard's own folder. ``publish`` syncs them and renames the data files,
then ``.idx``, then ``.seq.idx``, whose presence is what makes a shard. When a shard is replaced, its ``.seq.idx`` goes
first, so that no mix of old and new files ever looks like a shard. The journal is removed last: from then on nothing
of the build is left but the shard.

What is replaced or removed is known to be of this package: a shard by the magic of its ``.seq.idx``, a journal by its
own, everything else by the inode that a journal names.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.header import MAGIC
from megatron_sft_idx.layout.journal import DONE, MAGICS, Head, encode_head, encode_json, read_head
from megatron_sft_idx.storage import OutputFile, require_local, sync_folder
from megatron_sft_idx.storage.lock import lock_file
from megatron_sft_idx.storage.publish import (
    MAX_NAME_NBYTES,
    describe,
    head_of,
    identity,
    make_folders,
    put,
    require_space,
    resolve,
)

__all__ = [
    "WIDENED",
    "Publication",
    "adopt_remains",
    "check_free",
    "drop_remains",
    "held",
    "is_scratch",
    "keep_scratch",
    "lock_journal",
    "read_journal",
    "remove_shard",
    "require_build",
]

# Added to the temporary name of a loss file that is being rewritten with wider masks.
WIDENED = ".float32"
# Added to the name of a journal that is being cut back.
_SHORTER = ".tmp"
_COPY_NBYTES = 1 << 20
_ANEW = "pass overwrite (--overwrite) to start anew (its data is dropped)"
_LEFT = {
    "build": f"left by a build that was interrupted; {_ANEW}, or recover its packs: megatron-sft-idx rebuild",
    "copy": f"left by a copy that was interrupted; run the same copy again, or {_ANEW}:",
    "rebuild": "left by a rebuild that was interrupted; run it again: megatron-sft-idx rebuild",
}


def lock_journal(paths: ShardPaths, *, create: bool, shared: bool = False) -> int:
    """The lock of whoever writes at a prefix, as a descriptor of the journal. Errors as ``lock_file``."""
    busy = f"{paths.prefix}: another writer is at work here now; wait for it, or choose another prefix"
    return lock_file(paths.journal, MAGICS, create=create, shared=shared, busy=busy)


def check_free(
    paths: ShardPaths,
    *,
    overwrite: bool,
    only: Collection[str] | None = None,
    any_file: bool = False,
    nbytes: int = 0,
) -> dict[str, int]:
    """Find out whether a shard may be written at a prefix, before anything is.

    Args:
        paths: of the shard.
        overwrite: whether a shard may be replaced.
        only: the files that will be written; None for all five.
        any_file: also files that are of no shard that can be recognised: a rebuild keeps them under another name.
        nbytes: what will be written at least.

    Returns:
        Inodes of the files that will be replaced, by path.

    Raises:
        FormatError: something is at one of the names, and is no file, is of no shard, or may not be replaced.
        OSError: too little space, or too few inodes.
    """
    require_local(paths.prefix, "writing a shard")
    resolve(paths.seq_idx)
    longest = os.path.basename(paths.temporary(paths.loss) + WIDENED)
    if len(os.fsencode(longest)) > MAX_NAME_NBYTES:
        raise FormatError(f"{paths.prefix}: with what is added, a name of more than {MAX_NAME_NBYTES} bytes; choose a"
                          " shorter one")  # fmt: skip
    written = paths.all if only is None else [path for path in paths.all if path in only]
    found = {path: inode for path in paths.all if (inode := _inode(path)) is not None}
    present = [path for path in written if path in found]
    if present and not overwrite:
        raise FormatError(
            f"{paths.prefix}: {', '.join(present)} exist already;"
            " choose another prefix, or pass overwrite (--overwrite)"
        )
    # Twice, since a living writer may have been taking its last steps between the looks of the first time.
    if _strangers(paths, present if not any_file else ()) and (
        strangers := _strangers(paths, present if not any_file else ())
    ):
        raise FormatError(strangers[0])
    _remove_shorter(paths, dry_run=True)
    require_space(paths.prefix, nbytes, len(written) + 1)
    return {path: found[path] for path in present}


def _strangers(paths: ShardPaths, present: Iterable[str]) -> list[str]:
    """What speaks against replacing the files that are present, and the temporary ones: a sentence each."""
    head, no_shard = read_journal(paths), head_of(paths.seq_idx, len(MAGIC)) != MAGIC
    return [
        f"{path}: a file that is of no SFT shard is here (no .seq.idx of one is beside it), and is never replaced;"
        " choose another prefix, or move it away"
        for path in present
        if no_shard and not _may_go(path, head)
    ] + [
        f"{path}: a file that no journal names is here, where a temporary file would be; choose another prefix, or move"
        " it away"
        for path in _temporaries(paths)
        if not _may_go(path, head)
    ]


def _inode(path: str) -> int | None:
    """Of a file; None for nothing. FormatError for anything else."""
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode):
            return status.st_ino
        raise FormatError(
            f"{path}: {describe(path)} is here, expected a file of a shard or nothing; choose another prefix, or"
            " move it away"
        )
    return None


def _temporaries(paths: ShardPaths) -> list[str]:
    return [*map(paths.temporary, paths.all), paths.temporary(paths.loss) + WIDENED]


def read_journal(paths: ShardPaths) -> Head | None:
    """What a journal says; None where it says nothing, or is none of this package."""
    with contextlib.suppress(FormatError, FileNotFoundError):
        if head_of(paths.journal, len(MAGICS[0])) in MAGICS:
            return Head.read(paths.journal)
    return None


def _may_go(path: str, head: Head | None) -> bool:
    """Whether what is at a path is nothing, is empty as a kill leaves it, or is a file that a journal names."""
    named = () if head is None else (*head.files.values(), *(head.done or {}).values())
    return (inode := _inode(path)) is None or inode in named or _is_empty(path)


def _is_empty(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_size == 0
    return True


def _is_only_name(path: str, inodes: Collection[int]) -> bool:
    """Whether nothing is at a path, or one of these files that has no other name (hard link), so that it may be cut."""
    return _inode(path) is None or (_inode(path) in inodes and os.lstat(path).st_nlink == 1)


def _remove_temporaries(paths: ShardPaths, head: Head | None) -> None:
    """Remove the temporary files that a journal names, and empty ones."""
    for path in _temporaries(paths):
        if _inode(path) is not None and _may_go(path, head):
            os.unlink(path)
    _remove_shorter(paths)


def _remove_shorter(paths: ShardPaths, *, dry_run: bool = False) -> None:
    """Remove what a kill left of a journal that was being cut back. FormatError where it is something else."""
    path = paths.journal + _SHORTER
    if _inode(path) is None:
        return
    if not _is_empty(path) and head_of(path, len(MAGICS[0])) not in MAGICS:
        raise FormatError(f"{path}: a file that megatron-sft-idx did not write is here; move it away")
    if not dry_run:
        os.unlink(path)


def _unlink_journal(paths: ShardPaths, lock: int) -> None:
    """Remove the journal that a lock is on, and no other."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock), os.lstat(paths.journal)):
            os.unlink(paths.journal)


def is_scratch(paths: ShardPaths) -> bool:
    """Whether the shard that is here was made as a means to another one, and is whoever made it to remove."""
    head = read_journal(paths)
    return head is not None and _is_whole_scratch(paths, head)


def _is_whole_scratch(paths: ShardPaths, head: Head) -> bool:
    return head.scratch and head.done is not None and _inode(paths.seq_idx) in head.files.values()


def keep_scratch(paths: ShardPaths) -> None:
    """From now on the shard is there to stay."""
    with held(paths):
        pass


@contextlib.contextmanager
def held(paths: ShardPaths, *, create: bool = True) -> Iterator[int]:
    """Keep writers away from a prefix where no build is half done; in the end its journal is gone.

    Yields:
        The descriptor of the lock.

    Raises:
        FormatError: another writer is at work, or was interrupted here.
    """
    lock = lock_journal(paths, create=create)
    try:
        try:
            _settle(paths, lock, overwrite=False, drops=("rebuild",))
        except BaseException:
            if not os.fstat(lock).st_size:
                _unlink_journal(paths, lock)
            raise
        try:
            yield lock
        finally:
            _unlink_journal(paths, lock)
    finally:
        os.close(lock)


def remove_shard(paths: ShardPaths) -> None:
    """Remove the five files of a shard, ``.seq.idx`` first; a removal that is killed is finished by the next writer."""
    if not any(map(os.path.lexists, paths.all)):
        return
    with held(paths):
        found = {_suffix(paths, path): inode for path in paths.all if (inode := _inode(path)) is not None}
        with contextlib.closing(OutputFile(paths.journal, keep=True)) as journal:
            journal.write(_encode_head({}, "removal", found))
        _finish_removal(paths, found.values())


def _finish_removal(paths: ShardPaths, inodes: Collection[int]) -> None:
    for path in reversed(paths.all):
        if _inode(path) in inodes:
            os.unlink(path)


def _settle(paths: ShardPaths, lock: int, *, overwrite: bool, drops: Collection[str] = ()) -> None:
    """Bring what a killed writer left to an end, and empty the journal, whose lock is held.

    Args:
        paths: of the shard.
        lock: of the journal.
        overwrite: drop what was half done; what was complete but for renames is finished forward.
        drops: what may be dropped in any case.

    Raises:
        FormatError: what is left is not for this writer to drop.
    """
    if not os.fstat(lock).st_size:
        return
    try:
        head = Head.read(paths.journal)
        assert head is not None
    except FormatError:
        # It says nothing that would make these files anybody's.
        if not overwrite or not all(map(_is_empty, _temporaries(paths))):
            raise
        head = None
    if head is not None and head.work == "removal":
        _finish_removal(paths, head.files.values())
    elif head is not None and head.done is not None:
        if not overwrite and not _is_whole_scratch(paths, head):
            raise FormatError(
                f"{paths.journal}: left by a {head.work} that was complete but for renames; finish it:"
                f" megatron-sft-idx rebuild {paths.prefix}"
            )
        _rename_all(paths, head, durable=True)
    elif head is not None and not overwrite and head.work not in drops:
        raise _left(paths, head)
    _remove_temporaries(paths, head)
    # Not before: files that no journal names are nobody's to remove.
    os.ftruncate(lock, 0)


def _left(paths: ShardPaths, head: Head) -> FormatError:
    return FormatError(f"{paths.journal}: {_LEFT[head.work]} {paths.prefix}")


def require_build(paths: ShardPaths, head: Head) -> None:
    """FormatError where what was interrupted is no build, so that no packs can be recovered."""
    if head.work != "build":
        raise _left(paths, head)


def _rename_all(paths: ShardPaths, head: Head, *, durable: bool) -> None:
    """Take the steps that are left once the journal says DONE; those taken before a kill are passed over.

    The folder is synced wherever a later step must not reach the disk before an earlier one.

    Raises:
        FormatError: something else has appeared at one of the names; the rest and the journal stay as they are.
    """
    assert head.done is not None
    pending = [path for path in paths.all if _inode(paths.temporary(path)) in head.files.values()]
    for path in pending:
        if (inode := _inode(path)) is not None and inode != head.done.get(_suffix(paths, path)):
            raise FormatError(
                f"{path}: something else has appeared here since the build began, and was left alone; move it away,"
                f" then finish the build: megatron-sft-idx rebuild {paths.prefix}"
            )

    def sync() -> None:
        if durable:
            sync_folder(paths.folder)

    if paths.seq_idx in pending and os.path.lexists(paths.seq_idx):
        os.unlink(paths.seq_idx)
        sync()
    for path in pending:
        if path == paths.seq_idx:
            sync()
        put(paths.temporary(path), path, identity(path))
    sync()


def _suffix(paths: ShardPaths, path: str) -> str:
    return path.removeprefix(paths.prefix)


def _encode_head(content: Mapping[str, Any], work: str, files: Mapping[str, int], *, scratch: bool = False) -> bytes:
    return encode_head({**content, "work": work, "files": files, **({"scratch": True} if scratch else {})})


class Publication:
    """The temporary files of one shard in the making, its journal, and the lock on its prefix.

    Args:
        paths: where the shard will be.
        content: what the journal's head says of the work.
        work: ``build``, ``copy`` or ``rebuild``.
        overwrite: whether a shard may be there already.
        durable: whether to wait for the disk.
        only: the files that are written, by path; None for all five.
        spare: further temporary files, by what is added to the temporary name of the loss file.
        scratch: the shard is a means to another one: see ``is_scratch``.
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
        spare: Collection[str] = (),
        scratch: bool = False,
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
                _settle(paths, self._lock, overwrite=overwrite, drops=drops)
            # Once more: now nobody else of this package writes here.
            self._replaced = check_free(paths, **options)
            _remove_temporaries(paths, None)
            self.journal = OutputFile(paths.journal, durable=durable, keep=True)
            self.closed = False
            names = [paths.temporary(path) for path in paths.all if only is None or path in only]
            files = {}
            for name in (*names, *(paths.temporary(paths.loss) + suffix for suffix in spare)):
                self._files[name] = OutputFile(name, durable=durable)
                inode = files[_suffix(paths, name)] = os.fstat(self._files[name].fileno()).st_ino
                self._inodes.add(inode)
            self._head = Head({}, work, files, scratch, None)
            self.journal.write(_encode_head(content, work, files, scratch=scratch))
            self.journal.sync()
            self._sync_folder()
        except BaseException:
            if self.closed:
                if not os.fstat(self._lock).st_size:
                    _unlink_journal(paths, self._lock)
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
    def take_up(cls, paths: ShardPaths, *, overwrite: bool, copied: bool = False) -> Publication:
        """What an interrupted writer left, under lock: nothing is changed, and files are opened as they are asked for.

        Args:
            paths: of the shard.
            overwrite: whether a shard that is there now may be replaced.
            copied: take the temporary files that lie beside the journal for those that it names, and name them.

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
            for path in _temporaries(paths):
                if not copied and not _is_only_name(path, self._inodes):
                    raise FormatError(
                        f"{path}: not the file that {paths.journal} names, or one that has another name too (a hard"
                        " link); recover the build where it was made, or, where all of it was copied, with"
                        f" megatron-sft-idx rebuild --copied {paths.prefix}"
                    )
            if overwrite and head.done is None:
                self._replaced = check_free(paths, overwrite=True)
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

    def open(self, path: str, suffix: str = "", *, keep: bool = False) -> OutputFile:
        """A temporary file of this build, by the name it will have; emptied unless it is to be kept."""
        name = self.paths.temporary(path) + suffix
        if name not in self._files:
            try:
                self._files[name] = OutputFile(name, durable=self.durable, keep=True)
            except FileNotFoundError:  # taken up without
                self._files[name] = OutputFile(name, durable=self.durable)
                self.name_files()
        if not keep:
            self._files[name].cut(0)
        return self._files[name]

    def close_files(self) -> None:
        """Close the temporary files, to open them again; the lock and the journal stay."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def replace(self, new: OutputFile, old: OutputFile) -> None:
        """Let ``new`` take the name and place of ``old``."""
        os.rename(new.path, old.path)
        self._files.pop(new.path)
        self._files[old.path] = new
        old.close()
        new.path = old.path

    def drop(self, path: str) -> None:
        """Do without the new file for ``path``."""
        if (file := self._files.pop(self.paths.temporary(path), None)) is not None:
            file.close()
            os.unlink(file.path)

    def cut_journal(self, nbytes: int, tail: bytes) -> None:
        """Make the journal its first ``nbytes`` and ``tail``, all at once: a kill leaves the old one or the new one."""
        self._renew_journal(b"", 0, nbytes, tail)

    def name_files(self) -> None:
        """Let the journal name the temporary files that are there now."""
        there = {path: inode for path in _temporaries(self.paths) if (inode := _inode(path)) is not None}
        files = {_suffix(self.paths, path): inode for path, inode in there.items()}
        with open(self.paths.journal, "rb") as stream:
            content = read_head(stream, self.paths.journal) | {"files": files}
            begin = stream.tell()
        self._head, self._inodes = self._head._replace(files=files), set(files.values())
        self._renew_journal(encode_head(content), begin, self.journal.nbytes, b"")

    def _renew_journal(self, head: bytes, begin: int, end: int, tail: bytes) -> None:
        old = self.journal
        _remove_shorter(self.paths)
        new = OutputFile(self.paths.journal + _SHORTER, durable=self.durable)
        new.write(head)
        for offset in range(begin, end, _COPY_NBYTES):
            new.write(old.read_at(offset, min(_COPY_NBYTES, end - offset)))
        new.write(tail)
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
        found = {path: inode for path in written if (inode := _inode(path)) is not None}
        if strange := [path for path in found if found[path] != self._replaced.get(path)]:
            raise FormatError(
                f"{paths.prefix}: {', '.join(strange)} exist already, which were not there when this was begun;"
                " choose another prefix"
            )
        # The journal is believed from here on: before it says so, the files and their names are on disk.
        self._sync_folder()
        self._head = self._head._replace(done={_suffix(paths, path): inode for path, inode in found.items()})
        self.journal.write(encode_json(DONE, self._head.done or {}))
        self.journal.sync()

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
            _rename_all(self.paths, self._head, durable=self.durable)
            _remove_temporaries(self.paths, self._head)
            if not self._head.scratch:
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
            for path in _temporaries(self.paths):
                with contextlib.suppress(FileNotFoundError):
                    if os.lstat(path).st_ino in self._inodes:
                        os.unlink(path)
            self._end_journal()
        self.close()

    def _end_journal(self) -> None:
        """Remove the journal, or leave it empty to whoever has its lock."""
        if self._borrowed:
            os.ftruncate(self._lock, 0)
        else:
            _unlink_journal(self.paths, self._lock)

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


def adopt_remains(paths: ShardPaths) -> None:
    """Let a journal name the temporary files that lie beside it, all of which were copied here.

    Raises:
        FormatError: there is no journal, or a living writer is at work here.
    """
    try:
        Publication.take_up(paths, overwrite=False, copied=True).close()
    except FileNotFoundError:
        raise FormatError(f"{paths.journal}: there is no journal; copy it here with the .tmp files beside it") from None


def drop_remains(paths: ShardPaths) -> None:
    """Remove what an interrupted writer left half done at a prefix; a shard there stays, and so does a scratch one.

    Raises:
        FormatError: a living writer is at work here.
    """
    if not os.path.lexists(paths.journal) or is_scratch(paths):
        return
    lock = lock_journal(paths, create=False)
    try:
        head = None
        with contextlib.suppress(FormatError):
            head = Head.read(paths.journal)
        if head is not None and head.work == "removal":
            _finish_removal(paths, head.files.values())
        _remove_temporaries(paths, head)
        _unlink_journal(paths, lock)
    finally:
        os.close(lock)
