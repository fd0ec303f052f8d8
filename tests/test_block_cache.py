"""The cache of file blocks: what it gives up, what it reads ahead, what it holds, and its errors."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from block_cache_twin import FAR, belady_reads, lru_reads, next_use
from cached_blocks import BLOCK, BYTES, announce, cached, run, until, use
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError
from megatron_sft_idx.storage import PreadArray
from megatron_sft_idx.storage.advice import mappings
from megatron_sft_idx.storage.block_cache import NEVER, UsePlan, block_keys, block_of, file_of, key_of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("cache") / "bytes"
    file.write_bytes(BYTES.tobytes())
    return str(file)


# ---- what gives way ----

uses_of_blocks = st.lists(st.integers(0, 7), max_size=40)


@settings(deadline=None)
@given(uses_of_blocks, st.integers(1, 6))
def test_what_is_used_farthest_ahead_gives_way(path: str, uses: list[int], room: int) -> None:
    array = cached(path, room, readers=0)
    announce(array, uses[: len(uses) // 2])
    announce(array, uses[len(uses) // 2 :], more=True)
    for block in uses:
        use(array, block)
    assert array.cache.reads == belady_reads(uses, room)


@settings(deadline=None)
@given(uses_of_blocks, st.integers(1, 6))
def test_the_least_recently_used_gives_way_where_nothing_is_announced(path: str, uses: list[int], room: int) -> None:
    array = cached(path, room)
    for block in uses:
        use(array, block)
    assert array.cache.reads == lru_reads(uses, room)


@settings(deadline=None)
@given(uses_of_blocks, st.integers(0, 8), st.integers(0, 45))
def test_a_plan_knows_the_next_use(uses: list[int], block: int, since: int) -> None:
    plan = UsePlan(np.array(uses, np.int64))

    def expected(block: int, since: int) -> int:
        found = next_use(uses, block, since)
        return NEVER if found == FAR else found

    assert plan.first_use(block, since) == expected(block, since)
    assert plan.first_uses([block, 3]) == [expected(block, 0), expected(3, 0)]
    assert [plan.next_use(i) for i in range(len(uses))] == [expected(uses[i], i + 1) for i in range(len(uses))]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100), st.integers(0, 50)), max_size=8))
def test_ranges_are_cut_into_blocks(ranges: list[tuple[int, int, int]]) -> None:
    files, begins, counts = (
        (np.array(column, np.int64) for column in zip(*ranges, strict=True)) if ranges else [np.zeros(0, np.int64)] * 3
    )
    found = block_keys(files, begins, begins + counts, 16)
    expected = [
        (file, block)
        for file, begin, count in ranges
        for block in range(200)
        if max(block * 16, begin) < min(block * 16 + 16, begin + count)
    ]
    assert [(file_of(key), block_of(key)) for key in found.tolist()] == expected
    assert found.tolist() == [key_of(file, block) for file, block in expected]


# ---- what is read ahead ----


def test_blocks_are_there_before_they_are_used(path: str) -> None:
    array = cached(path, 12)
    announce(array, [5, 9, 2, 9])
    until("three blocks are read ahead", lambda: array.cache.reads == 3)
    for block in (5, 9, 2, 9):
        use(array, block)
    assert array.cache.reads == 3


def test_a_quarter_of_the_cache_is_read_ahead(path: str) -> None:
    array = cached(path, 12)
    announce(array, list(range(10)))
    until("as much as may be is read", lambda: array.cache.reads == 3)
    time.sleep(0.05)
    assert array.cache.reads == 3
    for block in range(10):
        use(array, block)
    assert array.cache.reads == 10


def test_reading_goes_on_where_announced_blocks_are_skipped(path: str) -> None:
    array = cached(path, 32)
    announce(array, list(range(16)))
    until("as much as may be is read", lambda: array.cache.reads == 8)
    for block in (6, 7):
        use(array, block)
    until("what was skipped gives way", lambda: array.cache.reads == 16)


def test_more_may_be_announced_and_all_may_be_replaced(path: str) -> None:
    array = cached(path, 24)
    announce(array, [0, 1])
    announce(array, [2, 3], more=True)
    until("all four are read", lambda: array.cache.reads == 4)
    announce(array, [20, 21, 22, 23, 24, 25])
    until("others took their place", lambda: array.cache.reads == 10)
    for block in (20, 25, 0, 3):
        use(array, block)


def test_what_is_announced_batch_by_batch_leaves_nothing_behind(path: str) -> None:
    array, memory = (found := cached(path, 8)), found.cache._memory
    for blocks in np.random.default_rng(2).integers(0, 40, (300, 4)).tolist():
        announce(array, blocks, more=True)
        for block in blocks:
            use(array, block)
    assert len(memory.due) <= 2 * 8
    assert memory.plan.end - memory.plan.begin <= 4


def test_one_block_of_memory_is_not_held_by_one_that_is_skipped(path: str) -> None:
    array = cached(path, 1)
    announce(array, [5, 6, 7, 8, 9])
    until("the first one is read", lambda: array.cache.reads == 1)
    use(array, 6)
    until("another one is read ahead", lambda: array.cache.reads > 1)


def test_what_is_withdrawn_stands_in_the_way_of_nothing(path: str) -> None:
    array = cached(path, 8)
    announce(array, list(range(40)), more=True)
    until("as much as may be is read", lambda: array.cache.reads == 2)
    array.cache.withdraw()
    announce(array, [30, 31], more=True)
    until("what is announced then is read", lambda: array.cache.reads == 4)


def test_without_threads_blocks_are_read_when_they_are_needed(path: str, caplog: pytest.LogCaptureFixture) -> None:
    array = cached(path, 12)
    before = threading.stack_size(1 << 60)  # more than there are addresses: no thread can start
    try:
        announce(array, [1, 2])
    finally:
        threading.stack_size(before)
    assert "when they are needed, not ahead" in caplog.text
    use(array, 1)
    announce(array, [3, 4])
    until("threads that can start read ahead", lambda: array.cache.reads == 3)


# ---- the budget ----


def test_the_budget_is_held_by_threads_that_read_far_more(path: str) -> None:
    array = cached(path, 5)
    cache, orders = array.cache, np.random.default_rng(1)
    memory = cache._memory

    def read(order: NDArray[np.int64]) -> None:
        for begin in order.tolist():
            assert (array[begin : begin + 3 * BLOCK] == BYTES[begin : begin + 3 * BLOCK]).all()
            with memory.changed:  # every slot is free or of one block, those under way included
                slots = [block.slot for block in memory.blocks.values()]
                assert sorted(slots + memory.free) == list(range(5))

    announce(array, orders.integers(0, 40, 400).tolist())
    run([lambda: read(orders.integers(0, len(BYTES), 200)) for _ in range(4)])
    assert cache.memory.nbytes == 5 * BLOCK
    assert sum(each.nbytes["Rss"] for each in mappings([cache.memory])) <= 5 * BLOCK


def test_a_slice_larger_than_the_budget_is_read(path: str) -> None:
    array = cached(path, 2)
    assert (array[:] == BYTES).all()
    announce(array, list(range(40)))
    assert (array[1:-1] == BYTES[1:-1]).all()
    assert not array[:5].flags.writeable


def test_blocks_that_are_forgotten_are_read_again(path: str) -> None:
    array = cached(path, 8)
    for block in range(6):
        use(array, block)
    array.cache.forget(array.file, 2 * BLOCK, 4 * BLOCK)
    for block in range(6):
        use(array, block)
    assert array.cache.reads == 8


# ---- errors ----


def test_what_went_wrong_in_the_background_is_raised_where_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "short"
    file.write_bytes(BYTES.tobytes())
    array = cached(str(file), 12)
    os.truncate(file, 3 * BLOCK + 5)
    announce(array, [0, 3, 9])
    until("all were tried", lambda: array.cache.reads == 3)
    use(array, 0)
    for block, found in ((3, 3 * BLOCK + 5), (9, 9 * BLOCK)):
        with pytest.raises(CorruptShardError, match=f"short: byte {found}: .*cut short.*F2"):
            array[block * BLOCK : (block + 1) * BLOCK]
    file.write_bytes(BYTES.tobytes())
    use(array, 3)
    assert len(array.cache._memory.free) == 10


def test_a_disk_that_fails_is_an_error_with_the_path(tmp_path: Path, path: str) -> None:
    array = cached(path, 4)
    source = array.source
    assert isinstance(source, PreadArray)
    os.close(source._fd)
    source._fd = os.open(tmp_path, os.O_RDONLY)  # reading a folder fails
    with pytest.raises(OSError, match="bytes") as caught:
        use(array, 1)
    assert caught.value.filename == path
    assert len(array.cache._memory.free) == 4


def test_what_failed_in_the_background_is_tried_again_where_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "late"
    file.write_bytes(b"")
    array = cached(str(file), 12)
    announce(array, [0, 3])
    until("both were tried", lambda: array.cache.reads == 2)
    file.write_bytes(BYTES.tobytes())
    for block in (0, 3):
        use(array, block)
