"""Simulate a power loss: only synced data survive in a folder."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Disk:
    """The durable content of a folder, updated by the calls that sync files and folders.

    After a power loss, a file has the bytes of its last sync, and a folder the names of its last sync. So after a
    rename without a sync, the file has its old name. If only one of the two folders was synced, the file can have both
    names.

    Attributes:
        root: path of the folder.
        files: durable bytes of each file, by inode.
        folders: durable names in each folder, and the inodes of what they name.
        images: the durable content after each sync.
    """

    root: Path
    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[str, dict[str, int]] = field(default_factory=dict)
    inodes: dict[int, str] = field(default_factory=dict)
    images: list[tuple[dict[int, bytes], dict[str, dict[str, int]], dict[int, str]]] = field(default_factory=list)

    def sync(self, path: str) -> None:
        """Record the sync of a file or folder."""
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            self.files[status.st_ino] = Path(path).read_bytes()
        else:
            names = {entry.name: entry.inode() for entry in os.scandir(path)}
            self.folders[os.path.abspath(path)] = names
            self.inodes |= {entry.inode(): entry.path for entry in os.scandir(path) if entry.is_dir()}
        self.images.append((dict(self.files), dict(self.folders), dict(self.inodes)))

    def sync_all(self) -> None:
        """Record that everything in the folder is durable."""
        for folder, _, names in os.walk(self.root):
            for name in names:
                self.sync(os.path.join(folder, name))
            self.sync(folder)
        self.images.clear()


@contextlib.contextmanager
def watched(root: Path) -> Iterator[Disk]:
    """Record syncs in a folder. Its present content counts as durable."""
    disk = Disk(root)
    disk.sync_all()
    fsync = os.fsync

    def followed(fd: int) -> None:
        fsync(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.startswith(f"{root}/") or path == str(root):
            disk.sync(path)

    os.fsync = followed
    try:
        yield disk
    finally:
        os.fsync = fsync


def images(disk: Disk, target: Callable[[int], Path], old: dict[int, Path]) -> Iterator[Path]:
    """Write the durable content after each sync to a folder. Files in ``old`` keep their inodes, as on a real disk."""
    for number, (files, folders, inodes) in enumerate(disk.images):
        folder, made = target(number), dict[int, Path]()

        def make(source: str, place: Path, files: Any = files, folders: Any = folders, inodes: Any = inodes) -> None:
            place.mkdir()
            for name, inode in folders.get(source, {}).items():
                if inode in inodes and os.path.join(source, name) == inodes[inode]:
                    make(inodes[inode], place / name)
                elif inode in made:  # noqa: B023
                    os.link(made[inode], place / name)  # noqa: B023
                elif inode in old:
                    os.link(old[inode], place / name)
                else:
                    (place / name).write_bytes(files.get(inode, b""))
                    made[inode] = place / name  # noqa: B023

        make(str(disk.root), folder)
        yield folder
