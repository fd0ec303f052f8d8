"""Running sums of lengths and the sequences of packs, compared with plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx._native import offsets_from_lengths, pack_segments


def slow_offsets(lengths: list[int], scale: int, start: int) -> list[int]:
    out = [start]
    for length in lengths:
        out.append(out[-1] + scale * length)
    return out


@given(st.lists(st.integers(0, 2**31), max_size=50), st.integers(1, 8), st.integers(0, 2**40))
def test_offsets_equal_the_slow_ones(lengths: list[int], scale: int, start: int) -> None:
    made = offsets_from_lengths(np.array(lengths, np.int64), scale, start)
    assert made.dtype == np.int64
    assert made.tolist() == slow_offsets(lengths, scale, start)


@given(st.lists(st.integers(0, 99), max_size=30), st.integers(0, 30))
def test_pieces_go_on_where_the_last_one_ended(lengths: list[int], cut: int) -> None:
    whole = offsets_from_lengths(np.array(lengths, np.int64), 4)
    first = offsets_from_lengths(np.array(lengths[:cut], np.int64), 4)
    second = offsets_from_lengths(np.array(lengths[cut:], np.int64), 4, int(first[-1]))
    assert [*first[:-1], *second] == whole.tolist()


@pytest.mark.parametrize(
    ("lengths", "word"),
    [
        ([1, -1], r"lengths\[1\] is -1"),
        ([-(2**63)], r"lengths\[0\] is -9223372036854775808"),
        ([2**62, 2**62], "63 bits"),
        ([2**61], "63 bits"),
        ([0, 2**61 - 1, 1], r"lengths\[2\] does not fit 63 bits"),
    ],
)
def test_offsets_that_cannot_be_are_refused(lengths: list[int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        offsets_from_lengths(np.array(lengths, np.int64), 4)


@pytest.mark.parametrize("lengths", [np.zeros(3, np.int32), [1, 2], np.zeros(6, np.int64)[::2], np.zeros(3, ">i8")])
def test_other_arrays_are_not_converted(lengths: Any) -> None:
    with pytest.raises(TypeError):
        offsets_from_lengths(lengths)


@pytest.mark.parametrize(
    "lengths", [np.zeros((2, 2), np.int64), np.array(5), np.frombuffer(bytes(17), np.int64, offset=1)]
)
def test_shapes_and_alignment_are_checked(lengths: Any) -> None:
    with pytest.raises(ValueError, match="one-dimensional, contiguous and aligned"):
        offsets_from_lengths(lengths)


# ---- the sequences of packs ----


Shards = list[list[list[int]]]  # packs of each shard, as lists of sequence lengths


def slow_segments(shards: Shards, wanted: list[tuple[int, int]]) -> tuple[list[int], ...]:
    offsets, numbers, starts, lengths = [0], [], [], []
    for number, pack in wanted:
        begin = sum(map(sum, shards[number][:pack]))
        for length in shards[number][pack]:
            numbers.append(number)
            starts.append(begin)
            lengths.append(length)
            begin += length
        offsets.append(len(starts))
    return offsets, numbers, starts, lengths


def index_of(packs: list[list[int]]) -> Any:
    """Return sequence offsets, token offsets, starts and tokens, as in a shard."""
    starts = [sum(pack[:i]) for pack in packs for i in range(len(pack))]
    tokens = slow_offsets([sum(pack) for pack in packs], 1, 0)
    return as_index(slow_offsets([len(pack) for pack in packs], 1, 0), tokens, starts, tokens[-1])


def as_index(sequences: list[int], tokens: list[int], starts: list[int], num_tokens: int = 20) -> Any:
    return np.array(sequences, np.int64), np.array(tokens, np.int64), np.array(starts, np.uint32), num_tokens


def segments(indexes: list[Any], wanted: list[tuple[int, int]]) -> tuple[list[int], ...]:
    numbers, packs = (np.array([pair[i] for pair in wanted], np.int64) for i in (0, 1))
    found = pack_segments(indexes, numbers, packs)
    assert [array.dtype for array in found] == [np.int64, np.int32, np.int64, np.int64]
    return tuple(array.tolist() for array in found)


@st.composite
def wanted_packs(draw: st.DrawFn) -> tuple[Shards, list[tuple[int, int]]]:
    packs = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), max_size=5)
    shards = draw(st.lists(packs, max_size=4))
    there = [(number, pack) for number, packs in enumerate(shards) for pack in range(len(packs))]
    return shards, draw(st.lists(st.sampled_from(there), max_size=8)) if there else []


@given(wanted_packs())
def test_segments_equal_the_slow_ones(case: tuple[Shards, list[tuple[int, int]]]) -> None:
    shards, wanted = case
    used = {number for number, _ in wanted}
    indexes = [index_of(packs) if number in used else None for number, packs in enumerate(shards)]
    assert segments(indexes, wanted) == slow_segments(shards, wanted)


@pytest.mark.parametrize(
    ("sequences", "tokens", "starts", "wanted", "word"),
    [
        ([0, 2, 3], [0, 12, 20], [0, 5, 0], 2, "no such pack"),
        ([0, 2, 3], [0, 12, 20], [0, 5, 0], -1, "no such pack"),
        ([0, 0, 3], [0, 12, 20], [0, 5, 0], 0, "rule O1"),
        ([0, 2, 4], [0, 12, 20], [0, 5, 0], 1, "rule O1"),
        ([-1, 2, 3], [0, 12, 20], [0, 5, 0], 0, "rule O1"),
        ([0, 2, 3], [0, 12, 21], [0, 5, 0], 1, "rule O2"),
        ([0, 2, 3], [0, 12, 12], [0, 5, 0], 1, "rule O2"),
        ([0, 2, 3], [-1, 12, 20], [0, 5, 0], 0, "rule O2"),
        ([0, 2, 3], [0, 12, 20], [1, 5, 0], 0, "rule P2"),
        ([0, 2, 3], [0, 12, 20], [0, 0, 0], 0, "rule P3"),
        ([0, 2, 3], [0, 12, 20], [0, 12, 0], 0, "rule P3"),
        ([0, 3, 4], [0, 12, 20], [0, 15, 7, 0], 0, "rule P3"),
    ],
)
def test_segments_never_lie_outside(
    sequences: list[int], tokens: list[int], starts: list[int], wanted: int, word: str
) -> None:
    with pytest.raises(ValueError, match=rf"shard 0, pack {wanted}: .*{word}"):
        segments([as_index(sequences, tokens, starts)], [(0, wanted)])


def test_segments_of_shards_that_are_not_there() -> None:
    index = as_index([0, 1], [0, 20], [0])
    for number in (-1, 1, 2**40):
        with pytest.raises(ValueError, match=f"shard {number}, pack 0: no such shard"):
            segments([index], [(number, 0)])
    with pytest.raises(ValueError, match="shard 0, pack 0: no such pack"):
        segments([None, index], [(0, 0)])
    with pytest.raises(TypeError, match="offsets must be int64"):
        segments([(index[0].astype(np.int32), *index[1:])], [(0, 0)])
    with pytest.raises(ValueError, match=r"packs \+ 1 values each"):
        segments([(index[0][:1], *index[1:])], [(0, 0)])
    assert segments([], []) == ([0], [], [], [])
