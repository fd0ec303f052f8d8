"""``make test`` reports the tests that it leaves out, for any number of processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from chats import ROOT


def left_out(processes: int) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-n", str(processes), "tests/cloud", "tests/native/test_native_build.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith("LEFT OUT: ")]


@pytest.mark.slow
def test_what_is_left_out_is_counted_once() -> None:
    (line,) = left_out(processes=0)
    assert left_out(processes=2) == [line]
