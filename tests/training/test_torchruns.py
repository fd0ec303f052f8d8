"""Processes started by ``torchruns.torchrun`` end when the starting process ends, for any reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_setups import main as run_set_ups
from test_pretrain_stops import is_running
from torchruns import torchrun

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0
# A rank that starts a process and waits, as in a collective with missing ranks.
RANK = """
import os, subprocess, sys, time
from pathlib import Path
started = subprocess.Popen(["sleep", "1000"])
folder = Path(sys.argv[2])
(folder / "new").write_text(f"{os.getppid()} {os.getpid()} {started.pid}")
(folder / "new").rename(folder / f"{os.environ['RANK']}.pids")
time.sleep(1000)
"""
PROGRAM = """
import sys
from pathlib import Path
from megatron_setups import launch
launch(Path(sys.argv[1]), sys.argv[1] + "/rank.py", {}, 1)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Provide a program that is waiting in ``megatron_setups.launch``."""
    (tmp_path / "rank.py").write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment)
    yield process
    process.kill()
    process.wait()


def started(folder: Path, program: subprocess.Popen[bytes], ranks: int = 1) -> list[list[int]]:
    """Return the processes of each rank: its launcher, itself, and its child."""
    paths, end = [folder / f"{rank}.pids" for rank in range(ranks)], time.monotonic() + PATIENCE
    while not all(path.exists() for path in paths):
        assert program.poll() is None, "it has ended"
        assert time.monotonic() < end, "no rank has started"
        time.sleep(0.05)
    return [[int(pid) for pid in path.read_text().split()] for path in paths]


def left(processes: list[list[int]], seconds: float = 10) -> set[int]:
    """Return which of these processes still run after ``seconds``, and kill them."""
    every, end = {pid for some in processes for pid in some}, time.monotonic() + seconds
    while running := set(filter(is_running, every)):
        if time.monotonic() > end:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    return running


def test_nothing_is_left_of_a_program_that_is_killed(tmp_path: Path, program: subprocess.Popen[bytes]) -> None:
    processes = started(tmp_path, program)
    assert all(map(is_running, processes[0]))
    program.kill()
    assert not left(processes)


@pytest.mark.slow
def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path: Path, program: subprocess.Popen[bytes]) -> None:
    processes = started(tmp_path, program)
    os.kill(processes[0][0], signal.SIGKILL)
    assert not left(processes)


@pytest.mark.slow
def test_ranks_end_in_peace_when_their_launcher_is_asked_to_end(tmp_path: Path) -> None:
    """torchrun forwards SIGTERM to the ranks, and ends the other ranks if one is killed."""
    (tmp_path / "rank.py").write_text(RANK)
    for how in (signal.SIGTERM, signal.SIGKILL):
        launcher = subprocess.Popen(torchrun(2, tmp_path / "rank.py", "", tmp_path), stderr=subprocess.DEVNULL)
        processes = started(tmp_path, launcher, 2)
        assert {one[0] for one in processes} == {launcher.pid}
        os.kill(launcher.pid if how == signal.SIGTERM else processes[0][1], how)
        assert launcher.wait(PATIENCE) != 0
        assert not left(processes)
        for path in tmp_path.glob("*.pids"):
            path.unlink()


@pytest.mark.slow
def test_without_that_a_rank_goes_on(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(tmp_path / "rank.py"), "", tmp_path]
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    processes = started(tmp_path, launcher)
    launcher.kill()
    launcher.wait()
    assert left(processes, 3) == set(processes[0][1:])


def test_the_program_of_the_set_ups_starts_nothing_for_help_or_an_unknown_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for word, code in (("--help", 0), ("one proces", 2)):
        monkeypatch.setattr(sys, "argv", ["megatron_setups.py", word])
        with pytest.raises(SystemExit) as leaving:
            run_set_ups()
        assert leaving.value.code == code
    said = capsys.readouterr()
    assert "one process; micro-batch 2; runner; " in said.out
    assert "no set-up has the name 'one proces'; --help lists the names" in said.err
