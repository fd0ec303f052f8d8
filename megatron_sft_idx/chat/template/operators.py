"""The operators and loops of a template. Each pays from the allowance for its work.

Jinja compiles ``a + b`` of a template to ``a + b`` in Python, which may take any time and memory. If the operands may
be large, ``compiler`` writes a call of one of these methods instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2.runtime import Context, Undefined

from megatron_sft_idx.chat.template.allowance import (
    ITEM,
    NUMBERS,
    POINTER,
    QUOTED,
    Allowance,
    NotText,
    Overspent,
    text_bytes,
)

MAX_REPEATED = 1 << 24
"""The longest string or list that ``*`` may make, in items."""

_KEYS: Any = type({}.keys())
_ITEMS: Any = type({}.items())
_VALUES: Any = type({}.values())
_SIZED = frozenset({list, tuple, dict, str, range, _KEYS, _ITEMS, _VALUES})
_PAID_AT_ONCE = 1 << 18  # units: loops up to this price are paid when they begin
_SAME_HASHES = (1 << 61) - 1  # from here on, an integer has the hash of a smaller one, so many share a hash
_LARGE_KEY = 1 << 14  # units for such a number as a key, which may be compared with all previous keys
_MAX_POWER = 4096


class Operators:
    """The operators of compiled templates; ``TemplateEnvironment`` inherits them.

    Each method may raise ``Overspent`` if too few units remain. Methods that make text may raise ``NotText``.
    """

    allowance: Allowance

    def iterated(self, iterable: Any, weight: int) -> Any:
        """Return the iterable for a ``for`` loop with a cost of ``weight`` units per iteration.

        Short loops are paid here; long loops and loops of unknown length pay in each iteration.
        """
        if type(iterable) in _SIZED and (units := len(iterable) * weight) <= _PAID_AT_ONCE:
            self.allowance.spend(units)
            return iterable
        return iterable if isinstance(iterable, Undefined) else self.allowance.paid_items(iterable, weight)

    def add(self, *operands: Any) -> Any:
        """``a + b + c``."""
        for operand in operands:
            if type(operand) is not str:
                break
        else:
            return self.allowance.joined([*operands])
        result, *others = operands
        for other in others:
            result = self.allowance.made(result + other)
            if isinstance(result, (list, tuple)):
                self.allowance.nests = True
        return result

    def concatenate(self, *operands: Any) -> str:
        """``a ~ b ~ c``."""
        text = self.allowance.text
        return self.allowance.joined([operand if type(operand) is str else text(operand) for operand in operands])

    def subtract(self, left: Any, right: Any) -> Any:
        """``left - right``."""
        if isinstance(left, (_KEYS, _ITEMS)) or isinstance(right, (_KEYS, _ITEMS)):
            raise NotText(
                "the template creates a set, which has a different order in each run; build a list with a loop instead"
            )
        return self.allowance.made(left - right)

    def compared(self, value: Any) -> Any:
        """Return a value after paying for its comparison with another one of any size."""
        kind = type(value)
        if kind is str:
            self.allowance.spend(len(value) >> 3)
        elif kind not in NUMBERS:
            self.allowance.weigh(value)
        return value

    def contains(self, item: Any, holder: Any) -> bool:
        """``item in holder``."""
        if isinstance(holder, str):
            self.allowance.spend(len(holder) >> 2)
        elif type(holder) is dict:
            self.key(item)
        elif isinstance(holder, (list, tuple)) and type(item) in (str, *NUMBERS):
            self.allowance.spend(len(holder) * (ITEM + (len(item) >> 3 if type(item) is str else 0)))
        elif isinstance(holder, (dict, list, tuple, _KEYS, _ITEMS, _VALUES)):
            self.allowance.weigh((holder, self.key(item)))
        elif not (isinstance(holder, range) and isinstance(item, int)):
            return item in self.allowance.paid_items(holder)
        return item in holder

    def key(self, value: Any) -> Any:
        """Return a value for use as a key: tuples and large numbers are paid for, tuples of tuples are rejected."""
        if type(value) is str:
            return value
        if isinstance(value, tuple):
            self.allowance.weigh(value)
            if any(isinstance(item, tuple) for item in value):
                raise Overspent("it uses nested tuples as a key, which can be slow to compare; use text as the key")
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int) and abs(item) >= _SAME_HASHES:
                self.allowance.spend(_LARGE_KEY)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute and pay for a product, power, quotient or remainder of two values. Too large results are rejected."""
        spend = self.allowance.spend
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    if len(value) * times > MAX_REPEATED:
                        raise Overspent(f"it repeats text or a list to more than {MAX_REPEATED:,} items")
                    spend(max(0, times) * (text_bytes(value) if isinstance(value, str) else POINTER * len(value)))
                    self.allowance.nests = True
            if numbers:
                spend(left.bit_length() + right.bit_length() >> 3)
        elif operator == "**":
            if not all(type(side) in (int, float) and abs(side) <= _MAX_POWER for side in (left, right)):
                raise Overspent(f"it computes ** of something other than numbers up to {_MAX_POWER:,}")
            if numbers:
                spend(left.bit_length() * max(0, right) >> 1)  # a power takes longer than its bytes
        elif numbers:
            spend(left.bit_length() * right.bit_length() >> 10)  # a division takes quadratic time
        elif isinstance(left, str):
            self.pay_for_percent_format(left, right if isinstance(right, tuple) else (right,))
        return self.allowance.made(super().call_binop(context, operator, left, right))  # type: ignore[misc]

    def pay_for_percent_format(self, template: str, values: Sequence[Any]) -> None:
        """Pay for ``template % values``, as if each ``%`` wrote all values."""
        weight = self.allowance.weigh(values, QUOTED, written=True)
        weight += 4 * max(numbers_in(template), sum_of_numbers(values) if "*" in template else 0)
        self.allowance.spend(text_bytes(template) + template.count("%") * weight)


def numbers_in(text: str) -> int:
    """Return the sum of the integers in a format string, such as 13 for ``"%10s %3d"``: a bound on its padding."""
    return sum(int(digits) if len(digits) < 19 else 1 << 62 for digits in re.findall(r"\d+", text))


def sum_of_numbers(values: Iterable[Any]) -> int:
    """Return the sum of the absolute values of the integers among arguments."""
    return sum(abs(value) for value in values if isinstance(value, int))
