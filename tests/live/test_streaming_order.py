"""The order in which ranks read live shards: every pack once per epoch, for any ranks, windows and interruptions.

These rules determine the order:

* The shards of a catalog are numbered from 0. A rank reads whole shards, in groups of ``window`` shards, and the packs
  of a group are shuffled together. At a fresh start shard s belongs to rank s mod size.
* A ``Deal`` determines what all ranks read. A ``RankState`` is the progress of one rank in its deal. A checkpoint holds
  the states of all ranks.
* If a job is resumed with another number of ranks, ``dealt_anew`` makes a deal of the remaining shards. Its leftovers,
  shards that some rank had begun or not reached, are dealt first. The shards from ``frontier`` on follow.

The catalogs here are lists of pack counts: ``[4, 0, 2]`` has three shards with 4, 0 and 2 packs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_catalogs import LateEnd, MemoryShards, MicroBatch, walk

from megatron_sft_idx.errors import FormatError, UnsupportedVersionError
from megatron_sft_idx.live.live_order import Deal, Group, Item, RankState, dealt_anew, states_from_json, states_to_json

# Shard of a pack, and its number in that shard.
Pack: TypeAlias = tuple[int, int]
COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=12)
SIZES = st.integers(1, 5)
SEED = 7
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def start(size: int, rank: int, *, window: int = 1, rows: int = 1, shuffle: bool = True) -> RankState:
    """Return a rank's state before its first pack. It takes ``rows`` packs per micro-batch and per step."""
    return RankState(Deal(size, window, SEED, shuffle), rank, batch_rows=rows, step_rows=rows)


def packs_of(batch: MicroBatch) -> list[Pack]:
    """Return the packs of a micro-batch that are trained on."""
    real = len(batch.shards) - batch.num_masked
    return list(zip(batch.shards[:real].tolist(), batch.packs[:real].tolist(), strict=True))


def packs_of_all(batches: Sequence[MicroBatch]) -> Counter[Pack]:
    return Counter(pack for batch in batches for pack in packs_of(batch))


def all_packs(counts: list[int]) -> Counter[Pack]:
    return Counter((shard, pack) for shard, packs in enumerate(counts) for pack in range(packs))


def through_json(state: RankState) -> RankState:
    """Return the state after a round trip through a checkpoint."""
    return RankState.from_json(json.loads(json.dumps(state.to_json())))


def gone_on(states: Sequence[RankState], size: int, *, window: int = 1, rows: int = 1) -> list[RankState]:
    """Return the states of ``size`` ranks that resume from the states of a checkpoint."""
    deal = dealt_anew(states, size, window)
    return [RankState(deal, rank, states[0].generation + 1, rows, rows) for rank in range(size)]


# ---- examples by hand ----


def test_at_a_fresh_start_shard_s_belongs_to_rank_s_mod_size() -> None:
    for size in (1, 2, 4):
        for rank in range(size):
            groups = [Deal(size).group(rank, items_done, end=None) for items_done in range(3)]
            assert groups == [Group((rank + items_done * size,), 0, 1) for items_done in range(3)]


def test_a_group_has_shards_of_one_rank_and_the_last_one_may_be_smaller() -> None:
    deal = Deal(size=2, window=3)
    assert deal.group(rank=1, items_done=0, end=None) == Group(shards=(1, 3, 5), packs_read=0, num_items=3)
    assert deal.group(rank=1, items_done=3, end=10) == Group(shards=(7, 9), packs_read=0, num_items=2)
    assert deal.group(rank=1, items_done=5, end=10) is None


def test_a_group_that_was_begun_is_finished_by_itself() -> None:
    """Shards 0 and 2 were read up to pack 5, shards 1 and 3 not at all, and shard 4 is next."""
    deal = Deal(size=1, window=2, leftovers=(Item((0, 2), 5), Item((1,)), Item((3,))), frontier=4)
    assert deal.group(rank=0, items_done=0, end=None) == Group(shards=(0, 2), packs_read=5, num_items=1)
    assert deal.group(rank=0, items_done=1, end=None) == Group(shards=(1, 3), packs_read=0, num_items=2)
    assert deal.group(rank=0, items_done=3, end=None) == Group(shards=(4, 5), packs_read=0, num_items=2)


def test_the_shuffle_depends_on_seed_epoch_and_shards() -> None:
    orders = {
        tuple(Deal(size=2, epoch=epoch, seed=seed).pack_order(shards, 50).tolist())
        for epoch in (0, 1)
        for seed in (0, 1)
        for shards in ((0,), (1,), (0, 1))
    }
    assert len(orders) == 12
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert Deal(size=2, shuffle=False).pack_order((3,), 5).tolist() == [0, 1, 2, 3, 4]


def test_the_order_never_changes() -> None:
    """Checkpoints of all versions must continue with the same packs."""
    order = Deal(size=4, epoch=1, seed=1234).pack_order((3, 7), 12)
    assert order.tolist() == [4, 6, 7, 2, 3, 0, 8, 9, 1, 10, 5, 11]


# ---- whole epochs ----


@patient
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
        of_epoch = [batch for batches in ranks for batch in batches if batch.state.deal.epoch == epoch]
        assert packs_of_all(of_epoch) == all_packs(counts)
    for batches in ranks:
        padded = [(batch.state.deal.epoch, batch.num_masked > 0) for batch in batches]
        assert padded == sorted(padded)  # no real row comes after a padding row
        assert all(len(batch.shards) == rows for batch in batches)


@pytest.mark.parametrize("counts", [[4, 0], [0, 4], [0, 0], [3, 0, 2, 0, 0]])
@pytest.mark.parametrize("window", [1, 2])
def test_empty_shards_bring_nothing_and_hide_nothing(counts: list[int], window: int) -> None:
    for catalog in (MemoryShards, LateEnd):
        taken = list(walk(catalog(counts), start(1, 0, window=window, rows=3)))
        assert packs_of_all(taken) == all_packs(counts)
        assert len(taken) == -(-sum(counts) // 3)


@patient
@given(counts=COUNTS, size=SIZES, window=st.integers(1, 3), rows=st.integers(1, 3), batches=st.integers(1, 3))
def test_dropping_ends_every_rank_with_the_last_step_that_all_can_take(
    counts: list[int], size: int, window: int, rows: int, batches: int
) -> None:
    """A step is ``batches`` micro-batches of ``rows`` packs."""
    ranks = []
    for rank in range(size):
        state = replace(start(size, rank, window=window, rows=rows), step_rows=rows * batches)
        ranks.append(list(walk(LateEnd(counts), state, at_end="drop")))
    packs_of_rank = [sum(counts[rank::size]) for rank in range(size)]
    assert {len(taken) for taken in ranks} == {min(packs_of_rank) // (rows * batches) * batches}
    assert packs_of_all([batch for taken in ranks for batch in taken]) <= all_packs(counts)
    assert all(batch.num_masked == 0 for taken in ranks for batch in taken)


# ---- resuming ----


@patient
@given(counts=COUNTS, sizes=st.lists(SIZES, min_size=2, max_size=5), data=st.data())
def test_what_is_left_is_dealt_out_anew_exactly_once(counts: list[int], sizes: list[int], data: st.DataObject) -> None:
    """Jobs follow one another with different numbers of ranks. All jobs except the last end after some steps."""
    window, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    states = [start(sizes[0], rank, window=window, rows=rows) for rank in range(sizes[0])]
    served: Counter[Pack] = Counter()
    for next_size in [*sizes[1:], None]:
        catalog = data.draw(st.sampled_from([MemoryShards, LateEnd]))
        steps = None if next_size is None else data.draw(st.integers(0, 12))
        reached = []
        for state in states:
            batches = list(itertools.islice(walk(catalog(counts), state), steps))
            served.update(packs_of_all(batches))
            reached.append(batches[-1].state if batches else state)
        assert len({state.rows for state in reached}) == 1
        if next_size is not None:
            window, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
            states = gone_on([through_json(state) for state in reached], next_size, window=window, rows=rows)
    assert served == all_packs(counts)


@patient
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
    state = through_json(whole[cut].state)
    assert state == whole[cut].state
    again = list(walk(MemoryShards(counts), state, epochs=2, at_end=at_end))
    assert len(again) == len(whole) - cut - 1
    for one, other in zip(again, whole[cut + 1 :], strict=True):
        assert np.array_equal(one.shards, other.shards)
        assert np.array_equal(one.packs, other.packs)
        assert (one.num_masked, one.state) == (other.num_masked, other.state)


# ---- impossible states ----


def saved(steps: int = 3) -> list[dict[str, Any]]:
    """Return the checkpoint of two ranks after some steps in four shards of four packs."""
    batches_of_rank = [list(walk(MemoryShards([4, 4, 4, 4]), start(2, rank))) for rank in range(2)]
    return [batches[steps].state.to_json() for batches in batches_of_rank]


def deal_with(**fields: Any) -> dict[str, Any]:
    """Return the change that gives a saved state a deal with other fields."""
    return {"deal": {**saved()[0]["deal"], **fields}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": "1"}, "version"),
        ({"rank": 2}, "rank is 2, expected less than its size 2"),
        ({"rank": -1}, "rank"),
        ({"rows": 2**63}, "rows"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"open_shards": "0"}, "open_shards"),
        ({"open_shards": [True]}, "open_shards"),
        ({"open_packs": 3, "open_shards": []}, "open_packs is 3, expected more than 0 where a group is open"),
        ({"open_packs": 0, "open_shards": [0]}, "open_packs is 0, expected more than 0 where a group is open"),
        (
            {"open_packs": 3, "open_shards": [0], "packs": 2},
            "packs is 2, expected at least the items of the open group",
        ),
        ({"deal": None}, "deal"),
        (deal_with(size=0), "deal.size"),
        (deal_with(shuffle=1), "deal.shuffle"),
        (deal_with(window=0), "deal.window"),
        (deal_with(leftovers=[{}]), "shards"),
        (deal_with(leftovers=[{"shards": [], "packs_read": 0}]), "leftovers"),
        (deal_with(leftovers=[{"shards": [1, 2], "packs_read": 0}]), "leftovers"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(FormatError, match=f"state_dict.*{says}"):
        RankState.from_json({**saved()[0], **change})


def test_states_of_all_ranks_share_their_deal() -> None:
    """A deal can have thousands of leftovers, and there can be a thousand ranks."""
    states = [RankState.from_json(state) for state in saved()]
    contents = states_to_json(states)
    assert contents == [state.to_json() for state in states]
    assert contents[0]["deal"] is contents[1]["deal"]
    read = states_from_json(json.loads(json.dumps(contents)))
    assert read == states
    assert read[0].deal is read[1].deal
    other = replace(states[1], deal=replace(states[1].deal, seed=9))
    assert states_from_json([*contents, other.to_json(), contents[0]]) == [*states, other, states[0]]


def test_a_state_of_another_version_is_refused() -> None:
    for version in (1, 3):
        with pytest.raises(UnsupportedVersionError):
            RankState.from_json({**saved()[0], "version": version})
    with pytest.raises(FormatError, match="found list"):
        RankState.from_json([])


@patient
@given(
    st.dictionaries(
        st.sampled_from(sorted(saved()[0])), st.none() | st.integers() | st.text() | st.lists(st.integers())
    )
)
def test_any_damage_is_a_format_error_or_none(change: dict[str, Any]) -> None:
    with contextlib.suppress(FormatError):
        RankState.from_json({**saved()[0], **change})


def test_states_of_several_steps_or_jobs_do_not_go_together() -> None:
    first, second = map(RankState.from_json, saved())
    later = RankState.from_json(saved(steps=4)[1])
    of_many_ranks = replace(first, deal=replace(first.deal, size=2**62))
    of_another_seed = replace(second, deal=replace(second.deal, seed=8))
    for states, says in (
        ([], "empty list"),
        ([first], r"ranks \[0\]"),
        ([first, first], r"ranks \[0, 0\]"),
        ([of_many_ranks], r"expected one state for each of the 4611686018427387904"),
        ([first, later], "at different steps"),
        ([first, of_another_seed], "at different steps"),
    ):
        with pytest.raises(FormatError, match=says):
            dealt_anew(states, size=3, window=1)
    assert dealt_anew([second, first], size=3, window=1) == dealt_anew([first, second], size=3, window=1)


@pytest.mark.parametrize("change", [{"open_shards": [1]}, {"open_packs": 99}])
def test_a_state_of_another_catalog_is_refused(change: dict[str, Any]) -> None:
    state = RankState.from_json({**saved(steps=1)[0], "packs": 2000, **change})
    with pytest.raises(
        FormatError, match=r"memory: in the state, rank 0 of 2 was at .*, but this catalog leads to shards"
    ):
        list(walk(MemoryShards([4, 4, 4, 4]), state))


def test_the_rest_of_a_shard_that_has_fewer_packs_is_refused() -> None:
    after_four = next(itertools.islice(walk(MemoryShards([8, 8]), start(1, 0)), 3, None)).state
    (state,) = gone_on([after_four], 1)
    assert state.deal.leftovers == (Item((0,), 4),)
    with pytest.raises(FormatError, match="but these have only 3; resume with the catalog that belongs to the state"):
        list(walk(MemoryShards([3, 3]), state))


def test_a_damaged_state_is_not_followed_far() -> None:
    first, second = map(RankState.from_json, saved())
    with pytest.raises(FormatError, match="items ahead of another"):
        dealt_anew([replace(first, items=2**60), second], size=3, window=1)
