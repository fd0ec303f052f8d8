"""Real Ray clusters of several nodes on this machine, and functions that kill parts of them during a run."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Nodes", "cluster_of", "killing", "require_ray"]


def require_ray() -> None:
    """Skip a module if Ray is not installed. Token authentication must be configured before Ray is imported."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray, or pip install 'megatron-sft-idx[ray]'")


class Nodes:
    """A cluster: a head without CPUs, to which the driver connects, and nodes with one CPU each."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        # Separate addresses that only this machine can reach.
        options = {"include_dashboard": False, "object_store_memory": 100 << 20}
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.2", **options}
        )
        self._options, self._count, self._added = options, count, 0
        self.nodes: list[Any] = []
        self.mend()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def _add(self) -> Any:
        self._added += 1
        return self._cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{self._added + 2}", **self._options)

    def kill_node(self) -> None:
        """Kill all processes of a node at once."""
        self._cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    def mend(self) -> None:
        """Add nodes to replace killed ones."""
        while len(self.nodes) < self._count:
            self.nodes.append(self._add())

    def kill_worker(self) -> bool:
        """Kill a process that is running a task. Return whether there was one."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and self._is_ours(entry):
                os.kill(int(entry.name), signal.SIGKILL)
                return True
        return False

    def _is_ours(self, entry: Path) -> bool:
        raylets = {
            process.process.pid
            for node in self.nodes
            for processes in node.all_processes.values()
            for process in processes
        }
        try:
            command = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
        return command.startswith((b"ray::make_parts", b"ray::gather_shard")) and parent in raylets

    def stop(self) -> None:
        self._cluster.shutdown()


@contextmanager
def cluster_of(count: int) -> Iterator[Nodes]:
    before = signal.getsignal(signal.SIGTERM)  # Ray sets its own handler
    nodes = Nodes(count)
    try:
        yield nodes
    finally:
        nodes.stop()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def killing(when: Callable[[], bool], kill: Callable[[], Any]) -> Iterator[list[Any]]:
    """Within this context, wait in another thread until ``when()`` is true, then ``kill()``.

    Yield a list with its result.
    """
    killed: list[Any] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if when():
                killed.append(kill())
                return
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()
