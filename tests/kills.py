"""Run work in processes that kill themselves at a chosen change of a folder, or after some time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_sft_idx.storage import building

# Functions that create, rename, truncate and remove files, or wait for the disk.
STEPS = ("mkdir", "rename", "unlink", "link", "rmdir", "fsync", "ftruncate")

kills_at = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
"""Of a test that kills work at each step: in make test, only at some steps."""


def killed_at(step: int, work: Callable[[], Any]) -> bool:
    """Do ``work`` in a fork that kills itself before its ``step``-th change.

    Return False if it was done before that.
    """
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
        # A kill does not lose written data, so waiting for the disk is not needed.
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
    """Raised before the first rename, to stop the work."""


def leave_complete(work: Callable[[], Any]) -> None:
    """Do ``work`` until all files of an output are complete, as if it were killed before the first rename."""

    def stop(self: building.Building, *_: object) -> None:
        self.close()
        raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building.Building, "finish", stop)
        with pytest.raises(StoppedError):
            work()


def killed_after(seconds: float, work: Callable[[], Any]) -> bool:
    """Do ``work`` in a fork that is killed after ``seconds``. Return False if it was done before that."""
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
