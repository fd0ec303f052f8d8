"""The state that a producer keeps up to date on disk, and its lead over its consumers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.live import Catalog, ProducerState, State, ack_folder, completed, looks, read_acks
from megatron_sft_idx.shard import remove_shard
from megatron_sft_idx.shard.publication import finish_interrupted
from megatron_sft_idx.tokenize import NOT_YET, NotYet

Result = TypeVar("Result")
_SECONDS_BETWEEN_BEATS = 2.0
# A shorter wait does not change the state on disk and is not logged.
_SECONDS_BEFORE_A_STATE = 0.5
# The state of a producer that is done.
ENDED: dict[str, Any] = {"state": "stopped", "reason": "the input has ended"}


class StateKeeper:
    """Keeps ``_producer.json`` up to date. The producer must hold the catalog's lock.

    As a context manager: inside, a thread writes a new beat every few seconds. After an exception, the state on disk
    records it.

    Args:
        catalog: the catalog.
        state: the state to begin with.

    Attributes:
        state: the state on disk.
    """

    def __init__(self, catalog: Catalog, state: ProducerState) -> None:
        self._catalog, self.state = catalog, state
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def update(self, **changes: Any) -> None:
        """Replace fields of the state. They are on disk when this returns.

        Raises:
            OSError: an error of the disk.
        """
        with self._lock:
            state = dataclasses.replace(self.state, beat=self.state.beat + 1, **changes)
            self._catalog.write_producer(state)
            self.state = state

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
        # A full disk must not hide the first error. Consumers then notice that the producer is silent.
        with contextlib.suppress(OSError, SFTIndexError):
            if isinstance(error, Exception):
                self.update(state="failed", reason=str(error) or type(error).__name__)
            else:
                self.update(state="stopped", reason="interrupted")

    def wait_for(
        self,
        look: Callable[[], Result | NotYet],
        state: State,
        log: Callable[[str], None],
        why: Callable[[], str],
        *,
        longest: float = 1.0,
    ) -> Result:
        """Call ``look`` until it returns something other than ``NOT_YET``, and return that.

        Args:
            look: called repeatedly.
            state: the state on disk during a wait that is not short.
            log: called with a message when that state is set, and then once a minute.
            why: returns the reason for the wait, for these messages.
            longest: the longest time between two calls of ``look``, in seconds.
        """

        def say(waited: float) -> None:
            if self.state.state != state:
                self.update(state=state)
            log(f"{state} for {waited:.0f} s: {why()}")

        # If ``look`` fails, the state is not changed: writing it might fail too, and hide the first error.
        for _ in looks(say, quiet=_SECONDS_BEFORE_A_STATE, longest=longest):
            if not isinstance(result := look(), NotYet):
                if self.state.state == state:
                    self.update(state="running")
                return result
        raise AssertionError("looks never end by themselves")

    def end(self) -> None:
        """Record that the input has ended. Nothing is written after this, unless something fails."""
        self._stop_beating()
        self.update(**ENDED)

    def _stop_beating(self) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_BEATS):
            # A full or unavailable disk may recover before the next beat. Other writing will raise the error.
            with contextlib.suppress(OSError, SFTIndexError):
                self.update()


class Backpressure:
    """Limits the producer's lead over its consumers, and removes shards that they have completed.

    Args:
        catalog: the catalog, whose lock the producer must hold.
        keeper: has the limits. A shard must be counted in its state before it may be removed.
        ack_dir: the folder of consumers' acknowledgements; None for the one in the catalog.
        log: called with messages for the user.

    Attributes:
        removed: number of shards removed so far.
    """

    def __init__(self, catalog: Catalog, keeper: StateKeeper, ack_dir: str | None, log: Callable[[str], None]) -> None:
        self._catalog, self._keeper, self._limits = catalog, keeper, keeper.state.limits
        self._acks = ack_folder(catalog, ack_dir)
        self._log = log
        self.removed = 0
        # The existing shards up to a number. Listed once, because the folder may have very many files.
        self._present: list[int] | None = None
        self._counted = 0

    def wait_for(self, nbytes: int) -> None:
        """Wait until another shard of about ``nbytes`` may be published.

        If other shards are ahead, it counts at most as the largest of these. Consumers know no more about the next
        shard (``CatalogShards.may_not_come``): if they expect it to come, this must not wait for their commit.

        Raises:
            FormatError: the shard by itself exceeds the limit on running ahead, or an acknowledgement is damaged.
        """
        limit = self._limits.max_ahead_nbytes
        if limit is not None and nbytes > limit:
            raise FormatError(
                f"{self._catalog.folder}: a shard takes {nbytes / 1e9:.3g} GB, which exceeds the {limit / 1e9:g} GB"
                " that may be ahead of training; raise --max-ahead-gb, or lower --tokens-per-shard"
            )
        ahead: list[int] = []

        def has_room() -> bool | NotYet:
            ahead[:] = self.free_completed()
            sizes = [] if limit is None else [*map(self._catalog.shard_nbytes, ahead)]
            fits = limit is None or sum(sizes) + min(nbytes, max(sizes, default=0)) <= limit
            return not ahead or (fits and len(ahead) < (self._limits.max_ahead_shards or math.inf)) or NOT_YET

        self._keeper.wait_for(has_room, "waiting for consumers", self._log, lambda: self._why(ahead))

    def free_completed(self) -> list[int]:
        """Remove the completed shards that are not to be kept.

        Returns:
            The numbers of the shards that some consumer has not completed; empty if acknowledgements are not needed.
        """
        if not self._limits.needs_acks:
            return []
        last = self._keeper.state.published
        if self._present is None:
            self._present = [number for number in self._catalog.numbers() if number < last]
        else:
            self._present += range(self._counted, last)
        self._counted, published = last, self._present
        complete = completed(read_acks(self._acks), self._limits.consumers, published)
        num_kept = len(complete) if self._limits.keep_recent is None else self._limits.keep_recent
        if free := complete[: max(len(complete) - num_kept, 0)]:
            self._present = sorted(set(published).difference(free))
            # Written before the first removal, so that a consumer that needs it can report why it is gone.
            self._keeper.update(freed=min(self._present, default=last))
            for number in free:
                remove_shard(ShardPaths.of(self._catalog.shard_prefix(number)))
            self.removed += len(free)
        return sorted(set(published).difference(complete))

    def finish_removals(self) -> None:
        """Finish removals of shards that a kill interrupted."""
        published = self._keeper.state.published
        for number in self._catalog.present():
            if number < published:
                finish_interrupted(self._catalog.shard_prefix(number))

    def _why(self, ahead: list[int]) -> str:
        acks, consumers = read_acks(self._acks), self._limits.consumers
        if len(acks) < consumers:
            whose = f"only {len(acks)} of {consumers} consumers have acknowledged any shard in {self._acks}"
        else:
            behind = [name for name, of_one in acks.items() if not completed({name: of_one}, 1, ahead[:1])]
            whose = (
                f"in {self._acks}, it is not yet completed by {', '.join(behind)}; if a consumer no longer reads,"
                " remove its folder there"
            )
        return (
            f"{len(ahead)} shards are ahead of training, the first is {ahead[0]}; a shard is completed when a"
            f" checkpoint that includes it is saved; {whose}"
        )
