"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import sync_folder

__all__ = ["Output", "output_file", "output_folder"]


class Output:
    """Something that is written under a name of its own beside its place, then put there by a rename.

    Attributes:
        path: the place.
        temporary: where to write until ``publish``.
    """

    def __init__(self, path: str, temporary: str, *, overwrite: bool) -> None:
        self.path, self.temporary, self._overwrite = path, temporary, overwrite
        self._closed = False

    def publish(self) -> None:
        """Sync what was written, put it in its place, sync the folder around it. The files in it are closed before.

        Raises:
            FormatError: something else appeared at the place in the meantime.
            OSError: the disk says no; what was written is still at ``temporary``.
        """
        temporary = Path(self.temporary)
        for entry in [*temporary.iterdir()] if temporary.is_dir() else [temporary]:
            _sync_file(entry)
        if temporary.is_dir():
            sync_folder(temporary)
        _check_free(self.path, overwrite=self._overwrite)
        old = self._set_aside()
        try:
            os.rename(self.temporary, self.path)
        except OSError:
            if old is not None:
                os.rename(old, self.path)
            raise
        self._closed = True
        sync_folder(Path(self.path).parent)
        if old is not None:
            shutil.rmtree(old)

    def _set_aside(self) -> str | None:
        """Move a folder that is replaced out of the way: a rename replaces files and empty folders only."""
        if not os.path.isdir(self.path):
            return None
        old = self.temporary + ".old"
        os.rename(self.path, old)
        return old

    def abandon(self) -> None:
        """Remove what was written; nothing where it is published or abandoned already."""
        if self._closed:
            return
        self._closed = True
        if os.path.isdir(self.temporary):
            shutil.rmtree(self.temporary, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.temporary)


def output_file(path: str | os.PathLike[str], *, overwrite: bool) -> Output:
    """A file to be written; an empty one is at ``temporary`` already.

    Raises:
        FormatError: something is at ``path`` and ``overwrite`` is False, or a folder is.
    """
    name = _place(path, overwrite=overwrite)
    if os.path.isdir(name):
        raise FormatError(f"{name}: a folder is there, expected the name of a file; choose another")
    temporary = _beside(name)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    return Output(name, temporary, overwrite=overwrite)


def output_folder(path: str | os.PathLike[str], *, overwrite: bool) -> Output:
    """A folder of files to be written; an empty one is at ``temporary`` already.

    Raises:
        FormatError: something is at ``path`` and ``overwrite`` is False, or a file is.
    """
    name = _place(path, overwrite=overwrite)
    if os.path.lexists(name) and not os.path.isdir(name):
        raise FormatError(f"{name}: a file is there, expected the name of a folder; choose another")
    temporary = _beside(name)
    os.mkdir(temporary)
    return Output(name, temporary, overwrite=overwrite)


def _beside(path: str) -> str:
    """A free name in the same folder, hidden; not tempfile's, whose files are for their owner alone."""
    folder, base = os.path.split(path)
    return os.path.join(folder, f".{base}.{secrets.token_hex(4)}.tmp")


def _place(path: str | os.PathLike[str], *, overwrite: bool) -> str:
    """The absolute name, its folder made, so that a change of the working folder changes nothing.

    A link is followed: what is replaced is what it leads to, on the disk where that lies.
    """
    _check_free(os.path.abspath(os.fspath(path)), overwrite=overwrite)
    name = os.path.realpath(path)
    os.makedirs(os.path.dirname(name), exist_ok=True)
    return name


def _check_free(path: str, *, overwrite: bool) -> None:
    if not overwrite and os.path.lexists(path):
        raise FormatError(f"{path}: exists already; choose another name, or pass overwrite (--overwrite)")


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
