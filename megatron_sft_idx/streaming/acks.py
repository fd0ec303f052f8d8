"""A consumer's acknowledgements: written when a checkpoint is durable, read where shards are gone already."""

from __future__ import annotations

import os

from megatron_sft_idx.catalog import Ack, Catalog, ack_folder, read_acks, require_consumer, write_ack
from megatron_sft_idx.streaming.state import RankState

__all__ = ["Acknowledgements"]


class Acknowledgements:
    """Those of one consumer of a catalog.

    Args:
        folder: of the catalog.
        consumer: its name.
        epochs: how often it reads everything.
        ack_dir: where they are kept instead of in the catalog.

    Raises:
        FormatError: the name is no name of a folder.

    Attributes:
        path: the folder of acknowledgements, of all consumers.
    """

    def __init__(self, folder: str, consumer: str, epochs: int, ack_dir: str | os.PathLike[str] | None) -> None:
        require_consumer(consumer)
        self.path = ack_folder(Catalog(folder), ack_dir)
        self._consumer, self._epochs = consumer, epochs

    def ack(self, state: RankState) -> Ack:
        """What is written of a state."""
        return Ack(
            self._consumer,
            state.generation,
            state.base,
            state.size,
            state.rank,
            state.items,
            state.packs_of_items,
            state.base.epoch,
            self._epochs,
        )

    def write(self, state: RankState) -> None:
        """Replace the acknowledgement of the state's rank, durably. OSError where that may not be written."""
        write_ack(self.path, self.ack(state))

    def done(self, state: RankState) -> dict[int, tuple[int, int]]:
        """Items and the packs in them that ranks have acknowledged in the order of a state; by rank."""
        ours = self.ack(state)
        return {
            ack.rank: (ack.items_done, ack.packs_done)
            for ack in self._newest()
            if (ack.generation, ack.size, ack.epoch, ack.base) == (ours.generation, ours.size, ours.epoch, ours.base)
        }

    def generation(self, state: RankState) -> int:
        """The generation under which a state's rank goes on: no older than what is acknowledged, nor mixed with it.

        Acknowledgements may be ahead of the state: of a run that was given up, or of this run's other ranks.
        """
        newest = self._newest()
        if not newest or newest[0].generation < state.generation:
            return state.generation
        ours = self.ack(state)
        return newest[0].generation + (not all(ours.agrees_with(ack) for ack in newest))

    def exist(self) -> bool:
        """Whether this consumer has acknowledged anything, in any run."""
        return bool(self._newest())

    def may_write(self) -> bool:
        """Whether acknowledgements can be written here; makes their folder."""
        home = os.path.join(self.path, self._consumer)
        try:
            os.makedirs(home, exist_ok=True)
        except OSError:
            return False
        return os.access(home, os.W_OK)

    def _newest(self) -> list[Ack]:
        return read_acks(self.path).get(self._consumer, [])
