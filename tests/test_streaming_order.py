"""The order of a catalog: every pack once an epoch, whatever the ranks, the windows, and where a job was cut off."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_catalogs import LateEnd, MemoryShards, MicroBatch, walk

from megatron_sft_idx.errors import FormatError, UnsupportedVersionError
from megatron_sft_idx.live import Base, Leftover
from megatron_sft_idx.live.live_order import Group, RankState, next_group, pack_order, resume

Pack = tuple[int, int]
COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=12)
SIZES = st.integers(1, 5)


def start(size: int, rank: int, *, window: int = 1, rows: int = 1, shuffle: bool = True, seed: int = 7) -> RankState:
    return RankState(Base(seed=seed, window=window), shuffle, size, rank, batch_rows=rows, step_rows=rows)


def packs_of(batch: MicroBatch) -> list[Pack]:
    real = len(batch.shards) - batch.num_masked
    return list(zip(batch.shards[:real].tolist(), batch.packs[:real].tolist(), strict=True))


def all_packs(counts: list[int]) -> Counter[Pack]:
    return Counter((shard, pack) for shard, packs in enumerate(counts) for pack in range(packs))


def test_at_a_fresh_start_shard_s_belongs_to_rank_s_mod_size() -> None:
    for size in (1, 2, 4):
        for rank in range(size):
            shards = [next_group(Base(), size, rank, items, None) for items in range(3)]
            assert shards == [Group((rank + items * size,), 0, 1) for items in range(3)]


def test_a_window_is_of_a_ranks_own_shards_and_the_last_one_may_be_smaller() -> None:
    base = Base(window=3)
    assert next_group(base, 2, 1, 0, None) == Group((1, 3, 5), 0, 3)
    assert next_group(base, 2, 1, 3, 10) == Group((7, 9), 0, 2)
    assert next_group(base, 2, 1, 5, 10) is None


def test_what_was_begun_is_finished_by_itself() -> None:
    base = Base(window=2, leftovers=(Leftover((0, 2), 5), Leftover((1,)), Leftover((3,))), frontier=4)
    groups = [next_group(base, 1, 0, items, None) for items in (0, 1, 3)]
    assert groups == [Group((0, 2), 5, 1), Group((1, 3), 0, 2), Group((4, 5), 0, 2)]


def test_the_shuffle_depends_on_seed_epoch_and_shards() -> None:
    orders = {
        tuple(pack_order(Base(epoch=epoch, seed=seed), shards, 50, shuffle=True))
        for epoch in (0, 1)
        for seed in (0, 1)
        for shards in ((0,), (1,), (0, 1))
    }
    assert len(orders) == 12
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert pack_order(Base(), (3,), 5, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_order_never_changes() -> None:
    """Checkpoints of any version go on with the packs that would have come."""
    order = pack_order(Base(epoch=1, seed=1234), (3, 7), 12, shuffle=True)
    assert order.tolist() == [4, 6, 7, 2, 3, 0, 8, 9, 1, 10, 5, 11]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    counts=COUNTS, size=SIZES, window=st.integers(1, 4), rows=st.integers(1, 4), shuffle=st.booleans(), data=st.data()
)
def test_every_pack_comes_once_an_epoch_and_ranks_take_equal_steps(
    counts: list[int], size: int, window: int, rows: int, shuffle: bool, data: st.DataObject
) -> None:
    catalog = data.draw(st.sampled_from([MemoryShards, LateEnd]))
    ranks = [
        list(walk(catalog(counts), start(size, rank, window=window, rows=rows, shuffle=shuffle), epochs=2))
        for rank in range(size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    for epoch in (0, 1):
        served = [packs_of(b) for batches in ranks for b in batches if b.state.base.epoch == epoch]
        assert Counter(pack for batch in served for pack in batch) == all_packs(counts)
    for batches in ranks:
        padded = [(b.state.base.epoch, b.num_masked > 0) for b in batches]
        assert padded == sorted(padded)  # no real row comes after one of padding
        assert all(len(b.shards) == rows for b in batches)


@pytest.mark.parametrize("counts", [[4, 0], [0, 4], [0, 0], [3, 0, 2, 0, 0]])
@pytest.mark.parametrize("window", [1, 2])
def test_empty_shards_bring_nothing_and_hide_nothing(counts: list[int], window: int) -> None:
    for catalog in (MemoryShards, LateEnd):
        taken = list(walk(catalog(counts), start(1, 0, window=window, rows=3)))
        assert Counter(pack for batch in taken for pack in packs_of(batch)) == all_packs(counts)
        assert len(taken) == -(-sum(counts) // 3)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(counts=COUNTS, size=SIZES, window=st.integers(1, 3), rows=st.integers(1, 3), steps=st.integers(1, 3))
def test_dropping_ends_every_rank_with_the_last_step_that_all_can_take(
    counts: list[int], size: int, window: int, rows: int, steps: int
) -> None:
    ranks = []
    for rank in range(size):
        state = RankState(Base(window=window), True, size, rank, batch_rows=rows, step_rows=rows * steps)
        ranks.append(list(walk(LateEnd(counts), state, at_end="drop")))
    have = [sum(counts[rank::size]) for rank in range(size)]
    assert {len(batches) for batches in ranks} == {min(have) // (rows * steps) * steps}
    served = Counter(pack for batches in ranks for batch in batches for pack in packs_of(batch))
    assert served <= all_packs(counts)
    assert all(batch.num_masked == 0 for batches in ranks for batch in batches)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(counts=COUNTS, sizes=st.lists(SIZES, min_size=2, max_size=5), data=st.data())
def test_what_is_left_is_dealt_out_anew_exactly_once(counts: list[int], sizes: list[int], data: st.DataObject) -> None:
    window, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    states = [start(sizes[0], rank, window=window, rows=rows) for rank in range(sizes[0])]
    served: Counter[Pack] = Counter()
    for following in [*sizes[1:], None]:
        catalog = data.draw(st.sampled_from([MemoryShards, LateEnd]))
        steps = None if following is None else data.draw(st.integers(0, 12))
        reached = []
        for state in states:
            batches = list(itertools.islice(walk(catalog(counts), state), steps))
            served.update(pack for batch in batches for pack in packs_of(batch))
            reached.append(batches[-1].state if batches else state)
        assert len({state.rows for state in reached}) == 1
        if following is not None:
            window, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
            saved = [RankState.from_json(json.loads(json.dumps(state.to_json()))) for state in reached]
            states = [
                resume(saved, following, rank, window=window, batch_rows=rows, step_rows=rows)
                for rank in range(following)
            ]
    assert served == all_packs(counts)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(counts=COUNTS, size=SIZES, window=st.integers(1, 3), rows=st.integers(1, 3), data=st.data())
def test_going_on_from_ones_own_state_gives_what_would_have_come(
    counts: list[int], size: int, window: int, rows: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    at_end = data.draw(st.sampled_from(["pad", "drop"]))
    whole = list(walk(LateEnd(counts), start(size, rank, window=window, rows=rows), epochs=2, at_end=at_end))
    if not whole:
        return
    cut = data.draw(st.integers(0, len(whole) - 1))
    state = RankState.from_json(json.loads(json.dumps(whole[cut].state.to_json())))
    assert state == whole[cut].state
    again = list(walk(MemoryShards(counts), state, epochs=2, at_end=at_end))
    assert len(again) == len(whole) - cut - 1
    for one, other in zip(again, whole[cut + 1 :], strict=True):
        assert np.array_equal(one.shards, other.shards)
        assert np.array_equal(one.packs, other.packs)
        assert (one.num_masked, one.state) == (other.num_masked, other.state)


# ---- states that cannot be ----


def saved(size: int = 2, steps: int = 3) -> list[dict[str, Any]]:
    counts = [4, 4, 4, 4]
    return [[b.state for b in walk(MemoryShards(counts), start(size, rank))][steps].to_json() for rank in range(size)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": "1"}, "version"),
        ({"rank": 2}, "go together"),
        ({"rank": -1}, "rank"),
        ({"size": 0}, "size"),
        ({"rows": 2**63}, "rows"),
        ({"shards": "0"}, "shards"),
        ({"shards": [True]}, "shards"),
        ({"offset": 3, "shards": []}, "go together"),
        ({"shuffle": 1}, "shuffle"),
        ({"base": None}, "base"),
        ({"base": {"epoch": 0, "seed": 0, "window": 0, "leftovers": [], "frontier": 0}}, "window"),
        ({"base": {"epoch": 0, "seed": 0, "window": 1, "leftovers": [{}], "frontier": 0}}, "shards"),
        (
            {"base": {"epoch": 0, "seed": 0, "window": 1, "leftovers": [{"shards": [], "offset": 0}], "frontier": 0}},
            "leftovers",
        ),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(FormatError, match=f"state_dict.*{says}"):
        RankState.from_json({**saved()[0], **change})


def test_a_state_of_a_later_version_is_refused() -> None:
    with pytest.raises(UnsupportedVersionError):
        RankState.from_json({**saved()[0], "version": 2})
    with pytest.raises(FormatError, match="found list"):
        RankState.from_json([])


def test_a_state_that_says_some_things_twice_is_read() -> None:
    """As checkpoints do that were written when epoch, seed and window stood beside the base too."""
    state = saved()[0]
    assert RankState.from_json({**state, "epoch": 0, "seed": 7, "window": 1}).to_json() == state


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(sorted(saved()[0])), st.none() | st.integers() | st.text() | st.lists(st.integers())
    )
)
def test_any_damage_is_a_format_error_or_none(change: dict[str, Any]) -> None:
    with contextlib.suppress(FormatError):
        RankState.from_json({**saved()[0], **change})


def test_states_of_several_steps_or_jobs_do_not_go_together() -> None:
    first, second = (RankState.from_json(state) for state in saved())
    later = RankState.from_json(saved(steps=4)[1])
    for states, says in (
        ([], "empty list"),
        ([first], r"ranks \[0\]"),
        ([first, first], r"ranks \[0, 0\]"),
        ([replace(first, size=2**62)], r"expected one of each of the 4611686018427387904"),
        ([first, later], "one step"),
    ):
        with pytest.raises(FormatError, match=says):
            resume(states, 3, 0, window=1, batch_rows=1, step_rows=1)
    assert resume([second, first], 3, 0, window=1, batch_rows=1, step_rows=1).generation == 1


@pytest.mark.parametrize("change", [{"shards": [1]}, {"offset": 99}])
def test_a_state_of_another_catalog_is_refused(change: dict[str, Any]) -> None:
    state = RankState.from_json({**saved(steps=1)[0], "packs": 2000, **change})
    with pytest.raises(FormatError, match="memory: the state"):
        list(walk(MemoryShards([4, 4, 4, 4]), state))


def test_a_rest_of_a_shard_that_has_fewer_packs_is_refused() -> None:
    (state,) = (batch.state for batch in list(walk(MemoryShards([8, 8]), start(1, 0)))[3:4])
    state = resume([state], 1, 0, window=1, batch_rows=1, step_rows=1)
    assert state.base.leftovers[0].offset > 3
    with pytest.raises(FormatError, match="which have 3; resume with the catalog and the state that go together"):
        list(walk(MemoryShards([3, 3]), state))


def test_a_damaged_state_is_not_followed_far() -> None:
    first, second = (RankState.from_json(state) for state in saved())
    with pytest.raises(FormatError, match="shards ahead of another"):
        resume([replace(first, items=2**60), second], 3, 0, window=1, batch_rows=1, step_rows=1)
