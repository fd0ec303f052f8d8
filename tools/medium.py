"""Factors of reading speed: the medium of a file, and the memory that is available for the page cache."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_sft_idx.storage import drop_cached

MediumKind = Literal["disk", "network", "memory"]
# The file that limits the memory of a control group, in version 1 and in version 2 of control groups.
_LIMIT_1, _LIMIT_2 = "memory.limit_in_bytes", "memory.max"
_GROUPS = Path("/sys/fs/cgroup")
_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "beegfs_nodev", "wekafs", "panfs"),
    *("afs", "orangefs", "pvfs2", "glusterfs", "ocfs2", "gfs2", "9p", "virtiofs", "daos", "dvs", "quobyte"),
}


@dataclass(frozen=True)
class Medium:
    """The storage medium of a file.

    Attributes:
        filesystem: type of the file system, such as ``ext4``.
        source: its device or server.
        kind: where it stores data. File systems in user space (FUSE) count as ``network``, because most of them are.
        read_ahead_nbytes: the maximum that the kernel reads at once when one page is needed; None if unknown.
    """

    filesystem: str
    source: str
    kind: MediumKind
    read_ahead_nbytes: int | None


def medium_kind(filesystem: str) -> MediumKind:
    """Return where a file system of this type stores data."""
    if filesystem in _MEMORY:
        return "memory"
    return "network" if filesystem in _NETWORK or filesystem.startswith("fuse") else "disk"


def medium_of(path: str) -> Medium:
    """Return the medium of a file."""
    mount, device, ahead = mount_of(path), os.stat(path).st_dev, None
    # This file does not exist in a container without sysfs, or for a file system without a disk.
    with contextlib.suppress(OSError):
        setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        ahead = int(setting.read_text()) * 1024
    return Medium(mount.filesystem, mount.source, medium_kind(mount.filesystem), ahead)


class Mount(NamedTuple):
    """A mount: its folder, the type of the file system, and its device or server."""

    folder: str
    filesystem: str
    source: str


def mount_of(path: str, table: str = "/proc/self/mountinfo") -> Mount:
    """Return the mount of a path: the nearest folder above it; if several are mounted on one folder, the last."""
    real = os.path.realpath(path)
    found = Mount("", "", "")
    with open(table, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            head, _, tail = line.rstrip("\n").partition(" - ")
            names = (head.split(" ")[4], *tail.split(" ")[:2])
            # The table escapes special characters in octal, for example a blank as backslash 040.
            mount = Mount(*(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name) for name in names))
            is_above = os.path.commonpath([mount.folder, real]) == mount.folder
            if is_above and len(mount.folder) >= len(found.folder):
                found = mount
    return found


# ---- the page cache ----


def drop_cache(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Ask the kernel to drop files from the page cache. Pages that a process maps stay, and so does all of tmpfs."""
    for path in paths:
        # Sync first, because unwritten pages are not dropped; some file systems cannot sync.
        with open(path, "rb", buffering=0) as file, contextlib.suppress(OSError):
            os.fsync(file.fileno())
        drop_cached(path)


# ---- memory, and control groups ----


def available_nbytes() -> int:
    """Return the memory for the page cache: available memory, or the smallest limit of the process's control groups."""
    with open("/proc/meminfo") as file:
        found = [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    group = _limit_of_group()
    while group is not None and (group.parent / "cgroup.procs").is_file():
        text = group.read_text().strip() if group.is_file() else "max"  # the groups above it may have limits
        if text != "max":
            found.append(int(text))
        group = group.parent.parent / group.name
    return min(found)


def _limit_of_group() -> Path | None:
    """Return the file that limits the memory of this process's control group; None if there is none.

    Version 1 of control groups has a separate hierarchy for memory; version 2 has one for everything. In a container,
    only a part of the hierarchy may be mounted, although the path of the group begins at its root.
    """
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    for name, root, limit in (("memory", _GROUPS / "memory", _LIMIT_1), ("", _GROUPS, _LIMIT_2)):
        for folder in (root / paths[name].lstrip("/"), root) if name in paths else ():
            if (folder / "cgroup.procs").is_file():
                return folder / limit
    return None


class MemoryLimit(NamedTuple):
    """A control group with a limit of ``nbytes`` for its processes and the pages that they bring into the cache.

    A process enters the group by writing 0 into ``cgroup.procs`` in ``folder``.
    """

    nbytes: int
    folder: Path


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[MemoryLimit]:
    """Create a control group with little memory, to read a shard as if it were larger than memory.

    ``ulimit`` cannot do this: it limits the memory of a process, and the page cache does not belong to a process.

    Raises:
        OSError: creating a control group is not allowed; the message says why and what to do.
    """
    folder = _make_group(nbytes)
    try:
        yield MemoryLimit(nbytes, folder)
    finally:
        # A group can be removed only when its last process has ended. A leftover group is harmless.
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.02)


def _make_group(nbytes: int) -> Path:
    reason = "control groups have no memory controller here"
    limit = _limit_of_group()
    if limit is not None:
        own = limit.parent
        # In version 2, a group with processes cannot have groups with limits below it, but it can have them next to it.
        for parent in (own, own.parent) if limit.name == _LIMIT_2 else (own,):
            folder = parent / f"megatron-sft-idx-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError as error:
                reason = f"{folder}: {error.strerror}"
                continue
            try:
                # Mode r+ does not create the file: it exists only if the kernel's memory controller does.
                with open(folder / limit.name, "r+") as file:
                    file.write(str(nbytes))
                return folder
            except OSError as error:
                reason = f"{folder}: {error.strerror}"
                folder.rmdir()
    mib = nbytes >> 20
    raise OSError(
        f"no permission to make a control group here ({reason}), and ulimit does not limit the page cache; run as"
        f" root, or limit this command from outside: systemd-run --user --scope -p MemoryMax={mib}M python"
        f" tools/bench_read.py ..., or a container with --memory {mib}m"
    )
