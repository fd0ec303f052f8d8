"""Advice of tools/bench_read.py for made-up measurements, and detection of file systems from made-up mount tables."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import medium
import pytest
from bench_read import (
    BenchOptions,
    ReadingReport,
    SettingTimes,
    Subject,
    largest_sample,
    reading_dict,
    reading_lines,
    recommend,
    sample_of,
)
from medium import (
    Medium,
    MediumKind,
    MemoryLimit,
    available_nbytes,
    medium_kind,
    medium_of,
    mount_of,
)
from read_worker import Epoch, ReadTimes, Setting

from megatron_sft_idx.inspect.text import shown_nbytes

GIB = 1 << 30
MMAP, RANDOM, PREAD, REOPEN = Setting(), Setting(advice="random"), Setting("pread"), Setting("reopen", schedule=True)


def epoch(rate: float, disk: int = 0, packs: int = 1000) -> Epoch:
    return Epoch(packs, packs / rate, packs * 10_000, disk)


def runs(first: float, second: float, spread: float = 0.0, disk: int = 10_000_000) -> list[ReadTimes]:
    """Return three rounds with about these numbers of packs per second."""
    factors = (1 - spread, 1.0, 1 + spread)
    return [ReadTimes(epoch(first * factor, disk), epoch(second * factor)) for factor in factors]


def subject_of(size: int = GIB, memory: int = 8 * GIB, kind: MediumKind = "disk", packs: int = 100_000) -> Subject:
    filesystem = {"disk": "ext4", "network": "nfs4", "memory": "tmpfs"}[kind]
    return Subject("data/x", packs, size, Medium(filesystem, "sda", kind, 128 << 10), memory)


def report_of(found: dict[Setting, Any], options: BenchOptions | None = None, **subject: Any) -> ReadingReport:
    """Return the report for settings with their runs, or with the reasons why they failed."""
    measured = [
        SettingTimes(setting, refused=given) if isinstance(given, str) else SettingTimes(setting, given)
        for setting, given in found.items()
    ]
    options, whole = options or BenchOptions(settings=tuple(found)), subject_of(**subject)
    if options.limit is not None:
        whole = replace(whole, memory_nbytes=min(options.limit.nbytes, whole.memory_nbytes))
    return ReadingReport(whole, options, range(1000), measured)


def limited(nbytes: int) -> BenchOptions:
    """Return options with a memory limit that the user did not set."""
    return BenchOptions(limit=MemoryLimit(nbytes, Path()))


def test_where_memory_keeps_the_shard_later_epochs_count() -> None:
    found = {MMAP: runs(1000, 50_000), RANDOM: runs(1500, 1500)}
    advice = recommend(report_of(found))
    assert advice.setting == MMAP
    assert "only the first epoch reads from the disk" in advice.reasons[0]
    assert any("no other setting was clearly faster" in reason for reason in advice.reasons)


def test_where_it_does_not_first_epochs_count() -> None:
    found = {MMAP: runs(1000, 50_000), RANDOM: runs(1500, 1500)}
    advice = recommend(report_of(found, memory=GIB // 2))
    assert advice.setting == RANDOM
    assert "every epoch reads from the disk" in advice.reasons[0]
    assert any("1,500 packs/s instead of 1,000 in the first epoch" in reason for reason in advice.reasons)


@pytest.mark.parametrize(("faster", "spread", "chosen"), [(1.05, 0.0, MMAP), (1.3, 0.0, RANDOM), (1.3, 0.2, MMAP)])
def test_a_setting_must_be_clearly_faster_than_a_simpler_one(faster: float, spread: float, chosen: Setting) -> None:
    found = {MMAP: runs(1000, 1000, spread), RANDOM: runs(1000 * faster, 1000 * faster, spread)}
    assert recommend(report_of(found)).setting == chosen


def test_on_a_network_copies_are_preferred_to_maps_where_they_are_as_fast() -> None:
    found = {MMAP: runs(1000, 1000), PREAD: runs(1000, 1000), REOPEN: runs(1000, 1000)}
    advice = recommend(report_of(found, kind="network"))
    assert advice.setting == PREAD
    assert any("nfs4 is, or can be, a network file system" in reason for reason in advice.reasons)
    found[MMAP] = runs(5000, 5000)
    assert recommend(report_of(found, kind="network")).setting == MMAP
    assert recommend(report_of(found)).setting == MMAP


def test_a_default_that_is_refused_is_named_and_not_recommended() -> None:
    report = report_of({MMAP: "Operation not permitted", PREAD: runs(100, 100)})
    advice = recommend(report)
    assert advice.setting == PREAD
    assert any("the default, mmap, does not work here: Operation not permitted" in reason for reason in advice.reasons)
    assert "mmap     failed: Operation not permitted" in "\n".join(reading_lines(report, advice))


def test_a_setting_whose_process_was_killed_in_a_later_round_is_not_recommended() -> None:
    killed = SettingTimes(REOPEN, runs(9000, 9000), refused="its process was killed")
    report = report_of({MMAP: runs(100, 100)})
    report.settings.insert(0, killed)
    assert recommend(report).setting == MMAP


def test_nothing_is_recommended_where_all_is_refused() -> None:
    report = report_of({MMAP: "no", PREAD: "never"})
    advice = recommend(report)
    assert advice.setting is None
    assert advice.reasons == ["mmap: no", "pread: never"]
    assert list(reading_lines(report, advice))[-3:] == [
        "data/x: none of these settings can read it",
        "- mmap: no",
        "- pread: never",
    ]
    found = reading_dict(report, advice)
    assert found["recommended"] == {"setting": None, "call": None, "training": None, "reasons": advice.reasons}
    assert [one["refused"] for one in found["settings"]] == ["no", "never"]


def test_memory_is_no_disk() -> None:
    advice = recommend(report_of({MMAP: runs(1000, 1000, disk=0)}, kind="memory"))
    assert advice.reasons == ["tmpfs keeps the shard in memory, so no disk is read"]


def test_a_cache_that_stays_is_seen_in_what_was_read() -> None:
    assert report_of({MMAP: runs(1000, 1000)}).cold
    kept = report_of({MMAP: runs(1000, 1000, disk=0)})
    assert not kept.cold
    assert any("no first epoch was certain to be cold" in reason for reason in recommend(kept).reasons)
    assert "NOT COLD" in "\n".join(reading_lines(kept, recommend(kept)))


def test_reads_that_a_file_system_does_not_count_are_not_called_none() -> None:
    unseen = report_of({MMAP: runs(1000, 5000, disk=0), PREAD: runs(900, 900, disk=0)}, kind="network")
    advice = recommend(unseen)
    text = "\n".join([*reading_lines(unseen, advice), *advice.reasons])
    assert text.count("unknown") == 4
    assert "0.00" not in text
    assert reading_dict(unseen, advice)["settings"][0]["first_epoch"]["read_amplification"] is None
    seen = report_of({MMAP: runs(1000, 5000), PREAD: runs(900, 900, disk=0)})
    assert "unknown" not in "\n".join(reading_lines(seen, recommend(seen)))


def test_how_a_program_asks_for_a_setting() -> None:
    assert MMAP.call == "Shard(prefix)"
    asked = Setting("pread", "random", schedule=True, huge_pages=True)
    assert asked.call == (
        "Shard(prefix, backend='pread', advice='random', huge_pages=True), with schedule() ahead of use"
    )
    assert asked.training == (
        "PackedSFTDatasetConfig(..., read=ReadOptions(backend='pread', advice='random', huge_pages=True))"
    )
    assert asked.name == "pread, random, schedule, huge pages"


# ---- samples ----


def test_a_sample_has_neighbours_where_memory_keeps_the_shard_and_else_packs_from_everywhere() -> None:
    assert sample_of(subject_of(), "shuffled", 1000) == range(49_500, 50_500)
    assert sample_of(subject_of(memory=1), "shuffled", 1000) == range(0, 100_000, 100)
    assert sample_of(subject_of(memory=1), "sequential", 1000) == range(49_500, 50_500)
    assert len(sample_of(subject_of(), "shuffled", 1 << 40)) == 100_000
    assert sample_of(subject_of(packs=1), "shuffled", 1000) == range(1)


def test_a_sample_takes_the_time_of_an_epoch() -> None:
    options = BenchOptions(seconds=54.0)  # one second per epoch
    assert options.epoch_seconds == 1.0
    assert len(largest_sample(subject_of(), options, lambda sample: epoch(10_000, packs=len(sample)))) == 10_000
    assert len(largest_sample(subject_of(packs=300), options, lambda sample: epoch(10_000, packs=len(sample)))) == 300
    assert len(largest_sample(subject_of(), options, lambda sample: epoch(3, packs=6))) == 256
    assert len(largest_sample(subject_of(), options, lambda sample: None)) == 4096


def test_under_a_limit_a_sample_is_several_times_as_large() -> None:
    options = limited(GIB // 16)
    subject = subject_of(memory=GIB // 16)
    assert options.num_rounds == 1
    assert len(largest_sample(subject, options, lambda sample: epoch(3, packs=6))) == pytest.approx(18_750, rel=0.01)


# ---- file systems ----

TABLE = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:27 / /data rw,relatime shared:7 master:1 - nfs4 server:/export rw,vers=4.2
31 30 0:28 / /data/with\\040blank rw - fuse.sshfs me@host: rw
32 27 0:29 / /dev/shm rw - tmpfs tmpfs rw,size=1k
33 32 0:30 / /dev/shm rw - ramfs none rw
"""


@pytest.mark.parametrize(
    ("path", "filesystem", "source", "kind"),
    [
        ("/elsewhere/x.bin", "ext4", "/dev/vda", "disk"),
        ("/data/x.bin", "nfs4", "server:/export", "network"),
        ("/database/x.bin", "ext4", "/dev/vda", "disk"),
        ("/data/with blank/x.bin", "fuse.sshfs", "me@host:", "network"),
        ("/dev/shm/x.bin", "ramfs", "none", "memory"),
    ],
)
def test_a_path_lies_on_the_last_mount_above_it(
    tmp_path: Path, path: str, filesystem: str, source: str, kind: str
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    mount = mount_of(path, str(table))
    assert (mount.filesystem, mount.source, medium_kind(mount.filesystem)) == (filesystem, source, kind)


def test_the_place_of_a_file_here(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    place = medium_of(str(tmp_path / "x"))
    assert place.filesystem
    assert 0 < available_nbytes() <= os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_limit_of_a_group_above_counts_where_the_own_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"": None, "job": 4096, "job/task": "max", "job/task/own": None}
    for name, limit in groups.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "cgroup.procs").touch()
        if limit is not None:
            (tmp_path / name / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(medium, "_limit_of_group", lambda: tmp_path / "job/task/own/memory.max")
    assert available_nbytes() == 4096


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * GIB, "3.0 GiB"), (5000 << 40, "5000.0 TiB")],
)
def test_sizes_as_people_write_them(nbytes: int, shown: str) -> None:
    assert shown_nbytes(nbytes) == shown
