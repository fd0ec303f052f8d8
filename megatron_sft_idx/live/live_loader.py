"""``LiveDataset`` makes one rank's micro-batches of live shards; ``LiveLoader`` is what a trainer iterates over.

The dataset decides what is read and in which order, and ``BatchLoader`` assembles it, as it does for finished data. The
loader prepares batches ahead. It keeps apart what the trainer has taken and what is only prepared, so that a checkpoint
says exactly what was trained on; and it acknowledges checkpoints to the producer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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

from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.layout.files import check_column_name
from megatron_sft_idx.lines import get_logger
from megatron_sft_idx.live.acks import (
    Ack,
    Base,
    ack_folder,
    acknowledged,
    newest_acks,
    next_generation,
    require_consumer,
    uncompleted,
    write_ack,
)
from megatron_sft_idx.live.catalog import Catalog, Limits, Stopped, Waiter, status_of
from megatron_sft_idx.live.catalog_shards import CatalogShards
from megatron_sft_idx.live.live_order import AtEnd, RankState, Walk, least_ahead, resume
from megatron_sft_idx.live.live_shards import LiveShards, OpenShards
from megatron_sft_idx.training import BatchAssembler, BatchLoader, Form, Tensors, Wanted

logger = get_logger("megatron_sft_idx.live")
# A micro-batch, and where the rank stands after it. Each process ends with one delivery that has no micro-batch.
_Delivery: TypeAlias = tuple[Tensors | None, RankState]
# A worker process hands over an error as a value: raised there, torch would make a RuntimeError of it.
_Outcome: TypeAlias = _Delivery | SFTIndexError
_Event: TypeAlias = threading.Event | multiprocessing.synchronize.Event


class LiveDataset(IterableDataset[Tensors]):
    """The micro-batches of one data-parallel rank, read from a catalog that may still be growing.

    A trainer that saves checkpoints iterates over ``LiveLoader(LiveDataset(...))``. Without checkpoints a DataLoader
    serves as well; the micro-batches come in the same order for any number of workers::

        loader = DataLoader(LiveDataset(...), batch_size=None, num_workers=4, persistent_workers=True)

    Processes of one data-parallel rank (tensor, pipeline, context parallelism) give the same ``rank`` and read the
    same micro-batches. These have the keys and shapes that ``BatchAssembler`` makes.

    Args:
        catalog: the folder of a catalog, or other live shards.
        rank: data-parallel rank, from 0.
        size: the number of data-parallel ranks.
        seq_length: positions of a row.
        micro_batch_size: rows of a micro-batch.
        micro_batches: how many of them a rank takes in a step. All ranks end with a whole step.
        shuffle: whether packs are shuffled inside a window; else they come as they are stored.
        window: how many shards of this rank are shuffled together. All of them are open at once, with four maps each.
        seed: of every shuffle.
        epochs: how often everything is read. Only the last epoch completes shards, so that they can be removed.
        at_end: how all ranks come to the same number of steps: ``pad`` adds rows whose loss is masked, ``drop`` leaves
            packs out.
        sequence_multiple: each sequence is padded to a multiple of this inside its row.
        pad_id: id that fills up rows; None for the tokenizer's.
        form: of the batches; see ``BatchLayout``.
        columns: names of the shards' columns that batches have, with values as they are stored. The files that a
            column ``source`` numbers must be the same in all shards.
        consumer: the name of this training run among those that read the catalog.
        ack_dir: the folder of acknowledgements, where consumers may not write into the catalog.

    Raises:
        FormatError: an option has a value that it cannot have.
    """

    @checked
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
        self.shards = catalog if isinstance(catalog, LiveShards) else CatalogShards(os.fspath(catalog))
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
        self.consumer = consumer
        self.acks = ack_folder(Catalog(self.shards.folder), ack_dir)
        self.state = RankState(
            Base(seed=seed, window=window),
            shuffle,
            size,
            rank,
            batch_rows=micro_batch_size,
            step_rows=micro_batch_size * micro_batches,
        )
        self._limits: Limits | None = None
        self._writes: bool | None = None

    def waiter(self, stop: _Event | None = None) -> Waiter:
        """How this rank waits: until ``stop`` is set, or in a worker process until its parent has ended."""
        worker = get_worker_info()
        parent = os.getppid()
        sleep = time.sleep if stop is None else stop.wait

        def pause(seconds: float) -> bool:
            return bool(sleep(seconds)) or (worker is not None and os.getppid() != parent)

        speaks = worker is None or worker.id == 0
        return Waiter(f"rank {self.state.rank}", pause, logger.info if speaks else lambda line: None)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Begin where a checkpoint ended.

        Args:
            state: this rank's own state, in a job with as many ranks: then the same batches come, bit for bit, as if
                the job had gone on. Or a list of all ranks' states of one checkpoint, for a job with any number of
                ranks and any micro-batches: then what is left is dealt out anew, every pack exactly once.

        Raises:
            FormatError: it is no state, or one of a job with another seed, shuffle or number of epochs.
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
        if differs := found[0].difference(now):
            raise FormatError(
                f"{self.shards.folder}: the state is of {differs}; give the list of all ranks' states, and what is left"
                " is dealt out anew"
            )
        self.state = found[0]

    def prepare(self, waiter: Waiter, *, lagging: bool = False) -> None:
        """Wait for the catalog's limits, and hold them against the options; once.

        Args:
            waiter: who waits.
            lagging: whether acknowledgements stay some batches behind checkpoints; see ``LiveLoader``.

        Raises:
            FormatError: with these limits training would come to a stop.
            SFTIndexError: no limits were written in time.
        """
        if self._limits is None:
            self.require_room(waiter, lagging=lagging)
            self._limits = self.shards.limits(waiter)[0]
            generation = next_generation(self.newest_acks(), self.ack(self.state))
            self.state = dataclasses.replace(self.state, generation=generation)

    def require_room(self, waiter: Waiter, *, lagging: bool = False) -> None:
        """FormatError if the producer may not be as far ahead as training needs. Arguments as of ``prepare``."""
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
        """Whether the producer needs acknowledgements to go on, or to remove shards; False before ``prepare``."""
        return self._limits is not None and self._limits.needs_acks

    def may_wait_in_vain(self, state: RankState, committed: Sequence[RankState]) -> bool:
        """Whether the next step may need a shard that the producer publishes only after another commit.

        Runs with the same data and the same commits get the same answer, at whatever pace shards come: it follows from
        the shards that a step can need at most, not from those that are there.

        Args:
            state: of this rank, between two steps.
            committed: the states of all ranks that were acknowledged last.
        """
        last = state.last_shard(state.step_rows, lambda shard: self.shards.count(shard) or 0, self.shards.least_packs())
        return self.shards.may_not_come(uncompleted([self.ack(one) for one in committed], last))

    def ack(self, state: RankState) -> Ack:
        """The acknowledgement to be written once the checkpoint that holds ``state`` is durable."""
        return state.ack(self.consumer, self.epochs)

    def newest_acks(self) -> list[Ack]:
        """This consumer's acknowledgements of its newest generation, by rank; empty before its first checkpoint."""
        return newest_acks(self.acks, self.consumer)

    def may_acknowledge(self) -> bool:
        """Whether acknowledgements can be written. SFTIndexError: they cannot, and the producer needs them."""
        if self._writes is None:
            home = os.path.join(self.acks, self.consumer)
            with contextlib.suppress(OSError):
                os.makedirs(home, exist_ok=True)
            status_of(home)  # waits until its file system answers: what is asked next takes any error for a no
            self._writes = os.access(home, os.W_OK)
            if not self._writes and self.needs_acks:
                raise SFTIndexError(
                    f"{self.acks}: acknowledgements cannot be written here, and the producer waits for them or frees"
                    " shards by them; give both a folder that this user may write to (--ack-dir)"
                )
            if not self._writes:
                logger.info(f"rank {self.state.rank}: {self.acks} cannot be written to; nothing depends on it")
        return self._writes

    def deliveries(self, waiter: Waiter, *, thread: bool = False) -> Iterator[tuple[Any, RankState]]:
        """The micro-batches of this process, each with the state of the rank after it.

        Last comes None with the state at the end of the data, which may be behind shards without packs. A worker
        process makes every n-th micro-batch, any other process makes all of them. With ``thread`` a thread of this
        process prepares them ahead.
        """
        self.prepare(waiter)
        source = OpenShards(self.shards, waiter, self.columns)

        def acknowledged_in(state: RankState) -> dict[int, tuple[int, int]]:
            return acknowledged(self.newest_acks(), self.ack(state))

        walk = Walk(
            self.shards,
            self.state,
            epochs=self.epochs,
            at_end=self.at_end,
            acknowledged=acknowledged_in,
            waiter=waiter,
        )
        try:
            width, columns = source.most_sequences + 2, tuple(source.columns)
            assembler = BatchAssembler(source, self.seq_length, width=width, columns=columns, **self._shape)
        except ValueError as error:
            raise FormatError(f"{self.shards.folder}: {error}") from None

        def batches() -> Iterator[Wanted]:
            for wanted in walk:
                # The micro-batch's own shards, and those of the unfinished group. All others may be closed, since the
                # packs of one micro-batch are read before the next one is asked for.
                source.hold([*np.asarray(wanted.packs)[:, 0].tolist(), *wanted.state.shards])
                yield wanted

        if thread:
            # Nothing is looked up ahead: a batch that is ready must not wait until the next shard is published.
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
    """The micro-batches of a rank, prepared ahead. It is a context manager that closes itself.

    ::

        with LiveLoader(LiveDataset("catalog", rank=rank, size=size, seq_length=4096)) as loader:
            for batch in loader:
                step(batch)
                if time_to_save:
                    state = loader.state_dict()
                    save(model, state)      # until it is on disk
                    loader.commit(state)    # its shards may be freed now

    A batch is valid until the next one is taken, as with ``BatchLoader``, and pinned if there is a GPU.

    Args:
        dataset: of this rank.
        num_workers: how many processes prepare batches; 0 for a thread of this process, which is enough unless chats
            are tokenised as they are read. With n processes, acknowledgements stay up to n micro-batches behind
            checkpoints, because the slowest process may still read shards that the others are done with.

    Attributes:
        state: where the rank stands after the batches that were taken.
    """

    @checked
    def __init__(self, dataset: LiveDataset, *, num_workers: int = 0) -> None:
        self.dataset, self.num_workers = dataset, num_workers
        self._stop: _Event = torch.multiprocessing.Event() if num_workers else threading.Event()
        weakref.finalize(self, self._stop.set)
        self._batches: Iterator[_Outcome] | None = None
        self.state = dataset.state
        # The states after the last deliveries, one of every process. All processes have come past the first of them.
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
            f"data-parallel rank {state.rank} of {state.size}: catalog {dataset.shards.folder},"
            f" window {state.base.window}, {'shuffled' if state.shuffle else 'as stored'},"
            f" epoch {state.base.epoch + 1} of {dataset.epochs}, {self.num_workers} workers, from row {state.rows}"
        )
        if not self.num_workers:
            return dataset.deliveries(dataset.waiter(self._stop), thread=True)
        return iter(
            DataLoader(
                _InWorkers(dataset, self._stop),
                batch_size=None,
                num_workers=self.num_workers,
                pin_memory=torch.cuda.is_available(),
            )
        )

    def prepare(self) -> None:
        """As ``LiveDataset.prepare``."""
        self.dataset.prepare(self.dataset.waiter(self._stop), lagging=self.num_workers > 0)
        if self._batches is None and not self._closed:
            self.state = self.dataset.state

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Where the rank stands after the batches that were taken, as plain values for a checkpoint."""
        return self.state.to_json()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """As ``LiveDataset.load_state_dict``. SFTIndexError after the first batch."""
        if self._batches is not None or self._closed:
            raise SFTIndexError(
                f"{self.dataset.shards.folder}: batches were taken already; load the state into a new loader"
            )
        self.dataset.load_state_dict(state)
        self.state = self.dataset.state

    def commit(self, state: dict[str, Any] | None = None) -> None:
        """Acknowledge that a checkpoint is on disk, so that the shards that it includes need not be kept.

        One process of each data-parallel rank must call this. Calling it twice does no harm.

        Args:
            state: what ``state_dict`` returned for that checkpoint. None, before the first batch, for where this run
                begins: it will read again what an earlier run of the same name acknowledged beyond that, so those
                shards must be kept. If no run came before, that writes nothing.

        Raises:
            OSError: the acknowledgement could not be written.
        """
        self.prepare()
        dataset = self.dataset
        reached = self.state if state is None else RankState.from_json(state)
        begins_anew = state is None and not reached.rows and not reached.generation
        if begins_anew and not dataset.newest_acks():
            return
        if not dataset.may_acknowledge():
            return
        reached = self.committable(reached)
        write_ack(dataset.acks, dataset.ack(reached))
        dataset.shards.committed()
        logger.info(
            f"rank {reached.rank}: committed epoch {reached.base.epoch + 1}, {reached.items} items,"
            f" {reached.packs_of_items:,} packs of shards that are complete"
        )

    def committable(self, state: RankState) -> RankState:
        """The state that ``commit`` acknowledges: ``state``, or an earlier one that all worker processes are past."""
        slowest = self._passed[0]
        is_before = (slowest.base.epoch, slowest.rows) < (state.base.epoch, state.rows)
        return slowest if self.num_workers and self._batches is not None and is_before else state

    def close(self) -> None:
        """End the thread or the worker processes, even while they wait for a shard. Any thread may call this, twice."""
        self._closed = True
        self._stop.set()
        self._batches = None

    def __enter__(self) -> LiveLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _InWorkers(IterableDataset[_Outcome]):
    """The deliveries of a worker process."""

    def __init__(self, dataset: LiveDataset, stop: _Event) -> None:
        super().__init__()
        self._dataset, self._stop = dataset, stop

    def __iter__(self) -> Iterator[_Outcome]:
        try:
            yield from self._dataset.deliveries(self._dataset.waiter(self._stop))
        except SFTIndexError as error:
            yield error
