"""JSON lines: the same rows for any blocks and pieces, equal to the result of Python's own parser."""

from __future__ import annotations

import json
import math
from typing import Any
from unittest.mock import patch

from fuzz.contract import refused

from megatron_sft_idx.chat import inputs
from megatron_sft_idx.errors import SequenceError

_NAME = "x.jsonl"


def run(data: bytes) -> None:
    with refused(f"{_NAME}: "):
        rows = rows_of(data, len(data) or 1)
        assert [repr(row) for row in rows] == [repr(row) for row in rows_of(data, 7)]
        lines = data.split(b"\n")
        for position, row in rows:
            raw = lines[position - 1]
            if isinstance(row, SequenceError):
                assert str(row).startswith(f"{_NAME}:{position}: ")
            else:
                assert same(row, without_nulls(json.loads(raw.strip(b" \t\r")))), (row, raw)


def rows_of(data: bytes, block_nbytes: int) -> list[tuple[int, Any]]:
    blocks = ((data[i : i + block_nbytes], i) for i in range(0, len(data), block_nbytes))
    with patch.object(inputs, "MAX_ROW_NBYTES", 2048):
        pieces = inputs.cut_lines(blocks, path=_NAME, piece_nbytes=64)
        return [(row.position, row.data) for piece in pieces for row in piece.rows()]


def without_nulls(row: Any) -> Any:
    """Return an object without null keys at any depth, and any other value unchanged."""

    def left(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: left(item) for key, item in value.items() if item is not None}
        return list(map(left, value)) if isinstance(value, list) else value

    return left(row) if isinstance(row, dict) else row


def same(found: Any, expected: Any) -> bool:
    """Return whether values and types are equal. Floats may differ in the last bit."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return math.isclose(found, expected, rel_tol=1e-15) if isinstance(found, float) else bool(found == expected)
