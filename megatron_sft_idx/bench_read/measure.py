"""Measuring every setting on one shard, each in a process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_sft_idx.bench_read.cold import cached_nbytes, drop_cache
from megatron_sft_idx.bench_read.epochs import Epoch, Sample
from megatron_sft_idx.bench_read.sampling import Plan, Subject, largest_sample, sample_of, scaled_cache
from megatron_sft_idx.bench_read.settings import Setting
from megatron_sft_idx.bench_read.worker import Job, Run
from megatron_sft_idx.bench_read.workers import Workers

__all__ = ["Measured", "Report", "bench_read"]

Tell = Callable[[int], None]
# A slow setting may take longer than its share of the time, but not by more than this.
_PATIENCE = 2


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

    @property
    def read_disk(self) -> bool:
        """Whether any first epoch was seen to read from the disk."""
        return any(run.first.counters.disk_nbytes for run in self.runs)


@dataclass(frozen=True)
class Report:
    """What was found of a shard.

    Attributes:
        subject: the shard.
        plan: what was asked for.
        sample: the packs that were read.
        left_nbytes: most that the page cache held of the shard when an epoch was to begin without; None where the
            system does not tell.
        measured: the settings, in the order of the plan.
    """

    subject: Subject
    plan: Plan
    sample: Sample
    left_nbytes: int | None
    measured: list[Measured]

    @property
    def cold(self) -> bool:
        """Whether first epochs began without the shard in memory: by the page cache, or else by what was read."""
        if self.left_nbytes is not None:
            return self._emptied
        found = [m.amplification(lambda run: run.first) for m in self.measured if m.runs]
        return any(value is not None and value > 0.5 for value in found)

    @property
    def _emptied(self) -> bool:
        return self.left_nbytes is not None and self.left_nbytes <= self.subject.nbytes // 100

    @property
    def disk_is_counted(self) -> bool:
        """Not on every file system: where none of a shard was in memory and nothing is said to have been read."""
        return not self._emptied or any(one.read_disk for one in self.measured)

    def amplification(self, one: Measured, of: Callable[[Run], Epoch]) -> float | None:
        """As of ``Measured``; None where the file system's reads are not counted."""
        return one.amplification(of) if self.disk_is_counted else None


def bench_read(prefix: str, plan: Plan | None = None, *, tell: Tell = lambda runs: None) -> Report:
    """Measure.

    Args:
        prefix: of a local shard.
        plan: what is to be measured.
        tell: called with the number of runs done since it was last called; ``Plan.runs`` in all.

    Raises:
        ShardNotFoundError, FormatError: the shard is bad, or has no packs.
        OSError: the files cannot be read at all.
    """
    plan = plan or Plan()
    subject = Subject.at(prefix)
    measured = [Measured(setting) for setting in plan.settings]
    with Workers() as workers:
        bench = _Bench(subject, plan, workers)
        if plan.packs is None:
            sample = largest_sample(subject, plan, bench.trial)
        else:
            sample = sample_of(subject, plan, plan.packs)
        for _ in range(plan.passes):
            for one in measured:
                if one.refused is None:
                    bench.measure(one, sample)
                tell(1)
    return Report(subject, plan, sample, bench.left_nbytes, measured)


class _Bench:
    """Runs of one shard.

    Attributes:
        left_nbytes: as of ``Report``.
    """

    def __init__(self, subject: Subject, plan: Plan, workers: Workers) -> None:
        self._subject, self._plan, self._workers = subject, plan, workers
        self.left_nbytes: int | None = 0

    def trial(self, sample: Sample) -> Epoch | None:
        """A first epoch of the simplest setting; None where it is refused."""
        simplest = Measured(self._plan.settings[0])
        self.measure(simplest, sample)
        return simplest.runs[0].first if simplest.runs else None

    def measure(self, one: Measured, sample: Sample) -> None:
        """Two epochs, the first without the page cache; adds a run, or why there is none."""
        drop_cache(self._subject.files)
        left = cached_nbytes(self._subject.files)
        self.left_nbytes = None if left is None or self.left_nbytes is None else max(left, self.left_nbytes)
        try:
            one.runs.append(self._workers.run(self._job(one.setting, sample)))
        except OSError as refused:
            one.refused = str(refused)

    def _job(self, setting: Setting, sample: Sample) -> Job:
        plan = self._plan
        seconds = float("inf") if plan.packs else _PATIENCE * plan.epoch_seconds
        cache = scaled_cache(plan, len(sample) / self._subject.num_packs)
        group = str(plan.limit.folder) if plan.limit else None
        return Job(self._subject.paths.prefix, sample, setting, seconds, cache, group)
