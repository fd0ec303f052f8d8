"""A report for people, as lines, and for programs, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from megatron_sft_idx.bench_read.epochs import Epoch
from megatron_sft_idx.bench_read.measure import Measured, Report
from megatron_sft_idx.bench_read.recommend import Recommendation, shown_nbytes
from megatron_sft_idx.bench_read.worker import Run

__all__ = ["epoch_summary", "report_dict", "report_lines"]

_EPOCHS: dict[str, Callable[[Run], Epoch]] = {"first": lambda run: run.first, "second": lambda run: run.second}
_COLUMNS = ("setting", "epoch", "packs/s", "MiB/s", "median us", "p99 us", "disk/asked", "hard", "soft", "own MiB")


def epoch_summary(report: Report, one: Measured, of: Callable[[Run], Epoch]) -> dict[str, float | int | None]:
    """Medians over the rounds of one epoch; faults, packs and bytes are of a whole epoch."""
    rates = [of(run).rate for run in one.runs]
    return {
        "packs": int(one.median(lambda run: of(run).packs)),
        "bytes": int(one.median(lambda run: of(run).nbytes)),
        "packs_per_second": one.median(lambda run: of(run).rate),
        "slowest_packs_per_second": min(rates),
        "fastest_packs_per_second": max(rates),
        "median_us": one.median(lambda run: of(run).median_us),
        "p99_us": one.median(lambda run: of(run).p99_us),
        "read_amplification": report.amplification(one, of),
        "hard_faults": int(one.median(lambda run: of(run).counters.hard_faults)),
        "soft_faults": int(one.median(lambda run: of(run).counters.soft_faults)),
    }


def report_dict(report: Report, advice: Recommendation) -> dict[str, Any]:
    """For programs."""
    return {
        "prefix": report.subject.paths.prefix,
        "packs": report.subject.num_packs,
        "bytes": report.subject.nbytes,
        "place": asdict(report.subject.place),
        "fits_in_memory": report.subject.fits(report.plan.limit),
        "sample": {**asdict(report.sample), "packs": len(report.sample)},
        "rounds": report.plan.passes,
        "memory_limit_bytes": report.plan.limit and report.plan.limit.nbytes,
        "cold": report.cold,
        "cached_bytes_when_cold": report.left_nbytes,
        "settings": [_setting(report, one) for one in report.measured],
        "recommended": {
            "setting": advice.setting and asdict(advice.setting),
            "call": advice.setting and advice.setting.call,
            "training": advice.setting and advice.setting.training,
            "reasons": advice.reasons,
        },
    }


def _setting(report: Report, one: Measured) -> dict[str, Any]:
    found: dict[str, Any] = {"name": one.setting.name, "setting": asdict(one.setting), "refused": one.refused}
    if one.runs:
        found |= {f"{name}_epoch": epoch_summary(report, one, of) for name, of in _EPOCHS.items()}
        found["private_bytes"] = int(one.median(lambda run: run.private_nbytes))
        found["huge_page_bytes"] = int(one.median(lambda run: run.huge_nbytes))
    return found


def report_lines(report: Report, advice: Recommendation) -> Iterator[str]:
    """For people."""
    yield from _heading(report)
    yield ""
    rows = [_COLUMNS, *(row for one in report.measured for row in _rows(report, one))]
    widths = [max(len(row[column]) for row in rows if len(row) > 2) for column in range(len(_COLUMNS))]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=False)]
        yield "  ".join([*left, *right]).rstrip()
    yield ""
    yield "disk/asked: bytes read from the disk for each byte of a pack. hard, soft: page faults of 1,000 packs that"
    yield "waited for the disk, or found their page in memory. own MiB: memory that reading took, maps left out."
    yield from _of_huge_pages(report)
    yield ""
    if advice.setting is None:
        yield f"{report.subject.paths.prefix}: cannot be read in any of these ways"
    else:
        yield f"recommended: {advice.setting.call}"
        yield f"in training: {advice.setting.training}"
    yield from (f"- {reason}" for reason in advice.reasons)


def _heading(report: Report) -> Iterator[str]:
    subject, plan = report.subject, report.plan
    place, memory = subject.place, subject.memory_nbytes(plan.limit)
    ahead = "" if place.read_ahead_nbytes is None else f", read-ahead {shown_nbytes(place.read_ahead_nbytes)}"
    room = "unknown" if memory is None else shown_nbytes(memory)
    yield f"{subject.paths.prefix}: {subject.num_packs:,} packs, {shown_nbytes(subject.nbytes)}"
    yield f"on {place.filesystem} ({place.source}{ahead}), memory for the page cache: {room}"
    if plan.limit is not None:
        yield f"under a limit of {shown_nbytes(plan.limit.nbytes)}, set by a control group"
    step = f", one of every {report.sample.step:,}" if report.sample.step > 1 else ""
    times = "once" if plan.passes == 1 else f"{plan.passes} times, of which the median is shown"
    packs = f"{len(report.sample):,} packs from pack {report.sample.start:,} on{step}"
    yield f"read: {packs}, {plan.order}; each setting {times}"
    yield _of_the_cold(report)
    if warning := _too_little(report):
        yield warning


def _of_the_cold(report: Report) -> str:
    """What first epochs began with."""
    dropped = "page cache dropped before each first epoch"
    left, filesystem = report.left_nbytes, report.subject.place.filesystem
    if left is None:
        seen = "bytes were read from the disk" if report.cold else "no bytes were seen to be read from the disk"
        return f"{dropped}: the system does not tell this user what stayed, but {seen}"
    if report.cold:
        return f"{dropped}, and found empty" + (f" but for {shown_nbytes(left)}" if left else "")
    why = f"other processes map them, or {filesystem} does not drop them"
    if report.subject.place.kind == "memory":
        why = f"{filesystem} has no other place"
    return f"NOT COLD: {shown_nbytes(left)} stay in memory, because {why}; first epochs did not read them from a disk"


def _too_little(report: Report) -> str | None:
    """A limit that was not felt."""
    if report.plan.limit is None:
        return None
    limit = report.plan.limit.nbytes
    most = max((run.seen_nbytes for one in report.measured for run in one.runs), default=0)
    if most > limit:
        return None
    too_small = report.subject.nbytes <= limit
    remedy = "the shard is too small for it" if too_small else "read more, with --seconds or --packs"
    return f"NOT FELT: {shown_nbytes(most)} at most were read, which the limit has room for: {remedy}"


def _rows(report: Report, one: Measured) -> Iterator[tuple[str, ...]]:
    if one.refused is not None:
        yield one.setting.name, f"refused: {one.refused}"
    for number, (name, of) in enumerate(_EPOCHS.items()):
        if not one.runs:
            continue
        found = {key: value or 0 for key, value in epoch_summary(report, one, of).items()}
        amplified = report.amplification(one, of)
        thousand = 1000 / found["packs"]
        yield (
            "" if number else one.setting.name,
            name,
            f"{found['packs_per_second']:,.0f}",
            f"{found['packs_per_second'] * found['bytes'] / found['packs'] / 2**20:,.0f}",
            f"{found['median_us']:,.1f}",
            f"{found['p99_us']:,.1f}",
            "not told" if amplified is None else f"{amplified:.2f}",
            f"{found['hard_faults'] * thousand:,.0f}",
            f"{found['soft_faults'] * thousand:,.0f}",
            "" if number else f"{one.median(lambda run: run.private_nbytes) / 2**20:,.1f}",
        )


def _of_huge_pages(report: Report) -> Iterator[str]:
    for one in report.measured:
        if one.setting.huge_pages and one.runs:
            most = max(run.huge_nbytes for run in one.runs)
            given = f"{shown_nbytes(most)} were mapped by them" if most else "the kernel gave none"
            yield f"huge pages were asked for, and {given} (by /proc/self/smaps)."
