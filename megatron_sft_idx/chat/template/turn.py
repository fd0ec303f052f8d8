"""Find the generated text of one assistant message in the rendering of a short stand-in conversation.

This is the text that the template wrote for the message, from the end of the generation prompt up to and including the
end of turn. White space after that is never generated.

It is found in two ways, which must agree. Tracing shows which message wrote which text. Renderings of beginnings of the
conversation show where a turn starts and stops (``scaffold``). If tracing cannot follow a template, the placeholders
show the positions of all words, and only renderings decide about the template's text between them.

Errors refer to messages and words by tokens (``reworded``), because a stand-in is judged once for many rows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_sft_idx.chat.template.cuts import Cuts, cut
from megatron_sft_idx.chat.template.messages import Ranges, Utterance, unplaced, unusable, utterances_of
from megatron_sft_idx.chat.template.scaffold import EdgeFinder, Rules, Turn, Written
from megatron_sft_idx.chat.template.stand_in import PLACEHOLDER, Occurrence, StandIn
from megatron_sft_idx.chat.template.trace import Segment, Traced, own_segments
from megatron_sft_idx.errors import SequenceError

_LEAVES = ("drops", "use a template that keeps them, or set the weight of the message to 0")


class Stood(NamedTuple):
    """An utterance found in the text, from ``start`` to ``stop``."""

    start: int
    stop: int
    piece: Utterance


class Prompt(NamedTuple):
    """The end of the text that a server feeds before a message, if it may differ between rows.

    Attributes:
        before: positions of the messages that are fed.
        cut_down: whether their calls are reduced (``reduced``).
        text: the template's own text after the last string of these messages; None if the template rejects them.
    """

    before: list[int]
    cut_down: bool
    text: str | None


class Said(NamedTuple):
    """The generated text of one message.

    Attributes:
        generated: the characters that the model generates.
        trained: the part of it that the options train on.
        notes: counts for the summary, by name.
        prompt: the text fed before it, if it has to be checked for each row.
    """

    generated: Ranges
    trained: Ranges
    notes: dict[str, int]
    prompt: Prompt | None = None


def numbered(message: int) -> str:
    """Return the token for the number of a message in the reason of an error."""
    return f"zqm{message:05d}m"


class TurnFinder:
    """Finds the generated text of each assistant message in one rendering.

    Args:
        rules: the rules for every conversation.
        text: the rendering.
        messages: the messages, as given to the template.
        row: the stand-in to which these messages belong, or a part of it.
        traced: which message wrote which text; None if the template cannot be traced.
        render: renders other ``messages`` and variables; returns None if the template rejects them.
    """

    def __init__(
        self,
        rules: Rules,
        text: str,
        messages: Sequence[dict[str, Any]],
        row: StandIn,
        traced: Traced | None,
        render: Callable[..., str | None],
    ) -> None:
        self._rules, self._text, self._messages, self._traced, self._row = rules, text, messages, traced, row
        self._render = render
        self._notes: defaultdict[str, int] = defaultdict(int)
        self._holes = row.holes
        self.placed = [one for one in row.placed_in(text) if not one.shared]
        self._of_message: dict[int, list[Occurrence]] = {}
        for one in self.placed:
            self._of_message.setdefault(self._holes[one.number].message, []).append(one)
        self._called_with: dict[int, set[int]] = {}  # numbers of the values in a message's function calls
        for number, hole in enumerate(self._holes):
            if hole.kind == "call":
                self._called_with.setdefault(hole.message, set()).add(number)
        self._edges = EdgeFinder(rules, text, messages, render)
        self._written: dict[int, list[Segment]] = {}
        for segment in () if traced is None else own_segments(traced, messages):
            self._written.setdefault(segment.message, []).append(segment)

    def fed(self, message: int) -> str | None:
        """Return the template's own text after the last string that a server feeds before a message."""
        fed = self._edges.fed(message)
        return None if fed is None else fed[max((one.stop for one in self._row.placed_in(fed)), default=0) :]

    def _mine(self, message: int, kind: str = "") -> list[Occurrence]:
        """Return the positions of all strings of a message, or only of strings of one kind."""
        placed = self._of_message.get(message, [])
        return [one for one in placed if kind in ("", self._holes[one.number].kind)]

    def pieces(self, message: int) -> list[Utterance]:
        """Return the utterances of a message, like ``utterances_of`` for its row."""
        found = utterances_of(self._messages[message])
        quoted = [
            piece
            for piece in found
            if piece.kind == "reasoning"
            and piece.field == "content"
            and any(
                self._holes[one.number].kind == "content" for one in self._row.placed_in(piece.text) if not one.shared
            )
        ]
        if not quoted:
            return found
        # A content that quotes a closing tag: its strings look like reasoning only because of the placeholders.
        content = self._messages[message]["content"]
        text = content if isinstance(content, str) else content[0]["text"]
        whole = Utterance("content", text.strip(), "content", len(text) - len(text.lstrip()))
        return [
            *(piece for piece in found if piece.kind == "reasoning" and piece not in quoted),
            whole,
            *(piece for piece in found if piece.kind == "call"),
        ]

    def said(self, message: int) -> Said:
        """Return the generated text of one assistant message.

        Raises:
            SequenceError: the template omits some of the message's words, or their location is ambiguous.
        """
        self._notes.clear()
        pieces = self.pieces(message)
        segments = self._own(message, pieces)
        traced = bool(segments)
        if pieces and not traced:
            segments = self._between_others(message)
        if not segments:
            if any(piece.kind != "reasoning" for piece in pieces):
                raise unusable(f"the chat template {self._rules.name} drops assistant message {numbered(message)}")
            if pieces:
                self._count_or_refuse_dropped(message, self._notes)
            elif not self._written:
                raise unplaced(
                    f"assistant message {numbered(message)} is empty, so the text that the chat template"
                    f" {self._rules.name} wrote for it cannot be found; leave the message out, or set its weight to 0"
                )
            return Said([], [], dict(self._notes))
        found = self.standing(pieces, segments)
        self.require_words(message, pieces, segments, found, self._notes)
        start, stop = self._edges_of(message, segments, found, traced)
        spans = [(max(start, one.start), one.stop) for one in segments[:-1] if one.stop > start]
        spans += [(begin, stop)] if (begin := max(start, segments[-1].start)) < stop else []
        spans = cut(spans, self._headers_inside(segments[0].start, start, stop))
        generated = [Segment(start, stop, 0, message) for start, stop in spans]
        if any(one.piece.kind == "call" and self._find(one.piece.text, generated) < 0 for one in found):
            raise unplaced(
                f"the chat template {self._rules.name} writes tool calls of assistant message {numbered(message)} at a"
                " place that may not be generated by the model; put {% generation %} markers around the assistant's"
                " text, or train on all tokens"
            )
        trained = spans
        if spans and not self._rules.keeps_all:
            cuts = Cuts(self._rules, self._text, self._messages, message, self._render)
            trained = cuts.without(spans, self.found_for_cuts(message, found))
        return Said(spans, trained, dict(self._notes))

    def found_for_cuts(self, message: int, found: list[Stood]) -> list[tuple[int, int, str]]:
        """Return the positions of a message's utterances and of the values in its calls, with their kinds."""
        values = [(one.start, one.stop, "call") for one in self._mine(message, "call")]
        return [*((one.start, one.stop, one.piece.kind) for one in found), *values]

    def _headers_inside(self, low: int, start: int, stop: int) -> Ranges:
        """Return the headers inside a message that the template wrote as two turns.

        The model is fed these headers, too.

        They come after an end of sequence. After any other end, the model continues and writes the header itself.
        """
        text, eos, headers = self._text, self._rules.eos, []
        header = text[low:start].strip()
        at = text.find(header, start, stop) if header and eos else -1
        while at >= 0:
            said = len(text[:at].rstrip())
            if text.endswith(eos, start, said):
                headers.append((said, at + len(header)))
            at = text.find(header, at + len(header), stop)
        return headers

    # The location of a message's text

    def _own(self, message: int, pieces: list[Utterance]) -> list[Segment]:
        """Return the segments that the message wrote in one iteration of a loop: the one with most of its words."""
        frames: dict[int, list[Segment]] = {}
        for segment in self._written.get(message, []):
            frames.setdefault(segment.frame, []).append(segment)
        order = [own for own in frames.values() if any(self._text[one.start : one.stop].strip() for one in own)]
        if not order:
            return []
        order.sort(key=lambda own: sum(self._find(piece.text, own) >= 0 for piece in pieces))
        # Segments of white space between segments of other messages have no words.
        return [one for one in order[-1] if self._text[one.start : one.stop].strip()]

    def _between_others(self, message: int) -> list[Segment]:
        """Without tracing: return the text between the neighbouring strings of other messages."""
        mine = self._mine(message)
        low, high = 0, len(self._text)
        for one in self.placed:
            other = self._holes[one.number].message
            if other != message:
                if one.stop <= mine[0].start if mine else other < message:
                    low = max(low, one.stop)
                elif one.start >= mine[-1].stop if mine else other > message:
                    high = min(high, one.start)
        pieces = self.pieces(message)
        inside = mine or any(self._text.find(piece.text, low, high) >= 0 for piece in pieces)
        return [Segment(low, high, 0, message)] if inside else []

    def _text_if_last(self, message: int) -> str | None:
        """Return the text after the last words of other messages if this message ends the conversation, or None."""
        closed = self._edges.closed(message)
        if closed is None:
            return None
        placed = [one for one in self._row.placed_in(closed) if not one.shared]
        others = (one.stop for one in placed if self._holes[one.number].message != message)
        return closed[max(others, default=0) :]

    def _find(self, words: str, segments: list[Segment]) -> int:
        for segment in segments:
            at = self._text.find(words, segment.start, segment.stop)
            if at >= 0:
                return at
        return -1

    # Checks that a message's words are present

    def standing(self, pieces: list[Utterance], segments: list[Segment]) -> list[Stood]:
        """Return the utterances found in these segments."""
        found = []
        for piece in pieces:
            at = self._find(piece.text, segments)
            if at >= 0:
                found.append(Stood(at, at + len(piece.text), piece))
                continue
            # A text with strings that the template searches for may be written in parts.
            words = [self._text_of(one, piece.text) for one in self._row.placed_in(piece.text)]
            places = [(at, at + len(word)) for word in words if (at := self._find(word, segments)) >= 0]
            if places and len(places) == len(words):
                found.append(Stood(min(places)[0], max(places)[1], piece))
        return found

    def _text_of(self, one: Occurrence, text: str) -> str:
        return text[one.start : one.stop]

    def require_words(
        self,
        message: int,
        pieces: list[Utterance],
        segments: list[Segment],
        found: list[Stood],
        notes: dict[str, int],
        how: tuple[str, str] = _LEAVES,
    ) -> None:
        """Reject the row if some of the message's words are not in its segments."""
        standing = [one.piece for one in found]
        for piece in pieces:
            if piece.kind == "reasoning" and piece not in standing:
                if how is not _LEAVES:
                    raise self._refused(message, f"the reasoning {said_token(message, 'reasoning')}", how)
                self._count_or_refuse_dropped(message, notes)
            elif piece.kind == "content" and piece not in standing:
                raise self._refused(message, f"the words {said_token(message, 'content')}", how)
        names = [piece.text for piece in pieces if piece.kind == "call"]
        texts = ["\n".join(self._text[one.start : one.stop] for one in segments)]
        # Untraced text may extend into the header of a result, which may repeat the name of the function.
        if names and not self._written.get(message) and (alone := self._text_if_last(message)) is not None:
            texts.append(alone)
        for ends in self._rules.ends:
            if any(name in ends for name in names):
                texts = [text.replace(ends, "\n") for text in texts]
        for name in dict.fromkeys(names):
            lacking = names.count(name) - min(len(re.findall(_name_pattern(name), text)) for text in texts)
            if lacking > 0:
                raise self._refused(
                    message,
                    f"{lacking} of {names.count(name)} calls of {said_token(message, 'call', names.index(name))}",
                    how,
                )
        wanted = set(self._called_with.get(message, ()))
        mine = self._mine(message, "call")
        wanted -= {
            one.number for one in mine if any(own.start <= one.start and one.stop <= own.stop for own in segments)
        }
        if wanted:
            raise self._refused(message, "values of the arguments of the calls", how)

    def _count_or_refuse_dropped(self, message: int, notes: dict[str, int]) -> None:
        """The template omits the message's reasoning: count that if the options allow it, or reject the row."""
        options = self._rules.options
        if options.earlier_reasoning == "drop" or not options.train_on_thinking:
            notes["reasoning_dropped"] = notes.get("reasoning_dropped", 0) + 1
            return
        split = (
            ""
            if options.earlier_reasoning == "split"
            else "--earlier-reasoning split makes one sequence per turn, with the text that the model sees at that"
            " turn;"
        )
        raise unusable(
            f"the chat template {self._rules.name} drops the reasoning of assistant message {numbered(message)};"
            f" {split} --earlier-reasoning drop trains without it and counts it; --no-train-on-thinking trains on no"
            " reasoning at all"
        )

    def _refused(self, message: int, what: str, how: tuple[str, str] = _LEAVES) -> SequenceError:
        verb, remedy = how
        return unusable(
            f"the chat template {self._rules.name} {verb} {what} of assistant message {numbered(message)}; {remedy}"
        )

    # The edges of a turn

    def _edges_of(self, message: int, segments: list[Segment], found: list[Stood], traced: bool) -> tuple[int, int]:
        """Return start and stop of the text that a message generated."""
        text, rules, last = self._text, self._rules, segments[-1]
        low, high = segments[0].start, last.start + len(text[last.start : last.stop].rstrip())
        mine = [
            one
            for one in self._mine(message)
            if any(own.start <= one.start and one.stop <= own.stop for own in segments)
        ]
        words = [one.start for one in mine if self._holes[one.number].kind != "call"]
        # The name of a function may also be in a header, so a call counts from the start of its arguments.
        names = self._names_called(segments, found, traced)
        first = min((one.start for one in mine), default=min((at for at, _ in names), default=last.stop))
        said = max((one.stop for one in mine), default=max((one.stop for one in found), default=low))
        for at, end in names:
            # Arguments may have no words, so a call before the words is found by its name.
            first = at if first in words and at < first else first
            said = max(said, end)
        own = first - (self._said_before(message, first) if first in words else 0)
        reasons = any(one.piece.kind == "reasoning" and one.piece.field != "content" for one in found)
        thinks = any(one.start == first and self._holes[one.number].kind == "reasoning" for one in mine)
        turn = Turn(message, low, first, said, high)
        start = min(first, self._edges.start(turn, own if first in words else None, reasons, thinks, traced))
        turn = turn._replace(said=(said := max(said, start)))
        if traced:
            written = Written(last.stop, *self._neighbours(message, low, start, last.stop))
            stop = self._edges.stop_of_traced(turn, written)
        elif self._edges.always_prompts(turn._replace(low=start)):
            raise unplaced(
                f"the chat template {rules.name} writes a header after all messages and cannot be traced, so the end"
                f" of assistant message {numbered(message)} cannot be determined; put {{% generation %}} markers around"
                " its text"
            )
        else:
            stop = self._edges.stop_of_untraced(turn)
            if not self._edges.ends_alike(turn, max(said, stop)):
                raise unplaced(
                    f"the chat template {rules.name} cannot be traced, and it ends assistant message"
                    f" {numbered(message)} differently before another message than at the end of the conversation, so"
                    " the end of the message cannot be determined; put {% generation %} markers around its text"
                )
        stop = max(said, stop)
        calls = any(one.piece.kind == "call" for one in found)
        stop = self._edges.stop_behind_calls(turn, stop) if calls else self._edges.before_footer(said, stop)
        closed = text[:stop].removesuffix(rules.bos).rstrip() if rules.bos else text[:stop]
        if len(closed) < stop and rules.eos and closed.endswith(rules.eos, said):
            stop = len(closed)  # the beginning of the next sequence, which follows the end of this one
        if said == stop:
            self._notes["no_end_of_turn"] += 1
        return start, stop

    def _names_called(self, segments: list[Segment], found: list[Stood], traced: bool) -> Ranges:
        """Return the positions at which a message writes the names of the functions that it calls.

        The header before the calls may contain a name by chance, so the last occurrences count. Untraced text may
        extend into the next message, so the first occurrences count there.
        """
        names = [one.piece.text for one in found if one.piece.kind == "call"]
        words = [(one.start, one.stop) for one in found if one.piece.kind != "call"]
        result: Ranges = []
        for name in dict.fromkeys(names):
            pattern = re.compile("|".join([*map(re.escape, self._rules.ends), f"({_name_pattern(name)})"]))
            matches = (match for one in segments for match in pattern.finditer(self._text, one.start, one.stop))
            spans = [match.span() for match in matches if match[1]]
            spans = [(at, end) for at, end in spans if not any(low <= at < high for low, high in words)]
            result += spans[-names.count(name) :] if traced else spans[: names.count(name)]
        return result

    def _said_before(self, message: int, first: int) -> int:
        """Return the length of a tag before ``first`` that opens reasoning in the content (``<think>``); 0 if none."""
        for piece in self.pieces(message):
            if piece.field == "content" and piece.offset:
                content = self._messages[message]["content"]
                content = content if isinstance(content, str) else content[0]["text"]
                tag = content[: piece.offset].lstrip()
                return len(tag) if self._text.endswith(tag, 0, first) else 0
        return 0

    def _neighbours(self, message: int, low: int, start: int, stop: int) -> tuple[str, bool | None]:
        """Return ``Written.head`` and ``Written.answered`` of a message whose text is ``low`` to ``stop``."""
        roles = [one.get("role") for one in self._messages]
        first = message
        while first and roles[first - 1] == "assistant":
            first -= 1
        if not first:  # no question before it: a later one may be answered
            later = range(message + 1, len(roles))
            first = next((i for i in later if roles[i - 1 : i + 1] == ["user", "assistant"]), 0)
        head = self._text[low:start] if first == message else ""
        if first != message and (written := self._written.get(first)):
            words = [one.start for one in self._mine(first) if self._holes[one.number].kind != "call"]
            head = self._text[written[0].start : min(words, default=written[0].stop)]
        behind = [(one.start, one.message) for some in self._written.values() for one in some if one.start >= stop]
        return head, roles[min(behind)[1]] == "assistant" if behind else None


def _name_pattern(name: str) -> str:
    """Return a pattern for the name of a function; one that is not a placeholder may be part of another word."""
    return re.escape(name) if PLACEHOLDER.fullmatch(name) else rf"(?<!\w){re.escape(name)}(?!\w)"


# ---- the reasons of errors ----

_TOKEN = re.compile(r"zqm([0-9]{5})m|zqsaid-([a-z]+)-([0-9]+)-([0-9]+)zq")


def said_token(message: int, kind: str, call: int = 0) -> str:
    """Return the token for words of a message in the reason of an error."""
    return f"zqsaid-{kind}-{message}-{call}zq"


def reworded(
    error: SequenceError, number: Callable[[int], str], words: Callable[[str, int, int], str]
) -> SequenceError:
    """Return the error with the tokens in its reason replaced: messages by ``number``, words by ``words``."""
    reason = _TOKEN.sub(
        lambda match: number(int(match[1])) if match[1] else words(match[2], int(match[3]), int(match[4])), error.reason
    )
    return type(error)("conversation", None, reason)
