"""The search for places of packs against plain Python that tries them one by one."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx.check.infer import _first_fits


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
    starts = [start for pack in packs for start in pack]
    offsets = [0, *accumulate(map(len, packs))]
    found = _first_fits(bytes(flags), base, tokens, starts, offsets, least)
    assert found == slow_first_fits(flags, base, tokens, packs, least)
