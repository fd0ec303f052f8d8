"""The scanner of JSON arrays, compared with a plain-Python twin and with the parser."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_scan_twin import array_ends

from megatron_sft_idx._native import scan_json_array

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('ab\\"[]{},\n\u2028é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('a"[,\\'), inner),
    max_leaves=12,
)


def scan(data: bytes, block_sizes: list[int]) -> tuple[list[int], int]:
    ends: list[int] = []
    state = (1, False, False)
    start = 0
    for size in [*block_sizes, len(data)]:
        block = np.frombuffer(data[start : start + size], np.uint8)
        found, *state = scan_json_array(block, *state)
        ends += (found + start).tolist()
        start += size
        if state[0] == 0:
            break
    return ends, state[0]


@given(st.lists(VALUES), st.lists(st.integers(0, 7), max_size=20), st.sampled_from([None, 0, 1]))
def test_elements_of_real_arrays(values, block_sizes, indent):
    data = json.dumps(values, ensure_ascii=False, indent=indent).encode()[1:] + b" ] junk, "
    ends, depth = scan(data, block_sizes)
    assert depth == 0
    starts = [0] + [end + 1 for end in ends[:-1]]
    elements = [data[a:b] for a, b in zip(starts, ends, strict=True)]
    assert [json.loads(element) for element in elements if element.strip()] == values
    assert len(elements) == max(1, len(values))


@given(
    st.lists(st.sampled_from([b'"', b"\\", b"[", b"]", b"{", b"}", b",", b"a", b"\xff", b"\0"])).map(b"".join),
    st.lists(st.integers(0, 3)),
)
def test_any_bytes_as_the_twin(data, block_sizes):
    assert scan(data, block_sizes)[0] == array_ends(data)


def test_escapes_at_the_edges_of_blocks():
    data = rb'"a\"],", "\\", 1]'
    expected = [data.index(b', "'), data.rindex(b","), len(data) - 1]
    for cut in range(len(data) + 1):
        assert scan(data, [cut])[0] == expected


def test_refuses_what_is_no_open_array():
    with pytest.raises(ValueError, match="depth must be at least 1"):
        scan_json_array(np.zeros(1, np.uint8), 0, False, False)
    with pytest.raises(ValueError, match="one-dimensional"):
        scan_json_array(np.zeros((1, 1), np.uint8), 1, False, False)
    with pytest.raises(TypeError):
        scan_json_array(np.zeros(1, np.int8), 1, False, False)
