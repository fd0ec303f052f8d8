"""tools/bench_read.py: its measurements on real disks, as far as these can drop their cache; exit codes, JSON."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_read import BenchOptions, bench_read, main, reading_lines, recommend
from chats import ROOT, Outcome, outcome_of
from medium import drop_cache, memory_limit
from read_worker import (
    AHEAD,
    SETTINGS,
    ReadRequest,
    ReadTimes,
    Setting,
    ShardReader,
    read_epoch,
    run_request,
)
from sample_packs import demo_samples, write_samples

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import ShardWriter

TOOL = ROOT / "tools/bench_read.py"
PACKS, LENGTH = 300, 2048
NBYTES = PACKS * (5 * LENGTH + 4)
MEMORY = Path("/dev/shm")


def measure(*arguments: object) -> Outcome:
    """Run the tool in this process."""
    return outcome_of(main, *arguments)


def write(prefix: Path) -> Path:
    """Write a shard of three megabytes."""
    mask = np.ones(LENGTH, np.uint8)
    mask[-1] = 0
    with ShardWriter(prefix, token_dtype=np.int32, capacity=LENGTH, durable=False) as writer:
        for pack in range(PACKS):
            writer.add_pack(np.arange(pack, pack + LENGTH, dtype=np.int32), mask, [0])
    return prefix


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("reading") / "x")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Provide a folder whose files are only in memory."""
    if not os.access(MEMORY, os.W_OK):
        pytest.skip("no folder in memory here")
    folder = MEMORY / f"megatron-sft-idx-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def lets_go(prefix: Path) -> bool:
    """Return whether this file system drops cached pages on request."""
    return run_in(prefix, Setting("pread")).first.disk_nbytes > 0


def run_in(prefix: Path, setting: Setting) -> ReadTimes:
    """Run both epochs, from a cold start as far as the file system allows."""
    drop_cache(ShardPaths.of(prefix).all)
    return run_request(ReadRequest(str(prefix), range(PACKS), setting))


@pytest.mark.parametrize("setting", [Setting(), Setting("pread"), Setting("pread", "random", schedule=True)])
def test_a_cold_epoch_reads_the_disk_and_a_second_one_does_not(shard: Path, setting: Setting) -> None:
    if not lets_go(shard):
        pytest.skip("the test folder's file system keeps its cache")
    run = run_in(shard, setting)
    assert run.first.packs == run.second.packs == PACKS
    assert run.first.nbytes == run.second.nbytes == NBYTES
    # The rest was read ahead with the index, or belongs to partial pages at ends of files.
    assert run.first.disk_nbytes >= 0.9 * NBYTES
    assert run.second.disk_nbytes == 0


def test_an_epoch_ends_with_its_time_and_reads_one_pack_at_least(shard: Path) -> None:
    request = ReadRequest(str(shard), range(PACKS), Setting(), max_seconds=0.0)
    order = request.in_order(np.array(request.packs), epoch=1)
    epoch = read_epoch(ShardReader(request), order, scheduled=False, max_seconds=0.0)
    assert (epoch.packs, epoch.nbytes) == (1, 5 * LENGTH + 4)
    assert sorted(order.tolist()) == list(range(PACKS))
    again = request.in_order(order[:5], epoch=2)
    assert again.tolist() != order[:5].tolist()
    assert sorted(again.tolist()) == sorted(order[:5].tolist())
    assert run_request(request).second.packs == 1


def test_what_is_announced_comes_in_windows_and_covers_the_epoch(shard: Path) -> None:
    told: list[int] = []
    read: list[int] = []

    class Listening(ShardReader):
        def schedule(self, packs: Any) -> None:
            assert not set(packs) & set(read)
            assert len(told) - len(read) <= AHEAD
            told.extend(packs.tolist())
            super().schedule(packs)

        def read(self, pack: int) -> int:
            assert pack in told
            read.append(pack)
            return super().read(pack)

    request = ReadRequest(str(shard), range(PACKS), Setting(schedule=True))
    reader, order = Listening(request), request.in_order(np.array(request.packs), epoch=1)
    read_epoch(reader, order, scheduled=True, max_seconds=60.0)
    assert told == read == order.tolist()


def test_the_report_says_what_a_program_needs(shard: Path) -> None:
    outcome = measure(shard, "--packs", 50, "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert (found["packs"], found["bytes"]) == (PACKS, NBYTES)
    assert found["sample"]["packs"] == 50
    assert found["place"]["kind"] in ("disk", "network", "memory")
    assert [one["name"] for one in found["settings"]] == [setting.name for setting in SETTINGS]
    for one in found["settings"]:
        assert one["refused"] is None
        for epoch in (one["first_epoch"], one["second_epoch"]):
            assert epoch["packs"] == 50
            assert epoch["bytes"] == 50 * (5 * LENGTH + 4)
            slowest, fastest = epoch["slowest_packs_per_second"], epoch["fastest_packs_per_second"]
            assert 0 < slowest <= epoch["packs_per_second"] <= fastest
            assert "read_amplification" in epoch
    assert found["recommended"]["call"].startswith("Shard(prefix")
    assert found["recommended"]["reasons"]


def test_the_text_has_a_line_for_every_setting_and_ends_with_a_recommendation(shard: Path) -> None:
    outcome = measure(shard, "--packs", 20, "--order", "sequential")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    for setting in SETTINGS:
        assert sum(line.startswith(f"{setting.name}  ") for line in lines) == 1
    assert "20 packs from pack 140 on, sequential" in outcome.out
    assert any(line.startswith("recommended: Shard(prefix") for line in lines)
    assert "reading: 27 runs, 100.0%" in outcome.err


def test_a_shard_in_memory_is_not_called_cold(in_memory: Path) -> None:
    write(in_memory / "x")
    report = bench_read(str(in_memory / "x"), BenchOptions(packs=20, settings=SETTINGS[:1], rounds=1))
    assert report.subject.medium.kind == "memory"
    assert not report.cold
    assert report.settings[0].rounds[0].first.disk_nbytes == 0
    text = "\n".join(reading_lines(report, recommend(report)))
    assert "NOT COLD" in text
    assert "tmpfs keeps the shard in memory" in text


def test_a_memory_limit_is_a_group_that_is_gone_afterwards(shard: Path) -> None:
    mib = 16
    with contextlib.ExitStack() as stack:
        try:
            limit = stack.enter_context(memory_limit(mib << 20))
        except OSError as refused:
            outcome = measure(shard, "--memory-limit", mib)
            assert outcome.code == 2
            assert "systemd-run" in outcome.err
            pytest.skip(str(refused))
        folder = limit.folder
        report = bench_read(str(shard), BenchOptions(packs=PACKS, settings=SETTINGS[:1], limit=limit))
        assert report.subject.memory_nbytes == mib << 20
        assert len(report.settings[0].rounds) == 1
        text = "\n".join(reading_lines(report, recommend(report)))
        assert f"with a limit of {mib}.0 MiB" in text
        assert "LIMIT NOT REACHED: at most 2.9 MiB were read, which fit into the limit; use a larger shard" in text
    assert not folder.exists()


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_running(pid: int) -> bool:
    """Return whether a process is running. A zombie does not count; it has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(("signum", "limit"), [(signal.SIGINT, []), (signal.SIGTERM, ["--memory-limit", "64"])])
def test_who_is_interrupted_leaves_neither_processes_nor_a_group(shard: Path, signum: int, limit: list[str]) -> None:
    arguments = [str(TOOL), str(shard), "--seconds", "600", *limit]
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while not any(measured := [one for server in children(process.pid) for one in children(server)]):
        if process.poll() is not None:
            assert limit, "ended by itself"
            pytest.skip("no permission to make a control group here")
        assert time.monotonic() < end, "no process was started"
        time.sleep(0.01)
    process.send_signal(signum)
    assert process.wait(60) == 128 + signum
    while any(map(is_running, measured)):
        assert time.monotonic() < end, "processes were left"
        time.sleep(0.01)
    assert not list(Path("/sys/fs/cgroup").rglob(f"megatron-sft-idx-{process.pid}"))


def test_bad_shards_are_exit_code_1(tmp_path: Path) -> None:
    assert measure(tmp_path / "nothing").code == 1
    write_samples(tmp_path / "empty", [], capacity=8)
    outcome = measure(tmp_path / "empty")
    assert outcome.code == 1
    assert "no packs" in outcome.err
    write_samples(tmp_path / "torn", demo_samples())
    os.truncate(tmp_path / "torn.bin", 3)
    outcome = measure(tmp_path / "torn")
    assert outcome.code == 1
    assert "file has 3 bytes" in outcome.err


def test_damage_that_only_reading_finds_is_exit_code_1(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x")
    with open(f"{prefix}.seq.idx", "r+b") as file:
        file.seek(-8 * 100, os.SEEK_END)
        file.write(b"\xff" * 16)
    outcome = measure(prefix, "--packs", PACKS)
    assert outcome.code == 1
    assert "rule O2" in outcome.err
    assert "rebuild" in outcome.err


def test_wrong_usage_is_exit_code_2(shard: Path) -> None:
    for arguments in (
        ["--packs", 0],
        ["--packs", 3, "--seconds", 3],
        ["--order", "backwards"],
        ["--memory-limit", "much"],
    ):
        assert measure(shard, *arguments).code == 2
    assert measure("s3://bucket/x").code == 2
    assert measure().code == 2


def exits(request: ReadRequest) -> Any:
    os._exit(9)


def fails(request: ReadRequest) -> Any:
    return 1 / 0


def dies(request: ReadRequest) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("opens", "found"),
    [
        (exits, "its process ended with code 9"),
        (fails, "ZeroDivisionError: division by zero"),
        (dies, "its process was killed"),
    ],
)
def test_processes_that_die_are_a_setting_that_is_refused(opens: Any, found: str) -> None:
    with pytest.raises(OSError, match=found):
        run_request(ReadRequest("x", range(1), Setting()), opens)


def test_a_job_survives_its_way_to_the_worker() -> None:
    request = ReadRequest("x", range(1, 9, 2), SETTINGS[-1], "sequential", 3.0, "group")
    assert pickle.loads(pickle.dumps(request)) == request


def test_measuring_imports_neither_torch_nor_megatron(shard: Path) -> None:
    program = (
        "import sys; sys.path.append('tools'); from bench_read import main; main(sys.argv[1:]);"
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    arguments = [str(shard), "--packs", "2", "--log-interval", "0"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr


def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(shard: Path) -> None:
    command = [sys.executable, str(TOOL), str(shard), "--packs", "2", "--log-interval", "0"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "bench_read.py: error: standard output: No space left on device\n"


def test_an_answer_about_bad_bytes_is_a_format_error(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    os.truncate(tmp_path / "x.loss.bin", 1)
    with pytest.raises(FormatError, match=r"x\.loss\.bin"):
        run_in(tmp_path / "x", Setting())
