"""Run commands as separate processes, block them in a long call or in a worker, and send them signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A function is replaced by a call that takes many minutes and does not check for signals, like native code.
_PROGRAM = """
import hashlib, sys, threading
from importlib import import_module
from megatron_sft_idx.cli import signals
from megatron_sft_idx.cli.main import main

def held(*_, **__):
    # Said by another thread, once this one is in the call.
    threading.Timer(0.2, print, ["held"], {"file": sys.stderr, "flush": True}).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

module, owner, name, notice, clean_up, *sys.argv[1:] = sys.argv[1:]
signals._SECONDS_TO_NOTICE, signals._SECONDS_TO_CLEAN_UP = float(notice), float(clean_up)
place = import_module(module)
setattr(getattr(place, owner) if owner else place, name, held)
sys.exit(main())
"""


@contextmanager
def started(*program: object) -> Iterator[subprocess.Popen[str]]:
    """Run Python with these arguments in a new process group, which is killed at the end of the test."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, *map(str, program)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None or group_of(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def held_in(place: str, *arguments: object, seconds: tuple[float, float] = (0.3, 25.0)) -> list[object]:
    """Return arguments for ``started``: a command that will block in ``module:function`` or ``module:Class.method``."""
    module, _, names = place.partition(":")
    owner, _, name = names.rpartition(".")
    return ["-c", _PROGRAM, module, owner, name, *seconds, *arguments]


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    """Read the output of a process up to this line."""
    assert process.stderr is not None
    said = []
    for text in process.stderr:
        said.append(text)
        if text.startswith(line):
            return
    raise AssertionError("".join(said))


def ended_within(process: subprocess.Popen[str], seconds: float) -> str:
    """Check that a process ends in time and leaves no process of its group. Return its remaining output."""
    _, said = process.communicate(timeout=seconds)
    give_up = time.monotonic() + 5
    while left := group_of(process.pid):
        assert time.monotonic() < give_up, f"left behind: {left}"
        time.sleep(0.02)
    return said


def group_of(group: int) -> list[str]:
    """Return the command lines of the processes of a group, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rsplit(")", 1)[1].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def workers_of(process: int) -> list[int]:
    """Return the child processes of a process that are workers. A zombie has no command line."""
    found = []
    for child in map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()):
        try:
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
        except OSError:
            continue
    return found
