"""Locate the template's own text and the data of a row in its rendering, by comparison with its stand-in.

The rendering of a stand-in conversation (``stand_in``) is the template's own text with placeholders in between. A row
*agrees* with its stand-in if its rendering has the same own text, character for character, with the row's values in
place of the placeholders. Then each position of one rendering has a counterpart in the other. Values are found in one
of two ways. Neither searches the text for them:

- *By spelling.* From the end of the text backwards, own text and values must alternate as in the stand-in, each value
  unchanged, trimmed, or as JSON. This needs no further rendering.
- *By marks.* If a template writes values in another form (through a filter that changes them, or as Python prints
  them), the row is rendered again with marks around its strings. Without the marks it must be the plain text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_sft_idx.chat.template.messages import Ranges
from megatron_sft_idx.chat.template.stand_in import Maker, Occurrence, StandIn, spellings


class Outline:
    """The rendering of a stand-in.

    Attributes:
        text: the rendering.
        placed: the placeholders in it, in order.
        own: the template's own text before each placeholder and, last, after all of them.
    """

    def __init__(self, text: str, placed: list[Occurrence]) -> None:
        self.text, self.placed = text, placed
        edges = [0, *(edge for one in self.placed for edge in one[:2]), len(text)]
        self.own = [text[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        self._starts = [one.start for one in self.placed]

    def behind(self, position: int) -> int:
        """Return the number of placeholders that start before a position."""
        return bisect_right(self._starts, position - 1)


class Alignment:
    """Counterparts in a row's rendering for positions in its stand-in's rendering.

    Args:
        outline: the stand-in's rendering.
        text: the row's rendering.
        stops: for each placeholder from number ``first`` on, the end of the row's value in its place.
        first: the first placeholder whose value was found; -1 if the text before all of them agrees too.
    """

    def __init__(self, outline: Outline, text: str, stops: Sequence[int], first: int) -> None:
        self._outline, self._text, self._stops, self._first = outline, text, stops, first

    def ranges(self, ranges: Ranges, *, trimmed: bool) -> Ranges | None:
        """Return the counterparts of ranges; None if one begins or ends inside a placeholder.

        With ``trimmed``, a range that ends with a value ends before its trailing white space, because no end of turn
        follows.
        """
        placed, stops, first = self._outline.placed, self._stops, max(self._first, 0)
        found: Ranges = []
        for edges in ranges:
            moved, last = [], -1
            for position in edges:
                number = self._outline.behind(position) - 1
                if number < 0:
                    moved.append(position)
                    continue
                last = placed[number][1]
                if position < last:
                    return None
                moved.append(stops[number - first] + position - last)
            start, stop = moved
            if trimmed and edges[1] == last:
                stop = start + len(self._text[start:stop].rstrip())
            found.append((start, stop))
        return found


def by_spelling(outline: Outline, row: StandIn, text: str, needed: int) -> Alignment | None:
    """Compare a row's rendering with its stand-in's, from the end back to ``needed``.

    Args:
        outline: the stand-in's rendering.
        row: the stand-in, with the values of the row.
        text: the row's rendering.
        needed: the first position of the stand-in's rendering whose counterpart is needed.

    Returns:
        The counterparts from ``needed`` on; None if the row does not agree.
    """
    return _agreeing(outline, row, text, needed, None)


def by_marks(
    outline: Outline,
    row: StandIn,
    messages: Sequence[dict[str, Any]],
    text: str,
    needed: int,
    render: Callable[[list[dict[str, Any]]], str | None],
) -> Alignment | None:
    """Do the same as ``by_spelling``, but find the row's strings by rendering them with marks around them.

    Args:
        outline: the stand-in's rendering.
        row: the stand-in, with the values of the row.
        messages: the row's messages, in the form given to the template.
        text: the row's rendering.
        needed: the first position of the stand-in's rendering whose counterpart is needed.
        render: renders other messages; returns None if the template rejects them.
    """
    nonce = "Zqm"
    while nonce in text or any(nonce in str(value) for value in row.owned):
        nonce += "Zq"
    pattern = re.compile(f"{nonce}([0-9]+)([az])")
    for gently in (False, True):
        marker = _RowMarker(nonce, gently, row.tested)
        altered = [marker.message(index, message) for index, message in enumerate(messages)]
        marked = render(altered)
        if marked is None or pattern.sub("", marked) != text:
            continue
        known: list[tuple[int, int, int]] = []  # number, start and stop of each string, by ascending position
        begun: dict[int, int] = {}
        removed = 0
        for match in pattern.finditer(marked):
            number, at = int(match[1]), match.start() - removed
            removed += len(match[0])
            before, after = marker.margins[number]
            if match[2] == "a":
                begun[number] = at - _margin(before, text[:at], str.endswith)
            elif number in begun:
                stop = at + _margin(after, text[at:], str.startswith)
                known.append((number, begun.pop(number), stop))
        known.sort(key=lambda one: one[1:])
        found = _agreeing(outline, row, text, needed, (known, marker.margins))
        if found is not None:
            return found
    return None


def _margin(margin: str, text: str, stands: Callable[[str, str], bool]) -> int:
    """Return the length of a margin at a mark, unchanged or as JSON; 0 if it was trimmed."""
    return next((len(one) for one in (margin, json.dumps(margin, ensure_ascii=False)[1:-1]) if stands(text, one)), 0)


class _RowMarker(Maker):
    """Puts marks around the strings of a row, numbered like the placeholders of its stand-in.

    Args:
        nonce: the beginning of marks.
        gently: put marks only next to letters and digits. Templates test whether a string begins or ends with a
            character such as a bracket, but rarely with a letter.
        tested: the argument with which the stand-in was made.

    Attributes:
        margins: for each marked string its parts outside the marks, before and after.
    """

    def __init__(self, nonce: str, gently: bool, tested: re.Pattern[str] | None) -> None:
        super().__init__(frozenset(), tested)
        self.margins: dict[int, tuple[str, str]] = {}
        self._nonce, self._gently = nonce, gently

    def placeholder(self, number: int, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        start, stop = len(value) - len(value.lstrip()), len(value.rstrip())
        outer = (start, stop)
        if self._gently:
            words = [match.span() for match in re.finditer(r"\w+", value)]
            start, stop = (words[0][0], words[-1][1]) if words else (0, 0)
        if start >= stop:
            return value
        self.margins[number] = (value[outer[0] : start], value[stop : outer[1]])
        marks = [f"{self._nonce}{number}{end}" for end in "az"]
        return f"{value[:start]}{marks[0]}{value[start:stop]}{marks[1]}{value[stop:]}"

    def share(self, value: str) -> str:
        return value


def _agreeing(
    outline: Outline,
    row: StandIn,
    text: str,
    needed: int,
    marks: tuple[list[tuple[int, int, int]], Mapping[int, object]] | None,
) -> Alignment | None:
    """Compare a row's rendering with its stand-in's; ``marks`` has the places and numbers of marked strings."""
    known, marked = marks or ([], {})
    left = len(known)
    stops: list[int] = []  # ends of values, from the last one on
    end = len(text)
    for index in range(len(outline.placed), -1, -1):
        own = outline.own[index]
        if not text.endswith(own, 0, end):
            return None
        end -= len(own)
        if index == 0:
            return Alignment(outline, text, stops[::-1], -1) if end == 0 else None
        stops.append(end)
        placed = outline.placed[index - 1]
        if placed.stop <= needed:
            return Alignment(outline, text, stops[::-1], index - 1)
        before = outline.own[index - 1] if index > 1 or needed < placed.start else ""
        if placed.number in marked and not placed.shared:
            left -= 1
            if left < 0 or known[left][0] != placed.number:
                return None
            _, start, stop = known[left]
            value = row.owned[placed.number]
            # A filter that changes white space also changes it at the ends of a value, outside the marks.
            if stop != end and not (value[-1:].isspace() and text[stop:end].isspace()):
                return None
            if not text.endswith(before, 0, start) and value[:1].isspace():
                start = len(text[:start].rstrip())
            end = start
            continue
        value = (row.shared if placed.shared else row.owned)[placed.number]
        found = _spelt_before(value, text, before, end)
        if found is None:
            return None
        end = found
    raise AssertionError("the loop ends at the text before all placeholders")


def _spelt_before(value: Any, text: str, before: str, end: int) -> int | None:
    """Return the start of a value that ends at ``end`` and follows the text ``before``; None if it does not match."""
    if type(value) is str and text.endswith(value, 0, end) and text.endswith(before, 0, end - len(value)):
        return end - len(value)  # the most frequent case
    for spelt in spellings(value):
        start = end - len(spelt)
        if start >= 0 and text.startswith(spelt, start) and text.endswith(before, 0, start):
            return start
    return None
