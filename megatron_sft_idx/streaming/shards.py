"""``CatalogShards``: the shards of a catalog that ``megatron-sft-idx produce`` fills, for its consumers."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.catalog import Catalog, CatalogWatch
from megatron_sft_idx.errors import FormatError, SFTIndexError, ShardNotFoundError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.reader import read_header
from megatron_sft_idx.storage import Backend
from megatron_sft_idx.streaming.live import LiveLimits, Waiter

__all__ = ["CatalogShards"]

_SECONDS_BETWEEN_LISTINGS = 0.05

logger = logging.getLogger("megatron_sft_idx.streaming")


class CatalogShards:
    """A ``LiveShards`` over a catalog's folder.

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
        self._limits: LiveLimits | None = None
        self._counts: dict[int, int] = {}

    def limits(self, waiter: Waiter) -> LiveLimits:
        """What the producer promises; of a finished catalog without one, what the shards have."""
        if self._limits is None:
            header = self._any_header(waiter)
            producer = self._catalog.producer()
            if producer is not None:
                promised = producer.limits
                self._limits = LiveLimits(
                    promised.capacity,
                    promised.max_sequences_per_pack,
                    promised.sequence_multiple,
                    None if header is None else header.pad_id,
                    promised.max_ahead_shards,
                    promised.needs_acks,
                )
            else:
                self._limits = self._limits_of_headers()
        return self._limits

    def newest_header(self) -> Header | None:
        """The header of the newest shard that is there now; None where there is none."""
        for number in reversed(self.numbers()):
            # One that is listed may be freed in between, or not be there for all that a listing says.
            with contextlib.suppress(ShardNotFoundError):
                return read_header(self._catalog.shard_prefix(number))
        return None

    def _any_header(self, waiter: Waiter) -> Header | None:
        """The header of the newest shard; waits for one. None where all are freed and no more will come."""
        while True:
            if (header := self.newest_header()) is not None:
                return header
            producer = self._catalog.producer()
            if not self.wait(0 if producer is None else producer.published, waiter):
                return None
            waiter.pause_or_stop(_SECONDS_BETWEEN_LISTINGS)

    def _limits_of_headers(self) -> LiveLimits:
        if self.end() is None:
            raise SFTIndexError(
                f"{self.folder}: shards and no _producer.json, which says how many sequences their packs have at most,"
                " and no _END.json, after which nobody need say it; fill it with megatron-sft-idx produce, or train on"
                " the folder as on any other"
            )
        headers = [read_header(self._catalog.shard_prefix(number)) for number in self.numbers()]
        if not headers:
            raise FormatError(f"{self.folder}: a finished catalog without a shard, there is nothing to train on")
        return LiveLimits(
            max(header.capacity for header in headers),
            max(header.most_sequences for header in headers),
            math.gcd(*(header.sequence_multiple for header in headers)),
            headers[0].pad_id,
        )

    def end(self) -> int | None:
        """How many shards there are in all, once that is known."""
        return self._catalog.end()

    def wait(self, number: int, waiter: Waiter, uncommitted: Callable[[], int] = lambda: 0) -> bool:
        """See ``LiveShards``."""
        if self._catalog.is_published(number):
            return True
        found = self._watch.wait(
            number,
            who=waiter.who,
            max_wait=self._max_wait,
            producer_timeout=self._producer_timeout,
            uncommitted=uncommitted,
            pause=waiter.pause_or_stop,
            log=logger.info if waiter.speaks else lambda line: None,
        )
        return found == "published"

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

    def open(self, number: int) -> OpenShard:
        """Open a shard and hold it against what the producer promised."""
        shard = Shard(self._catalog.shard_prefix(number), backend=self._backend)
        if self._limits is not None:
            _require_kept(shard, self._limits)
        return OpenShard(shard)

    def name(self, number: int) -> str:
        """As the log has it."""
        return f"shard {number}"

    def committed(self) -> None:
        """Nothing is derived from acknowledgements here: the producer reads them itself."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counts": {}}


def _require_kept(shard: Shard, limits: LiveLimits) -> None:
    """FormatError where a shard is not what its catalog's producer promised."""
    header = shard.header
    for found, promised, kept in (
        (f"packs of up to {header.capacity} tokens", limits.capacity, header.capacity <= limits.capacity),
        (
            f"{header.most_sequences} sequences in a pack",
            limits.most_sequences,
            header.most_sequences <= limits.most_sequences,
        ),
        (f"padding id {header.pad_id}", limits.pad_id, limits.pad_id in (None, header.pad_id or 0)),
        (
            f"sequence multiple {header.sequence_multiple}",
            limits.sequence_multiple,
            header.sequence_multiple % limits.sequence_multiple == 0,
        ),
    ):
        if not kept:
            raise FormatError(
                f"{shard.prefix}: {found}, the catalog's producer promised {promised}; somebody else wrote this shard:"
                " make the catalog anew"
            )


class OpenShard:
    """An ``OpenPacks`` over the files of one shard."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        files = shard.files
        self.num_packs = files.num_packs
        self.num_tokens: int | None = files.num_tokens
        self.index = shard.index
        self._limits = shard.header.capacity, shard.header.sequence_multiple, shard.header.most_sequences
        self._arrays = files.tokens[:], files.loss[:]
        whole = np.zeros(1, np.int64), np.array([files.num_tokens])
        for array in self._arrays:
            _native.will_need(array, *whole)

    def segments(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """See ``OpenPacks``. FormatError where index entries break a rule of the format."""
        try:
            offsets, _, starts, lengths = _native.pack_segments([self.index], np.zeros_like(packs), packs, self._limits)
        except ValueError as error:
            raise self._shard.broken_pack(str(error)) from None
        return offsets, starts, lengths

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """All tokens and masks of the shard."""
        return self._arrays
