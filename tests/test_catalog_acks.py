"""Which shards are complete, from what the ranks of each consumer have acknowledged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Ack, Base, Catalog, Leftover, ack_folder, completed, read_acks, write_ack
from megatron_sft_idx.live.acks import next_generation


def ack(rank: int, items_done: int, *, size: int = 2, **more: object) -> Ack:
    fields = {"consumer": "a", "generation": 0, "base": Base(), "packs_done": 10 * items_done, **more}
    return Ack(size=size, rank=rank, items_done=items_done, **fields)  # type: ignore[arg-type]


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
    base = Base(leftovers=(Leftover((3, 4), 17), Leftover((6,))), frontier=8)
    assert done(ack(0, 0, base=base), ack(1, 0, base=base)) == [0, 1, 2, 5, 7]
    assert done(ack(0, 1, base=base), ack(1, 0, base=base)) == [0, 1, 2, 3, 4, 5, 7]
    assert done(ack(0, 2, base=base), ack(1, 2, base=base)) == list(range(10))


def test_only_the_last_epoch_counts():
    assert done(ack(0, 5, epochs=3), ack(1, 5, epochs=3, epoch=1)) == []
    assert done(ack(0, 5, epochs=3, epoch=1), ack(1, 1, epochs=3, epoch=2)) == [1]


def test_a_job_with_another_seed_has_a_generation_of_its_own():
    """Else what the job before completed in its last epoch would count for one that is in its first."""
    before, now = ack(1, 5, base=Base(seed=1), epoch=1, epochs=2), ack(0, 0, base=Base(seed=2), epochs=2)
    assert next_generation([before], now) == 1
    assert next_generation([before], replace(now, base=Base(seed=1))) == 0


def test_a_run_from_an_earlier_epoch_does_not_join_what_was_dealt_out_in_a_later_one():
    dealt = ack(1, 5, base=Base(epoch=1, leftovers=(Leftover((0,), 3),), frontier=1), epoch=1, epochs=2)
    earlier = ack(0, 0, epochs=2)
    assert next_generation([dealt], earlier) == dealt.generation + 1
    assert not dealt.agrees_with(earlier)
    assert earlier.agrees_with(ack(1, 5, epoch=1, epochs=2))


def test_a_base_of_an_earlier_epoch_says_nothing_about_a_later_one():
    base = Base(epoch=0, frontier=5)
    assert done(ack(0, 1, base=base, epoch=1, epochs=2), ack(1, 0, base=base, epoch=1, epochs=2)) == [0]


def test_a_shard_is_complete_when_it_is_for_every_consumer_and_all_of_them_are_there():
    one, other = ack(0, 3, size=1), ack(0, 1, size=1, consumer="b")
    assert done(one, consumers=2) == []
    assert done(one, other, consumers=2) == [0]
    assert done(one, other, consumers=1) == [0]


def test_the_newest_generation_counts(tmp_path):
    folder = ack_folder(Catalog(tmp_path))
    for rank in range(4):
        write_ack(folder, ack(rank, 1, size=4))
    base = Base(leftovers=(Leftover((1,), 3),), frontier=4)
    write_ack(folder, ack(0, 0, generation=1, base=base))
    assert completed(read_acks(folder), 1, range(9)) == [0, 2, 3]
    write_ack(folder, ack(0, 1, generation=1, base=base))
    write_ack(folder, ack(0, 1, generation=1, base=base))  # a duplicate changes nothing
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
    base = Base(leftovers=tuple(Leftover(tuple(item)) for item in leftovers), frontier=frontier)
    items = [*leftovers, *([shard] for shard in range(frontier, 100))]
    wanted = {shard for shard in range(frontier) if not any(shard in item for item in leftovers)}
    for rank in range(size):
        for item in items[rank::size][: counts[rank]]:
            wanted.update(item)
    acks = [ack(rank, counts[rank], size=size, base=base) for rank in range(size)]
    assert set(done(*acks, most=80)) == {shard for shard in wanted if shard < 80}


def test_an_acknowledgement_is_read_as_it_was_written(tmp_path):
    base = Base(3, 7, 4, (Leftover((5, 2), 11), Leftover((9,))), 12)
    written = ack(1, 4, base=base, epoch=3, epochs=4, generation=2)
    write_ack(os_folder := str(tmp_path / "elsewhere"), written)
    assert read_acks(os_folder) == {"a": [written]}


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "x" * 101, "a b"])
def test_a_consumer_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(FormatError, match="letter or digit first"):
        write_ack(str(tmp_path), ack(0, 0, consumer=name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 2}, r"rank is 2, expected less than its size 2"),
        ({"rank": 0}, r"rank is 0, expected 1, as in the file's name"),
        ({"size": 0}, r"size is 0"),
        ({"items_done": True}, r"items_done is True"),
        ({"items_done": 1.0}, r"items_done is 1.0"),
        ({"epoch": 1}, r"epoch is 1, expected less than its epochs 1"),
        ({"consumer": None}, r"consumer is None, expected a string"),
        ({"base": []}, r"base is \[\], expected an object"),
        ({"base": {"epoch": 0, "seed": 0, "window": 0, "leftovers": [], "frontier": 0}}, r"base\.window is 0"),
        ({"base": {"epoch": 0, "seed": 0, "window": 1, "leftovers": [3], "frontier": 0}}, r"base\.leftovers is 3"),
        (
            {"base": {"epoch": 0, "seed": 0, "window": 1, "leftovers": [{"shards": [-1], "offset": 0}], "frontier": 0}},
            r"base\.leftovers\[0\]\.shards is -1",
        ),
        ({"version": 2}, r"format version 2, this package reads 1"),
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
    write_ack(str(tmp_path), ack(1, 3, base=Base(seed=5)))
    with pytest.raises(FormatError, match="give each its own"):
        read_acks(str(tmp_path))


def test_other_files_are_passed_over(tmp_path: Path):
    write_ack(str(tmp_path), ack(0, 3))
    for name in ("a/rank-00001.json.tmp", "a/rank-1.json", "a/notes", "notes", ".a"):
        (tmp_path / name).write_text("{")
    assert read_acks(str(tmp_path)) == {"a": [ack(0, 3)]}
