"""The walk over a pickle's opcodes, compared with Python's own, which is slow."""

from __future__ import annotations

import pickle
import pickletools
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx._native import check_pickle

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)
MEMO = {"BINPUT", "LONG_BINPUT", "PUT", "BINGET", "LONG_BINGET", "GET"}


def walk(data: bytes) -> int:
    return check_pickle(np.frombuffer(data, np.uint8))


def twin(data: bytes) -> int | None:
    """Return the end of the pickle, or None if it is invalid."""
    try:
        opcodes = list(pickletools.genops(data))
    except Exception:  # genops raises the errors of its readers
        return None
    if any(op.name in MEMO and not 0 <= argument < len(data) for op, argument, _ in opcodes):
        return None
    if any(op.name == "FRAME" and argument > len(data) - at - 9 for op, argument, at in opcodes):
        return None  # genops does not check this, but the unpickler reads that much at once
    return int(opcodes[-1][2]) + 1


@given(VALUES, st.integers(0, 5), st.binary(max_size=3))
def test_every_pickle_is_walked_to_its_end(value: Any, protocol: int, rest: bytes) -> None:
    data = pickle.dumps(value, protocol)
    assert walk(data + rest) == twin(data) == len(data)


@given(VALUES, st.integers(0, 5), st.integers(min_value=0), st.integers(0, 255))
def test_a_changed_byte_is_seen_as_python_sees_it(value: Any, protocol: int, at: int, byte: int) -> None:
    data = bytearray(pickle.dumps(value, protocol))
    data[at % len(data)] = byte
    expected = twin(bytes(data))
    try:
        found = walk(bytes(data))
    except ValueError:
        assert expected is None or b"g" in data or b"p" in data  # Python accepts memo numbers that no pickler writes
    else:
        # Python also parses numbers and texts; the walk leaves these to the unpickler.
        assert expected in (None, found)


@given(VALUES, st.integers(0, 5), st.integers(min_value=1))
def test_a_pickle_cut_short_is_refused(value: Any, protocol: int, cut: int) -> None:
    data = pickle.dumps(value, protocol)
    with pytest.raises(ValueError, match=r"past the end|has no end"):
        walk(data[: -1 - cut % len(data)])


@pytest.mark.parametrize(
    ("opcodes", "words"),
    [
        (
            b"Nr" + struct.pack("<I", 2**31) + b".",
            "byte 1 of the pickle: memo number 2147483648 in a pickle of 7 bytes",
        ),
        (b"Np99999999999999999999999\n.", "byte 1 of the pickle: an invalid memo number"),
        (b"Np4000000000\n.", "a memo number|memo number"),
        (b"Nq\xff.", "memo number 255 in a pickle of 4 bytes"),
        (b"Np-1\n.", "an invalid memo number"),
        (b"\x95" + struct.pack("<Q", 2**40) + b"N.", "byte 0 of the pickle: a frame extends past the end"),
        (b"\x8e" + struct.pack("<Q", 2**63) + b".", "byte 0 of the pickle: an argument extends past the end"),
        (b"B" + struct.pack("<I", 2**32 - 1) + b".", "an argument extends past the end"),
        (b"\xff.", "byte 0 of the pickle: not an opcode"),
        (b"", "byte 0 of the pickle: an argument extends past the end"),
    ],
)
def test_what_would_take_memory_is_refused(opcodes: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        walk(opcodes)
