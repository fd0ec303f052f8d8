"""Kernels that build index arrays, against plain Python."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("lengths", "word"),
    [([1, -1], r"lengths\[1\] is -1"), ([2**62, 2**62], "63 bits"), ([2**61], "63 bits")],
)
def test_offsets_that_cannot_be_are_refused(lengths: list[int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        offsets_from_lengths(np.array(lengths, np.int64), 4)


@pytest.mark.parametrize("lengths", [np.zeros(3, np.int32), [1, 2], np.zeros(6, np.int64)[::2]])
def test_other_arrays_are_not_converted(lengths: object) -> None:
    with pytest.raises(TypeError):
        offsets_from_lengths(lengths)  # type: ignore[arg-type]


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="one-dimensional"):
        offsets_from_lengths(np.zeros((2, 2), np.int64))
