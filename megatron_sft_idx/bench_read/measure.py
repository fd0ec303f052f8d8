"""Measuring every setting on one shard, each in a process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from megatron_sft_idx.bench_read.cold import cached_nbytes, drop_cache
from megatron_sft_idx.bench_read.epochs import Epoch, Order, Sample
from megatron_sft_idx.bench_read.memory_limit import MemoryLimit
from megatron_sft_idx.bench_read.place import Place, find_place
from megatron_sft_idx.bench_read.settings import SETTINGS, Setting
from megatron_sft_idx.bench_read.worker import Job, Run
from megatron_sft_idx.bench_read.workers import Refused, Worker
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import Shard

__all__ = ["Measured", "Plan", "Report", "bench_read"]

Tell = Callable[[int, int], None]
# A slow setting may take longer than its share of the time, but not by more than this.
_PATIENCE = 2
# An epoch under a memory limit reads this many times the limit, where the shard has as much.
_OVER_LIMIT = 3


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long.

    Attributes:
        order: in which packs are read.
        packs: of an epoch; None for as many as fit into the time.
        seconds: all of it is to take, about; with ``packs`` it takes what it takes.
        memory_limit: bytes; None for no limit but the machine's.
        cache_nbytes: of caches that backends have of their own; None for their choice.
        settings: what is compared, from the simplest on.
        rounds: how often each is measured; under a memory limit, once.
    """

    order: Order = "shuffled"
    packs: int | None = None
    seconds: float = 20.0
    memory_limit: int | None = None
    cache_nbytes: int | None = None
    settings: Sequence[Setting] = SETTINGS
    rounds: int = 3

    @property
    def passes(self) -> int:
        """Rounds that are made."""
        return 1 if self.memory_limit else self.rounds

    @property
    def runs(self) -> int:
        """In all, where nothing is refused."""
        return self.passes * len(self.settings)

    @property
    def epoch_seconds(self) -> float:
        """What one epoch of one setting may take for all to take ``seconds``."""
        return self.seconds / (2 * self.runs)


@dataclass
class Measured:
    """One setting.

    Attributes:
        setting: which.
        runs: what was found, a run a round.
        refused: why the system does not read in this way; None where it does.
    """

    setting: Setting
    runs: list[Run] = field(default_factory=list)
    refused: str | None = None

    def median(self, of: Callable[[Run], float]) -> float:
        """Of the rounds."""
        return statistics.median(map(of, self.runs))

    def amplification(self, of: Callable[[Run], Epoch]) -> float | None:
        """Bytes of the disk for each one asked for, the median of the rounds; None where they are not counted."""
        found = [of(run).amplification for run in self.runs]
        return None if None in found else statistics.median(value for value in found if value is not None)


@dataclass(frozen=True)
class Report:
    """What was found of a shard.

    Attributes:
        prefix: of the shard.
        num_packs: it has.
        nbytes: of its tokens, masks and starts.
        place: where it lies.
        plan: what was asked for.
        sample: the packs that were read.
        left_nbytes: most that the page cache held of the shard when an epoch was to begin without; None where the
            system does not tell.
        measured: the settings, in the order of the plan.
    """

    prefix: str
    num_packs: int
    nbytes: int
    place: Place
    plan: Plan
    sample: Sample
    left_nbytes: int | None
    measured: list[Measured]

    @property
    def memory_nbytes(self) -> int | None:
        """What there is to keep the shard in."""
        given = [n for n in (self.place.memory_nbytes, self.plan.memory_limit) if n is not None]
        return min(given, default=None)

    @property
    def fits(self) -> bool:
        """Whether memory can keep all of the shard from one epoch to the next."""
        return self.memory_nbytes is None or self.nbytes <= self.memory_nbytes

    @property
    def cold(self) -> bool:
        """Whether first epochs began without the shard in memory: by the page cache, or else by what was read."""
        if self.left_nbytes is not None:
            return self.left_nbytes <= self.nbytes // 100
        found = [m.amplification(lambda run: run.first) for m in self.measured if m.runs]
        return any(value is not None and value > 0.5 for value in found)


def bench_read(prefix: str, plan: Plan | None = None, *, tell: Tell = lambda units, items: None) -> Report:
    """Measure.

    Args:
        prefix: of a local shard.
        plan: what is to be measured.
        tell: called after each run with the runs done since the last call, twice; ``Plan.runs`` in all.

    Raises:
        ShardNotFoundError, FormatError: the shard is bad, or has no packs.
        NoMemoryLimit: the plan has a memory limit, and none can be set here.
        OSError: the files cannot be read at all.
    """
    return _Bench(prefix, plan or Plan(), tell).run()


class _Bench:
    """One call of ``bench_read``."""

    def __init__(self, prefix: str, plan: Plan, tell: Tell) -> None:
        self._plan, self._tell = plan, tell
        # By pread: a page that this process maps would stay in the cache.
        shard = Shard(prefix, backend="pread")
        self._prefix, self._num_packs = shard.prefix, len(shard)
        if not self._num_packs:
            raise FormatError(f"{prefix}: the shard has no packs, so there is nothing to read")
        paths = ShardPaths.of(prefix)
        self._files = (paths.tokens, paths.loss, paths.starts, paths.seq_idx)
        tokens, loss, _, starts = (digest.nbytes for digest in shard.header.digests)
        self._nbytes = tokens + loss + starts
        self._place = find_place(paths.tokens)
        self._left: int | None = 0

    def run(self) -> Report:
        """All of it."""
        plan = self._plan
        measured = [Measured(setting) for setting in plan.settings]
        with ExitStack() as stack:
            limit = stack.enter_context(MemoryLimit(plan.memory_limit)) if plan.memory_limit else None
            group = str(limit.folder) if limit else None
            workers = [stack.enter_context(Worker()) for _ in measured]
            report = Report(self._prefix, self._num_packs, self._nbytes, self._place, plan, Sample(0, 1), 0, measured)
            sample = self._sample(report, workers[0], group)
            for _ in range(plan.passes):
                for worker, one in zip(workers, measured, strict=True):
                    if one.refused is None:
                        self._measure(worker, one, self._job(one.setting, sample, group))
                    self._tell(1, 1)
        return Report(
            self._prefix, self._num_packs, self._nbytes, self._place, plan, sample, self._left, measured
        )

    def _measure(self, worker: Worker, one: Measured, job: Job) -> None:
        try:
            one.runs.append(self._cold_run(worker, job))
        except Refused as refused:
            one.refused = str(refused)

    def _cold_run(self, worker: Worker, job: Job) -> Run:
        drop_cache(self._files)
        left = cached_nbytes(self._files)
        self._left = None if left is None or self._left is None else max(left, self._left)
        return worker.run(job)

    def _job(self, setting: Setting, sample: Sample, group: str | None) -> Job:
        seconds = float("inf") if self._plan.packs else _PATIENCE * self._plan.epoch_seconds
        return Job(self._prefix, sample, setting, seconds, self._plan.cache_nbytes, group)

    def _sample(self, report: Report, worker: Worker, group: str | None) -> Sample:
        """Packs that the simplest setting reads in the time there is for an epoch."""
        plan = self._plan
        count = plan.packs
        if count is None:
            trial = self._spread(self._num_packs, report.fits)
            job = self._job(plan.settings[0], trial, group)
            try:
                first = self._cold_run(worker, job).first
                count = int(first.rate * plan.epoch_seconds)
            except Refused:  # it will say so again when it is its turn
                count = 1024
            if plan.memory_limit:
                count = max(count, _OVER_LIMIT * plan.memory_limit * self._num_packs // self._nbytes)
        return self._spread(min(max(count, 32), self._num_packs), report.fits)

    def _spread(self, count: int, fits: bool) -> Sample:
        """So many packs, taken so that reading them is like reading the whole shard.

        Where memory keeps the shard, pages that the kernel reads ahead are used later in the epoch: neighbours are
        taken. Where it does not, those are gone by then: packs from everywhere are taken. In order, neighbours.
        """
        if fits or self._plan.order == "sequential":
            start = (self._num_packs - count) // 2
            return Sample(start, start + count, 1, self._plan.order)
        step = self._num_packs // count
        return Sample(0, count * step, step, self._plan.order)
