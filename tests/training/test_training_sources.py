"""Sources of rows: stored packs, and packs planned over sequences without rewriting tokens."""

from __future__ import annotations

import multiprocessing
import pickle
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_packs import Sample, demo_samples, sample_of, samples, write_samples

from megatron_sft_idx.errors import CorruptShardError, FormatError, SequenceError
from megatron_sft_idx.packing import pack_sequences
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.plan_file import plan_path
from megatron_sft_idx.training.sources import JoinedPacks, PlannedPacks, PlanOptions, StoredPacks, in_slots, require_fit

Pairs = list[tuple[tuple[int, ...], tuple[float, ...]]]


def sequences_of(packs: Sequence[Sample]) -> Pairs:
    """Return ids and label mask of every sequence, in order."""
    return [(tuple(pack.tokens[a:b]), tuple(pack.label_mask[a:b])) for pack in packs for a, b in pairwise(pack.bounds)]


def rows_of(source: Any, packs: Sequence[int]) -> list[Pairs]:
    """Return the sequences of each pack the slow way, one token range at a time through ``segments`` and ``arrays``."""
    found = source.segments(np.array(packs, np.int64))
    assert [found.offsets.dtype, found.shards.dtype, found.starts.dtype, found.lengths.dtype] == [
        np.int64,
        np.int32,
        np.int64,
        np.int64,
    ]
    assert len(found.offsets) == len(packs) + 1
    used, slots = in_slots(found.shards, found.used)
    assert used == sorted(set(found.shards.tolist()))
    assert [used[slot] for slot in slots] == found.shards.tolist()
    rows = []
    for a, b in pairwise(found.offsets):
        row = []
        for shard, start, length in zip(found.shards[a:b], found.starts[a:b], found.lengths[a:b], strict=True):
            ids, mask = source.arrays(int(shard))
            row.append((tuple(ids[start : start + length].tolist()), tuple(mask[start : start + length].tolist())))
        rows.append(row)
    return rows


def write_all(folder: Path, groups: Sequence[Sequence[Sample]]) -> ShardSet:
    for i, packs in enumerate(groups):
        write_samples(folder / f"s{i}", packs, token_dtype=np.uint16, capacity=64)
    return ShardSet.open(folder)


# ---- stored ----


@settings(max_examples=15, deadline=None)
@given(groups=st.lists(samples(), min_size=1, max_size=3).filter(any), data=st.data())
def test_stored_packs_are_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[Sample]], data: st.DataObject
) -> None:
    shards = write_all(tmp_path_factory.mktemp("stored"), groups)
    everything = [sequences_of([pack]) for packs in groups for pack in packs]
    first = data.draw(st.integers(0, len(everything) - 1))
    last = data.draw(st.integers(first + 1, len(everything)))
    source = StoredPacks(shards, first, last)
    assert source.num_packs == last - first
    assert source.num_tokens() == sum(len(ids) for row in everything[first:last] for ids, _ in row)
    packs = data.draw(st.lists(st.integers(0, source.num_packs - 1), max_size=9))
    assert rows_of(source, packs) == [everything[first + i] for i in packs]
    again = pickle.loads(pickle.dumps(source))
    assert again.fingerprint == source.fingerprint
    assert rows_of(again, packs) == rows_of(source, packs)


def test_what_a_source_says_of_itself(tmp_path: Path) -> None:
    packs = demo_samples(9)
    write_samples(tmp_path / "a", packs[:4], capacity=64, sequence_multiple=4, pad_id=7)
    write_samples(tmp_path / "b", packs[4:], capacity=64, sequence_multiple=6)
    source = StoredPacks(ShardSet.open(tmp_path))
    assert (source.num_packs, source.capacity, source.sequence_multiple, source.pad_id) == (9, 64, 2, 7)
    assert source.most_sequences == max(len(pack.starts) for pack in packs)
    assert StoredPacks(source.shards, 0, 8).fingerprint != source.fingerprint


@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 2), (-1, 2), (0, 10), (9, 9)])
def test_ranges_hold_something_and_lie_inside(tmp_path: Path, first: int, last: int) -> None:
    write_samples(tmp_path / "a", demo_samples(9), capacity=64)
    with pytest.raises(FormatError, match=f"{first} to {last} of 9"):
        StoredPacks(ShardSet.open(tmp_path), first, last)


def test_broken_offsets_are_an_error_not_a_crash(tmp_path: Path) -> None:
    write_samples(tmp_path / "a", demo_samples(9), capacity=64)
    source = StoredPacks(ShardSet.open(tmp_path))
    header = source.shards.headers[0]
    with open(tmp_path / "a.seq.idx", "r+b") as file:
        file.seek(header.token_offsets_offset + 8 * 4)
        file.write((2**40).to_bytes(8, "little"))
    with pytest.raises(FormatError, match=r"a\.seq\.idx: byte \d+: pack [34]: token offsets .* \(rule O2\)"):
        source.segments(np.arange(9))
    assert len(source.segments(np.array([0, 1, 5])).offsets) == 4


@pytest.mark.parametrize("kind", ["stored", "blended", "planned", "planned packs", "planned blend"])
def test_offsets_wrong_inside_name_file_pack_rule_and_remedy(tmp_path: Path, kind: str) -> None:
    lengths = [[20], [21], [39], [22], [40], [5]] if "packs" not in kind else [[9, 11], [21], [19, 20], [22], [40], [5]]
    packs = [sample_of(sizes, lambda p: 1.0, lambda p: p + 1) for sizes in lengths]
    for name in ("a", "b"):
        write_samples(tmp_path / name, packs, capacity=40)
    header = ShardSet.open(tmp_path / "b").headers[0]
    offsets = np.cumsum([0, *map(sum, lengths)])
    refused: list[str] = []
    # Move an inner offset by every distance, also if each pack by itself still ascends.
    for at, value in product(range(1, len(packs)), [*range(0, int(offsets[-1]) + 9, 3), -1, 2**40, 2**62]):
        with open(tmp_path / "b.seq.idx", "r+b") as file:
            file.seek(header.token_offsets_offset)
            file.write(offsets.astype("<i8").tobytes())
            file.seek(header.token_offsets_offset + 8 * at)
            file.write(value.to_bytes(8, "little", signed=True))
        try:
            if "planned" in kind:
                sources: list[Any] = [PlannedPacks(ShardSet.open(tmp_path / n), PlanOptions(40)) for n in ("a", "b")]
            else:
                sources = [StoredPacks(ShardSet.open(tmp_path / n)) for n in ("a", "b")]
            source = JoinedPacks(sources) if "blend" in kind else sources[1]
            BatchAssembler(source, 40).assemble(np.arange(source.num_packs))
        except CorruptShardError as error:
            refused.append(str(error))
        else:  # every pack still fits: only the checksum shows it
            moved = offsets.copy()
            moved[at] = value
            assert np.diff(moved).min() > 0
            assert np.diff(moved).max() <= 40
    assert len(refused) > 100
    form = re.compile(r".*/b\.seq\.(idx|bin): byte \d+: pack \d+: .*(rebuild|verify).* \(rules? [OP]\d.*\)")
    assert [said for said in refused if not form.fullmatch(said)] == []


def test_stored_packs_join_planned_ones(tmp_path: Path) -> None:
    for name, count in (("a", 9), ("b", 5)):
        write_samples(tmp_path / name, demo_samples(count), capacity=64)
    planned = PlannedPacks(ShardSet.open(tmp_path / "a"), PlanOptions(64))
    stored = StoredPacks(ShardSet.open(tmp_path / "b"))
    joined, first = JoinedPacks([planned, stored]), planned.num_packs
    behind = rows_of(stored, range(stored.num_packs))
    assert rows_of(joined, range(first, joined.num_packs)) == behind  # of one source only
    assert rows_of(joined, range(joined.num_packs)) == rows_of(planned, range(first)) + behind


# ---- planned ----

LONGEST = 9  # longest sequence that ``samples`` draws


@settings(max_examples=15, deadline=None)
@given(
    groups=st.lists(samples(), min_size=1, max_size=3).filter(any),
    capacity=st.integers(12, 40),
    multiple=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_a_plan_holds_every_sequence_once(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[list[Sample]],
    capacity: int,
    multiple: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("planned")
    shards = write_all(folder, groups)
    everything = [pair for packs in groups for pair in sequences_of(packs)]
    first = data.draw(st.integers(0, len(everything) - 1))
    last = data.draw(st.integers(first + 1, len(everything)))
    options = PlanOptions(capacity, multiple, seed=data.draw(st.integers(0, 99)))
    source = PlannedPacks(shards, options, cache=folder / "cache", first=first, last=last)
    rows = rows_of(source, range(source.num_packs))
    assert Counter(pair for row in rows for pair in row) == Counter(everything[first:last])
    assert all(sum(-(-len(ids) // multiple) * multiple for ids, _ in row) <= capacity for row in rows)
    assert source.most_sequences == max(map(len, rows))
    assert source.num_tokens() == sum(len(ids) for ids, _ in everything[first:last])
    assert rows_of(PlannedPacks(shards, options, first=first, last=last), range(source.num_packs)) == rows
    assert rows_of(pickle.loads(pickle.dumps(source)), range(source.num_packs)) == rows


def test_the_plan_is_the_packers(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    corpus = [sample_of([n], lambda p: p % 2, lambda p, i=i: (i * 60 + p) % 60_000) for i, n in enumerate(lengths)]
    write_samples(tmp_path / "a", corpus[:200])
    write_samples(tmp_path / "b", corpus[200:])
    source = PlannedPacks(ShardSet.open(tmp_path, same_capacity=False), PlanOptions(64, seed=5))
    plan = pack_sequences(lengths, 64, seed=5)
    expected = [sequences_of([corpus[s] for s in plan.sequences[a:b]]) for a, b in pairwise(plan.offsets)]
    assert rows_of(source, range(source.num_packs)) == expected


def test_an_option_or_other_data_is_another_plan(tmp_path: Path) -> None:
    for name, count in (("a", 9), ("b", 8)):
        write_samples(tmp_path / name, demo_samples(count), capacity=64)
    a, b = ShardSet.open(tmp_path / "a"), ShardSet.open(tmp_path / "b")
    plain = PlanOptions(64)
    made = [
        PlannedPacks(a, plain),
        PlannedPacks(a, plain, last=5),
        PlannedPacks(b, plain),
        PlannedPacks(a, PlanOptions(65)),
        PlannedPacks(a, PlanOptions(64, sequence_multiple=2)),
        PlannedPacks(a, PlanOptions(64, method="sequential")),
        PlannedPacks(a, PlanOptions(64, max_sequences_per_pack=4)),
        PlannedPacks(a, PlanOptions(64, seed=1)),
    ]
    assert len({source.fingerprint for source in made}) == len(made)
    assert made[6].most_sequences <= 4
    assert PlannedPacks(a, plain).fingerprint == made[0].fingerprint


def test_overlong_sequences_are_counted(tmp_path: Path) -> None:
    corpus = [sample_of([n], lambda p: 1, lambda p: p) for n in (3, 17, 16, 20, 5)]
    write_samples(tmp_path / "a", corpus)
    shards = ShardSet.open(tmp_path)
    for call in (lambda options: PlannedPacks(shards, options), lambda options: require_fit(shards, options)):
        with pytest.raises(SequenceError, match=r"2 of 5 sequences are longer than 16 tokens \(the longest has 20\)"):
            call(PlanOptions(18, sequence_multiple=4))
    PlannedPacks(shards, PlanOptions(20))


# ---- the cache ----


def test_a_cached_plan_is_mapped_and_not_made_again(tmp_path: Path) -> None:
    write_samples(tmp_path / "a", demo_samples(9), capacity=64)
    shards, cache = ShardSet.open(tmp_path / "a"), tmp_path / "deep" / "cache"
    first = PlannedPacks(shards, PlanOptions(64), cache=cache)
    path = Path(plan_path(str(cache), first.fingerprint))
    assert sorted(cache.iterdir()) == [path, path.with_name(path.name + ".lock")]
    assert str(path) in Path("/proc/self/maps").read_text()
    changed = path.stat()
    second = PlannedPacks(shards, PlanOptions(64), cache=cache)
    assert path.stat() == changed
    assert rows_of(second, range(second.num_packs)) == rows_of(first, range(first.num_packs))
    with pytest.raises(ValueError, match="read-only"):
        second.plan.starts[0] = 1


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "negative", "deep"])
def test_a_damaged_plan_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    write_samples(tmp_path / "a", demo_samples(9), capacity=64)
    shards = ShardSet.open(tmp_path / "a")
    path = Path(plan_path(str(tmp_path), PlannedPacks(shards, PlanOptions(64), cache=tmp_path).fingerprint))
    raw = path.read_bytes()
    negative = b'{"revision": 1, "packs": -1, "sequences": 0, "most_sequences": 1}'.ljust(4096)
    other = raw.replace(b'"revision": 1', b'"revision": 9')
    path.write_bytes({"cut": raw[:-1], "empty": b"", "other": other, "negative": negative, "deep": b"[" * 4096}[damage])
    with pytest.raises(FormatError, match=f"{path.name}.*it will be created again"):
        PlannedPacks(shards, PlanOptions(64), cache=tmp_path)


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_samples(tmp_path / "a", demo_samples(40), capacity=64)
    shards = ShardSet.open(tmp_path / "a")
    (tmp_path / "file").write_text("in the way")
    source = PlannedPacks(shards, PlanOptions(64), cache=tmp_path / "file")
    assert "cannot be cached" in caplog.text
    packs = range(source.num_packs)
    assert rows_of(source, packs) == rows_of(PlannedPacks(shards, PlanOptions(64)), packs)


def _plan(prefix: str, cache: str, start: Any) -> tuple[str, float]:
    shards = ShardSet.open(prefix)
    start.wait()
    source = PlannedPacks(shards, PlanOptions(64), cache=cache)
    return source.fingerprint, float(source.plan.starts.sum())


def test_processes_that_start_together_share_one_plan(tmp_path: Path) -> None:
    write_samples(tmp_path / "a", demo_samples(400), capacity=64)
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        start = manager.Barrier(4)
        with context.Pool(4) as pool:
            found = pool.starmap(_plan, [(str(tmp_path / "a"), str(tmp_path / "cache"), start)] * 4, chunksize=1)
    assert len(set(found)) == 1
    assert len([path for path in (tmp_path / "cache").iterdir() if path.suffix == ".bin"]) == 1
    assert not list((tmp_path / "cache").glob("*.tmp"))
