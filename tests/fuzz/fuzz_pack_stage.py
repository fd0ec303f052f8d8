"""The native check of packs compared with its slow twin: equal buffers, or an error from both.

The input is seven bytes of options, then pairs of bytes: an id and, in the bits of the second byte, its mask and
whether a sequence or a pack begins there. Rare values represent extreme numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from pack_stage_twin import BrokenRuleError, Twin

from megatron_sft_idx._native import PackStage

_TOKENS, _MASKS = ("u2", "i4"), ("u1", "f4")
_INPUT_TOKENS, _INPUT_MASKS = ("u2", "i4", "i8"), ("u1", "i8", "f4", "f8")
_VOCABULARIES = (0, 1, 200, 65536, 70000, 2**40)
_ODD_IDS = (-1, 65535, 65536, 2**31 - 1, 2**31, 2**40, -(2**63))
_ODD_MASKS = (2, -1, 0.5, float("nan"), float("inf"), 1e39)
_ODD_STARTS = (-1, 0, 2**31, 2**63 - 1, -(2**63))


def run(data: bytes) -> None:
    data = data.ljust(7, b"\0")
    token, mask = _TOKENS[data[0] % 2], _MASKS[data[1] % 2]
    capacity, multiple = 1 + data[2] % 40, 1 + data[3] % 8
    vocab_size = _VOCABULARIES[data[0] // 2 % len(_VOCABULARIES)]
    stage = PackStage(np.dtype(token), np.dtype(mask), capacity, multiple, 1 << 16, vocab_size)
    largest = min(np.iinfo(token).max, vocab_size - 1 if vocab_size else 2**62)
    twin = Twin(largest, mask == "f4", capacity, multiple)
    given_token, given_mask = _INPUT_TOKENS[data[4] % 3], _INPUT_MASKS[data[5] % 4]
    token_aligned = bool(data[6] % 2)
    for ids, masks, starts in _packs(data[7:]):
        with np.errstate(all="ignore"):
            tokens = np.array(ids, np.int64).astype(given_token)
            weights = np.array(masks, np.float64).astype(given_mask)
        accepted = _accepts(twin, tokens.tolist(), weights.tolist(), starts, token_aligned)
        try:
            assert stage.add_one(tokens, weights, np.array(starts, np.int64), token_aligned)
            assert accepted, (ids, masks, starts)
        except ValueError:
            assert not accepted, (ids, masks, starts)
    assert bytes(stage.tokens) == np.array(twin.tokens, token).tobytes()
    assert bytes(stage.mask) == np.array(twin.mask, mask).tobytes()
    assert bytes(stage.starts) == np.array(twin.starts, np.uint32).tobytes()
    assert bytes(stage.records) == np.array(twin.records, np.uint32).tobytes()
    assert (stage.num_masked_packs, stage.dropped_first_tokens) == (twin.masked, twin.dropped)


def _accepts(twin: Twin, tokens: list[int], mask: list[Any], starts: list[int], token_aligned: bool) -> bool:
    try:
        twin.add(tokens, mask, starts, token_aligned)
    except BrokenRuleError:
        return False
    return True


def _packs(data: bytes) -> Iterator[tuple[list[int], list[float], list[int]]]:
    ids: list[int] = []
    masks: list[float] = []
    starts: list[int] = []
    for value, bits in zip(data[::2], data[1::2], strict=False):
        if bits & 1 and (ids or starts):
            yield ids, masks, starts
            ids, masks, starts = [], [], []
        if bits & 2 or not (starts or bits & 64):
            starts.append(_ODD_STARTS[value % len(_ODD_STARTS)] if bits & 32 else len(ids))
        if not bits & 128:
            ids.append(_ODD_IDS[value % len(_ODD_IDS)] if bits & 8 else value)
            masks.append(_ODD_MASKS[value % len(_ODD_MASKS)] if bits & 16 else bits >> 2 & 1)
    yield ids, masks, starts
