"""The cache of file blocks shared by threads, forked and pickled."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cached_blocks import BLOCK, BYTES, PATIENCE_SECONDS, announce, cached, run, until, use
from numpy.typing import NDArray

from megatron_sft_idx.storage import BlockCache, CachedArray, PreadArray
from megatron_sft_idx.storage.advice import mappings


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("cache") / "bytes"
    file.write_bytes(BYTES.tobytes())
    return str(file)


class Held(PreadArray):
    """A file on a disk that answers when it is told to."""

    def __init__(self, path: str) -> None:
        super().__init__(path, BYTES.dtype, len(BYTES), 0)
        self.go, self.asked = threading.Event(), 0

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        self.asked += 1
        assert self.go.wait(PATIENCE_SECONDS)
        super().read_bytes(offset, out)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_block_that_several_threads_want_is_read_once(path: str, ahead: bool) -> None:
    source = Held(path)
    array = BlockCache(4 * BLOCK, block_nbytes=BLOCK).array(source, path, b"")
    if ahead:
        announce(array, [3])
        until("it is being read", lambda: source.asked == 1)
    timer = threading.Timer(0.1, source.go.set)
    timer.start()
    run([lambda: use(array, 3)] * 4)
    timer.join()
    assert source.asked == 1


class Interrupted(Held):
    """A file of which the first read is interrupted by the user."""

    def read_bytes(self, offset: int, out: NDArray[np.uint8]) -> None:
        super().read_bytes(offset, out)
        if self.asked == 1:
            raise KeyboardInterrupt


def test_an_interrupt_is_of_the_thread_that_it_came_to(path: str) -> None:
    source = Interrupted(path)
    array = BlockCache(4 * BLOCK, block_nbytes=BLOCK).array(source, path, b"")
    interrupted: list[BaseException] = []

    def first() -> None:
        try:
            use(array, 3)
        except KeyboardInterrupt as error:
            interrupted.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    until("a read is under way", lambda: source.asked == 1)
    timer = threading.Timer(0.1, source.go.set)
    timer.start()
    run([lambda: use(array, 3)] * 3)
    thread.join(PATIENCE_SECONDS)
    assert (len(interrupted), source.asked) == (1, 2)


def test_readers_do_not_wait_for_a_block_they_do_not_want(path: str) -> None:
    source = Held(path)
    array = BlockCache(4 * BLOCK, block_nbytes=BLOCK).array(source, path, b"")
    source.go.set()
    use(array, 1)
    source.go.clear()
    thread = threading.Thread(target=use, args=(array, 2), daemon=True)
    thread.start()
    until("a read is under way", lambda: source.asked == 2)
    use(array, 1)
    assert thread.is_alive()
    source.go.set()
    thread.join(PATIENCE_SECONDS)


def in_fork(work: Callable[[CachedArray, Any], None], array: CachedArray) -> Any:
    """What ``work`` puts into a queue in a forked process, which has to end well."""
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=work, args=(array, answer))
    child.start()
    child.join(PATIENCE_SECONDS)
    assert child.exitcode == 0
    return answer.get()


def _read_in_child(array: CachedArray, answer: Any) -> None:
    before = array.cache.reads
    for block in range(40):
        use(array, block)
    announce(array, [1, 2, 3])
    use(array, 1)
    answer.put((before, array.cache.reads >= 40))


def test_a_fork_begins_with_an_empty_cache_whatever_threads_do(path: str) -> None:
    array = cached(path, 4)
    announce(array, list(range(40)) * 50)
    stop = threading.Event()

    def keep_reading() -> None:
        while not stop.is_set():
            use(array, 7)

    threads = [threading.Thread(target=keep_reading, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert in_fork(_read_in_child, array) == (0, True)
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
    use(array, 9)


def _rss_in_child(array: CachedArray, answer: Any) -> None:
    (inherited,) = array.cache._made.values()
    found = [sum(each.nbytes["Rss"] for each in mappings([inherited.bytes]))]
    gone = weakref.ref(inherited)
    del inherited
    use(array, 1)
    gc.collect()
    answer.put((*found, gone() is None))


def test_a_fork_keeps_no_block_of_its_parents_in_memory(path: str) -> None:
    array = cached(path, 40)
    for block in range(40):
        use(array, block)
    assert in_fork(_rss_in_child, array) == (0, True)
    use(array, 1)
    assert array.cache.reads == 40


def test_a_cache_pickles_as_its_size(path: str) -> None:
    array = cached(path, 4)
    use(array, 1)
    again = pickle.loads(pickle.dumps(array.cache))
    assert (again.nbytes, again.block_nbytes, again.reads) == (4 * BLOCK, BLOCK, 0)


def test_threads_end_with_the_plan_and_with_the_cache(path: str) -> None:
    array = cached(path, 4)
    memory = array.cache._memory
    announce(array, [1])
    until("the plan is at its end", lambda: memory.threads == 0)
    announce(array, list(range(40)))
    until("they wait for room", lambda: memory.waiting > 0)
    assert memory.threads > 0
    del array
    gc.collect()
    until("the cache is gone", lambda: memory.threads == 0)
