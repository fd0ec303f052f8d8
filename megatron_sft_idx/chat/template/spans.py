"""Find the characters of a rendered conversation that the model must learn, judged on its stand-in.

``Judge`` renders the stand-in of a row (``stand_in``) once for all rows of the same structure. An answer's edges are
found in a *context*: the same answer among the few messages around it (``Contexts``), so that the work is linear in the
number of answers, not quadratic. A context must be shown to be equal to the whole: each edge must occur exactly once in
both, in the same text and between the same neighbours. A result in a context depends only on that context, so no row
affects the result of another one.

At the end there is one independent check: all words of a message are in its generated text, and no words of another
message are.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from megatron_sft_idx.chat.template.align import Outline
from megatron_sft_idx.chat.template.blocks import BlockFinder
from megatron_sft_idx.chat.template.contexts import Contexts
from megatron_sft_idx.chat.template.messages import Ranges, unplaced, unusable
from megatron_sft_idx.chat.template.scaffold import Rules
from megatron_sft_idx.chat.template.stand_in import Hole, StandIn, as_it_is, make_stand_in, reduced
from megatron_sft_idx.chat.template.trace import Traced
from megatron_sft_idx.chat.template.turn import Prompt, Said, TurnFinder, numbered, reworded, said_token
from megatron_sft_idx.errors import SequenceError

MAX_REMEMBERED = 1 << 14
"""Stand-ins, and answers in their contexts, that are remembered at most. Forgetting costs time and changes nothing."""

_NOTHING = re.compile("(?!)")
_SHARED = re.compile("zqs[0-9]{5}s", re.IGNORECASE)


class Renderer(NamedTuple):
    """Functions that render with the variables of one row.

    Attributes:
        plain: renders ``messages`` and other variables; returns None if the template rejects them.
        traced: renders ``messages`` and ``tools`` with marks; returns None if the template rejects them or cannot be
            traced.
        key: differs if other template variables may change the template's output.
    """

    plain: Callable[..., str | None]
    traced: Callable[..., Traced | None]
    key: str


class _Spot(NamedTuple):
    """A position in a stand-in's rendering, in a form that allows finding it in another one.

    Attributes:
        left: the string before it; (-1, "") for the beginning.
        right: the string after it; (-1, "") for the end.
        text: the template's own text between these two.
        offset: the position in that text.
    """

    left: tuple[int, str]
    right: tuple[int, str]
    text: str
    offset: int


class _InContext(NamedTuple):
    """A result of ``TurnFinder`` in a context, also as spots; None if an edge is inside a string."""

    generated: list[tuple[_Spot, _Spot]] | None
    trained: list[tuple[_Spot, _Spot]] | None
    said: Said


class Judged:
    """The stand-in of a row, with the generated text of each answer in it.

    Attributes:
        outline: its rendering.
    """

    def __init__(self, outline: Outline, find: Callable[[int, bool], Said | SequenceError]) -> None:
        self.outline = outline
        self._find = find
        self._said: dict[tuple[int, bool], Said | SequenceError] = {}

    def said(self, message: int, whole: bool = False) -> Said | SequenceError:
        """Return the generated text of one assistant message, or why it cannot be determined.

        ``whole`` requests it from the whole conversation instead of a short context.
        """
        found = self._said.get((message, whole))
        if found is None:
            found = self._said[message, whole] = self._find(message, whole)
        return found


class _View:
    """A stand-in with its rendering, and information needed for every answer."""

    def __init__(self, outline: Outline, row: StandIn) -> None:
        self.outline, self.row = outline, row
        self.contexts = Contexts([one.get("role") for one in row.messages])
        self.spots = _spots(outline, row.holes)
        self.owned = [one for one in outline.placed if not one.shared]
        self.starts = [one.start for one in self.owned]
        self.written = {one.number for one in self.owned}
        self.numbers: dict[int, list[int]] = {}  # numbers of the placeholders of each message
        for number, hole in enumerate(row.holes):
            self.numbers.setdefault(hole.message, []).append(number)


class Judge:
    """Judges stand-ins of one template, and caches the results.

    Args:
        rules: the rules for every conversation.
        marked: whether the template has generation markers.
    """

    def __init__(self, rules: Rules, marked: bool) -> None:
        self._rules, self._has_markers = rules, marked
        self._judged: dict[tuple[str, bytes], Judged | None] = {}
        self._contexts: dict[tuple[str, bytes, int], _InContext | SequenceError | None] = {}

    def judge(self, row: StandIn, renderer: Renderer) -> Judged | None:
        """Return the verdict on a stand-in; None if the template rejects it."""
        if row.words is not None:
            return self._render(row, renderer)
        key = (renderer.key, _key_of(row))
        if key not in self._judged:
            if len(self._judged) >= MAX_REMEMBERED:
                self._judged.clear()
            self._judged[key] = self._render(row, renderer)
        return self._judged[key]

    def _render(self, row: StandIn, renderer: Renderer) -> Judged | None:
        if self._has_markers:
            traced = renderer.traced(messages=row.messages, tools=row.tools)
            if traced is None:
                return None
            view = _View(Outline(traced.text, row.placed_in(traced.text)), row)
            blocks = BlockFinder(self._rules, traced, row, renderer.plain)
            return Judged(view.outline, lambda message, _: self._checked(blocks.said, view, message))
        text = renderer.plain(messages=row.messages, tools=row.tools)
        if text is None:
            return None
        view = _View(Outline(text, row.placed_in(text)), row)

        def find(message: int, whole: bool) -> Said | SequenceError:
            return self._checked(lambda at: self._said(view, at, renderer, whole), view, message)

        return Judged(view.outline, find)

    def _said(self, view: _View, message: int, renderer: Renderer, whole: bool) -> Said:
        """Return the generated text of a message, from the first context that is equal to the whole.

        Raises:
            SequenceError: the message is rejected in such a context, or there is none.
        """
        row = view.row
        refused: SequenceError | None = None
        for indices, cut_down in [([*range(len(row.messages))], False)] if whole else view.contexts.of(message):
            messages = [row.messages[index] for index in indices]
            if cut_down:
                messages = [reduced(one) for one in messages]
            found = self._in_context(row, messages, indices.index(message), renderer)
            if isinstance(found, SequenceError):
                refused = _with_indices(found, indices)
                continue
            if found is None:
                continue
            said = found.said
            if said.prompt is not None:
                before = indices[: indices.index(message)]
                said = said._replace(prompt=said.prompt._replace(before=before, cut_down=cut_down))
            if len(messages) == len(row.messages) and not cut_down:
                return said
            generated, trained = (_placed(some, indices, view.spots) for some in (found.generated, found.trained))
            if generated is not None and trained is not None:
                return said._replace(generated=generated, trained=generated if trained == generated else trained)
        raise refused or unplaced(
            f"it cannot be determined which text of the chat template {self._rules.name} comes from assistant message"
            f" {numbered(message)}; put {{% generation %}} markers around the assistant's text, or train on all tokens"
        )

    def _in_context(
        self, row: StandIn, messages: list[dict[str, Any]], message: int, renderer: Renderer
    ) -> _InContext | SequenceError | None:
        """Return the generated text of a message among others; None if the template rejects these messages."""
        if row.words is not None:
            own = as_it_is(messages, row.tools, "", _NOTHING)
            return None if own is None else self._find(own, message, renderer)
        context = make_stand_in(messages, row.tools, self._rules.spelt, row.tested)
        key = (renderer.key, _key_of(context), message)
        if key not in self._contexts:
            if len(self._contexts) >= MAX_REMEMBERED:
                self._contexts.clear()
            self._contexts[key] = self._find(context, message, renderer)
        return self._contexts[key]

    def _find(self, context: StandIn, message: int, renderer: Renderer) -> _InContext | SequenceError | None:
        traced = renderer.traced(messages=context.messages, tools=context.tools)
        text = traced.text if traced is not None else renderer.plain(messages=context.messages, tools=context.tools)
        if text is None:
            return None

        def render(**altered: Any) -> str | None:
            return renderer.plain(**{"tools": context.tools, **altered})

        finder = TurnFinder(self._rules, text, context.messages, context, traced, render)
        try:
            said = finder.said(message)
        except SequenceError as error:
            return error
        outline = Outline(text, context.placed_in(text))
        generated, trained = (_in_spots(some, outline, context.holes) for some in (said.generated, said.trained))
        if self._rules.prompt_varies:
            said = said._replace(prompt=Prompt([*range(message)], False, finder.fed(message)))
        return _InContext(generated, trained, said)

    def _checked(self, find: Callable[[int], Said], view: _View, message: int) -> Said | SequenceError:
        """Return the result of ``find``, checked against the whole: it has all words of the message and no others."""
        try:
            said = find(message)
            self._require_own_words(said.generated, view, message)
        except SequenceError as error:
            return error
        return said

    def _require_own_words(self, spans: Ranges, view: _View, message: int) -> None:
        holes = view.row.holes
        inside: set[int] = set()
        for start, stop in spans:
            first = bisect_left(view.starts, start)
            if first and view.owned[first - 1].stop > start:
                first -= 1
            for one in view.owned[first : bisect_left(view.starts, stop)]:
                speaker = holes[one.number].message
                if speaker != message:
                    raise self._mixed(f"words of message {numbered(speaker)} in", message)
                if start <= one.start and one.stop <= stop:
                    inside.add(one.number)
        for number in view.numbers.get(message, ()):
            kind = holes[number].kind
            if number in inside or (kind == "reasoning" and number not in view.written):
                continue
            if number in view.written:
                if self._has_markers:
                    continue  # the options decided about text outside the markers
                raise self._mixed("words outside", message)
            what = (
                "values of the arguments of the calls" if kind == "call" else f"the words {said_token(message, kind)}"
            )
            raise unusable(
                f"the chat template {self._rules.name} drops {what} of assistant message {numbered(message)}; use a"
                " template that keeps them, or set the weight of the message to 0"
            )

    def _mixed(self, what: str, message: int) -> SequenceError:
        return unplaced(
            f"the chat template {self._rules.name} writes {what} what it writes for assistant message"
            f" {numbered(message)}: put {{% generation %}} markers around the assistant's text, or train on all tokens"
        )


def _name_of(value: object) -> str:
    """Return a text that identifies a value that JSON cannot hold; one that cannot be shown, by its error."""
    try:
        return repr(value)
    except ValueError as error:
        return str(error)


def _key_of(row: StandIn) -> bytes:
    """Return bytes that are equal only for equal stand-ins."""
    try:
        return orjson.dumps((row.messages, row.tools), default=_name_of, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # large numbers, and text that is not valid Unicode
        return repr((row.messages, row.tools)).encode("utf-8", "surrogatepass")


def _with_indices(error: SequenceError, indices: Sequence[int]) -> SequenceError:
    """Return the error of a context, with message numbers of the whole conversation."""
    return reworded(
        error,
        lambda message: numbered(indices[message]),
        lambda kind, message, call: said_token(indices[message], kind, call),
    )


# ---- positions common to two renderings ----


def _spots(outline: Outline, holes: Sequence[Hole]) -> dict[tuple[Any, Any, str], list[int]]:
    """Return the start of each text between two owned placeholders, by these two and the text."""
    found: dict[tuple[Any, Any, str], list[int]] = {}
    for start, _, left, right, text in _between(outline, holes):
        found.setdefault((left, right, text), []).append(start)
    return found


def _between(outline: Outline, holes: Sequence[Hole]) -> list[tuple[int, int, Any, Any, str]]:
    """Return the texts between owned placeholders: start, stop, left and right neighbours, and the text.

    Shared placeholders belong to these texts, without their numbers.
    """
    owned = [one for one in outline.placed if not one.shared]
    edges = [0, *(edge for one in owned for edge in one[:2]), len(outline.text)]
    sides: list[tuple[int, str]] = [
        (-1, ""),
        *((holes[one.number].message, holes[one.number].kind) for one in owned),
        (-1, ""),
    ]
    return [
        (start, stop, left, right, _SHARED.sub("zqs-----s", outline.text[start:stop]))
        for start, stop, left, right in zip(edges[::2], edges[1::2], sides, sides[1:], strict=False)
    ]


def _in_spots(ranges: Ranges, outline: Outline, holes: Sequence[Hole]) -> list[tuple[_Spot, _Spot]] | None:
    """Return ranges of a context as spots; None if one begins or ends inside a placeholder."""
    between = _between(outline, holes)
    found = []
    for edges in ranges:
        spots = [
            next(
                (_Spot(left, right, text, at - low) for low, high, left, right, text in between if low <= at <= high),
                None,
            )
            for at in edges
        ]
        if spots[0] is None or spots[1] is None:
            return None
        found.append((spots[0], spots[1]))
    return found


def _placed(
    ranges: Sequence[tuple[_Spot, _Spot]] | None,
    indices: Sequence[int],
    spots: Mapping[tuple[Any, Any, str], list[int]],
) -> Ranges | None:
    """Return the ranges of a context in the whole; None if a spot is missing there or occurs more than once."""

    def side(of: tuple[int, str]) -> tuple[int, str]:
        return of if of[0] < 0 else (indices[of[0]], of[1])

    if ranges is None:
        return None
    found: Ranges = []
    for edges in ranges:
        starts = [spots.get((side(spot.left), side(spot.right), spot.text), []) for spot in edges]
        if any(len(some) != 1 for some in starts):
            return None
        found.append((starts[0][0] + edges[0].offset, starts[1][0] + edges[1].offset))
    return found
