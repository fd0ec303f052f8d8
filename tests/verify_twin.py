"""``PackWalk`` in slow, plain Python: all arrays in memory, one rule after the other."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Breach = tuple[str, int, int, int]  # rule, pack, at, expected


@dataclass
class Walked:
    """The results to compare."""

    breaches: set[Breach] = field(default_factory=set)
    packs: int = 0
    trained_tokens: int = 0
    masked_packs: int = 0
    longest_pack: int = 0
    longest_padded_pack: int = 0
    most_sequences: int = 0

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(rule for rule, *_ in self.breaches))


@dataclass(frozen=True)
class Arrays:
    """A shard's arrays, unchecked."""

    token_offsets: list[int]
    sequence_offsets: list[int]
    starts: list[int]
    mask: list[Any]
    capacity: int
    multiple: int


def slow_walk(arrays: Arrays) -> Walked:
    """Check all packs. Starts and masks have the lengths given by the shard; offsets can be anything."""
    out = Walked()
    tokens, sequences = len(arrays.mask), len(arrays.starts)
    for i, value in enumerate(arrays.mask):
        if math.isnan(value) or math.isinf(value) or value < 0 or (isinstance(value, int) and value > 1):
            out.breaches.add(("P7", -1, i, 0))
        out.trained_tokens += value != 0
    token_end = sequence_end = 0
    for pack in range(len(arrays.token_offsets) - 1):
        begin, end = arrays.token_offsets[pack : pack + 2]
        first, last = arrays.sequence_offsets[pack : pack + 2]
        if end <= begin:
            out.breaches.add(("O2", pack, pack + 1, begin))
        elif end > tokens:
            out.breaches.add(("O2", pack, pack + 1, tokens))
        if last <= first:
            out.breaches.add(("O1", pack, pack + 1, first))
        elif last > sequences:
            out.breaches.add(("O1", pack, pack + 1, sequences))
        next_end = [*arrays.token_offsets, tokens + 1][pack + 2]
        next_last = [*arrays.sequence_offsets, sequences + 1][pack + 2]
        if not (token_end <= begin < end <= tokens and end < next_end):
            continue
        if not (sequence_end <= first < last <= sequences and last < next_last):
            continue
        token_end, sequence_end = end, last
        _walk_pack(arrays, out, pack, range(begin, end), range(first, last))
    return out


def _walk_pack(arrays: Arrays, out: Walked, pack: int, tokens: range, sequences: range) -> None:
    length = len(tokens)
    out.packs += 1
    out.longest_pack = max(out.longest_pack, length)
    out.most_sequences = max(out.most_sequences, len(sequences))
    out.masked_packs += not any(arrays.mask[i] != 0 for i in tokens)
    if length > arrays.capacity:
        out.breaches.add(("P1", pack, pack, arrays.capacity))
    bounds, sound = [0], length <= arrays.capacity
    for number in sequences:
        start = arrays.starts[number]
        if number == sequences[0]:
            if start != 0:
                out.breaches.add(("P2", pack, number, 0))
                sound = False
        elif start <= bounds[-1]:
            out.breaches.add(("P3", pack, number, bounds[-1] + 1))
            sound = False
        if start >= length:
            out.breaches.add(("P4", pack, number, length - 1))
            sound = False
        if bounds[-1] < start < length and number != sequences[0]:
            bounds.append(start)
    bounds.append(length)
    for end in bounds[1:]:
        at = tokens[0] + end - 1
        if arrays.mask[at] != 0:
            out.breaches.add(("P6", -1, at, 0))
    if sound:
        padded = sum(-(-(b - a) // arrays.multiple) * arrays.multiple for a, b in pairwise(bounds))
        if padded > arrays.capacity:
            out.breaches.add(("P5", pack, pack, arrays.capacity))
        else:
            out.longest_padded_pack = max(out.longest_padded_pack, padded)
