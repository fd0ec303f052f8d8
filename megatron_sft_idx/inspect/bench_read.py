"""How fast a shard is read here, by every setting, on a sample as large as there is time for; and which is advised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect.place import MemoryLimit, ShardPlace, cached_nbytes, drop_cache, find_place
from megatron_sft_idx.inspect.read_worker import SETTINGS, Epoch, Order, ReadJob, ReadTimes, Sample, Setting, Workers
from megatron_sft_idx.inspect.text import shown_nbytes
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage.progress import Advance

Which = Literal["first", "second"]
# An epoch under a memory limit reads this many times the limit, where the shard has as much.
_OVER_LIMIT = 3
# Fewer packs say little.
_LEAST_PACKS = 256
# A slow setting may take longer than its share of the time, but not by more than this.
_PATIENCE = 2
# What a training run is taken to read: its first epoch, and two more.
_EPOCHS = 3
# A setting must be faster by so much to be worth more than a simpler one.
_MARGIN = 1.1
_COLUMNS = ("setting", "epoch", "packs/s", "MiB/s", "median us", "p99 us", "disk/asked", "hard", "soft", "own MiB")


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long.

    Attributes:
        order: in which packs are read.
        packs: of an epoch; None for as many as fit into the time.
        seconds: all of it is to take, about; with ``packs`` it takes what it takes.
        limit: of the memory to read with; None for the machine's.
        settings: what is compared, from the simplest on.
        rounds: how often each is measured; under a memory limit, once.
    """

    order: Order = "shuffled"
    packs: int | None = None
    seconds: float = 15.0
    limit: MemoryLimit | None = None
    settings: Sequence[Setting] = SETTINGS
    rounds: int = 3

    @property
    def passes(self) -> int:
        """Rounds that are made."""
        return 1 if self.limit else self.rounds

    @property
    def runs(self) -> int:
        """In all, where nothing is refused."""
        return self.passes * len(self.settings)

    @property
    def epoch_seconds(self) -> float:
        """What one epoch of one setting may take for all to take ``seconds``."""
        return self.seconds / (2 * self.runs)


@dataclass(frozen=True)
class Subject:
    """The shard that is read: its packs, the bytes of its tokens, masks and starts, and where it lies.

    ``memory_nbytes`` is what there is to keep it in, under the limit; None where that is not known.
    """

    prefix: str
    num_packs: int
    nbytes: int
    place: ShardPlace
    memory_nbytes: int | None

    @property
    def fits(self) -> bool:
        """Whether memory can keep all of it from one epoch to the next; taken for granted where that is not known."""
        return self.memory_nbytes is None or self.nbytes <= self.memory_nbytes


@dataclass
class Measured:
    """One setting: what was found, a run a round; and why the system does not read in this way, None where it does."""

    setting: Setting
    runs: list[ReadTimes] = field(default_factory=list)
    refused: str | None = None

    def median(self, of: Callable[[ReadTimes], float]) -> float:
        """Of the rounds."""
        return median(map(of, self.runs))

    def epochs(self, which: Which) -> list[Epoch]:
        """The first or the second epochs of all rounds."""
        return [getattr(run, which) for run in self.runs]

    def rate(self, which: Which) -> float:
        """Packs a second, the median of the rounds."""
        return median(epoch.rate for epoch in self.epochs(which))


@dataclass(frozen=True)
class ReadingReport:
    """What was found of a shard by a plan, on a sample of its packs; settings are in the order of the plan.

    ``left_nbytes`` is the most that the page cache held of the shard when an epoch was to begin without; None where
    the system does not tell.
    """

    subject: Subject
    plan: Plan
    sample: Sample
    left_nbytes: int | None
    measured: list[Measured]

    @property
    def runs(self) -> list[ReadTimes]:
        """Of all settings."""
        return [run for one in self.measured for run in one.runs]

    @property
    def cold(self) -> bool:
        """Whether first epochs began without the shard in memory: by the page cache, or else by what was read."""
        if self.left_nbytes is not None:
            return self.left_nbytes <= self.subject.nbytes // 100
        return any((_amplification(one, "first") or 0) > 0.5 for one in self.measured)

    def amplification(self, one: Measured, which: Which) -> float | None:
        """Bytes of the disk for each one asked for, the median of the rounds; None where they are not counted.

        Not every file system counts them: nor where none of the shard was in memory and yet no byte is said to have
        been read.
        """
        uncounted = self.left_nbytes is not None and self.cold and not any(run.first.disk_nbytes for run in self.runs)
        return None if uncounted else _amplification(one, which)


def _amplification(one: Measured, which: Which) -> float | None:
    found = [epoch.amplification for epoch in one.epochs(which)]
    return median(value for value in found if value is not None) if found and None not in found else None


def sample_of(subject: Subject, plan: Plan, count: int) -> Sample:
    """So many packs, if there are, taken so that reading them is like reading the whole shard.

    Where memory keeps the shard, pages that the kernel reads ahead are used later in the epoch: neighbours are taken.
    Where it does not, those are gone by then: packs from everywhere are taken. In order, neighbours.
    """
    whole = subject.num_packs
    count = min(count, whole)
    if plan.order == "sequential" or subject.fits:
        start = (whole - count) // 2
        return Sample(start, start + count, 1, plan.order)
    step = whole // count
    return Sample(0, count * step, step, plan.order)


def largest_sample(subject: Subject, plan: Plan, trial: Callable[[Sample], Epoch | None]) -> Sample:
    """The packs that can be read in the time the plan has for an epoch; under a memory limit, enough to feel it.

    Args:
        subject: the shard.
        plan: without a number of packs.
        trial: reads a sample; None where that is refused.
    """
    count = _LEAST_PACKS
    while True:
        # A small sample reads slower than a large one: what is read ahead is used by few.
        sample = sample_of(subject, plan, count)
        epoch = trial(sample)
        if epoch is None:
            return sample
        if epoch.packs < len(sample) or len(sample) < count or epoch.seconds > plan.epoch_seconds / 4:
            break
        count *= 4
    count = max(int(epoch.rate * plan.epoch_seconds), _LEAST_PACKS)
    if plan.limit:
        count = max(count, _OVER_LIMIT * plan.limit.nbytes * subject.num_packs // subject.nbytes)
    return sample_of(subject, plan, count)


def measure_once(workers: Workers, one: Measured, job: ReadJob) -> int | None:
    """Two epochs, the first without the page cache; adds a run to a setting, or why there is none.

    Returns the bytes that the cache held of the shard all the same; None where the system does not tell.
    """
    paths = ShardPaths.of(job.prefix)
    files = [path for path in paths.all if path != paths.idx]  # Megatron's own index is not read for packs
    drop_cache(files)
    kept = cached_nbytes(files)
    try:
        one.runs.append(workers.run(job))
    except OSError as refused:
        one.refused = str(refused)
    return kept


def bench_read(prefix: str, plan: Plan | None = None, *, tell: Advance = lambda runs: None) -> ReadingReport:
    """Measure every setting on one shard, each in a process of its own.

    Args:
        prefix: of a local shard.
        plan: what is to be measured.
        tell: called with the number of runs done since it was last called; ``Plan.runs`` in all.

    Raises:
        ShardNotFoundError, FormatError: the shard is bad, or has no packs.
        OSError: the files cannot be read at all.
    """
    plan = plan or Plan()
    # By pread: a page that this process maps would stay in the cache.
    shard = Shard(prefix, backend="pread")
    if not len(shard):
        raise FormatError(f"{prefix}: the shard has no packs, so there is nothing to read; name another")
    paths = ShardPaths.of(prefix)
    tokens, loss, _, starts = (digest.nbytes for digest in shard.header.digests)
    place = find_place(paths.tokens)
    known = [nbytes for nbytes in (place.memory_nbytes, plan.limit and plan.limit.nbytes) if nbytes is not None]
    subject = Subject(paths.prefix, len(shard), tokens + loss + starts, place, min(known, default=None))
    seconds = float("inf") if plan.packs else _PATIENCE * plan.epoch_seconds
    group = str(plan.limit.folder) if plan.limit else None
    measured = [Measured(setting) for setting in plan.settings]
    left: int | None = 0
    with Workers() as workers:

        def measure(one: Measured, sample: Sample) -> None:
            nonlocal left
            kept = measure_once(workers, one, ReadJob(subject.prefix, sample, one.setting, seconds, group))
            left = None if kept is None or left is None else max(kept, left)

        def trial(sample: Sample) -> Epoch | None:
            simplest = Measured(plan.settings[0])
            measure(simplest, sample)
            return simplest.runs[0].first if simplest.runs else None

        sample = largest_sample(subject, plan, trial) if plan.packs is None else sample_of(subject, plan, plan.packs)
        for _ in range(plan.passes):
            for one in measured:
                if one.refused is None:
                    measure(one, sample)
                tell(1)
    return ReadingReport(subject, plan, sample, left, measured)


# ---- which is advised ----


class Recommendation(NamedTuple):
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
    subject, limit = report.subject, report.plan.limit

    def seconds(run: ReadTimes) -> float:
        """Of a pack over all epochs.

        The second epoch is a sample's, which memory may keep where it does not keep the shard: unless more was read
        than it has, later epochs are like the first one.
        """
        felt = limit is not None and run.seen_nbytes > limit.nbytes
        later = run.second if felt or subject.fits else run.first
        return 1 / run.first.rate + (_EPOCHS - 1) / later.rate

    costs = {one.setting: [seconds(run) for run in one.runs] for one in read}
    best = min(costs.values(), key=median)
    if subject.place.kind == "network":
        # A server that goes away is an error of pread, and a killed process (SIGBUS) where pages are mapped.
        read.sort(key=lambda one: one.setting.backend == "mmap")
    chosen = next(
        one
        for one in read
        if median(costs[one.setting]) <= _MARGIN * median(best) or min(costs[one.setting]) <= max(best)
    )
    return Recommendation(chosen.setting, list(_reasons(report, chosen, read)))


def _reasons(report: ReadingReport, chosen: Measured, read: list[Measured]) -> Iterator[str]:
    """Why a setting was chosen of those that could be read with: the place first, then what was measured."""
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


# ---- told ----


def _setting_dict(report: ReadingReport, one: Measured) -> dict[str, Any]:
    """Medians over the rounds of one setting; faults, packs and bytes are of a whole epoch."""
    found: dict[str, Any] = {"name": one.setting.name, "setting": asdict(one.setting), "refused": one.refused}
    for which in get_args(Which) if one.runs else ():
        epochs = one.epochs(which)
        rates = [epoch.rate for epoch in epochs]
        whole = {"packs": "packs", "bytes": "nbytes", "hard_faults": "hard_faults", "soft_faults": "soft_faults"}
        found[f"{which}_epoch"] = {
            **{key: int(median(getattr(epoch, name) for epoch in epochs)) for key, name in whole.items()},
            "packs_per_second": median(rates),
            "slowest_packs_per_second": min(rates),
            "fastest_packs_per_second": max(rates),
            "median_us": median(epoch.median_us for epoch in epochs),
            "p99_us": median(epoch.p99_us for epoch in epochs),
            "read_amplification": report.amplification(one, which),
        }
    if one.runs:
        found["private_bytes"] = int(one.median(lambda run: run.private_nbytes))
        found["huge_page_bytes"] = int(one.median(lambda run: run.huge_nbytes))
    return found


def reading_dict(report: ReadingReport, advice: Recommendation) -> dict[str, Any]:
    """All that was measured, and the recommendation."""
    return {
        "prefix": report.subject.prefix,
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


def reading_lines(report: ReadingReport, advice: Recommendation) -> Iterator[str]:
    """A heading, two lines a setting, and the recommendation with its reasons."""
    yield from _heading(report)
    yield ""
    rows = [_COLUMNS, *(row for one in report.measured for row in _rows(_setting_dict(report, one)))]
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
        yield f"{report.subject.prefix}: cannot be read in any of these ways"
    else:
        yield f"recommended: {advice.setting.call}"
        yield f"in training: {advice.setting.training}"
    yield from (f"- {reason}" for reason in advice.reasons)


def _heading(report: ReadingReport) -> Iterator[str]:
    subject, plan, sample = report.subject, report.plan, report.sample
    place, memory = subject.place, subject.memory_nbytes
    ahead = "" if place.read_ahead_nbytes is None else f", read-ahead {shown_nbytes(place.read_ahead_nbytes)}"
    room = "unknown" if memory is None else shown_nbytes(memory)
    yield f"{subject.prefix}: {subject.num_packs:,} packs, {shown_nbytes(subject.nbytes)}"
    yield f"on {place.filesystem} ({place.source}{ahead}), memory for the page cache: {room}"
    if plan.limit is not None:
        yield f"under a limit of {shown_nbytes(plan.limit.nbytes)}, set by a control group"
    step = f", one of every {sample.step:,}" if sample.step > 1 else ""
    times = "once" if plan.passes == 1 else f"{plan.passes} times, of which the median is shown"
    yield f"read: {len(sample):,} packs from pack {sample.start:,} on{step}, {plan.order}; each setting {times}"
    yield _of_the_cold(report)
    most = max((run.seen_nbytes for run in report.runs), default=0)
    if plan.limit is not None and most <= plan.limit.nbytes:
        too_small = subject.nbytes <= plan.limit.nbytes
        remedy = "the shard is too small for it" if too_small else "read more, with --seconds or --packs"
        yield f"NOT FELT: {shown_nbytes(most)} at most were read, which the limit has room for: {remedy}"


def _of_the_cold(report: ReadingReport) -> str:
    """What first epochs began with."""
    dropped = "page cache dropped before each first epoch"
    left, place = report.left_nbytes, report.subject.place
    if left is None:
        seen = "bytes were read from the disk" if report.cold else "no bytes were seen to be read from the disk"
        return f"{dropped}: the system does not tell this user what stayed, but {seen}"
    if report.cold:
        return f"{dropped}, and found empty" + (f" but for {shown_nbytes(left)}" if left else "")
    why = f"other processes map them, or {place.filesystem} does not drop them"
    if place.kind == "memory":
        why = f"{place.filesystem} has no other place"
    return f"NOT COLD: {shown_nbytes(left)} stay in memory, because {why}; first epochs did not read them from a disk"


def _rows(one: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The lines of the table for one setting, by what ``reading_dict`` has of it."""
    if one["refused"] is not None:
        yield one["name"], f"refused: {one['refused']}"
    for which in get_args(Which):
        if (epoch := one.get(f"{which}_epoch")) is None:
            continue
        first, amplified, thousand = which == "first", epoch["read_amplification"], 1000 / epoch["packs"]
        yield (
            one["name"] if first else "",
            which,
            f"{epoch['packs_per_second']:,.0f}",
            f"{epoch['packs_per_second'] * epoch['bytes'] / epoch['packs'] / 2**20:,.0f}",
            f"{epoch['median_us']:,.1f}",
            f"{epoch['p99_us']:,.1f}",
            "not told" if amplified is None else f"{amplified:.2f}",
            f"{epoch['hard_faults'] * thousand:,.0f}",
            f"{epoch['soft_faults'] * thousand:,.0f}",
            f"{one['private_bytes'] / 2**20:,.1f}" if first else "",
        )
