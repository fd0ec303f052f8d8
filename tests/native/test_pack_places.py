"""The search for places of packs against plain Python that tries them one by one."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx._native import first_fits


def slow_first_fits(flags: list[bool], packs: list[list[int]], least: int) -> list[int]:
    """Begins of the packs that find a place."""
    begins: list[int] = []
    for starts in packs:
        fitting = [p for p in range(least, len(flags) - starts[-1]) if all(flags[p + start] for start in starts)]
        if not fitting:
            break
        begins.append(fitting[0])
        least = fitting[0] + starts[-1] + 1
    return begins


gaps = st.lists(st.integers(1, 4), max_size=3)


@given(
    flags=st.lists(st.sampled_from([True, True, False]), max_size=60),
    least=st.integers(0, 9),
    packs=st.lists(gaps.map(lambda steps: [0, *accumulate(steps)]), max_size=6),
)
def test_places_are_the_slow_ones(flags: list[bool], least: int, packs: list[list[int]]) -> None:
    starts = np.array([start for pack in packs for start in pack], np.uint32)
    offsets = np.array([0, *accumulate(map(len, packs))])
    found = first_fits(np.array(flags, np.bool_), starts, offsets, least)
    assert found.tolist() == slow_first_fits(flags, packs, least)


def test_what_makes_no_sense_is_refused() -> None:
    flags, starts = np.ones(9, np.bool_), np.array([0, 2], np.uint32)
    assert first_fits(flags, starts, np.array([0, 2]), 1).tolist() == [1]
    for offsets, least in (([0, 3], 0), ([-1, 2], 0), ([0, 0, 2], 0), ([0, 2, 1], 0), ([], 0), ([0, 2], -1)):
        with pytest.raises(ValueError, match="offsets ascend within the starts"):
            first_fits(flags, starts, np.array(offsets, np.int64), least)
    with pytest.raises(ValueError, match="starts do not ascend"):
        first_fits(flags, starts[::-1].copy(), np.array([0, 2]), 0)
    for arguments in ((flags.view(np.uint8), starts), (flags, starts.astype(np.int64))):
        with pytest.raises(TypeError):
            first_fits(*arguments, np.array([0, 2]), 0)  # type: ignore[arg-type]
