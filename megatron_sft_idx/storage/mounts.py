"""Which file system a path lies on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Mount", "mount_of", "mounts"]


class Mount(NamedTuple):
    """A line of ``/proc/self/mountinfo``.

    Attributes:
        folder: where it is mounted.
        root: what of the file system is mounted there.
        filesystem: its type.
        source: its device, or what stands for one.
        options: of the file system.
    """

    folder: str
    root: str
    filesystem: str
    source: str
    options: list[str]


def mounts(table: str = "/proc/self/mountinfo") -> Iterator[Mount]:
    """What is mounted, as the kernel lists it."""
    with open(table, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            head, _, tail = line.rstrip("\n").partition(" - ")
            (_, _, _, root, folder), (filesystem, source, options) = head.split(" ")[:5], tail.split(" ")[:3]
            yield Mount(_unescaped(folder), _unescaped(root), filesystem, _unescaped(source), options.split(","))


def _unescaped(text: str) -> str:
    """A blank is a backslash and 040 there."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def mount_of(path: str, table: str = "/proc/self/mountinfo") -> Mount:
    """The mount a path lies on: of the longest folder above it, the last one."""
    real = os.path.realpath(path)
    above = [mount for mount in mounts(table) if os.path.commonpath([mount.folder, real]) == mount.folder]
    return max(reversed(above), key=lambda mount: len(mount.folder))
