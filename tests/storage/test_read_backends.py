"""Every read backend returns the same packs in any order; and the memory use of each."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_packs import Sample, assert_holds, assert_is, demo_samples, samples, write_samples

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.formats.packed_dataset import open_dataset
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard.opening import MAX_SINGLE_READS, FirstReadHints
from megatron_sft_idx.storage import advise_order, drop_pages, local, open_array
from megatron_sft_idx.storage.advice import mapped_nbytes
from megatron_sft_idx.storage.local import PreadArray, ReopenedArray

PAGE = mmap.PAGESIZE
WAYS: list[dict[str, Any]] = [
    {"backend": "mmap"},
    {"backend": "os", "advice": "random"},
    {"backend": "pread", "advice": "sequential"},
    {"backend": "pread", "advice": "random"},
    {"backend": "reopen"},
    {"backend": "reopen", "advice": "random"},
]
PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Provide a shard of 64 packs of 8192 tokens: 2 MiB of tokens, on disk."""
    prefix = str(tmp_path_factory.mktemp("large") / "x")
    rng = np.random.default_rng(3)
    with ShardWriter(prefix, token_dtype=np.int32, capacity=8192) as writer:
        for _ in range(64):
            writer.add_pack(
                rng.integers(0, 60_000, 8192), np.ones(8192, np.uint8), np.array([0]), mask_alignment="token"
            )
    return prefix


# ---- the same packs ----


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(st.data(), samples(least=1))
def test_every_backend_reads_the_same_in_any_order(tmp_path: Path, data: st.DataObject, packs: list[Sample]) -> None:
    write_samples(tmp_path / "x", packs, overwrite=True)
    numbers = st.lists(st.integers(-len(packs), len(packs) - 1), max_size=12)
    announced, read = data.draw(numbers), data.draw(numbers)
    shards = [Shard(tmp_path / "x", **way) for way in WAYS]
    for shard in shards:
        shard.schedule(announced)
        for i in read:
            assert_is(shard[i], packs[i])
        shard.schedule(announced)
        shard.dontneed(0, len(packs) // 2)
        for i in announced:
            assert_is(shard[i], packs[i])
            assert shard.get(i, 1).tolist() == packs[i].tokens[1:]
        assert_holds(shard, packs)


@pytest.mark.parametrize("way", WAYS)
def test_sets_and_datasets_of_several_shards_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    packs = demo_samples(9)
    for name, few in (("a", packs[:2]), ("b", packs[2:7]), ("c", packs[7:])):
        write_samples(tmp_path / name, few, capacity=64)
    order = [8, 0, 3, -5, 3, 7, 1]
    for source in (tmp_path, str(tmp_path / "b")):
        expected = packs if source == tmp_path else packs[2:7]
        wanted = [i for i in order if i < len(expected)]
        dataset = open_dataset(source, **way)
        dataset.schedule(wanted)
        for i in wanted:
            assert_is(dataset[i], expected[i])
    with pytest.raises(IndexError, match="no pack 9; the number of packs is 9"):
        open_dataset(tmp_path, **way).schedule([9])


@pytest.mark.parametrize("way", WAYS)
def test_threads_share_a_shard(large: str, way: dict[str, Any]) -> None:
    expected = [pack["input_ids"].copy() for pack in Shard(large)]
    shard, wrong = Shard(large, **way), []

    def read(seed: int) -> None:
        order = np.random.default_rng(seed).integers(0, 64, 100)
        if seed % 2:
            shard.schedule(order)
        wrong.extend(i for i in order.tolist() if not np.array_equal(shard[i]["input_ids"], expected[i]))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert not wrong


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("way", WAYS)
def test_another_process_reads_the_same(large: str, method: str, way: dict[str, Any]) -> None:
    shard = Shard(large, **way)
    shard.schedule(range(64))
    first = int(shard[5]["input_ids"].sum())
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply_async(_sum_of, (shard, 5)).get(PATIENCE_SECONDS) == first
    assert len(pickle.dumps(shard)) < 300 + len(large)


def _sum_of(shard: Shard, index: int) -> int:
    shard.schedule([index, 2])
    return int(shard[index]["input_ids"].sum())


# ---- options and their errors ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "direct"}, "x: backend 'direct', choose one of mmap, os, pread, reopen"),
        ({"advice": "willneed"}, "x: advice 'willneed', choose one of normal, sequential, random"),
        ({"backend": "process"}, "x: backend 'process' was removed, .*; choose pread"),
    ],
)
def test_an_option_that_is_none_lists_those_there_are(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_samples(tmp_path / "x", demo_samples())
    for opening in (Shard, open_dataset):
        with pytest.raises(FormatError, match=message):
            opening(tmp_path / "x", **options)


@pytest.mark.parametrize("way", WAYS)
def test_packs_that_are_not_there_cannot_be_announced(tmp_path: Path, way: dict[str, Any]) -> None:
    write_samples(tmp_path / "x", demo_samples(3))
    shard = Shard(tmp_path / "x", **way)
    for missing in (3, -4):
        with pytest.raises(IndexError, match=f"x: there is no pack {missing}; the"):
            shard.schedule([0, missing])
    with pytest.raises(IndexError):
        shard.willneed(0, 4)
    with pytest.raises(IndexError, match="x: packs -1 to 2 requested, but there are 3"):
        shard.willneed(-1, 2)
    shard.schedule([])
    shard.schedule(np.array([-1, 2], np.int8))
    shard.willneed(1, 1)
    shard.dontneed(2, 1)


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("backend", ["pread", "reopen"])
def test_a_file_cut_short_is_an_error_with_its_path(tmp_path: Path, backend: str, announced: bool) -> None:
    write_samples(tmp_path / "x", demo_samples())
    shard = Shard(tmp_path / "x", backend=backend)
    os.truncate(tmp_path / "x.loss.bin", 3)
    if announced:
        shard.schedule(range(7))
    for read in (lambda: shard[6], lambda: list(shard)):
        with pytest.raises(CorruptShardError, match=r"x\.loss\.bin: byte 3: .*cut short"):
            read()


def test_what_no_memory_holds_is_an_error_with_the_path(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "x", 1 << 42  # sparse
    path.touch()
    os.truncate(path, nbytes)
    for array in (
        PreadArray(str(path), np.dtype(np.uint8), nbytes, 0),
        ReopenedArray(str(path), np.dtype(np.uint8), nbytes, nbytes, lambda: None),
    ):
        assert array[nbytes - 1 :].tolist() == [0]
        with pytest.raises(OSError, match=r"Cannot allocate memory: Unable to allocate 4\.00 TiB .*: '.*/x'"):
            array[:]


def test_a_disk_that_fails_is_an_error_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(8))
    array = PreadArray(str(tmp_path / "x"), np.dtype(np.uint8), 8, 0)
    folder = os.open(tmp_path, os.O_RDONLY)  # reading it is an error of the system
    try:
        os.dup2(folder, array._fd)
        with pytest.raises(IsADirectoryError) as caught:
            array.read_bytes(0, np.empty(8, np.uint8))
    finally:
        os.close(folder)
    assert caught.value.filename == str(tmp_path / "x")


def test_a_file_that_is_replaced_while_it_is_opened_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"12345678")
    (tmp_path / "new").write_bytes(b"abc")
    open_descriptor = local.open_descriptor

    def replaced(path: str) -> tuple[int, os.stat_result]:
        opened = open_descriptor(path)
        os.replace(tmp_path / "new", path)
        return opened

    monkeypatch.setattr(local, "open_descriptor", replaced)
    array = local.open_array(str(tmp_path / "x"), np.dtype("u1"), 8, nbytes=8, backend="pread")
    assert array[:].tobytes() == b"12345678"


# ---- memory use ----


def resident(prefix: str) -> int:
    """Return the bytes of the token file in the page cache."""
    tokens = Shard(prefix).files.tokens
    assert isinstance(tokens, np.ndarray)
    return _native.resident_nbytes(tokens)


def require_droppable(folder: Path) -> None:
    """Skip if the file system keeps unused pages in memory, like tmpfs, which has no other storage."""
    file = folder / "probe"
    file.write_bytes(bytes(16 * PAGE))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    array = open_array(str(file), np.dtype("u1"), 16 * PAGE, nbytes=16 * PAGE)
    assert isinstance(array, np.ndarray)
    if _native.resident_nbytes(array):
        pytest.skip(f"the file system of {folder} keeps pages in memory that it is asked to drop")


def test_dontneed_drops_what_is_mapped_from_the_page_cache(large: str) -> None:
    require_droppable(Path(large).parent)
    shard = Shard(large)
    kept = shard[3]["input_ids"]
    total = sum(int(pack["input_ids"].sum()) for pack in shard)
    nbytes = resident(large)
    assert nbytes == 2 << 20
    # Both steps are needed: mapped pages stay, and so do pages that are only unmapped.
    with open(large + ".bin", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident(large) == nbytes
    shard.dontneed()
    assert resident(large) == 0
    assert kept.tolist() == shard[3]["input_ids"].tolist()
    assert sum(int(pack["input_ids"].sum()) for pack in shard) == total


def test_a_pack_that_is_read_alone_brings_nothing_else_and_many_bring_all(large: str) -> None:
    require_droppable(Path(large).parent)
    Shard(large).dontneed()
    shard, pack_nbytes = Shard(large), 8192 * 4
    order = np.random.default_rng(0).permutation(np.arange(1, 64, 2))
    for count, i in enumerate(order[: MAX_SINGLE_READS - 1].tolist(), 1):
        shard[i]["input_ids"].sum()
        assert resident(large) == count * pack_nbytes
    shard[order[MAX_SINGLE_READS]]["input_ids"].sum()
    end = time.monotonic() + PATIENCE_SECONDS
    while (
        resident(large) < 2 * MAX_SINGLE_READS * pack_nbytes
    ):  # as much as the kernel reads at once, which can be less than everything
        assert time.monotonic() < end, f"{resident(large)} bytes were read in advance"
        time.sleep(0.01)


def test_packs_in_order_are_left_to_the_kernel(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(FirstReadHints, "_ask", lambda self, *items: asked.append(items))
    for _ in Shard(large):
        pass
    for _ in Shard(large, advice="sequential"):
        pass
    assert asked == [(0, 8192)]
    del asked[:]
    backwards = Shard(large)
    for i in reversed(range(64)):
        backwards[i]
    assert asked == [(8192 * i, 8192 * (i + 1)) for i in range(63, 63 - MAX_SINGLE_READS, -1)] + [(0, 64 * 8192)]


def test_dontneed_drops_the_index_too(tmp_path: Path) -> None:
    require_droppable(tmp_path)
    write_samples(tmp_path / "x", demo_samples(4) * 400, capacity=64)
    for path in tmp_path.iterdir():
        with path.open("rb") as opened:
            os.fsync(opened.fileno())
    shard = Shard(tmp_path / "x")
    shard.sequence_bounds()
    shard.dontneed()
    for suffix in (".seq.bin", ".seq.idx"):
        file = tmp_path / f"x{suffix}"
        nbytes = file.stat().st_size
        array = open_array(str(file), np.dtype("u1"), nbytes, nbytes=nbytes)
        assert isinstance(array, np.ndarray)
        assert _native.resident_nbytes(array) == 0
    assert_holds(shard, demo_samples(4) * 400)


def test_a_shard_that_was_removed_can_be_let_go_of(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples())
    shard = Shard(tmp_path / "x")
    for path in tmp_path.iterdir():
        path.unlink()
    shard.dontneed()
    assert_holds(shard, demo_samples())


@pytest.mark.parametrize("way", WAYS)
def test_a_part_is_dropped_and_wanted_again(large: str, way: dict[str, Any]) -> None:
    require_droppable(Path(large).parent)
    shard = Shard(large, **way)
    shard.dontneed()
    assert resident(large) == 0
    shard.willneed(8, 24)
    end = time.monotonic() + PATIENCE_SECONDS
    while resident(large) < 16 * 8192 * 4:
        assert time.monotonic() < end, f"{resident(large)} bytes were read in advance"
        time.sleep(0.01)
    shard.dontneed(8, 24)
    shard.dontneed()
    assert resident(large) == 0


def test_resident_bytes_are_counted_as_they_come(tmp_path: Path) -> None:
    require_droppable(tmp_path)
    file = tmp_path / "bytes"
    file.write_bytes(bytes(64 * PAGE))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    array = open_array(str(file), np.dtype("u1"), 64 * PAGE, nbytes=64 * PAGE)
    assert isinstance(array, np.ndarray)
    drop_pages(str(file), array, 0, len(array))
    advise_order(array, "random")
    assert _native.resident_nbytes(array) == 0
    for page in (3, 60):
        assert array[page * PAGE] == 0
    assert _native.resident_nbytes(array) == 2 * PAGE
    assert _native.resident_nbytes(array[3 * PAGE : 4 * PAGE]) == PAGE


def _touch_and_report(prefix: str, barrier: Any, answers: Any) -> None:
    shard = Shard(prefix)
    for pack in shard:
        pack["input_ids"].sum()
    barrier.wait(PATIENCE_SECONDS)  # both have read everything
    answers.put({name: mapped_nbytes([shard.files.tokens], name) for name in ("Rss", "Pss", "Private_Dirty")})
    barrier.wait(PATIENCE_SECONDS)


def test_processes_share_the_pages_of_maps(large: str) -> None:
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(2), context.SimpleQueue()
    children = [context.Process(target=_touch_and_report, args=(large, barrier, answers)) for _ in range(2)]
    for child in children:
        child.start()
    found = [answers.get() for _ in children]
    for child in children:
        child.join(PATIENCE_SECONDS)
        assert child.exitcode == 0
    for memory in found:
        assert memory["Rss"] >= 2 << 20
        assert memory["Pss"] <= 0.6 * memory["Rss"]  # the kernel counts half of each page mapped by two processes
        assert memory["Private_Dirty"] == 0


# ---- huge pages ----


def test_huge_pages_that_are_not_given_are_said(tmp_path: Path, large: str) -> None:
    write_samples(tmp_path / "small", demo_samples())
    small = Shard(tmp_path / "small", huge_pages=True)
    assert_holds(small, demo_samples())
    assert small.huge_pages() == Shard(large, backend="pread", huge_pages=True).huge_pages() == 0
