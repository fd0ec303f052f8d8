"""Tasks on a Ray cluster: one that is there, or one that is started on this machine and stopped again.

Nothing but stretches, lengths, counts and the plan goes through the driver; parts and shards are on a file system that
all nodes share. Every task may be done twice.
"""

from __future__ import annotations

import functools
import os
import secrets
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.tokenize.local import WorkersDiedError, available_cpus

Shared = TypeVar("Shared")
Item = TypeVar("Item")

# A task is tried again when its process or node dies (spot machines do), and on errors of the file system, which
# shared ones have now and then; never on an error of this package, which tasks give back.
_MAX_RETRIES = 5
# Tasks handed out for each processor: enough that none waits for the driver, few enough to be forgotten.
_TASKS_A_CPU = 2
# An address that only this machine reaches. In the place of 127.0.0.1 Ray would put one that others reach.
_LOOPBACK = "127.0.0.2"
_OBJECT_STORE_NBYTES = 512 << 20
_own_token: list[str] = []


def _giving_back_errors(task: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """What cannot be used today cannot be used when tried again; errors of the file system are raised, and are."""

    @functools.wraps(task)
    def done(shared: Any, item: Any) -> Any:
        # One task is one thread of work; the libraries below would start one a processor.
        os.environ["RAYON_NUM_THREADS"] = "1"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            return task(shared, item)
        except SFTIndexError as error:
            return error

    return done


class Cluster:
    """A connection to a cluster.

    Args:
        ray: the module.
        most: tasks that are handed out at a time.
    """

    def __init__(self, ray: Any, most: int) -> None:
        self._ray, self._most = ray, most
        self.workers = most

    def map_in_order(
        self,
        task: Callable[[Shared, Item], Any],
        shared: Shared,
        items: Iterable[Item],
        *,
        name_of: Callable[[Item], str],
        done: Callable[[Any], None] = lambda result: None,
    ) -> Generator[Any, None, None]:
        """``task(shared, item)`` for every item, in order; arguments as of ``Local.map_in_order``.

        Few tasks more than there are processors are handed out at a time, and few more results are held, which makes
        the driver's memory independent of how many there are. Closing it stops the tasks that are at work; it is to be
        closed before the connection is.

        Raises:
            SFTIndexError: of a task, when its turn comes.
            WorkersDiedError: a task's processes kept dying.
            OSError: of a task, after retries.
        """
        options = {"num_cpus": 1, "max_retries": _MAX_RETRIES, "retry_exceptions": [OSError]}
        remote = self._ray.remote(**options)(_giving_back_errors(task))
        everywhere = self._ray.put(shared)
        most = self._most
        # By the order of the items; of these themselves only the names are kept, for they may be large.
        waiting: deque[Any] = deque()
        names: dict[Any, str] = {}
        running: set[Any] = set()
        finished: dict[Any, Any] = {}
        left = iter(items)
        try:
            while True:
                while len(running) < most and len(waiting) < 4 * most and (item := next(left, None)) is not None:
                    reference = remote.remote(everywhere, item)
                    waiting.append(reference)
                    names[reference] = name_of(item)
                    running.add(reference)
                if not waiting:
                    return
                if (reference := waiting[0]) in finished:
                    waiting.popleft()
                    del names[reference]
                    result = finished.pop(reference)
                    if isinstance(result, Exception):
                        raise result
                    yield result
                    continue
                ready, _ = self._ray.wait(list(running), num_returns=1)
                for one in ready:
                    running.remove(one)
                    finished[one] = self._result(one, names[one])
                    if not isinstance(finished[one], Exception):
                        done(finished[one])
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)

    def _result(self, reference: Any, name: str) -> Any:
        """What a task returned, or the error to raise in its turn."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except exceptions.RayTaskError as error:
            cause = error.cause
            return cause if isinstance(cause, OSError) else RuntimeError(f"in a task:\n{error}")
        except exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            return WorkersDiedError(
                f"{name}: its task died {_MAX_RETRIES + 1} times, with its process or node ({reason}); out of memory?"
                " look at these rows, and at the nodes; what is done is kept for --resume"
            )


@contextmanager
def ray_cluster(address: str | None, workers: int | None, log: Callable[[str], None]) -> Iterator[Cluster]:
    """Connect to a cluster, or start one for as long as this lasts.

    Ray's servers listen on every interface of the machine, and whoever reaches them runs code. So a cluster that is
    started here asks for a token that is made for it, and makes itself known by a loopback address only.

    Args:
        address: as ``ray.init`` takes it; None starts a cluster on this machine.
        workers: tasks at once; None for as many as the cluster has processors.
        log: takes lines for people.

    Raises:
        SFTIndexError: Ray is not installed, the address does not answer, or this process is connected already.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is not None:
        options["address"] = address
    else:
        options |= {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_NBYTES,
            "_node_ip_address": _LOOPBACK,
            "num_cpus": workers or available_cpus(),
        }
    with _environment({} if address is not None else _token()):
        # Ray reads the environment when it is imported.
        try:
            import ray
        except ImportError:
            raise SFTIndexError("--engine ray: Ray is not installed: pip install 'megatron-sft-idx[ray]'") from None
        if ray.is_initialized():
            raise SFTIndexError(
                "--engine ray: this process is connected to a Ray cluster already; call ray.shutdown() first"
            )
        try:
            with _keeping_sigterm():
                ray.init(**options)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            where = "no local cluster could be started" if address is None else f"--ray-address {address}"
            raise SFTIndexError(f"--engine ray: {where}: {reason}") from None
        try:
            cpus = int(ray.cluster_resources().get("CPU", 1))
            log(f"Ray: {len(ray.nodes())} nodes, {cpus} processors")
            yield Cluster(ray, workers if workers and address is not None else max(_TASKS_A_CPU * cpus, 2))
        finally:
            # Stops what init started, by its process ids, and nothing else.
            ray.shutdown()


def _token() -> dict[str, str]:
    """Variables that make a cluster ask for a token, the same for all this process starts; the user's own go first."""
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return {}
    if not _own_token:
        if sys.modules.get("ray") is not None:
            raise SFTIndexError(
                "--engine ray: Ray was imported before it could be told to ask for a token; set RAY_AUTH_MODE=token in"
                " the environment before that, or pass the address of a running cluster"
            )
        _own_token.append(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _own_token[0], "RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Ray's own handler would end the process without a word."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update((name, before[name]) for name in variables if name in before)
