"""Which shards are completed, computed from the acknowledgements of each consumer's ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Ack, Catalog, Deal, Item, ack_folder, completed, read_acks, write_ack
from megatron_sft_idx.live.acks import ConsumerAcks, uncompleted
from megatron_sft_idx.live.live_order import RankState

TWO = Deal(size=2)


def ack(
    rank: int, items_done: int, deal: Deal = TWO, *, consumer: str = "a", generation: int = 0, epochs: int = 1
) -> Ack:
    return Ack(consumer, generation, deal, rank, items_done, 10 * items_done, epochs)


def done(*acks: Ack, consumers: int = 1, most: int = 12) -> list[int]:
    by_consumer: dict[str, list[Ack]] = {}
    for each in acks:
        by_consumer.setdefault(each.consumer, []).append(each)
    return completed(by_consumer, consumers, range(most))


def test_a_fresh_start_is_shard_s_to_rank_s_mod_size():
    assert done(ack(0, 2), ack(1, 1)) == [0, 1, 2]
    assert done(ack(0, 0), ack(1, 2)) == [1, 3]


def test_a_rank_without_an_acknowledgement_has_done_nothing():
    assert done(ack(1, 2)) == [1, 3]


def test_what_was_left_over_is_open_until_its_item_is_done():
    """Item 0 is the rest of shards 3 and 4, item 1 shard 6; shards 8 and 9 are items 2 and 3."""
    deal = Deal(size=2, leftovers=(Item((3, 4), 17), Item((6,))), frontier=8)
    assert done(ack(0, 0, deal), ack(1, 0, deal)) == [0, 1, 2, 5, 7]
    assert done(ack(0, 1, deal), ack(1, 0, deal)) == [0, 1, 2, 3, 4, 5, 7]
    assert done(ack(0, 2, deal), ack(1, 2, deal)) == list(range(10))


def test_only_the_last_epoch_counts():
    second, third = TWO.of_epoch(1), TWO.of_epoch(2)
    assert done(ack(0, 5, epochs=3), ack(1, 5, second, epochs=3)) == []
    assert done(ack(0, 5, second, epochs=3), ack(1, 1, third, epochs=3)) == [1]


def test_before_the_last_epoch_everything_is_uncompleted():
    acks = [ack(rank, 5, epochs=2) for rank in range(2)]
    assert done(*acks) == []
    assert uncompleted(acks, below=12) == list(range(12))


@given(
    items_done=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    leftovers=st.lists(st.integers(1, 3), max_size=5),
    untouched=st.integers(0, 3),
)
def test_a_shard_is_either_completed_or_uncompleted(items_done, leftovers, untouched):
    """``leftovers`` are the sizes of groups of shards."""
    ends = list(itertools.accumulate(leftovers))
    groups = [range(end - length, end) for end, length in zip(ends, leftovers, strict=True)]
    frontier = sum(leftovers) + untouched
    deal = Deal(len(items_done), leftovers=tuple(Item(tuple(group), 1) for group in groups), frontier=frontier)
    acks = [ack(rank, items, deal) for rank, items in enumerate(items_done)]
    assert sorted([*done(*acks, most=40), *uncompleted(acks, below=40)]) == list(range(40))


def next_generation(folder: Path, acknowledged: Ack, state: RankState) -> int:
    write_ack(str(folder), acknowledged)
    return ConsumerAcks(str(folder), acknowledged.consumer, acknowledged.epochs).next_generation(state)


def test_a_job_with_another_seed_has_a_generation_of_its_own(tmp_path):
    """Otherwise, shards that the earlier job completed in its last epoch would count for the new job's first epoch."""
    before = ack(1, 5, Deal(size=2, seed=1, epoch=1), epochs=2)
    assert next_generation(tmp_path, before, RankState(Deal(size=2, seed=2), rank=0)) == 1
    assert next_generation(tmp_path, before, RankState(Deal(size=2, seed=1), rank=0)) == 0


def test_a_run_from_an_earlier_epoch_does_not_join_what_was_dealt_out_in_a_later_one(tmp_path):
    dealt = ack(1, 5, Deal(size=2, epoch=1, leftovers=(Item((0,), 3),), frontier=1), epochs=2)
    assert next_generation(tmp_path, dealt, RankState(TWO, rank=0)) == dealt.generation + 1
    earlier = ack(0, 0, epochs=2)
    assert not dealt.agrees_with(earlier)
    assert earlier.agrees_with(ack(1, 5, TWO.of_epoch(1), epochs=2))


def test_a_shard_is_complete_when_it_is_for_every_consumer_and_all_of_them_are_there():
    one, other = ack(0, 3, Deal(size=1)), ack(0, 1, Deal(size=1), consumer="b")
    assert done(one, consumers=2) == []
    assert done(one, other, consumers=2) == [0]
    assert done(one, other, consumers=1) == [0]


def test_the_newest_generation_counts(tmp_path):
    folder = ack_folder(Catalog(tmp_path))
    for rank in range(4):
        write_ack(folder, ack(rank, 1, Deal(size=4)))
    deal = Deal(size=2, leftovers=(Item((1,), 3),), frontier=4)
    write_ack(folder, ack(0, 0, deal, generation=1))
    assert completed(read_acks(folder), 1, range(9)) == [0, 2, 3]
    write_ack(folder, ack(0, 1, deal, generation=1))
    write_ack(folder, ack(0, 1, deal, generation=1))  # a duplicate changes nothing
    assert completed(read_acks(folder), 1, range(9)) == [0, 1, 2, 3]


@given(
    size=st.integers(1, 5),
    leftovers=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3), max_size=4),
    frontier=st.integers(0, 31),
    counts=st.lists(st.integers(0, 8), min_size=5, max_size=5),
)
def test_as_the_list_of_items_written_out(size, leftovers, frontier, counts):
    flat = [shard for item in leftovers for shard in item]
    leftovers = leftovers if len(set(flat)) == len(flat) and max(flat, default=0) < frontier else []
    # An item has several shards only if they were begun.
    begun = tuple(Item(tuple(item), packs_read=len(item) - 1) for item in leftovers)
    deal = Deal(size, leftovers=begun, frontier=frontier)
    items = [*leftovers, *([shard] for shard in range(frontier, 100))]
    wanted = {shard for shard in range(frontier) if not any(shard in item for item in leftovers)}
    for rank in range(size):
        for item in items[rank::size][: counts[rank]]:
            wanted.update(item)
    acks = [ack(rank, counts[rank], deal) for rank in range(size)]
    assert set(done(*acks, most=80)) == {shard for shard in wanted if shard < 80}


def test_an_acknowledgement_is_read_as_it_was_written(tmp_path):
    deal = Deal(2, 4, 7, False, 3, (Item((5, 2), 11), Item((9,))), 12)
    written = ack(1, 4, deal, epochs=4, generation=2)
    write_ack(os_folder := str(tmp_path / "elsewhere"), written)
    assert read_acks(os_folder) == {"a": [written]}


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "x" * 101, "a b"])
def test_a_consumer_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(FormatError, match="letter or digit"):
        write_ack(str(tmp_path), ack(0, 0, consumer=name))
    assert list(tmp_path.iterdir()) == []


def deal_with(**fields: object) -> dict[str, object]:
    """Return the change that gives an acknowledgement a deal with other fields."""
    return {"deal": {**TWO.to_json(), **fields}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 2}, r"rank is 2, expected less than its size 2"),
        ({"rank": 0}, r"rank is 0, expected 1 according to the file name"),
        ({"items_done": True}, r"items_done is True"),
        ({"items_done": 1.0}, r"items_done is 1.0"),
        ({"consumer": None}, r"consumer is None, expected a string"),
        ({"deal": []}, r"deal is \[\], expected an object"),
        (deal_with(size=0), r"deal\.size is 0"),
        (deal_with(epoch=1), r"deal\.epoch is 1, expected less than its epochs 1"),
        (deal_with(window=0), r"deal\.window is 0"),
        (deal_with(leftovers=[3]), r"deal\.leftovers is 3"),
        (deal_with(leftovers=[{"shards": [-1], "packs_read": 0}]), r"deal\.leftovers\[0\]\.shards is -1"),
        ({"version": 2}, r"format version 2, but this package reads 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, said):
    write_ack(str(tmp_path), ack(1, 3))
    path = tmp_path / "a/rank-00001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FormatError, match=said):
        read_acks(str(tmp_path))


def test_two_runs_under_one_name_are_told_apart(tmp_path):
    write_ack(str(tmp_path), ack(0, 3))
    write_ack(str(tmp_path), ack(1, 3, Deal(size=2, seed=5)))
    with pytest.raises(FormatError, match="choose a different name for each"):
        read_acks(str(tmp_path))


def test_two_runs_under_one_name_are_told_apart_behind_a_rank_that_is_an_epoch_ahead(tmp_path):
    size = Deal(size=3)
    write_ack(str(tmp_path), ack(0, 0, size.of_epoch(1), epochs=2))
    write_ack(str(tmp_path), ack(1, 3, size, epochs=2))
    write_ack(str(tmp_path), ack(2, 3, Deal(size=3, leftovers=(Item((0,), 3),), frontier=1), epochs=2))
    with pytest.raises(FormatError, match="ranks 1 and 2 of generation 0 have different epochs"):
        read_acks(str(tmp_path))


def test_other_files_are_passed_over(tmp_path: Path):
    write_ack(str(tmp_path), ack(0, 3))
    for name in ("a/rank-00001.json.tmp", "a/rank-1.json", "a/notes", "notes", ".a"):
        (tmp_path / name).write_text("{")
    assert read_acks(str(tmp_path)) == {"a": [ack(0, 3)]}
