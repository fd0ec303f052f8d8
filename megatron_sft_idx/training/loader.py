"""``BatchLoader``: a thread that prepares batches ahead of the trainer.

This is the default loader. Assembling a batch takes less time than passing one over from another process. One thread in
the trainer's process therefore keeps a few batches ready and asks the kernel for the file pages of the next ones.

    loader = BatchLoader(rows.assembler, rows.micro_batches(batch_sampler))
    for batch in loader:
        step(batch["tokens"], ...)
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_sft_idx.lines import Shown, shown_by_fields
from megatron_sft_idx.training.batch import Batch, BatchAssembler, BatchLayout, Tensors
from megatron_sft_idx.training.sources import Segments


@shown_by_fields
class Wanted(NamedTuple):
    """The rows of one micro-batch.

    Attributes:
        packs: int64 [rows], numbers of packs in the assembler's source; [rows, 2] for live shards, where a pack is
            given by its shard and its number in the shard.
        masked: bool [rows], True for rows that only fill up the batch and have zero loss. None if there are none.
        state: the state of the order after this micro-batch, in a form that the order chooses.
    """

    packs: NDArray[np.int64] | Sequence[int]
    masked: NDArray[np.bool_] | None = None
    state: Any = None


class BatchLoader(Shown):
    """Micro-batches, prepared ahead by a thread of this process.

    Batches are views of reused buffers: **a batch is valid until** ``keep`` **more have been taken**, or permanently
    with ``copy=True``. The default is enough for a trainer that copies each batch to its device, or has finished with
    it before it asks for the next one. A pinned buffer is not overwritten before the copies that are queued on the
    current CUDA stream are done.

    Each ``iter(loader)`` starts at the beginning of ``batches`` and has its own thread. The thread ends when the
    batches end, on ``close``, or when the iterator is collected. ``next`` raises an error of the thread after the
    batches that were made before it. Threads do not survive a fork: iterate in the process that trains.

    Args:
        assembler: makes the batches.
        batches: the packs of each micro-batch, or ``Wanted`` for more detail; iterated in the thread.
        prefetch: number of batches to keep ready.
        ahead: number of further batches whose pages the kernel is asked to read, or that are fetched from remote
            shards; 0 for none, if all data is in memory.
        keep: number of batches that are valid at the same time.
        copy: return new tensors.
        pin_memory: pin the buffers, so that copies to a GPU are asynchronous. Without a GPU, nothing is pinned.

    Example:
        >>> from megatron_sft_idx.shard.shard_set import ShardSet
        >>> from megatron_sft_idx.training import BatchAssembler
        >>> from megatron_sft_idx.training.sources import StoredPacks
        >>> assembler = BatchAssembler(StoredPacks(ShardSet.open("data/chats")), seq_length=16)
        >>> for batch in BatchLoader(assembler, [[0, 3], [6, 1], [4]]):
        ...     print(list(batch["tokens"].shape), int(batch["loss_mask"].sum()), "trained tokens")
        [2, 16] 3 trained tokens
        [2, 16] 4 trained tokens
        [1, 16] 2 trained tokens
    """

    def __init__(
        self,
        assembler: BatchAssembler,
        batches: Iterable[Sequence[int] | Wanted],
        *,
        prefetch: int = 2,
        ahead: int = 4,
        keep: int = 1,
        copy: bool = False,
        pin_memory: bool | None = None,
    ) -> None:
        if min(prefetch, keep) < 1 or ahead < 0:
            raise ValueError(
                f"prefetch {prefetch}, keep {keep}, ahead {ahead}: expected prefetch and keep of at least 1, ahead"
                " of at least 0"
            )
        self.assembler, self.batches = assembler, batches
        self.prefetch, self.ahead, self.keep, self.copy = prefetch, ahead, keep, copy
        self.pinned = pin_memory is not False and torch.cuda.is_available()

    def _shown(self) -> str:
        return f"{self.assembler!r}, prefetch {self.prefetch}, ahead {self.ahead}, keep {self.keep}"

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self)


class BatchIterator(Shown, Iterator[Tensors]):
    """One pass over the batches of a ``BatchLoader``; also a context manager that closes it.

    Attributes:
        state: the state of the order after the batch that was taken last; None before the first one.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self._keep, self._copy = loader.keep, loader.copy
        self._pid = os.getpid()
        self._taken: deque[_Slot] = deque()
        self.state: Any = None
        self._line = _Line(SimpleQueue(), SimpleQueue(), threading.Event())
        for _ in range(loader.prefetch + loader.keep):
            self._line.free.put(_Slot(loader.pinned))
        # The thread refers to the line and the loader but not to this iterator, so that collecting it ends the thread.
        thread = threading.Thread(target=_produce, args=(loader, self._line), name="batches", daemon=True)
        self._close = weakref.finalize(self, _stop, self._line, thread)
        thread.start()

    def _shown(self) -> str:
        return f"{'open' if self._close.alive else 'closed'}, {len(self._taken)} batches handed out"

    def __next__(self) -> Tensors:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this iterator was made before this process was forked; make an iterator in each process"
            )
        if not self._close.alive:
            raise StopIteration
        slot = self._line.ready.get()
        if not isinstance(slot, _Slot):
            self._line.ready.put(None)  # for other threads that wait here
            self.close()
            raise slot or StopIteration
        self._taken.append(slot)
        if len(self._taken) > self._keep:
            old = self._taken.popleft()
            old.given_back()
            self._line.free.put(old)
        self.state = slot.state
        return {name: _cloned(value) for name, value in slot.tensors.items()} if self._copy else slot.tensors

    def close(self) -> None:
        """End the thread and all waiting calls of ``next``. Taken batches stay valid. Can be called twice."""
        self._close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Slot:
    """A reused buffer and the batch in it."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer: Batch | None = None
        self._copied: torch.cuda.Event | None = None
        self.tensors: Tensors = {}
        self.state: Any = None

    def buffer(self, layout: BatchLayout) -> Batch:
        """Return the buffer for a batch, after running copies to a GPU are done; replace it if it is too small."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._buffer is None or self._buffer.layout.rows < layout.rows:
            self._buffer = Batch(layout, pin_memory=self._pinned)
        return self._buffer

    def given_back(self) -> None:
        """Record that the trainer has finished with the batch; copies to a GPU may still be running."""
        if self._pinned:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()


class _Line(NamedTuple):
    """The queues by which slots circulate between the thread and the trainer.

    ``ready`` ends with None, or with the error that ended the thread. None in ``free`` stops the thread.
    """

    free: SimpleQueue[_Slot | None]
    ready: SimpleQueue[_Slot | BaseException | None]
    stopped: threading.Event


def _stop(line: _Line, thread: threading.Thread) -> None:
    """End the thread of an iterator that is closed or collected."""
    line.stopped.set()
    line.free.put(None)  # wakes the thread if it waits for a slot
    line.ready.put(None)  # wakes every caller that waits for a batch
    # The iterator may be collected in the thread itself, which cannot wait for its own end. While the thread waits for
    # the next of ``batches``, it cannot be woken. It ends when that batch comes.
    if thread is not threading.current_thread():
        thread.join(5.0)


def _produce(loader: BatchLoader, line: _Line) -> None:
    """Fill slots with batches until the batches end or the iterator is closed; runs in the thread."""
    assembler = loader.assembler
    try:
        for wanted, segments in _looking_ahead(loader):
            slot = line.free.get()
            if line.stopped.is_set() or slot is None:
                return
            layout = assembler.layout(len(segments.offsets) - 1)
            slot.tensors = assembler.fill(segments, slot.buffer(layout), wanted.masked)
            if loader.pinned and assembler.media is not None:
                slot.tensors = {name: _pinned(value) for name, value in slot.tensors.items()}
            slot.state = wanted.state
            line.ready.put(slot)
        line.ready.put(None)
    except BaseException as error:
        line.ready.put(error)
    finally:
        assembler.forget_needs()


def _pinned(value: Any) -> Any:
    """Return a tensor in pinned memory; other values are returned unchanged."""
    return value.pin_memory() if isinstance(value, torch.Tensor) and not value.is_pinned() else value


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _looking_ahead(loader: BatchLoader) -> Iterator[tuple[Wanted, Segments]]:
    """Yield each micro-batch with its segments, and request its data ``ahead`` micro-batches before."""
    waiting: deque[tuple[Wanted, Segments]] = deque()
    for batch in loader.batches:
        wanted = batch if isinstance(batch, Wanted) else Wanted(batch)
        segments = loader.assembler.plan(wanted.packs)
        if loader.ahead:
            loader.assembler.will_need(segments)
        waiting.append((wanted, segments))
        if len(waiting) > loader.ahead:
            yield waiting.popleft()
    yield from waiting
