"""Where a shard lies, and the memory there is to keep it in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_sft_idx.storage.mounts import Mount, mount_of, mounts

__all__ = ["Kind", "Place", "control_group", "find_place", "kind_of", "memory_nbytes"]

Kind = Literal["disk", "network", "memory"]
_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "beegfs_nodev", "wekafs", "panfs"),
    *("afs", "orangefs", "pvfs2", "glusterfs", "ocfs2", "gfs2", "9p", "virtiofs", "daos", "dvs", "quobyte"),
}


@dataclass(frozen=True)
class Place:
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
    kind: Kind
    read_ahead_nbytes: int | None
    memory_nbytes: int | None


def kind_of(filesystem: str) -> Kind:
    """Where a file system of this type keeps its bytes."""
    if filesystem in _MEMORY:
        return "memory"
    return "network" if filesystem in _NETWORK or filesystem.startswith("fuse") else "disk"


def find_place(path: str) -> Place:
    """Where a file lies."""
    mount = mount_of(path)
    return Place(mount.filesystem, mount.source, kind_of(mount.filesystem), _read_ahead_nbytes(path), memory_nbytes())


def _read_ahead_nbytes(path: str) -> int | None:
    device = os.stat(path).st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        return int(setting.read_text()) * 1024
    except OSError:  # a container without sysfs, or a file system without a disk
        return None


def control_group(controller: str) -> tuple[Path, bool] | None:
    """The folder of this process's control group, and whether it is of version 2; None where there is none.

    Args:
        controller: such as ``memory``. Version 1 has a hierarchy for each, version 2 one for all.
    """
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    for name, filesystem in ((controller, "cgroup"), ("", "cgroup2")):
        for mount in mounts():
            fits = mount.filesystem == filesystem and (not name or name in mount.options)
            if name in paths and fits and (folder := _group_folder(mount, paths[name])):
                return folder, filesystem == "cgroup2"
    return None


def _group_folder(mount: Mount, path: str) -> Path | None:
    """In a container the mount may show a part of the hierarchy, and the path be of the whole of it."""
    for below in (os.path.relpath(path, mount.root), "."):
        if not below.startswith("..") and (folder := Path(mount.folder, below)).is_dir():
            return folder
    return None


def memory_nbytes() -> int | None:
    """What the page cache may take, limits of the control groups this process is in heeded; None where unknown."""
    with open("/proc/meminfo") as file:
        found = [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    group = control_group("memory")
    if group is not None:
        folder, second = group
        name = "memory.max" if second else "memory.limit_in_bytes"
        while (limit := folder / name).is_file():
            text = limit.read_text().strip()
            if text != "max":
                found.append(int(text))
            folder = folder.parent
    return min(found, default=None)
