"""How fast a shard is read here: every setting measured on a sample of it, as large as there is time for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect.place import MemoryLimit, ShardPlace, cached_nbytes, drop_cache, find_place
from megatron_sft_idx.inspect.read_worker import SETTINGS, Epoch, Job, Order, Run, Sample, Setting, Workers
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage.progress import Advance

__all__ = [
    "Measured",
    "Plan",
    "ReadingReport",
    "Subject",
    "Which",
    "bench_read",
    "largest_sample",
    "sample_of",
]

Which = Literal["first", "second"]
# An epoch under a memory limit reads this many times the limit, where the shard has as much.
_OVER_LIMIT = 3
# Fewer packs say little.
_LEAST_PACKS = 256
# A slow setting may take longer than its share of the time, but not by more than this.
_PATIENCE = 2


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
    """The shard that is read.

    Attributes:
        paths: of its files.
        num_packs: it has.
        nbytes: of its tokens, masks and starts.
        place: where it lies.
        memory_nbytes: what there is to keep it in, under the limit; None where that is not known.
    """

    paths: ShardPaths
    num_packs: int
    nbytes: int
    place: ShardPlace
    memory_nbytes: int | None

    @classmethod
    def at(cls, prefix: str, limit: MemoryLimit | None) -> Subject:
        """A local shard; FormatError where it has no packs, and the errors of ``Shard``."""
        # By pread: a page that this process maps would stay in the cache.
        shard = Shard(prefix, backend="pread")
        if not len(shard):
            raise FormatError(f"{prefix}: the shard has no packs, so there is nothing to read; name another")
        paths = ShardPaths.of(prefix)
        tokens, loss, _, starts = (digest.nbytes for digest in shard.header.digests)
        place = find_place(paths.tokens)
        known = [nbytes for nbytes in (place.memory_nbytes, limit and limit.nbytes) if nbytes is not None]
        return cls(paths, len(shard), tokens + loss + starts, place, min(known, default=None))

    @property
    def files(self) -> tuple[str, ...]:
        """Those that are read for packs: all but Megatron's index."""
        return tuple(path for path in self.paths.all if path != self.paths.idx)

    @property
    def fits(self) -> bool:
        """Whether memory can keep all of it from one epoch to the next; taken for granted where that is not known."""
        return self.memory_nbytes is None or self.nbytes <= self.memory_nbytes


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

    def epochs(self, which: Which) -> list[Epoch]:
        """The first or the second epochs of all rounds."""
        return [getattr(run, which) for run in self.runs]

    def amplification(self, which: Which) -> float | None:
        """Bytes of the disk for each one asked for, the median of the rounds; None where they are not counted."""
        found = [epoch.amplification for epoch in self.epochs(which)]
        return None if None in found else statistics.median(value for value in found if value is not None)

    def rate(self, which: Which) -> float:
        """Packs a second, the median of the rounds."""
        return statistics.median(epoch.rate for epoch in self.epochs(which))


@dataclass(frozen=True)
class ReadingReport:
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
        return any((self.amplification(one, "first") or 0) > 0.5 for one in self.measured if one.runs)

    @property
    def _emptied(self) -> bool:
        return self.left_nbytes is not None and self.left_nbytes <= self.subject.nbytes // 100

    def amplification(self, one: Measured, which: Which) -> float | None:
        """As of ``Measured``; None where none of the shard was in memory and yet no byte is said to have been read.

        Not every file system counts them.
        """
        counted = not self._emptied or any(run.first.disk_nbytes for one in self.measured for run in one.runs)
        return one.amplification(which) if counted else None


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
    subject = Subject.at(prefix, plan.limit)
    seconds = float("inf") if plan.packs else _PATIENCE * plan.epoch_seconds
    group = str(plan.limit.folder) if plan.limit else None
    measured = [Measured(setting) for setting in plan.settings]
    left: int | None = 0
    with Workers() as workers:

        def measure(one: Measured, sample: Sample) -> None:
            """Two epochs, the first without the page cache; adds a run, or why there is none."""
            nonlocal left
            drop_cache(subject.files)
            kept = cached_nbytes(subject.files)
            left = None if kept is None or left is None else max(kept, left)
            try:
                one.runs.append(workers.run(Job(subject.paths.prefix, sample, one.setting, seconds, group)))
            except OSError as refused:
                one.refused = str(refused)

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
