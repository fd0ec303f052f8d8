"""Run commands under ``torchrun`` so that all their processes end with the starting process, even after SIGKILL.

As a program, ``torchruns.py PARENT WORD...`` executes the command WORD..., which ends when the process PARENT ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
# Replaced in a command by the number of the process that runs it.
_ITSELF = "PID"


def torchrun(ranks: int, *program: object) -> list[str]:
    """Return a command that runs a Python program on some ranks of this machine. Start it from the main thread.

    The kernel ends ``torchrun`` with the process that calls this, and each rank with ``torchrun``. Processes started by
    a rank, such as writers of checkpoints, end within two seconds after it.
    """
    ends_with = [sys.executable, "-S", __file__]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    rank = [*ends_with, _ITSELF, sys.executable, *map(str, program)]
    return [*ends_with, str(os.getpid()), *launcher, "--no-python", *rank]


def _signal_at_end_of_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number):
        raise OSError(ctypes.get_errno(), "prctl")


def _guard_group() -> None:
    """Start a process that kills all other processes of this group after this process has ended."""
    leader = os.getpid()
    if os.fork():
        return
    # torchrun sends SIGTERM to the whole group and gives it time to end.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _signal_at_end_of_parent(signal.SIGUSR1)
    if os.getppid() == leader:
        signal.sigwait([signal.SIGUSR1])
    time.sleep(1)  # for processes that clean up and end themselves
    os.killpg(leader, signal.SIGKILL)


def main(parent: str, *command: str) -> None:
    if os.getpgrp() == os.getpid():  # torchrun gives each rank a group, and itself none
        _guard_group()
    _signal_at_end_of_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(f"process {parent} is gone, so {command[0]} is not started")
    os.execv(command[0], [str(os.getpid()) if word == _ITSELF else word for word in command])


if __name__ == "__main__":
    main(*sys.argv[1:])
