"""What is read to measure: a sample of a shard, as large as there is time for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_sft_idx.bench_read.epochs import Epoch, Order, Sample
from megatron_sft_idx.bench_read.memory_limit import MemoryLimit
from megatron_sft_idx.bench_read.place import Place, find_place
from megatron_sft_idx.bench_read.settings import SETTINGS, Setting
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage import CACHE_NBYTES

__all__ = ["Plan", "Subject", "largest_sample", "sample_of", "scaled_cache"]

# An epoch under a memory limit reads this many times the limit, where the shard has as much.
_OVER_LIMIT = 3
# Fewer packs say little.
_LEAST_PACKS = 256
# Less is no cache to read ahead into.
_LEAST_CACHE = 8 << 20


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long.

    Attributes:
        order: in which packs are read.
        packs: of an epoch; None for as many as fit into the time.
        seconds: all of it is to take, about; with ``packs`` it takes what it takes.
        limit: of the memory to read with; None for the machine's.
        cache_nbytes: of the cache of backend ``process``.
        settings: what is compared, from the simplest on.
        rounds: how often each is measured; under a memory limit, once.
    """

    order: Order = "shuffled"
    packs: int | None = None
    seconds: float = 15.0
    limit: MemoryLimit | None = None
    cache_nbytes: int = CACHE_NBYTES
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
    """

    paths: ShardPaths
    num_packs: int
    nbytes: int
    place: Place

    @classmethod
    def at(cls, prefix: str) -> Subject:
        """A local shard; FormatError where it has no packs, and the errors of ``Shard``."""
        # By pread: a page that this process maps would stay in the cache.
        shard = Shard(prefix, backend="pread")
        if not len(shard):
            raise FormatError(f"{prefix}: the shard has no packs, so there is nothing to read; name another")
        paths = ShardPaths.of(prefix)
        tokens, loss, _, starts = (digest.nbytes for digest in shard.header.digests)
        return cls(paths, len(shard), tokens + loss + starts, find_place(paths.tokens))

    @property
    def files(self) -> tuple[str, ...]:
        """Those that are read for packs: all but Megatron's index."""
        return tuple(path for path in self.paths.all if path != self.paths.idx)

    def memory_nbytes(self, limit: MemoryLimit | None) -> int | None:
        """What there is to keep it in; None where that is not known."""
        known = [self.place.memory_nbytes, limit.nbytes if limit else None]
        return min((n for n in known if n is not None), default=None)

    def fits(self, limit: MemoryLimit | None) -> bool:
        """Whether memory can keep all of it from one epoch to the next; taken for granted where that is not known."""
        memory = self.memory_nbytes(limit)
        return memory is None or self.nbytes <= memory


def sample_of(subject: Subject, plan: Plan, count: int) -> Sample:
    """So many packs, if there are, taken so that reading them is like reading the whole shard.

    Where memory keeps the shard, pages that the kernel reads ahead are used later in the epoch: neighbours are taken.
    Where it does not, those are gone by then: packs from everywhere are taken. In order, neighbours.
    """
    whole = subject.num_packs
    count = min(count, whole)
    if plan.order == "sequential" or subject.fits(plan.limit):
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


def scaled_cache(plan: Plan, share: float) -> int:
    """Bytes of a cache that is to a sample, a share of the shard, what the plan's is to the shard.

    At full size it might keep all of the sample, and a second epoch be faster than that of the shard can be. Under a
    memory limit it leaves the greater part to the rest of the process.
    """
    most = plan.cache_nbytes if plan.limit is None else min(plan.cache_nbytes, plan.limit.nbytes // 4)
    return max(int(most * share), min(_LEAST_CACHE, most))
