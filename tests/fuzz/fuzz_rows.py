"""Rows of any shape give a consistent conversation, or ids with a mask, or an error with the reason.

The input is a row as JSON. Otherwise it is a program of one byte per value that builds a row from the usual words of
rows, because few mutations of JSON are valid JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from fuzz.contract import refused

from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import Conversation, RowError
from megatron_sft_idx.chat.values import parse_json

_KINDS = ("auto", "messages", "alpaca", "prompt-completion", "tokenized")
_OPTIONS = [
    RowOptions(kind=kind, mask_alignment=alignment, train_on="assistant" if alignment == "token" else "all")  # type: ignore[arg-type]
    for kind, alignment in product(_KINDS, ("token", "label"))
]


_WORDS = (
    *("messages", "conversations", "conversation", "role", "content", "from", "value", "user", "assistant", "system"),
    *("tool", "developer", "function", "human", "gpt", "weight", "train", "tool_calls", "function_call", "arguments"),
    *("name", "type", "text", "image_url", "reasoning_content", "tools", "functions", "system_prompt", "prompt"),
    *("chat_template_kwargs", "instruction", "input", "output", "completion", "history", "input_ids", "loss_mask"),
    *("labels", "assistant_masks", "completion_mask", "attention_mask", "chosen", "rejected", "images", "", "\ud800"),
    *("{}", "[]", '{"a": 1}', "[1", "null", "tool_call_id", "id", "thinking", "true", "seq_lengths", "cu_seqlens"),
    *("position_ids", "seq_start_id", "packing_params", "sequence_boundaries", "seq_idx", "cu_seqlens_padded"),
)
_PLAIN = (None, True, False, 0, 1, -1, -100, 0.5, 1e300, float("nan"), 2**31, 2**63, -(2**64), 10**400, [], {})
_DEEPEST = 8


def run(data: bytes) -> None:
    try:
        row = parse_json(data)
    except ValueError:
        row = _grown(iter(data), 0)
    before = repr(row)
    for options in _OPTIONS:
        with refused("", RowError):
            _check(to_sequence_source(row, options))
    assert repr(row) == before


def _grown(program: Iterator[int], depth: int) -> Any:
    """Return a value: lists and objects of up to seven entries, words, and plain values."""
    code = next(program, 0)
    if code < 96 and depth < _DEEPEST:
        return {_grown_key(program): _grown(program, depth + 1) for _ in range(code % 8)}
    if code < 144 and depth < _DEEPEST:
        return [_grown(program, depth + 1) for _ in range(code % 8)]
    return _WORDS[code % len(_WORDS)] if code < 216 else _PLAIN[code % len(_PLAIN)]


def _grown_key(program: Iterator[int]) -> str:
    return _WORDS[next(program, 0) % len(_WORDS)]


def _check(source: object) -> None:
    if isinstance(source, Conversation):
        assert len(source.messages) == len(source.weights) > 0
        assert all(isinstance(message["role"], str) for message in source.messages)
        assert all(isinstance(m.get("content"), (str, type(None))) for m in source.messages)
        assert all("content" in message or message.get("tool_calls") for message in source.messages)
        assert all(0 <= weight < float("inf") for weight in source.weights)
        return
    ids, mask = source.input_ids, source.loss_mask  # type: ignore[attr-defined]
    assert (ids.dtype, mask.dtype) == (np.int64, np.float32)
    assert len(ids) == len(mask) > 0
    assert ids.min() >= 0
    assert ids.max() < 2**31
    assert np.isfinite(mask).all()
    assert (mask >= 0).all()
    bounds = source.bounds.tolist()  # type: ignore[attr-defined]
    assert bounds == sorted({0, len(ids), *bounds})
