"""Worker processes that may die: results come in order, lost work is done again, nothing hangs.

Each worker has a pipe of its own and at most one item, and gets the next when it has answered. So a send never waits
for a reader that is gone, and when a worker dies it is known which item it had. (``ProcessPoolExecutor`` shares one
queue between its workers; before Python 3.12 it can hang for ever when one of them is killed while the queue is full.)

Items that come slowly, from a stream or a growing folder, must not hold back results that are ready: an iterator that
would have to wait for its next item gives ``NOT_YET`` instead.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar, overload

from megatron_sft_idx.errors import SFTIndexError

__all__ = ["NOT_YET", "NotYet", "available_cpus", "map_in_order"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_MAX_ATTEMPTS = 3
# How long to wait for a result before items are asked for again that were not there yet.
_ASK_AGAIN_SECONDS = 0.1
# spawn: forking a process with threads (tokenizers, progress) can deadlock the child.
_PROCESSES = multiprocessing.get_context("spawn")


class NotYet(Enum):
    """The type of ``NOT_YET``."""

    NOT_YET = "there is no item now, there may be one later"


NOT_YET = NotYet.NOT_YET


def available_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


@overload
def map_in_order(
    make_task: Callable[..., Callable[[Item], Result]],
    make_args: tuple[Any, ...],
    items: Iterable[Item],
    *,
    workers: int,
    name_of: Callable[[Item], str],
) -> Generator[Result, None, None]: ...


@overload
def map_in_order(
    make_task: Callable[..., Callable[[Item], Result]],
    make_args: tuple[Any, ...],
    items: Iterable[Item | NotYet],
    *,
    workers: int,
    name_of: Callable[[Item], str],
) -> Generator[Result | NotYet, None, None]: ...


def map_in_order(
    make_task: Callable[..., Callable[[Item], Result]],
    make_args: tuple[Any, ...],
    items: Iterable[Item | NotYet],
    *,
    workers: int,
    name_of: Callable[[Item], str],
) -> Generator[Result | NotYet, None, None]:
    """``make_task(*make_args)(item)`` for every item, in order, computed by worker processes.

    Each worker makes its task once. Only a few items a worker are held at a time, so memory is bounded by them. A
    worker that dies is replaced, and its item done again.

    Args:
        make_task: a function of a module, called in each worker.
        make_args: its arguments; picklable.
        items: picklable. Where they give ``NOT_YET``, so do the results, once all items before it are done: whoever
            takes them decides how long to wait before asking again.
        workers: number of processes; 0 computes in this one.
        name_of: names an item in the error about it.

    Raises:
        SFTIndexError: three workers died over one item; names it.
        Exception: whatever the task raises, when its item's turn comes.
    """
    if workers == 0:
        task = make_task(*make_args)
        for item in items:
            yield NOT_YET if isinstance(item, NotYet) else task(item)
        return
    pool = _Pool[Item, Result](make_task, make_args, workers, name_of)
    try:
        yield from pool.run(iter(items))
    finally:
        pool.stop()


class _Job(Generic[Item, Result]):
    """An item on its way, then its outcome."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.deaths = 0
        self.done = False
        self.error: BaseException | None = None
        self.result: Result

    def finish(self, error: BaseException | None, result: Result) -> None:
        self.done, self.error, self.result = True, error, result


@contextmanager
def _safe_path() -> Iterator[None]:
    """A process that is started meanwhile takes no module from the current folder before it has this one's path.

    Python 3.10 does not know the variable: there a stray ``signal.py`` still breaks the workers.
    """
    before = os.environ.setdefault("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ["PYTHONSAFEPATH"] = before  # empty is as good as unset


class _Worker(Generic[Item, Result]):
    """One process, this end of its pipe, and the job it has."""

    def __init__(self, make_task: Callable[..., Callable[[Item], Result]], make_args: tuple[Any, ...]) -> None:
        self.pipe, other_end = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_work, args=(other_end, make_task, make_args), daemon=True)
        with _safe_path():
            self.process.start()
        # Ours was the second copy of that end: with it closed, the pipe ends when the worker does.
        other_end.close()
        self.job: _Job[Item, Result] | None = None

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Pool(Generic[Item, Result]):
    def __init__(
        self,
        make_task: Callable[..., Callable[[Item], Result]],
        make_args: tuple[Any, ...],
        workers: int,
        name_of: Callable[[Item], str],
    ) -> None:
        self._make = make_task, make_args
        self._name_of = name_of
        self._workers: list[_Worker[Item, Result]] = []
        self._most_held = 2 * workers + 1
        # Jobs in the order of their items, the finished ones too; and those whose worker died.
        self._held: deque[_Job[Item, Result]] = deque()
        self._again: deque[_Job[Item, Result]] = deque()
        for _ in range(workers):
            self._workers.append(_Worker(*self._make))

    def run(self, items: Iterator[Item | NotYet]) -> Iterator[Result | NotYet]:
        while True:
            more_later = self._hand_out(items)
            if not self._held:
                if not more_later:
                    return
                yield NOT_YET
            elif self._held[0].done:
                job = self._held.popleft()
                if job.error is not None:
                    raise job.error
                yield job.result
            else:
                self._receive(_ASK_AGAIN_SECONDS if more_later else None)

    def _hand_out(self, items: Iterator[Item | NotYet]) -> bool:
        """Give every idle worker a job, as long as there are items and not too many are held.

        Returns:
            Whether an item was asked for and is not there yet.
        """
        for worker in list(self._workers):
            if worker.job is not None:
                continue
            if self._again:
                job = self._again.popleft()
            elif len(self._held) < self._most_held and (new := next(items, _NO_MORE)) is not _NO_MORE:
                if isinstance(new, NotYet):
                    return True
                job = _Job[Item, Result](new)  # type: ignore[arg-type]
                self._held.append(job)
            else:
                return False
            worker.job = job
            try:
                worker.pipe.send(job.item)
            except OSError:
                self._replace(worker)
        return False

    def _receive(self, seconds: float | None) -> None:
        """Wait until a worker answers or dies, or so long; take what has come."""
        busy = {worker.pipe: worker for worker in self._workers if worker.job is not None}
        for pipe in wait(list(busy), seconds):
            worker = busy[pipe]  # type: ignore[index]
            assert worker.job is not None
            try:
                worker.job.finish(*worker.pipe.recv())
                worker.job = None
            except (EOFError, OSError):
                self._replace(worker)

    def _replace(self, worker: _Worker[Item, Result]) -> None:
        """A new process in the place of one that died; its job is to be done again."""
        worker.stop()
        job = worker.job
        assert job is not None
        job.deaths += 1
        if job.deaths >= _MAX_ATTEMPTS:
            raise SFTIndexError(
                f"{self._name_of(job.item)}: worker processes died {job.deaths} times while working on this; they"
                " crashed or were killed (out of memory?): try fewer --workers, look at these rows"
            )
        self._again.append(job)
        self._workers[self._workers.index(worker)] = _Worker(*self._make)

    def stop(self) -> None:
        # Work that nobody will ask for is not worth waiting for.
        for worker in self._workers:
            worker.stop()


_NO_MORE = object()


def _work(
    pipe: Connection[Any, Any], make_task: Callable[..., Callable[[Any], Any]], make_args: tuple[Any, ...]
) -> None:
    """What a worker does until its pipe ends, which it also does when the parent is killed."""
    # Ctrl-C reaches the whole process group; the parent is the one to end the work, and to say so.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One process is one thread of work; the libraries below would start one a processor.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    task: Callable[[Any], Any] | None = None
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        answer: tuple[BaseException | None, Any]
        try:
            task = task or make_task(*make_args)
            answer = (None, task(item))
        except (SFTIndexError, OSError) as error:
            answer = (error, None)
        except Exception:
            # A bug: what the parent raises must show where.
            answer = (RuntimeError(f"in a worker process:\n{traceback.format_exc()}"), None)
        try:
            pipe.send(answer)
        except OSError:
            return
