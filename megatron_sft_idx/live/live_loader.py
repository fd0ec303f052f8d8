"""``LiveDataset``: one rank's micro-batches of live shards; ``LiveLoader``: what a trainer iterates over.

The dataset is an order that feeds the same ``BatchLoader`` as finished data; the loader knows, beyond that, what was
delivered and what was only prefetched, and commits checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import multiprocessing.synchronize
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.layout.files import check_column_name
from megatron_sft_idx.live.acks import (
    Ack,
    Base,
    ack_folder,
    acknowledged,
    next_generation,
    read_acks,
    require_consumer,
    uncompleted,
    write_ack,
)
from megatron_sft_idx.live.catalog import Catalog, Limits, Stopped, Waiter
from megatron_sft_idx.live.catalog_shards import CatalogShards
from megatron_sft_idx.live.live_order import AtEnd, RankState, Walk, least_ahead, resume
from megatron_sft_idx.live.live_shards import LiveShards, OpenShards
from megatron_sft_idx.training import BatchAssembler, BatchLoader, Form, Tensors, Wanted

logger = logging.getLogger("megatron_sft_idx.live")
# The last one, which comes of every process, is of no batch: where the rank stands at the end of the data.
_Delivery: TypeAlias = tuple[Tensors | None, RankState]
# What a worker process hands over: an error as a value, as torch would make a RuntimeError of one that is raised.
_Outcome: TypeAlias = _Delivery | SFTIndexError
_Event: TypeAlias = threading.Event | multiprocessing.synchronize.Event


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
        columns: names of those of the shards' columns that batches have. Values are as stored: every shard numbers the
            files of ``source`` as the others do.
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
        columns: Sequence[str] = (),
        consumer: str = "train",
        ack_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(catalog, list | tuple):
            raise FormatError(
                f"{catalog}: a blend needs to know how much there is of each part, and of a live catalog nobody knows;"
                " produce one catalog from all inputs, or train on finished folders"
            )
        if not isinstance(shuffle, bool):
            raise FormatError(
                f"shuffle {shuffle!r}: a live catalog is shuffled inside a window of shards; a global shuffle needs"
                " every pack before the first step. Use a larger window, or train on the finished folder as on any"
                " other"
            )
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
        self.columns = tuple(map(check_column_name, columns))
        require_consumer(consumer)
        self.acks, self.consumer = ack_folder(Catalog(self.shards.folder), ack_dir), consumer
        base, step_rows = Base(seed=seed, window=window), micro_batch_size * micro_batches
        self.state = RankState(base, shuffle, size, rank, batch_rows=micro_batch_size, step_rows=step_rows)
        self._limits: Limits | None = None
        self._writes: bool | None = None

    def waiter(self, stop: _Event | None = None) -> Waiter:
        """A waiter for this rank; it stops when ``stop`` is set, and in a worker process when the parent has ended."""
        info, parent = get_worker_info(), os.getppid()
        sleep = time.sleep if stop is None else stop.wait

        def pause(seconds: float) -> bool:
            return bool(sleep(seconds)) or (info is not None and os.getppid() != parent)

        speaks = info is None or not info.id
        return Waiter(f"rank {self.state.rank}", pause, logger.info if speaks else lambda line: None)

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
        found = [RankState.from_json(one) for one in ([state] if isinstance(state, dict) else state)]
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
        if not isinstance(state, dict):
            shape = {"window": now.base.window, "batch_rows": now.batch_rows, "step_rows": now.step_rows}
            self.state = resume(found, now.size, now.rank, **shape)
            return
        if differs := found[0].differences(now):
            what, there, here = differs[0]
            raise FormatError(
                f"{self.shards.folder}: the state is of {what} {there}, this rank has {here}; give the list of all"
                " ranks' states, and what is left is dealt out anew"
            )
        self.state = found[0]

    def prepare(self, waiter: Waiter, *, lagging: bool = False) -> None:
        """Learn what the catalog promises, once; waits for it.

        Args:
            waiter: who waits.
            lagging: acknowledgements stay some batches behind checkpoints; see ``LiveLoader``.

        Raises:
            FormatError: limits with which training must come to a stop.
            SFTIndexError: nothing is promised in time.
        """
        if self._limits is None:
            self.require_room(waiter, lagging=lagging)
            self._limits = self.shards.limits(waiter)[0]
            generation = next_generation(self.newest_acks(), self.ack(self.state))
            self.state = dataclasses.replace(self.state, generation=generation)

    def require_room(self, waiter: Waiter, *, lagging: bool = False) -> None:
        """Raise FormatError where the producer may not be as far ahead as training needs; see ``prepare``."""
        promised, state = self.shards.limits(waiter)[0], self.state
        if promised.max_ahead_shards is None:
            return
        least = least_ahead(state, self.shards.least_packs(), lagging=lagging)
        if promised.max_ahead_shards < least:
            raise FormatError(
                f"{self.shards.folder}: the producer is at most {promised.max_ahead_shards} shards ahead, and"
                f" {state.size} ranks with a window of {state.base.window} that take {state.step_rows} packs a step"
                f" need {least} to go on; start it with --max-ahead-shards {least} or more, or train with a smaller"
                " window, or smaller batches"
            )

    @property
    def needs_acks(self) -> bool:
        """Whether the producer goes by acknowledgements, as it says to all ranks alike; False before ``prepare``."""
        return self._limits is not None and self._limits.needs_acks

    def may_wait_in_vain(self, state: RankState, committed: Sequence[RankState]) -> bool:
        """Whether the rank may need, for its next step, a shard that the producer publishes after a commit only.

        What a step needs is taken to be the most that it can be, not what is there already, so that runs with the same
        data and the same commits say the same, at whatever pace shards come. ``state`` is between two steps,
        ``committed`` those of all ranks that were acknowledged last.
        """
        last = state.last_shard(state.step_rows, lambda shard: self.shards.count(shard) or 0, self.shards.least_packs())
        return self.shards.may_not_come(uncompleted([self.ack(one) for one in committed], last))

    def ack(self, state: RankState) -> Ack:
        """The acknowledgement to be written once the checkpoint that holds ``state`` is durable."""
        return state.ack(self.consumer, self.epochs)

    def newest_acks(self) -> list[Ack]:
        """The acknowledgements of this consumer's newest generation, by rank; empty before its first checkpoint."""
        return read_acks(self.acks).get(self.consumer, [])

    def may_acknowledge(self) -> bool:
        """Whether acknowledgements can be written; SFTIndexError where the producer goes by them and they cannot."""
        if self._writes is None:
            home, said = os.path.join(self.acks, self.consumer), "acknowledgements cannot be written here"
            with contextlib.suppress(OSError):
                os.makedirs(home, exist_ok=True)
            self._writes = os.access(home, os.W_OK)
            if not self._writes and self.needs_acks:
                raise SFTIndexError(
                    f"{self.acks}: {said}, and the producer waits for them or frees shards by them; give both a folder"
                    " that this user may write to (--ack-dir)"
                )
            if not self._writes:
                logger.info("rank %d: %s: %s; nothing depends on them", self.state.rank, self.acks, said)
        return self._writes

    def deliveries(self, waiter: Waiter, *, thread: bool = False) -> Iterator[tuple[Any, RankState]]:
        """This process's share of the micro-batches, each with the state of the rank after it.

        Last comes None with the state at the end: behind shards without packs too, which no micro-batch follows. With
        ``thread`` they are prepared ahead in a thread of this process, whose share is all of them.
        """
        self.prepare(waiter)
        source = OpenShards(self.shards, waiter, self.columns)
        done = lambda state: acknowledged(self.newest_acks(), self.ack(state))  # noqa: E731
        ends: dict[str, Any] = {"epochs": self.epochs, "at_end": self.at_end}
        walk = Walk(self.shards, self.state, **ends, acknowledged=done, waiter=waiter)
        try:
            shape = {"width": source.most_sequences + 2, "columns": tuple(source.columns), **self._shape}
            assembler = BatchAssembler(source, self.seq_length, **shape)
        except ValueError as error:
            raise FormatError(f"{self.shards.folder}: {error}") from None

        def batches() -> Iterator[Wanted]:
            for wanted in walk:  # the packs of one are read before the next is asked for
                # All shards that the micro-batch and the group that it ends in are of.
                source.hold([*np.asarray(wanted.packs)[:, 0].tolist(), *wanted.state.shards])
                yield wanted

        if thread:
            # No looking ahead: a batch that is ready must not be held back until the next shard is published.
            with iter(BatchLoader(assembler, batches(), ahead=0)) as taken:
                for tensors in taken:
                    yield tensors, taken.state
        else:
            info = get_worker_info()
            worker, workers = (info.id, info.num_workers) if info else (0, 1)
            for batch in itertools.islice(batches(), worker, None, workers):
                yield assembler.rows(batch.packs, batch.masked).whole(), batch.state
        yield None, walk.state

    def __iter__(self) -> Iterator[Tensors]:
        return (tensors for tensors, _ in self.deliveries(self.waiter()) if tensors is not None)


class LiveLoader(Iterator[Tensors]):
    """The micro-batches of a rank, prepared ahead; also a context manager that closes.

    ::

        with LiveLoader(LiveDataset("catalog", rank=rank, size=size, seq_length=4096)) as loader:
            for batch in loader:
                step(batch)
                if time_to_save:
                    state = loader.state_dict()
                    save(model, state)      # until it is on disk
                    loader.commit(state)    # its shards may be freed now

    A batch is valid until the next one is taken, as with ``BatchLoader``, and pinned where there is a GPU.

    Args:
        dataset: of this rank.
        num_workers: processes that prepare batches; 0 for a thread of this one, which is enough unless chats are
            tokenised as they are read. With processes, what is acknowledged stays as many micro-batches behind the
            checkpoint, as the slowest of them may still look at what the others have delivered.

    Attributes:
        state: where the rank stands after the batches that were taken.
    """

    def __init__(self, dataset: LiveDataset, *, num_workers: int = 0) -> None:
        self.dataset, self.num_workers = dataset, num_workers
        self._stop: _Event = torch.multiprocessing.Event() if num_workers else threading.Event()
        weakref.finalize(self, self._stop.set)
        self._batches: Iterator[_Outcome] | None = None
        self.state = dataset.state
        # After each of the last deliveries, one of every process: which all of them have walked past the first.
        self._passed = deque([self.state], maxlen=max(num_workers, 1))
        self._closed = False

    def __next__(self) -> Tensors:
        if self._closed:
            raise StopIteration
        try:
            if self._batches is None:
                self._batches = self._begin()
            delivery = next(self._batches)
            if isinstance(delivery, SFTIndexError):
                raise delivery
            tensors, self.state = delivery
            if tensors is None:
                raise StopIteration
        except (Stopped, StopIteration):
            self.close()
            raise StopIteration from None
        except BaseException:
            self.close()
            raise
        self._passed.append(self.state)
        return tensors

    def _begin(self) -> Iterator[_Outcome]:
        dataset = self.dataset
        self.prepare()
        dataset.may_acknowledge()
        state = self.state
        self._passed.extend([state] * max(self.num_workers, 1))
        logger.info(
            "data-parallel rank %d of %d: catalog %s, window %d, %s, epoch %d of %d, %d workers, from row %d",
            *(state.rank, state.size, dataset.shards.folder, state.base.window),
            *("shuffled" if state.shuffle else "as stored", state.base.epoch + 1, dataset.epochs),
            *(self.num_workers, state.rows),
        )
        if not self.num_workers:
            return dataset.deliveries(dataset.waiter(self._stop), thread=True)
        deliveries, pinned = _InWorkers(dataset, self._stop), torch.cuda.is_available()
        # With no collate of ours, torch makes tensors of arrays, of which there are none here.
        return iter(DataLoader(deliveries, batch_size=None, num_workers=self.num_workers, pin_memory=pinned))

    def prepare(self) -> None:
        """Learn what the catalog promises; see ``LiveDataset.prepare``."""
        self.dataset.prepare(self.dataset.waiter(self._stop), lagging=self.num_workers > 0)
        if self._batches is None and not self._closed:
            self.state = self.dataset.state

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Where the rank stands after the batches that were taken; plain values for a checkpoint."""
        return self.state.to_json()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from a checkpoint; before the first batch is taken. See ``LiveDataset.load_state_dict``."""
        if self._batches is not None or self._closed:
            raise SFTIndexError(
                f"{self.dataset.shards.folder}: batches were taken already; load the state into a new loader"
            )
        self.dataset.load_state_dict(state)
        self.state = self.dataset.state

    def commit(self, state: dict[str, Any] | None = None) -> None:
        """Say that a checkpoint that holds ``state`` is durable: what it includes need not be read again.

        Where several processes share a data-parallel rank, one of them commits. Committing twice does no harm.

        Args:
            state: of ``state_dict``. None, before the first batch, for where this run begins: whatever an earlier one
                of the same name acknowledged beyond that will be read again, and must not be removed. A run that
                begins from nothing after nobody has nothing to say.

        Raises:
            OSError: the acknowledgement could not be written.
        """
        self.prepare()
        found, dataset = self.state if state is None else RankState.from_json(state), self.dataset
        from_nothing = state is None and not found.rows and not found.generation
        if (from_nothing and not dataset.newest_acks()) or not dataset.may_acknowledge():
            return
        found = self.committable(found)
        write_ack(dataset.acks, dataset.ack(found))
        dataset.shards.committed()
        logger.info(
            "rank %d: committed epoch %d, %d items, %s packs of shards that are complete",
            *(found.rank, found.base.epoch + 1, found.items, f"{found.packs_of_items:,}"),
        )

    def committable(self, state: RankState) -> RankState:
        """What ``commit`` says of a state: no later than where any worker process still has to look at shards."""
        slowest = self._passed[0]
        is_before = (slowest.base.epoch, slowest.rows) < (state.base.epoch, state.rows)
        return slowest if self.num_workers and self._batches is not None and is_before else state

    def close(self) -> None:
        """End the thread or the workers, also while they wait for a shard; may be called twice and by any thread."""
        self._closed = True
        self._stop.set()
        self._batches = None

    def __enter__(self) -> LiveLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _InWorkers(IterableDataset[_Outcome]):
    """A worker process's share of the deliveries."""

    def __init__(self, dataset: LiveDataset, stop: _Event) -> None:
        super().__init__()
        self._dataset, self._stop = dataset, stop

    def __iter__(self) -> Iterator[_Outcome]:
        try:
            yield from self._dataset.deliveries(self._dataset.waiter(self._stop))
        except SFTIndexError as error:
            yield error
