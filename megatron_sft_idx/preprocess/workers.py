"""Worker processes that may die: results come in order, lost work is done again, nothing hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from megatron_sft_idx.errors import SFTIndexError

__all__ = ["available_cpus", "map_in_order"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_MAX_ATTEMPTS = 3
_task: Callable[[Any], Any] | None = None


def available_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def map_in_order(
    make_task: Callable[..., Callable[[Item], Result]],
    make_args: tuple[Any, ...],
    items: Iterable[Item],
    *,
    workers: int,
    name_of: Callable[[Item], str],
) -> Iterator[Result]:
    """``make_task(*make_args)(item)`` for every item, in order, computed by worker processes.

    Each worker makes its task once. Only a few items a worker are in flight, so memory is bounded by them. When a
    worker is killed, all are replaced and what was in flight is done again.

    Args:
        make_task: a function of a module, called in each worker.
        make_args: its arguments; picklable.
        items: picklable.
        workers: number of processes; 0 computes in this one.
        name_of: names an item in the error about it.

    Raises:
        SFTIndexError: workers died three times while one item was in flight; names it.
        Exception: whatever the task raises, when its item's turn comes.
    """
    if workers == 0:
        yield from map(make_task(*make_args), items)
        return
    pool = _Pool[Item, Result](make_task, make_args, workers, name_of)
    try:
        yield from pool.run(iter(items))
    finally:
        pool.stop()


class _Pool(Generic[Item, Result]):
    def __init__(
        self,
        make_task: Callable[..., Callable[[Item], Result]],
        make_args: tuple[Any, ...],
        workers: int,
        name_of: Callable[[Item], str],
    ) -> None:
        self._make = make_task, make_args
        self._workers = workers
        self._name_of = name_of
        self._pending: deque[_Pending[Item, Result]] = deque()
        self._executor = self._start()

    def _start(self) -> ProcessPoolExecutor:
        # spawn: forking a process with threads (tokenizers, progress) can deadlock the child.
        return ProcessPoolExecutor(
            self._workers, multiprocessing.get_context("spawn"), initializer=_set_up, initargs=self._make
        )

    def run(self, items: Iterator[Item]) -> Iterator[Result]:
        exhausted = False
        while True:
            while not exhausted and len(self._pending) < 2 * self._workers + 1:
                try:
                    pending = _Pending[Item, Result](next(items))
                except StopIteration:
                    exhausted = True
                else:
                    self._pending.append(pending)
                    self._submit(pending)
            if not self._pending:
                return
            try:
                result = self._pending[0].future.result()
            except BrokenProcessPool:
                self._recover()
                continue
            self._pending.popleft()
            yield result

    def _submit(self, pending: _Pending[Item, Result]) -> None:
        try:
            pending.future = self._executor.submit(_run, pending.item)
        except BrokenProcessPool as error:
            # Found broken when handing out work: the same as finding it when waiting for the result.
            pending.future = Future()
            pending.future.set_exception(error)

    def _recover(self) -> None:
        self.stop()
        self._executor = self._start()
        for pending in self._pending:
            future = pending.future
            if future.done() and not future.cancelled() and future.exception() is None:
                continue
            pending.attempts += 1
            if pending.attempts >= _MAX_ATTEMPTS:
                raise SFTIndexError(
                    f"{self._name_of(pending.item)}: worker processes died {pending.attempts} times while working on"
                    " this; they crashed or were killed (out of memory?): try fewer --workers, look at these rows"
                )
            self._submit(pending)

    def stop(self) -> None:
        # Work that nobody will ask for is not worth waiting for.
        processes = list((getattr(self._executor, "_processes", None) or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


class _Pending(Generic[Item, Result]):
    future: Future[Result]

    def __init__(self, item: Item) -> None:
        self.item = item
        self.attempts = 0


def _set_up(make_task: Callable[..., Callable[[Any], Any]], make_args: tuple[Any, ...]) -> None:
    global _task  # noqa: PLW0603 (the one way to keep something between the calls in a worker)
    # Ctrl-C reaches the whole process group; the parent is the one to end the work, and to say so.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # One process is one thread of work; the libraries below would start one a processor.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _task = make_task(*make_args)


def _end_with_parent() -> None:
    """Workers wait on a queue that they hold open themselves: without this they outlive a killed parent."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(item: Any) -> Any:
    assert _task is not None
    return _task(item)
