"""Counts and hashes of runs, compared with plain Python."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx._native import count_positive, hash_runs

MASKS = [np.uint8, np.float32]
IDS = [np.uint16, np.int32]


def slow_count(values: list[float], bounds: list[int]) -> list[int]:
    return [sum(value > 0 for value in values[a:b]) for a, b in pairwise(bounds)]


def slow_hash(numbers: list[int], bounds: list[int]) -> list[int]:
    out = []
    for a, b in pairwise(bounds):
        hashed = 0x9E3779B97F4A7C15
        for number in numbers[a:b]:
            hashed = (hashed ^ number) * 0xFF51AFD7ED558CCD % 2**64
            hashed ^= hashed >> 32
        out.append(hashed)
    return out


def bits(weight: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", weight + 0.0))[0])


@st.composite
def runs(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> tuple[list[Any], list[int]]:
    found = draw(st.lists(values, max_size=40))
    return found, sorted(draw(st.lists(st.integers(0, len(found)), min_size=1, max_size=9)))


@given(runs(st.integers(0, 2)), st.sampled_from(MASKS))
def test_counts_equal_the_slow_ones(case: tuple[list[int], list[int]], dtype: Any) -> None:
    values, bounds = case
    found = count_positive(np.array(values, dtype), np.array(bounds))
    assert found.dtype == np.int64
    assert found.tolist() == slow_count(values, bounds)


@given(runs(st.integers(0, 65535)), st.sampled_from(IDS))
def test_hashes_of_ids_equal_the_slow_ones(case: tuple[list[int], list[int]], dtype: Any) -> None:
    values, bounds = case
    found = hash_runs(np.array(values, dtype), np.array(bounds))
    assert found.dtype == np.uint64
    assert found.tolist() == slow_hash(values, bounds)


@given(runs(st.sampled_from([0, 1])), st.sampled_from(MASKS))
def test_hashes_of_masks_equal_the_slow_ones(case: tuple[list[int], list[int]], dtype: Any) -> None:
    values, bounds = case
    assert hash_runs(np.array(values, dtype), np.array(bounds)).tolist() == slow_hash([*map(bits, values)], bounds)


def test_weights_that_are_equal_hash_equal_and_others_do_not() -> None:
    hashed = hash_runs(np.array([0.0, -0.0, 0.5, 0.25], np.float32), np.arange(5)).tolist()
    assert hashed == slow_hash([0, 0, bits(0.5), bits(0.25)], [0, 1, 2, 3, 4])
    assert len(set(hashed)) == 3


@pytest.mark.parametrize("kernel", [count_positive, hash_runs])
@pytest.mark.parametrize(
    ("bounds", "word"),
    [
        ([-1, 2], "exceed an array of 5"),
        ([0, 6], "exceed"),
        ([0, 4, 3, 5], r"bounds\[2\] is smaller"),
        ([], "one value more"),
    ],
)
def test_bounds_outside_the_array_are_refused(kernel: Any, bounds: list[int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        kernel(np.zeros(5, np.uint8), np.array(bounds, np.int64))


@pytest.mark.parametrize("kernel", [count_positive, hash_runs])
def test_other_arrays_are_not_converted(kernel: Any) -> None:
    with pytest.raises(TypeError):
        kernel(np.zeros(5, np.int64), np.array([0, 5]))
    with pytest.raises(TypeError):
        kernel(np.zeros(5, np.uint8), np.array([0, 5], np.int32))
    with pytest.raises(ValueError, match="contiguous"):
        kernel(np.zeros((5, 1), np.uint8), np.array([0, 5]))
