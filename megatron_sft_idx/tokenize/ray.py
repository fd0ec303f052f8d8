"""Tasks on a Ray cluster: one that the user runs, or one that this command starts on this machine and stops again.

Only stretches, lengths, counts and the plan pass through the driver, the process of the command. Parts and shards are
on a file system that all nodes share. A task may run more than once.
"""

from __future__ import annotations

import functools
import itertools
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

# Ray runs a task again when its process or node dies (spot machines do), and after an OSError, which shared file
# systems have now and then; never after an error of this package, which tasks return.
_MAX_RETRIES = 5
# Tasks submitted for each processor, so that it need not wait for the driver; each costs the driver memory.
_TASKS_A_CPU = 2
# An address that only this machine reaches; Ray replaces 127.0.0.1 by one that other machines reach.
_LOOPBACK = "127.0.0.2"
_OBJECT_STORE_NBYTES = 512 << 20
# The token of all clusters that this process starts; empty before the first.
_own_token: list[str] = []


def _returning_errors(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The function, but errors of this package are returned: Ray would retry what cannot succeed."""

    @functools.wraps(function)
    def call(shared: Any, item: Any) -> Any:
        # One task is one thread of work; the libraries below would start one a processor.
        os.environ["RAYON_NUM_THREADS"] = "1"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            return function(shared, item)
        except SFTIndexError as error:
            return error

    return call


class Cluster:
    """A connection to a cluster.

    Args:
        ray: the module.
        workers: how many tasks are submitted at a time.
    """

    def __init__(self, ray: Any, workers: int) -> None:
        self._ray, self.workers = ray, workers

    def map_in_order(
        self,
        function: Callable[[Shared, Item], Any],
        shared: Shared,
        items: Iterable[Item],
        *,
        name_of: Callable[[Item], str],
        on_result: Callable[[Any], None] = lambda result: None,
    ) -> Generator[Any, None, None]:
        """``function(shared, item)`` for every item, in order; arguments as of ``Local.map_in_order``.

        At most ``workers`` tasks are submitted at a time, and at most four times as many tasks and results held, so
        that the driver's memory does not grow with the items. Closing the generator stops the tasks that run; the
        caller must close it before the connection.

        Raises:
            SFTIndexError: of a task, when its turn comes.
            WorkersDiedError: a task's processes kept dying.
            OSError: of a task, after retries.
        """
        options = {"num_cpus": 1, "max_retries": _MAX_RETRIES, "retry_exceptions": [OSError]}
        remote = self._ray.remote(**options)(_returning_errors(function))
        shared_reference, unread_items = self._ray.put(shared), iter(items)
        # Of all tasks whose results were not taken yet: references in the order of the items, and names of the items,
        # which may themselves be large. Each task is running, or has an outcome.
        held: deque[Any] = deque()
        names: dict[Any, str] = {}
        running: set[Any] = set()
        outcomes: dict[Any, Any] = {}
        try:
            while True:
                free = min(self.workers - len(running), 4 * self.workers - len(held))
                for item in itertools.islice(unread_items, max(free, 0)):
                    reference = remote.remote(shared_reference, item)
                    held.append(reference)
                    names[reference] = name_of(item)
                    running.add(reference)
                if not held:
                    return
                if (reference := held[0]) in outcomes:
                    held.popleft()
                    del names[reference]
                    outcome = outcomes.pop(reference)
                    if isinstance(outcome, Exception):
                        raise outcome
                    yield outcome
                    continue
                ready, _ = self._ray.wait(list(running), num_returns=1)
                for reference in ready:
                    running.remove(reference)
                    outcome = outcomes[reference] = self._outcome(reference, names[reference])
                    if not isinstance(outcome, Exception):
                        on_result(outcome)
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)

    def _outcome(self, reference: Any, name: str) -> Any:
        """The result of a task, or the error to raise when its turn comes; ``name`` is that of its item."""
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
                " look at these rows, and at the nodes; what is done is kept for the next run"
            )


@contextmanager
def ray_cluster(address: str | None, workers: int | None, log: Callable[[str], None]) -> Iterator[Cluster]:
    """Connect to a cluster, or start one for as long as the context lasts.

    Ray's servers listen on every interface of the machine, and whoever reaches them can run code. So a cluster that is
    started here demands a token that is drawn for it, and announces a loopback address only.

    Args:
        address: as ``ray.init`` takes it; None starts a cluster on this machine.
        workers: how many tasks run at once; None for as many as the cluster has processors.
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
    # Ray reads the environment when it is imported.
    with _environment({} if address is not None else _token_variables()):
        try:
            import ray
        except ImportError:
            raise SFTIndexError("--engine ray: Ray is not installed: pip install 'megatron-sft-idx[ray]'") from None
        if ray.is_initialized():
            raise SFTIndexError(
                "--engine ray: this process is connected to a Ray cluster already; call ray.shutdown() first"
            )
        try:
            with _sigterm_handler_kept():
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
            # Stops the processes that init started, by their ids, and no others.
            ray.shutdown()


def _token_variables() -> dict[str, str]:
    """Environment variables by which a new cluster demands a token; none where the user's environment has its own."""
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
def _sigterm_handler_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM in the end: ``ray.init`` sets one that ends the process without a message."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set these environment variables for as long as the context lasts."""
    earlier = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update(earlier)
