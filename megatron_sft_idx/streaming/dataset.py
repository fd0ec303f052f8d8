"""``LiveDataset``: one rank's micro-batches of a live catalog, as torch's iterable dataset."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from megatron_sft_idx.catalog import Base
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.streaming.acks import Acknowledgements
from megatron_sft_idx.streaming.live import LiveLimits, LiveShards, Waiter
from megatron_sft_idx.streaming.order import AtEnd
from megatron_sft_idx.streaming.shards import CatalogShards
from megatron_sft_idx.streaming.source import LiveSource
from megatron_sft_idx.streaming.state import RankState, resume
from megatron_sft_idx.streaming.walk import Walk
from megatron_sft_idx.training import BatchAssembler, Form, Tensors, Wanted, whole_rows

__all__ = ["LiveDataset"]

logger = logging.getLogger("megatron_sft_idx.streaming")


class Event(Protocol):
    """One of threading's or multiprocessing's."""

    def set(self) -> None:
        """End all waits, now and later."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait so many seconds; True as soon as it is set."""
        ...


class LiveDataset(IterableDataset[Tensors]):
    """The micro-batches of one data-parallel rank, read from a catalog that may still be growing.

    Each is what ``BatchAssembler`` makes. In a DataLoader, take ``batch_size=None``; workers share each shard between
    them, and the batches come in the same order for any number of them::

        loader = DataLoader(LiveDataset(...), batch_size=None, num_workers=4, persistent_workers=True)

    A trainer that saves checkpoints wants ``LiveLoader``, which knows what was delivered and what was only prefetched.
    Ranks that differ in tensor, pipeline or context parallelism alone give the same ``rank`` and read the same.

    Args:
        catalog: the folder, or any other ``LiveShards``.
        rank: data-parallel rank.
        size: data-parallel ranks.
        seq_length: positions of a row.
        micro_batch_size: rows of a micro-batch.
        micro_batches: that a rank takes in a step; all ranks end with a whole step.
        shuffle: inside a window. False reads packs as they are stored.
        window: shards of this rank that are shuffled together; all of them are open, four maps each.
        seed: of every shuffle.
        epochs: how often everything is read. Shards are complete, and freed, in the last one only.
        at_end: what makes all ranks take as many steps: ``pad`` with rows whose loss is masked, or ``drop``.
        sequence_multiple: each sequence is padded to a multiple of this inside its row.
        pad_id: fills up rows; None for the tokenizer's.
        form: of the batches; see ``BatchLayout``.
        consumer: name of this training run among those that read the catalog.
        ack_dir: where acknowledgements are written instead of in the catalog.

    Raises:
        FormatError: options that do not go together, or that a live catalog cannot serve.
    """

    def __init__(
        self,
        catalog: str | os.PathLike[str] | LiveShards,
        *,
        rank: int,
        size: int,
        seq_length: int,
        micro_batch_size: int = 1,
        micro_batches: int = 1,
        shuffle: bool = True,
        window: int = 1,
        seed: int = 1234,
        epochs: int = 1,
        at_end: AtEnd = "pad",
        sequence_multiple: int = 1,
        pad_id: int | None = None,
        form: Form = "wide",
        consumer: str = "train",
        ack_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        _refuse(catalog, shuffle)
        self.shards: LiveShards = (
            CatalogShards(os.fspath(catalog)) if isinstance(catalog, str | os.PathLike) else catalog
        )
        if not 0 <= rank < size or min(micro_batch_size, micro_batches, window, epochs) < 1 or seed < 0:
            raise FormatError(
                f"{self.shards.folder}: rank {rank} of {size}, micro-batch size {micro_batch_size}, micro-batches"
                f" {micro_batches}, window {window}, epochs {epochs}, seed {seed}: ranks and seeds count from 0, the"
                " others from 1"
            )
        if at_end not in ("pad", "drop"):
            raise FormatError(f"{self.shards.folder}: at_end {at_end!r}, expected 'pad' or 'drop'")
        self.epochs, self.at_end, self.seq_length = epochs, at_end, seq_length
        self._shape: dict[str, Any] = {"sequence_multiple": sequence_multiple, "pad_id": pad_id, "form": form}
        self.acks = Acknowledgements(self.shards.folder, consumer, epochs, ack_dir)
        self.state = RankState(
            Base(seed=seed, window=window),
            shuffle,
            size,
            rank,
            batch_rows=micro_batch_size,
            step_rows=micro_batch_size * micro_batches,
        )
        self._limits: LiveLimits | None = None
        self._writes: bool | None = None

    def waiter(self, stop: Event | None = None) -> Waiter:
        """This rank, where it waits: until ``stop`` is set, or in a worker process until its parent is gone."""
        info, parent = get_worker_info(), os.getppid()
        sleep = Waiter("").pause if stop is None else stop.wait

        def pause(seconds: float) -> bool:
            return sleep(seconds) or (info is not None and os.getppid() != parent)

        return Waiter(f"rank {self.state.rank}", pause, speaks=info is None or not info.id)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Begin where a checkpoint ended.

        Args:
            state: this rank's own, of a job of the same size: what comes is what would have come, bit for bit. Or the
                list of all ranks' states of one checkpoint, in any order, for a job of any size or other micro-batches:
                what is left is dealt out anew, every pack exactly once.

        Raises:
            FormatError: no such state, or one of another job.
        """
        now = self.state
        several = not isinstance(state, dict)
        found = [RankState.from_json(one) for one in (state if several else [state])]
        for one in found:
            if (one.base.seed, one.shuffle) != (now.base.seed, now.shuffle):
                raise FormatError(
                    f"{self.shards.folder}: the state is of seed {one.base.seed}, shuffle {one.shuffle}; found seed"
                    f" {now.base.seed}, shuffle {now.shuffle}: packs would come twice or never; resume with the same"
                )
            if one.base.epoch >= self.epochs:
                raise FormatError(
                    f"{self.shards.folder}: the state is in epoch {one.base.epoch + 1}, and there are to be"
                    f" {self.epochs}; resume with as many epochs as before, or more"
                )
        if several:
            self.state = resume(
                found,
                now.size,
                now.rank,
                window=now.base.window,
                batch_rows=now.batch_rows,
                step_rows=now.step_rows,
            )
            return
        own = found[0]
        for what, there, here in (
            ("rank", own.rank, now.rank),
            ("data-parallel size", own.size, now.size),
            ("micro-batch size", own.batch_rows, now.batch_rows),
            ("rows in a step", own.step_rows, now.step_rows),
            ("window", own.base.window, now.base.window),
        ):
            if there != here:
                raise FormatError(
                    f"{self.shards.folder}: the state is of {what} {there}, this rank has {here}; give the list of all"
                    " ranks' states, and what is left is dealt out anew"
                )
        self.state = own

    def prepare(self, waiter: Waiter, *, lagging: bool = False) -> None:
        """Learn what the catalog promises, once; waits for it.

        Args:
            waiter: who waits.
            lagging: acknowledgements stay some batches behind checkpoints; see ``LiveLoader``.

        Raises:
            FormatError: rows that cannot be made of such packs, or limits with which training must come to a stop.
            SFTIndexError: nothing is promised in time.
        """
        if self._limits is not None:
            return
        limits = self.shards.limits(waiter)
        state = self.state
        # To end one group a rank may need the first packs of its next, and shards are published in their order.
        least = (2 * state.base.window - 1) * state.size + (state.size if lagging else 1)
        if limits.max_ahead_shards is not None and limits.max_ahead_shards < least:
            raise FormatError(
                f"{self.shards.folder}: the producer is at most {limits.max_ahead_shards} shards ahead, and"
                f" {state.size} ranks with a window of {state.base.window} need {least} to go on; start it with"
                f" --max-ahead-shards {least} or more, or train with a smaller window"
            )
        self._limits = limits
        self.state = dataclasses.replace(state, generation=self.acks.generation(state))

    def may_acknowledge(self) -> bool:
        """Whether acknowledgements can be written; SFTIndexError where the producer goes by them and they cannot."""
        if self._writes is None:
            self._writes = self.acks.may_write()
            remedy = f"{self.acks.path}: acknowledgements cannot be written here"
            if not self._writes and self._limits is not None and self._limits.needs_acks:
                raise SFTIndexError(
                    f"{remedy}, and the producer waits for them or frees shards by them; give both a folder that this"
                    " user may write to (--ack-dir)"
                )
            if not self._writes:
                logger.info("rank %d: %s; nothing depends on them", self.state.rank, remedy)
        return self._writes

    def _assembler(self, source: LiveSource) -> BatchAssembler:
        try:
            return BatchAssembler(source, self.seq_length, width=source.most_sequences + 2, **self._shape)
        except ValueError as error:
            raise FormatError(f"{self.shards.folder}: {error}") from None

    def open(self, waiter: Waiter) -> tuple[BatchAssembler, Walk, Iterator[Wanted]]:
        """What makes the micro-batches, who walks, and all of them, each with the rank's state behind it.

        The packs of one are read before the next is asked for.
        """
        self.prepare(waiter)
        assert self._limits is not None
        source = LiveSource(self.shards, self._limits, waiter)
        walk = Walk(
            self.shards,
            self.state,
            epochs=self.epochs,
            at_end=self.at_end,
            acknowledged=self.acks.done,
            waiter=waiter,
            opened=source.open,
        )
        return self._assembler(source), walk, _placed(walk, source)

    def deliveries(self, waiter: Waiter) -> Iterator[tuple[Any, RankState]]:
        """This process's share of the micro-batches, each with the state of the rank after it.

        Last comes None with the state at the end: behind shards without packs too, which no micro-batch follows.
        """
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        assembler, walk, batches = self.open(waiter)
        for number, batch in enumerate(batches):
            if number % workers == worker:
                yield whole_rows(assembler, batch.packs, batch.masked).whole(), batch.state
        yield None, walk.state

    def __iter__(self) -> Iterator[Tensors]:
        return (tensors for tensors, _ in self.deliveries(self.waiter()) if tensors is not None)


def _placed(walk: Walk, source: LiveSource) -> Iterator[Wanted]:
    for batch in walk:
        masked = np.arange(len(batch.packs)) >= len(batch.packs) - batch.num_masked
        yield Wanted(source.place(batch.shards, batch.packs), masked if batch.num_masked else None, batch.state)
        # What pads this batch pads the next ones too.
        filling = batch.shards[len(batch.shards) - batch.num_masked :]
        source.close_all_but([*walk.shards, *filling.tolist()])


def _refuse(catalog: Any, shuffle: Any) -> None:
    """FormatError for what a live catalog cannot serve."""
    if isinstance(catalog, list | tuple):
        raise FormatError(
            f"{catalog}: a blend needs to know how much there is of each part, and of a live catalog nobody knows;"
            " produce one catalog from all inputs, or train on finished folders"
        )
    if not isinstance(shuffle, bool):
        raise FormatError(
            f"shuffle {shuffle!r}: a live catalog is shuffled inside a window of shards; a global shuffle needs every"
            " pack before the first step. Use a larger window, or train on the finished folder as on any other"
        )
