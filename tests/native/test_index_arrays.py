"""Running sums of lengths, against plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx._native import offsets_from_lengths


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
