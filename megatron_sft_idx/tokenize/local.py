"""Tasks on this machine: a pool of processes that may die, in which lost work is done again and nothing hangs.

Each worker is an executor of its own with one process, so that when it dies it is known over which item it did.
Results come in the order of the items. Items that come slowly, from a stream or a growing folder, must not hold back
results that are ready: an iterator that would have to wait for its next item gives ``NOT_YET`` instead.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection
from types import ModuleType, TracebackType
from typing import Any, TypeVar

from megatron_sft_idx.errors import SFTIndexError

Shared = TypeVar("Shared")
Item = TypeVar("Item")

_MAX_ATTEMPTS = 3
# Items at a worker, so that none waits for the parent; and items a worker that are held, results too.
_AT_ONCE, _HELD = 2, 3
# How long to wait for a result before items are asked for again that were not there yet.
_ASK_AGAIN_SECONDS = 0.1
# spawn: forking a process with threads (tokenizers, progress) can deadlock the child.
_PROCESSES = multiprocessing.get_context("spawn")


class NotYet(Enum):
    """The type of ``NOT_YET``."""

    NOT_YET = "there is no item now, there may be one later"


NOT_YET = NotYet.NOT_YET


class WorkersDiedError(SFTIndexError):
    """Whoever worked on an item died, more than once; what else is done is of use."""


def available_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(slots=True, eq=False)
class _Task:
    """An item on its way, then its outcome."""

    item: Any
    deaths: int = 0
    future: Future[Any] | None = None
    done: bool = False


@contextlib.contextmanager
def _by_itself() -> Iterator[None]:
    """A process that is started meanwhile runs no code but ours.

    It takes no module from the current folder before it has this one's path; Python 3.10 does not know the variable:
    there a stray ``signal.py`` still breaks the workers. And it does not run the program's main module again, which
    may be a script that begins this very work; tasks are functions of this package.
    """
    before, main = os.environ.setdefault("PYTHONSAFEPATH", ""), sys.modules["__main__"]
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ["PYTHONSAFEPATH"] = before  # empty is as good as unset


class _Worker:
    """One process, and the jobs that it has, the first of them at work.

    The process ends when this end of a pipe does, which it also does when this process is killed.
    """

    def __init__(self) -> None:
        self._alive, other_end = _PROCESSES.Pipe()
        with _by_itself():  # an executor starts multiprocessing's tracker of resources too
            self.executor = ProcessPoolExecutor(1, _PROCESSES, _begin, (other_end,))
            self.executor.submit(int)  # imports take a while, and may do so now
        other_end.close()
        self.jobs: deque[_Task] = deque()

    def submit(self, job: _Task, task: Callable[..., Any], shared: bytes) -> None:
        try:
            job.future = self.executor.submit(_work, task, shared, job.item)
        except BrokenProcessPool as error:
            job.future = Future()
            job.future.set_exception(error)
        self.jobs.append(job)

    def end(self) -> None:
        """Kill it: work that nobody will ask for is not worth waiting for."""
        self._alive.close()
        if sys.version_info < (3, 11):
            # There an executor waits for ever to hand a large item to a process that is dead.
            self.executor._call_queue._reader.close()  # type: ignore[unreachable]


class Local:
    """A pool of processes; a context manager that ends them.

    Args:
        workers: how many; 0 computes in this process.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool = [_Worker() for _ in range(workers)]

    def __enter__(self) -> Local:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._pool:
            worker.end()
        for worker in self._pool:
            worker.executor.shutdown(cancel_futures=True)

    def map_in_order(
        self,
        task: Callable[[Shared, Item], Any],
        shared: Shared,
        items: Iterable[Item | NotYet],
        *,
        name_of: Callable[[Item], str],
        done: Callable[[Any], None] = lambda result: None,
    ) -> Generator[Any, None, None]:
        """``task(shared, item)`` for every item, in order; only a few items more than there are workers are held.

        One call is taken to its end before the next one begins.

        Args:
            task: a function of a module; may be called more than once for an item.
            shared: its first argument; picklable, the same object for all items of a process.
            items: picklable. Where they give ``NOT_YET``, so do the results, once all items before it are done:
                whoever takes them decides how long to wait before asking again.
            name_of: names an item in the error about it.
            done: called with each result as soon as it is there, in no order.

        Raises:
            WorkersDiedError: three workers died over one item; names it.
            Exception: whatever the task raises, when its item's turn comes.
        """
        if not self.workers:
            for item in items:
                result = NOT_YET if isinstance(item, NotYet) else task(shared, item)
                if result is not NOT_YET:
                    done(result)
                yield result
            return
        pickled, left = pickle.dumps(shared), iter(items)
        # In the order of their items, the finished ones too; and those that were lost.
        held: deque[_Task] = deque()
        again: deque[_Task] = deque()

        def next_job() -> _Task | NotYet | None:
            if again:
                return again.popleft()
            if len(held) == _HELD * len(self._pool) or (item := next(left, None)) is None:
                return None
            if isinstance(item, NotYet):
                return item
            held.append(_Task(item))
            return held[-1]

        while True:
            job: _Task | NotYet | None = None
            # The worker that has the fewest gets another one, unless all have enough.
            while len((worker := min(self._pool, key=lambda one: len(one.jobs))).jobs) < _AT_ONCE:
                if not isinstance(job := next_job(), _Task):
                    break
                worker.submit(job, task, pickled)
            if not held:
                if job is None:
                    return
                yield NOT_YET
            elif held[0].done:
                future = held.popleft().future
                assert future is not None
                yield future.result()
            else:
                again += self._receive(_ASK_AGAIN_SECONDS if isinstance(job, NotYet) else None, name_of, done)

    def _receive(
        self, seconds: float | None, name_of: Callable[[Any], str], done: Callable[[Any], None]
    ) -> list[_Task]:
        """Wait until a worker answers or dies, or so long; take what has come, and give back the jobs of dead ones."""
        lost: list[_Task] = []
        wait([job.future for worker in self._pool for job in worker.jobs if job.future], seconds, FIRST_COMPLETED)
        for number, worker in enumerate(self._pool):
            while worker.jobs and (future := worker.jobs[0].future) is not None and future.done():
                job = worker.jobs.popleft()
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    worker.end()
                    job.deaths += 1
                    if job.deaths >= _MAX_ATTEMPTS:
                        raise WorkersDiedError(
                            f"{name_of(job.item)}: worker processes died {job.deaths} times while working on this; they"
                            " crashed or were killed (out of memory?): try fewer --workers, look at these rows"
                        )
                    lost += [job, *worker.jobs]
                    self._pool[number] = _Worker()
                    break
                job.done, job.item = True, None  # which may be large
                if error is None:
                    done(future.result())
        return lost


# ---- in a worker ----

_shared: tuple[bytes, Any] = (b"", None)


def _begin(parent: Connection[Any, Any]) -> None:
    # Ctrl-C reaches the whole process group; the parent is the one to end the work, and to say so.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One process is one thread of work; the libraries below would start one a processor.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with, args=(parent,), name="end with the parent", daemon=True).start()


def _end_with(parent: Connection[Any, Any]) -> None:
    with contextlib.suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)


def _work(task: Callable[[Any, Any], Any], shared: bytes, item: Any) -> Any:
    global _shared  # noqa: PLW0603
    try:
        if _shared[0] != shared:
            _shared = shared, pickle.loads(shared)
        return task(_shared[1], item)
    except (SFTIndexError, OSError):
        raise
    except Exception:
        # A bug: what the parent raises must show where.
        raise RuntimeError(f"in a worker process:\n{traceback.format_exc()}") from None
