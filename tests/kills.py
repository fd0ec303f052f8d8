"""Processes that kill themselves at a chosen step of what changes a folder, or after some time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_sft_idx.storage import building

# What makes, renames, cuts and removes files, and what waits for the disk.
STEPS = ("mkdir", "rename", "unlink", "link", "rmdir", "fsync", "ftruncate")


def killed_at(step: int, work: Callable[[], Any]) -> bool:
    """Do ``work`` in a fork that kills itself before its ``step``-th change; False where it was done before that."""
    if (child := os.fork()) == 0:
        taken = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def counting(*arguments: Any, **more: Any) -> Any:
                nonlocal taken
                if taken == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                taken += 1
                return call(*arguments, **more)

            return counting

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        # A kill loses nothing that was written, so nothing waits for the disk.
        os.fsync = counted(lambda fd: None)
        building.move_into_place = counted(building.move_into_place)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"exit status {status}"
    return status == signal.SIGKILL


class StoppedError(Exception):
    """Stops what is about to rename its first file."""


def leave_complete(work: Callable[[], Any]) -> None:
    """Do ``work`` up to where all files of an output are complete; what a kill leaves before the first rename."""

    def stop(self: building.Building, *_: object) -> None:
        self.close()
        raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building.Building, "finish", stop)
        with pytest.raises(StoppedError):
            work()


def killed_after(seconds: float, work: Callable[[], Any]) -> bool:
    """Do ``work`` in a fork that is killed so much later; False where it was done before that."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"exit status {status}"
    return status == signal.SIGKILL
