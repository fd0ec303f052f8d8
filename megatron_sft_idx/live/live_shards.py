"""Numbered shards that appear one after another during training, from a consumer's view.

``LiveShards`` is the interface of a folder of shards; ``CatalogShards`` and ``LiveChunks`` implement it. ``OpenShards``
is a rank's source of packs: it keeps some of the shards open, and batches are made from these.
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
    """The requested columns in one of the shards: its number, and their specs by name."""

    number: int
    specs: dict[str, ColumnSpec]


@shown_by_fields
class PacksInMemory(NamedTuple):
    """Packs in memory for making batches.

    Attributes:
        pack_index: index of the packs into the arrays.
        arrays: tokens (uint16 or int32), label-aligned loss mask (uint8 or float32) and columns, one item per row.
        items: lookup of their images and audio; None if they have none.
    """

    pack_index: Index
    arrays: Arrays
    items: ItemFinder | None = None


@shown_by_fields
class OpenPacks(NamedTuple):
    """One open shard. Only one thread may use it.

    Attributes:
        num_packs: number of its packs.
        num_tokens: total number of their tokens; None if only reading all of them would show it.
        specs: the requested columns, in the order of their arrays.
        found: all its packs; None if ``load`` reads packs on demand.
        load: function that reads some packs (int64, one or more) into memory. It returns these, and their numbers in
            the index there, int64. None if ``found`` has all packs.
        broken: function that makes the error about a pack from a kernel's message ``shard S, pack N: what (rule R)``.
    """

    num_packs: int
    num_tokens: int | None
    specs: Mapping[str, ColumnSpec]
    found: PacksInMemory | None
    load: Callable[[NDArray[np.int64]], tuple[PacksInMemory, NDArray[np.int64]]] | None
    broken: Callable[[str], Exception]


class LiveShards(Shown, ABC):
    """A folder of numbered shards. Some may not exist yet."""

    folder: str

    def _shown(self) -> str:
        return self.folder

    @abstractmethod
    def limits(self, waiter: Waiter) -> tuple[Limits, int | None]:
        """Return the limits for all its shards, and the tokenizer's padding id, or None.

        Waits until they have been written.
        """

    @abstractmethod
    def end(self) -> int | None:
        """Return the total number of shards, or None while it is unknown."""

    @abstractmethod
    def wait(self, number: int, waiter: Waiter, unacknowledged: Callable[[], int] = lambda: 0) -> bool:
        """Wait until shard ``number`` is published (return True) or is known to never come (return False).

        Args:
            number: number of the shard.
            waiter: how to wait, and how long.
            unacknowledged: called if the shard does not exist yet. It returns how many items before this shard the
                consumer has not acknowledged, because the producer may be waiting for these.

        Raises:
            SFTIndexError: the shard will not come, or not in time; the message says which and why.
            Stopped: the waiter was stopped.
        """

    @abstractmethod
    def numbers(self) -> list[int]:
        """Return the shards that exist now, ascending."""

    @abstractmethod
    def count(self, number: int) -> int | None:
        """Return the number of packs in a shard; None if it does not exist yet or any more."""

    @abstractmethod
    def open(self, number: int, columns: Sequence[str] = (), *, allow_media: bool = False) -> OpenPacks:
        """Open an existing shard with some of its columns, and ask the kernel to read its pages.

        FormatError: it has images or audio, without ``allow_media``.
        """

    def least_packs(self) -> int:
        """Return the minimum number of packs in every shard except the last one; 1 if there is no other minimum.

        Only called for producers with a limit on running ahead. They publish no empty shards.
        """
        return 1

    def may_not_come(self, uncompleted: Sequence[int]) -> bool:
        """Return whether the producer may delay a shard until some earlier shards in ``uncompleted`` are completed.

        While the end of the data is unknown, the result must not depend on whether that shard is already published. The
        training data follows from the result, and a job that resumes from a checkpoint must train on the same data,
        although the producer has continued.
        """
        return False

    def specs_of(self, names: Sequence[str], waiter: Waiter) -> ShardSpecs | None:
        """Return these columns in one of the shards; wait until one exists. None if none will come.

        Raises:
            FormatError: shards of this kind have no columns.
            ShardNotFoundError: the shard lacks one of the columns.
        """
        raise FormatError(f"{self.folder}: columns {', '.join(names)}: chunks have no columns; leave them out")

    def name(self, number: int) -> str:
        """Return the name of a shard in log messages."""
        return f"shard {number}"

    def committed(self) -> None:
        """Called after an acknowledgement was written, so that files can be derived from it."""


class OpenShards(Shown):
    """A ``PackSource`` whose shards are opened and closed.

    A pack is identified by its shard's number and its number in it.

    Args:
        shards: source of the shards.
        waiter: logs what was opened.
        columns: names of the columns to include in batches.
        allow_media: accept shards with images and audio; otherwise opening them is an error.
    """

    def __init__(
        self, shards: LiveShards, waiter: Waiter, columns: Sequence[str] = (), *, allow_media: bool = False
    ) -> None:
        self._shards, self._waiter, self._allow_media = shards, waiter, allow_media
        limits, self.pad_id = shards.limits(waiter)
        self.num_packs, self.fingerprint = 0, ""  # unknown for shards that are still being produced
        self.capacity, self.sequence_multiple = limits.capacity, limits.sequence_multiple
        self.most_sequences = limits.max_sequences_per_pack
        # The columns of one shard; all other shards must have the same columns.
        self._like = (shards.specs_of(columns, waiter) if columns else None) or ShardSpecs(0, {})
        self.columns = {name: [spec] for name, spec in self._like.specs.items()}
        self.media_prefix: str | None = None  # checked when shards are opened
        self._numbered = any(spec.per == "sequence" for spec in self._like.specs.values())
        # The open shards by number, ascending; their numbers, int64; and the packs of each that are in memory.
        self._open: dict[int, OpenPacks] = {}
        self._numbers = np.zeros(0, np.int64)
        self._in_memory: list[PacksInMemory | None] = []

    def _shown(self) -> str:
        return f"{len(self._open)} open shards of {self._shards!r}"

    def hold(self, numbers: Iterable[int]) -> None:
        """Open these shards, and close all others."""
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
        """Raise FormatError if a shard's columns are of another kind."""
        first, like = self._like
        names = [f"{self._shards.folder}: {self._shards.name(shard)}" for shard in (first, number)]
        require_alike_columns(names, {name: [like[name], spec] for name, spec in specs.items()})

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Return the segments of several packs, as in ``PackSource``; ``packs`` is int64 [packs, 2].

        The caller must hold their shards (``hold``), and use the result before the next call.
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
        """Return tokens, label-aligned loss mask and columns of a held shard: the ``shard``-th by number, from 0."""
        return self._packs_of(shard).arrays

    def items(self, shard: int) -> ItemFinder | None:
        """Return the lookup of a held shard's images and audio. See ``arrays`` for ``shard``."""
        return self._packs_of(shard).items

    def _packs_of(self, shard: int) -> PacksInMemory:
        in_memory = self._in_memory[shard]
        assert in_memory is not None  # ``segments`` loaded the packs that it returned
        return in_memory
