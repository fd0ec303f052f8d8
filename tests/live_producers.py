"""A producer in a separate process, controlled by the test: publish, end, wait, fail, free, stop responding, die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from live_catalogs import CAPACITY, publish

from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.live import Catalog, Limits, ProducerState

BEAT_SECONDS = 0.05
PATIENCE = 300


class Producer:
    """Sends commands to the process. Each method returns when the command is done."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, folder, limits), daemon=True)
        self.process.start()
        theirs.close()
        self._answer()

    def _answer(self) -> None:
        assert self._pipe.poll(PATIENCE), "the producer does not answer"
        assert self._pipe.recv() == "done"

    def __call__(self, command: str, *arguments: Any, **options: Any) -> None:
        self._pipe.send((command, arguments, options))
        self._answer()

    def kill(self) -> None:
        """Kill the process, like ``kill -9``."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE)


@contextmanager
def producing(folder: Path, **limits: Any) -> Iterator[Producer]:
    """Run a producer within this context."""
    folder.mkdir(exist_ok=True)
    producer = Producer(folder, **limits)
    try:
        yield producer
    finally:
        if producer.process.is_alive():
            producer.kill()


class _Worker:
    """Executes the commands inside the process."""

    def __init__(self, folder: Path, limits: dict[str, Any]) -> None:
        self.folder, self.catalog = folder, Catalog(folder)
        # A restarted producer continues counting where its predecessor stopped.
        self.state = self.catalog.producer() or ProducerState(Limits(CAPACITY, 3, **limits))
        self.lock = threading.Lock()
        self.silent = threading.Event()
        threading.Thread(target=self.beat, daemon=True).start()

    def say(self, **changes: Any) -> None:
        with self.lock:
            self.state = replace(self.state, beat=self.state.beat + 1, **changes)
            self.catalog.write_producer(self.state)

    def beat(self) -> None:
        while not self.silent.wait(BEAT_SECONDS):
            self.say()

    def publish(self, *counts: int) -> None:
        for packs in counts:
            publish(self.folder, self.state.published, packs)
            self.say(published=self.state.published + 1)

    def end(self) -> None:
        self.catalog.write_end(self.state.published)
        self.say(state="stopped", reason="all input is read")

    def free(self, *shards: int) -> None:
        for shard in shards:
            paths = ShardPaths.of(self.catalog.shard_prefix(shard))
            for path in (paths.seq_idx, *paths.data):
                Path(path).unlink()
            self.say(freed=max(self.state.freed, shard + 1))

    def lose(self, freed: bool) -> None:
        """Publish a shard and remove it before any consumer sees it."""
        number = self.state.published + 1
        self.say(published=number, freed=number if freed else self.state.freed)

    def become(self, state: str, reason: str | None = None) -> None:
        self.say(state=state, reason=reason)

    def hush(self) -> None:
        self.silent.set()


def _work(pipe: Connection, folder: Path, limits: dict[str, Any]) -> None:
    worker = _Worker(folder, limits)
    worker.say(state="running", reason=None)
    pipe.send("done")
    while True:
        command, arguments, options = pipe.recv()
        getattr(worker, command)(*arguments, **options)
        pipe.send("done")
