"""Gathering sequences and their positions in a shard, compared with plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sft_idx._native import absolute_offsets, gather_sequences

DTYPES = ("u2", "i4", "u1", "f4")


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@settings(deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_sequences_come_to_their_places(data: st.DataObject, dtype: str) -> None:
    source = data.draw(st.lists(st.integers(0, 255), max_size=30))
    bounds = st.tuples(st.integers(0, len(source)), st.integers(0, len(source))).map(sorted)
    ranges = data.draw(st.lists(bounds, max_size=8))
    lengths = [stop - start for start, stop in ranges]
    # Concatenated in some order, with a gap before each.
    expected: list[int] = []
    places = [0] * len(ranges)
    for sequence in data.draw(st.permutations(range(len(ranges)))):
        expected += [77] * data.draw(st.integers(0, 2))
        places[sequence] = len(expected)
        expected += source[slice(*ranges[sequence])]
    out = np.full(len(expected), 77, dtype)
    gather_sequences(
        np.array(source, dtype), longs(*(start for start, _ in ranges)), longs(*lengths), longs(*places), out
    )
    assert out.tolist() == expected


LOW, HIGH = -(2**63), 2**63 - 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("starts", "lengths", "places", "word"),
    [
        ([-1], [3], [0], "sequence 0 is outside the source"),
        ([LOW], [HIGH], [0], "sequence 0 is outside the source"),
        ([2], [-1], [0], "sequence 0 is outside the source"),
        ([0, 3], [5, 3], [0, 0], "sequence 1 is outside the source"),
        ([HIGH], [0], [0], "sequence 0 is outside the source"),
        ([HIGH], [HIGH], [0], "sequence 0 is outside the source"),
        ([0, 0], [5, 5], [0, 5], "sequence 1 is outside the output"),
        ([0], [1], [-1], "sequence 0 is outside the output"),
        ([0], [1], [LOW], "sequence 0 is outside the output"),
        ([0], [1], [9], "sequence 0 is outside the output"),
        ([0], [0], [HIGH], "sequence 0 is outside the output"),
        ([0, 1], [5], [0, 0], "one start, one length and one place per sequence"),
        ([0], [5], [0, 0], "one start, one length and one place per sequence"),
    ],
)
def test_ranges_outside_are_refused(
    dtype: str, starts: list[int], lengths: list[int], places: list[int], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        gather_sequences(
            np.arange(5).astype(dtype), longs(*starts), longs(*lengths), longs(*places), np.zeros(9, dtype)
        )


def test_arrays_are_not_converted_and_read_only_ones_not_written() -> None:
    good = [np.arange(5, dtype="u2"), longs(0), longs(5), longs(0), np.zeros(5, "u2")]
    gather_sequences(*good)
    for place, array in enumerate(good):
        for other in (
            array.tolist(),
            array.astype("f8"),
            np.repeat(array, 2)[::2],
            array.astype(array.dtype.str.replace("<", ">")),
        ):
            if isinstance(other, np.ndarray) and other.dtype == array.dtype and other.flags.c_contiguous:
                continue
            with pytest.raises((TypeError, ValueError)):
                gather_sequences(*good[:place], other, *good[place + 1 :])
    frozen = np.zeros(5, "u2")
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        gather_sequences(*good[:4], frozen)
    assert not frozen.any()


@pytest.mark.parametrize("place", range(5))
def test_unaligned_and_folded_arrays_are_refused(place: int) -> None:
    arrays = [np.arange(4, dtype="i4"), longs(0, 2), longs(2, 2), longs(2, 0), np.zeros(4, "i4")]
    good = arrays[place]
    raw = bytearray(b"\0" + good.tobytes())
    for bad in (np.frombuffer(raw, good.dtype, offset=1), good.reshape(2, -1)):
        with pytest.raises(ValueError, match="one-dimensional, contiguous and aligned"):
            gather_sequences(*arrays[:place], bad, *arrays[place + 1 :])


def slow_absolute(packs: list[list[int]]) -> list[int]:
    """Return the positions of all sequences, for packs given as sequence lengths, and the token count."""
    out = [0]
    for length in (length for pack in packs for length in pack):
        out.append(out[-1] + length)
    return out


def csr(packs: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sequences = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    tokens = np.cumsum([0, *map(sum, packs)], dtype=np.int64)
    starts = [start for pack in packs for start in np.cumsum([0, *pack[:-1]]).tolist()]
    return sequences, tokens, np.array(starts, np.uint32)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), max_size=8))
def test_absolute_offsets_are_running_sums(packs: list[list[int]]) -> None:
    assert absolute_offsets(*csr(packs)).tolist() == slow_absolute(packs)


@pytest.mark.parametrize(
    ("sequences", "tokens", "starts", "word"),
    [
        ([], [], [], "packs \\+ 1 values"),
        ([0, 1], [0], [0], "packs \\+ 1 values"),
        ([0, 1], [0, 5], [0, 1], "starts do not match"),
        ([1, 2], [0, 5], [0, 0], "begin with 0"),
        ([0, 1], [1, 5], [0], "begin with 0"),
        ([0, 1], [LOW, HIGH], [0], "begin with 0"),
        ([0, 0], [0, 5], [], "pack 0: .* do not ascend"),
        ([0, 3, 2], [0, 5, 6], [0, 0], "pack 0: .* do not ascend"),
        ([0, HIGH, 2], [0, 5, 6], [0, 0], "pack 0: .* do not ascend"),
        ([0, LOW, 2], [0, 5, 6], [0, 0], "pack 0: .* do not ascend"),
        ([0, 1, 2], [0, 5, 5], [0, 0], "pack 1: .* do not ascend"),
        ([0, 1, 2], [0, 5, LOW], [0, 0], "pack 1: .* do not ascend"),
        ([0, 1], [0, 5], [1], "pack 0: its sequence starts do not ascend"),
        ([0, 2], [0, 5], [0, 0], "pack 0: its sequence starts do not ascend"),
        ([0, 2], [0, 5], [0, 5], "pack 0: its sequence starts do not ascend"),
        ([0, 2], [0, 5], [0, 2**32 - 1], "pack 0: its sequence starts do not ascend"),
    ],
)
def test_offsets_that_disagree_are_refused(
    sequences: list[int], tokens: list[int], starts: list[int], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        absolute_offsets(longs(*sequences), longs(*tokens), np.array(starts, np.uint32))
