"""The kernels of verification compared with plain Python, on valid, almost valid and random arrays."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verify_twin import Arrays, Walked, slow_walk

from megatron_sft_idx._native import PackWalk
from megatron_sft_idx.check.pack_walk import CheckedFile, Meter, Stream
from megatron_sft_idx.check.rules import Findings, check_ids

HUGE = st.sampled_from([-(2**63), -1, 0, 1, 2**31, 2**56, 2**62, 2**63 - 1])


# ---- packs ----


@st.composite
def arrays(draw: st.DrawFn, *, weights: bool) -> Arrays:
    """Draw valid packs, then replace a few values."""
    packs = draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), max_size=6))
    token_offsets, sequence_offsets, starts, mask = [0], [0], [], []
    for lengths in packs:
        for i, length in enumerate(lengths):
            starts.append(sum(lengths[:i]))
            values = st.floats(0, 2, width=32) if weights else st.integers(0, 1)
            mask += [*draw(st.lists(values, min_size=length - 1, max_size=length - 1)), 0.0 if weights else 0]
        token_offsets.append(token_offsets[-1] + sum(lengths))
        sequence_offsets.append(sequence_offsets[-1] + len(lengths))
    capacity = max([sum(lengths) for lengths in packs], default=1) + draw(st.integers(-1, 4))
    odd = [float("nan"), float("inf"), -1.0, -0.0, 1.0] if weights else [1, 2, 128, 255]
    for values, replacement in (
        (token_offsets, st.integers(-1, len(mask) + 1) | HUGE),
        (sequence_offsets, st.integers(-1, len(starts) + 1) | HUGE),
        (starts, st.integers(0, 20) | st.just(2**32 - 1)),
        (mask, st.sampled_from(odd)),
    ):
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2])) if values else 0):
            values[draw(st.integers(0, len(values) - 1))] = draw(replacement)
    return Arrays(token_offsets, sequence_offsets, starts, mask, max(capacity, 1), draw(st.integers(1, 4)))


def walk(arrays: Arrays, mask_dtype: Any, run: int, piece: int) -> tuple[Walked, PackWalk]:
    """Pass the arrays like verification does, in runs and pieces of these sizes."""
    native = PackWalk(sequences=len(arrays.starts), tokens=len(arrays.mask), capacity=arrays.capacity,
                      multiple=arrays.multiple, most=1000)  # fmt: skip
    tokens, sequences = (np.array(a, np.int64) for a in (arrays.token_offsets, arrays.sequence_offsets))
    starts, mask = np.array(arrays.starts, np.uint32), np.array(arrays.mask, mask_dtype)
    seen = 0
    for first in range(0, len(tokens) - 1, run):
        count = min(run, len(tokens) - 1 - first)
        native.packs(tokens[first : first + count + 2], sequences[first : first + count + 2], count)
        while native.next_sequence < native.wanted_sequences:
            begin = native.next_sequence
            native.starts(starts[begin : min(begin + piece, native.wanted_sequences)])
            while seen < native.known:
                native.mask(mask[seen : min(seen + piece, native.known)])
                seen = min(seen + piece, native.known)
    native.mask(mask[seen:])
    found = {(rule, pack, at, expected) for rule, pack, at, _, expected in native.breaches}
    return Walked(
        found, native.num_packs, native.num_trained_tokens, native.num_masked_packs, native.longest_pack,
        native.longest_padded_pack, native.most_sequences,
    ), native  # fmt: skip


@pytest.mark.parametrize("mask_dtype", [np.uint8, np.float32])
def test_the_walk_is_the_slow_one(mask_dtype: Any) -> None:
    @given(arrays(weights=mask_dtype is np.float32), st.integers(1, 7), st.integers(1, 9))
    def check(case: Arrays, run: int, piece: int) -> None:
        found, native = walk(case, mask_dtype, run, piece)
        assert found == slow_walk(case)
        assert native.counts == found.counts

    check()


@pytest.mark.parametrize("mask_dtype", [np.uint8, np.float32])
def test_long_masks_are_counted_right(mask_dtype: Any) -> None:
    random = np.random.default_rng(0)
    for length in (1, 31, 32, 33, 255 * 32 - 1, 255 * 32, 255 * 32 + 7, 200_000):
        mask = random.integers(0, 2, length).astype(mask_dtype)
        mask[-1] = 0
        whole = PackWalk(sequences=1, tokens=length, capacity=length, multiple=1, most=1)
        whole.packs(np.array([0, length]), np.array([0, 1]), 1)
        whole.starts(np.zeros(1, np.uint32))
        whole.mask(mask)
        assert (whole.num_trained_tokens, whole.counts) == (np.count_nonzero(mask), {})
        mask[length // 2] = 3 if mask_dtype is np.uint8 else np.nan
        again = PackWalk(sequences=0, tokens=length, capacity=1, multiple=1, most=1)
        again.mask(mask)
        assert again.num_trained_tokens == np.count_nonzero(mask)
        assert [breach[:3] for breach in again.breaches] == [("P7", -1, length // 2)]


def test_breaches_are_kept_up_to_a_limit_and_counted_beyond() -> None:
    native = PackWalk(sequences=0, tokens=100, capacity=1, multiple=1, most=3)
    native.mask(np.full(100, 7, np.uint8))
    assert [breach[2:4] for breach in native.breaches] == [(0, 7), (1, 7), (2, 7)]
    assert native.counts == {"P7": 100}


def test_arguments_that_cannot_be_are_refused() -> None:
    good = {"sequences": 1, "tokens": 1, "capacity": 1, "multiple": 1, "most": 1}
    for bad in ({"sequences": -1}, {"tokens": 2**57}, {"capacity": 2**31}, {"multiple": 0}):
        with pytest.raises(ValueError, match=r"counts are|capacity and multiple"):
            PackWalk(**{**good, **bad})
    native, offsets = PackWalk(**good), np.zeros(3, np.int64)
    for count in (0, 3):
        with pytest.raises(ValueError, match=r"count \+ 1"):
            native.packs(offsets, offsets, count)
    with pytest.raises(ValueError, match=r"count \+ 1"):
        native.packs(offsets, offsets[:2], 1)
    with pytest.raises(ValueError, match="contiguous and aligned"):
        native.starts(np.frombuffer(bytes(9), np.uint32, offset=1))
    for call, values in ((native.starts, offsets), (native.mask, offsets)):
        with pytest.raises(TypeError):
            call(values)  # type: ignore[operator]


# ---- ids ----


def bad_ids(folder: Path, ids: Any, limit: int) -> tuple[list[tuple[str, int]], int]:
    """Return rule and place of the kept findings, and the number of all findings."""
    path = folder / "x.bin"
    path.write_bytes(ids.tobytes())
    findings = Findings("x", 5)
    with closing(CheckedFile(str(path))) as file:
        check_ids(Stream(file, Meter()), ids.dtype, limit, findings, lambda token: token)
    places = sorted((finding.rule, finding.offset // ids.itemsize) for finding in findings.kept)
    return places, sum(findings.counts.values())


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_bad_ids_are_the_slow_ones(tmp_path: Path, dtype: Any) -> None:
    bounds = np.iinfo(dtype)

    @given(st.lists(st.integers(bounds.min, bounds.max) | st.integers(0, 30), max_size=70), st.integers(1, 70_000))
    def check(ids: list[int], limit: int) -> None:
        negative = [("P8", i) for i, value in enumerate(ids) if value < 0]
        beyond = [("P9", i) for i, value in enumerate(ids) if value >= limit]
        found = bad_ids(tmp_path, np.array(ids, dtype), limit)
        assert found == (negative[:5] + beyond[:5], len(negative) + len(beyond))

    check()
