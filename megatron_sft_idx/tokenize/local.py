"""A pool of worker processes on this machine, with one task per item, that survives the death of workers.

A worker that crashed or was killed is replaced, and its tasks are repeated, so a task may run more than once. Each
worker is an executor with one process, and that process notifies the pool before it begins a task. So the pool knows at
which item a worker died, or that it had not begun any.

Results are in the order of the items. Items may arrive slowly, from a stream or a growing folder, and finished results
must not wait for them: if the iterator of the items would have to wait, it returns ``NOT_YET`` instead.
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
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, TypeVar

from megatron_sft_idx.errors import SFTIndexError

Shared = TypeVar("Shared")
Item = TypeVar("Item")

_MAX_DEATHS = 3
# Number of tasks queued at one worker, so that it need not wait for the next one; and number of tasks per worker whose
# item or result the pool holds.
_TASKS_AT_WORKER, _HELD_PER_WORKER = 2, 3
# How long to wait for a result before requesting an item again that was not available yet.
_ASK_AGAIN_SECONDS = 0.1
# spawn: forking a process with threads (tokenizers, progress) can deadlock the child.
_PROCESSES = multiprocessing.get_context("spawn")


class NotYet(Enum):
    """The type of ``NOT_YET``."""

    NOT_YET = "there is no item now, there may be one later"


NOT_YET = NotYet.NOT_YET


class WorkersDiedError(SFTIndexError):
    """Worker processes died repeatedly, at one item or before beginning any. Finished parts can be used."""


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(slots=True, eq=False)
class _Task:
    """One call of the function.

    Attributes:
        item: its argument; None after the outcome is known, because items may be large.
        deaths: number of workers that died at it.
        outcome: its result or error; None until it is finished.
    """

    item: Any
    deaths: int = 0
    outcome: Future[Any] | None = None


@contextlib.contextmanager
def _isolated_start() -> Iterator[None]:
    """Make processes that start in this context import neither stray modules nor the main module, and hold Ctrl-C back.

    The main module may be a script that starts this same work. Python 3.10 does not support the variable: there, a
    stray ``signal.py`` in the current folder still breaks workers. Ctrl-C also reaches workers. Until a worker ignores
    the signal (``_start``), the signal is blocked, so that no import ends in a traceback.
    """
    safe_path, main = os.environ.setdefault("PYTHONSAFEPATH", ""), sys.modules["__main__"]
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.modules["__main__"] = ModuleType("__main__")
    resource_tracker.ensure_running()  # it unblocks the signal when it starts
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sys.modules["__main__"] = main
        os.environ["PYTHONSAFEPATH"] = safe_path  # an empty value is the same as none


class _Worker:
    """One process, and its tasks with their futures, in the order of execution.

    Pool and process share a pipe. The process writes to it before each task, and ends when the pool's end is closed,
    which also happens when the pool's process is killed.

    Args:
        idle_deaths: number of previous workers in its place that died, one after another, before beginning a task.
    """

    def __init__(self, idle_deaths: int = 0) -> None:
        self.idle_deaths = idle_deaths
        self.tasks: deque[tuple[_Task, Future[Any]]] = deque()
        self._pipe, other_end = _PROCESSES.Pipe()
        with _isolated_start():
            self.executor = ProcessPoolExecutor(1, _PROCESSES, _start, (other_end,))
            self.executor.submit(int)  # starts the process, whose imports take a while
        (self._process,) = self.executor._processes.values()
        other_end.close()

    def submit(self, task: _Task, function: Callable[..., Any], shared: bytes) -> None:
        try:
            future = self.executor.submit(_work, function, shared, task.item)
        except BrokenProcessPool as error:
            future = Future()
            future.set_exception(error)
        self.tasks.append((task, future))

    def take_begun(self) -> bool:
        """Take the process's notification about the beginning of a task, once per task. False if there is none."""
        try:
            return self._pipe.poll() and bool(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return False

    def end(self) -> None:
        """Kill the process, whatever it is doing. A stopped or busy process ignores everything else."""
        self._process.kill()
        self._pipe.close()
        if sys.version_info < (3, 11):
            # On that version, an executor would wait forever to pass a large item to a dead process.
            self.executor._call_queue._reader.close()  # type: ignore[unreachable]


class Local(contextlib.AbstractContextManager["Local"]):
    """A pool of processes; a context manager that ends them.

    Args:
        workers: number of workers; 0 computes in this process.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: list[_Worker] = []
        try:
            while len(self._pool) < workers:
                self._pool.append(_Worker())
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        for worker in self._pool:
            worker.end()
        for worker in self._pool:
            worker.executor.shutdown(cancel_futures=True)

    def map_in_order(
        self,
        function: Callable[[Shared, Item], Any],
        shared: Shared,
        items: Iterable[Item | NotYet],
        *,
        name_of: Callable[[Item], str],
        on_result: Callable[[Any], None] = lambda result: None,
    ) -> Generator[Any, None, None]:
        """Return ``function(shared, item)`` for every item, in order.

        At most three items per worker are held at a time.

        The caller must take all results of one call before the next call. After an error, or if the caller closes the
        generator early, all processes have ended, so no task continues to write files.

        Args:
            function: importable from a module; may be called more than once for an item.
            shared: its first argument; picklable, the same object for all items of a process.
            items: picklable. If they yield ``NOT_YET``, so do the results, after all previous items are finished: the
                caller decides how long to wait before requesting the next result.
            name_of: returns the name of an item for errors.
            on_result: called with each result as soon as it is available, in any order.

        Raises:
            WorkersDiedError: three workers died at one item, whose name it has; or three in a row before beginning any.
            Exception: any error of the function, when its item's turn comes.
        """
        if not self.workers:
            for item in items:
                result = NOT_YET if isinstance(item, NotYet) else function(shared, item)
                if result is not NOT_YET:
                    on_result(result)
                yield result
            return
        try:
            yield from self._map_at_workers(function, shared, items, name_of, on_result)
        except BaseException:
            self.__exit__()
            raise

    def _map_at_workers(
        self,
        function: Callable[[Shared, Item], Any],
        shared: Shared,
        items: Iterable[Item | NotYet],
        name_of: Callable[[Item], str],
        on_result: Callable[[Any], None],
    ) -> Generator[Any, None, None]:
        """Do the work of ``map_in_order`` if there are workers."""
        pickled_shared, unread_items = pickle.dumps(shared), iter(items)
        # Tasks whose results were not taken yet, in the order of their items; and the tasks of dead workers.
        held: deque[_Task] = deque()
        lost: deque[_Task] = deque()

        def next_task() -> _Task | NotYet | None:
            """Return a lost task, or that of the next item; None if no item is left, or enough are held."""
            if lost:
                return lost.popleft()
            if len(held) < _HELD_PER_WORKER * len(self._pool):
                for item in unread_items:
                    if isinstance(item, NotYet):
                        return item
                    held.append(_Task(item))
                    return held[-1]
            return None

        while True:
            task: _Task | NotYet | None = None
            # The worker with the fewest tasks gets another one, unless all have enough.
            while len((worker := min(self._pool, key=lambda each: len(each.tasks))).tasks) < _TASKS_AT_WORKER:
                if not isinstance(task := next_task(), _Task):
                    break
                worker.submit(task, function, pickled_shared)
            if not held:
                if task is None:
                    return
                yield NOT_YET
            elif (outcome := held[0].outcome) is not None:
                held.popleft()
                yield outcome.result()
            else:
                lost += self._collect(_ASK_AGAIN_SECONDS if isinstance(task, NotYet) else None, name_of, on_result)

    def _collect(
        self, timeout: float | None, name_of: Callable[[Any], str], on_result: Callable[[Any], None]
    ) -> list[_Task]:
        """Wait until a task is finished or a worker dies, at most ``timeout`` seconds, and record all outcomes.

        Dead workers are replaced. Their tasks are returned.
        """
        lost: list[_Task] = []
        wait([future for worker in self._pool for _, future in worker.tasks], timeout, FIRST_COMPLETED)
        for number, worker in enumerate(self._pool):
            while worker.tasks and worker.tasks[0][1].done():
                task, future = worker.tasks[0]
                has_begun, error = worker.take_begun(), future.exception()
                if isinstance(error, BrokenProcessPool):
                    worker.end()
                    idle_deaths = 0 if has_begun else worker.idle_deaths + 1
                    task.deaths += has_begun
                    if max(task.deaths, idle_deaths) >= _MAX_DEATHS:
                        when = "while processing these rows" if has_begun else "in a row before they reached these rows"
                        raise WorkersDiedError(
                            f"{name_of(task.item)}: worker processes died {_MAX_DEATHS} times {when}: they crashed, or"
                            " were killed, perhaps because memory ran out; use fewer --workers"
                            + (", and check these rows" if has_begun else "")
                        )
                    lost += [task for task, _ in worker.tasks]
                    self._pool[number] = _Worker(idle_deaths)
                    break
                worker.tasks.popleft()
                worker.idle_deaths = 0
                task.outcome, task.item = future, None
                if error is None:
                    on_result(future.result())
        return lost


# ---- in a worker ----

# The pipe to the pool; and the first argument of the function, as received and as unpickled.
_pipe: Connection[Any, Any] | None = None
_shared: tuple[bytes, Any] = (b"", None)


def _start(pipe: Connection[Any, Any]) -> None:
    global _pipe  # noqa: PLW0603
    _pipe = pipe
    # Ctrl-C reaches the whole process group. The parent ends the work and reports it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One process uses one thread. The libraries below would start one per CPU.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_pool, args=(pipe,), name="end with the pool", daemon=True).start()


def _survives_pickling(error: Exception) -> bool:
    """Return whether the pool can pass an error on. Some classes cannot be rebuilt from their base's arguments."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def _end_with_pool(pipe: Connection[Any, Any]) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)


def _work(function: Callable[[Any, Any], Any], shared: bytes, item: Any) -> Any:
    global _shared  # noqa: PLW0603
    try:
        assert _pipe is not None
        _pipe.send_bytes(b"begun")
        if _shared[0] != shared:
            _shared = shared, pickle.loads(shared)
        return function(_shared[1], item)
    except Exception as error:
        if isinstance(error, (SFTIndexError, OSError)) and _survives_pickling(error):
            raise
        # A bug: the error raised by the pool must show its location.
        raise RuntimeError(f"in a worker process:\n{traceback.format_exc()}") from None
