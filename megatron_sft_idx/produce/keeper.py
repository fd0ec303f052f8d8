"""What a producer keeps in order: its state on disk, and the room that consumers leave it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.live import Catalog, ProducerState, State, ack_folder, completed, looks, read_acks
from megatron_sft_idx.shard import remove_shard
from megatron_sft_idx.shard.publication import remove_remains
from megatron_sft_idx.tokenize import NOT_YET, NotYet

Found = TypeVar("Found")
_SECONDS_BETWEEN_BEATS = 2.0
# Shorter waits are the normal course of things and nothing to tell.
_SECONDS_BEFORE_A_STATE = 0.5
# The state of a producer that has nothing left to do.
ENDED: dict[str, Any] = {"state": "stopped", "reason": "the input has ended"}


class StateKeeper:
    """Keeps ``_producer.json``. A context manager: a thread beats inside, and leaving it by an exception says so.

    Args:
        catalog: held by this producer.
        state: to begin with.

    Attributes:
        state: what is on disk.
    """

    def __init__(self, catalog: Catalog, state: ProducerState) -> None:
        self._catalog, self.state = catalog, state
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def update(self, **changes: Any) -> None:
        """Replace fields of the state; they are on disk when this returns.

        Raises:
            OSError: the disk says no.
        """
        with self._lock:
            self.state = dataclasses.replace(self.state, beat=self.state.beat + 1, **changes)
            self._catalog.write_producer(self.state)

    def __enter__(self) -> StateKeeper:
        self.update(state="running", reason=None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_beating()
        if error is None:
            return
        # A full disk must not hide what went wrong; consumers then notice that the producer is silent.
        with contextlib.suppress(OSError):
            if isinstance(error, Exception):
                self.update(state="failed", reason=str(error) or type(error).__name__)
            else:
                self.update(state="stopped", reason="interrupted")

    def wait_for(
        self,
        found: Callable[[], Found | NotYet],
        state: State,
        log: Callable[[str], None],
        why: Callable[[], str],
        *,
        longest: float = 1.0,
    ) -> Found:
        """What ``found`` gives once it is not ``NOT_YET``.

        Args:
            found: looks.
            state: meanwhile, unless it is so short that there is nothing to tell.
            log: takes a line when the state is set, then one a minute.
            why: what is waited for, for the line.
            longest: seconds between two looks, once it has lasted for a while.
        """

        def say(waited: float) -> None:
            if self.state.state != state:
                self.update(state=state)
            log(f"{state} for {waited:.0f} s: {why()}")

        try:
            for _ in looks(say, quiet=_SECONDS_BEFORE_A_STATE, longest=longest):
                if not isinstance(result := found(), NotYet):
                    return result
        finally:
            if self.state.state == state:
                self.update(state="running")
        raise AssertionError("looks never end by themselves")

    def end(self) -> None:
        """Say that the producer has nothing left to do; nothing is written after this, unless something fails."""
        self._stop_beating()
        self.update(**ENDED)

    def _stop_beating(self) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._over.wait(_SECONDS_BETWEEN_BEATS):
            # A disk that is full now may have room at the next beat; work that needs it meets the error by itself.
            with contextlib.suppress(OSError):
                self.update()


class Room:
    """The shards that are there, as training completes them.

    Args:
        catalog: held by this producer.
        keeper: whose limits hold, and whose state counts a shard before it may be removed: a removed one has no header
            to ask.
        ack_dir: where consumers acknowledge, when that is not in the catalog.
        log: takes lines for people.
    """

    def __init__(self, catalog: Catalog, keeper: StateKeeper, ack_dir: str | None, log: Callable[[str], None]) -> None:
        self._catalog, self._keeper, self._limits = catalog, keeper, keeper.state.limits
        self._acks = ack_folder(catalog, ack_dir)
        self._log = log
        self.removed = 0
        # Listed once, then counted along: the folder of a long run has hundreds of thousands of files.
        self._there: list[int] | None = None
        self._counted = 0

    def wait_for(self, nbytes: int) -> None:
        """Return when another shard of about ``nbytes`` may be published.

        Raises:
            FormatError: it is larger than all that may be ahead, or an acknowledgement is damaged.
        """
        most = self._limits.max_ahead_nbytes
        if most is not None and nbytes > most:
            raise FormatError(
                f"{self._catalog.folder}: a shard takes {nbytes / 1e9:.3g} GB, and no more than {most / 1e9:g} GB may"
                " be ahead of training: raise --max-ahead-gb, or lower --tokens-per-shard"
            )
        ahead: list[int] = []

        def has_room() -> bool | NotYet:
            ahead[:] = self.free_completed()
            fits = most is None or sum(map(self._catalog.shard_nbytes, ahead)) + nbytes <= most
            return not ahead or (fits and len(ahead) < (self._limits.max_ahead_shards or math.inf)) or NOT_YET

        self._keeper.wait_for(has_room, "waiting for consumers", self._log, lambda: self._why(ahead))

    def free_completed(self) -> list[int]:
        """Remove completed shards that are not kept; those that are not completed, by number, where these count."""
        if not self._limits.needs_acks:
            return []
        last = self._keeper.state.published
        if self._there is None:
            self._there = [number for number in self._catalog.numbers() if number < last]
        else:
            self._there += range(self._counted, last)
        self._counted, published = last, self._there
        done = completed(read_acks(self._acks), self._limits.consumers, published)
        kept = len(done) if self._limits.keep_recent is None else self._limits.keep_recent
        if free := done[: max(len(done) - kept, 0)]:
            self._there = sorted(set(published).difference(free))
            # Consumers that still ask for one are told so from here on.
            self._keeper.update(freed=min(self._there, default=last))
            for number in free:
                remove_shard(ShardPaths.of(self._catalog.shard_prefix(number)))
            self.removed += len(free)
        return sorted(set(published).difference(done))

    def remove_remains(self) -> None:
        """Finish removals that a kill cut short."""
        published = self._keeper.state.published
        for number in self._catalog.present():
            if number < published and not self._catalog.is_published(number):
                remove_remains(self._catalog.shard_prefix(number))

    def _why(self, ahead: list[int]) -> str:
        acks, consumers = read_acks(self._acks), self._limits.consumers
        if len(acks) < consumers:
            whose = f"{len(acks)} of {consumers} consumers have acknowledged anything in {self._acks}"
        else:
            behind = [name for name, of_one in acks.items() if not completed({name: of_one}, 1, ahead[:1])]
            whose = f"in {self._acks} it is not by {', '.join(behind)}; remove the folder of one that reads no more"
        return (
            f"{len(ahead)} shards are ahead of training, the first is {ahead[0]}; a shard is completed when a"
            f" checkpoint that includes it is saved; {whose}"
        )
