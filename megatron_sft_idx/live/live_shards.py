"""Numbered shards that come one after the other, for their consumers: ``LiveShards``, and those of a catalog.

``OpenShards`` are the ones that a rank has open at the moment, as the source of packs that batches are made of.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SFTIndexError, ShardNotFoundError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.layout.column import ColumnSpec, is_source
from megatron_sft_idx.live.catalog import Catalog, Limits, ProducerState, Still, Stopped, Waiter, shard_name
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.opening import read_header
from megatron_sft_idx.shard.shard_set import alike_columns
from megatron_sft_idx.training import Arrays, Index, Segments, located

# Of one shard: its number, and what each of its columns that were asked for is.
Columns: TypeAlias = tuple[int, dict[str, ColumnSpec]]
_Found = TypeVar("_Found")


class OpenPacks(NamedTuple):
    """One shard, open. Used by one thread.

    Attributes:
        num_packs: in it.
        num_tokens: in all of them; None where that is not known without reading everything.
        columns: that it was opened with, in the order of its arrays.
        found: the index of its packs, and tokens (uint16 or int32), label-aligned loss mask (uint8 or float32) and
            columns, an item a row, that it points into; None where ``load`` reads them as they are needed.
        load: has some packs, int64, one or more, at hand: gives the index of these and what that points into, and what
            the packs are numbered there. None where all are at hand.
        broken: makes an error where a kernel found ``shard S, pack N: what (rule R)``.
    """

    num_packs: int
    num_tokens: int | None
    columns: Mapping[str, ColumnSpec]
    found: tuple[Index, Arrays] | None
    load: Callable[[NDArray[np.int64]], tuple[tuple[Index, Arrays], NDArray[np.int64]]] | None
    broken: Callable[[str], Exception]


class LiveShards(ABC):
    """A folder of numbered shards, some of which are not there yet. It pickles, for worker processes."""

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

    @abstractmethod
    def numbers(self) -> list[int]:
        """The shards that are there now, ascending."""

    @abstractmethod
    def count(self, number: int) -> int | None:
        """Packs in a shard; None where it is not there: not yet, or not any more."""

    @abstractmethod
    def open(self, number: int, columns: Sequence[str] = ()) -> OpenPacks:
        """Open a shard that is there, with some of its columns, and ask the kernel for its pages."""

    def least_packs(self) -> int:
        """Packs that every shard has but the last one; 1 where nobody says more."""
        return 1

    def may_not_come(self, number: int, uncompleted: Sequence[int]) -> bool:
        """Whether the producer may not publish a shard before some of ``uncompleted``, which precede it, are."""
        return False

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

    It has the columns of these names, where a shard is left to read; the log says for the waiter what was opened.
    """

    def __init__(self, shards: LiveShards, waiter: Waiter, columns: Sequence[str] = ()) -> None:
        self._shards, self._waiter = shards, waiter
        limits, self.pad_id = shards.limits(waiter)
        self.num_packs, self.fingerprint = 0, ""  # how many will come nobody knows
        self.capacity, self.sequence_multiple = limits.capacity, limits.sequence_multiple
        self.most_sequences = limits.max_sequences_per_pack
        # As one of the shards has them, which others are held against.
        self._like: Columns = (shards.columns(columns, waiter) if columns else None) or (0, {})
        self.columns = {name: [spec] for name, spec in self._like[1].items()}
        self._numbered = any(spec.per == "sequence" for spec in self._like[1].values())
        # Shards that are open, by number, ascending; the numbers, and where their packs are at the moment.
        self._open: dict[int, OpenPacks] = {}
        self._numbers = np.zeros(0, np.int64)
        self._found: list[tuple[Index, Arrays] | None] = []

    def hold(self, numbers: Iterable[int]) -> None:
        """Have these shards open and no others."""
        wanted = set(numbers)
        if wanted == self._open.keys():
            return
        for number in sorted(wanted - self._open.keys()):
            opened = self._open[number] = self._shards.open(number, tuple(self.columns))
            self._require_alike(number, opened.columns)
            tokens = "" if opened.num_tokens is None else f", {opened.num_tokens:,} tokens"
            self._waiter.say(f"{self._waiter.who}: {self._shards.name(number)}, {opened.num_packs:,} packs{tokens}")
        self._open = {number: self._open[number] for number in sorted(wanted)}
        self._numbers = np.array(list(self._open), np.int64)
        self._found = [opened.found for opened in self._open.values()]

    def _require_alike(self, number: int, columns: Mapping[str, ColumnSpec]) -> None:
        """FormatError where columns are of another kind than in another shard, or ``source`` numbers other files."""
        first, like = self._like
        names = [f"{self._shards.folder}: {self._shards.name(shard)}" for shard in (first, number)]
        alike_columns(names, {name: [like[name], spec] for name, spec in columns.items()})
        if not any("source" in specs and is_source(specs["source"]) for specs in (like, columns)):
            return
        # Batches have the numbers as they are stored: which other shards will come, and what they name, nobody knows.
        known, here = (specs["source"].metadata.get("files", []) for specs in (like, columns))
        if known[: len(here)] != here[: len(known)]:
            raise FormatError(
                f"{names[1]}: the files of its column source are not those of shard {first}, and nobody could tell what"
                " the numbers in batches mean; write every shard's list so that it goes on from the one before, or"
                " leave the column out"
            )
        if len(here) > len(known):
            self._like = number, dict(columns)

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Where the sequences of packs of held shards lie; int64 [packs, 2]. See ``PackSource``.

        Their places are good until it is called again.
        """
        numbers, local = np.array(packs.T, order="C")
        slots, opened = np.searchsorted(self._numbers, numbers), list(self._open.values())
        for slot, one in enumerate(opened):
            if one.load is not None and len(mine := np.flatnonzero(slots == slot)):
                self._found[slot], local[mine] = one.load(local[mine])
        indexes = [None if found is None else found[0] for found in self._found]
        limits = self.capacity, self.sequence_multiple, self.most_sequences
        broken = lambda at, said: opened[slots[at]].broken(said)  # noqa: E731
        return located(indexes, slots, local, limits, broken, numbered=self._numbered)

    def arrays(self, shard: int) -> Arrays:
        """Tokens, label-aligned loss mask and columns of one of the held shards, numbered from 0 as they ascend."""
        found = self._found[shard]
        assert found is not None  # ``segments`` loaded what it names
        return found[1]


# ---- shards of a catalog ----


class CatalogShards(Catalog, LiveShards):
    """The shards of a catalog that ``megatron-sft-idx produce`` fills, and whether its producer is alive.

    It is while the beat in ``_producer.json`` changes, whatever the time of day is on any machine, or on the files.

    Args:
        folder: need not be there yet.
        max_wait: seconds after which a wait is given up; keep it below the timeout of the collectives, so that the
            error that says why comes first. None for never.
        producer_timeout: seconds without a sign of life after which the producer counts as dead.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_wait: float | None = 540.0,
        producer_timeout: float = 120.0,
    ) -> None:
        super().__init__(folder)
        self.max_wait, self.producer_timeout = max_wait, producer_timeout
        self._limits: tuple[Limits, int | None] | None = None
        self._counts: dict[int, int] = {}
        # What the producer said when it was last looked at, and since when its beat is that.
        self._state: ProducerState | None = None
        self._beat_since: float | None = None
        # None before the first look, which shows no more than that somebody was here once.
        self._seen_alive: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counts": {}}

    # ---- what is there ----

    def limits(self, waiter: Waiter) -> tuple[Limits, int | None]:
        """What the producer promises; of a finished catalog without one, what the shards have."""
        if self._limits is None:
            header, producer = self.newest(self._header, waiter), self.producer()
            if producer is not None:
                self._limits = producer.limits, None if header is None else header.pad_id
            elif self.end() is None:
                raise SFTIndexError(
                    f"{self.folder}: shards and no _producer.json, which says how many sequences their packs have at"
                    " most, and no _END.json, after which nobody need say it; fill it with megatron-sft-idx produce, or"
                    " train on the folder as on any other"
                )
            elif not (headers := [self._header(number) for number in self.numbers()]):
                raise FormatError(f"{self.folder}: a finished catalog without a shard, there is nothing to train on")
            else:
                capacity, most = (max(map(of, headers)) for of in (lambda h: h.capacity, lambda h: h.most_sequences))
                multiple = math.gcd(*(header.sequence_multiple for header in headers))
                self._limits = Limits(capacity, most, multiple), headers[0].pad_id
        return self._limits

    def least_packs(self) -> int:
        """By what the producer says of itself: a shard ends once it holds so many tokens, which so many packs hold."""
        producer = self.producer()
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
        if nbytes is None or self.is_published(number):
            return False
        return (len(uncompleted) + 1) * max(map(self.shard_nbytes, uncompleted), default=0) > nbytes

    def _header(self, number: int) -> Header:
        return read_header(self.shard_prefix(number))

    def newest(self, read: Callable[[int], _Found], waiter: Waiter | None = None) -> _Found | None:
        """What is read of the newest shard that is there, by its number; with a waiter, once there is one.

        None where there is none; for who waits, where all are freed and no more will come.
        """
        while True:
            for number in reversed(self.numbers()):
                try:
                    return read(number)
                except ShardNotFoundError:
                    # One that is listed may be freed in between, or not be there for all that a listing says.
                    if self.is_published(number):
                        raise
            producer = self.producer()
            if waiter is None or not self.wait(0 if producer is None else producer.published, waiter):
                return None
            if waiter.pause(0.05):
                raise Stopped

    def newest_header(self) -> Header | None:
        """The header of the newest shard that is there now; None where there is none."""
        return self.newest(self._header)

    def columns(self, names: Sequence[str], waiter: Waiter) -> Columns | None:
        """See ``LiveShards``; as the newest shard has them."""

        def read(number: int) -> Columns:
            columns = Shard(self.shard_prefix(number), columns=names).columns
            return number, {name: columns[name].spec for name in names}

        return self.newest(read, waiter)

    def count(self, number: int) -> int | None:
        """Packs in a shard, from its header; None where it is not there."""
        if number not in self._counts:
            try:
                self._counts[number] = self._header(number).num_packs
            except ShardNotFoundError:
                return None
        return self._counts[number]

    def open(self, number: int, columns: Sequence[str] = ()) -> OpenPacks:
        """Open a shard and hold it against what the producer promised."""
        shard = Shard(self.shard_prefix(number), columns=columns)
        header = shard.header
        if self._limits is not None:
            limits, pad_id = self._limits
            most, multiple = limits.max_sequences_per_pack, limits.sequence_multiple
            for found, promised, kept in (
                (f"packs of up to {header.capacity} tokens", limits.capacity, header.capacity <= limits.capacity),
                (f"{header.most_sequences} sequences in a pack", most, header.most_sequences <= most),
                (f"padding id {header.pad_id}", pad_id, pad_id in (None, header.pad_id or 0)),
                (f"sequence multiple {header.sequence_multiple}", multiple, header.sequence_multiple % multiple == 0),
            ):
                if not kept:
                    raise FormatError(
                        f"{shard.prefix}: {found}, the catalog's producer promised {promised}; somebody else wrote this"
                        " shard: make the catalog anew"
                    )
        opened, files = [shard.columns.open(name) for name in columns], shard.files
        arrays = files.tokens[:], files.loss[:], *(column.held_items for column in opened)
        for array in arrays:
            _native.will_need(array, np.zeros(1, np.int64), np.array([len(array)]))
        specs = {column.name: column.spec for column in opened}
        return OpenPacks(header.num_packs, header.num_tokens, specs, (shard.index, arrays), None, shard.broken_pack)

    # ---- waiting for its producer ----

    def look(self, waiter: Waiter) -> ProducerState | None:
        """What the producer says now; a beat that is another than at the last look is noted as a sign of life."""
        state, first = self.producer(), self._seen_alive is None
        if state is not None and (self._state is None or state.beat != self._state.beat):
            self._beat_since, self._seen_alive = waiter.clock(), not first
        self._state, self._seen_alive = state, bool(self._seen_alive)
        return state

    def wait(self, number: int, waiter: Waiter, uncommitted: Callable[[], int] = lambda: 0) -> bool:
        """See ``LiveShards``.

        Raises:
            SFTIndexError: the producer failed, died, or was never there; the shard was removed; ``max_wait`` is over;
                or the producer waits for this consumer's checkpoint while this consumer waits for its shard.
            FormatError: a document of the catalog is damaged.
            Stopped: the waiter is to stop.
        """
        if self.is_published(number):
            return True
        begin = waiter.clock()
        missing, stuck = Still(waiter.clock), Still(waiter.clock)
        for waited in waiter.looks(lambda: f"shard {number}; {self._describe(waiter)}"):
            state, end = self.look(waiter), self.end()
            # Looked at again: it may have been published before what was just read was written.
            if self.is_published(number):
                return True
            if end is not None and number >= end:
                return False
            why = None
            # Nobody looked before the wait began: silence is counted from then on.
            silent = waiter.clock() - max(begin, self._beat_since or begin)
            if end is not None or (state is not None and number < state.published):
                why = self._why_gone(number, end, missing.seconds("missing"))
            elif state is not None and state.state == "failed":
                why = (
                    f"the producer failed: {state.reason or 'no reason given'}; mend that, start the same command"
                    " again, and go on from the last checkpoint"
                )
            elif silent >= self.producer_timeout:
                why = self._why_dead(silent)
            elif state is not None:
                # The producer waits for us, and we wait for it; not an error at once, a commit may be under way.
                count = uncommitted() if state.state == "waiting for consumers" else 0
                seconds = stuck.seconds((state.published, count))
                if count and seconds >= self.producer_timeout:
                    why = _why_stuck(state.limits, count, seconds)
            if why is None and self.max_wait is not None and waited >= self.max_wait:
                why = (
                    f"not there after {waited:.0f} s, the longest wait allowed ({self.max_wait:g} s);"
                    f" {self._describe(waiter)}; raise it, or let the producer make shards faster (--workers)"
                )
            if why is not None:
                raise SFTIndexError(f"{self.folder}: {waiter.who} waits for {shard_name(number)}: {why}")
        raise AssertionError("looks never end by themselves")

    def _describe(self, waiter: Waiter) -> str:
        """The producer as it was at the last look, in a few words."""
        state = self._state
        if state is None:
            return "no producer has been here yet"
        doing = "" if state.state == "running" else f", {state.state}"
        silent = waiter.clock() - (self._beat_since or 0.0)
        alive = f"producer alive {silent:.0f} s ago" if self._seen_alive else "producer not seen alive yet"
        return f"{alive}{doing}, {state.published} published"

    def _why_gone(self, number: int, end: int | None, missing_seconds: float) -> str | None:
        """Why a shard that was published was removed; None where it may be not yet seen from here, and only that."""
        state = self._state
        if state is not None and number < state.freed:
            return (
                f"shards below {state.freed} were removed, because every consumer had completed them (--keep-recent)."
                " Go on from the newest checkpoint; for more passes over the data, produce without --keep-recent"
            )
        self.numbers()  # listing a folder makes a network file system look again
        # Which may show a document before it shows a shard that was published before it.
        if missing_seconds < 5.0 or self.is_published(number):
            return None
        published = end if end is not None else state.published if state is not None else 0
        return (
            f"{published} have been published and this one is not there any more: it was removed after every consumer"
            " had completed it, or by somebody else. Go on from the newest checkpoint, or make the catalog anew"
        )

    def _why_dead(self, silent: float) -> str:
        if (state := self._state) is None:
            return (
                f"no producer has been here for {silent:.0f} s; start one: megatron-sft-idx produce"
                f" --catalog {self.folder} ..., or check that this is its folder and that it is shared"
            )
        if state.state == "stopped":
            why = state.reason or "no reason given"
            said = f"was stopped ({why}) and has not been started again for {silent:.0f} s"
        else:
            said = f"is dead: no sign of life for {silent:.0f} s (producer timeout {self.producer_timeout:g} s)"
        there = f"{state.published} published"
        return f"the producer {said}, {there}; start the same command again, it goes on where it was"


def _why_stuck(limits: Limits, uncommitted: int, seconds: float) -> str:
    shards, nbytes = limits.max_ahead_shards, limits.max_ahead_nbytes
    said = [f"{shards} shards"] * (shards is not None) + [f"{(nbytes or 0) / 1e9:g} GB"] * (nbytes is not None)
    return (
        f"the producer waits for consumers to complete shards (it may be {' and '.join(said)} ahead), and this one has"
        f" read {uncommitted} that no checkpoint includes, for {seconds:.0f} s: neither can go on; save checkpoints"
        " more often, or raise --max-ahead-shards or --max-ahead-gb"
    )
