"""Ranges that cover sequences; batches of remote shards equal local ones, and are fetched ahead within a budget."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blends import build, config_of, digest_of, write_packs
from columned import write_columned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from object_folders import serve_folder
from sample_packs import write_samples
from torch.utils.data import DataLoader
from training_source import random_samples

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage.remote import RemoteArray
from megatron_sft_idx.training import fetch
from megatron_sft_idx.training.batch import Batch, BatchAssembler, whole_batch
from megatron_sft_idx.training.fetch import Fetcher, coalesce
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.sources import Arrays, PlannedPacks, PlanOptions, Segments, StoredPacks

CAPACITY, COUNT = 40, 30
BATCHES = np.random.default_rng(0).integers(0, 2 * COUNT, (25, 3)).tolist()


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=30),
    st.integers(0, 50),
    st.integers(1, 100),
)
def test_ranges_cover_every_sequence_and_little_else(pieces: list[tuple[int, int]], gap: int, most: int) -> None:
    starts, lengths = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    ranges = coalesce(starts, lengths, gap, most)
    data = np.arange(400)
    fetched = np.concatenate([data[a:b] for a, b in zip(ranges.begins, ranges.ends, strict=True)])
    assert ranges.tokens == len(fetched)
    for (start, length), place in zip(pieces, ranges.places.tolist(), strict=True):
        assert fetched[place : place + length].tolist() == list(range(start, start + length))
    # No token is fetched twice, ranges ascend, and no wasted run is longer than the allowed gap.
    assert (np.diff(fetched) > 0).all()
    wanted = {token for start, length in pieces for token in range(start, start + length)}
    runs = np.split(
        fetched, np.flatnonzero(~np.isin(fetched, list(wanted))[:-1] != ~np.isin(fetched, list(wanted))[1:]) + 1
    )
    assert all(len(run) <= gap for run in runs if run[0] not in wanted)
    # Neighbours share a range if possible, unless it would be too long.
    for left, right in zip(range(len(ranges.begins) - 1), range(1, len(ranges.begins)), strict=True):
        first = min(length for start, length in pieces if start == ranges.begins[right])
        assert (
            ranges.begins[right] - ranges.ends[left] > gap or ranges.begins[right] + first - ranges.begins[left] > most
        )


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """Provide two shards of different dtypes: their folder, and the same folder at ``msc://``."""
    folder = tmp_path / "bucket"
    rng = np.random.default_rng(3)
    for name, weights in (("a", False), ("b", True)):
        options: dict[str, Any] = {"mask_dtype": np.float32} if weights else {}
        write_samples(folder / name, random_samples(COUNT, CAPACITY, rng, weights), capacity=CAPACITY, **options)
    return folder, serve_folder(folder, tmp_path / "msc.json", monkeypatch)


def same(found: Any, expected: Any) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def local_batches(folder: Path) -> list[Any]:
    assembler = BatchAssembler(StoredPacks(ShardSet.open(folder)), CAPACITY)
    return [assembler.assemble(batch) for batch in BATCHES]


@pytest.mark.parametrize("budget", [0, 500, 1 << 20])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_loader_gives_what_it_gives_of_local_shards(places: tuple[Path, str], budget: int, mixed: bool) -> None:
    folder, url = places
    shards = ShardSet([f"{url}/a", str(folder / "b") if mixed else f"{url}/b"])
    assembler = BatchAssembler(StoredPacks(shards), CAPACITY, fetch_nbytes=budget)
    expected = local_batches(folder)
    for _ in range(2):
        found = list(BatchLoader(assembler, BATCHES, copy=True))
        assert len(found) == len(expected)
        assert all(map(same, found, expected))


def test_packs_made_at_start_up(places: tuple[Path, str]) -> None:
    folder, url = places
    sources = [PlannedPacks(ShardSet.open(path), PlanOptions(CAPACITY)) for path in (folder, url)]
    local, remote = (BatchAssembler(source, CAPACITY) for source in sources)
    for pack in range(0, sources[0].num_packs, 4):
        batch = [pack, 0, pack]
        assert same(remote.assemble(batch), local.assemble(batch))


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_data_loader_gives_it_too(places: tuple[Path, str], method: str | None) -> None:
    folder, url = places
    assembler = BatchAssembler(StoredPacks(ShardSet.open(url)), CAPACITY)
    assembler.assemble(BATCHES[0])  # so that a fork inherits threads and clients
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method} if method else {}
    loader = DataLoader(assembler, batch_sampler=BATCHES, collate_fn=whole_batch, **workers)
    assert all(map(same, loader, local_batches(folder)))


def test_what_is_fetched_ahead_stays_within_the_budget(places: tuple[Path, str]) -> None:
    _, url = places
    assembler = BatchAssembler(StoredPacks(ShardSet.open(url)), CAPACITY)
    plans = [assembler.plan(batch) for batch in BATCHES]
    shards = [assembler._shards(plan) for plan in plans]
    probe = Fetcher()
    for plan, (arrays, slots) in zip(plans, shards, strict=True):
        probe.announce(plan, slots, arrays)
    sizes = [batch.nbytes for batch in probe.batches]
    probe.forget()
    budget = 3 * max(sizes)
    fetcher = Fetcher(budget)
    for plan, (arrays, slots) in zip(plans, shards, strict=True):
        fetcher.announce(plan, slots, arrays)
    for i, (plan, (arrays, slots)) in enumerate(zip(plans, shards, strict=True)):
        waiting = list(fetcher.batches)
        under_way = [batch for batch in waiting if batch.requests is not None]
        assert under_way == waiting[: len(under_way)]
        held = sum(batch.nbytes for batch in under_way)
        assert held <= budget
        assert len(under_way) == len(waiting) or held + sizes[i + len(under_way)] > budget
        fetcher.gather(plan, slots, arrays)
    assert not fetcher.batches


def test_batches_that_are_not_filled_are_let_go(places: tuple[Path, str]) -> None:
    _, url = places
    assembler = BatchAssembler(StoredPacks(ShardSet.open(url)), CAPACITY)
    plans = [assembler.plan(batch) for batch in BATCHES[:4]]
    for plan in plans:
        assembler.will_need(plan)
    pairs, slots = assembler._shards(plans[2])
    assembler._fetcher.gather(plans[2], slots, pairs)
    assert [batch.segments for batch in assembler._fetcher.batches] == [plans[3]]
    assembler.forget_needs()
    assert not assembler._fetcher.batches
    with iter(BatchLoader(assembler, BATCHES, copy=True)) as batches:
        next(batches)
    assert not assembler._fetcher.batches
    assert not pickle.loads(pickle.dumps(assembler))._fetcher.batches


def test_a_shard_that_is_replaced_is_an_error_and_never_a_batch(places: tuple[Path, str]) -> None:
    folder, url = places
    assembler = BatchAssembler(StoredPacks(ShardSet.open(url)), CAPACITY)
    assembler.assemble([0, COUNT])
    write_samples(
        folder / "a", random_samples(COUNT, CAPACITY, np.random.default_rng(9)), capacity=CAPACITY, overwrite=True
    )
    with pytest.raises(FormatError, match="replaced after it was opened"):
        list(BatchLoader(assembler, BATCHES))
    with pytest.raises(FormatError, match="replaced after it was opened"):
        assembler.assemble([1])


WIDE = ("mask", "wide")  # one and eight bytes, next to the two bytes of an id


@pytest.fixture
def columned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Arrays, Arrays]:
    """Provide the arrays of a shard with items of 2, 1, 1 and 8 bytes: mapped, and at ``msc://``."""
    specs = {"mask": ColumnSpec("token", np.uint8), "wide": ColumnSpec("token", np.int64)}
    packs = random_samples(400, CAPACITY, np.random.default_rng(5))
    header = write_columned(tmp_path / "bucket/a", packs, specs, capacity=CAPACITY, token_dtype=np.uint16)
    assert header.num_tokens > 4000
    url = serve_folder(tmp_path / "bucket", tmp_path / "msc.json", monkeypatch)
    local, remote = (
        StoredPacks(ShardSet.open(folder, columns=WIDE)).arrays(0) for folder in (str(tmp_path / "bucket"), url)
    )
    assert [array.dtype.itemsize for array in remote] == [2, 1, 1, 8]
    return local, remote


def requests_of(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[int, int]]]:
    """Record requests: by size of an item, the first and the last item of each request."""
    requests: dict[int, list[tuple[int, int]]] = {}
    fetch_items = RemoteArray.fetch

    def note(array: RemoteArray, start: int, stop: int) -> Any:
        requests.setdefault(array.dtype.itemsize, []).append((start, stop))
        return fetch_items(array, start, stop)

    monkeypatch.setattr(RemoteArray, "fetch", note)
    return requests


def gathered(arrays: Arrays, starts: list[int], lengths: list[int]) -> list[list[NDArray[Any]]]:
    """Return these sequences from each array of a shard, read by ``Fetcher``."""
    bounds, slots = np.array([0, len(starts)]), np.zeros(len(starts), np.int32)
    asked = Segments(bounds, slots, np.array(starts, np.int64), np.array(lengths, np.int64))
    placed, (in_memory,) = Fetcher().gather(asked, slots, [arrays])
    ranges = list(zip(placed.starts.tolist(), lengths, strict=True))
    return [[array[start : start + length] for start, length in ranges] for array in in_memory]


def test_each_array_is_requested_by_the_bytes_of_its_items(
    columned: tuple[Arrays, Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, remote = columned
    monkeypatch.setattr(fetch, "_GAP_NBYTES", 400)
    monkeypatch.setattr(fetch, "_MAX_NBYTES", 2000)
    requests = requests_of(monkeypatch)
    # Gaps of 50, 51, 200, 201, 400 and 401 tokens; and at the end, 16 neighbours of 100 tokens each.
    starts = [0, 60, 121, 331, 542, 952, 1363, *range(2000, 3600, 100)]
    lengths = [10] * 7 + [100] * 16
    for array, found in zip(local, gathered(remote, starts, lengths), strict=True):
        for start, length, items in zip(starts, lengths, found, strict=True):
            assert items.tolist() == array[start : start + length].tolist()
    single = [(start, start + 10) for start in starts[:7]]
    assert sorted(requests[8]) == [(0, 70), *single[2:], *((start, start + 200) for start in range(2000, 3600, 200))]
    assert sorted(requests[2]) == [(0, 341), *single[4:], (2000, 3000), (3000, 3600)]
    assert sorted(requests[1]) == 2 * [(0, 962)] + 2 * [(1363, 1373)] + 2 * [(2000, 3600)]


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sequences_of_any_arrays_are_the_local_ones(columned: tuple[Arrays, Arrays], data: st.DataObject) -> None:
    local, remote = columned
    pieces = st.tuples(st.integers(0, 3000), st.integers(0, 900))
    starts, lengths = map(list, zip(*data.draw(st.lists(pieces, min_size=1, max_size=20)), strict=True))
    gap, most = data.draw(st.integers(0, 3000)), data.draw(st.integers(1, 9000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "_GAP_NBYTES", gap)
        patch.setattr(fetch, "_MAX_NBYTES", most)
        found = gathered(remote, starts, lengths)
    for array, items in zip(local, found, strict=True):
        for start, length, of_one in zip(starts, lengths, items, strict=True):
            assert of_one.tolist() == array[start : start + length].tolist()


def test_a_sequence_outside_its_shard_is_refused(places: tuple[Path, str]) -> None:
    _, url = places
    assembler = BatchAssembler(StoredPacks(ShardSet.open(url)), CAPACITY)
    plan = assembler.plan([0])
    plan.starts[-1] += 10**6
    with pytest.raises(ValueError, match="outside"):
        assembler.fill(plan, assembler_batch(assembler))
    array = assembler.source.arrays(0)[0]
    assert isinstance(array, RemoteArray)
    with pytest.raises(ValueError, match="only be read with step 1, not 2"):
        array[::2]


def assembler_batch(assembler: BatchAssembler) -> Any:
    from megatron_sft_idx.training.batch import Batch

    return Batch(assembler.layout(1))


def test_megatron_builds_data_sets_of_remote_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bucket"
    write_packs(folder / "x", 40)
    url = serve_folder(folder, tmp_path / "msc.json", monkeypatch)
    cache = tmp_path / "index-cache"
    remote = config_of(f"{url}/x", split="80,20,0", mmap_bin_files=False, object_storage_cache_path=str(cache))
    sizes = (100, 8, 0)
    for found, expected in zip(
        build(remote, sizes), build(config_of(str(folder / "x"), split="80,20,0"), sizes), strict=True
    ):
        if expected is None:
            assert found is None
            continue
        assert [digest_of(found[i]) for i in range(len(found))] == [digest_of(expected[i]) for i in range(len(found))]
        again = pickle.loads(pickle.dumps(found))
        assert digest_of(again[3]) == digest_of(expected[3])
    assert len(list(cache.iterdir())) == 2


def test_a_batch_that_fails_lets_go_what_is_announced(places: tuple[Path, str]) -> None:
    folder, url = places
    assembler = BatchAssembler(StoredPacks(ShardSet.open(url)), CAPACITY, fetch_nbytes=1 << 20)
    plans = [assembler.plan(batch) for batch in BATCHES]
    write_samples(
        folder / "a",
        random_samples(COUNT, CAPACITY, np.random.default_rng(4), False),
        capacity=CAPACITY,
        overwrite=True,
    )
    for plan in plans:
        assembler.will_need(plan)
    with pytest.raises(FormatError, match="replaced"):
        [assembler.fill(plan, Batch(assembler.layout(len(plan.offsets) - 1))) for plan in plans]
    assert not assembler._fetcher.batches
