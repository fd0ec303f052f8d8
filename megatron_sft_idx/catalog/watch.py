"""Waiting for a shard, and saying for whom, for how long and why; every wait that can have no end has an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from megatron_sft_idx.catalog.folder import Catalog, shard_name
from megatron_sft_idx.catalog.patience import Patience
from megatron_sft_idx.catalog.producer_state import ProducerState
from megatron_sft_idx.errors import SFTIndexError

__all__ = ["CatalogWatch", "Outcome"]

Outcome = Literal["published", "ended"]

# A network file system may show a document before it shows a shard that was published before it.
_SECONDS_UNTIL_MISSING = 5.0


class CatalogWatch:
    """Waits for shards of one catalog, and remembers when its producer was last seen alive.

    No clock but this process's own monotonic one is looked at: the producer is alive while the beat in
    ``_producer.json`` changes, whatever the time of day is on any machine, or on the files.

    Args:
        catalog: to be watched.
        clock: seconds since some moment.
    """

    def __init__(self, catalog: Catalog, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.catalog = catalog
        self._clock = clock
        self._state: ProducerState | None = None
        self._changed_at = clock()
        self._looked = self._seen_alive = False

    def look(self) -> ProducerState | None:
        """What the producer says now; a beat that is another than at the last look is noted as a sign of life."""
        state = self.catalog.producer()
        if state is not None and (self._state is None or state.beat != self._state.beat):
            self._changed_at = self._clock()
            # The first look shows no more than that somebody was here once.
            self._seen_alive = self._looked
        self._state, self._looked = state, True
        return state

    def seconds_silent(self) -> float:
        """Since the producer's beat was last seen to change, or was first looked at."""
        return self._clock() - self._changed_at

    def describe(self) -> str:
        """The producer as it was at the last look, in a few words."""
        state, silent = self._state, self.seconds_silent()
        if state is None:
            return "no producer has been here yet"
        doing = "" if state.state == "running" else f", {state.state}"
        alive = f"producer alive {silent:.0f} s ago" if self._seen_alive else "producer not seen alive yet"
        return f"{alive}{doing}, {state.published} published"

    def wait(
        self,
        number: int,
        *,
        who: str,
        max_wait: float | None = None,
        producer_timeout: float = 120.0,
        uncommitted: Callable[[], int] = lambda: 0,
        pause: Callable[[float], object] = time.sleep,
        log: Callable[[str], None] = lambda line: None,
    ) -> Outcome:
        """Return when shard ``number`` is published, or when it is known that there will be none.

        Args:
            number: of the shard.
            who: waits, as lines and errors name it: ``rank 3``.
            max_wait: seconds after which to give up; keep it below the timeout of collectives.
            producer_timeout: seconds without a beat after which the producer is dead.
            uncommitted: asked again and again: how many shards this consumer has read that no committed checkpoint
                includes.
            pause: sleeps so many seconds; may raise to end the wait.
            log: takes one line at once and one a minute.

        Raises:
            SFTIndexError: the producer failed, died, or was never there; the shard was removed; ``max_wait`` is over;
                or the producer waits for this consumer's checkpoint while this consumer waits for its shard.
            FormatError: a document of the catalog is damaged.
        """
        if self.catalog.is_published(number):
            return "published"
        wait = _Wait(self, number, who, self._clock(), producer_timeout, uncommitted)
        patience = Patience(pause, self._clock)
        while True:
            state = self.look()
            end = self.catalog.end()
            # Looked at again: it may have been published before what was just read was written.
            if self.catalog.is_published(number):
                return "published"
            if end is not None and number >= end:
                return "ended"
            wait.check(state, end)
            waited = patience.waited
            if max_wait is not None and waited >= max_wait:
                raise SFTIndexError(
                    f"{wait.what()}: not there after {waited:.0f} s, the longest wait allowed ({max_wait:g} s);"
                    f" {self.describe()}; raise it, or let the producer make shards faster (--workers)"
                )
            if patience.line_is_due():
                log(f"{who} waits {waited:.0f} s for shard {number}; {self.describe()}")
            patience.pause()


class _Wait:
    """One wait, and the reasons why it can have no end."""

    def __init__(
        self,
        watch: CatalogWatch,
        number: int,
        who: str,
        begin: float,
        timeout: float,
        uncommitted: Callable[[], int],
    ) -> None:
        self._watch, self._number, self._who, self._timeout = watch, number, who, timeout
        self._begin = begin
        self._uncommitted = uncommitted
        self._missing_since: float | None = None
        # Since when, and how many shards there were and were not committed then.
        self._stuck: tuple[float, int, int] | None = None

    def what(self) -> str:
        return f"{self._watch.catalog.folder}: {self._who} waits for {shard_name(self._number)}"

    def check(self, state: ProducerState | None, end: int | None) -> None:
        """Raise where waiting on is of no use."""
        now = self._watch._clock()
        if end is not None or (state is not None and self._number < state.published):
            self._check_missing(state, end, now)
            return
        if state is not None and state.state == "failed":
            raise SFTIndexError(
                f"{self.what()}: the producer failed: {state.reason or 'no reason given'}; mend that, start the same"
                " command again, and go on from the last checkpoint"
            )
        # Nobody looked before the wait began: silence is counted from then on.
        silent = min(now - self._begin, self._watch.seconds_silent())
        if silent >= self._timeout:
            raise self._dead(state, silent)
        self._check_stuck(state, now)

    def _check_missing(self, state: ProducerState | None, end: int | None, now: float) -> None:
        """A shard that was published and is not there: removed, or not yet seen from here."""
        catalog = self._watch.catalog
        if self._missing_since is None:
            self._missing_since = now
        if state is None or self._number >= state.freed:
            catalog.numbers()  # listing a folder makes a network file system look again
            if now - self._missing_since < _SECONDS_UNTIL_MISSING or catalog.is_published(self._number):
                return
        raise self._missing(state, end)

    def _missing(self, state: ProducerState | None, end: int | None) -> SFTIndexError:
        published = end if end is not None else state.published if state is not None else 0
        if state is not None and self._number < state.freed:
            why = (
                f"shards below {state.freed} were removed, because every consumer had completed them (--keep-recent)."
                " Go on from the newest checkpoint; for more passes over the data, produce without --keep-recent"
            )
        else:
            why = (
                f"{published} have been published and this one is not there any more: it was removed after every"
                " consumer had completed it, or by somebody else. Go on from the newest checkpoint, or make the"
                " catalog anew"
            )
        return SFTIndexError(f"{self.what()}: {why}")

    def _dead(self, state: ProducerState | None, silent: float) -> SFTIndexError:
        if state is None:
            return SFTIndexError(
                f"{self.what()}: no producer has been here for {silent:.0f} s; start one: megatron-sft-idx produce"
                f" --catalog {self._watch.catalog.folder} ..., or check that this is its folder and that it is shared"
            )
        if state.state == "stopped":
            return SFTIndexError(
                f"{self.what()}: the producer was stopped ({state.reason or 'no reason given'}) and has not been"
                f" started again for {silent:.0f} s, {state.published} published; start the same command again"
            )
        return SFTIndexError(
            f"{self.what()}: the producer is dead: no sign of life for {silent:.0f} s (producer timeout"
            f" {self._timeout:g} s), {state.published} published; start the same command again, it goes on where it was"
        )

    def _check_stuck(self, state: ProducerState | None, now: float) -> None:
        """The producer waits for us, and we wait for it; not at once, a commit may be under way."""
        uncommitted = self._uncommitted() if state is not None and state.state == "waiting for consumers" else 0
        if state is None or not uncommitted:
            self._stuck = None
            return
        if self._stuck is None or self._stuck[1:] != (state.published, uncommitted):
            self._stuck = now, state.published, uncommitted
        since = self._stuck[0]
        if now - since >= self._timeout:
            limits = state.limits
            raise SFTIndexError(
                f"{self.what()}: the producer waits for consumers to complete shards (it may be"
                f" {_ahead(limits.max_ahead_shards, limits.max_ahead_nbytes)} ahead), and this one has read"
                f" {uncommitted} that no checkpoint includes, for {now - since:.0f} s: neither can go"
                " on; save checkpoints more often, or raise --max-ahead-shards or --max-ahead-gb"
            )


def _ahead(shards: int | None, nbytes: int | None) -> str:
    limits = [f"{shards} shards"] * (shards is not None) + [f"{(nbytes or 0) / 1e9:g} GB"] * (nbytes is not None)
    return " and ".join(limits) or "any number of shards"
