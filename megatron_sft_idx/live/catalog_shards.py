"""The shards of a catalog, and waiting for its producer: whether it is alive, and why a shard is late."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SFTIndexError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.live.catalog import Catalog, Limits, ProducerState, shard_name
from megatron_sft_idx.live.live_shards import LiveShards, OpenPacks, PacksInMemory, ShardSpecs
from megatron_sft_idx.live.waiting import Stopped, Unchanged, Waiter, looks, patiently
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.judged import require_shard_judged
from megatron_sft_idx.shard.opening import read_header
from megatron_sft_idx.training import CARRIED_BY, require_text

_Read = TypeVar("_Read")
# How much later than another file a network file system may make one visible.
_LAG_SECONDS = 5.0
# A longer time between two checks was spent in a hanging file system, which may affect the producer as well.
_LONGEST_GAP = 10.0


class CatalogShards(Catalog, LiveShards):
    """The shards of a catalog, which ``megatron-sft-idx produce`` fills.

    Its producer counts as alive while the beat in ``_producer.json`` changes. Clocks of other machines and times of
    files are not used.

    Args:
        folder: need not exist yet.
        max_wait: maximum number of seconds for a wait. Keep it below the timeout of the collectives, so that the error
            with the reason comes first. None for no limit.
        producer_timeout: number of seconds without a sign of life after which the producer counts as dead.
    """

    def __init__(self, folder: str, *, max_wait: float | None = 540.0, producer_timeout: float = 120.0) -> None:
        super().__init__(folder)
        self.max_wait, self.producer_timeout = max_wait, producer_timeout
        self._limits: tuple[Limits, int | None] | None = None
        self._counts: dict[int, int] = {}

    # ---- existing shards ----

    def limits(self, waiter: Waiter) -> tuple[Limits, int | None]:
        """Return the limits of the producer, and the padding id of the newest shard."""
        if self._limits is None:
            header = self.newest(self.header, waiter)
            producer = self.producer()
            # A network file system may show a shard earlier than a document that was written before it.
            for waited in looks(lambda waited: None, pause=waiter.pause, clock=waiter.clock):
                if producer is not None or waited >= _LAG_SECONDS:
                    break
                producer = self.producer()
            if producer is None:
                raise SFTIndexError(
                    f"{self.folder}: the folder has shards but no _producer.json, which gives the maximum number of"
                    " sequences per pack; use megatron-sft-idx produce to fill it, or train on it like on any folder"
                    " of shards"
                )
            self._limits = producer.limits, None if header is None else header.pad_id
        return self._limits

    def least_packs(self) -> int:
        """Return the minimum from the producer's options: a shard has a minimum number of tokens, which fill packs."""
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
        """Return whether ``--max-ahead-shards`` or ``--max-ahead-gb`` may delay a shard, while the end is not known.

        Once the end is written, no shard is held back any more, and the answer is False. So a job that resumes from a
        checkpoint may save and redistribute at other steps than a job that was at the same place before the end was
        known. For the limit in bytes, every shard counts as the largest one in ``uncompleted`` that exists now.
        """
        if self._limits is None or self.end() is not None:
            return False
        shards, nbytes = self._limits[0].max_ahead_shards, self._limits[0].max_ahead_nbytes
        if shards is not None and len(uncompleted) >= shards:
            return True
        largest = 0 if nbytes is None else max(map(self.shard_nbytes, uncompleted), default=0)
        return nbytes is not None and (len(uncompleted) + 1) * largest > nbytes

    def header(self, number: int) -> Header:
        """Return the header of a shard. ShardNotFoundError: it does not exist."""
        return self._read(number, read_header)

    def _read(self, number: int, read: Callable[[str], _Read]) -> _Read:
        """Return the result of ``read`` for the prefix of a shard, called through ``patiently``."""
        prefix = self.shard_prefix(number)

        def look() -> _Read:
            # Readers report any error here as a missing file.
            for path in ShardPaths.of(prefix).all:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.stat(path)
            return read(prefix)

        return patiently(prefix, look)

    def newest(self, read: Callable[[int], _Read], waiter: Waiter | None = None) -> _Read | None:
        """Return the result of ``read`` for the number of the newest existing shard.

        With a waiter, wait until there is one. Return None if there is none, or with a waiter, if none will come.
        """
        while True:
            for number in reversed(self.numbers()):
                try:
                    return read(number)
                except ShardNotFoundError:
                    # A shard may be removed after it was listed, and a listing may be outdated.
                    if self.is_published(number):
                        raise
            producer = self.producer()
            if waiter is None or not self.wait(0 if producer is None else producer.published, waiter):
                return None
            if waiter.pause(0.05):
                raise Stopped

    def specs_of(self, names: Sequence[str], waiter: Waiter) -> ShardSpecs | None:
        """Return the columns of the newest shard. See ``LiveShards``."""

        def read(number: int) -> ShardSpecs:
            columns = self._read(number, lambda prefix: Shard(prefix, columns=names).columns)
            return ShardSpecs(number, {name: columns[name].spec for name in names})

        return self.newest(read, waiter)

    def count(self, number: int) -> int | None:
        """Return the number of packs in a shard from its header; None if it does not exist."""
        if number not in self._counts:
            try:
                self._counts[number] = self.header(number).num_packs
            except ShardNotFoundError:
                return None
        return self._counts[number]

    def open(self, number: int, columns: Sequence[str] = (), *, allow_media: bool = False) -> OpenPacks:
        """Open a shard, and ask the kernel to read its pages.

        Raises:
            FormatError: it exceeds the producer's limits, marks bad answers by a column that is not requested, or has
                images or audio without ``allow_media``.
        """
        shard = self._read(number, lambda prefix: Shard(prefix, columns=columns))
        header = shard.header
        require_shard_judged(shard.prefix, header, columns)
        require_text(shard.prefix, header.has_media, allow_media, CARRIED_BY)
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
                        f"{shard.prefix}: {actual}, but the limit of the catalog's producer is {promised}; another"
                        " program wrote this shard: create the catalog again"
                    )
        opened, files = [shard.columns.open(name) for name in columns], shard.files
        arrays = files.tokens[:], files.loss[:], *(column.items_in_memory for column in opened)
        for array in arrays:
            _native.will_need(array, np.zeros(1, np.int64), np.array([len(array)]))
        specs = {column.name: column.spec for column in opened}
        found = PacksInMemory(shard.index, arrays, shard.items)
        return OpenPacks(header.num_packs, header.num_tokens, specs, found, None, files.pack_error)

    # ---- waiting for its producer ----

    def wait(self, number: int, waiter: Waiter, unacknowledged: Callable[[], int] = lambda: 0) -> bool:
        """Wait for a shard. See ``LiveShards``.

        Raises:
            SFTIndexError: the producer failed, died, or never existed; the shard was removed; ``max_wait`` is over; or
                the producer waits for this consumer's checkpoint while this consumer waits for its shard.
            FormatError: a document of the catalog is damaged.
            Stopped: the waiter was stopped.
        """
        if self.is_published(number):
            return True
        beat, missing, stuck = (Unchanged(waiter.clock, _LONGEST_GAP) for _ in range(3))
        state: ProducerState | None = None
        silent = 0.0

        def what() -> str:
            return f"shard {number}; {_described(state, silent)}"

        for waited in waiter.looks(what):
            state = self.producer() or state
            end = self.end()
            # Silence counts from the first check of this wait, because there was no check before.
            silent = beat.seconds(None if state is None else state.beat)
            # Check again: it may have been published just before the document was written.
            if self.is_published(number):
                return True
            if end is not None and number >= end:
                return False
            if end is not None or (state is not None and number < state.published):
                why = self._why_gone(number, state, missing.seconds("missing"))
            else:
                why = self._why_late(state, silent, stuck, unacknowledged)
            if why is None and self.max_wait is not None and waited >= self.max_wait:
                why = (
                    f"no shard after {waited:.0f} s, the maximum wait ({self.max_wait:g} s);"
                    f" {_described(state, silent)}; raise the limit, or make the producer faster (--workers)"
                )
            if why is not None:
                raise SFTIndexError(f"{self.folder}: {waiter.who} waits for {shard_name(number)}: {why}")
        raise AssertionError("looks never end by themselves")

    def _why_gone(self, number: int, state: ProducerState | None, missing_seconds: float) -> str | None:
        """Return why a published shard is missing; None while it may just not be visible from here yet."""
        remedy = "Resume from the newest checkpoint; for more epochs over the data, produce without --keep-recent"
        if state is not None and number < state.freed:
            return (
                f"shards below {state.freed} were removed, because every consumer had completed them (--keep-recent)."
                f" {remedy}"
            )
        self.numbers()  # listing a folder makes a network file system refresh it
        # Such a file system may show a document earlier than a shard that was published before it.
        if missing_seconds < _LAG_SECONDS or self.is_published(number):
            return None
        return f"it was published, but somebody removed it. {remedy}"

    def _why_late(
        self, state: ProducerState | None, silent: float, stuck: Unchanged, unacknowledged: Callable[[], int]
    ) -> str | None:
        """Return why an unpublished shard will not come; None while it still may.

        ``silent`` is the time in seconds without a sign of life of the producer. ``stuck`` is called at every check.
        """
        again = "run the same command again, which continues where it stopped"
        if state is not None and state.state == "failed":
            return f"the producer failed: {state.reason or 'no reason given'}; fix the cause, and {again}"
        if silent >= self.producer_timeout:
            if state is None:
                return (
                    f"no producer has used this folder for {silent:.0f} s; start one: megatron-sft-idx produce"
                    f" --catalog {self.folder} ..., or check that this is the right folder and that it is shared"
                )
            what = f"was stopped ({state.reason})" if state.state == "stopped" else "is dead"
            limit = f"no sign of life for {silent:.0f} s (producer timeout {self.producer_timeout:g} s)"
            return f"the producer {what}: {limit}, {state.published} published; {again}"
        if state is None:
            return None
        # Producer and consumer wait for each other. Not an error at once, because a commit may be in progress.
        count = unacknowledged() if state.state == "waiting for consumers" else 0
        seconds = stuck.seconds((state.published, count))
        if not count or seconds < self.producer_timeout:
            return None
        return (
            f"deadlock for {seconds:.0f} s: the producer waits for consumers to complete shards (--max-ahead-shards,"
            f" --max-ahead-gb), but no checkpoint of this consumer includes the {count} items before this shard; save"
            " checkpoints more often, or let the producer run further ahead; with several epochs, only the last one"
            " completes shards"
        )


def _described(state: ProducerState | None, silent: float) -> str:
    """Describe the producer for messages; ``silent`` is the time in seconds without a sign of life."""
    if state is None:
        return "no producer has used this folder yet"
    doing = "" if state.state == "running" else f", {state.state}"
    return f"last sign of life of the producer {silent:.0f} s ago{doing}, {state.published} published"
