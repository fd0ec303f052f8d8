"""How fast a shard is read from its disk by each setting, on as many packs as there is time for; and which to use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect.medium import Medium, MemoryLimit, cached_nbytes, drop_cache, medium_of
from megatron_sft_idx.inspect.read_worker import (
    SETTINGS,
    Epoch,
    Order,
    ReadRequest,
    ReadTimes,
    Sample,
    Setting,
    Workers,
)
from megatron_sft_idx.inspect.text import shown_nbytes
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage.progress import Advance

EpochName = Literal["first", "second"]
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
class BenchOptions:
    """What is measured, and for how long.

    Attributes:
        order: in which packs are read.
        packs: how many packs an epoch reads; None for as many as fit into ``seconds``.
        seconds: about how long the whole measurement takes; not heeded where ``packs`` is given.
        limit: the control group that limits memory; None to read with all memory of the machine.
        settings: the settings that are compared, the simplest first.
        rounds: how often each setting is measured; under a memory limit, each is measured once.
    """

    order: Order = "shuffled"
    packs: int | None = None
    seconds: float = 15.0
    limit: MemoryLimit | None = None
    settings: Sequence[Setting] = SETTINGS
    rounds: int = 3

    @property
    def num_rounds(self) -> int:
        """How often each setting is measured, the memory limit heeded."""
        return 1 if self.limit else self.rounds

    @property
    def num_requests(self) -> int:
        """How often the sample is read, two epochs each time, if the system refuses no setting."""
        return self.num_rounds * len(self.settings)

    @property
    def epoch_seconds(self) -> float:
        """Seconds that one epoch of one setting may take, if the whole measurement is to take ``seconds``."""
        return self.seconds / (2 * self.num_requests)


@dataclass(frozen=True)
class Subject:
    """The shard that is read: its packs, the bytes of its tokens, masks and starts, and where it lies.

    ``memory_nbytes`` is the memory there is to keep the shard in, limits heeded; None where that is not known.
    """

    prefix: str
    num_packs: int
    nbytes: int
    medium: Medium
    memory_nbytes: int | None

    @property
    def fits(self) -> bool:
        """Whether memory can keep the whole shard from one epoch to the next; True where its size is not known."""
        return self.memory_nbytes is None or self.nbytes <= self.memory_nbytes


@dataclass
class SettingTimes:
    """What was measured of one setting, one ``ReadTimes`` a round.

    ``refused`` says why the system does not read in this way; None where it does.
    """

    setting: Setting
    rounds: list[ReadTimes] = field(default_factory=list)
    refused: str | None = None

    def median(self, of: Callable[[ReadTimes], float]) -> float:
        """The median over the rounds of what ``of`` takes from each."""
        return median(map(of, self.rounds))

    def epochs(self, which: EpochName) -> list[Epoch]:
        """The first or the second epochs of all rounds."""
        return [getattr(times, which) for times in self.rounds]

    def rate(self, which: EpochName) -> float:
        """Packs a second, the median of the rounds."""
        return median(epoch.rate for epoch in self.epochs(which))


@dataclass(frozen=True)
class ReadingReport:
    """What was measured of a shard on a sample of its packs; ``settings`` has the order of ``options.settings``.

    ``still_cached_nbytes`` is the most that the page cache held of the shard right after it was dropped, over all
    first epochs; None where the system does not tell this user.
    """

    subject: Subject
    options: BenchOptions
    sample: Sample
    still_cached_nbytes: int | None
    settings: list[SettingTimes]

    @property
    def rounds(self) -> list[ReadTimes]:
        """All rounds of all settings."""
        return [times for one in self.settings for times in one.rounds]

    @property
    def cold(self) -> bool:
        """Whether first epochs began without the shard in memory.

        The page cache tells; where it may not be asked, half the bytes of a first epoch must have come from the disk.
        """
        if self.still_cached_nbytes is not None:
            return self.still_cached_nbytes <= self.subject.nbytes // 100
        return any((_amplification(one, "first") or 0) > 0.5 for one in self.settings)

    def amplification(self, one: SettingTimes, which: EpochName) -> float | None:
        """Bytes read from the disk for each byte asked for, the median of the rounds; None where they are not counted.

        Some file systems do not count them: then no byte is said to have been read although memory held nothing.
        """
        counted = any(times.first.disk_nbytes for times in self.rounds)
        return _amplification(one, which) if counted or not self.cold or self.still_cached_nbytes is None else None


def _amplification(one: SettingTimes, which: EpochName) -> float | None:
    ratios = [epoch.amplification for epoch in one.epochs(which)]
    return median(ratio for ratio in ratios if ratio is not None) if ratios and None not in ratios else None


def sample_of(subject: Subject, options: BenchOptions, count: int) -> Sample:
    """``count`` packs, or all where there are fewer, chosen so that reading them is like reading the whole shard.

    Where memory keeps the shard, or packs are read in order, pages that the kernel reads ahead are used later in the
    epoch: neighbours are taken. Otherwise those pages are gone before they are used: evenly spread packs are taken.
    """
    whole = subject.num_packs
    count = min(count, whole)
    if options.order == "sequential" or subject.fits:
        start = (whole - count) // 2
        return Sample(start, start + count, 1, options.order)
    step = whole // count
    return Sample(0, count * step, step, options.order)


def largest_sample(subject: Subject, options: BenchOptions, trial: Callable[[Sample], Epoch | None]) -> Sample:
    """The packs that can be read in ``options.epoch_seconds``; under a memory limit, enough to overflow it.

    Args:
        subject: the shard.
        options: those whose ``packs`` is None.
        trial: reads a sample and returns its first epoch; None where the system refuses to read it.
    """
    count = _LEAST_PACKS
    while True:
        # A small sample reads slower than a large one: fewer of its packs use what is read ahead.
        sample = sample_of(subject, options, count)
        epoch = trial(sample)
        if epoch is None:
            return sample
        if epoch.packs < len(sample) or len(sample) < count or epoch.seconds > options.epoch_seconds / 4:
            break
        count *= 4
    count = max(int(epoch.rate * options.epoch_seconds), _LEAST_PACKS)
    if options.limit:
        count = max(count, _OVER_LIMIT * options.limit.nbytes * subject.num_packs // subject.nbytes)
    return sample_of(subject, options, count)


def measure_once(workers: Workers, one: SettingTimes, request: ReadRequest) -> int | None:
    """Drop the page cache and read two epochs; adds the times to a setting, or why there are none.

    Returns the bytes of the shard that the page cache held after it was dropped; None where the system does not tell.
    """
    paths = ShardPaths.of(request.prefix)
    files = [path for path in paths.all if path != paths.idx]  # Megatron's own index is not read for packs
    drop_cache(files)
    cached = cached_nbytes(files)
    try:
        one.rounds.append(workers.run(request))
    except OSError as refused:
        one.refused = str(refused)
    return cached


def bench_read(
    prefix: str, options: BenchOptions | None = None, *, on_progress: Advance = lambda done: None
) -> ReadingReport:
    """Measure every setting on one shard, each in a process of its own.

    Args:
        prefix: of a local shard.
        options: what is to be measured.
        on_progress: called with 1 after each setting of each round; ``BenchOptions.num_requests`` times in all.

    Raises:
        ShardNotFoundError, FormatError: the shard is bad, or has no packs.
        OSError: the files cannot be read in any way.
    """
    options = options or BenchOptions()
    # By pread: a page that this process maps would stay in the cache.
    shard = Shard(prefix, backend="pread")
    if not len(shard):
        raise FormatError(f"{prefix}: the shard has no packs, so there is nothing to read; name another")
    paths = ShardPaths.of(prefix)
    tokens, loss, _, starts = (digest.nbytes for digest in shard.header.digests)
    medium = medium_of(paths.tokens)
    limits = [nbytes for nbytes in (medium.memory_nbytes, options.limit and options.limit.nbytes) if nbytes is not None]
    subject = Subject(paths.prefix, len(shard), tokens + loss + starts, medium, min(limits, default=None))
    seconds = float("inf") if options.packs else _PATIENCE * options.epoch_seconds
    group = str(options.limit.folder) if options.limit else None
    settings = [SettingTimes(setting) for setting in options.settings]
    still_cached: int | None = 0
    with Workers() as workers:

        def measure(one: SettingTimes, sample: Sample) -> None:
            nonlocal still_cached
            cached = measure_once(workers, one, ReadRequest(subject.prefix, sample, one.setting, seconds, group))
            still_cached = None if cached is None or still_cached is None else max(cached, still_cached)

        def trial(sample: Sample) -> Epoch | None:
            simplest = SettingTimes(options.settings[0])
            measure(simplest, sample)
            return simplest.rounds[0].first if simplest.rounds else None

        packs = options.packs
        sample = largest_sample(subject, options, trial) if packs is None else sample_of(subject, options, packs)
        for _ in range(options.num_rounds):
            for one in settings:
                if one.refused is None:
                    measure(one, sample)
                on_progress(1)
    return ReadingReport(subject, options, sample, still_cached, settings)


# ---- the recommendation ----


class Recommendation(NamedTuple):
    """The setting to read with, and why; None where the system refuses every setting."""

    setting: Setting | None
    reasons: list[str]


def recommend(report: ReadingReport) -> Recommendation:
    """The simplest setting that no other beats by a tenth, nor by more than the spread of its rounds.

    Compared is the time of a pack over three epochs. Where memory does not keep the shard, each is like the first.
    """
    usable = [one for one in report.settings if one.rounds and one.refused is None]
    if not usable:
        return Recommendation(None, [f"{one.setting.name}: {one.refused}" for one in report.settings])
    subject, limit = report.subject, report.options.limit

    def seconds(times: ReadTimes) -> float:
        """Seconds to read a pack once in each of the epochs.

        Memory may keep the sample although it cannot keep the shard. Then the second epoch says nothing of the
        shard's, which is taken to be like the first; not so where the sample overflowed the memory limit.
        """
        overflowed = limit is not None and times.seen_nbytes > limit.nbytes
        later = times.second if overflowed or subject.fits else times.first
        return 1 / times.first.rate + (_EPOCHS - 1) / later.rate

    costs = {one.setting: [seconds(times) for times in one.rounds] for one in usable}
    best = min(costs.values(), key=median)
    if subject.medium.kind == "network":
        # A server that goes away is an error of pread, and a killed process (SIGBUS) where pages are mapped.
        usable.sort(key=lambda one: one.setting.backend == "mmap")
    chosen = next(
        one
        for one in usable
        if median(costs[one.setting]) <= _MARGIN * median(best) or min(costs[one.setting]) <= max(best)
    )
    return Recommendation(chosen.setting, list(_reasons(report, chosen, usable)))


def _reasons(report: ReadingReport, chosen: SettingTimes, usable: list[SettingTimes]) -> Iterator[str]:
    """Why a setting was chosen of the usable ones: first where the shard lies, then what was measured."""
    subject = report.subject
    memory, medium = subject.memory_nbytes, subject.medium
    if medium.kind == "memory":
        yield f"{medium.filesystem} keeps the shard in memory: there is no disk to save"
    elif memory is None:
        yield "how much memory there is could not be found out; it was taken to keep the shard"
    else:
        fit, epochs = ("fit", "only first epochs read") if subject.fits else ("do not fit", "every epoch reads")
        size, room = shown_nbytes(subject.nbytes), shown_nbytes(memory)
        yield f"its {size} {fit} in the {room} there are for the page cache: {epochs} the disk"
    if medium.kind == "network":
        yield (
            f"{medium.filesystem} is a network file system, or may be one: where the server goes away pread fails with"
            " an error, and a process that maps its files is killed"
        )
    if not report.cold and medium.kind != "memory":
        yield "the page cache could not be dropped, so no first epoch was cold: what a disk does was not measured"
    default = next((one for one in report.settings if one.setting == Setting()), None)
    if default is not None and default.refused:
        yield f"the default, {default.setting.name}, is refused here: {default.refused}"
    elif default is not None and chosen is not default:
        yield (
            f"beside the default, {default.setting.name}: {chosen.rate('first'):,.0f} packs/s against"
            f" {default.rate('first'):,.0f} in the first epoch, {chosen.rate('second'):,.0f} against"
            f" {default.rate('second'):,.0f} in the second"
        )
    elif len(usable) > 1:
        yield f"no other setting was clearly faster ({_MARGIN - 1:.0%} or more, and beyond the spread of the rounds)"
    amplified = report.amplification(chosen, "first")
    if amplified is not None and report.cold:
        yield f"its first epoch reads {amplified:.2f} bytes from the disk for each one that is asked for"


# ---- the report, for programs and for people ----


def _setting_dict(report: ReadingReport, one: SettingTimes) -> dict[str, Any]:
    """Medians over the rounds of one setting; faults, packs and bytes are of a whole epoch."""
    values: dict[str, Any] = {"name": one.setting.name, "setting": asdict(one.setting), "refused": one.refused}
    for which in get_args(EpochName) if one.rounds else ():
        epochs = one.epochs(which)
        rates = [epoch.rate for epoch in epochs]
        whole = {"packs": "packs", "bytes": "nbytes", "hard_faults": "hard_faults", "soft_faults": "soft_faults"}
        values[f"{which}_epoch"] = {
            **{key: int(median(getattr(epoch, name) for epoch in epochs)) for key, name in whole.items()},
            "packs_per_second": median(rates),
            "slowest_packs_per_second": min(rates),
            "fastest_packs_per_second": max(rates),
            "median_us": median(epoch.median_us for epoch in epochs),
            "p99_us": median(epoch.p99_us for epoch in epochs),
            "read_amplification": report.amplification(one, which),
        }
    if one.rounds:
        values["private_bytes"] = int(one.median(lambda times: times.private_nbytes))
        values["huge_page_bytes"] = int(one.median(lambda times: times.huge_nbytes))
    return values


def reading_dict(report: ReadingReport, advice: Recommendation) -> dict[str, Any]:
    """All that was measured, and the recommendation."""
    return {
        "prefix": report.subject.prefix,
        "packs": report.subject.num_packs,
        "bytes": report.subject.nbytes,
        "place": asdict(report.subject.medium),
        "fits_in_memory": report.subject.fits,
        "sample": {**asdict(report.sample), "packs": len(report.sample)},
        "rounds": report.options.num_rounds,
        "memory_limit_bytes": report.options.limit and report.options.limit.nbytes,
        "cold": report.cold,
        "cached_bytes_when_cold": report.still_cached_nbytes,
        "settings": [_setting_dict(report, one) for one in report.settings],
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
    rows = [_COLUMNS, *(row for one in report.settings for row in _rows(_setting_dict(report, one)))]
    widths = [max(len(row[column]) for row in rows if len(row) > 2) for column in range(len(_COLUMNS))]
    for row in rows:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=False)]
        yield "  ".join([*names, *numbers]).rstrip()
    yield ""
    yield "disk/asked: bytes read from the disk for each byte of a pack. hard, soft: page faults of 1,000 packs that"
    yield "waited for the disk, or found their page in memory. own MiB: memory that reading took, maps left out."
    for one in report.settings:
        if one.setting.huge_pages and one.rounds:
            most = max(times.huge_nbytes for times in one.rounds)
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
    subject, options, sample = report.subject, report.options, report.sample
    medium, memory = subject.medium, subject.memory_nbytes
    ahead = "" if medium.read_ahead_nbytes is None else f", read-ahead {shown_nbytes(medium.read_ahead_nbytes)}"
    room = "unknown" if memory is None else shown_nbytes(memory)
    yield f"{subject.prefix}: {subject.num_packs:,} packs, {shown_nbytes(subject.nbytes)}"
    yield f"on {medium.filesystem} ({medium.source}{ahead}), memory for the page cache: {room}"
    if options.limit is not None:
        yield f"under a limit of {shown_nbytes(options.limit.nbytes)}, set by a control group"
    step = f", one of every {sample.step:,}" if sample.step > 1 else ""
    times = "once" if options.num_rounds == 1 else f"{options.num_rounds} times, of which the median is shown"
    yield f"read: {len(sample):,} packs from pack {sample.start:,} on{step}, {options.order}; each setting {times}"
    yield _cold_line(report)
    most = max((times.seen_nbytes for times in report.rounds), default=0)
    if options.limit is not None and most <= options.limit.nbytes:
        too_small = subject.nbytes <= options.limit.nbytes
        remedy = "the shard is too small for it" if too_small else "read more, with --seconds or --packs"
        yield f"NOT FELT: {shown_nbytes(most)} at most were read, which the limit has room for: {remedy}"


def _cold_line(report: ReadingReport) -> str:
    """How much of the shard was in memory when first epochs began."""
    dropped = "page cache dropped before each first epoch"
    cached, medium = report.still_cached_nbytes, report.subject.medium
    if cached is None:
        seen = "bytes were read from the disk" if report.cold else "no bytes were seen to be read from the disk"
        return f"{dropped}: the system does not tell this user what stayed, but {seen}"
    if report.cold:
        return f"{dropped}, and found empty" + (f" but for {shown_nbytes(cached)}" if cached else "")
    why = f"other processes map them, or {medium.filesystem} does not drop them"
    if medium.kind == "memory":
        why = f"{medium.filesystem} has no other place"
    return f"NOT COLD: {shown_nbytes(cached)} stay in memory, because {why}; first epochs did not read them from a disk"


def _rows(one: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The rows of the table for one setting, made of its entry in ``reading_dict``."""
    if one["refused"] is not None:
        yield one["name"], f"refused: {one['refused']}"
    for which in get_args(EpochName):
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
