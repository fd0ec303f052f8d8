"""The limits of read speed: the medium of a file, and the memory available for its pages."""

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
    """The medium that a file is stored on.

    Attributes:
        filesystem: type of the file system, such as ``ext4``.
        source: its device or server.
        kind: where it keeps its bytes. A file system in user space (FUSE) counts as ``network``, since most are that.
        read_ahead_nbytes: the most that the kernel reads at once when one page is needed; None where unknown.
    """

    filesystem: str
    source: str
    kind: MediumKind
    read_ahead_nbytes: int | None


def medium_kind(filesystem: str) -> MediumKind:
    """Return the kind of medium of a file system type."""
    if filesystem in _MEMORY:
        return "memory"
    return "network" if filesystem in _NETWORK or filesystem.startswith("fuse") else "disk"


def medium_of(path: str) -> Medium:
    """Return the medium that stores a file."""
    mount, device, ahead = mount_of(path), os.stat(path).st_dev, None
    # A container without sysfs does not have this file, nor does a file system without a disk.
    with contextlib.suppress(OSError):
        setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        ahead = int(setting.read_text()) * 1024
    return Medium(mount.filesystem, mount.source, medium_kind(mount.filesystem), ahead)


class Mount(NamedTuple):
    """The mount point of a file system, its type, and its device or server."""

    folder: str
    filesystem: str
    source: str


def mount_of(path: str, table: str = "/proc/self/mountinfo") -> Mount:
    """Return the mount of a path: the nearest mounted folder above it, and the last mount on that folder."""
    real = os.path.realpath(path)
    found = Mount("", "", "")
    with open(table, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            head, _, tail = line.rstrip("\n").partition(" - ")
            names = (head.split(" ")[4], *tail.split(" ")[:2])
            # The table has a backslash and 040 for a blank.
            mount = Mount(*(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name) for name in names))
            is_above = os.path.commonpath([mount.folder, real]) == mount.folder
            if is_above and len(mount.folder) >= len(found.folder):
                found = mount
    return found


# ---- the page cache ----


def drop_cache(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Ask the kernel to drop files from the page cache. Pages that some process maps stay, and so do all of tmpfs."""
    for path in paths:
        # Pages that are not on the disk yet are not dropped; some file systems cannot sync.
        with open(path, "rb", buffering=0) as file, contextlib.suppress(OSError):
            os.fsync(file.fileno())
        drop_cached(path)


# ---- memory, and control groups ----


def available_nbytes() -> int:
    """Return the memory that the page cache can use: available memory, or the lowest limit of our control groups."""
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
    """The file that limits the memory of this process's control group; None where there is none.

    Version 1 of control groups has a hierarchy for memory, version 2 one for all. In a container only a part of the
    hierarchy may be mounted, while the path of the group begins at its root.
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
    """A control group whose processes, and the pages they bring into the cache, take no more than ``nbytes`` together.

    A process writes 0 into ``cgroup.procs`` in its ``folder`` to enter.
    """

    nbytes: int
    folder: Path


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[MemoryLimit]:
    """A control group with little memory, in which a shard is read as if it were larger than memory.

    ``ulimit`` cannot do that: it limits a process's own memory, and the page cache belongs to no process.

    Raises:
        OSError: no control group may be made; the message says why, and what to do.
    """
    folder = _make_group(nbytes)
    try:
        yield MemoryLimit(nbytes, folder)
    finally:
        # A group can be removed only when its last process has ended. One that stays does no harm.
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.02)


def _make_group(nbytes: int) -> Path:
    reason = "there is no memory controller of control groups"
    limit = _limit_of_group()
    if limit is not None:
        own = limit.parent
        # In version 2, a group with processes has no limited groups below it, but can have limited siblings.
        for parent in (own, own.parent) if limit.name == _LIMIT_2 else (own,):
            folder = parent / f"megatron-sft-idx-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError as error:
                reason = f"{folder}: {error.strerror}"
                continue
            try:
                # Mode r+, as this file must not be made: it is there if the kernel's memory controller is.
                with open(folder / limit.name, "r+") as file:
                    file.write(str(nbytes))
                return folder
            except OSError as error:
                reason = f"{folder}: {error.strerror}"
                folder.rmdir()
    mib = nbytes >> 20
    raise OSError(
        f"no control group may be made here ({reason}), and ulimit does not limit the page cache; run as root, or"
        f" limit this command from outside: systemd-run --user --scope -p MemoryMax={mib}M python tools/bench_read.py"
        f" ..., or a container with --memory {mib}m"
    )
