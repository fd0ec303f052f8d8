"""The search for places of packs against plain Python that tries them one by one."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx._native import first_fits


def slow_first_fits(
    flags: list[bool], base: int, tokens: int, packs: list[list[int]], least: int
) -> tuple[list[int], int]:
    """Flags reach from ``base`` on; begins, and the first place that was not looked at for the next pack."""
    begins: list[int] = []
    for starts in packs:
        place, last = least, starts[-1]
        while place + last < min(base + len(flags), tokens):
            if all(flags[place - base + start] for start in starts):
                break
            place += 1
        else:
            return begins, place
        begins.append(place)
        least = place + last + 1
    return begins, least


gaps = st.lists(st.integers(1, 4), max_size=3)


@given(
    flags=st.lists(st.sampled_from([True, True, False]), max_size=60),
    base=st.integers(0, 5),
    skipped=st.integers(0, 3),
    beyond=st.integers(-5, 5),
    packs=st.lists(gaps.map(lambda steps: [0, *accumulate(steps)]), max_size=6),
)
def test_places_are_the_slow_ones(
    flags: list[bool], base: int, skipped: int, beyond: int, packs: list[list[int]]
) -> None:
    tokens, least = max(base + len(flags) + beyond, 0), base + skipped
    starts = np.array([start for pack in packs for start in pack], np.uint32)
    offsets = np.array([0, *accumulate(map(len, packs))], np.int64)
    begins, after = first_fits(np.array(flags, np.bool_), base, tokens, starts, offsets, least)
    assert (begins.tolist(), after) == slow_first_fits(flags, base, tokens, packs, least)


def test_arguments_that_cannot_be_are_refused() -> None:
    flags, starts, offsets = np.ones(9, np.bool_), np.array([0, 2], np.uint32), np.array([0, 2])
    assert first_fits(flags, 0, 9, starts, offsets, 0)[0].tolist() == [0]
    for base, least in ((-1, 0), (3, 2)):
        with pytest.raises(ValueError, match="before the flags"):
            first_fits(flags, base, 9, starts, offsets, least)
    for wrong in ([0, 3], [0, 0], [-1, 1], [0, 2, 1]):
        with pytest.raises(ValueError, match="offsets do not ascend"):
            first_fits(flags, 0, 9, starts, np.array(wrong), 0)
    for disorder in ([0, 0], [1, 2], [0, 2, 1]):
        with pytest.raises(ValueError, match="starts do not ascend"):
            first_fits(flags, 0, 9, np.array(disorder, np.uint32), np.array([0, len(disorder)]), 0)
    with pytest.raises(ValueError, match="one value more"):
        first_fits(flags, 0, 9, starts, np.empty(0, np.int64), 0)
    with pytest.raises(TypeError):
        first_fits(flags, 0, 9, starts.astype(np.int64), offsets, 0)  # type: ignore[arg-type]
