"""Inline SVG: packs as bars, histograms, a value along the shard. Numbers in, markup out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from megatron_sft_idx.report.marked import trained_tokens
from megatron_sft_idx.report.page.svg import element, joined, number
from megatron_sft_idx.report.page.ticks import nice_ticks
from megatron_sft_idx.report.tally import Profile
from megatron_sft_idx.shard import Pack

__all__ = ["HUES", "bar_paths", "histogram", "profile"]

# Sequences of a pack take these in turn; the style sheet has their colours.
HUES = 4
BAR_WIDTH = 1000.0
_BAR, _PALE = (0, 16), (5, 6)  # top and height: what is trained on is tall as well as dark
_MOST_RUNS = 200


def bar_paths(pack: Pack, capacity: int) -> Markup:
    """A pack as paths in a box of 1000 x 16: a hue a sequence, tall and dark where trained on.

    What is finer than a 200th of the pack, where there is much of it, is drawn by samples.
    """
    scale = BAR_WIDTH / max(capacity, 1)
    paths: dict[tuple[int, bool], list[str]] = {}
    for start, stop, sequence, trained, last in _runs(pack):
        x, width = start * scale, (stop - start) * scale
        # A gap between sequences, so that hue is not all that tells them apart.
        width = max(width - 1.5, 0.75 * width) if last else width
        top, height = _BAR if trained else _PALE
        paths.setdefault((sequence % HUES, trained), []).append(
            f"M{x:.1f} {top}h{max(width, 0.5):.1f}v{height}H{x:.1f}z"
        )
    return joined(
        element("path", class_=f"{'t' if trained else 'u'}{hue}", d="".join(parts))
        for (hue, trained), parts in sorted(paths.items())
    )


def _runs(pack: Pack) -> Iterator[tuple[int, int, int, bool, bool]]:
    """Start, stop, sequence, whether trained, and whether the sequence ends there, of runs that are alike."""
    bounds = pack["seq_boundaries"].astype(np.int64)
    trained = trained_tokens(pack["loss_mask"]) > 0
    trained[bounds[:-1]] = False
    length = len(trained)
    changes = np.zeros(length + 1, np.bool_)
    changes[bounds] = True
    changes[1:length] |= trained[1:] != trained[:-1]
    edges = np.flatnonzero(changes)
    if len(edges) > _MOST_RUNS:
        edges = np.unique(np.linspace(0, length, _MOST_RUNS + 1).astype(np.int64))
    middles = (edges[:-1] + edges[1:]) // 2
    sequences = np.searchsorted(bounds, middles, "right") - 1
    kinds = trained[middles]
    begins = np.flatnonzero(np.diff(sequences * 2 + kinds, prepend=-1))
    ends = np.append(begins[1:], len(middles))
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        sequence = int(sequences[begin])
        last = end == len(middles) or int(sequences[end]) != sequence
        yield int(edges[begin]), int(edges[end]), sequence, bool(kinds[begin]), last


class _Frame:
    """A plot's box: where values lie in it, and its axes."""

    def __init__(self, width: int, height: int, x: tuple[float, float], top: float) -> None:
        self.width, self.height, self.base = width, height, height - 22
        self.left, self.right = 46, width - 18  # half of the last number lies behind the end
        self._x, self._top = x, top

    def x(self, value: float) -> float:
        low, high = self._x
        return self.left + (self.right - self.left) * (value - low) / max(high - low, 1e-9)

    def y(self, value: float) -> float:
        return self.base - (self.base - 10) * value / max(self._top, 1e-9)

    def bar(self, low: float, high: float, value: float, title: str) -> Markup:
        """From ``low`` to ``high``; what is above zero can be seen."""
        y = min(self.y(value), self.base - 1)
        x, width = self.x(low), max(self.x(high) - self.x(low) - 1, 0.8)
        return element("rect", element("title", title), class_="bar", x=x, y=y, width=width, height=self.base - y)

    def _line(self, name: str, y: float) -> Markup:
        return element("line", class_=name, x1=self.left, x2=self.right, y1=y, y2=y)

    def svg(self, label: str, marks: Markup, x_ticks: Sequence[tuple[float, str]], unit: str) -> Markup:
        """The whole picture; ``label`` says what it shows to those who do not see it, ``unit`` is of the values."""
        grid, numbers = [], []
        for value, text in nice_ticks(0, self._top, 4):
            grid.append(self._line("grid", self.y(value)))
            numbers.append(element("text", text + unit, class_="y", x=self.left - 6, y=self.y(value) + 3.5))
        for value, text in x_ticks:
            numbers.append(element("text", text, class_="x", x=self.x(value), y=self.height - 6))
        content = joined([*grid, *numbers, marks, self._line("axis", self.base)])
        return element("svg", content, viewBox=f"0 0 {self.width} {self.height}", role="img", aria_label=label)


def histogram(
    edges: NDArray[np.int64], counts: NDArray[np.int64], label: str, *, unit: str, of: str, scale: float = 1.0
) -> Markup:
    """Shares of all, in per cent, by class.

    Args:
        edges: of the classes, whole numbers, [classes + 1].
        counts: by class.
        label: what is shown.
        unit: of the edges, after ``scale``.
        of: what is counted, in the plural.
        scale: what an edge is multiplied with to be shown.
    """
    shares = 100 * counts / max(1, int(counts.sum()))
    frame = _Frame(480, 190, (float(edges[0]), float(edges[-1])), float(shares.max(initial=0.0)))
    bars = []
    for (low, high), share, count in zip(pairwise(edges.tolist()), shares.tolist(), counts.tolist(), strict=True):
        last = (high - 1) * scale if scale == 1 else high * scale
        span = f"{low * scale:,.6g}" + (f" to {last:,.6g}" if last > low * scale else "")
        if count:
            bars.append(frame.bar(low, high, share, f"{span} {unit}: {count:,} {of} ({share:.2g}%)"))
    # A class of one value is named in its middle, one of several where it begins.
    low, high, middle = edges[0] * scale, edges[-1] * scale, 0.5 if edges[1] - edges[0] == 1 and scale == 1 else 0.0
    sign = "%" if unit == "%" else ""
    ticks = [
        (value / scale + middle, text + sign)
        for value, text in nice_ticks(low, high - 2 * middle, 6, whole=scale == 1)
        if low <= value
    ]
    return frame.svg(label, joined(bars), ticks, "%")


def profile(values: Profile, places: int, label: str) -> Markup:
    """A value along the shard, in means of all: a bar a place, or of many places the mean, 5 to 95% and the largest."""
    mean = float(values.sums.sum()) / max(1, places) or 1.0
    high, means = (values.largest / mean).tolist(), (values.means / mean).tolist()
    frame = _Frame(1000, 230, (0.0, float(places)), max(high, default=1.0))
    columns = list(pairwise(min(k * values.width, places) for k in range(len(means) + 1)))
    ticks = nice_ticks(0, places, 6, whole=True)
    if values.width == 1:
        bars = zip(columns, means, strict=True)
        marks = joined(frame.bar(a, b, value, f"pack {a}: {value:.2f} times the mean") for (a, b), value in bars)
        return frame.svg(label, marks, [(value + 0.5, text) for value, text in ticks if value < places], "×")

    def steps(heights: Sequence[float]) -> list[str]:
        spans = zip(columns, heights, strict=True)
        return [f"{number(frame.x(a))} {number(frame.y(v))}H{number(frame.x(b))}" for (a, b), v in spans]

    def back(heights: Sequence[float]) -> list[str]:
        spans = list(zip(columns, heights, strict=True))[::-1]
        return [f"{number(frame.x(b))} {number(frame.y(v))}H{number(frame.x(a))}" for (a, b), v in spans]

    low, upper = ((values.quantile(share) / mean).tolist() for share in (0.05, 0.95))
    marks = joined(
        element("path", class_=name, d=f"M{'L'.join(points)}{end}")
        for name, points, end in (
            ("band", steps(upper) + back(low), "z"),
            ("most", steps(high), ""),
            ("line", steps(means), ""),
        )
    )
    return frame.svg(label, marks, ticks, "×")
