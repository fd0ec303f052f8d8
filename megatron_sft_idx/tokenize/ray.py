"""Tasks on a Ray cluster: the user's cluster, or one that this command starts on this machine and stops again.

Only stretches, lengths, counts and the plan pass through the driver, which is the process of the command. Parts and
shards are on a file system that all nodes share. A task may run more than once.
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

# Ray retries a task when its process or node dies (like spot machines), and after an OSError, which is common on shared
# file systems; never after an error of this package, which tasks return.
_MAX_RETRIES = 5
# Number of submitted tasks per CPU, so that none waits for the driver; each costs the driver memory.
_TASKS_A_CPU = 2
# An address that only this machine reaches; Ray replaces 127.0.0.1 by one that other machines reach.
_LOOPBACK = "127.0.0.2"
_OBJECT_STORE_NBYTES = 512 << 20
# The token of all clusters that this process starts; empty before the first.
_own_token: list[str] = []


def _returning_errors(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap a function so that errors of this package are returned, because Ray would retry hopeless tasks."""

    @functools.wraps(function)
    def call(shared: Any, item: Any) -> Any:
        # One task uses one thread. The libraries below would start one per CPU.
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
        workers: maximum number of submitted tasks.
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
        """Return ``function(shared, item)`` for every item, in order. See ``Local.map_in_order`` for arguments.

        At most ``workers`` tasks are submitted at a time, and at most four times as many tasks and results held, so
        that the driver's memory does not grow with the number of items. Closing the generator stops the running tasks.
        The caller must close it before the connection.

        Raises:
            SFTIndexError: an error of a task, when its turn comes.
            WorkersDiedError: a task's processes died repeatedly.
            OSError: an error of a task, after retries.
        """
        options = {"num_cpus": 1, "max_retries": _MAX_RETRIES, "retry_exceptions": [OSError]}
        remote = self._ray.remote(**options)(_returning_errors(function))
        shared_reference, unread_items = self._ray.put(shared), iter(items)
        # All tasks whose results were not taken yet: references in the order of the items, and names of the items,
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
        """Return the result of a task, or the error to raise when its turn comes; ``name`` is that of its item."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except exceptions.RayTaskError as error:
            cause = error.cause
            return cause if isinstance(cause, OSError) else RuntimeError(f"in a task:\n{error}")
        except exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            return WorkersDiedError(
                f"{name}: its task died {_MAX_RETRIES + 1} times, together with its process or node ({reason}),"
                " perhaps because memory ran out; check these rows and the nodes. Finished work is kept for the next"
                " run"
            )


@contextmanager
def ray_cluster(address: str | None, workers: int | None, log: Callable[[str], None]) -> Iterator[Cluster]:
    """Connect to a cluster, or start one for as long as the context lasts.

    Ray's servers listen on every interface of the machine, and anyone who reaches them can run code. So a cluster
    started here requires a new random token, and announces only a loopback address.

    Args:
        address: address for ``ray.init``; None starts a cluster on this machine.
        workers: maximum number of tasks that run in parallel; None for the number of CPUs of the cluster.
        log: takes lines for people.

    Raises:
        SFTIndexError: Ray is not installed, the address does not respond, or this process is already connected.
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
            raise SFTIndexError(
                "--engine ray: Ray is not installed; install it with: pip install 'megatron-sft-idx[ray]'"
            ) from None
        if ray.is_initialized():
            raise SFTIndexError(
                "--engine ray: this process is already connected to a Ray cluster; call ray.shutdown() first"
            )
        try:
            with _sigterm_handler_kept():
                ray.init(**options)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            where = "cannot start a local cluster" if address is None else f"--ray-address {address}"
            raise SFTIndexError(f"--engine ray: {where}: {reason}") from None
        try:
            cpus = int(ray.cluster_resources().get("CPU", 1))
            log(f"Ray: {len(ray.nodes())} nodes, {cpus} processors")
            yield Cluster(ray, workers if workers and address is not None else max(_TASKS_A_CPU * cpus, 2))
        finally:
            # Stops only the processes that init started, by their ids.
            ray.shutdown()


def _token_variables() -> dict[str, str]:
    """Return environment variables that make a new cluster require a token; none if the user has set one."""
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return {}
    if not _own_token:
        if sys.modules.get("ray") is not None:
            raise SFTIndexError(
                "--engine ray: Ray was imported before token authentication could be enabled; set RAY_AUTH_MODE=token"
                " in the environment before the import, or pass the address of a running cluster"
            )
        _own_token.append(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _own_token[0], "RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM at the end: ``ray.init`` sets one that ends the process without a message."""
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
