"""Real disks that are small, read-only or under quota (tmpfs mounts, if the test may mount), and other users."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
NOBODY = 65534


@contextlib.contextmanager
def mounted(options: str) -> Iterator[Path]:
    """Mount a tmpfs that every user may write to. Skips the test if mounting is not allowed."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"mode=1777,{options}", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("no mount command here")
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs with {options} here: {done.stderr.strip()}")
        os.chmod(made, 0o755)  # so that other users can enter it
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def free_nbytes(folder: Path) -> int:
    """Return the free bytes as shown by ``df``."""
    status = os.statvfs(folder)
    return status.f_bfree * status.f_frsize


@contextlib.contextmanager
def filled(folder: Path, left_nbytes: int) -> Iterator[None]:
    """Fill a disk except for ``left_nbytes`` bytes.

    Garbage is collected first, because deleted files that garbage holds open would free space at any moment.
    """
    gc.collect()
    ballast = folder / "ballast"
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free_nbytes(folder) - left_nbytes))
    try:
        yield
    finally:
        ballast.unlink()


def in_a_child(act: Callable[[], None], *, user: int | None = None) -> None:
    """Run a function in a forked process, as another user if one is given. A failure there fails the test."""
    if user is not None and os.geteuid():
        pytest.skip("only root can become another user")
    sys.stdout.flush()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        status = 1
        try:
            if user is not None:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            act()
            status = 0
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, errors="replace") as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, said
