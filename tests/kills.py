"""Processes that kill themselves at a chosen step of what changes a folder, and copies of what they leave."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import publication
from megatron_sft_idx.shard.recovery import adopt_remains

# What makes, renames, cuts and removes files, and what waits for the disk.
STEPS = ("rename", "unlink", "link", "fsync", "ftruncate")


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
        publication.move_into_place = counted(publication.move_into_place)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"exit status {status}"
    return status == signal.SIGKILL


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


def copy_remains(source: Path, target: Path) -> None:
    """Copy what a killed build left, whose journal then names the copies."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for journal in target.glob("*.journal"):
        if journal.stat().st_size:
            adopt_remains(ShardPaths(str(journal).removesuffix(".journal")))
