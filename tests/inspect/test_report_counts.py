"""Counting in bounded memory, compared with numpy on all values at once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reseal import set_fields
from sample_packs import Sample, sample_of, write_samples

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect.summary import survey_shard
from megatron_sft_idx.inspect.tally import HashSample, LargestValues, Tally
from megatron_sft_idx.packs import run as runs
from megatron_sft_idx.shard import Shard

pieces = st.lists(st.lists(st.integers(0, 300), max_size=30), max_size=6)


def joined(parts: list[list[int]]) -> list[int]:
    return [value for part in parts for value in part]


@settings(max_examples=40)
@given(pieces)
def test_a_tally_knows_what_all_values_tell(parts: list[list[int]]) -> None:
    tally, values = Tally(300), joined(parts)
    for part in parts:
        tally.add(np.array(part, np.int64))
    assert (tally.total, tally.sum) == (len(values), sum(values))
    if values:
        assert (tally.least, tally.largest) == (min(values), max(values))
        for share in (0.05, 0.5, 0.95, 1.0):
            assert tally.quantile(share) == np.quantile(values, share, method="inverted_cdf")


@settings(max_examples=40)
@given(pieces, st.integers(1, 60), st.integers(0, 5))
def test_a_histogram_counts_every_value_once(parts: list[list[int]], bins: int, low: int) -> None:
    tally, values = Tally(300), joined(parts)
    tally.add(np.array(values, np.int64))
    edges, counts = tally.histogram(bins, low, 300)
    assert (edges[0], edges[-1] > 300) == (low, True)
    assert len(counts) <= bins
    assert counts.tolist() == [sum(a <= value < b for value in values) for a, b in pairwise(edges)]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_a_logarithmic_histogram_counts_every_value_once(values: list[int]) -> None:
    tally = Tally(300)
    tally.add(np.array(values, np.int64))
    edges, counts = tally.logarithmic_histogram()
    assert (edges[0], edges[-1]) == (min(values), max(values) + 1)
    assert counts.tolist() == [sum(a <= value < b for value in values) for a, b in pairwise(edges)]
    # Two classes double a value; edges are rounded to whole numbers.
    assert all(abs(after - 2 * before) <= 2 for before, after in list(zip(edges, edges[2:], strict=False))[1:])


def test_large_values_share_counts_but_not_extremes() -> None:
    tally = Tally(2**31 - 1)
    tally.add(np.array([5, 2**30, 2**31 - 2], np.int64))
    assert len(tally.counts) <= 2**18
    assert (tally.least, tally.largest, tally.total) == (5, 2**31 - 2, 3)
    assert abs(tally.quantile(0.5) - 2**30) < tally.step
    edges, counts = tally.histogram(48, 0, 2**31 - 1)
    assert counts.sum() == 3
    assert len(edges) <= 49
    edges, counts = tally.logarithmic_histogram()
    assert (edges[0], counts.sum(), len(edges) <= 63) == (5, 3, True)


@settings(max_examples=40)
@given(pieces, st.integers(1, 5))
def test_top_and_first_are_those_of_all_values(parts: list[list[int]], most: int) -> None:
    top, firsts, first = LargestValues(most), LargestValues(most), 0
    for part in parts:
        values = np.array(part, np.int64)
        top.add(first, values)
        firsts.add(first, values % 3 == 0)
        first += len(part)
    values = joined(parts)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:most]
    assert top.pairs == [(values[i], i) for i in order]
    holds = [i for i, value in enumerate(values) if value % 3 == 0]
    assert [place for is_so, place in firsts.pairs if is_so] == holds[:most]


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=6), st.integers(2, 40))
def test_a_sample_keeps_all_copies_or_none(parts: list[list[int]], most: int) -> None:
    spread = [(number * 0x9E3779B97F4A7C15 + number**5) % 2**64 for number in range(41)]  # includes 0
    sample, first, values = HashSample(most), 0, [spread[number] for number in joined(parts)]
    for part in parts:
        sample.add(np.array([spread[number] for number in part], np.uint64), first)
        first += len(part)
    kept = [value for value in values if value < 2 ** (64 - sample.bits)]
    counted = sample.merged()
    assert counted.hashes.tolist() == sorted(set(kept))
    assert counted.numbers.tolist() == [values.index(value) for value in sorted(set(kept))]
    assert counted.times.tolist() == [kept.count(value) for value in sorted(set(kept))]
    assert sample.bits == 0 or len({value for value in values if value < 2 ** (65 - sample.bits)}) > most * 3 // 4
    top = sample.most_repeated(3)
    assert [times for times, _ in top] == sorted(filter(lambda n: n > 1, counted.times.tolist()), reverse=True)[:3]
    for times, number in top:
        same = [i for i, value in enumerate(values) if value == values[number]]
        assert (times, number) == (len(same), same[0])


# ---- a whole shard ----


def random_packs(count: int, seed: int = 0) -> list[Sample]:
    random = np.random.default_rng(seed)
    lengths = [random.integers(1, 9, random.integers(1, 6)).tolist() for _ in range(count)]
    return [
        sample_of(some, lambda _: int(random.integers(0, 2)), lambda _: int(random.integers(0, 3))) for some in lengths
    ]


def slow_survey(packs: list[Sample]) -> dict[str, Any]:
    lengths = [[b - a for a, b in pairwise(p.bounds)] for p in packs]
    sequences = [tuple(p.tokens[a:b]) for p in packs for a, b in pairwise(p.bounds)]
    return {
        "lengths": sorted(length for some in lengths for length in some),
        "cost": [sum(length * (length + 1) // 2 for length in some) for some in lengths],
        "trained": [int(1000 * sum(p.label_mask) / len(p.tokens) + 0.5) for p in packs],
        "masked": [i for i, p in enumerate(packs) if not any(p.label_mask)],
        "single": sum(length == 1 for some in lengths for length in some),
        "copies": len(sequences) - len(set(sequences)),
    }


def counted(tally: Tally) -> list[int]:
    assert tally.step == 1
    return np.repeat(np.arange(len(tally.counts)), tally.counts).tolist()


@pytest.mark.parametrize("small", [False, True])
def test_a_survey_equals_the_slow_one(tmp_path: Path, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = random_packs(60)
    write_samples(tmp_path / "x", packs, capacity=64)
    if small:  # many windows; some have one pack that is larger than a window
        monkeypatch.setattr(runs, "WINDOW_PACKS", 7)
        monkeypatch.setattr(runs, "WINDOW_TOKENS", 20)
        monkeypatch.setattr(runs, "WINDOW_SEQUENCES", 6)
    told: list[tuple[int, int]] = []
    found = survey_shard(Shard(tmp_path / "x"), on_progress=lambda tokens, packs: told.append((tokens, packs)))
    slow = slow_survey(packs)
    assert counted(found.sequence_lengths) == slow["lengths"]
    assert counted(found.cost) == sorted(slow["cost"])
    assert counted(found.trained) == sorted(slow["trained"])
    assert counted(found.pack_lengths) == sorted(len(p.tokens) for p in packs)
    odd = {one.kind: one for one in found.odd}
    assert [place.pack for place in odd["All masked"].remarks] == slow["masked"][:4]
    assert odd["All masked"].count == len(slow["masked"])
    assert odd["One-token sequences"].count == slow["single"]
    assert odd["Repeated sequences"].count == slow["copies"] > 0
    best = odd["Costliest attention"].remarks[0]
    assert slow["cost"][best.pack] == max(slow["cost"])
    assert (sum(tokens for tokens, _ in told), sum(packs for _, packs in told)) == (sum(slow["lengths"]), 60)
    assert (len(told) > 10) == small


def test_repeated_and_longest_sequences_are_named_where_they_are(tmp_path: Path) -> None:
    packs = [sample_of([3, 4], lambda p: 1, lambda p, i=i: 10 * i + p) for i in range(5)]
    packs[1].tokens[3:] = packs[4].tokens[3:] = [7, 7, 7, 7]
    packs[3] = sample_of([2, 9, 1], lambda p: 1, lambda p: 90 + p)
    write_samples(tmp_path / "x", packs, capacity=64)
    odd = {one.kind: one for one in survey_shard(Shard(tmp_path / "x")).odd}
    repeated = odd["Repeated sequences"]
    assert repeated.counted == "1 copy"
    assert [(place.pack, place.sequence, place.note) for place in repeated.remarks] == [
        (1, 1, "4 tokens, 2 times"),
    ]
    assert odd["Longest sequences"].remarks[0] == (3, 1, "9 tokens")
    assert odd["One-token sequences"].remarks[0].pack == 3


@pytest.mark.parametrize(("overlong", "cuts"), [("truncate", 1), ("split", 1), ("drop", 0), (None, None)])
def test_packs_that_train_all_and_sequences_cut_mid_turn_are_named(
    tmp_path: Path, overlong: str | None, cuts: int | None
) -> None:
    packs = [
        sample_of([8], lambda p: int(p == 7), lambda p: p),  # its last token is trained on
        sample_of([8], lambda p: int(p == 5), lambda p: p),
        sample_of([3, 4], lambda p: int(p not in (0, 3)), lambda p: p),
        sample_of([3, 4], lambda p: 0, lambda p: p),
    ]
    metadata = {} if overlong is None else {"packing": {"overlong": overlong}}
    write_samples(tmp_path / "x", packs, capacity=8, metadata=metadata)
    found = survey_shard(Shard(tmp_path / "x"))
    odd = {one.kind: one for one in found.odd}
    assert (odd["All trained"].count, [place.pack for place in odd["All trained"].remarks]) == (1, [2])
    assert [place.pack for place in odd["All masked"].remarks] == [3]
    assert odd["Cut mid-turn"].count == cuts
    assert [place[:2] for place in odd["Cut mid-turn"].remarks] == [(0, 0)] * bool(cuts)
    assert counted(found.sequence_trained) == [0, 0, 125, 125, 667, 750]


def test_where_all_are_alike_none_is_odd(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", [sample_of([3, 3], lambda p: p % 3 % 2, lambda p, i=i: 10 * i + p) for i in range(5)])
    assert [place for odd in survey_shard(Shard(tmp_path / "x")).odd for place in odd.remarks] == []


def test_an_empty_shard_has_an_empty_survey(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", [], capacity=64)
    found = survey_shard(Shard(tmp_path / "x"))
    assert (found.fill, found.cost_spread, found.sequence_lengths.total) == (0, 0, 0)


@pytest.mark.parametrize("values", [[0, 2**62, 13], [0, 20, 13], [0, -5, 13], [0, 7, 7]])
def test_offsets_that_cannot_be_are_an_error(tmp_path: Path, values: list[int]) -> None:
    write_samples(
        tmp_path / "x", [sample_of([3, 4], lambda p: 1, lambda p: p), sample_of([6], lambda p: 1, lambda p: p)]
    )
    shard = Shard(tmp_path / "x", backend="pread")
    offset = shard.header.token_offsets_offset
    path = tmp_path / "x.seq.idx"
    raw = bytearray(path.read_bytes())
    raw[offset : offset + 24] = np.array(values, "<i8").tobytes()
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=r"x.*rule.*O2"):
        survey_shard(Shard(tmp_path / "x", backend="pread"))


@pytest.mark.parametrize(("name", "value"), [("longest_pack", 6), ("most_sequences", 1)])
def test_packs_larger_than_the_header_says_are_an_error(tmp_path: Path, name: str, value: int) -> None:
    write_samples(tmp_path / "x", [sample_of([3, 4], lambda p: 1, lambda p: p)])
    path = tmp_path / "x.seq.idx"
    path.write_bytes(set_fields(path.read_bytes(), **{name: value}))
    with pytest.raises(FormatError, match=rf"{name} is {value} in the header, but {value + 1} in the data \(rule H9\)"):
        survey_shard(Shard(tmp_path / "x"))


def test_a_window_knows_the_places_of_its_sequences(tmp_path: Path) -> None:
    packs = random_packs(9)
    write_samples(tmp_path / "x", packs, capacity=64)
    window = runs.read_window(Shard(tmp_path / "x").files, 3, 7)
    places = [(3 + i, s) for i, pack in enumerate(packs[3:7]) for s in range(len(pack.starts))]
    assert [window.locate(i) for i in range(len(places))] == places
    before, inside = (sum(len(p.tokens) for p in some) for some in (packs[:3], packs[3:7]))
    assert (window.first_token, window.num_tokens) == (before, inside)
    ids, loss = window.content()
    assert ids.tolist() == [token for p in packs[3:7] for token in p.tokens]
    assert loss.tolist() == [value for p in packs[3:7] for value in p.label_mask]
    assert window.run().seq_starts.tolist() == [start for p in packs[3:7] for start in p.starts]
