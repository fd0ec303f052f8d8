"""``X.building``: the folder next to an output ``X`` that holds all unfinished work for it.

::

    X.building/lock        flock, held by the writer; empty
    X.building/build.json  what is being built; written first and completely; its beginning marks the folder as ours
    X.building/<suffix>    a file that will become X + suffix: .bin, .seq.idx, .source.col
    X.building/output      a file or folder that will become X itself; X + .json may go with it
    X.building/packs       log of a shard's writer with one record per written pack; items and blobs next to it are the
                           logs for images and audio
    X.building/parts/      parts of tokenization
    X.building/done.json   written when all files are complete and synced: only removals and renames are left; begins
                           like build.json

A kill leaves the folder. If it holds ``done.json``, ``finish`` does the remaining steps, and can be called repeatedly.
The next writer and ``rebuild`` call it. Otherwise nothing at ``X`` was changed, and the folder can be removed
(``discard``).

``done.json`` lists the files to rename, in order, and the files to replace or remove, by inode. If there are several,
the old version of the last file is removed first and the new one is renamed last. For a shard this is its ``.seq.idx``,
without which it does not exist.

A job with several outputs has a folder for each, and one for itself. An output with complete files is set aside: its
``done.json`` waits for that of the job, which lists all outputs and is written when all of them are complete. So either
all outputs appear or none, unless ``rebuild`` is asked to finish a single one.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.files import BUILDING
from megatron_sft_idx.storage.building_files import (
    BUILD,
    DONE,
    LOCK,
    MARK,
    OLD_OUTPUT,
    OUTPUT,
    PACKS,
    PARTS,
    REMOVED,
    Done,
    inode_at,
    is_file_name,
    is_half_finished,
    lost_files,
    read_done,
    read_json,
    require_no_lost_files,
    require_ours,
    require_short,
    target_of,
)
from megatron_sft_idx.storage.local import OutputFile, name_in_errors, sync_folder
from megatron_sft_idx.storage.publish import (
    exchange,
    identity,
    lock_file,
    make_folders,
    move_into_place,
    remove_folder,
    require_space,
)

# The work of a program that writes a shard itself. All other work has the name of a command; repeating the command
# repeats the work.
PROGRAM = "build"
_POLL_SECONDS = 0.2


class Building:
    """The folder of unfinished work for one output, and its lock. See ``take``.

    Attributes:
        output: path of the output; files of the output may add a suffix.
        folder: path of the folder.
        content: what is being built, as an interrupted or this writer passed it to ``begin``; None before that.
        durable: False skips fsync.
    """

    def __init__(self, output: str, lock: int, *, durable: bool) -> None:
        self.output, self.folder, self.durable = output, output + BUILDING, durable
        self.content: dict[str, Any] | None = None
        self._lock, self._process = lock, os.getpid()
        self._files: dict[str, OutputFile] = {}
        self._staged: tuple[list[str], dict[str, int]] = [], {}

    @classmethod
    def take(
        cls,
        output: str,
        *,
        create: bool = True,
        shared: bool = False,
        durable: bool = True,
        wait: float = 0.0,
        busy: str = "",
    ) -> Building:
        """Lock the folder of an output. The caller must end with ``finish``, ``discard`` or ``close``.

        Args:
            output: path of the output.
            create: create the folder, and its parents, if necessary.
            shared: for reading only: several readers can hold it, and no write permission is needed.
            durable: False skips fsync.
            wait: maximum number of seconds to wait for another active writer.
            busy: the message of the error if another writer is active; "" for one that contains the output.

        Raises:
            FileNotFoundError: there is no folder, and ``create`` is false.
            FormatError: a writer is active, or the folder holds something that no build creates.
        """
        folder, deadline = output + BUILDING, time.monotonic() + wait
        require_short(output)
        is_made = False
        if create:
            require_space(output, 0, 3)  # the folder, and its first two files
            make_folders(output)
        while True:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder)
                    is_made = True
            require_ours(output)
            busy = busy or f"{output}: another process is writing this output; wait for it, or choose another name"
            try:
                lock = lock_file(os.path.join(folder, LOCK), (), create=not shared, shared=shared, busy=busy)
            except FileNotFoundError:
                if create:
                    continue  # another writer has just removed the folder
                if not shared or not os.path.isdir(folder):
                    raise
                lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)  # the folder was copied here without its lock
            except FormatError:
                if time.monotonic() > deadline:
                    if is_made:
                        with contextlib.suppress(OSError):  # another writer uses it
                            os.rmdir(folder)
                    raise
                time.sleep(_POLL_SECONDS)
                continue
            self = cls(output, lock, durable=durable)
            try:
                require_ours(output)
                self.content = read_json(os.path.join(folder, BUILD))
            except BaseException:
                self.close()
                raise
            return self

    def __enter__(self) -> Building:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether the lock is released, and nothing more can be done."""
        return self._lock < 0

    @property
    def is_whole(self) -> bool:
        """Whether all files are complete, and only removals and renames are left."""
        return os.path.lexists(self.path(DONE))

    @property
    def is_done(self) -> bool:
        """Whether it ``is_whole`` and does not wait for other outputs of a job."""
        return self.is_whole and not self.done.awaits

    @property
    def done(self) -> Done:
        """Return the remaining steps. FormatError: ``done.json`` is not as ``complete`` wrote it."""
        return read_done(self.output)

    @property
    def parts(self) -> str:
        """Path of the folder for parts."""
        return self.path(PARTS)

    def has_files(self) -> bool:
        """Return whether the folder has any file of the output."""
        return any(map(is_file_name, os.listdir(self.folder)))

    def remove_torn_parts(self) -> None:
        """Remove incomplete parts that killed tasks left."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.parts):
                if name.endswith(".tmp"):
                    os.unlink(os.path.join(self.parts, name))

    def num_parts(self) -> int:
        """Return the number of parts of tokenization in the folder."""
        with contextlib.suppress(FileNotFoundError):
            return sum(name.endswith(".part") for name in os.listdir(self.parts))
        return 0

    def holds(self, content: Mapping[str, Any]) -> bool:
        """Return whether ``content`` is what is being built."""
        return self.content is not None and all(self.content.get(key) == value for key, value in content.items())

    def path(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return os.path.join(self.folder, name)

    def target(self, name: str) -> str:
        """Return the final path of a file in the folder."""
        return target_of(self.output, name)

    def begin(self, content: Mapping[str, Any]) -> None:
        """Record in ``build.json`` what is being built. Existing files in the folder stay."""
        self.content = {**MARK, **content}
        self._write_json(BUILD, self.content)

    def open(self, name: str, *, keep: bool = False) -> OutputFile:
        """Open a file in the folder. It is empty, unless ``keep`` preserves what an earlier writer left."""
        if name not in self._files:
            path = self.path(name)
            if keep and os.path.lexists(path):
                if os.lstat(path).st_nlink > 1:
                    raise FormatError(f"{path}: this file has a second name (a hard link); remove one of the two")
                self._files[name] = OutputFile(path, durable=self.durable, append=True)
            else:
                self.remove(name)
                self._files[name] = OutputFile(path, durable=self.durable)
        file = self._files[name]
        if not keep:
            file.truncate(0)
        return file

    def remove(self, name: str) -> None:
        """Remove a file of the folder, if it exists."""
        if (file := self._files.pop(name, None)) is not None:
            file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(name))

    def stage(self, files: Sequence[str], replaces: Mapping[str, int]) -> None:
        """Sync files, which ``complete`` then marks as complete.

        Args:
            files: see ``Done``.
            replaces: see ``Done``. The file that makes the output exist must come first.

        Raises:
            FormatError: a file was removed or replaced while it was written.
            OSError: an error of the disk.
        """
        is_open = {name: file for name, file in self._files.items() if file.fileno() >= 0}
        for file in is_open.values():
            if inode_at(file.path) != os.fstat(file.fileno()).st_ino:
                raise FormatError(
                    f"{file.path}: was removed or replaced while it was being written; run the command again"
                )
        for name in files:
            if name in is_open:
                is_open[name].sync()
            elif self.durable:
                _sync(self.path(name))
        self._staged = list(files), dict(replaces)

    def complete(self, outputs: Sequence[str] = (), *, awaits: bool = False) -> None:
        """Write ``done.json``. After this, only removals and renames are left. See ``Done`` for the arguments."""
        # Syncs the folder, so that with done.json the names of all files are on disk before the first rename.
        self._write_json(DONE, {**MARK, **Done(*self._staged, list(outputs), awaits)._asdict()})

    def finish(self, check_old: Callable[[str], None] = lambda folder: None) -> None:
        """Do the steps in ``done.json`` that were not done before a kill, then remove the folder and the lock.

        Args:
            check_old: raises an error if a replaced folder, whose path it gets, holds an unrelated file. If folders can
                be exchanged, the old one is then restored, and the new one is removed.

        Raises:
            FormatError: a file is missing, or its path now has something else. The rest stays, and ``finish`` can be
                called again.
            OSError: an error of the disk; likewise.
        """
        try:
            outputs = [self.output + end for end in self.done.outputs]
            # Everything is checked before the first removal, and all old files are removed before the first new one
            # appears.
            for step in (Building._check, Building._remove_replaced, Building.finish):
                for output in outputs:
                    self._of_output(output, step)
            self._remove_replaced()
            self._rename(check_old)
            for name in (OUTPUT, OLD_OUTPUT):  # an old folder
                if os.path.isdir(self.path(name)):
                    check_old(self.path(name))
                    # A half-removed folder would no longer be recognised.
                    os.rename(self.path(name), self.path(REMOVED))
            self._remove_others()
            self.remove_parts()
            # Last the files that mark the rest as ours, and show that nothing is left to do.
            for name in (BUILD, DONE):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path(name))
            self._remove_folder()
        except OSError as error:
            if not os.path.isdir(self.folder):
                raise
            said = error.strerror or str(error)
            remedy = f"the rest is complete in {self.folder}: run the same command again to finish it"
            raise OSError(error.errno, said if remedy in said else f"{said}; {remedy}", error.filename) from error
        finally:
            self.close()

    def _of_output(self, output: str, step: Callable[[Building], object]) -> None:
        """Do a step for one of several outputs of a job, unless it was finished before a kill."""
        try:
            each = Building.take(output, create=False, durable=self.durable)
        except FileNotFoundError:
            return
        with each:
            if each.is_whole:
                step(each)
            elif not each.has_files():
                each.discard()  # the rest of a finished folder
            else:
                raise FormatError(
                    f"{each.folder}: another command began to write here before this output was renamed; finish that"
                    f" command, then remove {self.folder} and run this command again"
                )

    def _check(self) -> tuple[list[str], list[str]]:
        """Check that the steps in ``done.json`` can be done.

        Returns the names of the files that still must be removed, and of the files that still must be renamed, both in
        order. See ``finish`` for errors.
        """
        done, pending = self.done, list[str]()
        require_no_lost_files(self.output)
        for name in done.files:
            staged, there, old = inode_at(self.path(name)), inode_at(self.target(name)), done.replaces.get(name)
            # After an exchange, the folder holds the old folder; or the file has both names.
            if staged is None or staged in (old, there):
                continue
            if there not in (None, old):
                raise FormatError(
                    f"{self.target(name)}: something else was written here after this command began, and was not"
                    " replaced; move it away, then run the same command again: the output is complete in"
                    f" {self.folder}"
                )
            pending.append(name)
        removed = [name for name in done.replaces if name not in done.files]
        if len(done.files) > 1 and (last := done.files[-1]) in pending and last in done.replaces:
            removed.insert(0, last)
        removed = [name for name in removed if inode_at(self.target(name)) == done.replaces[name]]
        for name in {*removed, *pending}:
            require_replaceable(self.target(name))
        return removed, pending

    def _remove_replaced(self) -> None:
        """Remove the old version of the last file, then the old files that have no new version."""
        removed, _ = self._check()
        for number, name in enumerate(removed):
            os.unlink(self.target(name))
            if not number:
                sync_folder(os.path.dirname(self.output) or ".", self.durable)

    def _rename(self, check_old: Callable[[str], None]) -> None:
        folder, replaces = os.path.dirname(self.output) or ".", self.done.replaces
        _, pending = self._check()
        for name in pending:
            if name == pending[-1] and len(pending) > 1:
                sync_folder(folder, self.durable)
            target = self.target(name)
            # An unexpected file is never replaced, even if it has only just appeared.
            expected = identity(target) if inode_at(target) == replaces.get(name) else None
            old = move_into_place(self.path(name), target, expected)
            if old is not None:
                try:
                    sync_folder(folder, self.durable)
                    check_old(old)
                except (OSError, FormatError):
                    if exchange(old, target):
                        self.discard()
                    raise
        sync_folder(folder, self.durable)

    def clear(self) -> None:
        """Remove everything except the lock. ``build.json`` is last, because it marks the rest as ours."""
        # Without done.json, partly removed files cannot be mistaken for complete ones.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(DONE))
        self._remove_others()
        self.remove_parts()
        if os.path.lexists(self.path(BUILD)):
            sync_folder(self.folder, self.durable)
            os.unlink(self.path(BUILD))
        self.content = None

    def remove_parts(self) -> None:
        """Remove the folder for parts."""
        if os.path.lexists(self.parts):
            remove_folder(self.parts)

    def clear_files(self) -> None:
        """Remove everything except the lock, ``build.json`` and parts."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(DONE))
        self._remove_others()

    def _remove_others(self) -> None:
        """Remove the files of the output and their logs."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        # First the log of packs, which claims that the packs are in the files.
        for name in sorted(os.listdir(self.folder), key=lambda name: name != PACKS):
            path = self.path(name)
            if name in (LOCK, BUILD, DONE, PARTS):
                continue
            if os.path.isdir(path) and not os.path.islink(path):
                remove_folder(path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def discard(self) -> None:
        """Remove the folder with its content. Does nothing after ``close``. A forked process only closes it."""
        if self.closed:
            return
        try:
            if os.getpid() == self._process:
                self.clear()
                self._remove_folder()
        finally:
            self.close()

    def _remove_folder(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(LOCK))
        with contextlib.suppress(OSError):  # an unrelated file that has just appeared stays
            os.rmdir(self.folder)

    def release(self) -> None:
        """``close``, and ``discard`` the folder if nothing was begun in it."""
        if not self.closed and not any(os.path.lexists(self.path(name)) for name in (BUILD, DONE)):
            self.discard()
        self.close()

    def close(self) -> None:
        """Close all files and release the lock. Files on disk stay. Can be called twice."""
        if self.closed:
            return
        for file in self._files.values():
            file.close()
        lock, self._lock = self._lock, -1
        os.close(lock)

    def require_owner(self) -> None:
        """Raise FormatError in a forked process: it shares file positions with the process that opened the files."""
        if os.getpid() != self._process:
            raise FormatError(
                f"{self.output}: this writer belongs to process {self._process}, and cannot be used in a forked"
                " process; open a separate writer, for another output, in each process"
            )

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        temporary = self.path(name + ".tmp")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        # Paths may have bytes that are not UTF-8; backslashreplace turns these into JSON escapes.
        data = json.dumps(content, ensure_ascii=False).encode(errors="backslashreplace")
        with contextlib.closing(OutputFile(temporary, durable=self.durable)) as file:
            file.write(data)
            file.sync()
        os.rename(temporary, self.path(name))
        sync_folder(self.folder, self.durable)


def take_free(
    output: str,
    *,
    overwrite: bool,
    durable: bool = True,
    wait: float = 0.0,
    check_old: Callable[[str], None] = lambda folder: None,
) -> Building:
    """Take the building folder of an output to begin new work in it; ``clear`` then removes its old content.

    Complete work of an interrupted writer is finished first, unless it can be dropped (``may_drop``). The caller must
    end with ``finish``, ``discard`` or ``release``. See ``Building.take`` and ``Building.finish`` for other arguments.

    FormatError: a writer is active there; or there are packs that a program added, or parts of tokenization, which
    cannot be removed without ``overwrite``.
    """
    while True:
        building = Building.take(output, durable=durable, wait=wait)
        try:
            if not building.is_done or (overwrite and may_drop(output)):
                if not overwrite:
                    require_removable(building)
                return building
            building.finish(check_old)
        except BaseException:
            building.close()
            raise


def may_drop(output: str) -> bool:
    """Return whether a writer that replaces the output anyway may drop a complete output of an interrupted writer."""
    return not is_half_finished(output) or bool(lost_files(output))


def require_removable(building: Building) -> None:
    """Raise FormatError if the folder has work that repeating a command would not restore, or not soon."""
    if holds_packs_of_program(building):
        raise FormatError(
            f"{building.folder}: left by an interrupted build. Recover its packs with megatron-sft-idx rebuild"
            f" {building.output}, or pass overwrite (--overwrite) to start from the beginning, which discards them"
        )
    if building.num_parts():
        raise FormatError(
            f"{building.folder}: contains parts of an interrupted preprocess run; run that command again to continue,"
            " or remove this folder"
        )


def holds_packs_of_program(building: Building) -> bool:
    """Return whether the folder has packs that a program added, which no command can recreate."""
    log = building.path(PACKS)
    return building.holds({"work": PROGRAM}) and os.path.lexists(log) and os.path.getsize(log) > 0


def require_replaceable(path: str) -> None:
    """Raise FormatError if the file at a path cannot be removed, like another user's file in a sticky folder."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    folder, user = os.stat(os.path.dirname(path) or "."), os.geteuid()
    if folder.st_mode & stat.S_ISVTX and user not in (0, status.st_uid, folder.st_uid):
        raise FormatError(
            f"{path}: belongs to another user, and in this folder only the owner of a file can replace it (sticky bit);"
            " choose another name"
        )


def _sync(path: str) -> None:
    """Wait until a file, or a folder with its files, is on disk."""
    if os.path.isdir(path):
        for name in os.listdir(path):
            _sync(os.path.join(path, name))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with name_in_errors(path):
            os.fsync(fd)
    finally:
        os.close(fd)
