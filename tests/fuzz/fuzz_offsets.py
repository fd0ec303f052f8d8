"""The kernels that follow a shard's offsets never access anything outside the arrays.

The input is two bytes, then entries of one byte: small numbers, or the extremes of their type.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megatron_sft_idx._native import absolute_offsets, gather_sequences, offsets_from_lengths, pack_segments

_EXTREMES = (-1, -(2**63), 2**63 - 1, 2**62, 2**32, 2**31)


def run(data: bytes) -> None:
    data = data.ljust(4, b"\0")
    packs, count = data[0] % 12, data[1] % 40
    values = [_EXTREMES[value % len(_EXTREMES)] if value > 240 else value for value in data[2:]]
    values += [0] * (2 * packs + 2 + count)
    sequences, tokens = (np.array(values[i * (packs + 1) :][: packs + 1], np.int64) for i in (0, 1))
    starts = np.array([value % 2**32 for value in values[2 * packs + 2 :][:count]], np.uint32)
    num_tokens = min(max(int(tokens[-1]), 0), 64)
    _segments(sequences, tokens, starts, num_tokens)
    _gather(sequences, tokens, starts, num_tokens)
    _sums(tokens)


def _segments(sequences: np.ndarray, tokens: np.ndarray, starts: np.ndarray, num_tokens: int) -> None:
    """Read pack by pack like a plain reader. Raise ValueError if it would leave the files."""
    index = [(sequences, tokens, starts, num_tokens)]
    for i in range(-1, len(sequences)):
        try:
            _, _, begins, lengths = pack_segments(index, np.zeros(1, np.int64), np.array([i]))
        except ValueError:
            continue
        first, last = sequences[i : i + 2].tolist()
        bounds = [int(tokens[i]) + start for start in starts[first:last].tolist()] + [int(tokens[i + 1])]
        assert [(a, b - a) for a, b in pairwise(bounds)] == list(zip(begins.tolist(), lengths.tolist(), strict=True))
        assert min(lengths) > 0 <= min(begins)
        assert bounds[-1] <= num_tokens


def _gather(sequences: np.ndarray, tokens: np.ndarray, starts: np.ndarray, num_tokens: int) -> None:
    try:
        offsets = absolute_offsets(sequences, tokens, starts)
    except ValueError:
        return
    assert (np.diff(offsets) > 0).all()
    source = np.arange(num_tokens, dtype=np.int32)
    out = np.full(num_tokens, -1, np.int32)
    try:
        gather_sequences(source, offsets[:-1].copy(), np.diff(offsets), offsets[:-1].copy(), out)
    except ValueError:
        assert offsets[-1] > num_tokens
    else:
        assert (out[: offsets[-1]] == source[: offsets[-1]]).all()


def _sums(lengths: np.ndarray) -> None:
    exact = [sum(lengths[:i].tolist()) for i in range(len(lengths) + 1)]
    try:
        found = offsets_from_lengths(lengths).tolist()
    except ValueError:
        assert min(lengths) < 0 or max(exact) >= 2**63
    else:
        assert found == exact
