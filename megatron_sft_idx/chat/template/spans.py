"""Which characters of a rendered conversation the model must learn, judged on its stand-in.

``Judge`` renders the stand-in of a row (``stand_in``) once for all rows of the same structure. Where an answer's edges
lie is found in a *context*: the same answer among the few messages around it (``contexts_of``), so that the work grows
with the number of answers and not with its square. A context is shown to be equal to the whole: each edge must lie in
the same text between the same neighbours, once in each of the two. What is found in a context depends on that context
alone, so that no row changes what another one gets.

Then one check, which does not know how the edges were found: all words of a message lie in what the model generates
for it, and no words of another message do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from megatron_sft_idx.chat.template.align import Outline
from megatron_sft_idx.chat.template.blocks import BlockFinder
from megatron_sft_idx.chat.template.messages import Ranges, unusable
from megatron_sft_idx.chat.template.scaffold import Rules
from megatron_sft_idx.chat.template.stand_in import Hole, StandIn, as_it_is, make_stand_in, reduced
from megatron_sft_idx.chat.template.trace import Traced
from megatron_sft_idx.chat.template.turn import Prompt, Said, TurnFinder, numbered, said_token, with_tokens
from megatron_sft_idx.errors import SequenceError

MAX_REMEMBERED = 1 << 14
"""Stand-ins, and answers in their contexts, that are remembered at most. Forgetting costs time and changes nothing."""

_NOTHING = re.compile("(?!)")
_SHARED = re.compile("zqs[0-9]{5}s", re.IGNORECASE)


class Renderer(NamedTuple):
    """How to render with the variables of one row.

    Attributes:
        plain: renders ``messages`` and other variables; returns None where the template refuses them.
        traced: renders ``messages`` and ``tools`` with marks; returns None where the template refuses them or cannot be
            traced.
        key: differs where other template variables may change what the template writes.
    """

    plain: Callable[..., str | None]
    traced: Callable[..., Traced | None]
    key: str


class _Spot(NamedTuple):
    """A position in a stand-in's rendering, said so that it can be found in another one.

    Attributes:
        left: which string stands before it; (-1, "") for the beginning.
        right: which string stands behind it; (-1, "") for the end.
        text: the template's own text between these two.
        offset: the position in that text.
    """

    left: tuple[int, str]
    right: tuple[int, str]
    text: str
    offset: int


class _Found(NamedTuple):
    """What ``TurnFinder`` found in a context, also in spots; None where an edge lies inside a string."""

    generated: list[tuple[_Spot, _Spot]] | None
    trained: list[tuple[_Spot, _Spot]] | None
    said: Said


class Judged:
    """The stand-in of a row, with what the model generates of each answer in it.

    Attributes:
        outline: its rendering.
    """

    def __init__(self, outline: Outline, find: Callable[[int, bool], Said | SequenceError]) -> None:
        self.outline = outline
        self._find = find
        self._said: dict[tuple[int, bool], Said | SequenceError] = {}

    def said(self, message: int, whole: bool = False) -> Said | SequenceError:
        """What the model generates of one assistant message, or why it cannot be told.

        ``whole`` asks for it in the whole conversation instead of a short context.
        """
        found = self._said.get((message, whole))
        if found is None:
            found = self._said[message, whole] = self._find(message, whole)
        return found


class Judge:
    """Judges stand-ins of one template, and remembers them.

    Args:
        rules: what holds for every conversation.
        marked: whether the template has generation markers.
    """

    def __init__(self, rules: Rules, marked: bool) -> None:
        self._rules, self._has_markers = rules, marked
        self._judged: dict[tuple[str, bytes], Judged | None] = {}
        self._contexts: dict[tuple[str, bytes, int], _Found | SequenceError | None] = {}

    def judge(self, row: StandIn, renderer: Renderer) -> Judged | None:
        """The verdict on a stand-in; None where the template refuses it."""
        if row.words is not None:
            return self._render(row, renderer)
        key = (renderer.key, orjson.dumps((row.messages, row.tools)))
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
            blocks = BlockFinder(self._rules, traced, row, renderer.plain)
            outline = Outline(traced.text, row.placed_in(traced.text))
            return Judged(outline, lambda message, _: self._checked(blocks.said, outline, row, message))
        text = renderer.plain(messages=row.messages, tools=row.tools)
        if text is None:
            return None
        outline = Outline(text, row.placed_in(text))
        return Judged(
            outline,
            lambda message, whole: self._checked(
                lambda at: self._said(outline, row, at, renderer, whole), outline, row, message
            ),
        )

    def _said(self, outline: Outline, row: StandIn, message: int, renderer: Renderer, whole: bool) -> Said:
        """What the model generates of a message, from the first context that is equal to the whole, or from the whole.

        Raises:
            SequenceError: the message is refused in such a context, or there is none.
        """
        spots = _spots(outline, row.holes)
        refused: SequenceError | None = None
        every = [*range(len(row.messages))]
        roles = [one.get("role") for one in row.messages]
        for indices, cut_down in [(every, False)] if whole else contexts_of(roles, message):
            messages = [row.messages[index] for index in indices]
            if cut_down:
                messages = [reduced(one) for one in messages]
            found = self._in_context(row, messages, indices.index(message), renderer)
            if isinstance(found, SequenceError):
                refused = with_indices(found, indices)
                continue
            if found is None:
                continue
            said = found.said
            if said.prompt is not None:
                before = indices[: indices.index(message)]
                said = said._replace(prompt=said.prompt._replace(before=before, cut_down=cut_down))
            if len(messages) == len(row.messages) and not cut_down:
                return said
            generated, trained = (_placed(some, indices, spots) for some in (found.generated, found.trained))
            if generated is not None and trained is not None:
                return said._replace(generated=generated, trained=generated if trained == generated else trained)
        raise refused or unusable(
            f"nothing tells what of the text of the chat template {self._rules.name} assistant message"
            f" {numbered(message)} wrote; put {{% generation %}} markers around what the assistant says, or train on all"
            " tokens"
        )

    def _in_context(
        self, row: StandIn, messages: list[dict[str, Any]], message: int, renderer: Renderer
    ) -> _Found | SequenceError | None:
        """What the model generates of a message among others; None where the template refuses these messages."""
        if row.words is not None:
            own = as_it_is(messages, row.tools, "", _NOTHING)
            return None if own is None else self._find(own, message, renderer)
        context = make_stand_in(messages, row.tools, self._rules.spelt, row.tested)
        key = (renderer.key, orjson.dumps((context.messages, context.tools)), message)
        if key not in self._contexts:
            if len(self._contexts) >= MAX_REMEMBERED:
                self._contexts.clear()
            self._contexts[key] = self._find(context, message, renderer)
        return self._contexts[key]

    def _find(self, context: StandIn, message: int, renderer: Renderer) -> _Found | SequenceError | None:
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
        return _Found(generated, trained, said)

    def _checked(
        self, find: Callable[[int], Said], outline: Outline, row: StandIn, message: int
    ) -> Said | SequenceError:
        """What ``find`` finds, held to the words of the whole: those of the message are in it, no others are."""
        try:
            said = find(message)
            self._require_own_words(said.generated, outline, row.holes, message)
        except SequenceError as error:
            return error
        return said

    def _require_own_words(self, spans: Ranges, outline: Outline, holes: Sequence[Hole], message: int) -> None:
        name = self._rules.name
        inside: set[int] = set()
        outside: set[int] = set()
        for one in outline.placed:
            if one.shared:
                continue
            hole = holes[one.number]
            held = any(start <= one.start and one.stop <= stop for start, stop in spans)
            if hole.message == message:
                (inside if held else outside).add(one.number)
            elif any(start < one.stop and one.start < stop for start, stop in spans):
                raise self._mixed(f"words of message {numbered(hole.message)} in", message)
        if outside - inside and not self._has_markers:
            raise self._mixed("words outside", message)
        lost = [number for number, hole in enumerate(holes) if hole.message == message and number not in inside]
        for number in lost:
            kind = holes[number].kind
            if kind != "reasoning" and number not in outside:
                words = (
                    "values of the arguments of the calls"
                    if kind == "call"
                    else f"the words {said_token(message, kind)}"
                )
                raise unusable(
                    f"the chat template {name} leaves out {words} of assistant message {numbered(message)};"
                    " use a template that keeps them, or give the message weight 0"
                )

    def _mixed(self, what: str, message: int) -> SequenceError:
        return unusable(
            f"the chat template {self._rules.name} writes {what} what it writes for assistant message"
            f" {numbered(message)}: put {{% generation %}} markers around what the assistant says, or train on all tokens"
        )


def with_indices(error: SequenceError, indices: Sequence[int]) -> SequenceError:
    """The error of a context, with its messages numbered as in the whole conversation."""
    return unusable(
        with_tokens(
            error.reason,
            lambda message: numbered(indices[message]),
            lambda kind, message, call: said_token(indices[message], kind, call),
        )
    )


# ---- contexts ----


def contexts_of(roles: Sequence[Any], message: int) -> Iterator[tuple[list[int], bool]]:
    """The contexts in which an answer is judged, the smallest first and the whole conversation last.

    A *block* is a question with all that answers it. The smallest context has the system messages at the beginning;
    of the answer's block its question, the answer, the answers before and behind it, the last one, and the results of
    calls among these; and the next question.

    Yields:
        Positions of messages, and whether their calls are to be cut down (``reduced``).
    """
    count = len(roles)
    system = 0
    while system < count and roles[system] not in ("user", "assistant", "tool"):
        system += 1
    starts = [at for at in range(system, count) if roles[at] == "user" and (at == system or roles[at - 1] != "user")]
    begin = max([at for at in starts if at <= message], default=system)
    end = min([at for at in starts if at > message], default=count)
    behind = end  # the next questions
    while behind < count and roles[behind] == "user":
        behind += 1
    answers = [at for at in range(begin, end) if roles[at] == "assistant"]
    number = answers.index(message)
    kept = {message, *answers[max(0, number - 1) : number + 2], answers[-1]}
    near = [*range(begin, answers[0])]
    for number, at in enumerate(answers):
        stop = answers[number + 1] if number + 1 < len(answers) else end
        near += range(at, stop) if at in kept else ()
    small = [*range(system), *near, *range(end, behind)]
    before = max([at for at in starts if at < begin], default=system)
    further = min([at for at in starts if at > end], default=count)
    large = [*range(system), *range(before, further)]
    whole = [*range(count)]
    yielded: list[list[int]] = []
    yield small, True
    for indices in (small, large, whole):
        if indices not in yielded:
            yielded.append(indices)
            yield indices, False


def _spots(outline: Outline, holes: Sequence[Hole]) -> dict[tuple[Any, Any, str], list[int]]:
    """Where each text between two owned placeholders starts, by these two and the text."""
    found: dict[tuple[Any, Any, str], list[int]] = {}
    for start, _, left, right, text in _between(outline, holes):
        found.setdefault((left, right, text), []).append(start)
    return found


def _between(outline: Outline, holes: Sequence[Hole]) -> list[tuple[int, int, Any, Any, str]]:
    """The texts between owned placeholders: start, stop, what stands left and right, and the text.

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
    """Ranges of a context as spots; None where one begins or ends inside a placeholder."""
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
    """The ranges of a context in the whole; None where a spot is not in the whole, or more than once."""

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
