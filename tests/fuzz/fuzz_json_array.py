"""One JSON array: it is divided as by the slow scanner, into the elements that Python's own parser finds."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import numpy as np
from fuzz.contract import refused
from fuzz.fuzz_json_lines import same, without_nulls
from json_scan_twin import array_ends

from megatron_sft_idx._native import scan_json_array
from megatron_sft_idx.chat import inputs
from megatron_sft_idx.errors import SequenceError

_NAME = "x.json"
_SPACE = b" \t\r\n"
_MAX_ROW_NBYTES = 2048


def run(data: bytes) -> None:
    ends = scan_json_array(np.frombuffer(data, np.uint8), 1, False, False)[0].tolist()
    assert ends == array_ends(data)
    with refused(f"{_NAME}: "):
        rows = rows_of(data, len(data) or 1)
        assert [repr(row) for row in rows] == [repr(row) for row in rows_of(data, 5)]
        if not any(isinstance(row, SequenceError) for _, row in rows):
            assert same([row for _, row in rows], list(map(without_nulls, json.loads(data.strip(_SPACE)))))
    if _is_array(data):
        rows_of(data, 3)


def _is_array(data: bytes) -> bool:
    """Return whether Python's own parser accepts the data. Then the only allowed error is a row's size."""
    try:
        return isinstance(json.loads(data.decode()), list) and len(data) < _MAX_ROW_NBYTES
    except (ValueError, RecursionError):
        return False


def rows_of(data: bytes, block_nbytes: int) -> list[tuple[int, Any]]:
    blocks = ((data[i : i + block_nbytes], i) for i in range(0, len(data), block_nbytes))
    rows: list[tuple[int, Any]] = []
    with patch.object(inputs, "MAX_ROW_NBYTES", _MAX_ROW_NBYTES):
        for piece in inputs.cut_array(blocks, path=_NAME, piece_nbytes=64):
            rows += [(row.position, row.data) for row in piece.rows()]
    return rows
