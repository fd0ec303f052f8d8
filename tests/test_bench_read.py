"""The bench-read verb: what it measures, on real disks as far as they let go of their cache; exit codes, JSON."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import ROOT, command
from packs import demo_samples, write_samples

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect.bench_read import BenchOptions, bench_read, reading_lines, recommend
from megatron_sft_idx.inspect.medium import cached_nbytes, drop_cache, memory_limit
from megatron_sft_idx.inspect.read_worker import (
    SETTINGS,
    ReadRequest,
    ReadTimes,
    Sample,
    Setting,
    ShardReader,
    Workers,
    read_epoch,
)
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import ShardWriter

PACKS, LENGTH = 300, 2048
KEPT = 64 << 10  # bytes that a ``KeepingReader`` keeps of a pack
NBYTES = PACKS * (5 * LENGTH + 4)
MEMORY = Path("/dev/shm")


def write(prefix: Path) -> Path:
    """Three megabytes."""
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
    """A folder whose files have no disk."""
    if not os.access(MEMORY, os.W_OK):
        pytest.skip("no folder in memory here")
    folder = MEMORY / f"megatron-sft-idx-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def lets_go(prefix: Path) -> bool:
    """Whether this file system drops what it is asked to drop."""
    paths = ShardPaths.of(prefix).all
    drop_cache(paths)
    return cached_nbytes(paths) == 0


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as started:
        yield started


def run_in(workers: Workers, prefix: Path, setting: Setting, **options: Any) -> ReadTimes:
    """Both epochs, from a cold start as far as the file system allows."""
    drop_cache(ShardPaths.of(prefix).all)
    return workers.run(ReadRequest(str(prefix), Sample(0, PACKS), setting, 60.0, **options))


@pytest.mark.parametrize("setting", [Setting(), Setting("pread"), Setting("pread", "random", schedule=True)])
def test_a_cold_epoch_reads_the_disk_and_a_second_one_does_not(workers: Workers, shard: Path, setting: Setting) -> None:
    if not lets_go(shard):
        pytest.skip("the test folder's file system keeps its cache")
    run = run_in(workers, shard, setting)
    assert run.first.packs == run.second.packs == PACKS
    assert run.first.nbytes == run.second.nbytes == NBYTES
    assert run.first.disk_nbytes is not None
    # The index lies in the same files' neighbourhood, and the ends of files in pages.
    assert run.first.disk_nbytes >= 0.9 * NBYTES
    assert run.second.disk_nbytes == 0
    assert run.second.hard_faults == 0
    if setting.backend == "mmap":
        assert run.first.hard_faults > 0
    assert 0 < run.first.median_us <= run.first.p99_us


def test_without_read_ahead_every_page_is_a_hard_fault(workers: Workers, shard: Path) -> None:
    if not lets_go(shard):
        pytest.skip("the test folder's file system keeps its cache")
    run = run_in(workers, shard, Setting(advice="random"))
    assert run.first.hard_faults >= 0.5 * NBYTES / os.sysconf("SC_PAGESIZE")


class KeepingReader(ShardReader):
    """Keeps something of each pack in memory, as a cache would; a name in a module, since processes are told of it."""

    def __init__(self, request: ReadRequest) -> None:
        super().__init__(request)
        self._kept: dict[int, np.ndarray] = {}

    def read(self, pack: int) -> int:
        self._kept[pack] = np.ones(KEPT, np.uint8)
        return super().read(pack)


def test_memory_that_a_reader_takes_is_the_processes_own_and_maps_are_not(workers: Workers, shard: Path) -> None:
    with Workers(KeepingReader) as keeping:
        for _ in range(3):  # rounds of one process
            assert 0.9 * PACKS * KEPT <= run_in(keeping, shard, Setting()).private_nbytes < 1.5 * PACKS * KEPT
            assert run_in(workers, shard, Setting()).private_nbytes < 0.9 * NBYTES


def test_an_epoch_ends_with_its_time_and_reads_one_pack_at_least(shard: Path) -> None:
    reader = ShardReader(ReadRequest(str(shard), Sample(0, PACKS), Setting(), 0.0))
    sample = Sample(0, PACKS, seed=3)
    epoch = read_epoch(reader, sample.first_epoch(), scheduled=False, max_seconds=0.0)
    assert (epoch.packs, epoch.nbytes) == (1, 5 * LENGTH + 4)
    assert sample.second_epoch(sample.first_epoch()[:5]).tolist() != sample.first_epoch()[:5].tolist()
    assert sorted(sample.second_epoch(sample.first_epoch()[:5]).tolist()) == sorted(sample.first_epoch()[:5].tolist())


def test_what_a_first_epoch_has_no_time_for_is_read_before_the_second(workers: Workers, shard: Path) -> None:
    request = ReadRequest(str(shard), Sample(0, PACKS), Setting(), 0.0)
    assert workers.run(request).seen_nbytes == 5 * LENGTH + 4
    # Time for something, and not for the whole: if a machine is that fast, nothing is left to be read.
    run = workers.run(replace(request, max_seconds=1e-3))
    assert run.first.nbytes <= run.seen_nbytes <= NBYTES
    assert workers.run(replace(request, max_seconds=60.0)).seen_nbytes == NBYTES


def test_what_is_announced_comes_in_windows_and_covers_the_epoch(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ShardReader(ReadRequest(str(shard), Sample(0, PACKS), Setting(schedule=True), 60.0))
    told: list[int] = []
    read: list[int] = []
    real = type(reader._shard).schedule

    def listening(self: Any, packs: Any) -> None:
        assert not set(packs) & set(read)
        told.extend(packs.tolist())
        real(self, packs)

    monkeypatch.setattr(type(reader._shard), "schedule", listening)
    order = Sample(0, PACKS).first_epoch()
    reader.schedule(order)
    for pack in order.tolist():
        assert pack in told
        reader.read(pack)
        read.append(pack)
    assert told == order.tolist()


def test_the_report_says_what_a_program_needs(shard: Path) -> None:
    outcome = command("bench-read", shard, "--packs", 50, "--json")
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
            assert {"median_us", "p99_us", "read_amplification", "hard_faults", "soft_faults"} <= set(epoch)
        assert one["huge_page_bytes"] >= 0
        assert 0 < one["private_bytes"] < 0.9 * NBYTES
    assert found["recommended"]["call"].startswith("Shard(prefix")
    assert found["recommended"]["reasons"]


def test_the_text_has_a_line_for_every_epoch_and_ends_with_a_recommendation(shard: Path) -> None:
    outcome = command("bench-read", shard, "--packs", 20, "--order", "sequential")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    for setting in SETTINGS:
        assert sum(line.startswith(f"{setting.name}  ") and " first " in line for line in lines) == 1
    assert sum(" second " in line for line in lines) == len(SETTINGS)
    assert "20 packs from pack 140 on, sequential" in outcome.out
    assert any(line.startswith("recommended: Shard(prefix") for line in lines)
    assert "reading: 27 runs, 100.0%" in outcome.err


def test_a_shard_in_memory_is_not_called_cold(in_memory: Path) -> None:
    write(in_memory / "x")
    report = bench_read(str(in_memory / "x"), BenchOptions(packs=20, settings=SETTINGS[:1], rounds=1))
    assert report.subject.medium.kind == "memory"
    assert report.still_cached_nbytes is not None
    assert report.still_cached_nbytes >= NBYTES
    assert not report.cold
    assert report.settings[0].rounds[0].first.disk_nbytes == 0
    text = "\n".join(reading_lines(report, recommend(report)))
    assert "NOT COLD" in text
    assert "tmpfs keeps the shard in memory" in text


def test_a_memory_limit_is_a_group_that_is_gone_afterwards(shard: Path) -> None:
    mib = 16
    with ExitStack() as stack:
        try:
            limit = stack.enter_context(memory_limit(mib << 20))
        except OSError as refused:
            outcome = command("bench-read", shard, "--memory-limit", mib)
            assert outcome.code == 2
            assert "systemd-run" in outcome.err
            pytest.skip(str(refused))
        folder = limit.folder
        report = bench_read(str(shard), BenchOptions(packs=PACKS, settings=SETTINGS[:1], limit=limit))
        assert report.subject.memory_nbytes == mib << 20
        assert len(report.settings[0].rounds) == 1
        text = "\n".join(reading_lines(report, recommend(report)))
        assert f"under a limit of {mib}.0 MiB" in text
        assert "NOT FELT: 2.9 MiB at most were read, which the limit has room for: the shard is too small" in text
    assert not folder.exists()


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_running(pid: int) -> bool:
    """Not so of a zombie, which nobody may ever ask for: it has no command line any more."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(("signum", "limit"), [(signal.SIGINT, []), (signal.SIGTERM, ["--memory-limit", "64"])])
def test_who_is_interrupted_leaves_neither_processes_nor_a_group(shard: Path, signum: int, limit: list[str]) -> None:
    arguments = ["-m", "megatron_sft_idx.cli.main", "bench-read", str(shard), "--seconds", "600", *limit]
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while not any(measured := [one for server in children(process.pid) for one in children(server)]):
        if process.poll() is not None:
            assert limit, "ended by itself"
            pytest.skip("no control group may be made here")
        assert time.monotonic() < end, "no process was started"
        time.sleep(0.01)
    process.send_signal(signum)
    assert process.wait(60) == 128 + signum
    while any(map(is_running, measured)):
        assert time.monotonic() < end, "processes were left"
        time.sleep(0.01)
    assert not list(Path("/sys/fs/cgroup").rglob(f"megatron-sft-idx-{process.pid}"))


def test_bad_shards_are_exit_code_1(tmp_path: Path) -> None:
    assert command("bench-read", tmp_path / "nothing").code == 1
    write_samples(tmp_path / "empty", [], capacity=8)
    outcome = command("bench-read", tmp_path / "empty")
    assert outcome.code == 1
    assert "no packs" in outcome.err
    write_samples(tmp_path / "torn", demo_samples())
    os.truncate(tmp_path / "torn.bin", 3)
    outcome = command("bench-read", tmp_path / "torn")
    assert outcome.code == 1
    assert "file has 3 bytes" in outcome.err


def test_damage_that_only_reading_finds_is_exit_code_1(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x")
    with open(f"{prefix}.seq.idx", "r+b") as file:
        file.seek(-8 * 100, os.SEEK_END)
        file.write(b"\xff" * 16)
    outcome = command("bench-read", prefix, "--packs", PACKS)
    assert outcome.code == 1
    assert "rule O2" in outcome.err
    assert "rebuild" in outcome.err


def test_a_smaller_shard_published_over_the_one_that_is_measured_is_bad(workers: Workers, tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(3))
    with pytest.raises(FormatError, match=r"x: 3 packs, .* published over it; measure again"):
        run_in(workers, tmp_path / "x", Setting("pread"))


def test_wrong_usage_is_exit_code_2(shard: Path) -> None:
    for arguments in (
        ["--packs", 0],
        ["--packs", 3, "--seconds", 3],
        ["--order", "backwards"],
        ["--memory-limit", "much"],
    ):
        assert command("bench-read", shard, *arguments).code == 2
    assert command("bench-read", "s3://bucket/x").code == 2
    assert command("bench-read").code == 2


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
    request = ReadRequest("x", Sample(0, 1), Setting(), 1.0)
    with Workers(opens) as workers:
        for _ in range(2):
            with pytest.raises(OSError, match=found):
                workers.run(request)


def test_a_job_survives_its_way_to_the_worker() -> None:
    request = ReadRequest("x", Sample(1, 9, 2, "sequential", 4), SETTINGS[-1], float("inf"), "group")
    assert pickle.loads(pickle.dumps(request)) == request


def test_measuring_imports_neither_torch_nor_megatron(shard: Path) -> None:
    program = (
        "import sys; from megatron_sft_idx.cli.main import main; main(sys.argv[1:]);"
        "import megatron_sft_idx.inspect.read_worker;"
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    arguments = ["bench-read", str(shard), "--packs", "2", "--log-interval", "0"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr


def test_an_answer_about_bad_bytes_is_a_format_error(workers: Workers, tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    os.truncate(tmp_path / "x.loss.bin", 1)
    with pytest.raises(FormatError, match=r"x\.loss\.bin"):
        run_in(workers, tmp_path / "x", Setting())
