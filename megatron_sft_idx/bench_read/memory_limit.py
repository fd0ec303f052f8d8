"""A control group with little memory, to read a shard as if it were larger than memory.

``ulimit`` cannot do that: its limits are of a process's own memory, and the page cache belongs to nobody.
"""

from __future__ import annotations

import contextlib
import os
import time
from types import TracebackType

from megatron_sft_idx.bench_read.place import control_group

__all__ = ["MemoryLimit"]


class MemoryLimit:
    """A control group whose processes, and the pages they bring into the cache, take no more than this together.

    Args:
        nbytes: the limit.

    Attributes:
        nbytes: as given.
        folder: of the group; a process writes 0 into its ``cgroup.procs`` to enter.

    Raises:
        OSError: none may be made here; it says why, and what to do.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        found = control_group("memory")
        if found is None:
            raise _refusal("there is no memory controller of control groups", nbytes)
        own, second = found
        # In version 2 a group that has processes has no limited groups below it, but may have them beside it.
        reason = "the controller is not enabled there"
        for parent in (own, own.parent) if second else (own,):
            self.folder = parent / f"megatron-sft-idx-{os.getpid()}"
            try:
                self.folder.mkdir()
            except OSError as error:
                reason = f"{self.folder}: {error.strerror}"
                continue
            try:
                self._limit(nbytes, "memory.max" if second else "memory.limit_in_bytes")
            except OSError as error:
                reason = f"{self.folder}: {error.strerror}"
                self.folder.rmdir()
                continue
            return
        raise _refusal(reason, nbytes)

    def _limit(self, nbytes: int, name: str) -> None:
        # Not to be made: the kernel makes it with the folder where the controller is there.
        with open(self.folder / name, "r+") as file:
            file.write(str(nbytes))

    def __enter__(self) -> MemoryLimit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the group, which a process that is still ending keeps a moment longer; a group left does no harm."""
        for _ in range(100):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.02)


def _refusal(reason: str, nbytes: int) -> OSError:
    mib = nbytes >> 20
    return OSError(
        f"no control group may be made here ({reason}), and ulimit does not limit the page cache; run as root, or"
        f" limit this command from outside: systemd-run --user --scope -p MemoryMax={mib}M megatron-sft-idx bench-read"
        f" ..., or a container with --memory {mib}m"
    )
