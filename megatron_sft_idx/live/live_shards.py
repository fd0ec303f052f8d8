"""Numbered shards that come one after the other, for their consumers: ``LiveShards``, and those of a catalog.

``OpenShards`` are the ones that a rank has open at the moment, as the source of packs that batches are made of.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SFTIndexError, ShardNotFoundError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.layout.column import ColumnSpec, is_source
from megatron_sft_idx.live.catalog import Catalog, Limits
from megatron_sft_idx.live.catalog_watch import CatalogWatch, Stopped, Waiter
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.reader import read_header
from megatron_sft_idx.shard.shard_set import alike_columns
from megatron_sft_idx.storage import Backend
from megatron_sft_idx.training import Segments, interleaved, sequence_numbers

__all__ = ["CatalogShards", "LiveShards", "OpenPacks", "OpenShards"]

# Offsets of sequences and of tokens by pack, starts of sequences, and how many tokens there are.
Index: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32], int]
# Of one shard: its number, and what each of its columns that were asked for is.
Columns: TypeAlias = tuple[int, dict[str, ColumnSpec]]
_SECONDS_BETWEEN_LISTINGS = 0.05
_Found = TypeVar("_Found")


class OpenPacks(Protocol):
    """One shard, open. Used by one thread.

    Attributes:
        num_packs: in it.
        num_tokens: in all of them; None where that is not known without reading everything.
        index: of all packs, where it is at hand: the packs of several such shards are found in one call. Else None.
            Shards with columns have it at hand.
        columns: that it was opened with, in the order of ``arrays``.
    """

    num_packs: int
    num_tokens: int | None
    index: Index | None
    columns: Mapping[str, ColumnSpec]

    def segments(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Where the sequences of some packs lie in ``arrays()``.

        Returns:
            CSR offsets of the sequences int64 [packs + 1]; the first token and the tokens of each, int64 [sequences].
        """
        ...

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Tokens (uint16 or int32), label-aligned loss mask (uint8 or float32), and columns, an item a row.

        They hold at least the packs that ``segments`` was last asked for: a shard may be read as it is needed.
        """
        ...


class LiveShards(ABC):
    """A folder of numbered shards, some of which are not there yet. It pickles, for worker processes.

    Attributes:
        folder: its path.
    """

    folder: str

    @abstractmethod
    def limits(self, waiter: Waiter) -> tuple[Limits, int | None]:
        """What its shards keep to, and the tokenizer's padding id, None where unknown; waits for who says so."""

    @abstractmethod
    def end(self) -> int | None:
        """How many shards there are in all, once that is known."""

    @abstractmethod
    def wait(self, number: int, waiter: Waiter, uncommitted: Callable[[], int] = lambda: 0) -> bool:
        """Wait until shard ``number`` is published: True; or until it is known that it never will be: False.

        Args:
            number: of the shard.
            waiter: who waits.
            uncommitted: asked where there is something to wait for: how many shards before this one the consumer has
                not acknowledged, for which a producer may be waiting in its turn.

        Raises:
            SFTIndexError: it will not come, or not in time; the message says which and why.
            Stopped: the waiter is to stop.
        """

    def least_packs(self) -> int:
        """Packs that every shard has but the last one; 1 where nobody says more."""
        return 1

    def may_not_come(self, number: int, uncompleted: Sequence[int]) -> bool:
        """Whether the producer may not publish a shard before some of ``uncompleted``, which precede it, are."""
        return False

    @abstractmethod
    def numbers(self) -> list[int]:
        """The shards that are there now, ascending."""

    @abstractmethod
    def count(self, number: int) -> int | None:
        """Packs in a shard; None where it is not there: not yet, or not any more."""

    @abstractmethod
    def open(self, number: int, columns: Sequence[str] = ()) -> OpenPacks:
        """Open a shard that is there, with some of its columns, and ask the kernel for its pages."""

    def columns(self, names: Sequence[str], waiter: Waiter) -> Columns | None:
        """What these columns are, by a shard that is there; waits for one. None where none is nor will be.

        Raises:
            FormatError: these shards have no columns.
            ShardNotFoundError: that one does not have them.
        """
        raise FormatError(f"{self.folder}: columns {', '.join(names)}: chunks have none; leave them out")

    def name(self, number: int) -> str:
        """What the log calls a shard."""
        return f"shard {number}"

    def committed(self) -> None:  # noqa: B027 - most derive nothing
        """Called after an acknowledgement was written: the place for markers that are derived from these."""


class OpenShards:
    """A ``PackSource`` whose shards come and go; a pack is two numbers, its shard's and its own inside that.

    Args:
        shards: of the catalog.
        limits: that they keep to.
        pad_id: the tokenizer's, None where unknown.
        waiter: for whom the log says what was opened.
        columns: that every shard has, as one of them has them; None for none.
    """

    def __init__(
        self, shards: LiveShards, limits: Limits, pad_id: int | None, waiter: Waiter, columns: Columns | None = None
    ) -> None:
        self._shards, self._waiter = shards, waiter
        self.num_packs = 0  # how many will come nobody knows
        self.capacity, self.sequence_multiple = limits.capacity, limits.sequence_multiple
        self.most_sequences, self.pad_id, self.fingerprint = limits.max_sequences_per_pack, pad_id, ""
        self._like = columns or (0, {})
        self.columns = {name: [spec] for name, spec in self._like[1].items()}
        self._numbered = any(spec.per == "sequence" for spec in self._like[1].values())
        self._numbers: list[int] = []
        self._open: list[OpenPacks] = []

    def hold(self, numbers: Iterable[int]) -> None:
        """Have these shards open and no others; places that ``segments`` gave before are not good any more."""
        wanted = sorted(set(numbers))
        if wanted != self._numbers:
            held = dict(zip(self._numbers, self._open, strict=True))
            self._open = [held[number] if number in held else self._opened(number) for number in wanted]
            self._numbers = wanted

    def _opened(self, number: int) -> OpenPacks:
        opened = self._shards.open(number, tuple(self.columns))
        self._require_alike(number, opened.columns)
        tokens = "" if opened.num_tokens is None else f", {opened.num_tokens:,} tokens"
        self._waiter.say(f"{self._waiter.who}: {self._shards.name(number)}, {opened.num_packs:,} packs{tokens}")
        return opened

    def _require_alike(self, number: int, columns: Mapping[str, ColumnSpec]) -> None:
        """FormatError where columns are of another kind than in another shard, or ``source`` numbers other files."""
        first, like = self._like
        names = [f"{self._shards.folder}: {self._shards.name(shard)}" for shard in (first, number)]
        alike_columns(names, {name: [like[name], spec] for name, spec in columns.items()})
        pair = [specs["source"] for specs in (like, columns) if "source" in specs]
        if not any(map(is_source, pair)):
            return
        known, here = (spec.metadata.get("files", []) for spec in pair)
        # Batches have the numbers as they are stored: which other shards will come, and what they name, nobody knows.
        if known[: len(here)] != here[: len(known)]:
            raise FormatError(
                f"{names[1]}: the files of its column source are not those of shard {first}, and nobody could tell what"
                " the numbers in batches mean; write every shard's list so that it goes on from the one before, or"
                " leave the column out"
            )
        if len(here) > len(known):
            self._like = number, dict(columns)

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Where the sequences of packs of held shards lie; int64 [packs, 2]. See ``PackSource``."""
        numbers, local = np.ascontiguousarray(packs.T)
        slots = np.searchsorted(np.array(self._numbers, np.int64), numbers)
        indexes = [opened.index for opened in self._open]
        if all(index is not None for index in indexes):
            limits = self.capacity, self.sequence_multiple, self.most_sequences
            # One call for all shards. Where it finds something wrong, the shard that is asked by itself says what.
            with contextlib.suppress(ValueError):
                offsets, own, starts, lengths = _native.pack_segments(indexes, slots, local, limits)
                by_pack = [index[0] for index in indexes if index is not None]
                sequences = sequence_numbers(by_pack, slots, local, offsets) if self._numbered else None
                return Segments(offsets, own, starts, lengths, None, sequences, local)

        def ask(slot: int, rows: NDArray[np.int64]) -> Segments:
            offsets, starts, lengths = self._open[slot].segments(local[rows])
            return Segments(offsets, np.full(len(starts), slot, np.int32), starts, lengths)

        return interleaved(slots, ask)

    def arrays(self, shard: int) -> tuple[NDArray[Any], ...]:
        """Tokens, label-aligned loss mask and columns of one of the held shards, numbered from 0 as they ascend."""
        return self._open[shard].arrays()


# ---- shards of a catalog ----


class CatalogShards(LiveShards):
    """The shards of a catalog that ``megatron-sft-idx produce`` fills.

    Args:
        folder: need not be there yet.
        max_wait: seconds after which a wait is given up; keep it below the timeout of the collectives, so that the
            error that says why comes first.
        producer_timeout: seconds without a sign of life after which the producer counts as dead.
        backend: ``mmap``, or ``pread`` where mapping is slow or refused.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_wait: float | None = 540.0,
        producer_timeout: float = 120.0,
        backend: Backend = "mmap",
    ) -> None:
        self.folder = folder
        self._max_wait, self._producer_timeout, self._backend = max_wait, producer_timeout, backend
        self._catalog = Catalog(folder)
        self._watch = CatalogWatch(self._catalog)
        self._limits: tuple[Limits, int | None] | None = None
        self._counts: dict[int, int] = {}

    def limits(self, waiter: Waiter) -> tuple[Limits, int | None]:
        """What the producer promises; of a finished catalog without one, what the shards have."""
        if self._limits is None:
            header = self._of_any(self.newest_header, waiter)
            producer = self._catalog.producer()
            if producer is not None:
                self._limits = producer.limits, None if header is None else header.pad_id
            else:
                self._limits = self._limits_of_headers()
        return self._limits

    def least_packs(self) -> int:
        """By what the producer says of itself: a shard ends once it holds so many tokens, which so many packs hold."""
        producer = self._catalog.producer()
        if producer is None:
            return 1
        packing, sharding = (producer.options.get(name) for name in ("packing", "sharding"))
        # Tokens are counted before they are truncated.
        if not isinstance(packing, dict) or not isinstance(sharding, dict) or packing.get("overlong") == "truncate":
            return 1
        tokens = sharding.get("tokens_per_shard")
        return max(1, -(-tokens // producer.limits.capacity)) if isinstance(tokens, int) else 1

    def may_not_come(self, number: int, uncompleted: Sequence[int]) -> bool:
        """By ``--max-ahead-shards`` and ``--max-ahead-gb``, where it is not there yet and the end is not known."""
        if self._limits is None or self.end() is not None:
            return False
        shards, nbytes = self._limits[0].max_ahead_shards, self._limits[0].max_ahead_nbytes
        if shards is not None and len(uncompleted) >= shards:
            return True
        if nbytes is None or self._catalog.is_published(number):
            return False
        return (len(uncompleted) + 1) * max(map(self._catalog.shard_nbytes, uncompleted), default=0) > nbytes

    def newest_header(self) -> Header | None:
        """The header of the newest shard that is there now; None where there is none."""
        for number in reversed(self.numbers()):
            # One that is listed may be freed in between, or not be there for all that a listing says.
            with contextlib.suppress(ShardNotFoundError):
                return read_header(self._catalog.shard_prefix(number))
        return None

    def _newest_columns(self, names: Sequence[str]) -> Columns | None:
        for number in reversed(self.numbers()):
            try:
                columns = Shard(self._catalog.shard_prefix(number), columns=names).columns
                return number, {name: columns[name].spec for name in names}
            except ShardNotFoundError:
                if self._catalog.is_published(number):  # and was not freed in between
                    raise
        return None

    def columns(self, names: Sequence[str], waiter: Waiter) -> Columns | None:
        """See ``LiveShards``; as the newest shard has them."""
        return self._of_any(lambda: self._newest_columns(names), waiter)

    def _of_any(self, look: Callable[[], _Found | None], waiter: Waiter) -> _Found | None:
        """What is found of the newest shard; waits for one. None where all are freed and no more will come."""
        while (found := look()) is None:
            producer = self._catalog.producer()
            if not self.wait(0 if producer is None else producer.published, waiter):
                return None
            if waiter.pause(_SECONDS_BETWEEN_LISTINGS):
                raise Stopped
        return found

    def _limits_of_headers(self) -> tuple[Limits, int | None]:
        if self.end() is None:
            raise SFTIndexError(
                f"{self.folder}: shards and no _producer.json, which says how many sequences their packs have at most,"
                " and no _END.json, after which nobody need say it; fill it with megatron-sft-idx produce, or train on"
                " the folder as on any other"
            )
        headers = [read_header(self._catalog.shard_prefix(number)) for number in self.numbers()]
        if not headers:
            raise FormatError(f"{self.folder}: a finished catalog without a shard, there is nothing to train on")
        limits = Limits(
            max(header.capacity for header in headers),
            max(header.most_sequences for header in headers),
            math.gcd(*(header.sequence_multiple for header in headers)),
        )
        return limits, headers[0].pad_id

    def end(self) -> int | None:
        """How many shards there are in all, once that is known."""
        return self._catalog.end()

    def wait(self, number: int, waiter: Waiter, uncommitted: Callable[[], int] = lambda: 0) -> bool:
        """See ``LiveShards``."""
        times: dict[str, Any] = {"max_wait": self._max_wait, "producer_timeout": self._producer_timeout}
        return self._watch.wait(number, waiter, uncommitted=uncommitted, **times)

    def numbers(self) -> list[int]:
        """The shards that are there now."""
        return self._catalog.numbers()

    def count(self, number: int) -> int | None:
        """Packs in a shard, from its header; None where it is not there."""
        if number not in self._counts:
            try:
                self._counts[number] = read_header(self._catalog.shard_prefix(number)).num_packs
            except ShardNotFoundError:
                return None
        return self._counts[number]

    def open(self, number: int, columns: Sequence[str] = ()) -> OpenPacks:
        """Open a shard and hold it against what the producer promised."""
        shard = Shard(self._catalog.shard_prefix(number), backend=self._backend, columns=columns)
        if self._limits is not None:
            _require_kept(shard, *self._limits)
        return _OpenShard(shard, columns)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counts": {}}


def _require_kept(shard: Shard, limits: Limits, pad_id: int | None) -> None:
    """FormatError where a shard is not what its catalog's producer promised."""
    header, most, multiple = shard.header, limits.max_sequences_per_pack, limits.sequence_multiple
    for found, promised, kept in (
        (f"packs of up to {header.capacity} tokens", limits.capacity, header.capacity <= limits.capacity),
        (f"{header.most_sequences} sequences in a pack", most, header.most_sequences <= most),
        (f"padding id {header.pad_id}", pad_id, pad_id in (None, header.pad_id or 0)),
        (f"sequence multiple {header.sequence_multiple}", multiple, header.sequence_multiple % multiple == 0),
    ):
        if not kept:
            raise FormatError(
                f"{shard.prefix}: {found}, the catalog's producer promised {promised}; somebody else wrote this shard:"
                " make the catalog anew"
            )


class _OpenShard:
    """An ``OpenPacks`` over the files of one shard."""

    def __init__(self, shard: Shard, columns: Sequence[str]) -> None:
        self._shard, files = shard, shard.files
        opened = [shard.columns.open(name) for name in columns]
        self.columns: Mapping[str, ColumnSpec] = {column.name: column.spec for column in opened}
        self.num_packs = files.num_packs
        self.num_tokens: int | None = files.num_tokens
        self.index: Index | None = shard.index
        self._arrays = files.tokens[:], files.loss[:], *(column.held_items for column in opened)
        for array in self._arrays:
            _native.will_need(array, np.zeros(1, np.int64), np.array([len(array)]))

    def segments(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """See ``OpenPacks``. FormatError where index entries break a rule of the format."""
        header = self._shard.header
        limits = header.capacity, header.sequence_multiple, header.most_sequences
        try:
            offsets, _, starts, lengths = _native.pack_segments(
                [self._shard.index], np.zeros_like(packs), packs, limits
            )
        except ValueError as error:
            raise self._shard.broken_pack(str(error)) from None
        return offsets, starts, lengths

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All tokens, masks and columns of the shard."""
        return self._arrays
