"""Numbered shards that appear one after the other while they are trained on, as consumers see them.

``LiveShards`` is what a folder of them can be asked: ``CatalogShards`` and ``LiveChunks`` answer. ``OpenShards`` is the
source of packs of a rank: it has some of the shards open at a time, and batches are made of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.lines import Shown, shown_by_fields
from megatron_sft_idx.live.catalog import Limits
from megatron_sft_idx.live.waiting import Waiter
from megatron_sft_idx.shard.shard_set import require_alike_columns
from megatron_sft_idx.training import Arrays, Index, ItemFinder, Segments, located


@shown_by_fields
class ShardSpecs(NamedTuple):
    """The columns that were asked for, as one of the shards has them: its number, and their specs by name."""

    number: int
    specs: dict[str, ColumnSpec]


@shown_by_fields
class PacksInMemory(NamedTuple):
    """Packs that batches are made of.

    Attributes:
        pack_index: of the packs, which points into the arrays.
        arrays: tokens (uint16 or int32), label-aligned loss mask (uint8 or float32) and columns, an item a row.
        items: what finds their images and audio; None where they have none.
    """

    pack_index: Index
    arrays: Arrays
    items: ItemFinder | None = None


@shown_by_fields
class OpenPacks(NamedTuple):
    """One open shard. Only one thread may use it.

    Attributes:
        num_packs: how many packs it has.
        num_tokens: how many tokens they have in all; None where only reading all of them would tell.
        specs: the columns that it was opened with, in the order of their arrays.
        found: all its packs; None where ``load`` reads packs as they are needed.
        load: reads some packs (int64, one or more) into memory. It gives these, and their numbers in the index there,
            int64. None where ``found`` has all packs.
        broken: makes the error about a pack of which a kernel says ``shard S, pack N: what (rule R)``.
    """

    num_packs: int
    num_tokens: int | None
    specs: Mapping[str, ColumnSpec]
    found: PacksInMemory | None
    load: Callable[[NDArray[np.int64]], tuple[PacksInMemory, NDArray[np.int64]]] | None
    broken: Callable[[str], Exception]


class LiveShards(Shown, ABC):
    """A folder of numbered shards, some of which are not there yet."""

    folder: str

    def _shown(self) -> str:
        return self.folder

    @abstractmethod
    def limits(self, waiter: Waiter) -> tuple[Limits, int | None]:
        """The limits that all its shards keep to, and the tokenizer's padding id, None where unknown.

        Waits until somebody has written them down.
        """

    @abstractmethod
    def end(self) -> int | None:
        """How many shards there will be in all; None while that is not known."""

    @abstractmethod
    def wait(self, number: int, waiter: Waiter, unacknowledged: Callable[[], int] = lambda: 0) -> bool:
        """Wait until shard ``number`` is published: True; or until it is known that it never will be: False.

        Args:
            number: of the shard.
            waiter: who waits, and until when.
            unacknowledged: called when the shard is not there yet. It gives how many items before this shard the
                consumer has not acknowledged: the producer may be waiting for these in its turn.

        Raises:
            SFTIndexError: the shard will not come, or not in time; the message says which and why.
            Stopped: the waiter was told to stop.
        """

    @abstractmethod
    def numbers(self) -> list[int]:
        """The shards that are there now, ascending."""

    @abstractmethod
    def count(self, number: int) -> int | None:
        """How many packs a shard has; None where it is not there yet, or not any more."""

    @abstractmethod
    def open(self, number: int, columns: Sequence[str] = (), *, allow_media: bool = False) -> OpenPacks:
        """Open a shard that is there, with some of its columns, and ask the kernel for its pages.

        FormatError: it has images or audio, and ``allow_media`` was not passed.
        """

    def least_packs(self) -> int:
        """How many packs every shard but the last one has at least; 1 where nobody promises more.

        Only producers that limit how far they are ahead are asked for this. They publish no empty shards.
        """
        return 1

    def may_not_come(self, uncompleted: Sequence[int]) -> bool:
        """Whether the producer may hold a shard back until some of ``uncompleted``, which precede it, are completed.

        While the end of the data is not known, the answer must not depend on whether that shard is published by now.
        What a job trains on follows from the answer, and a job that goes on from a checkpoint must train on the same,
        though the producer has gone on too.
        """
        return False

    def specs_of(self, names: Sequence[str], waiter: Waiter) -> ShardSpecs | None:
        """What these columns are in one of the shards; waits until one is there. None where none will come any more.

        Raises:
            FormatError: shards of this kind have no columns.
            ShardNotFoundError: the shard lacks one of the columns.
        """
        raise FormatError(f"{self.folder}: columns {', '.join(names)}: chunks have none; leave them out")

    def name(self, number: int) -> str:
        """What log messages call a shard."""
        return f"shard {number}"

    def committed(self) -> None:
        """Called after an acknowledgement was written, so that files can be derived from it."""


class OpenShards(Shown):
    """A ``PackSource`` whose shards are opened and let go; a pack is named by its shard's number and its own in it.

    Args:
        shards: where they come from.
        waiter: says in the log what was opened.
        columns: names of the columns that go into batches.
        allow_media: take shards with images and audio; else they are refused when they are opened.
    """

    def __init__(
        self, shards: LiveShards, waiter: Waiter, columns: Sequence[str] = (), *, allow_media: bool = False
    ) -> None:
        self._shards, self._waiter, self._allow_media = shards, waiter, allow_media
        limits, self.pad_id = shards.limits(waiter)
        self.num_packs, self.fingerprint = 0, ""  # of shards that are still being made, nobody knows these
        self.capacity, self.sequence_multiple = limits.capacity, limits.sequence_multiple
        self.most_sequences = limits.max_sequences_per_pack
        # The columns of one shard, which those of all others must be like.
        self._like = (shards.specs_of(columns, waiter) if columns else None) or ShardSpecs(0, {})
        self.columns = {name: [spec] for name, spec in self._like.specs.items()}
        self.media_prefix: str | None = None  # shards are looked at when they are opened
        self._numbered = any(spec.per == "sequence" for spec in self._like.specs.values())
        # The open shards by number, ascending; their numbers, int64; and of each the packs that are in memory.
        self._open: dict[int, OpenPacks] = {}
        self._numbers = np.zeros(0, np.int64)
        self._in_memory: list[PacksInMemory | None] = []

    def _shown(self) -> str:
        return f"{len(self._open)} open shards of {self._shards!r}"

    def hold(self, numbers: Iterable[int]) -> None:
        """Open these shards, and let all others go."""
        held = set(numbers)
        if held == self._open.keys():
            return
        for number in sorted(held - self._open.keys()):
            opened = self._open[number] = self._shards.open(number, tuple(self.columns), allow_media=self._allow_media)
            self._require_alike(number, opened.specs)
            tokens = "" if opened.num_tokens is None else f", {opened.num_tokens:,} tokens"
            self._waiter.say(f"{self._waiter.who}: {self._shards.name(number)}, {opened.num_packs:,} packs{tokens}")
        self._open = {number: self._open[number] for number in sorted(held)}
        self._numbers = np.array(list(self._open), np.int64)
        self._in_memory = [opened.found for opened in self._open.values()]

    def _require_alike(self, number: int, specs: Mapping[str, ColumnSpec]) -> None:
        """FormatError where a shard's columns are of another kind."""
        first, like = self._like
        names = [f"{self._shards.folder}: {self._shards.name(shard)}" for shard in (first, number)]
        require_alike_columns(names, {name: [like[name], spec] for name, spec in specs.items()})

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Where the sequences of some packs lie, as ``PackSource`` has it; ``packs`` is int64 [packs, 2].

        The caller must hold their shards (``hold``), and use what it is given before it calls this again.
        """
        numbers, local = np.array(packs.T, order="C")
        slots, opened = np.searchsorted(self._numbers, numbers), list(self._open.values())
        for slot, one in enumerate(opened):
            if one.load is not None and len(rows := np.flatnonzero(slots == slot)):
                self._in_memory[slot], local[rows] = one.load(local[rows])
        indexes = [None if packs_of is None else packs_of.pack_index for packs_of in self._in_memory]
        limits = self.capacity, self.sequence_multiple, self.most_sequences
        broken = lambda at, said: opened[slots[at]].broken(said)  # noqa: E731
        return located(indexes, slots, local, limits, broken, numbered=self._numbered)

    def arrays(self, shard: int) -> Arrays:
        """Tokens, label-aligned loss mask and columns of a held shard: the ``shard``-th by number, from 0."""
        return self._packs_of(shard).arrays

    def items(self, shard: int) -> ItemFinder | None:
        """What finds the images and audio of a held shard; ``shard`` as for ``arrays``."""
        return self._packs_of(shard).items

    def _packs_of(self, shard: int) -> PacksInMemory:
        in_memory = self._in_memory[shard]
        assert in_memory is not None  # ``segments`` loaded what it names
        return in_memory
