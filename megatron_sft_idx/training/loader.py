"""Batches on their way to the trainer: a thread that prepares them ahead.

``BatchLoader`` is the default. Assembling a batch takes less time than handing one over from another process, so one
thread beside the trainer keeps a few batches ready and asks the kernel for the file pages of the next ones.

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
        packs: int64 [rows], of the assembler's source; [rows, 2] where that names a pack by its shard and its number
            there, as live shards do.
        masked: bool [rows], True for rows that only fill up the batch, whose loss is zeroed. None where there are none.
        state: where the order stands behind this micro-batch, in a form that the order chooses.
    """

    packs: NDArray[np.int64] | Sequence[int]
    masked: NDArray[np.bool_] | None = None
    state: Any = None


class BatchLoader(Shown):
    """Micro-batches, prepared ahead by a thread of this process.

    Batches lie in buffers that are used again: **a batch is valid until** ``keep`` **more have been taken**, or for
    good with ``copy=True``. A trainer that copies each batch to its device, or is done with it before it asks for the
    next, needs no more than the default. Where batches are pinned, a buffer is not written again before the copies
    that the current CUDA stream was given are done.

    Each ``iter(loader)`` starts at the head of ``batches`` with a thread of its own, which ends with the batches, with
    ``close``, or with the iterator itself. What goes wrong in the thread is raised by ``next``, after the batches that
    were made before. Threads do not survive a fork: iterate in the process that trains.

    Args:
        assembler: makes the batches.
        batches: the packs of each micro-batch, or ``Wanted``, which says more; iterated in the thread.
        prefetch: batches that are kept ready.
        ahead: further batches whose pages the kernel is asked for, or that are fetched where shards are remote; 0 for
            none, where all data is in memory.
        keep: batches that stay valid beside each other.
        copy: hand out fresh tensors.
        pin_memory: buffers that a GPU copies from without waiting; None for where there is a GPU.
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
            raise ValueError(f"prefetch {prefetch} and keep {keep} are at least 1, ahead {ahead} at least 0")
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
    """One pass over the batches of a ``BatchLoader``; also a context manager that closes.

    Attributes:
        state: of the order, behind the batch that was taken last; None before the first one.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self._keep, self._copy = loader.keep, loader.copy
        self._pid = os.getpid()
        self._taken: deque[_Slot] = deque()
        self.state: Any = None
        self._line = _Line(SimpleQueue(), SimpleQueue(), threading.Event())
        for _ in range(loader.prefetch + loader.keep):
            self._line.free.put(_Slot(loader.pinned))
        # The thread knows the line and the loader, not this iterator, which can thus be collected and end it.
        thread = threading.Thread(target=_produce, args=(loader, self._line), name="batches", daemon=True)
        self._close = weakref.finalize(self, _stop, self._line, thread)
        thread.start()

    def _shown(self) -> str:
        return f"{'open' if self._close.alive else 'closed'}, {len(self._taken)} batches handed out"

    def __next__(self) -> Tensors:
        if os.getpid() != self._pid:
            raise RuntimeError("this iterator belongs to the process it was made in, of which this one is a fork")
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
        """End the thread, and the waiting of others in ``next``; what was taken stays valid. May be called twice."""
        self._close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Slot:
    """A buffer on its way round, and the batch in it."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer: Batch | None = None
        self._copied: torch.cuda.Event | None = None
        self.tensors: Tensors = {}
        self.state: Any = None

    def buffer(self, layout: BatchLayout) -> Batch:
        """The buffer for a batch, made anew where it is too small; waits for copies to a GPU that are under way."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._buffer is None or self._buffer.layout.rows < layout.rows:
            self._buffer = Batch(layout, pin_memory=self._pinned)
        return self._buffer

    def given_back(self) -> None:
        """Note that the trainer has done with the batch; copies to a GPU may still be under way."""
        if self._pinned:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()


class _Line(NamedTuple):
    """Slots that go round between the thread and the trainer.

    ``ready`` ends with None, or with the error that ended the thread; None in ``free`` means that it is to end.
    """

    free: SimpleQueue[_Slot | None]
    ready: SimpleQueue[_Slot | BaseException | None]
    stopped: threading.Event


def _stop(line: _Line, thread: threading.Thread) -> None:
    """End the thread of an iterator that is closed or collected."""
    line.stopped.set()
    line.free.put(None)  # wakes the thread where it waits for a slot
    line.ready.put(None)  # wakes whoever waits for a batch
    # The iterator may be collected in the thread itself, which cannot wait for its own end. While it waits for more of
    # ``batches`` the thread cannot be woken: it ends by itself when they come.
    if thread is not threading.current_thread():
        thread.join(5.0)


def _produce(loader: BatchLoader, line: _Line) -> None:
    """Fill slots with batches until these end, or the iterator is closed; run in the thread."""
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
    """A tensor in memory that a GPU copies from without waiting; what is no tensor stays as it is."""
    return value.pin_memory() if isinstance(value, torch.Tensor) and not value.is_pinned() else value


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _looking_ahead(loader: BatchLoader) -> Iterator[tuple[Wanted, Segments]]:
    """Each micro-batch and where its sequences lie; its data are asked for ``ahead`` micro-batches before it comes."""
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
