"""Plots as SVG, drawn by hand: dots with the range of their rounds.

They have a white background, so that they are visible on a dark page. Ours is blue and filled, others are orange and
hollow: all readers can distinguish the colours, and the shapes differ too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

OURS, OTHERS, INK, FAINT, PAPER = "#0072b2", "#d55e00", "#1a1a1a", "#c8ccd0", "#ffffff"
FONT = 'font-family="Helvetica, Arial, sans-serif"'
PALE = "#5a6066"
WIDTH, ROW, TOP, FOOT = 900, 24, 64, 56
LOGARITHMIC = ", logarithmic"
LETTER = 6.4  # width of one at 12 px, about
TINIEST = 1e-9


@dataclass(frozen=True)
class Dot:
    """One row of a plot of dots: a label, what the rounds gave, whether it is ours, and a note below the label."""

    label: str  # as tables have it
    values: Sequence[float]
    ours: bool
    note: str = ""


class Axis:
    """From values to pixels; logarithmic where values span more than a decade and a half.

    Args:
        values: all that must fit.
        start: pixel of the least.
        stop: pixel of the greatest.
        log: whether it is logarithmic; found from the values where None.
    """

    def __init__(self, values: Sequence[float], start: float, stop: float, log: bool | None = None) -> None:
        least, most = max(min(values), TINIEST), max(*values, TINIEST)
        self.log = most / least > 30 if log is None else log
        if self.log:
            self._low, self._high = math.log10(least) - 0.08, math.log10(most) + 0.08
        else:
            self._low, self._high = 0.0, most * 1.05
        self._start, self._stop = start, stop

    def at(self, value: float) -> float:
        """The pixel of a value."""
        place = math.log10(max(value, TINIEST)) if self.log else value
        return self._start + (place - self._low) / (self._high - self._low) * (self._stop - self._start)

    def ticks(self) -> list[float]:
        """Round values, some four to nine of them."""
        if self.log:
            decades = range(math.floor(self._low), math.ceil(self._high) + 1)
            factors = (1, 2, 5) if self._high - self._low < 2.2 else (1,)
            every = [10.0**decade * factor for decade in decades for factor in factors]
            return [value for value in every if self._low <= math.log10(value) <= self._high]
        step = 10 ** math.floor(math.log10(self._high / 2))
        step *= next(factor for factor in (0.5, 1, 2, 5) if self._high / (step * factor) <= 8)
        return [number * step for number in range(int(self._high / step) + 1)]


def number(value: float) -> str:
    """Short: 0.02, 1.5, 300, 20 k, 3 M."""
    for limit, factor, unit in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k")):
        if value >= limit:
            return f"{value / factor:.3g}{unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, fill: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def marker(x: float, y: float, ours: bool) -> str:
    if ours:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="{OURS}"/>'
    path = f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"
    return f'<path d="{path}" fill="{PAPER}" stroke="{OTHERS}" stroke-width="2"/>'


def page(height: float, title: str, parts: Iterator[str]) -> str:
    """The file: white, with a title."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}"'
        f' height="{height:.0f}" role="img" {FONT}>\n<title>{escape(title)}</title>\n'
        f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>'
    )
    return "\n".join([head, text(20, 28, title, size=16), *parts, "</svg>"]) + "\n"


def key(y: float, others: str = "others") -> Iterator[str]:
    """The key of the marks."""
    yield marker(26, y - 4, True)
    yield text(38, y, "ours")
    yield marker(88, y - 4, False)
    yield text(100, y, others)


def dots(
    title: str, label: str, rows: Sequence[Dot], *, more: bool = False, log: bool | None = None, one: bool = False
) -> str:
    """Rows of dots on one axis: the median, and a bar from the least round to the greatest.

    Args:
        title: above.
        label: of the axis: what, in which unit.
        rows: from top to bottom.
        more: whether more is better, else less is.
        log: whether the axis is logarithmic; found from the values where None.
        one: draw a line at 1, where both sides are equal.
    """
    left = 30 + LETTER * max(len(words) for row in rows for words in (row.label, row.note))
    noted = any(row.note for row in rows)
    height = ROW + 14 * noted
    bottom = TOP + height * len(rows)
    axis = Axis([x for row in rows for x in row.values] + [1] * one, left, WIDTH - 80, log)

    def parts() -> Iterator[str]:
        yield from key(50) if any(not row.ours for row in rows) else ()
        for tick in axis.ticks():
            yield line(axis.at(tick), TOP, axis.at(tick), bottom, FAINT)
            yield text(axis.at(tick), bottom + 16, number(tick), anchor="middle", size=11)
        if one:
            yield line(axis.at(1), TOP, axis.at(1), bottom, INK, 1.5)
        about = f"{label}{LOGARITHMIC * axis.log}; {'more' if more else 'less'} is better; bars: least to most round"
        yield text(WIDTH - 20, bottom + 38, about, anchor="end")
        for place, row in enumerate(rows):
            y, middle = TOP + height * (place + 0.5), statistics.median(row.values)
            yield text(left - 12, y + 4 - 7 * noted, row.label.replace("`", ""), anchor="end")
            if row.note:
                yield text(left - 12, y + 11, row.note, anchor="end", size=11, fill=PALE)
            yield line(axis.at(min(row.values)), y, axis.at(max(row.values)), y, OURS if row.ours else OTHERS, 3)
            yield marker(axis.at(middle), y, row.ours)
            yield text(WIDTH - 68, y + 4, number(middle))

    return page(bottom + FOOT, title, parts())
