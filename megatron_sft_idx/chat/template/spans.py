"""Which characters of a traced text the model must learn.

For each assistant message that is trained on: what it wrote, less what its generation prompt had written
already, up to and including its end of turn. Whitespace after that is never generated, so never trained on.
No character of the message's own words is ever taken for the prompt's, even where they read the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sft_idx.chat.template.probes import Scaffold, shared_length
from megatron_sft_idx.chat.template.trace import Segment, Traced
from megatron_sft_idx.chat.template.words import Piece, pieces_of, squeezed
from megatron_sft_idx.errors import FormatError, SequenceError

__all__ = ["MaskOptions", "Ranges", "Rules", "SpanFinder", "selected", "unusable"]

Ranges = list[tuple[int, int]]
Located = Mapping[tuple[int, int], int]
"""Where pieces start in the text: (message, number of the piece in it) to character."""

_NO_SCAFFOLD = Scaffold((), (), (), "")
_CLOSING = re.compile(r"\s*(?:<[^<>\s]*>|\[/?[A-Z_]+\])\s*")
_EMPTY_THINKING = re.compile(
    r"\s*(?:<(?:think|thinking|thought|reasoning)>\s*)?</(?:think|thinking|thought|reasoning)>\s*"
    r"|\s*(?:\[THINK\]\s*)?\[/THINK\]\s*"
)


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """What counts as learnt.

    Attributes:
        train_on: ``"assistant"``, every assistant message; ``"last-turn"``, the assistant messages after the
            last user message (tool results between them do not end a turn); ``"all"``, every character.
        train_on_thinking: False leaves out reasoning, with the tags around it.
        train_on_tool_calls: False leaves out tool calls, from the end of the words before them to the start
            of the words after them, or else to the end of the turn.
        allow_control_tokens: True lets text of the data that spells a control token become that token.
        template_date: the day, ``YYYY-MM-DD``, that templates which ask for the date are told.
    """

    train_on: str = "assistant"
    train_on_thinking: bool = True
    train_on_tool_calls: bool = True
    allow_control_tokens: bool = False
    template_date: str | None = None

    def __post_init__(self) -> None:
        if self.train_on not in ("assistant", "last-turn", "all"):
            raise FormatError(f"--train-on: {self.train_on!r} is none of assistant, last-turn, all")


def unusable(reason: str) -> SequenceError:
    """A row that cannot be used. Whoever knows the row's file and line puts them in."""
    return SequenceError("conversation", None, reason)


def selected(messages: Sequence[Mapping[str, Any]], weights: Sequence[float], train_on: str) -> list[int]:
    """The assistant messages that are trained on, by position."""
    first = 0
    if train_on == "last-turn":
        users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
        first = users[-1] + 1 if users else 0
    return [
        index
        for index in range(first, len(messages))
        if messages[index].get("role") == "assistant" and weights[index] != 0
    ]


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides spans in every conversation alike.

    Attributes:
        name: the template, for errors.
        options: what is trained on.
        ends: texts that end a turn when they follow it: control tokens.
        bos: the tokenizer's beginning-of-sequence text, or "".
        eos: the tokenizer's end-of-sequence text, or "".
    """

    name: str
    options: MaskOptions
    ends: tuple[str, ...]
    bos: str
    eos: str


class SpanFinder:
    """Finds the trained spans of one traced conversation.

    Args:
        rules: what holds for every conversation.
        traced: the rendered conversation.
        messages: its messages, as the template saw them.
        scaffold: what the template puts around assistant messages; only tracing needs it.
        locate: finds out where every piece starts, at the price of another render; None where that fails.
    """

    def __init__(
        self,
        rules: Rules,
        traced: Traced,
        messages: Sequence[Mapping[str, Any]],
        scaffold: Scaffold | None = None,
        locate: Callable[[], Located | None] = lambda: None,
    ) -> None:
        self.notes: dict[str, int] = {}
        self._rules, self._scaffold, self._locate = rules, scaffold or _NO_SCAFFOLD, locate
        self._trace, self._text, self._messages = traced, traced.text, messages
        self._located: Located | None = None
        self._searched = False
        self._written: dict[int, list[Segment]] = {}
        for segment in traced.segments:
            if segment.message in self._written:
                self._written[segment.message].append(segment)
            else:
                self._written[segment.message] = [segment]

    def traced(self, message: int) -> tuple[Ranges, Ranges]:
        """What one assistant message says, found by tracing: all of it, and what the options leave of it.

        Raises:
            SequenceError: the template leaves out some of the message's words.
            FormatError: the template writes them where tracing cannot follow.
        """
        pieces = pieces_of(self._messages[message])
        segments = self._segments(message, pieces)
        if not segments:
            return [], []
        pieces = self._present(message, pieces, segments)
        start = self._start(message, pieces, segments[0])
        stop = self._stop(message, pieces, segments)
        spans = [(max(start, one.start), one.stop) for one in segments[:-1] if one.stop > start]
        spans.append((max(start, segments[-1].start), stop))
        return spans, self._without_cuts(message, pieces, spans)

    def marked(self, message: int, spans: Ranges) -> tuple[Ranges, Ranges]:
        """As ``traced``, for a message with generation blocks, which are taken as they stand."""
        pieces = self._present(message, pieces_of(self._messages[message]), self._anywhere(message))
        return spans, self._without_cuts(message, pieces, spans) if spans else []

    def require_words(self, messages: Sequence[int]) -> None:
        """Require what assistant messages say somewhere in the text."""
        for message in messages:
            whole = [Segment(0, len(self._text), 0, message)]
            self._present(message, pieces_of(self._messages[message]), whole)

    def blocks(self) -> dict[int, Ranges]:
        """The template's generation blocks by message.

        A block outside every message goes with the message before it (an end of turn written after the loop).
        """
        spans: dict[int, Ranges] = {}
        segments = self._trace.segments
        at, message = 0, None
        for start, stop in self._trace.generated:
            while at < len(segments) and segments[at].stop <= start:
                at += 1
            if at < len(segments) and segments[at].start <= start:
                message = segments[at].message
            if message is None:
                raise FormatError(f"{self._rules.name}: a generation block stands outside every loop over the messages")
            spans.setdefault(message, []).append((start, stop))
        return spans

    def _note(self, what: str) -> None:
        self.notes[what] = self.notes.get(what, 0) + 1

    def _segments(self, message: int, pieces: list[Piece]) -> list[Segment]:
        """What the message wrote in the one iteration that holds its words."""
        written = self._written.get(message, ())
        if len(written) == 1 and self._text[written[0].start : written[0].stop].strip():
            return [*written]
        frames: dict[int, list[Segment]] = {}
        for segment in written:
            frames.setdefault(segment.frame, []).append(segment)
        inked = [own for own in frames.values() if any(self._text[one.start : one.stop].strip() for one in own)]
        if len(inked) > 1:
            inked.sort(key=lambda own: sum(self._find(piece.text, own) >= 0 for piece in pieces))
        if inked:
            # Blank leftovers after another message's text are nobody's words.
            own = inked[-1]
            return [one for one in own if self._text[one.start : one.stop].strip()]
        if any(piece.kind != "reasoning" and piece.text in self._text for piece in pieces):
            raise FormatError(
                f"{self._rules.name}: the template writes assistant messages outside its loops over the "
                "messages, so tracing cannot find them; put {% generation %} markers around them, or train "
                "on all tokens"
            )
        if any(piece.kind != "reasoning" for piece in pieces):
            raise unusable(f"the chat template {self._rules.name} leaves out assistant message {message + 1}")
        return []

    def _anywhere(self, message: int) -> list[Segment]:
        return self._written.get(message) or [Segment(0, len(self._text), 0, message)]

    def _find(self, words: str, segments: list[Segment]) -> int:
        for segment in segments:
            at = self._text.find(words, segment.start, segment.stop)
            if at >= 0:
                return at
        return -1

    def _present(self, message: int, pieces: list[Piece], segments: list[Segment]) -> list[Piece]:
        """Require the message's words; return the pieces that stand in the text, letter for letter."""
        present: list[Piece] = []
        for piece in pieces:
            if self._find(piece.text, segments) >= 0:
                present.append(piece)
                continue
            text = "".join(self._text[one.start : one.stop] for one in segments)
            escaped = json.dumps(piece.text, ensure_ascii=False)[1:-1]
            if escaped in text or squeezed(piece.text) in squeezed(text):
                continue
            if piece.kind == "reasoning":
                self._note("reasoning_dropped")
                continue
            what = f"the call of {piece.text}" if piece.kind == "call" else f"the words {_short(piece.text)}"
            raise unusable(
                f"the chat template {self._rules.name} leaves out {what} of assistant message {message + 1}; "
                "use a template that keeps them, or give the message weight 0"
            )
        self._require_calls(message, pieces, segments)
        return present

    def _require_calls(self, message: int, pieces: list[Piece], segments: list[Segment]) -> None:
        """Require each call's name for itself: an answer that speaks of the function is no call of it."""
        names = [piece.text for piece in pieces if piece.kind == "call"]
        for name in dict.fromkeys(names):
            text = "".join(self._text[one.start : one.stop] for one in segments)
            for words in (*(piece.text for piece in pieces if piece.kind != "call"), *self._rules.ends):
                if name in words and name != words:
                    text = text.replace(words, "\n")
            escaped = json.dumps(name, ensure_ascii=False)[1:-1]
            found = max(text.count(escaped), squeezed(text).count(squeezed(name)))
            if found < names.count(name):
                raise unusable(
                    f"the chat template {self._rules.name} leaves out {names.count(name) - found} of"
                    f" {names.count(name)} calls of {name} of assistant message {message + 1}; use a template that"
                    " keeps them, or give the message weight 0"
                )

    def _start(self, message: int, pieces: list[Piece], first: Segment) -> int:
        shared = shared_length(self._text[first.start : first.stop], self._scaffold)
        words = [piece for piece in pieces if piece.kind != "call"]
        if shared is None:
            # No prompt is known: from the first character that comes from the message. A call's tags come
            # before its name, so a message that only calls is taken whole.
            positions = [self._place(message, piece, [first]) for piece in words]
            return min((at for at in positions if at is not None), default=first.start)
        start = first.start + shared
        for piece in words:
            at = self._text.find(piece.text, first.start, first.stop)
            if 0 <= at < start:
                exact = self._place(message, piece, [first])
                start = min(start, at if exact is None else exact)
        return start

    def _place(self, message: int, piece: Piece, segments: list[Segment]) -> int | None:
        """Where a piece starts, for certain: its only occurrence, or as marked in another render."""
        at = self._find(piece.text, segments)
        if at < 0:
            return None
        repeated = any(
            self._text.find(piece.text, max(one.start, at + 1), one.stop) >= 0 for one in segments if one.stop > at
        )
        if not repeated:
            return at
        if not self._searched:
            self._searched, self._located = True, self._locate()
        located = self._located
        if located is None:
            self._note("words_placed_by_search")
            return at
        number = pieces_of(self._messages[message]).index(piece)
        return located.get((message, number), at)

    def _stop(self, message: int, pieces: list[Piece], segments: list[Segment]) -> int:
        """The end of a message's turn."""
        text, last = self._text, segments[-1]
        said = text[last.start : last.stop].rstrip()
        stop = last.start + len(said)
        closed = said.removesuffix(self._rules.bos).rstrip()
        if closed != said and self._rules.eos and closed.endswith(self._rules.eos):
            before = last.start + len(closed)
            if self._words_end(message, pieces, segments) <= before:
                return before  # the next text's beginning, written early
        scaffold = self._scaffold
        if said.endswith(scaffold.inner_ends):
            return stop
        # Written after the message's own iteration: with the next message, or after the loop.
        late = scaffold.late_end
        if late and text.startswith(late, last.stop):
            return last.stop + len(late)
        if said.endswith(self._rules.ends):
            return stop
        for end in (self._rules.eos, *self._rules.ends):
            if end and text.startswith(end, last.stop):
                return last.stop + len(end)
        self._note("no_end_of_turn")
        return stop

    def _words_end(self, message: int, pieces: list[Piece], segments: list[Segment]) -> int:
        """Where the words that a message says end."""
        placed = [(self._place(message, piece, segments), piece) for piece in pieces if piece.kind == "content"]
        return max((at + len(piece.text) for at, piece in placed if at is not None), default=0)

    def _without_cuts(self, message: int, pieces: list[Piece], spans: Ranges) -> Ranges:
        options = self._rules.options
        cuts: Ranges = []
        if not options.train_on_thinking:
            cuts += self._thinking(message, pieces, spans)
        if not options.train_on_tool_calls and any(piece.kind == "call" for piece in pieces):
            cuts += self._calls(message, pieces, spans)
        for low, high in cuts:
            spans = [part for start, stop in spans for part in ((start, min(stop, low)), (max(start, high), stop))]
            spans = [(start, stop) for start, stop in spans if start < stop]
        return spans

    def _placed(self, message: int, pieces: list[Piece], kind: str) -> Ranges:
        """Where the pieces of one kind stand: (start, stop), ascending."""
        segments = self._anywhere(message)
        found = [
            (at, at + len(piece.text))
            for piece in pieces
            if piece.kind == kind and (at := self._place(message, piece, segments)) is not None
        ]
        return sorted(found)

    def _thinking(self, message: int, pieces: list[Piece], spans: Ranges) -> Ranges:
        start, stop = spans[0][0], spans[-1][1]
        said = self._placed(message, pieces, "content")
        thought = self._placed(message, pieces, "reasoning")
        if not thought:
            limit = min((low for low, _ in said), default=stop)
            empty = _EMPTY_THINKING.match(self._text, start, limit)
            return [(start, empty.end())] if empty else []
        low, high = thought[0]
        low = max((end for _, end in said if end <= low), default=start)
        limit = min((begin for begin, _ in said if begin >= high), default=stop)
        closing = _CLOSING.match(self._text, high, limit)
        return [(low, closing.end() if closing else high)]

    def _calls(self, message: int, pieces: list[Piece], spans: Ranges) -> Ranges:
        start, stop = spans[0][0], spans[-1][1]
        said = sorted(self._placed(message, pieces, "content") + self._placed(message, pieces, "reasoning"))
        names = [piece.text for piece in pieces if piece.kind == "call"]
        after = said[-1][1] if said else start
        if said and not any(self._text.find(name, after, stop) >= 0 for name in names):
            # Calls before the answer: between the words before them and the answer.
            before = said[-2][1] if len(said) > 1 else start
            return [(self._past_thinking(before, said[-1][0]), said[-1][0])]
        return [(self._past_thinking(after, stop), stop)]

    def _past_thinking(self, start: int, stop: int) -> int:
        closing = _EMPTY_THINKING.match(self._text, start, stop)
        return closing.end() if closing else start


def _short(words: str) -> str:
    return repr(words if len(words) <= 60 else words[:57] + "...")
