"""``LiveLoader``: what a trainer iterates over, saves the state of, and commits checkpoints to."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.streaming.dataset import Event, LiveDataset
from megatron_sft_idx.streaming.live import Stopped
from megatron_sft_idx.streaming.state import RankState
from megatron_sft_idx.training import BatchLoader, Tensors

__all__ = ["LiveLoader"]

logger = logging.getLogger("megatron_sft_idx.streaming")
# The last one, which comes of every process, is of no batch: where the rank stands at the end of the data.
_Delivery: TypeAlias = tuple[Tensors | None, RankState]
# What a worker process hands over: an error as a value, as torch would make a RuntimeError of one that is raised.
_Outcome: TypeAlias = _Delivery | SFTIndexError


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

    A batch is valid until ``keep`` more have been taken, as with ``BatchLoader``.

    Args:
        dataset: of this rank.
        num_workers: processes that prepare batches; 0 for a thread of this one, which is enough unless chats are
            tokenised as they are read. With processes, what is acknowledged stays as many micro-batches behind the
            checkpoint, as the slowest of them may still look at what the others have delivered.
        prefetch: batches that are kept ready, for each worker.
        keep: batches that stay valid beside each other; of the thread's.
        copy: the thread hands out fresh tensors.
        pin_memory: tensors that a GPU copies from without waiting; None for where there is a GPU.
        start: how worker processes are started, ``fork`` or ``spawn``; None for torch's default.
    """

    def __init__(
        self,
        dataset: LiveDataset,
        *,
        num_workers: int = 0,
        prefetch: int = 2,
        keep: int = 1,
        copy: bool = False,
        pin_memory: bool | None = None,
        start: str | None = None,
    ) -> None:
        self.dataset = dataset
        self.num_workers = num_workers
        self._buffers: dict[str, Any] = {"prefetch": prefetch, "keep": keep, "copy": copy}
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._start = start
        self._stop: Event = torch.multiprocessing.get_context(start).Event() if num_workers else threading.Event()
        weakref.finalize(self, self._stop.set)
        self._batches: Iterator[_Outcome] | None = None
        self._state = dataset.state
        # After each of the last deliveries, one of every process: which all of them have walked past the first.
        self._passed = deque([self._state], maxlen=max(num_workers, 1))
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
            tensors, self._state = delivery
            if tensors is None:
                raise StopIteration
        except (Stopped, StopIteration):
            self.close()
            raise StopIteration from None
        except BaseException:
            self.close()
            raise
        self._passed.append(self._state)
        return tensors

    def _begin(self) -> Iterator[_Outcome]:
        dataset = self.dataset
        self._prepare()
        dataset.may_acknowledge()
        state = self._state
        self._passed.extend([state] * max(self.num_workers, 1))
        logger.info(
            "data-parallel rank %d of %d: catalog %s, window %d, %s, epoch %d of %d, %d workers, from row %d",
            *(state.rank, state.size, dataset.shards.folder, state.base.window),
            *("shuffled" if state.shuffle else "as stored", state.base.epoch + 1, dataset.epochs),
            *(self.num_workers, state.rows),
        )
        if not self.num_workers:
            return _of_thread(dataset, self._stop, pin_memory=self._pin_memory, **self._buffers)
        made: DataLoader[_Outcome] = DataLoader(
            _InWorkers(dataset, self._stop),
            batch_size=None,
            num_workers=self.num_workers,
            prefetch_factor=self._buffers["prefetch"],
            collate_fn=_as_it_is,
            pin_memory=self._pin_memory,
            multiprocessing_context=self._start,
        )
        return iter(made)

    def _prepare(self) -> None:
        self.dataset.prepare(self.dataset.waiter(self._stop), lagging=self.num_workers > 0)
        if self._batches is None and not self._closed:
            self._state = self.dataset.state

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Where the rank stands after the batches that were taken; plain values for a checkpoint."""
        return self._state.to_json()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from a checkpoint; before the first batch is taken. See ``LiveDataset.load_state_dict``."""
        if self._batches is not None or self._closed:
            raise SFTIndexError(
                f"{self.dataset.shards.folder}: batches were taken already; load the state into a new loader"
            )
        self.dataset.load_state_dict(state)
        self._state = self.dataset.state

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
        self._prepare()
        found = self._state if state is None else RankState.from_json(state)
        begins = state is None and not found.rows and not found.generation
        if (begins and not self.dataset.acks.exist()) or not self.dataset.may_acknowledge():
            return
        found = self._passed_by_all(found)
        self.dataset.acks.write(found)
        self.dataset.shards.committed()
        logger.info(
            "rank %d: committed epoch %d, %d items, %s packs of shards that are complete",
            *(found.rank, found.base.epoch + 1, found.items, f"{found.packs_of_items:,}"),
        )

    def _passed_by_all(self, state: RankState) -> RankState:
        """A state, or an earlier one behind which no worker process still has to look at shards."""
        slowest = self._passed[0]
        if self.num_workers and self._batches is not None and slowest.is_before(state):
            return slowest
        return state

    def close(self) -> None:
        """End the thread or the workers, also while they wait for a shard; may be called twice and by any thread."""
        self._closed = True
        self._stop.set()
        self._batches = None

    def __enter__(self) -> LiveLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _of_thread(dataset: LiveDataset, stop: Event, **options: Any) -> Iterator[_Delivery]:
    """Deliveries of a thread of this process."""
    assembler, walk, batches = dataset.open(dataset.waiter(stop))
    # No looking ahead: a batch that is ready must not be held back until the next shard is published.
    with iter(BatchLoader(assembler, batches, ahead=0, **options)) as taken:
        for tensors in taken:
            yield tensors, taken.state
    yield None, walk.state


class _InWorkers(IterableDataset[_Outcome]):
    """A worker process's share of the deliveries."""

    def __init__(self, dataset: LiveDataset, stop: Event) -> None:
        super().__init__()
        self._dataset, self._stop = dataset, stop

    def __iter__(self) -> Iterator[_Outcome]:
        try:
            yield from self._dataset.deliveries(self._dataset.waiter(self._stop))
        except SFTIndexError as error:
            yield error


def _as_it_is(delivery: Any) -> Any:
    """The ``collate_fn``: batches come whole."""
    return delivery
