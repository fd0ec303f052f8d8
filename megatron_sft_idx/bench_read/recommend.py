"""From what was measured to what is recommended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from megatron_sft_idx.bench_read.epochs import Epoch
from megatron_sft_idx.bench_read.measure import Measured, Report
from megatron_sft_idx.bench_read.settings import Setting
from megatron_sft_idx.bench_read.worker import Run

__all__ = ["Recommendation", "recommend", "shown_nbytes"]

# What a training run is taken to read: its first epoch, and two more.
_EPOCHS = 3
# A setting must be faster by so much to be worth more than a simpler one.
_MARGIN = 1.1


@dataclass(frozen=True)
class Recommendation:
    """A setting, and why; None where no setting could be read with."""

    setting: Setting | None
    reasons: list[str]


def recommend(report: Report) -> Recommendation:
    """The simplest of the settings that none is faster than by a tenth, or by more than the spread of the rounds.

    What counts is the time of a pack over three epochs. Where memory does not keep the shard, each is like the first.
    """
    read = [one for one in report.measured if one.runs and one.refused is None]
    if not read:
        return Recommendation(None, [f"{one.setting.name}: {one.refused}" for one in report.measured])
    costs = {one.setting: _costs(one, report) for one in read}
    fastest = min(read, key=lambda one: median(costs[one.setting]))
    best = costs[fastest.setting]

    def as_good(one: Measured) -> bool:
        own = costs[one.setting]
        return median(own) <= _MARGIN * median(best) or min(own) <= max(best)

    if report.subject.place.kind == "network":
        # A server that goes away is an error of pread, and a killed process (SIGBUS) where pages are mapped.
        read.sort(key=lambda one: one.setting.backend == "mmap")
    chosen = next(one for one in read if as_good(one))
    return Recommendation(chosen.setting, [*_of_the_place(report), *_of_the_choice(report, chosen, read)])


def _costs(one: Measured, report: Report) -> list[float]:
    """Seconds of a pack over all epochs, for each round."""
    return [1 / run.first.rate + (_EPOCHS - 1) / _later(run, report).rate for run in one.runs]


def _later(run: Run, report: Report) -> Epoch:
    """What the epochs after the first are like.

    The second is a sample's, which memory may keep where it does not keep the shard; unless more was read than it has.
    """
    subject, limit = report.subject, report.plan.limit
    felt = limit is not None and run.seen_nbytes > limit.nbytes
    return run.second if felt or subject.fits(limit) else run.first


def _of_the_place(report: Report) -> Iterator[str]:
    subject, limit = report.subject, report.plan.limit
    size, memory, place = shown_nbytes(subject.nbytes), subject.memory_nbytes(limit), subject.place
    if place.kind == "memory":
        yield f"{place.filesystem} keeps the shard in memory: there is no disk to save"
    elif memory is None:
        yield "how much memory there is could not be found out; it was taken to keep the shard"
    else:
        fit, epochs = ("fit", "only first epochs read") if subject.fits(limit) else ("do not fit", "every epoch reads")
        yield f"its {size} {fit} in the {shown_nbytes(memory)} there are for the page cache: {epochs} the disk"
    if place.kind == "network":
        yield (
            f"{place.filesystem} is a network file system, or may be one: where the server goes away pread fails with"
            " an error, and a process that maps its files is killed"
        )
    if not report.cold and place.kind != "memory":
        yield "the page cache could not be dropped, so no first epoch was cold: what a disk does was not measured"


def _of_the_choice(report: Report, chosen: Measured, read: list[Measured]) -> Iterator[str]:
    default = next((one for one in report.measured if one.setting == Setting()), None)
    if default is not None and default.refused:
        yield f"the default, {default.setting.name}, is refused here: {default.refused}"
    elif default is not None and chosen is not default:
        yield (
            f"beside the default, {default.setting.name}: {_rate(chosen, _first):,.0f} packs/s against"
            f" {_rate(default, _first):,.0f} in the first epoch, {_rate(chosen, _second):,.0f} against"
            f" {_rate(default, _second):,.0f} in the second"
        )
    elif len(read) > 1:
        yield f"no other setting was clearly faster ({_MARGIN - 1:.0%} or more, and beyond the spread of the rounds)"
    amplified = report.amplification(chosen, _first)
    if amplified is not None and report.cold:
        yield f"its first epoch reads {amplified:.2f} bytes from the disk for each one that is asked for"


def _first(run: Run) -> Epoch:
    return run.first


def _second(run: Run) -> Epoch:
    return run.second


def _rate(one: Measured, of: Callable[[Run], Epoch]) -> float:
    return one.median(lambda run: of(run).rate)


def shown_nbytes(nbytes: int) -> str:
    """As people write sizes."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
