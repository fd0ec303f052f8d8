"""PackStage compared with its twin: every dtype and message, and nothing of a rejected pack is kept."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_stage_twin import BrokenRuleError, Twin

from megatron_sft_idx._native import PackStage

U8, F32, I64, F64, U16, I32 = (np.dtype(t) for t in ("u1", "f4", "i8", "f8", "u2", "i4"))
TOKEN_INPUTS, MASK_INPUTS = (U16, I32, I64), (U8, I64, F32, F64)
COUNTS = (
    *("num_packs", "num_sequences", "num_tokens", "num_trained_tokens", "num_masked_packs"),
    *("dropped_first_tokens", "longest_pack", "longest_padded_pack", "most_sequences"),
)


def stage_of(token: Any = U16, mask: Any = U8, capacity: int = 64, multiple: int = 1, room: int = 1 << 16) -> Any:
    return PackStage(np.dtype(token), np.dtype(mask), capacity, multiple, room)


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def add(stage: Any, tokens: Any, mask: Any, starts: Any, *, token_aligned: bool = False) -> bool:
    """Add one pack of lists or arrays."""
    ids = tokens if isinstance(tokens, np.ndarray) else np.array(tokens, np.int64)
    values = mask if isinstance(mask, np.ndarray) else np.array(mask, np.float64)
    begins = np.array(starts, np.int64)
    return stage.add_one(ids, values, begins, token_aligned)


def content(stage: Any) -> tuple[Any, ...]:
    buffers = tuple(bytes(getattr(stage, name)) for name in ("tokens", "mask", "starts", "records"))
    return *buffers, *(getattr(stage, name) for name in COUNTS)


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[int], list[Any], list[int]]:
    """Draw packs that are mostly valid, sometimes with one error."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    size = sum(lengths)
    ids = st.integers(0, 9) | st.sampled_from([65535, 65536, 2**31 - 1]) if draw(st.booleans()) else st.integers(0, 9)
    tokens = draw(st.lists(ids, min_size=size, max_size=size))
    values = st.sampled_from([0, 1, 2]) if draw(st.integers(0, 3)) == 0 else st.sampled_from([0, 1])
    mask = draw(st.lists(values, min_size=size, max_size=size))
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    if draw(st.integers(0, 3)) == 0:
        starts[draw(st.integers(0, len(starts) - 1))] += draw(st.integers(-2, 2))
    if draw(st.booleans()):
        for a, b in pairwise([*starts, size]):
            if 0 <= a < b <= size:
                mask[b - 1] = 0
    return tokens, mask, starts


@settings(max_examples=300, deadline=None)
@given(
    packs=st.lists(inputs(), max_size=6),
    token_in=st.sampled_from(TOKEN_INPUTS),
    token_out=st.sampled_from((U16, I32)),
    mask_in=st.sampled_from(MASK_INPUTS),
    mask_out=st.sampled_from((U8, F32)),
    capacity=st.integers(8, 30),
    multiple=st.integers(1, 5),
    aligned=st.booleans(),
)
def test_it_does_what_the_twin_does(
    packs: Any, token_in: Any, token_out: Any, mask_in: Any, mask_out: Any, capacity: int, multiple: int, aligned: bool
) -> None:
    stage = stage_of(token_out, mask_out, capacity, multiple)
    twin = Twin(np.iinfo(token_out).max, mask_out == F32, capacity, multiple)
    for tokens, mask, starts in packs:
        ids = np.array(tokens, np.int64).astype(token_in)
        before = content(stage)
        try:
            twin.add(ids.tolist(), mask, starts, aligned)
        except BrokenRuleError as error:
            rules = "|".join(str(error).split())
            with pytest.raises(ValueError, match=rf"^pack {len(twin.records)}: .*\(rule ({rules})\)"):
                add(stage, ids, np.array(mask, mask_in), starts, token_aligned=aligned)
            assert content(stage) == before
        else:
            assert add(stage, ids, np.array(mask, mask_in), starts, token_aligned=aligned)
    lengths = [length for length, _ in twin.records]
    assert np.frombuffer(stage.tokens, token_out).tolist() == twin.tokens
    assert np.frombuffer(stage.mask, mask_out).tolist() == twin.mask
    assert np.frombuffer(stage.starts, np.uint32).tolist() == twin.starts
    assert np.frombuffer(stage.records, np.uint32).reshape(-1, 2).tolist() == [list(r) for r in twin.records]
    assert [getattr(stage, name) for name in COUNTS] == [
        *(len(lengths), len(twin.starts), len(twin.tokens), sum(value != 0 for value in twin.mask)),
        *(twin.masked, twin.dropped, max(lengths, default=0), twin.longest_padded),
        max((count for _, count in twin.records), default=0),
    ]


@given(st.lists(inputs(), min_size=1, max_size=5), st.booleans())
@settings(deadline=None)
def test_many_at_once_are_one_by_one_or_none(packs: Any, aligned: bool) -> None:
    together, alone = stage_of(), stage_of()
    tokens = np.array([t for pack in packs for t in pack[0]], np.int64)
    mask = np.array([m for pack in packs for m in pack[1]], np.uint8)
    starts = np.array([s for pack in packs for s in pack[2]], np.int64)
    lengths, counts = longs(*(len(p[0]) for p in packs)), longs(*(len(p[2]) for p in packs))
    try:
        for pack in packs:
            add(alone, *pack, token_aligned=aligned)
    except ValueError:
        with pytest.raises(ValueError, match=r"^pack \d: "):
            together.add(tokens, mask, starts, lengths, counts, aligned)
        assert content(together) == content(stage_of())
    else:
        assert together.add(tokens, mask, starts, lengths, counts, aligned)
        assert content(together) == content(alone)


@given(st.lists(inputs(), min_size=1, max_size=5), st.sampled_from((U16, I32)), st.sampled_from((U8, F32)))
@settings(deadline=None)
def test_what_is_counted_is_what_would_be_staged(packs: Any, token: Any, mask: Any) -> None:
    arrays = (
        np.array([t for pack in packs for t in pack[0]], np.int64).astype(token),
        np.array([m for pack in packs for m in pack[1]], mask),
        np.array([s for pack in packs for s in pack[2]], np.int64),
        longs(*(len(pack[0]) for pack in packs)),
        longs(*(len(pack[2]) for pack in packs)),
    )
    staged, counted = (stage_of(token, mask, capacity=20) for _ in range(2))
    refusals = []
    for call in (lambda: staged.add(*arrays, False), lambda: counted.count(*arrays)):
        try:
            call()
            refusals.append("")
        except ValueError as error:
            refusals.append(str(error))
    assert refusals[0] == refusals[1]
    assert content(counted) == (b"", b"", *content(staged)[2:])


def test_only_the_dtypes_of_the_stage_are_counted() -> None:
    good = np.array([1, 2], np.int32), np.array([1, 0], np.uint8), longs(0), longs(2), longs(1)
    stage = stage_of(I32, U8)
    for wrong in ((good[0].astype(np.int64), good[1]), (good[0], good[1].astype(np.float32))):
        with pytest.raises(TypeError, match="have the dtypes of the stage"):
            stage.count(*wrong, *good[2:])
    stage.count(*good)
    assert (stage.num_packs, stage.num_trained_tokens) == (1, 1)


@pytest.mark.parametrize("mask_in", [F32, F64])
def test_weights_go_through_exactly(mask_in: Any) -> None:
    weights = np.array([0.1, 3.4028234663852886e38, 1e-45, 0.0], mask_in)
    stage = stage_of(mask=F32)
    add(stage, [1, 2, 3, 4], weights, [0])
    np.testing.assert_array_equal(np.frombuffer(stage.mask, F32), weights.astype(F32))


# tokens, mask, starts, lengths, sequences, message
REFUSED: list[tuple[Any, ...]] = [
    ([], [], [0], [0], [1], "pack 0: it has 0 tokens, but a pack needs at least one (rule P1)"),
    ([1], [0], [0], [-1], [1], "pack 0: it has -1 tokens, but a pack needs at least one (rule P1)"),
    ([1] * 9, [0] * 9, [0], [9], [1], "pack 0: it has 9 tokens, but the capacity is 8 (rule P1)"),
    ([1], [0], [0], [2**62], [1], f"pack 0: it has {2**62} tokens, but the capacity is 8 (rule P1)"),
    ([1], [0], [], [1], [0], "pack 0: it has no sequence starts, but needs at least a first one at 0 (rule P2)"),
    ([1], [0], [0], [1], [-1], "pack 0: it has no sequence starts, but needs at least a first one at 0 (rule P2)"),
    ([1], [0], [0], [1], [2], "pack 0: sequence starts run out"),
    ([1], [0], [0], [1], [2**62], "pack 0: sequence starts run out"),
    ([1], [0], [0], [2], [1], "pack 0: tokens run out"),
    ([1], [0], [0, 0], [1], [1], "pack lengths and sequence counts do not add up to the sizes of the arrays"),
    ([1, 2], [0, 0], [0], [1], [1], "pack lengths and sequence counts do not add up to the sizes of the arrays"),
    ([1], [0], [], [], [], "pack lengths and sequence counts do not add up to the sizes of the arrays"),
    ([1, 2, 3], [0] * 3, [0, 3, 1], [1, 2], [1, 2], "pack 1: the first sequence starts at 3, expected 0 (rule P2)"),
    ([1, 2], [0, 0], [0, 2], [2], [2], "pack 0: sequence 1 starts at 2, but the pack has 2 tokens (rule P4)"),
    ([1, 2], [0, 0], [0, 0], [2], [2], "pack 0: sequence 1 starts at 0, expected a start after 0 (rule P3)"),
    ([1], [0, 0], [0], [1], [1], "2 loss mask values for 1 tokens, expected one per token"),
    ([1], [0], [0], [1], [], "one length and one sequence count per pack"),
    ([1, 70000], [0, 0], [0], [2], [1], "position 1 has id 70000, but the token dtype stores 0 to 65535 (rule P8)"),
    (
        [1, 2],
        [2, 0],
        [0],
        [2],
        [1],
        "position 0 has loss mask 2, but the mask dtype stores 0 and 1 (weights need float32)",
    ),
    ([1, 2], [0, 1], [0], [2], [1], "not 0 at position 1, the end of a sequence, where there is no next token"),
]


@pytest.mark.parametrize(("tokens", "mask", "starts", "lengths", "sequences", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    tokens: Any, mask: Any, starts: Any, lengths: Any, sequences: Any, message: str
) -> None:
    stage = stage_of(capacity=8)
    arrays = (np.array(tokens, I64), np.array(mask, U8), longs(*starts), longs(*lengths), longs(*sequences))
    with pytest.raises(ValueError, match=re.escape(message)):
        stage.add(*arrays, False)
    assert content(stage) == content(stage_of())


def test_rounding_up_is_checked_against_the_capacity() -> None:
    stage = stage_of(capacity=8, multiple=4)
    with pytest.raises(ValueError, match=r"16 positions with each sequence rounded up to a multiple of 4.*rule P5"):
        add(stage, [1] * 7, [0] * 7, [0, 1, 2])
    add(stage, [1] * 7, [0] * 7, [0, 4])
    assert (stage.longest_pack, stage.longest_padded_pack) == (7, 8)


def test_the_largest_multiple_does_not_overflow() -> None:
    most = 2**31 - 1
    stage = stage_of(capacity=most, multiple=most)
    with pytest.raises(ValueError, match=f"{3 * most} positions"):
        add(stage, [1] * 7, [0] * 7, [0, 1, 2])


@pytest.mark.parametrize(
    ("token", "mask", "capacity", "multiple", "message"),
    [
        (I64, U8, 8, 1, "uint16 or int32"),
        (U16, I64, 8, 1, "uint8 or float32"),
        (U16, F64, 8, 1, "uint8 or float32"),
        (U16, U8, 0, 1, "capacity"),
        (U16, U8, 8, 0, "multiple"),
        (U16, U8, 8, -1, "multiple"),
        (U16, U8, 2**31, 1, "capacity"),
        (U16, U8, 8, 2**63 - 1, "multiple"),
    ],
)
def test_a_stage_has_limits(token: Any, mask: Any, capacity: int, multiple: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage_of(token, mask, capacity, multiple)


@pytest.mark.parametrize("dtype", ["u1", "i2", "u4", "f4", ">i4", ">u2", "?", "O"])
def test_other_token_dtypes_are_not_converted(dtype: str) -> None:
    with pytest.raises(TypeError, match="tokens must be uint16, int32 or int64"):
        add(stage_of(), np.ones(2, dtype), [0, 0], [0])


@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", ">f4", "f2", "c8", "O"])
def test_other_mask_dtypes_are_not_converted(dtype: str) -> None:
    with pytest.raises(TypeError, match="masks must be bool, uint8, int64, float32 or float64"):
        add(stage_of(), [1, 2], np.zeros(2, dtype), [0])


def test_lists_and_other_index_dtypes_are_not_converted() -> None:
    good: list[Any] = [np.ones(1, I32), np.zeros(1, U8), longs(0), longs(1), longs(1)]
    for place in range(5):
        with pytest.raises(TypeError):
            stage_of().add(*good[:place], good[place].tolist(), *good[place + 1 :], False)
    for place in (2, 3, 4):
        with pytest.raises(TypeError):
            stage_of().add(*good[:place], good[place].astype(np.int32), *good[place + 1 :], False)


def unaligned(values: np.ndarray) -> np.ndarray:
    return np.frombuffer(b"\0" + values.tobytes(), values.dtype, offset=1)


@pytest.mark.parametrize("bad", [lambda a: a.reshape(1, -1), lambda a: np.repeat(a, 2)[::2], unaligned])
@pytest.mark.parametrize("place", range(5))
def test_only_aligned_contiguous_vectors_are_read(place: int, bad: Any) -> None:
    arrays: list[Any] = [np.ones(2, I64), np.zeros(2, I64), longs(0, 1), longs(1, 1), longs(1, 1)]
    arrays[place] = bad(arrays[place])
    with pytest.raises((ValueError, TypeError)):
        stage_of().add(*arrays, False)


@pytest.mark.parametrize("place", range(3))
def test_one_pack_alone_takes_the_same_arrays(place: int) -> None:
    good: list[Any] = [np.ones(2, I64), np.zeros(2, I64), longs(0, 1)]
    assert stage_of().add_one(*good, False)
    array = good[place]
    for bad in (array.tolist(), array.astype("i2"), array.reshape(1, -1), np.repeat(array, 2)[::2], unaligned(array)):
        with pytest.raises((ValueError, TypeError)):
            stage_of().add_one(*good[:place], bad, *good[place + 1 :], False)


@pytest.mark.parametrize("count", [0, 1, 254, 255, 256, 510, 511, 70_000])
@pytest.mark.parametrize("mask_in", MASK_INPUTS)
@pytest.mark.parametrize("mask_out", [U8, F32])
def test_trained_positions_are_counted_at_any_length(count: int, mask_in: Any, mask_out: Any) -> None:
    stage = stage_of(mask=mask_out, capacity=80_000)
    mask = np.ones(count + 1, mask_in)
    mask[-1] = 0
    stage.add_one(np.zeros(count + 1, U16), mask, longs(0), False)
    assert stage.num_trained_tokens == count


def test_what_does_not_fit_the_room_waits_for_a_flush() -> None:
    stage = stage_of(room=8)
    assert add(stage, [1] * 6, [0] * 6, [0])
    before = content(stage)
    assert not add(stage, [2] * 3, [0] * 3, [0])
    assert content(stage) == before
    assert add(stage, [2] * 2, [0] * 2, [0])
    stage.clear()
    assert all(bytes(getattr(stage, name)) == b"" for name in ("tokens", "mask", "starts", "records"))
    assert (stage.num_packs, stage.num_tokens) == (2, 8)
    assert add(stage, [3] * 60, [0] * 60, [0])  # larger than the buffer by itself
