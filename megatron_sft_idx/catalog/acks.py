"""Acknowledgements: how far each rank of each consumer has trained, as of a checkpoint that is on disk.

A consumer goes through a list of items: what an earlier run with another number of ranks left over, then the shards
from its frontier on. Item j belongs to data-parallel rank j mod size, which takes its items in order. So which shards
are complete follows from one small file a rank, and nobody counts anything twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_sft_idx.catalog.documents import Document, kind_of_document, read_document, write_document
from megatron_sft_idx.catalog.folder import ACKS, Catalog
from megatron_sft_idx.errors import FormatError

__all__ = ["Ack", "Base", "Leftover", "ack_folder", "completed", "read_acks", "require_consumer", "write_ack"]

_CONSUMER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RANK_FILE = re.compile(r"rank-([0-9]{5,9})\.json")


@dataclass(frozen=True, slots=True)
class Leftover:
    """An item that is what remained of some shards.

    Attributes:
        shards: whose packs, in the order in which their group was shuffled.
        offset: packs of them that are done.
    """

    shards: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Base:
    """Where the list of items begins. A fresh start has no leftovers and frontier 0.

    Attributes:
        epoch: for which this holds, from 0; a later epoch begins afresh.
        seed: of the shuffle.
        window: items that are shuffled together.
        leftovers: the first items.
        frontier: the shard that follows them; the others below it are done.
    """

    epoch: int = 0
    seed: int = 0
    window: int = 1
    leftovers: tuple[Leftover, ...] = ()
    frontier: int = 0

    def to_json(self) -> dict[str, Any]:
        """What ``parse`` reads."""
        return asdict(self)

    @classmethod
    def parse(cls, document: Document) -> Base:
        """FormatError where a field is missing or of another type."""
        leftovers = (
            Leftover(tuple(item.wholes("shards")), item.whole("offset")) for item in document.documents("leftovers")
        )
        return cls(
            epoch=document.whole("epoch"),
            seed=document.whole("seed"),
            window=document.whole("window", 1),
            leftovers=tuple(leftovers),
            frontier=document.whole("frontier"),
        )


@dataclass(frozen=True, slots=True)
class Ack:
    """What one rank of a consumer has trained on.

    Attributes:
        consumer: its name.
        generation: grows when the consumer goes on with another number of ranks; the newest counts.
        base: where the items begin.
        size: data-parallel ranks.
        rank: which of them.
        items_done: of this rank, in this epoch; its i-th is item ``rank + i * size``.
        packs_done: packs in these items.
        epoch: in which they were done, from 0.
        epochs: how many there are to be.
    """

    consumer: str
    generation: int
    base: Base
    size: int
    rank: int
    items_done: int
    packs_done: int
    epoch: int = 0
    epochs: int = 1

    def to_json(self) -> dict[str, Any]:
        """What ``parse`` reads."""
        return asdict(self)

    @classmethod
    def parse(cls, document: Document) -> Ack:
        """FormatError where a field is missing, of another type, or they do not go together."""
        ack = cls(
            consumer=document.text("consumer"),
            generation=document.whole("generation"),
            base=Base.parse(document.document("base")),
            size=document.whole("size", 1),
            rank=document.whole("rank"),
            items_done=document.whole("items_done"),
            packs_done=document.whole("packs_done"),
            epoch=document.whole("epoch"),
            epochs=document.whole("epochs", 1),
        )
        if ack.rank >= ack.size:
            raise document.wrong("rank", ack.rank, f"less than its size {ack.size}")
        if ack.epoch >= ack.epochs:
            raise document.wrong("epoch", ack.epoch, f"less than its epochs {ack.epochs}: they count from 0")
        return ack

    def current_base(self) -> Base:
        """Where the items of this epoch begin: an epoch that began after the base begins afresh."""
        return self.base if self.base.epoch == self.epoch else Base(self.epoch, self.base.seed, self.base.window)

    def agrees_with(self, other: Ack) -> bool:
        """Whether both can be of one generation."""
        if (self.size, self.epochs) != (other.size, other.epochs):
            return False
        return self.epoch != other.epoch or self.current_base() == other.current_base()


_KIND = kind_of_document("an acknowledgement", Ack.parse)


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
    """Replace a rank's acknowledgement in ``ack_folder(...)``, durably.

    Raises:
        FormatError: the consumer's name is no name of a folder, or something else lies where it would be.
        OSError: it may not be written there.
    """
    require_consumer(ack.consumer)
    write_document(os.path.join(folder, ack.consumer, f"rank-{ack.rank:05d}.json"), ack.to_json(), _KIND)


def read_acks(folder: str) -> dict[str, list[Ack]]:
    """The acknowledgements in ``ack_folder(...)`` of every consumer's newest generation, by rank.

    Raises:
        FormatError: a file is damaged, of another version, or says something else than the one beside it.
    """
    consumers: dict[str, list[Ack]] = {}
    for consumer in _names(folder):
        if _CONSUMER.fullmatch(consumer) and (acks := list(_read_consumer(folder, consumer))):
            newest = max(ack.generation for ack in acks)
            consumers[consumer] = current = [ack for ack in acks if ack.generation == newest]
            for ack in current[1:]:
                if not ack.agrees_with(current[0]):
                    raise FormatError(
                        f"{os.path.join(folder, consumer)}: ranks {current[0].rank} and {ack.rank} of generation"
                        f" {newest} disagree on their size, epochs or base; two runs use the consumer name"
                        f" {consumer!r}: give each its own"
                    )
    return consumers


def _read_consumer(folder: str, consumer: str) -> Iterator[Ack]:
    home = os.path.join(folder, consumer)
    for name in _names(home):
        if (match := _RANK_FILE.fullmatch(name)) and (document := read_document(os.path.join(home, name))):
            ack = Ack.parse(document)
            if ack.rank != int(match[1]):
                raise document.wrong("rank", ack.rank, f"{int(match[1])}, as in the file's name")
            yield ack


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def completed(acks: Mapping[str, Sequence[Ack]], consumers: int, numbers: Iterable[int]) -> list[int]:
    """Which of the shards ``numbers`` every consumer has completed, in their order.

    A shard is complete when its rank has done it in the last epoch, or an earlier generation had. None is before there
    are ``consumers``; where there are more, all of them count.

    Args:
        acks: of ``read_acks``.
        consumers: how many are expected.
        numbers: of shards, such as those that are there.
    """
    if len(acks) < consumers:
        return []
    done = [_Done(current) for current in acks.values()]
    return [number for number in numbers if all(number in each for each in done)]


class _Done:
    """The shards that one consumer has completed, as a container."""

    def __init__(self, acks: Sequence[Ack]) -> None:
        # Ranks that have not come to the last epoch have done nothing that counts.
        last = [ack for ack in acks if ack.epoch == ack.epochs - 1]
        self._size = acks[0].size
        self._items_done = {ack.rank: ack.items_done for ack in last}
        self._base = last[0].current_base() if last else Base()
        self._leftovers = {
            shard: item for item, leftover in enumerate(self._base.leftovers) for shard in leftover.shards
        }

    def __contains__(self, shard: int) -> bool:
        item = self._leftovers.get(shard)
        if item is None:
            if shard < self._base.frontier:
                return True
            item = len(self._base.leftovers) + shard - self._base.frontier
        return item // self._size < self._items_done.get(item % self._size, 0)
