"""The rules for packs, compared with a plain-Python twin."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_sft_idx._native import first_breach

MOST = 6


def sound(*arrays: NDArray[Any]) -> bool:
    """Return whether the kernel finds nothing. Check that a finding has a pack and a message."""
    tokens, mask, _, lengths, sequences = arrays
    if len(lengths) != len(sequences) or len(tokens) != len(mask):
        with pytest.raises(ValueError, match=r"one per token|one sequence count per pack"):
            first_breach(*arrays, False, MOST, tokens.dtype, mask.dtype)
        return False
    try:
        broken = first_breach(*arrays, False, MOST, tokens.dtype, mask.dtype)
    except ValueError:  # inconsistent lengths and counts
        return False
    if broken is not None:
        (rule, pack, at, found, expected), words = broken
        assert 0 <= pack < len(lengths)
        assert rule == "F2" or f"(rule {rule})" in words
        values = {"P1": lengths, "P6": mask[int(lengths[:pack].sum()) :], "P7": mask[int(lengths[:pack].sum()) :],
                  "P8": tokens[int(lengths[:pack].sum()) :]}  # fmt: skip
        if rule in values:
            np.testing.assert_equal(found, values[rule][pack if rule == "P1" else at])
        if rule in ("P3", "P4"):
            assert found == arrays[2][int(sequences[:pack].sum()) + at]
            assert (found < expected) == (rule == "P3")
    return broken is None


def twin(tokens: list[Any], mask: list[Any], starts: list[int], lengths: list[int], sequences: list[int]) -> bool:
    """Check the rules pack by pack and sequence by sequence."""
    if len(lengths) != len(sequences) or any(not 1 <= n <= MOST for n in lengths) or min(sequences, default=1) < 1:
        return False
    if not sum(lengths) == len(tokens) == len(mask) or sum(sequences) != len(starts):
        return False
    largest = 1 if mask and isinstance(mask[0], int) else float(np.finfo(np.float32).max)
    if any(token < 0 for token in tokens) or any(not 0 <= value <= largest for value in mask):
        return False
    for length, count in zip(lengths, sequences, strict=True):
        bounds, values = [*starts[:count], length], mask[:length]
        if bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
            return False
        if any(values[end - 1] for end in bounds[1:]):
            return False
        starts, mask = starts[count:], mask[length:]
    return True


@st.composite
def columns(draw: st.DrawFn) -> tuple[NDArray[Any], ...]:
    """Draw valid packs of all dtypes, mostly with one value of one column changed or removed."""
    packs = draw(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=3), max_size=4))
    lengths, sequences = [sum(pack) for pack in packs], [len(pack) for pack in packs]
    starts = [sum(pack[:i]) for pack in packs for i in range(len(pack))]
    mask = [int(j + 1 < size) for pack in packs for size in pack for j in range(size)]
    dtypes = [draw(st.sampled_from([np.uint16, np.int32])), draw(st.sampled_from([np.uint8, np.float32]))]
    made = [np.arange(len(mask)), np.array(mask), np.array(starts), np.array(lengths), np.array(sequences)]
    arrays = [array.astype(dtype) for array, dtype in zip(made, [*dtypes, *[np.int64] * 3], strict=True)]
    which = draw(st.integers(0, 7))
    if which < 5 and len(arrays[which]):
        at = draw(st.integers(0, len(arrays[which]) - 1))
        choices = {
            "u": [0, 1, 2, 255],
            "i": [-1, 0, 1, 2, 3, 7, 2**31 - 1],
            "f": [0.0, -0.0, 1e-9, -1.0, np.nan, np.inf],
        }
        choices["i"] += [2**63 - 1, -(2**63)] if arrays[which].dtype == np.int64 else []
        arrays[which][at] = draw(st.sampled_from(choices[arrays[which].dtype.kind]))
    elif which == 5:
        short = draw(st.integers(0, 4))
        arrays[short] = arrays[short][:-1]
    return tuple(arrays)


@given(columns())
def test_agrees_with_the_twin(arrays: tuple[NDArray[Any], ...]) -> None:
    assert sound(*arrays) == twin(*(array.tolist() for array in arrays))


def test_other_dtypes_and_shapes_are_refused() -> None:
    one, flags, ids, masks = np.ones(1, np.int64), np.zeros(1, np.uint8), np.dtype(np.int32), np.dtype(np.uint8)
    with pytest.raises(TypeError):
        first_breach(one, flags.astype("u2"), one, one, one, False, MOST, ids, masks)
    with pytest.raises(TypeError):
        first_breach(one, flags, one, one.astype("i4"), one, False, MOST, ids, masks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one-dimensional"):
        first_breach(np.zeros((1, 1), np.int32), flags, one, one, one, False, MOST, ids, masks)
