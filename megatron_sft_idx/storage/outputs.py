"""Output files and folders other than shards, at paths that a user gave. They appear completely or not at all.

An output ``X`` is written as ``X.building/output`` (``building``). When it is complete and synced, ``publish`` renames
it. This requires that the path is unchanged since before the first byte: nothing, something empty, or an older output
of the same ``Kind`` that may be replaced.
"""

from __future__ import annotations

import os
from types import TracebackType

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.files import BUILDING
from megatron_sft_idx.storage.building import Building, take_free
from megatron_sft_idx.storage.building_files import OUTPUT, building_of, is_whole_at, require_ours, require_short
from megatron_sft_idx.storage.local import OutputFile
from megatron_sft_idx.storage.publish import Kind, Place, check_place, identity, require_apart, require_space, resolve


def may_replace(path: str, *, overwrite: bool) -> bool:
    """Return whether an existing output at a path may be replaced, if it is of the right kind.

    Without ``overwrite``, it may if an interrupted command made it, because repeating that command must succeed.
    """
    return overwrite or is_whole_at(path)


def check_output(path: str, kind: Kind, *, overwrite: bool, folder: bool = False) -> None:
    """Check, before the work, that an output may be written. See ``new_file`` and ``new_folder`` for errors."""
    name = resolve(path, folder=folder)
    require_short(name)
    require_ours(name)
    if os.path.isdir(name + BUILDING) and building_of(name) is None:
        Building.take(name).release()  # a kill may have left it empty
    check_place(name, kind, overwrite=may_replace(name, overwrite=overwrite), folder=folder)


def places_of_output(path: str, role: str, *, folder: bool = False) -> list[Place]:
    """Return the places of an output and its building folder, for ``require_apart``."""
    return [Place(path, role, folder=folder), Place(path.rstrip("/") + BUILDING, role, folder=True)]


class PendingOutput:
    """A file or folder written at ``temporary`` and published at ``path``. See ``new_file`` and ``new_folder``.

    As a context manager it removes the written files unless they were published. A kill leaves the building folder,
    which the next writer at the path takes over.
    """

    def __init__(self, path: str, kind: Kind, *, overwrite: bool, folder: bool) -> None:
        overwrite = may_replace(path, overwrite=overwrite)
        self.path, self._kind, self._folder, self._overwrite = path, kind, folder, overwrite
        if not os.path.isdir(path + BUILDING):
            check_place(path, kind, overwrite=overwrite, folder=folder)
        require_space(path, 0, 4)
        self._building = take_free(path, overwrite=overwrite, check_old=self._check_old)
        try:
            self._replaced = {OUTPUT: check_place(path, kind, overwrite=overwrite, folder=folder)}
            self._beside: list[str] = []
            self._building.clear()
            self._building.begin({"work": f"writing {kind.name}"})
            self.temporary = self._building.path(OUTPUT)
            if folder:
                os.mkdir(self.temporary)
            else:
                OutputFile(self.temporary).close()
        except BaseException:
            self._building.release()
            raise

    def _check_old(self, folder: str) -> None:
        """Raise FormatError if an old folder about to be removed holds an unrelated file."""
        check_place(folder, self._kind, overwrite=True, folder=True)

    def __enter__(self) -> PendingOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def open(self, name: str = "") -> OutputFile:
        """Open the file, or a new file ``name`` in the folder, for writing. ``publish`` and ``abandon`` close it."""
        return self._building.open(f"{OUTPUT}/{name}" if self._folder else OUTPUT)

    def write_beside(self, suffix: str, data: bytes | None, kind: Kind) -> None:
        """Publish a small file at ``path`` + ``suffix`` together with the output, after it.

        So neither is ever next to an older version of the other. With ``data`` None, an older file of this kind is
        removed.

        Raises:
            FormatError: something else is there, or it may not be replaced.
        """
        path = self.path + suffix
        if data is None and not kind.recognize(path):
            return
        self._replaced[suffix] = check_place(path, kind, overwrite=self._overwrite)
        if data is not None:
            self._beside.append(suffix)
            self._building.open(suffix).write(data)

    def publish(self) -> None:
        """Sync the written files, rename them to ``path``, and remove the old output.

        Raises:
            FormatError: ``path`` has changed since before the first byte. It is left alone.
            OSError: an error of the disk.
        """
        present = {name: found for name, found in self._replaced.items() if found is not None}
        self._building.stage([OUTPUT, *self._beside], {name: inode for name, (_, inode) in present.items()})
        for name, found in self._replaced.items():
            if identity(target := self._building.target(name)) != found:
                raise FormatError(
                    f"{target}: something else was written here after this command began, and was not replaced; choose"
                    " another name"
                )
        if not self._folder:
            # The file may have been written to, or be another file that reuses the inode of a removed one.
            check_place(self.path, self._kind, overwrite=True)
        self._building.complete()
        self._building.finish(self._check_old)

    def abandon(self) -> None:
        """Remove the written files. Does nothing after ``publish``, or a second time."""
        self._building.discard()


def new_file(path: str | os.PathLike[str], kind: Kind, *, overwrite: bool) -> PendingOutput:
    """Begin to write a file. FormatError: see ``resolve``, ``check_place`` and ``take_free``."""
    return PendingOutput(resolve(path), kind, overwrite=overwrite, folder=False)


def new_folder(path: str | os.PathLike[str], kind: Kind, *, overwrite: bool) -> PendingOutput:
    """Begin to write a folder of files. FormatError: see ``new_file`` and ``require_apart``."""
    name = resolve(path, folder=True)
    require_apart([Place(name, "the output", folder=True)])
    return PendingOutput(name, kind, overwrite=overwrite, folder=True)


def write_file(path: str | os.PathLike[str], data: bytes, kind: Kind, *, overwrite: bool) -> None:
    """Write and publish a small file, such as a page or a summary. See ``new_file`` and ``publish`` for errors."""
    with new_file(path, kind, overwrite=overwrite) as new:
        new.open().write(data)
        new.publish()
