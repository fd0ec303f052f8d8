"""Acknowledgements: how far each rank of each consumer has trained, as of a checkpoint that is on disk.

A consumer is a training run that reads a catalog. When the checkpoint of all its ranks is on disk, each rank replaces
one small file, ``_acks/CONSUMER/rank-NNNNN.json``. It has the number of items that the rank has done (module
``live_order``). The producer reads these files. A shard is *completed* when every consumer has done it in an
acknowledged checkpoint. After that it may be removed.

Two ranks share the shards 0, 1, 2 and so on. Rank 0 has done two of its items, shards 0 and 2, and rank 1 has done
shard 1:

    >>> deal = Deal(size=2)
    >>> acks = [Ack("train", 0, deal, rank=0, items_done=2, packs_done=40),
    ...         Ack("train", 0, deal, rank=1, items_done=1, packs_done=20)]
    >>> completed({"train": acks}, consumers=1, numbers=range(6))
    [0, 1, 2]

While a second consumer has not acknowledged anything, nothing is completed:

    >>> completed({"train": acks}, consumers=2, numbers=range(6))
    []

If a consumer resumes with another number of ranks, its shards are distributed again, and its acknowledgements get the
next generation. Acknowledgements of earlier generations no longer count.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.lines import Shown, shown_by_fields
from megatron_sft_idx.live.catalog import ACKS, Catalog
from megatron_sft_idx.live.documents import Positive, Record, look_at_document, write_document
from megatron_sft_idx.live.live_order import Deal, RankState
from megatron_sft_idx.live.waiting import UnsettledError, patiently, status_of

_CONSUMER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RANK_FILE = re.compile(r"rank-([0-9]{5,9})\.json")


@shown_by_fields
@dataclass(frozen=True, slots=True)
class Ack(Record):
    """The training progress of one rank of a consumer.

    Attributes:
        consumer: name of the consumer.
        generation: increases when the consumer's shards are distributed again; only the newest one counts.
        deal: the assignment of shards to ranks.
        rank: the data-parallel rank, from 0.
        items_done: number of its items in ``deal`` that the rank has trained on.
        packs_done: number of packs in these items.
        epochs: number of epochs of the consumer.
    """

    consumer: str
    generation: int
    deal: Deal
    rank: int
    items_done: int
    packs_done: int
    epochs: Positive = 1

    def contradiction(self) -> tuple[str, int, str] | None:
        """Return a rank that is out of range, or an epoch after the last one."""
        if self.rank >= self.deal.size:
            return "rank", self.rank, f"less than its size {self.deal.size}"
        if self.deal.epoch >= self.epochs:
            return (
                "deal.epoch",
                self.deal.epoch,
                f"less than its epochs {self.epochs}, because epochs are counted from 0",
            )
        return None

    @property
    def is_in_last_epoch(self) -> bool:
        """Whether the progress counts: only the last epoch completes shards."""
        return self.deal.epoch == self.epochs - 1

    def agrees_with(self, other: Ack) -> bool:
        """Return whether both acknowledgements can belong to one generation.

        Ranks of one run have the same deal, or one of them is at the beginning of a later epoch.
        """
        earlier, later = sorted((self, other), key=lambda ack: ack.deal.epoch)
        expected = earlier.deal
        if earlier.deal.epoch != later.deal.epoch:
            expected = earlier.deal.of_epoch(later.deal.epoch)
        return later.deal == expected and later.epochs == earlier.epochs


# ---- the files ----


def ack_folder(catalog: Catalog, ack_dir: str | os.PathLike[str] | None = None) -> str:
    """Return the folder of acknowledgements: in the catalog, or ``ack_dir`` if consumers may not write there."""
    return os.fspath(ack_dir) if ack_dir is not None else os.path.join(catalog.folder, ACKS)


def require_consumer(name: str) -> None:
    """Raise FormatError if a consumer's name is not a valid folder name."""
    if not _CONSUMER.fullmatch(name):
        raise FormatError(
            f"consumer {name!r}: expected up to 100 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )


def write_ack(folder: str, ack: Ack) -> None:
    """Replace a rank's acknowledgement in ``ack_folder(...)``, durably. See ``write_document``."""
    require_consumer(ack.consumer)
    write_document(os.path.join(folder, ack.consumer, f"rank-{ack.rank:05d}.json"), ack, "an acknowledgement")


def read_acks(folder: str) -> dict[str, list[Ack]]:
    """Return every consumer's acknowledgements in ``ack_folder(...)``. See ``newest_acks`` for errors."""

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
        FormatError: a file is damaged, of another version, or contradicts the file of another rank.
        SFTIndexError, OSError: see ``patiently``.
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
    if not current:
        return []
    # The deal of an earlier epoch determines the deals of later epochs, but not the reverse.
    earliest = min(current, key=lambda ack: ack.deal.epoch)
    for ack in current:
        if not ack.agrees_with(earliest):
            raise FormatError(
                f"{home}: ranks {earliest.rank} and {ack.rank} of generation {newest} have different epochs or a"
                f" different distribution of shards; two runs are using the consumer name {consumer!r}: choose a"
                " different name for each"
            )
    return current


def _read_ranks(home: str) -> Iterator[Ack]:
    for name in sorted(os.listdir(home)):
        path = os.path.join(home, name)
        if match := _RANK_FILE.fullmatch(name):
            try:
                content = look_at_document(path)
            except (FileNotFoundError, NotADirectoryError):
                # Without it, an older generation would count, which may have completed more shards.
                raise _not_there(path) from None
            ack = Ack.parse(path, content)
            if ack.rank != int(match[1]):
                raise FormatError(f"{path}: rank is {ack.rank}, expected {int(match[1])} according to the file name")
            yield ack


def _not_there(path: str) -> UnsettledError:
    return UnsettledError(
        f"{path}: listed in its folder, but missing; check the file system, then run the same command again"
    )


# ---- conclusions from acknowledgements ----


def completed(acks: Mapping[str, Sequence[Ack]], consumers: int, numbers: Iterable[int]) -> list[int]:
    """Return the shards among ``numbers`` that every consumer has completed, in the order of ``numbers``.

    A consumer has completed a shard when the shard's rank has trained on it in the last epoch, or when an earlier
    generation did. While fewer than ``consumers`` have acknowledged anything, no shard is completed. If more have, all
    of them count. ``acks`` is the result of ``read_acks``.
    """
    if len(acks) < consumers:
        return []
    is_completed_by = [_completed_by(of_one) for of_one in acks.values()]
    return [number for number in numbers if all(is_completed(number) for is_completed in is_completed_by)]


def _completed_by(acks: Sequence[Ack]) -> Callable[[int], bool]:
    """Return a function that returns whether one consumer has completed the shard of a number."""
    # Ranks before the last epoch have done nothing that counts.
    counting = [ack for ack in acks if ack.is_in_last_epoch]
    deal = counting[0].deal if counting else Deal(acks[0].deal.size)
    items_done = {ack.rank: ack.items_done for ack in counting}
    item_of_leftover = {shard: number for number, item in enumerate(deal.leftovers) for shard in item.shards}

    def is_completed(shard: int) -> bool:
        if shard in item_of_leftover:
            number = item_of_leftover[shard]
        elif shard < deal.frontier:
            return True  # by an earlier generation
        else:
            number = deal.item_of_shard(shard)
        rank, items_before = number % deal.size, number // deal.size
        return items_before < items_done.get(rank, 0)

    return is_completed


def uncompleted(acks: Sequence[Ack], below: int) -> list[int]:
    """Return the shards with numbers below ``below``, published or not, that one consumer has not completed.

    ``acks`` must contain all ranks of the consumer, at one step.

    >>> acks = [Ack("train", 0, Deal(size=2), rank, items_done=2 - rank, packs_done=9) for rank in range(2)]
    >>> uncompleted(acks, below=6)
    [3, 4, 5]
    """
    if not acks[0].is_in_last_epoch:
        return list(range(below))
    deal = acks[0].deal
    # All ranks have done the items below this number.
    done_by_all = min(ack.items_done for ack in acks) * deal.size
    leftovers = [shard for item in deal.leftovers for shard in item.shards if shard < below]
    fresh = range(deal.frontier + max(0, done_by_all - len(deal.leftovers)), below)
    is_completed = _completed_by(acks)
    return [shard for shard in (*leftovers, *fresh) if not is_completed(shard)]


class ConsumerAcks(Shown):
    """The acknowledgements as one rank uses them: it reads all ranks' and writes only its own.

    Args:
        folder: folder of all acknowledgements, ``ack_folder(...)``.
        consumer: name of this training run. FormatError: it is not a valid folder name.
        epochs: number of epochs of the run.

    Attributes:
        folder: as given.
        is_writable: whether files can be written there; None before ``may_write`` has checked.
    """

    def __init__(self, folder: str, consumer: str, epochs: int) -> None:
        require_consumer(consumer)
        self.folder, self._consumer, self._epochs = folder, consumer, epochs
        self.is_writable: bool | None = None

    def _shown(self) -> str:
        return f"{self.folder}: consumer {self._consumer}"

    def of(self, state: RankState) -> Ack:
        """Return the acknowledgement to write when the checkpoint with ``state`` is durable."""
        done = state.items, state.packs_of_items
        return Ack(self._consumer, state.generation, state.deal, state.rank, *done, self._epochs)

    def write(self, state: RankState) -> None:
        """Acknowledge that the checkpoint with ``state`` is durable. OSError: an error of the disk."""
        write_ack(self.folder, self.of(state))

    def newest(self) -> list[Ack]:
        """Return this consumer's newest generation of acknowledgements, by rank; empty before its first checkpoint."""
        return newest_acks(self.folder, self._consumer)

    def done_in(self, state: RankState) -> dict[int, tuple[int, int]]:
        """Return the acknowledged items, and packs in them, of each rank in the deal of ``state``."""
        return {
            ack.rank: (ack.items_done, ack.packs_done)
            for ack in self.newest()
            if (ack.generation, ack.deal) == (state.generation, state.deal)
        }

    def next_generation(self, state: RankState) -> int:
        """Return the generation with which a rank resumes from ``state``.

        If no acknowledgement is as new, that is the generation of the state. Otherwise the newest acknowledgements are
        from this job, whose other ranks may have begun earlier, or from a job that resumed from the same checkpoint and
        was abandoned. In the first case all of them agree with the state, and their generation continues. In the second
        case some may not, so the next generation begins, and they no longer count.
        """
        ours, newest = self.of(state), self.newest()
        if not newest or newest[0].generation < ours.generation:
            return ours.generation
        all_agree = all(ours.agrees_with(ack) for ack in newest)
        return newest[0].generation if all_agree else newest[0].generation + 1

    def may_write(self) -> bool:
        """Return whether this process can write acknowledgements. Creates the folder, and checks only once."""
        if self.is_writable is None:
            home = os.path.join(self.folder, self._consumer)
            with contextlib.suppress(OSError):
                os.makedirs(home, exist_ok=True)
            status_of(home)  # waits until its file system responds, because the next check treats any error as a no
            self.is_writable = os.access(home, os.W_OK)
        return self.is_writable
