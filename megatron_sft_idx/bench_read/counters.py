"""What Linux counts of a process as it reads."""

from __future__ import annotations

import resource
from dataclasses import dataclass

__all__ = ["Counters", "private_nbytes"]


@dataclass(frozen=True)
class Counters:
    """Sums since the process began, of all its threads.

    Attributes:
        soft_faults: pages that were mapped from memory.
        hard_faults: faults that waited for a disk.
        disk_nbytes: bytes this process made the storage read, ahead of use or not; None where that is not counted.
    """

    soft_faults: int
    hard_faults: int
    disk_nbytes: int | None

    @classmethod
    def now(cls) -> Counters:
        """As they stand."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(usage.ru_minflt, usage.ru_majflt, _disk_nbytes())

    def since(self, before: Counters) -> Counters:
        """What was added."""
        disk = None
        if self.disk_nbytes is not None and before.disk_nbytes is not None:
            disk = self.disk_nbytes - before.disk_nbytes
        return Counters(self.soft_faults - before.soft_faults, self.hard_faults - before.hard_faults, disk)


def _disk_nbytes() -> int | None:
    try:
        with open("/proc/self/io", "rb") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(b"read_bytes:"))
    except (OSError, StopIteration):  # a kernel that does not account for it
        return None


def private_nbytes() -> int:
    """Memory that is this process's own, mapped files left out."""
    with open("/proc/self/status", "rb") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"RssAnon:"))
