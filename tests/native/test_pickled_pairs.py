"""The parser of pickled lists of integer pairs, compared with a plain-Python twin and with pickle."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pickled_pairs_twin import twin

from megatron_sft_idx._native import parse_pickled_pairs

INTEGERS = st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 70000)
PAIRS = st.lists(st.tuples(INTEGERS, INTEGERS), max_size=30)


def parse(data: bytes) -> list[tuple[int, ...]]:
    return [tuple(pair) for pair in parse_pickled_pairs(np.frombuffer(data, np.uint8)).tolist()]


@given(PAIRS, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_what_pickle_writes(pairs: list[tuple[int, int]], protocol: int) -> None:
    data = pickle.dumps(pairs, protocol)
    assert parse(data) == twin(data) == pairs


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 20000])
def test_batches_and_frames(protocol: int, count: int) -> None:
    pairs = [(i * 70001, i) for i in range(count)]
    assert parse(pickle.dumps(pairs, protocol)) == pairs


@given(PAIRS, st.integers(0, pickle.HIGHEST_PROTOCOL), st.data())
def test_what_is_accepted_is_what_is_meant(pairs: list[tuple[int, int]], protocol: int, data: st.DataObject) -> None:
    """With one byte inserted, removed or changed, the result is an error or equals the twin's."""
    raw = bytearray(pickle.dumps(pairs, protocol))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 1))] = data.draw(st.binary(max_size=2))
    refusal = "byte "
    try:
        found = parse(bytes(raw))
    except ValueError as error:
        refusal = str(error)
    else:
        assert found == twin(bytes(raw))
    assert refusal.startswith("byte ")


@given(st.lists(st.sampled_from(list(b"(]laet\x86K\x01M\x00J.\x94q\x8a\x80I1\nL")), max_size=40))
def test_opcodes_at_random(opcodes: list[int]) -> None:
    try:
        found = parse(bytes(opcodes))
    except ValueError:
        return
    assert found == twin(bytes(opcodes))


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1/0",)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (b".", "without one complete list"),
        (pickle.dumps([Attack()], 2), "opcode 0x63"),
        (pickle.dumps([Attack()], 4), "opcode 0x8c"),
        (b"]cos\nsystem\n.", "opcode 0x63"),
        (pickle.dumps([(1.5, 2)]), "opcode 0x47"),
        (pickle.dumps([("a", 2)]), "opcode 0x8c"),
        (pickle.dumps([(1, 2, 3)]), "opcode 0x87|three integers"),
        (pickle.dumps([[1, 2]]), "three integers|not a list of pairs"),
        (pickle.dumps(((1, 2),)), "opcode 0x85|not a list"),
        (pickle.dumps([[(1, 2)]]), "not a list|without one whole"),
        (pickle.dumps({1: 2}), "opcode 0x7d"),
        (pickle.dumps([(1, 2**63)]), "more than 64 bits"),
        (pickle.dumps([(1, 2**63)], 0), "64 bits"),
        (pickle.dumps([(1, 1 << 5000)]), "more than 64 bits"),
        (b"]\x8b\xff\xff\xff\x7f.", "64 bits"),
        (b"]\x8b\xff\xff\xff\xff.", "negative size"),
        (b"]\x8a\xff.", "64 bits"),
        (b"]K\x01.", "without one complete list"),
        (b"]].", "without one complete list"),
        (b"]a.", "not a list"),
        (b"e.", "not a list"),
        (b"\x86.", "not a list"),
        (b"]K\x01K\x02\x86.", "without one complete list"),
        (b"].]", "bytes follow"),
        (b"]p", "truncated"),
        (b"\x80\x06].", "unknown pickle protocol"),
        (b"]IK\n.", "not a decimal"),
        (b"]I\n.", "not a decimal"),
        (pickle.dumps([(1, 2)])[:-1], "truncated"),
        # The same tuple twice: the second comes from the memo, which index writers never need.
        (pickle.dumps([(1, 2)] * 1 + [None]), "opcode 0x4e"),
        (b"](K\x01K\x02\x86\x94h\x01e.", "opcode 0x68"),
    ],
)
def test_all_else_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(data)


def test_numbers_in_the_pickle_cost_no_memory() -> None:
    # Python's unpickler would allocate a memo of this size.
    assert parse(b"]r\xff\xff\xff\xff(K\x01K\x02\x86r\xfe\xff\xff\xffe.") == [(1, 2)]
    assert parse(b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff].") == []


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError):
        parse_pickled_pairs(np.zeros(4, np.int8))
    with pytest.raises(ValueError, match="one-dimensional"):
        parse_pickled_pairs(np.zeros((2, 2), np.uint8))
