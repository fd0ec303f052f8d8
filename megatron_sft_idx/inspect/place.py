"""Where a shard lies, what of it is cached there, and the memory there is to keep it in, which a group may limit."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from megatron_sft_idx import _native
from megatron_sft_idx.storage import drop_cached

DiskKind = Literal["disk", "network", "memory"]
# Of the two versions of control groups, the file that limits memory.
_LIMIT_1, _LIMIT_2 = "memory.limit_in_bytes", "memory.max"
_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "beegfs_nodev", "wekafs", "panfs"),
    *("afs", "orangefs", "pvfs2", "glusterfs", "ocfs2", "gfs2", "9p", "virtiofs", "daos", "dvs", "quobyte"),
}


@dataclass(frozen=True)
class ShardPlace:
    """Where a shard lies.

    Attributes:
        filesystem: its type.
        source: device or server.
        kind: what that comes to; file systems in user space count as network, most of them are.
        read_ahead_nbytes: most that the kernel reads at once where one page is needed; None where unknown.
        memory_nbytes: what the page cache may take here, limits of the control group heeded; None where unknown.
    """

    filesystem: str
    source: str
    kind: DiskKind
    read_ahead_nbytes: int | None
    memory_nbytes: int | None


def kind_of(filesystem: str) -> DiskKind:
    """Where a file system of this type keeps its bytes."""
    if filesystem in _MEMORY:
        return "memory"
    return "network" if filesystem in _NETWORK or filesystem.startswith("fuse") else "disk"


def find_place(path: str) -> ShardPlace:
    """Where a file lies."""
    mount, device, ahead = mount_of(path), os.stat(path).st_dev, None
    # Not there in a container without sysfs, nor of a file system without a disk.
    with contextlib.suppress(OSError):
        setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        ahead = int(setting.read_text()) * 1024
    return ShardPlace(mount.filesystem, mount.source, kind_of(mount.filesystem), ahead, _memory_nbytes())


# ---- the mount table ----


class Mount(NamedTuple):
    """One line of ``/proc/self/mountinfo``.

    Attributes:
        folder: where it is mounted.
        root: the folder of the file system that is mounted there.
        filesystem: its type.
        source: its device or server.
        options: of the file system.
    """

    folder: str
    root: str
    filesystem: str
    source: str
    options: list[str]


def mounts(table: str = "/proc/self/mountinfo") -> Iterator[Mount]:
    """All mounts, in the kernel's order."""
    with open(table, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            head, _, tail = line.rstrip("\n").partition(" - ")
            names = [*head.split(" ")[3:5], *tail.split(" ")[:2]]
            # The table has a backslash and 040 for a blank.
            root, folder, filesystem, source = (
                re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name) for name in names
            )
            yield Mount(folder, root, filesystem, source, tail.split(" ")[2].split(","))


def mount_of(path: str, table: str = "/proc/self/mountinfo") -> Mount:
    """The mount that a path lies on: that of the longest folder above it, and of several there the last one."""
    real = os.path.realpath(path)
    above = [mount for mount in mounts(table) if os.path.commonpath([mount.folder, real]) == mount.folder]
    return max(reversed(above), key=lambda mount: len(mount.folder))


# ---- the page cache ----


def drop_cache(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Ask the system to forget what it holds of files. Pages that some process maps stay; so does all of tmpfs."""
    for path in paths:
        # What is not on the disk yet is not forgotten; not every file system syncs.
        with open(path, "rb", buffering=0) as file, contextlib.suppress(OSError):
            os.fsync(file.fileno())
        drop_cached(path)


def cached_nbytes(paths: Iterable[str]) -> int | None:
    """Bytes of files that lie in the page cache; None where the system does not tell this user."""
    total = 0
    for path in paths:
        if os.stat(path).st_uid != os.geteuid() and not os.access(path, os.W_OK):
            return None
        with open(path, "rb", buffering=0) as file:
            if not (nbytes := os.fstat(file.fileno()).st_size):
                continue
            with mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ) as mapped:
                view = np.frombuffer(mapped, np.uint8)
                total += _native.resident_nbytes(view)
                del view
    return total


# ---- memory, and control groups ----


def _memory_nbytes() -> int | None:
    """What the page cache may take, limits of the control groups this process is in heeded; None where unknown."""
    with open("/proc/meminfo") as file:
        found = [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    if (group := _control_group("memory")) is not None:
        folder, name = group
        while (limit := folder / name).is_file():
            text = limit.read_text().strip()
            if text != "max":
                found.append(int(text))
            folder = folder.parent
    return min(found, default=None)


def _control_group(controller: str) -> tuple[Path, str] | None:
    """The folder of this process's control group, and its file that limits memory; None where there is none.

    Args:
        controller: such as ``memory``. Version 1 has a hierarchy for each, version 2 one for all.
    """
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    for name, filesystem, limit in ((controller, "cgroup", _LIMIT_1), ("", "cgroup2", _LIMIT_2)):
        for mount in mounts():
            fits = mount.filesystem == filesystem and (not name or name in mount.options)
            # In a container the mount may show a part of the hierarchy, and the path be of the whole of it.
            for below in (os.path.relpath(paths[name], mount.root), ".") if name in paths and fits else ():
                if not below.startswith("..") and (folder := Path(mount.folder, below)).is_dir():
                    return folder, limit
    return None


class MemoryLimit(NamedTuple):
    """A control group whose processes, and the pages they bring into the cache, take no more than ``nbytes`` together.

    A process writes 0 into ``cgroup.procs`` in its ``folder`` to enter.
    """

    nbytes: int
    folder: Path


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[MemoryLimit]:
    """A control group with little memory, to read a shard as if it were larger than memory.

    ``ulimit`` cannot do that: its limits are of a process's own memory, and the page cache belongs to nobody.

    Raises:
        OSError: none may be made here; it says why, and what to do.
    """
    folder = _make_group(nbytes)
    try:
        yield MemoryLimit(nbytes, folder)
    finally:
        # A process that is still ending keeps it a moment longer; a group left does no harm.
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.02)


def _make_group(nbytes: int) -> Path:
    reason = "there is no memory controller of control groups"
    if (found := _control_group("memory")) is not None:
        own, name = found
        # In version 2 a group that has processes has no limited groups below it, but may have them beside it.
        for parent in (own, own.parent) if name == _LIMIT_2 else (own,):
            folder = parent / f"megatron-sft-idx-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError as error:
                reason = f"{folder}: {error.strerror}"
                continue
            try:
                # Not to be made: the kernel makes it with the folder where the controller is there.
                with open(folder / name, "r+") as file:
                    file.write(str(nbytes))
                return folder
            except OSError as error:
                reason = f"{folder}: {error.strerror}"
                folder.rmdir()
    mib = nbytes >> 20
    raise OSError(
        f"no control group may be made here ({reason}), and ulimit does not limit the page cache; run as root, or"
        f" limit this command from outside: systemd-run --user --scope -p MemoryMax={mib}M megatron-sft-idx bench-read"
        f" ..., or a container with --memory {mib}m"
    )
