"""``PackStage`` in slow, plain Python: one rule after the other, with lists as buffers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any


class BrokenRuleError(Exception):
    """Raised with the number of the broken rule."""


class Twin:
    """Takes packs one by one. All values are Python numbers."""

    def __init__(self, largest_id: int, weights: bool, capacity: int, multiple: int) -> None:
        self.largest_id, self.weights, self.capacity, self.multiple = largest_id, weights, capacity, multiple
        self.tokens: list[int] = []
        self.mask: list[float] = []
        self.starts: list[int] = []
        self.records: list[tuple[int, int]] = []
        self.dropped = self.masked = self.longest_padded = 0

    def add(self, tokens: list[int], mask: list[Any], starts: list[int], token_aligned: bool) -> None:
        self._check(tokens, mask, starts)
        bounds = [*starts, len(tokens)]
        label: list[Any] = []
        dropped = 0
        for a, b in pairwise(bounds):
            if token_aligned:
                dropped += mask[a] != 0
                label += [*mask[a + 1 : b], 0]
            elif mask[b - 1] != 0:
                raise BrokenRuleError("P6")
            else:
                label += mask[a:b]
        self.tokens += tokens
        self.mask += label
        self.starts += starts
        self.records.append((len(tokens), len(starts)))
        self.dropped += dropped
        self.masked += not any(label)
        self.longest_padded = max(self.longest_padded, self._padded(bounds))

    def _padded(self, bounds: list[int]) -> int:
        return sum(math.ceil((b - a) / self.multiple) * self.multiple for a, b in pairwise(bounds))

    def _check(self, tokens: list[int], mask: list[Any], starts: list[int]) -> None:
        if not 0 < len(tokens) <= self.capacity:
            raise BrokenRuleError("P1")
        if not starts or starts[0] != 0:
            raise BrokenRuleError("P2")
        if any(a >= b for a, b in pairwise(starts)):
            raise BrokenRuleError("P3 P4")
        if starts[-1] >= len(tokens):
            raise BrokenRuleError("P3 P4")
        if self._padded([*starts, len(tokens)]) > self.capacity:
            raise BrokenRuleError("P5")
        if any(not 0 <= token <= self.largest_id for token in tokens):
            raise BrokenRuleError("P8")
        if any(not self._mask_ok(value) for value in mask):
            raise BrokenRuleError("P7")

    def _mask_ok(self, value: Any) -> bool:
        if not self.weights:
            return value in (0, 1)
        return 0 <= value <= 3.4028234663852886e38
