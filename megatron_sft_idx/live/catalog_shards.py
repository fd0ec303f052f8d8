"""The shards of a catalog, and waiting for its producer: whether it is alive, and why a shard does not come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SFTIndexError, ShardNotFoundError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.live.catalog import Catalog, Limits, ProducerState, Stopped, Unchanged, Waiter, shard_name
from megatron_sft_idx.live.live_shards import LiveShards, OpenPacks, ShardSpecs
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.opening import read_header

_Read = TypeVar("_Read")


class CatalogShards(Catalog, LiveShards):
    """The shards of a catalog, which ``megatron-sft-idx produce`` fills.

    Its producer counts as alive while the beat in ``_producer.json`` changes. Clocks of machines and times of files are
    not looked at.

    Args:
        folder: need not be there yet.
        max_wait: seconds after which a wait is given up; keep it below the timeout of the collectives, so that the
            error that says why comes first. None for never.
        producer_timeout: seconds without a sign of life after which the producer counts as dead.
    """

    def __init__(self, folder: str, *, max_wait: float | None = 540.0, producer_timeout: float = 120.0) -> None:
        super().__init__(folder)
        self.max_wait, self.producer_timeout = max_wait, producer_timeout
        self._limits: tuple[Limits, int | None] | None = None
        self._counts: dict[int, int] = {}
        # What _producer.json said at the last look, and since when its beat has been the same.
        self._state: ProducerState | None = None
        self._beat_since: float | None = None
        # Whether the beat was seen to change; None before the first look.
        self._seen_alive: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counts": {}}

    # ---- what is there ----

    def limits(self, waiter: Waiter) -> tuple[Limits, int | None]:
        """What the producer promises; of a finished catalog that has no ``_producer.json``, what its shards have."""
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
        """By the options of the producer: a shard has so many tokens at least, which fill so many packs."""
        producer = self.producer()
        if producer is None:
            return 1
        packing, sharding = (producer.options.get(name) for name in ("packing", "sharding"))
        # Tokens are counted before they are truncated.
        if not isinstance(packing, dict) or not isinstance(sharding, dict) or packing.get("overlong") == "truncate":
            return 1
        tokens = sharding.get("tokens_per_shard")
        return max(1, -(-tokens // producer.limits.capacity)) if isinstance(tokens, int) else 1

    def may_not_come(self, uncompleted: Sequence[int]) -> bool:
        """By the producer's ``--max-ahead-shards`` and ``--max-ahead-gb``, while the end is not known.

        Once the end is written, no shard is held back any more, and the answer is False. So a job that goes on from a
        checkpoint may save, and deal anew, at other steps than one that was at the same place before the end was there.
        For the limit of bytes, every shard counts as many as the largest in ``uncompleted`` that is there now.
        """
        if self._limits is None or self.end() is not None:
            return False
        shards, nbytes = self._limits[0].max_ahead_shards, self._limits[0].max_ahead_nbytes
        if shards is not None and len(uncompleted) >= shards:
            return True
        largest = 0 if nbytes is None else max(map(self.shard_nbytes, uncompleted), default=0)
        return nbytes is not None and (len(uncompleted) + 1) * largest > nbytes

    def _header(self, number: int) -> Header:
        return read_header(self.shard_prefix(number))

    def newest(self, read: Callable[[int], _Read], waiter: Waiter | None = None) -> _Read | None:
        """What ``read`` makes of the number of the newest shard that is there.

        With a waiter, waits until there is one. None where there is none; with a waiter, where none will come any more.
        """
        while True:
            for number in reversed(self.numbers()):
                try:
                    return read(number)
                except ShardNotFoundError:
                    # A shard may be freed after it was listed, and a listing may be old.
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

    def specs_of(self, names: Sequence[str], waiter: Waiter) -> ShardSpecs | None:
        """The columns as the newest shard has them; see ``LiveShards``."""

        def read(number: int) -> ShardSpecs:
            columns = Shard(self.shard_prefix(number), columns=names).columns
            return ShardSpecs(number, {name: columns[name].spec for name in names})

        return self.newest(read, waiter)

    def count(self, number: int) -> int | None:
        """How many packs a shard has, by its header; None where it is not there."""
        if number not in self._counts:
            try:
                self._counts[number] = self._header(number).num_packs
            except ShardNotFoundError:
                return None
        return self._counts[number]

    def open(self, number: int, columns: Sequence[str] = ()) -> OpenPacks:
        """Open a shard, and ask the kernel for its pages. FormatError where it breaks what the producer promised."""
        shard = Shard(self.shard_prefix(number), columns=columns)
        header = shard.header
        if self._limits is not None:
            limits, pad_id = self._limits
            sequences, multiple = limits.max_sequences_per_pack, limits.sequence_multiple
            for actual, promised, is_kept in (
                (f"packs of up to {header.capacity} tokens", limits.capacity, header.capacity <= limits.capacity),
                (f"{header.most_sequences} sequences in a pack", sequences, header.most_sequences <= sequences),
                (f"padding id {header.pad_id}", pad_id, pad_id in (None, header.pad_id or 0)),
                (f"sequence multiple {header.sequence_multiple}", multiple, header.sequence_multiple % multiple == 0),
            ):
                if not is_kept:
                    raise FormatError(
                        f"{shard.prefix}: {actual}, the catalog's producer promised {promised}; somebody else wrote"
                        " this shard: make the catalog anew"
                    )
        opened, files = [shard.columns.open(name) for name in columns], shard.files
        arrays = files.tokens[:], files.loss[:], *(column.items_in_memory for column in opened)
        for array in arrays:
            _native.will_need(array, np.zeros(1, np.int64), np.array([len(array)]))
        specs = {column.name: column.spec for column in opened}
        return OpenPacks(header.num_packs, header.num_tokens, specs, (shard.index, arrays), None, shard.pack_error)

    # ---- waiting for its producer ----

    def look(self, waiter: Waiter) -> ProducerState | None:
        """What ``_producer.json`` says now. A beat that has changed since the last look is noted as a sign of life."""
        state, is_first_look = self.producer(), self._seen_alive is None
        if state is not None and (self._state is None or state.beat != self._state.beat):
            self._beat_since, self._seen_alive = waiter.clock(), not is_first_look
        self._state, self._seen_alive = state, bool(self._seen_alive)
        return state

    def wait(self, number: int, waiter: Waiter, uncommitted: Callable[[], int] = lambda: 0) -> bool:
        """Wait for a shard, as ``LiveShards`` has it.

        Raises:
            SFTIndexError: the producer failed, died, or was never there; the shard was removed; ``max_wait`` is over;
                or the producer waits for this consumer's checkpoint while this consumer waits for its shard.
            FormatError: a document of the catalog is damaged.
            Stopped: the waiter was told to stop.
        """
        if self.is_published(number):
            return True
        begin = waiter.clock()
        missing, stuck = Unchanged(waiter.clock), Unchanged(waiter.clock)
        for waited in waiter.looks(lambda: f"shard {number}; {self._describe(waiter)}"):
            state, end = self.look(waiter), self.end()
            # Look again: it may have been published just before what was read here was written.
            if self.is_published(number):
                return True
            if end is not None and number >= end:
                return False
            why = None
            # Nobody looked before the wait began, so silence counts from then on.
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
                # Producer and consumer wait for each other. No error at once: a commit may be under way.
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
        """The producer at the last look, in a few words for messages."""
        state = self._state
        if state is None:
            return "no producer has been here yet"
        doing = "" if state.state == "running" else f", {state.state}"
        silent = waiter.clock() - (self._beat_since or 0.0)
        alive = f"producer alive {silent:.0f} s ago" if self._seen_alive else "producer not seen alive yet"
        return f"{alive}{doing}, {state.published} published"

    def _why_gone(self, number: int, end: int | None, missing_seconds: float) -> str | None:
        """Why a shard that was published is not there; None while it may just not be visible from here yet."""
        state = self._state
        if state is not None and number < state.freed:
            return (
                f"shards below {state.freed} were removed, because every consumer had completed them (--keep-recent)."
                " Go on from the newest checkpoint; for more passes over the data, produce without --keep-recent"
            )
        self.numbers()  # listing a folder makes a network file system look again
        # Such a file system may show a document sooner than a shard that was published before that.
        if missing_seconds < 5.0 or self.is_published(number):
            return None
        published = end if end is not None else state.published if state is not None else 0
        return (
            f"{published} have been published and this one is not there any more: it was removed after every consumer"
            " had completed it, or by somebody else. Go on from the newest checkpoint, or make the catalog anew"
        )

    def _why_dead(self, silent: float) -> str:
        """Why nothing is heard of the producer, and what to do about it."""
        if (state := self._state) is None:
            return (
                f"no producer has been here for {silent:.0f} s; start one: megatron-sft-idx produce"
                f" --catalog {self.folder} ..., or check that this is its folder and that it is shared"
            )
        if state.state == "stopped":
            why = state.reason or "no reason given"
            end = f"was stopped ({why}) and has not been started again for {silent:.0f} s"
        else:
            end = f"is dead: no sign of life for {silent:.0f} s (producer timeout {self.producer_timeout:g} s)"
        return f"the producer {end}, {state.published} published; start the same command again, it goes on where it was"


def _why_stuck(limits: Limits, uncommitted: int, seconds: float) -> str:
    shards, nbytes = limits.max_ahead_shards, limits.max_ahead_nbytes
    ahead = [f"{shards} shards"] * (shards is not None) + [f"{(nbytes or 0) / 1e9:g} GB"] * (nbytes is not None)
    return (
        f"the producer waits for consumers to complete shards (it may be {' and '.join(ahead)} ahead), and this one has"
        f" read {uncommitted} that no checkpoint includes, for {seconds:.0f} s: neither can go on; save checkpoints"
        " more often, or raise --max-ahead-shards or --max-ahead-gb; of several epochs, only the last completes shards"
    )
