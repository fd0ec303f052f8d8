"""Acknowledgements: how far each rank of each consumer has trained, as of a checkpoint that is on disk.

A consumer goes through a list of items: what an earlier run with another number of ranks left over, then the shards
from its frontier on. Item j belongs to data-parallel rank j mod size, which takes its items in order. So which shards
are complete follows from one small file for each rank, and no shard is counted twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live.catalog import (
    ACKS,
    Catalog,
    Positive,
    Record,
    UnsettledError,
    look_at_document,
    patiently,
    write_document,
)

_CONSUMER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RANK_FILE = re.compile(r"rank-([0-9]{5,9})\.json")


@dataclass(frozen=True, slots=True)
class Leftover(Record):
    """An item that holds the packs of some shards that an earlier number of ranks had not trained on.

    Attributes:
        shards: numbers of the shards, in the order in which their group was shuffled.
        offset: how many packs of the group were trained on already.
    """

    shards: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Base(Record):
    """Where the list of items begins. A fresh start has no leftovers and frontier 0.

    Attributes:
        epoch: the epoch whose items these are, from 0; a later epoch begins with shard 0 and no leftovers.
        seed: the seed of the shuffle.
        window: how many items are shuffled together.
        leftovers: the first items.
        frontier: the number of the shard that follows the leftovers. Shards below it that are in no leftover are
            completed.
    """

    epoch: int = 0
    seed: int = 0
    window: Positive = 1
    leftovers: tuple[Leftover, ...] = ()
    frontier: int = 0

    def item(self, number: int) -> Leftover:
        """Item ``number``; there is one for every number from 0 on, though its shard may never come."""
        behind = number - len(self.leftovers)
        return self.leftovers[number] if behind < 0 else Leftover((self.frontier + behind,))

    def num_items(self, end: int) -> int:
        """Items of a catalog that ends with ``end`` shards, all that come before shard ``end`` where it does not."""
        return len(self.leftovers) + max(0, end - self.frontier)


@dataclass(frozen=True, slots=True)
class Ack(Record):
    """What one rank of a consumer has trained on.

    Attributes:
        consumer: the name of the consumer.
        generation: grows when the consumer goes on with another number of ranks; only the newest one counts.
        base: where the list of items begins.
        size: the number of data-parallel ranks.
        rank: the data-parallel rank, from 0.
        items_done: how many of its items the rank has trained on in this epoch; its i-th is item ``rank + i * size``.
        packs_done: the number of packs in these items.
        epoch: the epoch that ``items_done`` counts in, from 0.
        epochs: how many epochs the consumer trains for.
    """

    consumer: str
    generation: int
    base: Base
    size: Positive
    rank: int
    items_done: int
    packs_done: int
    epoch: int = 0
    epochs: Positive = 1

    def contradiction(self) -> tuple[str, int, str] | None:
        """A rank or an epoch beyond the last one."""
        if self.rank >= self.size:
            return "rank", self.rank, f"less than its size {self.size}"
        if self.epoch >= self.epochs:
            return "epoch", self.epoch, f"less than its epochs {self.epochs}: they count from 0"
        return None

    def current_base(self) -> Base:
        """Where the items of this epoch begin: an epoch that began after the base begins afresh."""
        return self.base if self.base.epoch == self.epoch else Base(self.epoch, self.base.seed, self.base.window)

    def agrees_with(self, other: Ack) -> bool:
        """Whether both acknowledgements can belong to one generation."""
        mine, theirs = ((ack.size, ack.epochs, ack.base.seed, ack.base.window) for ack in (self, other))
        if mine != theirs:
            return False
        earlier, later = sorted((self, other), key=lambda ack: ack.epoch)
        # One that goes on from an earlier epoch comes to a later one's beginning, and not to what was dealt out in it.
        return later.current_base() == (
            earlier.current_base() if earlier.epoch == later.epoch else Base(later.epoch, *theirs[2:])
        )


def ack_folder(catalog: Catalog, ack_dir: str | os.PathLike[str] | None = None) -> str:
    """Where acknowledgements are: in the catalog, or in ``ack_dir`` where consumers may not write there."""
    return os.fspath(ack_dir) if ack_dir is not None else os.path.join(catalog.folder, ACKS)


def require_consumer(name: str) -> None:
    """FormatError where a consumer's name is no name of a folder."""
    if not _CONSUMER.fullmatch(name):
        raise FormatError(
            f"consumer {name!r}: expected up to 100 letters, digits, '.', '_' and '-', a letter or digit first"
        )


def write_ack(folder: str, ack: Ack) -> None:
    """Replace a rank's acknowledgement in ``ack_folder(...)``, durably; see ``write_document``."""
    require_consumer(ack.consumer)
    write_document(os.path.join(folder, ack.consumer, f"rank-{ack.rank:05d}.json"), ack, "an acknowledgement")


def read_acks(folder: str) -> dict[str, list[Ack]]:
    """The acknowledgements in ``ack_folder(...)`` of every consumer. Raises as ``newest_acks``."""

    def look() -> dict[str, list[Ack]]:
        consumers = {}
        for name in filter(_CONSUMER.fullmatch, sorted(os.listdir(folder))):
            try:
                consumers[name] = _newest(folder, name)
            except NotADirectoryError:
                continue
            except FileNotFoundError:
                raise _not_there(os.path.join(folder, name)) from None
        return {name: acks for name, acks in consumers.items() if acks}

    try:
        return patiently(folder, look)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def newest_acks(folder: str, consumer: str) -> list[Ack]:
    """One consumer's acknowledgements of its newest generation, by rank; empty before its first checkpoint.

    Raises:
        FormatError: a file is damaged, of another version, or says something else than the one beside it.
        SFTIndexError, OSError: as of ``patiently``.
    """
    try:
        return patiently(os.path.join(folder, consumer), lambda: _newest(folder, consumer))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _newest(folder: str, consumer: str) -> list[Ack]:
    home = os.path.join(folder, consumer)
    acks = list(_read_ranks(home))
    newest = max((ack.generation for ack in acks), default=0)
    current = [ack for ack in acks if ack.generation == newest]
    for ack in current[1:]:
        if not ack.agrees_with(current[0]):
            raise FormatError(
                f"{home}: ranks {current[0].rank} and {ack.rank} of generation {newest} disagree on their size,"
                f" epochs or base; two runs use the consumer name {consumer!r}: give each its own"
            )
    return current


def _read_ranks(home: str) -> Iterator[Ack]:
    for name in sorted(os.listdir(home)):
        path = os.path.join(home, name)
        if match := _RANK_FILE.fullmatch(name):
            try:
                content = look_at_document(path)
            except (FileNotFoundError, NotADirectoryError):
                # Without it an older generation would count, which may have completed more shards.
                raise _not_there(path) from None
            ack = Ack.parse(path, content)
            if ack.rank != int(match[1]):
                raise FormatError(f"{path}: rank is {ack.rank}, expected {int(match[1])}, as in the file's name")
            yield ack


def _not_there(path: str) -> UnsettledError:
    return UnsettledError(
        f"{path}: listed in its folder, but missing; check the file system, then run the same command again"
    )


def completed(acks: Mapping[str, Sequence[Ack]], consumers: int, numbers: Iterable[int]) -> list[int]:
    """The shards among ``numbers`` that every consumer has completed, in the order of ``numbers``.

    A consumer has completed a shard when the rank that the shard belongs to has trained on it in the last epoch, or an
    earlier generation had. While fewer than ``consumers`` have acknowledged anything, no shard is completed; where more
    have, all of them count. ``acks`` is what ``read_acks`` returns.
    """
    if len(acks) < consumers:
        return []
    done = [_completed_by(current) for current in acks.values()]
    return [number for number in numbers if all(is_done(number) for is_done in done)]


def _completed_by(acks: Sequence[Ack]) -> Callable[[int], bool]:
    """A function that says whether one consumer has completed the shard of a number."""
    # Ranks that have not come to the last epoch have done nothing that counts.
    last = [ack for ack in acks if ack.epoch == ack.epochs - 1]
    size, items_done = acks[0].size, {ack.rank: ack.items_done for ack in last}
    base = last[0].current_base() if last else Base()
    leftovers = {shard: item for item, leftover in enumerate(base.leftovers) for shard in leftover.shards}

    def is_done(shard: int) -> bool:
        if shard < base.frontier and shard not in leftovers:
            return True
        item = leftovers.get(shard, base.num_items(shard))
        return item // size < items_done.get(item % size, 0)

    return is_done


def uncompleted(acks: Sequence[Ack], below: int) -> list[int]:
    """The shards with numbers less than ``below``, published or not, that one consumer has not completed.

    ``acks`` must be those of all ranks of the consumer, all in the last epoch and with the same base.
    """
    base, size = acks[0].current_base(), acks[0].size
    done = min(ack.items_done for ack in acks) * size
    fresh = range(base.frontier + max(0, done - len(base.leftovers)), below)
    begun = [shard for left in base.leftovers for shard in left.shards if shard < below]
    is_done = _completed_by(acks)
    return [shard for shard in (*begun, *fresh) if not is_done(shard)]


def acknowledged(newest: Sequence[Ack], ours: Ack) -> dict[int, tuple[int, int]]:
    """For each rank of a consumer that acknowledged in the order of ``ours``: how many items, and packs in them."""
    return {
        ack.rank: (ack.items_done, ack.packs_done)
        for ack in newest
        if (ack.generation, ack.size, ack.epoch, ack.base) == (ours.generation, ours.size, ours.epoch, ours.base)
    }


def next_generation(newest: Sequence[Ack], ours: Ack) -> int:
    """The generation under which a rank goes on from ``ours``.

    That is the generation of ``ours`` where no acknowledgement is as new; else that of the newest acknowledgements
    where all of these agree with ``ours``, and the one after it where some do not. Acknowledgements may be ahead of
    ``ours``: they may come from a job that was given up, or from this job's other ranks.
    """
    if not newest or newest[0].generation < ours.generation:
        return ours.generation
    return newest[0].generation + (not all(ours.agrees_with(ack) for ack in newest))
