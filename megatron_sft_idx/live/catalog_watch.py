"""Waiting for what is still to come, and saying for whom, for how long and why.

Every wait that can have no end has an error. No clock but this process's own monotonic one is looked at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.live.catalog import Catalog, Limits, ProducerState, shard_name

__all__ = ["CatalogWatch", "Stopped", "Waiter", "looks"]

_FIRST_PAUSE = 0.05
_SECONDS_BETWEEN_LINES = 60.0
# A network file system may show a document before it shows a shard that was published before it.
_SECONDS_UNTIL_MISSING = 5.0

logger = logging.getLogger("megatron_sft_idx.live")


class Stopped(Exception):  # noqa: N818
    """A wait was given up because the consumer closes; nobody but the consumer's own thread sees it."""


def looks(
    say: Callable[[float], object],
    *,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    quiet: float = 0.0,
    longest: float = 1.0,
) -> Iterator[float]:
    """The seconds waited, each time it is time to look again: how every wait goes.

    Args:
        say: told of the wait once it has lasted ``quiet`` seconds, then once a minute.
        pause: sleeps so many seconds, longer each time; what it returns is true as soon as nobody is to wait any more.
        clock: seconds since some moment.
        quiet: seconds that are the normal course of things and nothing to tell.
        longest: of the pauses.

    Raises:
        Stopped: nobody is to wait any more.
    """
    begin, seconds, next_line = clock(), _FIRST_PAUSE, quiet
    while True:
        waited = clock() - begin
        yield waited
        if waited >= next_line:
            say(waited)
            next_line = waited + _SECONDS_BETWEEN_LINES
        if pause(seconds):
            raise Stopped
        seconds = min(2 * seconds, longest)


@dataclass(frozen=True)
class Waiter:
    """Who waits.

    Attributes:
        who: such as ``rank 3``, for the log.
        pause: sleeps so many seconds; what it returns is true as soon as the waiter is to stop, as an event's ``wait``.
        say: takes lines for people; those of several workers of one rank leave that to another.
        clock: seconds since some moment.
    """

    who: str
    pause: Callable[[float], object] = time.sleep
    say: Callable[[str], object] = logger.info
    clock: Callable[[], float] = time.monotonic

    def looks(self, why: Callable[[], str]) -> Iterator[float]:
        """As the function; a line at once and then once a minute says ``why``, that is what is waited for."""
        return looks(
            lambda waited: self.say(f"{self.who} waits {waited:.0f} s for {why()}"), pause=self.pause, clock=self.clock
        )


class CatalogWatch:
    """Waits for shards of one catalog, and remembers when its producer was last seen alive.

    The producer is alive while the beat in ``_producer.json`` changes, whatever the time of day is on any machine, or
    on the files.

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
        waiter: Waiter,
        *,
        max_wait: float | None = None,
        producer_timeout: float = 120.0,
        uncommitted: Callable[[], int] = lambda: 0,
    ) -> bool:
        """Wait until shard ``number`` is published: True; or until it is known that there will be none: False.

        Args:
            number: of the shard.
            waiter: who waits.
            max_wait: seconds after which to give up; keep it below the timeout of collectives.
            producer_timeout: seconds without a beat after which the producer is dead.
            uncommitted: asked again and again: how many shards this consumer has read that no committed checkpoint
                includes.

        Raises:
            SFTIndexError: the producer failed, died, or was never there; the shard was removed; ``max_wait`` is over;
                or the producer waits for this consumer's checkpoint while this consumer waits for its shard.
            FormatError: a document of the catalog is damaged.
            Stopped: the waiter is to stop.
        """
        if self.catalog.is_published(number):
            return True
        what = f"{self.catalog.folder}: {waiter.who} waits for {shard_name(number)}"
        begin = missing_since = stuck_since = self._clock()
        missing, stuck = False, (0, 0)
        for waited in waiter.looks(lambda: f"shard {number}; {self.describe()}"):
            state, end = self.look(), self.catalog.end()
            # Looked at again: it may have been published before what was just read was written.
            if self.catalog.is_published(number):
                return True
            if end is not None and number >= end:
                return False
            now = self._clock()
            # Nobody looked before the wait began: silence is counted from then on.
            silent = min(now - begin, self.seconds_silent())
            if end is not None or (state is not None and number < state.published):
                missing, missing_since = True, missing_since if missing else now
                if self._is_gone(number, state, now - missing_since):
                    raise SFTIndexError(f"{what}: {_why_gone(number, state, end)}")
            elif state is not None and state.state == "failed":
                raise SFTIndexError(
                    f"{what}: the producer failed: {state.reason or 'no reason given'}; mend that, start the same"
                    " command again, and go on from the last checkpoint"
                )
            elif silent >= producer_timeout:
                raise SFTIndexError(f"{what}: {self._why_dead(silent, producer_timeout)}")
            else:
                # The producer waits for us, and we wait for it; not an error at once, a commit may be under way.
                count = uncommitted() if state is not None and state.state == "waiting for consumers" else 0
                published = state.published if state is not None else 0
                if not count or stuck != (published, count):
                    stuck, stuck_since = (published, count), now
                if state is not None and count and now - stuck_since >= producer_timeout:
                    raise SFTIndexError(f"{what}: {_why_stuck(state.limits, count, now - stuck_since)}")
            if max_wait is not None and waited >= max_wait:
                raise SFTIndexError(
                    f"{what}: not there after {waited:.0f} s, the longest wait allowed ({max_wait:g} s);"
                    f" {self.describe()}; raise it, or let the producer make shards faster (--workers)"
                )
        raise AssertionError("looks never end by themselves")

    def _is_gone(self, number: int, state: ProducerState | None, missing_seconds: float) -> bool:
        """Whether a shard that was published was removed, and not only not yet seen from here."""
        if state is not None and number < state.freed:
            return True
        self.catalog.numbers()  # listing a folder makes a network file system look again
        return missing_seconds >= _SECONDS_UNTIL_MISSING and not self.catalog.is_published(number)

    def _why_dead(self, silent: float, timeout: float) -> str:
        if (state := self._state) is None:
            return (
                f"no producer has been here for {silent:.0f} s; start one: megatron-sft-idx produce"
                f" --catalog {self.catalog.folder} ..., or check that this is its folder and that it is shared"
            )
        if state.state == "stopped":
            return (
                f"the producer was stopped ({state.reason or 'no reason given'}) and has not been started again for"
                f" {silent:.0f} s, {state.published} published; start the same command again"
            )
        return (
            f"the producer is dead: no sign of life for {silent:.0f} s (producer timeout {timeout:g} s),"
            f" {state.published} published; start the same command again, it goes on where it was"
        )


def _why_gone(number: int, state: ProducerState | None, end: int | None) -> str:
    if state is not None and number < state.freed:
        return (
            f"shards below {state.freed} were removed, because every consumer had completed them (--keep-recent)."
            " Go on from the newest checkpoint; for more passes over the data, produce without --keep-recent"
        )
    published = end if end is not None else state.published if state is not None else 0
    return (
        f"{published} have been published and this one is not there any more: it was removed after every consumer had"
        " completed it, or by somebody else. Go on from the newest checkpoint, or make the catalog anew"
    )


def _why_stuck(limits: Limits, uncommitted: int, seconds: float) -> str:
    shards, nbytes = limits.max_ahead_shards, limits.max_ahead_nbytes
    limits_said = [f"{shards} shards"] * (shards is not None) + [f"{(nbytes or 0) / 1e9:g} GB"] * (nbytes is not None)
    ahead = " and ".join(limits_said) or "any number of shards"
    return (
        f"the producer waits for consumers to complete shards (it may be {ahead} ahead), and this one has read"
        f" {uncommitted} that no checkpoint includes, for {seconds:.0f} s: neither can go on; save checkpoints more"
        " often, or raise --max-ahead-shards or --max-ahead-gb"
    )
