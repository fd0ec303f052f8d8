"""From what was measured to what is recommended, and both for people, as lines, and for programs, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, get_args

from megatron_sft_idx.inspect.bench_read import Measured, ReadingReport, Which
from megatron_sft_idx.inspect.read_worker import Epoch, Run, Setting
from megatron_sft_idx.inspect.text import shown_nbytes

__all__ = ["Recommendation", "reading_dict", "reading_lines", "recommend"]

# What a training run is taken to read: its first epoch, and two more.
_EPOCHS = 3
# A setting must be faster by so much to be worth more than a simpler one.
_MARGIN = 1.1
_COLUMNS = ("setting", "epoch", "packs/s", "MiB/s", "median us", "p99 us", "disk/asked", "hard", "soft", "own MiB")


@dataclass(frozen=True)
class Recommendation:
    """A setting, and why; None where no setting could be read with."""

    setting: Setting | None
    reasons: list[str]


def recommend(report: ReadingReport) -> Recommendation:
    """The simplest of the settings that none is faster than by a tenth, or by more than the spread of the rounds.

    What counts is the time of a pack over three epochs. Where memory does not keep the shard, each is like the first.
    """
    read = [one for one in report.measured if one.runs and one.refused is None]
    if not read:
        return Recommendation(None, [f"{one.setting.name}: {one.refused}" for one in report.measured])
    # Seconds of a pack over all epochs, for each round.
    costs = {
        one.setting: [1 / run.first.rate + (_EPOCHS - 1) / _later(run, report).rate for run in one.runs] for one in read
    }
    best = min(costs.values(), key=median)

    def as_good(one: Measured) -> bool:
        own = costs[one.setting]
        return median(own) <= _MARGIN * median(best) or min(own) <= max(best)

    if report.subject.place.kind == "network":
        # A server that goes away is an error of pread, and a killed process (SIGBUS) where pages are mapped.
        read.sort(key=lambda one: one.setting.backend == "mmap")
    chosen = next(one for one in read if as_good(one))
    return Recommendation(chosen.setting, [*_of_the_place(report), *_of_the_choice(report, chosen, read)])


def _later(run: Run, report: ReadingReport) -> Epoch:
    """What the epochs after the first are like.

    The second is a sample's, which memory may keep where it does not keep the shard; unless more was read than it has.
    """
    subject, limit = report.subject, report.plan.limit
    felt = limit is not None and run.seen_nbytes > limit.nbytes
    return run.second if felt or subject.fits else run.first


def _of_the_place(report: ReadingReport) -> Iterator[str]:
    subject = report.subject
    memory, place = subject.memory_nbytes, subject.place
    if place.kind == "memory":
        yield f"{place.filesystem} keeps the shard in memory: there is no disk to save"
    elif memory is None:
        yield "how much memory there is could not be found out; it was taken to keep the shard"
    else:
        fit, epochs = ("fit", "only first epochs read") if subject.fits else ("do not fit", "every epoch reads")
        size, room = shown_nbytes(subject.nbytes), shown_nbytes(memory)
        yield f"its {size} {fit} in the {room} there are for the page cache: {epochs} the disk"
    if place.kind == "network":
        yield (
            f"{place.filesystem} is a network file system, or may be one: where the server goes away pread fails with"
            " an error, and a process that maps its files is killed"
        )
    if not report.cold and place.kind != "memory":
        yield "the page cache could not be dropped, so no first epoch was cold: what a disk does was not measured"


def _of_the_choice(report: ReadingReport, chosen: Measured, read: list[Measured]) -> Iterator[str]:
    default = next((one for one in report.measured if one.setting == Setting()), None)
    if default is not None and default.refused:
        yield f"the default, {default.setting.name}, is refused here: {default.refused}"
    elif default is not None and chosen is not default:
        yield (
            f"beside the default, {default.setting.name}: {chosen.rate('first'):,.0f} packs/s against"
            f" {default.rate('first'):,.0f} in the first epoch, {chosen.rate('second'):,.0f} against"
            f" {default.rate('second'):,.0f} in the second"
        )
    elif len(read) > 1:
        yield f"no other setting was clearly faster ({_MARGIN - 1:.0%} or more, and beyond the spread of the rounds)"
    amplified = report.amplification(chosen, "first")
    if amplified is not None and report.cold:
        yield f"its first epoch reads {amplified:.2f} bytes from the disk for each one that is asked for"


# ---- for programs ----


def _epoch_dict(report: ReadingReport, one: Measured, which: Which) -> dict[str, Any]:
    """Medians over the rounds of one epoch; faults, packs and bytes are of a whole epoch."""
    epochs = one.epochs(which)
    rates = [epoch.rate for epoch in epochs]
    return {
        "packs": int(median(epoch.packs for epoch in epochs)),
        "bytes": int(median(epoch.nbytes for epoch in epochs)),
        "packs_per_second": median(rates),
        "slowest_packs_per_second": min(rates),
        "fastest_packs_per_second": max(rates),
        "median_us": median(epoch.median_us for epoch in epochs),
        "p99_us": median(epoch.p99_us for epoch in epochs),
        "read_amplification": report.amplification(one, which),
        "hard_faults": int(median(epoch.hard_faults for epoch in epochs)),
        "soft_faults": int(median(epoch.soft_faults for epoch in epochs)),
    }


def reading_dict(report: ReadingReport, advice: Recommendation) -> dict[str, Any]:
    """All that was measured, and the recommendation."""
    return {
        "prefix": report.subject.paths.prefix,
        "packs": report.subject.num_packs,
        "bytes": report.subject.nbytes,
        "place": asdict(report.subject.place),
        "fits_in_memory": report.subject.fits,
        "sample": {**asdict(report.sample), "packs": len(report.sample)},
        "rounds": report.plan.passes,
        "memory_limit_bytes": report.plan.limit and report.plan.limit.nbytes,
        "cold": report.cold,
        "cached_bytes_when_cold": report.left_nbytes,
        "settings": [_setting_dict(report, one) for one in report.measured],
        "recommended": {
            "setting": advice.setting and asdict(advice.setting),
            "call": advice.setting and advice.setting.call,
            "training": advice.setting and advice.setting.training,
            "reasons": advice.reasons,
        },
    }


def _setting_dict(report: ReadingReport, one: Measured) -> dict[str, Any]:
    found: dict[str, Any] = {"name": one.setting.name, "setting": asdict(one.setting), "refused": one.refused}
    if one.runs:
        found |= {f"{which}_epoch": _epoch_dict(report, one, which) for which in get_args(Which)}
        found["private_bytes"] = int(one.median(lambda run: run.private_nbytes))
        found["huge_page_bytes"] = int(one.median(lambda run: run.huge_nbytes))
    return found


# ---- for people ----


def reading_lines(report: ReadingReport, advice: Recommendation) -> Iterator[str]:
    """A heading, two lines a setting, and the recommendation with its reasons."""
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
    for one in report.measured:
        if one.setting.huge_pages and one.runs:
            most = max(run.huge_nbytes for run in one.runs)
            given = f"{shown_nbytes(most)} were mapped by them" if most else "the kernel gave none"
            yield f"huge pages were asked for, and {given} (by /proc/self/smaps)."
    yield ""
    if advice.setting is None:
        yield f"{report.subject.paths.prefix}: cannot be read in any of these ways"
    else:
        yield f"recommended: {advice.setting.call}"
        yield f"in training: {advice.setting.training}"
    yield from (f"- {reason}" for reason in advice.reasons)


def _heading(report: ReadingReport) -> Iterator[str]:
    subject, plan, sample = report.subject, report.plan, report.sample
    place, memory = subject.place, subject.memory_nbytes
    ahead = "" if place.read_ahead_nbytes is None else f", read-ahead {shown_nbytes(place.read_ahead_nbytes)}"
    room = "unknown" if memory is None else shown_nbytes(memory)
    yield f"{subject.paths.prefix}: {subject.num_packs:,} packs, {shown_nbytes(subject.nbytes)}"
    yield f"on {place.filesystem} ({place.source}{ahead}), memory for the page cache: {room}"
    if plan.limit is not None:
        yield f"under a limit of {shown_nbytes(plan.limit.nbytes)}, set by a control group"
    step = f", one of every {sample.step:,}" if sample.step > 1 else ""
    times = "once" if plan.passes == 1 else f"{plan.passes} times, of which the median is shown"
    yield f"read: {len(sample):,} packs from pack {sample.start:,} on{step}, {plan.order}; each setting {times}"
    yield _of_the_cold(report)
    most = max((run.seen_nbytes for one in report.measured for run in one.runs), default=0)
    if plan.limit is not None and most <= plan.limit.nbytes:
        too_small = subject.nbytes <= plan.limit.nbytes
        remedy = "the shard is too small for it" if too_small else "read more, with --seconds or --packs"
        yield f"NOT FELT: {shown_nbytes(most)} at most were read, which the limit has room for: {remedy}"


def _of_the_cold(report: ReadingReport) -> str:
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


def _rows(report: ReadingReport, one: Measured) -> Iterator[tuple[str, ...]]:
    if one.refused is not None:
        yield one.setting.name, f"refused: {one.refused}"
    for which in get_args(Which) if one.runs else ():
        found, first = _epoch_dict(report, one, which), which == "first"
        amplified, thousand = found["read_amplification"], 1000 / found["packs"]
        yield (
            one.setting.name if first else "",
            which,
            f"{found['packs_per_second']:,.0f}",
            f"{found['packs_per_second'] * found['bytes'] / found['packs'] / 2**20:,.0f}",
            f"{found['median_us']:,.1f}",
            f"{found['p99_us']:,.1f}",
            "not told" if amplified is None else f"{amplified:.2f}",
            f"{found['hard_faults'] * thousand:,.0f}",
            f"{found['soft_faults'] * thousand:,.0f}",
            f"{one.median(lambda run: run.private_nbytes) / 2**20:,.1f}" if first else "",
        )
