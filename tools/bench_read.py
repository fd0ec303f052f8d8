"""Recommend how to read a shard, by measurement: the fastest setting depends on disk, file system and memory.

    python tools/bench_read.py data/train

``medium.py`` examines the disk and the memory, and ``read_worker.py`` has the processes that read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

from medium import Medium, MemoryLimit, available_nbytes, drop_cache, medium_of, memory_limit
from read_worker import (
    SETTINGS,
    Epoch,
    Opener,
    Order,
    ReadRequest,
    ReadTimes,
    Setting,
    ShardReader,
    run_request,
)

from megatron_sft_idx.cli.options import add_log_interval, declare, local_path, positive
from megatron_sft_idx.cli.parsers import HelpFormatter, Parser
from megatron_sft_idx.cli.signals import ending_on_signals
from megatron_sft_idx.cli.streams import message_of, standard_streams
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.inspect.text import shown_nbytes
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.lines import counted, log_line, print_layout, print_lines
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage.progress import Advance, Progress

_DESCRIPTION = "Measure several ways of reading a shard from its disk, and recommend one."
_EXAMPLES = """\
examples:
  find the best settings for training with this disk and memory (takes about half a minute):
    python tools/bench_read.py data/train

  read for longer, because a slow disk needs more time, and print one JSON document for a program:
    python tools/bench_read.py data/train --seconds 120 --json > reading.json

  read as if there were 4 GiB of memory (needs permission to make a control group: root, most containers):
    python tools/bench_read.py data/train --memory-limit 4096 --seconds 120

A separate process reads the shard with each setting: first after dropping the page cache, which is verified, then once
more, as in a second epoch. All settings are measured in turn, in several rounds. The table shows packs per second, and
bytes read from the disk per byte of a pack. Nothing is written. Other programs that read the shard lose their cached
pages too; the caches of a file server, or of the host of a virtual machine, are not dropped.

The memory limit is set with a control group, because ulimit does not count the page cache.

exit code: 0 if measured; 1 if the shard is bad or cannot be read with any setting; 2 for wrong usage, or if no limit
can be set here.
"""
EpochName = Literal["first", "second"]
# An epoch under a memory limit reads this many times the limit, if the shard is that large.
_OVER_LIMIT = 3
_LEAST_PACKS = 256  # the times of fewer packs vary too much
_TRIAL_PACKS = 4096  # a small sample uses less of the kernel's read-ahead, so it would seem slower than a large one
# A slow setting can take longer than its share of the time, but not more than this factor.
_PATIENCE = 2
# Number of epochs that a training run is assumed to read, including the first one.
_EPOCHS = 3
# A setting must be faster than a simpler one by this factor to be recommended instead.
_MARGIN = 1.1
_COLUMNS = ("setting", "packs/s, cold", "MiB/s", "disk/asked", "packs/s, warm", "MiB/s", "disk/asked")


@dataclass(frozen=True)
class BenchOptions:
    """Options of a measurement.

    Attributes:
        order: order in which packs are read.
        packs: number of packs per epoch; None for as many as fit into ``seconds``.
        seconds: approximate duration of the whole measurement; ignored if ``packs`` is given.
        limit: the control group that limits memory; None to read with all memory of the machine.
        settings: the settings to compare, the simplest first.
        rounds: number of measurements of each setting; under a memory limit, each is measured once.
    """

    order: Order = "shuffled"
    packs: int | None = None
    seconds: float = 15.0
    limit: MemoryLimit | None = None
    settings: Sequence[Setting] = SETTINGS
    rounds: int = 3

    @property
    def num_rounds(self) -> int:
        """Number of measurements of each setting, taking the memory limit into account."""
        return 1 if self.limit else self.rounds

    @property
    def epoch_seconds(self) -> float:
        """Time in seconds for one of the two epochs of one setting."""
        return self.seconds / (2 * self.num_rounds * len(self.settings))


@dataclass(frozen=True)
class Subject:
    """The shard that is read: its packs, the bytes of its tokens, masks and starts, and its medium.

    ``memory_nbytes`` is the memory that is available to cache the shard, taking limits into account.
    """

    prefix: str
    num_packs: int
    nbytes: int
    medium: Medium
    memory_nbytes: int

    @property
    def fits(self) -> bool:
        """Whether the whole shard can stay in memory from one epoch to the next."""
        return self.nbytes <= self.memory_nbytes


@dataclass
class SettingTimes:
    """The measurements of one setting, one ``ReadTimes`` per round.

    ``refused`` is the reason why the system does not allow this way of reading; None if it does.
    """

    setting: Setting
    rounds: list[ReadTimes] = field(default_factory=list)
    refused: str | None = None

    def epochs(self, which: EpochName) -> list[Epoch]:
        """Return the first or the second epochs of all rounds."""
        return [getattr(times, which) for times in self.rounds]

    def rate(self, which: EpochName) -> float:
        """Return packs per second, the median of the rounds."""
        return median(epoch.rate for epoch in self.epochs(which))


@dataclass(frozen=True)
class ReadingReport:
    """The measurements for the packs ``sample`` of a shard; ``settings`` has the order of ``options.settings``."""

    subject: Subject
    options: BenchOptions
    sample: range
    settings: list[SettingTimes]

    @property
    def cold(self) -> bool:
        """Whether at least one first epoch read more than half of its bytes from the disk."""
        return any(epoch.amplification > 0.5 for one in self.settings for epoch in one.epochs("first"))

    def amplification(self, one: SettingTimes, which: EpochName) -> float | None:
        """Return bytes read from the disk per requested byte, the median of the rounds of a setting.

        None if no setting is known to have read from the disk: some file systems do not count it.
        """
        is_told = any(epoch.disk_nbytes for setting in self.settings for epoch in setting.epochs("first"))
        return median(epoch.amplification for epoch in one.epochs(which)) if is_told else None


# ---- measuring ----


def sample_of(subject: Subject, order: Order, count: int) -> range:
    """Choose ``count`` packs, or all if there are fewer, so that reading them is like reading the whole shard.

    If the shard fits in memory, or packs are read in order, pages that the kernel reads ahead are used later in the
    epoch: the sample is a run of neighbours. Otherwise such pages are evicted before use: the sample is evenly spread.
    """
    whole = subject.num_packs
    count = min(count, whole)
    if order == "sequential" or subject.fits:
        start = (whole - count) // 2
        return range(start, start + count)
    return range(0, whole // count * count, whole // count)


def largest_sample(subject: Subject, options: BenchOptions, trial: Callable[[range], Epoch | None]) -> range:
    """Return packs that can be read in ``options.epoch_seconds``; under a memory limit, enough to exceed it.

    Args:
        subject: the shard.
        options: options of the measurement; ``packs`` is None.
        trial: reads packs once with one setting and returns that epoch; None if the system refuses to read them.
    """
    sample = sample_of(subject, options.order, _TRIAL_PACKS)
    epoch = trial(sample)
    if epoch is None:
        return sample
    count = max(int(epoch.rate * options.epoch_seconds), _LEAST_PACKS)
    if options.limit:
        count = max(count, _OVER_LIMIT * options.limit.nbytes * subject.num_packs // subject.nbytes)
    return sample_of(subject, options.order, count)


def measure_once(one: SettingTimes, request: ReadRequest, open_reader: Opener = ShardReader) -> None:
    """Drop the page cache and read two epochs; add their times to ``one``, or the reason why there are none."""
    drop_cache(ShardPaths.of(request.prefix).all)
    try:
        one.rounds.append(run_request(request, open_reader))
    except OSError as refused:
        one.refused = str(refused)


def bench_read(
    prefix: str, options: BenchOptions | None = None, *, on_progress: Advance = lambda done: None
) -> ReadingReport:
    """Measure every setting on one shard, each time in a new process.

    Args:
        prefix: prefix of a local shard.
        options: options of the measurement.
        on_progress: called with 1 after each setting of each round.

    Raises:
        ShardNotFoundError, FormatError: the shard is bad or has no packs.
        OSError: the files cannot be read in any way.
    """
    options = options or BenchOptions()
    # With pread, because pages that this process maps would stay in the cache when it is dropped.
    shard = Shard(prefix, backend="pread")
    if not len(shard):
        raise FormatError(f"{prefix}: the shard has no packs, so there is nothing to read; pass another shard")
    tokens, loss, _, starts = (digest.nbytes for digest in shard.header.digests)
    memory = min(available_nbytes(), options.limit.nbytes) if options.limit else available_nbytes()
    paths = ShardPaths.of(prefix)
    subject = Subject(paths.prefix, len(shard), tokens + loss + starts, medium_of(paths.tokens), memory)
    seconds = float("inf") if options.packs else _PATIENCE * options.epoch_seconds
    group = str(options.limit.folder) if options.limit else None

    def measure(one: SettingTimes, sample: range) -> None:
        measure_once(one, ReadRequest(subject.prefix, sample, one.setting, options.order, seconds, group))

    def trial(sample: range) -> Epoch | None:
        simplest = SettingTimes(options.settings[0])
        measure(simplest, sample)
        return simplest.rounds[0].first if simplest.rounds else None

    if options.packs is None:
        sample = largest_sample(subject, options, trial)
    else:
        sample = sample_of(subject, options.order, options.packs)
    settings = [SettingTimes(setting) for setting in options.settings]
    for _ in range(options.num_rounds):
        for one in settings:
            if one.refused is None:
                measure(one, sample)
            on_progress(1)
    return ReadingReport(subject, options, sample, settings)


# ---- the recommendation ----


class Recommendation(NamedTuple):
    """The recommended setting and the reasons; None if the system refuses every setting."""

    setting: Setting | None
    reasons: list[str]


def recommend(report: ReadingReport) -> Recommendation:
    """Recommend the simplest setting that is at most 10% slower than the fastest, or within the spread of rounds.

    Settings are compared by the time that a pack takes over three epochs. If the whole shard does not fit in memory,
    all three count like the first one, because the second was fast only if the sample stayed in memory.
    """
    usable = [one for one in report.settings if one.rounds and one.refused is None]
    if not usable:
        return Recommendation(None, [f"{one.setting.name}: {one.refused}" for one in report.settings])

    def seconds(times: ReadTimes) -> float:
        """Return the seconds to read a pack once in each of three epochs."""
        later = times.second if report.subject.fits else times.first
        return 1 / times.first.rate + (_EPOCHS - 1) / later.rate

    costs = {one.setting: [seconds(times) for times in one.rounds] for one in usable}
    best = min(costs.values(), key=median)
    if report.subject.medium.kind == "network":
        # If the server becomes unreachable, pread fails with an error, but mapped pages kill the process (SIGBUS).
        usable.sort(key=lambda one: one.setting.backend == "mmap")
    chosen = next(
        one
        for one in usable
        if median(costs[one.setting]) <= _MARGIN * median(best) or min(costs[one.setting]) <= max(best)
    )
    return Recommendation(chosen.setting, list(_reasons(report, chosen, len(usable))))


def _reasons(report: ReadingReport, chosen: SettingTimes, num_usable: int) -> Iterator[str]:
    """Yield the reasons for a setting: first the medium of the shard, then the measurements."""
    subject, medium = report.subject, report.subject.medium
    if medium.kind == "memory":
        yield f"{medium.filesystem} keeps the shard in memory, so no disk is read"
    else:
        fit, epochs = ("fit", "only the first epoch reads") if subject.fits else ("do not fit", "every epoch reads")
        size, room = shown_nbytes(subject.nbytes), shown_nbytes(subject.memory_nbytes)
        yield f"its {size} {fit} in the {room} available for the page cache: {epochs} from the disk"
    if medium.kind == "network":
        yield (
            f"{medium.filesystem} is, or can be, a network file system: if the server becomes unavailable, pread fails"
            " with an error, but a process that maps its files is killed"
        )
    if not report.cold and medium.kind != "memory":
        yield "no first epoch was certain to be cold, so the disk was not measured"
    default = next((one for one in report.settings if one.setting == Setting()), None)
    if default is not None and default.refused:
        yield f"the default, {default.setting.name}, does not work here: {default.refused}"
    elif default is not None and chosen is not default:
        yield (
            f"compared with the default, {default.setting.name}: {chosen.rate('first'):,.0f} packs/s instead of"
            f" {default.rate('first'):,.0f} in the first epoch, {chosen.rate('second'):,.0f} instead of"
            f" {default.rate('second'):,.0f} in the second"
        )
    elif num_usable > 1:
        yield f"no other setting was clearly faster ({_MARGIN - 1:.0%} or more, and by more than the rounds differ)"


# ---- the report, as JSON and as text ----


def _epoch_dict(report: ReadingReport, one: SettingTimes, which: EpochName) -> dict[str, Any]:
    """Return the medians over the rounds of one setting."""
    epochs = one.epochs(which)
    rates = [epoch.rate for epoch in epochs]
    return {
        "packs": int(median(epoch.packs for epoch in epochs)),
        "bytes": int(median(epoch.nbytes for epoch in epochs)),
        "packs_per_second": median(rates),
        "slowest_packs_per_second": min(rates),
        "fastest_packs_per_second": max(rates),
        "read_amplification": report.amplification(one, which),
    }


def reading_dict(report: ReadingReport, advice: Recommendation) -> dict[str, Any]:
    """Return all measurements and the recommendation."""
    subject, options, sample = report.subject, report.options, report.sample
    settings = []
    for one in report.settings:
        values = {"name": one.setting.name, "setting": asdict(one.setting), "refused": one.refused}
        if one.rounds:
            values["first_epoch"] = _epoch_dict(report, one, "first")
            values["second_epoch"] = _epoch_dict(report, one, "second")
        settings.append(values)
    return {
        "prefix": subject.prefix,
        "packs": subject.num_packs,
        "bytes": subject.nbytes,
        "place": asdict(subject.medium) | {"memory_nbytes": subject.memory_nbytes},
        "fits_in_memory": subject.fits,
        "sample": {"start": sample.start, "step": sample.step, "order": options.order, "packs": len(sample)},
        "rounds": options.num_rounds,
        "memory_limit_bytes": options.limit and options.limit.nbytes,
        "cold": report.cold,
        "settings": settings,
        "recommended": {
            "setting": advice.setting and asdict(advice.setting),
            "call": advice.setting and advice.setting.call,
            "training": advice.setting and advice.setting.training,
            "reasons": advice.reasons,
        },
    }


def reading_lines(report: ReadingReport, advice: Recommendation) -> Iterator[str]:
    """Yield a heading, one line per setting, and the recommendation with its reasons."""
    yield from _heading(report)
    yield ""
    rows = [_COLUMNS, *(_row(report, one) for one in report.settings)]
    widths = [max(len(row[column]) for row in rows if len(row) > 2) for column in range(len(_COLUMNS))]
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)]
        yield "  ".join([row[0].ljust(widths[0]), *numbers])
    yield ""
    yield "cold: first epoch, warm: second epoch. disk/asked: bytes read from the disk per byte of a pack."
    yield ""
    if advice.setting is None:
        yield f"{report.subject.prefix}: none of these settings can read it"
    else:
        yield f"recommended: {advice.setting.call}"
        yield f"in training: {advice.setting.training}"
    yield from (f"- {reason}" for reason in advice.reasons)


def _row(report: ReadingReport, one: SettingTimes) -> list[str]:
    if one.refused is not None:
        return [one.setting.name, f"failed: {one.refused}"]
    cells = [one.setting.name]
    for which in ("first", "second"):
        epoch = _epoch_dict(report, one, which)
        amplified, nbytes = epoch["read_amplification"], epoch["bytes"] / epoch["packs"]
        cells.append(f"{epoch['packs_per_second']:,.0f}")
        cells.append(f"{epoch['packs_per_second'] * nbytes / 2**20:,.0f}")
        cells.append("unknown" if amplified is None else f"{amplified:.2f}")
    return cells


def _heading(report: ReadingReport) -> Iterator[str]:
    """Yield what was read, its medium, and whether the measurement was as intended (cold, limit reached)."""
    subject, options, sample = report.subject, report.options, report.sample
    medium, limit = subject.medium, options.limit
    ahead = "" if medium.read_ahead_nbytes is None else f", read-ahead {shown_nbytes(medium.read_ahead_nbytes)}"
    room = shown_nbytes(subject.memory_nbytes)
    yield f"{subject.prefix}: {counted(subject.num_packs, 'pack')}, {shown_nbytes(subject.nbytes)}"
    yield f"on {medium.filesystem} ({medium.source}{ahead}), memory for the page cache: {room}"
    if limit is not None:
        yield f"with a limit of {shown_nbytes(limit.nbytes)}, set by a control group"
    step = f", one of every {sample.step:,}" if sample.step > 1 else ""
    times = "once" if options.num_rounds == 1 else f"{options.num_rounds} times; the table shows the median"
    packs = counted(len(sample), "pack")
    yield f"read: {packs} from pack {sample.start:,} on{step}, {options.order}; each setting {times}"
    if report.cold:
        yield "page cache dropped before each first epoch"
    else:
        yield (
            f"NOT COLD: {medium.filesystem} or another process kept the shard in memory, or reads are not counted here"
        )
    most = max((epoch.nbytes for one in report.settings for epoch in one.epochs("first")), default=0)
    if limit is not None and most <= limit.nbytes:
        too_small = subject.nbytes <= limit.nbytes
        remedy = "use a larger shard" if too_small else "read more, with --seconds or --packs"
        yield f"LIMIT NOT REACHED: at most {shown_nbytes(most)} were read, which fit into the limit; {remedy}"


# ---- the program ----


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="bench_read.py", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=HelpFormatter)
    declare(parser, "shard PREFIX  prefix of the shard", shard=local_path)
    declare(
        parser.add_mutually_exclusive_group(),
        """
        --seconds N  read for about this many seconds (default: %(default)s)
        --packs N  read N packs per epoch, regardless of the time
        """,
        seconds=15,
    )
    declare(
        parser,
        """
        --order  order in which packs are read; training shuffles (default: %(default)s)
        --memory-limit MIB  maximum memory for reading, including the page cache
        --json  print one JSON document instead of text
        """,
        order=("shuffled", "sequential"),
        memory_limit=positive,
    )
    add_log_interval(parser, "runs", default=10)
    return parser


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure, print, and return the exit code."""
    with ExitStack() as stack:
        limit = None
        if arguments.memory_limit:
            try:
                limit = stack.enter_context(memory_limit(arguments.memory_limit << 20))
            except OSError as error:
                parser.error(f"--memory-limit: {error}")
        options = BenchOptions(order=arguments.order, packs=arguments.packs, seconds=arguments.seconds, limit=limit)
        interval = arguments.log_interval
        epochs = 2 * options.num_rounds * len(options.settings)
        with Progress("reading", epochs, unit=" epochs", log_interval=interval, items="runs") as progress:
            report = bench_read(arguments.shard, options, on_progress=lambda done: progress.update(2 * done, done))
    advice = recommend(report)
    if arguments.json:
        print_layout(json.dumps(reading_dict(report, advice), indent=2))
    else:
        print_lines(reading_lines(report, advice))
    if advice.setting is None:
        log_line(f"bench_read.py: error: {arguments.shard}: no setting can read it here")
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code. Without ``argv`` it runs as the program, which ends with the tool."""
    with standard_streams() as output:
        parser = build_parser()
        arguments = parser.parse_args(argv)
        output.strict = True
        try:
            if output.error is not None:
                raise output.error
            with ending_on_signals(is_program=argv is None):
                return run(arguments, parser)
        except (SFTIndexError, OSError) as error:
            log_line(f"bench_read.py: error: {message_of(error)}")
            return 1
        except KeyboardInterrupt:
            log_line("interrupted")
            return 130


if __name__ == "__main__":
    sys.exit(main())
