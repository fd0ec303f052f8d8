"""Round numbers along an axis."""

from __future__ import annotations

import math

__all__ = ["nice_ticks"]


def nice_ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[tuple[float, str]]:
    """At most ``most`` + 1 round values from ``low`` to ``high``, whole numbers if wanted, and how they are written."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [(low, _written(low, 1.0, abs(low)))]
    raw = max(span / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(k * step, _written(k * step, step, last * step)) for k in range(first, last + 1)]


def _written(value: float, step: float, largest: float) -> str:
    """A value beside others up to ``largest``, all in the same unit."""
    for least, size, letter in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k")):
        if largest >= least:
            return f"{value / size:.{_digits(step / size)}f}{letter}" if value else "0"
    return f"{value:,.{_digits(step)}f}"


def _digits(step: float) -> int:
    """Digits behind the point that tell two neighbours apart."""
    return next((digits for digits in range(4) if abs(step * 10**digits - round(step * 10**digits)) < 1e-6), 4)
