"""Room in the catalog: how far the producer may run ahead of training, and removing what training is done with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.live import Catalog, ack_folder, completed, read_acks
from megatron_sft_idx.produce.keeper import StateKeeper
from megatron_sft_idx.shard import remove_shard
from megatron_sft_idx.shard.prefix import drop_remains

__all__ = ["Room"]


class Room:
    """The shards that are there, as training completes them.

    Args:
        catalog: held by this producer.
        keeper: whose limits hold, and whose state counts a shard before it may be removed: a removed one has no header
            to ask.
        ack_dir: where consumers acknowledge, when that is not in the catalog.
        log: takes lines for people.
    """

    def __init__(
        self,
        catalog: Catalog,
        keeper: StateKeeper,
        ack_dir: str | None,
        log: Callable[[str], None],
    ) -> None:
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
        waits = self._keeper.waits("waiting for consumers", self._log, lambda: self._why(ahead))
        with contextlib.closing(waits):
            for _ in waits:
                ahead = self.free_completed()
                if not ahead or self._fits(ahead, nbytes):
                    return

    def free_completed(self) -> list[int]:
        """Remove completed shards that are not kept; those that are not completed, by number, where these count."""
        if not self._limits.needs_acks:
            return []
        published = self._published()
        done = completed(read_acks(self._acks), self._limits.consumers, published)
        if self._limits.keep_recent is not None:
            self._remove(published, done[: max(len(done) - self._limits.keep_recent, 0)])
        gone = set(done)
        return [number for number in published if number not in gone]

    def remove_remains(self) -> None:
        """Finish removals that a kill cut short."""
        published = self._keeper.state.published
        for number in self._catalog.present():
            if number < published and not self._catalog.is_published(number):
                drop_remains(ShardPaths.of(self._catalog.shard_prefix(number)))

    def _published(self) -> list[int]:
        """The shards that are there."""
        published = self._keeper.state.published
        if self._there is None:
            self._there = [number for number in self._catalog.numbers() if number < published]
        else:
            self._there.extend(range(self._counted, published))
        self._counted = published
        return list(self._there)

    def _remove(self, published: list[int], free: list[int]) -> None:
        if not free:
            return
        kept = set(published).difference(free)
        # Consumers that still ask for one are told so from here on.
        self._keeper.update(freed=min(kept, default=self._keeper.state.published))
        for number in free:
            remove_shard(ShardPaths.of(self._catalog.shard_prefix(number)))
        self._there = sorted(kept)
        self.removed += len(free)

    def _fits(self, ahead: list[int], nbytes: int) -> bool:
        shards, most = self._limits.max_ahead_shards, self._limits.max_ahead_nbytes
        if shards is not None and len(ahead) >= shards:
            return False
        return most is None or sum(map(self._catalog.shard_nbytes, ahead)) + nbytes <= most

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
