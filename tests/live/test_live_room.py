"""How far ahead a producer must be allowed to run: with the minimum no step waits endlessly, with less one can."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_catalogs import MemoryShards, loader, make_catalog

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Catalog, Waiter
from megatron_sft_idx.live.acks import ConsumerAcks, uncompleted
from megatron_sft_idx.live.catalog_shards import CatalogShards
from megatron_sft_idx.live.live_loader import LiveConfig, LiveLoader
from megatron_sft_idx.live.live_order import Deal, RankState, dealt_anew, least_ahead
from megatron_sft_idx.live.live_walk import Walk
from megatron_sft_idx.produce.keeper import Backpressure, StateKeeper


class DeadlockError(Exception):
    """Raised if a rank waits for a shard that the producer may not publish."""


class Bounded(MemoryShards):
    """A catalog whose producer publishes the awaited shard, unless too many shards are not completed."""

    def __init__(self, counts: Sequence[int], ahead: int, least: int) -> None:
        super().__init__(counts)
        self.ahead, self.least, self.published = ahead, least, 0
        self.committed: list[RankState] = []

    def wait(self, number: int, waiter: Waiter, unacknowledged: Callable[[], int] = lambda: 0) -> bool:
        while self.published <= min(number, len(self.counts) - 1):
            acks = [ConsumerAcks("", "test", 1).of(state) for state in self.committed]
            if len(uncompleted(acks, self.published)) >= self.ahead:
                raise DeadlockError
            self.published += 1
        return number < len(self.counts)

    def end(self) -> int | None:
        return len(self.counts) if self.published == len(self.counts) else None

    def numbers(self) -> list[int]:
        return list(range(self.published))

    def count(self, number: int) -> int | None:
        return self.counts[number] if number < self.published else None

    def least_packs(self) -> int:
        return self.least

    def may_not_come(self, uncompleted: Sequence[int]) -> bool:
        return self.end() is None and len(uncompleted) >= self.ahead


class Job:
    """Ranks that step together. Between steps they commit and deal again, like the training script."""

    def __init__(self, shards: Bounded, size: int, window: int, rows: int, at_end: Any) -> None:
        self.shards, self.at_end = shards, at_end
        shape: dict[str, Any] = {"seq_length": 16, "micro_batches": rows, "window": window, "at_end": at_end}
        # These loaders only report whether the next step may need a commit; the walks take the packs.
        self.ranks = [LiveLoader(shards, LiveConfig(rank=rank, size=size, **shape)) for rank in range(size)]
        self.commits = self.deals = 0
        self._begin([rank.state for rank in self.ranks])

    def _begin(self, states: list[RankState]) -> None:
        self.states = self.shards.committed = states
        waiter = Waiter("a test")
        walk: dict[str, Any] = {"epochs": 1, "at_end": self.at_end, "acknowledged": lambda state: {}, "waiter": waiter}
        self.walks = [iter(Walk(self.shards, state, **walk)) for state in states]

    def _blocked(self) -> bool:
        for rank, state in zip(self.ranks, self.states, strict=True):
            rank.state = state
        return any(rank.may_need_commit(self.shards.committed) for rank in self.ranks)

    def steps(self) -> Iterator[list[tuple[int, int]]]:
        """Yield the packs that each step trains on."""
        first = self.states[0]
        while True:
            if self._blocked():
                self.commits, self.shards.committed = self.commits + 1, list(self.states)
                if self._blocked():
                    self.deals += 1
                    deal = dealt_anew(self.states, len(self.ranks), first.deal.window)
                    self._begin([replace(rank.state.at_epoch(0), deal=deal) for rank in self.ranks])
            taken = [next(walk, None) for _ in range(first.step_rows) for walk in self.walks]
            if taken[0] is None:
                assert not any(taken)
                return
            micro_batches = [wanted for wanted in taken if wanted is not None]
            assert len(micro_batches) == len(taken), "all ranks take the same steps"
            self.states = [wanted.state for wanted in micro_batches[-len(self.ranks) :]]
            yield [
                tuple(np.asarray(wanted.packs)[0].tolist())
                for wanted in micro_batches
                if wanted.masked is None or not wanted.masked.any()
            ]


def job(counts: Sequence[int], size: int, window: int, rows: int, less: int = 0, at_end: str = "pad") -> Job:
    shards = Bounded(counts, 10**9, max(1, min(counts[:-1], default=1)))
    done = Job(shards, size, window, rows, at_end)
    shards.ahead = least_ahead(done.states[0].deal, rows, shards.least) - less
    return done


COUNTS = st.integers(1, 6).flatmap(
    lambda least: st.tuples(st.lists(st.integers(least, least + 6), max_size=40), st.integers(1, least + 6)).map(
        lambda parts: [*parts[0], parts[1]]
    )
)


@settings(max_examples=300, deadline=None)
@given(COUNTS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.sampled_from(["pad", "drop"]))
def test_with_as_many_shards_no_step_waits_for_ever(
    counts: list[int], size: int, window: int, rows: int, at_end: str
) -> None:
    at_work = job(counts, size, window, rows, at_end=at_end)
    seen = Counter(pack for step in at_work.steps() for pack in step)
    expected = Counter((shard, pack) for shard, packs in enumerate(counts) for pack in range(packs))
    if at_end == "pad":
        assert seen == expected
    else:
        assert seen <= expected


@pytest.mark.parametrize(
    ("counts", "size", "window", "rows", "at_end"),
    [
        # Rank 0 is inside a group of two shards, and rank 1 needs its next group; every other shard belongs to rank 0.
        ([4, 4, 4, 5, 4, 5, 5, 6], 2, 2, 1, "pad"),
        ([5, 6, 5, 6, 5, 5, 5, 6, 5, 5, 5, 5, 5, 5, 6, 6, 6, 5, 5, 6, 6, 6, 5, 5, 5, 5, 11], 2, 2, 11, "drop"),
    ],
)
def test_some_ranks_are_inside_a_group_and_others_between_two(
    counts: list[int], size: int, window: int, rows: int, at_end: str
) -> None:
    assert list(job(counts, size, window, rows, at_end=at_end).steps())


@settings(max_examples=150, deadline=None)
@given(
    COUNTS,
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.integers(0, 6)), max_size=3),
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9)),
)
def test_with_as_many_as_each_job_asks_for_jobs_of_any_size_follow_one_another(
    counts: list[int], ended: list[tuple[int, int, int, int]], last: tuple[int, int, int]
) -> None:
    """Each job has its own ranks, window and packs per step. All jobs except the last end after some steps."""
    shards = Bounded(counts, 0, max(1, min(counts[:-1], default=1)))
    seen: Counter[tuple[int, int]] = Counter()
    states: list[RankState] = []
    for size, window, rows, steps in [*ended, (*last, None)]:
        at_work = Job(shards, size, window, rows, "pad")
        if states:
            deal = dealt_anew(states, size, window)
            at_work._begin([replace(rank.state, deal=deal) for rank in at_work.ranks])
        # The number that a job needs includes the groups that earlier jobs left behind.
        shards.ahead = least_ahead(at_work.states[0].deal, rows, shards.least)
        for packs in itertools.islice(at_work.steps(), steps):
            seen.update(packs)
        states = at_work.states
    assert seen == Counter((shard, pack) for shard, packs in enumerate(counts) for pack in range(packs))


def test_with_fewer_one_may_wait_for_ever() -> None:
    """This is the control: the second of two ranks finishes its shard before the first."""
    for less, ends in ((0, True), (1, False)):
        at_work = job([9, 1, 1, 1, 1, 1, 9, 1], 2, 1, 2, less)
        assert at_work.shards.ahead == 4 - less
        if ends:
            assert sum(map(len, at_work.steps())) == 24
        else:
            with pytest.raises(DeadlockError):
                list(at_work.steps())


def test_ranks_that_fall_behind_are_dealt_less() -> None:
    """Rank 1 always gets the smaller shards. With the first deal, no number of shards would suffice for long."""
    at_work = job([8, 4] * 30, 2, 1, 2)
    assert sum(map(len, at_work.steps())) == 360
    assert at_work.deals > 1
    even = job([8] * 60, 2, 1, 2)
    assert sum(map(len, even.steps())) == 480
    assert even.deals == 0
    assert even.commits < 60


@pytest.mark.parametrize(
    ("ranks", "window", "rows", "least", "shards"),
    [
        (1, 1, 1, 1, 1),  # one pack at a time
        (1, 1, 4, 8, 2),  # a step can begin in one shard and end in the next
        (2, 1, 2, 8, 4),  # the data of docs/streaming.md on two ranks
        (3, 1, 2, 8, 6),
        (2, 1, 9, 8, 4),
        (2, 1, 10, 8, 6),  # a step of ten packs can need three shards of eight packs
        (2, 2, 10, 8, 8),
        (4, 3, 1, 100, 18),  # three ranks are inside a group, and rank 3 needs shards between theirs
    ],
)
def test_the_number_by_hand(ranks: int, window: int, rows: int, least: int, shards: int) -> None:
    assert least_ahead(Deal(size=ranks, window=window), step_rows=rows, min_packs=least) == shards


@given(st.integers(1, 50), st.integers(1, 8), st.integers(1, 100), st.integers(1, 30))
def test_the_formula_of_the_documentation_is_enough(ranks: int, window: int, rows: int, least: int) -> None:
    formula = (1 + -(-(rows - 1) // (window * least))) * window * ranks + (window - 1) * (ranks - 1)
    assert least_ahead(Deal(size=ranks, window=window), step_rows=rows, min_packs=least) <= formula


@pytest.mark.parametrize(
    ("options", "packs"),
    [
        ({"packing": {"overlong": "drop"}, "sharding": {"tokens_per_shard": 30}}, 3),
        ({"packing": {"overlong": "truncate"}, "sharding": {"tokens_per_shard": 30}}, 1),
        ({"packing": {"overlong": "drop"}, "sharding": {"tokens_per_shard": "30"}}, 1),
        ({"packing": [], "sharding": None}, 1),
        ({}, 1),
    ],
)
def test_the_packs_of_a_shard_follow_from_what_its_producer_says(
    options: dict[str, Any], packs: int, tmp_path: Path
) -> None:
    catalog = make_catalog(tmp_path / "c", [3, 3], max_ahead_shards=3)
    said = catalog.producer()
    assert said is not None
    catalog.write_producer(replace(said, options=options))
    assert CatalogShards(catalog.folder).least_packs() == packs
    with loader(tmp_path / "c", 0, 1, micro_batches=4) as batches:
        if packs == 3:
            next(batches)
        else:
            with pytest.raises(FormatError, match=r"4 packs per step need 4; .* --max-ahead-shards 4"):
                next(batches)


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(20))
def test_where_the_producer_waits_for_a_commit_consumers_know(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise both would wait for each other. A shard's parts need more bytes than the shard, and shards differ."""
    rng = np.random.default_rng(seed)
    catalog = make_catalog(tmp_path / "c", [1, 1, 1], ended=False)
    sizes = rng.integers(50, 150, 3).tolist()
    for kind in (Catalog, CatalogShards):
        monkeypatch.setattr(kind, "shard_nbytes", lambda self, number: sizes[number])
    for limit in range(150, 800, 7):
        said = make_catalog(tmp_path / "c2", [], ended=False, max_ahead_nbytes=limit).producer()
        assert said is not None
        catalog.write_producer(said := replace(said, published=3))
        backpressure = Backpressure(catalog, StateKeeper(catalog, said), None, print)
        outcomes = []
        monkeypatch.setattr(StateKeeper, "wait_for", lambda self, look, *rest: outcomes.append(look()))  # noqa: B023
        backpressure.wait_for(int(rng.integers(50, 150)))
        shards = CatalogShards(catalog.folder)
        shards.limits(Waiter("a test"))
        assert outcomes == [True] or shards.may_not_come([0, 1, 2])


def test_bytes_ahead_count_by_the_largest_shard_and_as_shards_do_whatever_is_published(tmp_path: Path) -> None:
    catalog = make_catalog(tmp_path / "c", [3, 3, 3], ended=False)
    nbytes = max(catalog.shard_nbytes(shard) for shard in range(3))
    for most in (4, 3, 2):
        for limits in ({"max_ahead_nbytes": most * nbytes}, {"max_ahead_shards": most}):
            said = make_catalog(tmp_path / "c2", [], ended=False, **limits).producer()
            assert said is not None
            catalog.write_producer(replace(said, published=3))
            shards = CatalogShards(catalog.folder)
            shards.limits(Waiter("a test"))
            assert shards.may_not_come([0, 1, 2]) == (most < 4)
            assert shards.may_not_come([0, 1]) == (most < 3)  # shard 2 is published
    catalog.write_end(3)
    assert not shards.may_not_come([0, 1, 2])
