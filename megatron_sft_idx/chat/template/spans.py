"""Which characters of a rendered conversation the model must learn.

For each assistant message that is trained on, these are the characters that the template wrote for it, from the end of
the generation prompt up to and including the end of turn. Whitespace after that is never generated, so never trained
on. No character of the message's own words is ever taken for the prompt's, even where they read the same.

They are found in two ways, which must agree. Tracing tells which message wrote which text. Renderings of beginnings of
the conversation tell where a turn starts and stops (``scaffold``), and a rendering with marks in the data tells whose
words lie there (``words.locate``). Renderings are slow, so the edges that they give are remembered for all turns of one
kind: with messages of the same shapes around them, and the same template text at their edges. Where the generation
prompt may differ within one kind, it is rendered for every turn, and turns with other prompts are of other kinds. Where
tracing cannot follow a template, renderings alone decide, in every row.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain, repeat, takewhile
from typing import Any

from markupsafe import escape

from megatron_sft_idx.chat.template.scaffold import MAX_REMEMBERED, TAG, EdgeFinder, LearntEdges, Rules, Turn, Written
from megatron_sft_idx.chat.template.trace import Segment, Traced, own_segments
from megatron_sft_idx.chat.template.words import (
    REASONING_FIELDS,
    THINKING_TAG,
    DataMark,
    Utterance,
    content_of,
    end_piece,
    locate,
    only_words,
    short,
    squeezed,
    unusable,
    utterances_of,
    words_called_with,
)
from megatron_sft_idx.errors import SequenceError

Ranges = list[tuple[int, int]]

_CLOSING = re.compile(r"\s*(<[^<>\s]*>|\[/?[A-Z_]+(?: [A-Z_]+)*\])\s*")
_THOUGHT = r"(?:think|thinking|thought|reasoning)"
# In the spellings of <think>, <seed:think>, [THINK], <|START_THINKING|>, <|begin_of_thought|> and <|channel>thought.
_EMPTY_THINKING = re.compile(
    rf"\s*(?:<(?:\w+:)?{_THOUGHT}>\s*)?</(?:\w+:)?{_THOUGHT}>\s*"
    rf"|\s*(?:<\|(?:start|begin)_(?:of_)?{_THOUGHT}\|>\s*)?<\|end_(?:of_)?{_THOUGHT}\|>\s*"
    r"|\s*(?:\[THINK\]\s*)?\[/THINK\]\s*|\s*(?:<\|channel>thought\s*)?<channel\|>\s*",
    re.IGNORECASE,
)
_TELLING = 8  # characters: words so long are taken for a message's, since templates hardly write the same by themselves
_LEAVES = ("leaves out", "use a template that keeps them, or give the message weight 0")
_OUTSIDE = (
    "writes outside its generation markers",
    "mend the markers, or take them as they stand: --partial-markers keep",
)


class SpanFinder:
    """Finds the trained spans of one rendered conversation.

    Args:
        rules: what holds for every conversation.
        text: the rendered conversation.
        messages: the messages as the template saw them.
        tools: schemas of the functions that can be called.
        traced: which message wrote what; None where the template cannot be traced.
        render: renders other ``messages`` and variables; returns None where the template refuses them.
        variables: a key that differs where other template variables may change what the template writes.
        sure_of_arguments: whether the template is known to write the arguments of calls.

    Attributes:
        notes: counts for the summary by name, such as how often the template left out reasoning.
    """

    def __init__(
        self,
        rules: Rules,
        text: str,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        traced: Traced | None,
        render: Callable[..., str | None],
        variables: str,
        sure_of_arguments: bool,
    ) -> None:
        self.notes: defaultdict[str, int] = defaultdict(int)
        self._rules, self._text, self._messages, self._traced = rules, text, messages, traced
        self._tools, self._render, self._variables = tools, render, variables
        self._sure_of_arguments = sure_of_arguments
        self._keeps_all = rules.options.train_on_thinking and rules.options.train_on_tool_calls
        self._written: dict[int, list[Segment]] = {}
        for segment in () if traced is None else own_segments(traced, messages):
            self._written.setdefault(segment.message, []).append(segment)

    @cached_property
    def _shapes(self) -> list[int]:
        """The shapes of the messages, between two -1 for no message: entry i + 1 is the shape of message i."""
        return [-1, *map(self._rules.shape, self._messages, chain([True], repeat(False))), -1]

    @cached_property
    def _shape_set(self) -> frozenset[int]:
        """Which shapes the conversation has, since a prompt may depend on a system message far before it."""
        return frozenset(self._shapes)

    @cached_property
    def _last_question(self) -> int:
        """The position of the last message of a user; -1 if there is none."""
        return max((i for i, one in enumerate(self._messages) if one.get("role") == "user"), default=-1)

    @cached_property
    def _edges(self) -> EdgeFinder:
        return EdgeFinder(self._rules, self._text, self._messages, self._render)

    @cached_property
    def _places(self) -> list[DataMark] | None:
        """Where the strings of the messages lie in the text, by a rendering with marks; None where marks fail."""
        return locate(self._messages, self._tools, self._text, self._render)

    def turn(self, message: int) -> tuple[Ranges, Ranges]:
        """The characters that the model generates for one assistant message, and those of them that are trained on.

        Raises:
            SequenceError: the template leaves out some of the message's words, or nothing tells where they are.
        """
        pieces = utterances_of(self._messages[message])
        segments = self._own(message, pieces)
        traced = bool(segments)
        if pieces and not traced:
            segments = self._placed(message, pieces)
        if not segments:
            if any(piece.kind != "reasoning" for piece in pieces):
                raise self._nowhere(message)
            if pieces:
                self._count_or_refuse_dropped(message)
            elif not self._written:
                raise unusable(
                    f"assistant message {message + 1} is empty, and nothing tells what the chat template"
                    f" {self._rules.name} wrote for it; leave it out, or give it weight 0"
                )
            return [], []
        found = self._standing(message, pieces, segments)
        if len(found) < len(pieces) or (pieces and pieces[-1].kind == "call"):
            self._require_words(message, pieces, segments, found)
        start, stop = self._edges_of(message, segments, found, traced)
        headers = self._headers_inside(segments[0].start, start, stop, found)
        if len(segments) == 1 and self._keeps_all and start < stop and not headers:
            spans = [(start, stop)]
            return spans, spans
        spans = [(max(start, one.start), one.stop) for one in segments[:-1] if one.stop > start]
        spans += [(begin, stop)] if (begin := max(start, segments[-1].start)) < stop else []
        spans = _cut(spans, headers)
        return spans, self._without_cuts(message, found, spans) if spans else []

    def _headers_inside(self, low: int, start: int, stop: int, found: list[tuple[int, Utterance]]) -> Ranges:
        """The headers inside a message that the template wrote as two turns; the model is fed these headers too.

        They stand behind an end of sequence. Behind any other end the model goes on and writes the header itself.
        """
        text, eos, headers = self._text, self._rules.eos, []
        header = text[low:start].strip()
        at = text.find(header, start, stop) if header and eos else -1
        while at >= 0:
            said = len(text[:at].rstrip())
            of_data = any(first <= at < first + len(piece.text) for first, piece in found)
            if text.endswith(eos, start, said) and not of_data:
                headers.append((said, at + len(header)))
            at = text.find(header, at + len(header), stop)
        return headers

    def marked(self, message: int, spans: Ranges) -> tuple[Ranges, Ranges]:
        """As ``turn``, for a template with generation markers: the message's blocks, ``spans``, are taken as they are.

        Raises:
            SequenceError: the template leaves out some of the message's words, or the markers do.
        """
        segments = self._written.get(message) or [Segment(0, len(self._text), 0, message)]
        if self._is_all_marked(only_words(self._messages[message]), segments[0], spans):
            return spans, spans
        pieces = utterances_of(self._messages[message])
        found = self._standing(message, pieces, segments)
        calls = bool(pieces) and pieces[-1].kind == "call"
        if len(found) < len(pieces) or calls:
            self._require_words(message, pieces, segments, found)
        blocks = [Segment(start, stop, 0, message) for start, stop in spans]
        inside = self._standing(message, pieces, blocks)
        marked = [piece for _, piece in inside]
        if self._rules.options.partial_markers == "error":
            if calls:
                self._require_calls(message, pieces, blocks, _OUTSIDE)
            for _, piece in found:
                if piece.kind != "call" and piece not in marked:
                    raise self._refused(message, f"the {piece.kind} {short(piece.text)}", _OUTSIDE)
        said = max([at + len(piece.text) for at, piece in inside], default=0)
        if inside and not self._text[said : spans[-1][1]].strip():
            self.notes["no_end_of_turn"] += 1
        return spans, self._without_cuts(message, found, spans) if spans else []

    def _is_all_marked(self, words: str | None, segment: Segment, spans: Ranges) -> bool:
        """Whether one block holds just a message's words and an end of turn, as most do; then no search is needed."""
        if words is None or not self._keeps_all or len(spans) != 1:
            return False
        said = (start := spans[0][0]) + len(words)
        stands = segment.start <= start and said <= segment.stop and self._text.startswith(words, start)
        return stands and said < spans[0][1] and not self._text[said : spans[0][1]].isspace()

    def require_words(self, messages: Sequence[int]) -> None:
        """Refuse the row unless all that these assistant messages say stands in the text, no matter where."""
        for message in messages:
            pieces, segments = utterances_of(self._messages[message]), [Segment(0, len(self._text), 0, message)]
            self._require_words(message, pieces, segments, self._standing(message, pieces, segments))

    def blocks(self) -> dict[int, Ranges]:
        """The template's generation blocks by message.

        A block outside every loop belongs to the next answer that no loop wrote and whose words it holds. If there is
        none, it may be an end of turn written after the loop, and belongs to the message before it. A block without
        words that a question or a result wrote may be an end of turn too, and belongs to the answer before it.

        Raises:
            SequenceError: a block outside every loop belongs to no message.
        """
        assert self._traced is not None  # markers are found by tracing
        spans: dict[int, Ranges] = {}
        segments = self._traced.segments
        at, message = 0, None
        for start, stop in self._traced.generated:
            while at < len(segments) and segments[at].stop <= start:
                at += 1
            if at < len(segments) and segments[at].start <= start:
                message = segments[at].message
                # An end of turn has no words, but for its tags; a tag begins with its bracket.
                if not self._text[start : start + 1].isalnum() and not any(
                    map(str.isalnum, TAG.sub("", self._text[start:stop]))
                ):
                    before = range(message, -1, -1)
                    message = next((i for i in before if self._messages[i].get("role") == "assistant"), message)
            else:
                behind = range(0 if message is None else message + 1, len(self._messages))
                message = next((i for i in behind if self._stands_alone(i, start, stop)), message)
            if message is None:
                raise unusable(f"{self._rules.name}: a generation block stands outside every loop over the messages")
            spans.setdefault(message, []).append((start, stop))
        return spans

    def _stands_alone(self, message: int, start: int, stop: int) -> bool:
        """Whether the text from ``start`` to ``stop`` holds the words of an answer that no loop wrote."""
        pieces = utterances_of(self._messages[message])
        answers = self._messages[message].get("role") == "assistant" and message not in self._written
        return answers and bool(pieces) and all(self._text.find(one.text, start, stop) >= 0 for one in pieces)

    # Where a message's text is

    def _own(self, message: int, pieces: list[Utterance]) -> list[Segment]:
        """The segments that the message wrote in one iteration of a loop: the one that holds most of its words."""
        written = self._written.get(message, [])
        if len(written) == 1:
            return written if self._text[written[0].start : written[0].stop].strip() else []
        if written:
            frames: dict[int, list[Segment]] = {}
            for segment in written:
                frames.setdefault(segment.frame, []).append(segment)
            order = [own for own in frames.values() if any(self._text[one.start : one.stop].strip() for one in own)]
            if len(order) > 1:
                order.sort(key=lambda own: sum(self._find(piece.text, own) >= 0 for piece in pieces))
            written = order[-1] if order else []
        # Segments of whitespace between those of other messages hold no words.
        return [one for one in written if self._text[one.start : one.stop].strip()]

    def _placed(self, message: int, pieces: list[Utterance]) -> list[Segment]:
        """By marks, the segment from the last string before a message's own strings to the first behind; or []."""
        places = self._places
        if places is None:
            return []
        mine = [place.at for place in places if place.message == message]
        low, high = 0, len(self._text)
        for place in places:
            if place.message != message:
                if place.at <= min(mine) if mine else place.message < message:
                    low = max(low, place.at)
                elif place.at >= max(mine) if mine else place.message > message:
                    high = min(high, place.at)
        inside = mine or any(self._text.find(piece.text, low, high) >= 0 for piece in pieces)
        return [Segment(low, high, 0, message)] if inside else []

    def _nowhere(self, message: int) -> SequenceError:
        if self._places is not None or (self._traced is not None and self._traced.segments):
            return unusable(f"the chat template {self._rules.name} leaves out assistant message {message + 1}")
        return unusable(
            f"nothing tells what of the text of the chat template {self._rules.name} assistant message {message + 1}"
            " wrote: it looks at text that it captured, or writes messages outside its loops over them, and marks in"
            " their words change the rest; put {% generation %} markers around what the assistant says, or train on all"
            " tokens"
        )

    def _find(self, words: str, segments: list[Segment]) -> int:
        for segment in segments:
            at = self._text.find(words, segment.start, segment.stop)
            if at >= 0:
                return at
        return -1

    # Whether a message's words are there

    def _standing(self, message: int, pieces: list[Utterance], segments: list[Segment]) -> list[tuple[int, Utterance]]:
        """The utterances that stand in these segments letter for letter, each with its first position.

        Reasoning is left out if it is found by chance, or only within an answer that repeats it.
        """
        found = []
        for piece in pieces:
            at = self._find(piece.text, segments)
            if at >= 0 and not (piece.kind == "reasoning" and self._is_by_chance(message, piece)):
                found.append((at, piece))
        if len(found) > 1 and found[0][1].kind == "reasoning" and found[1][1].kind == "content":
            (at, reasoning), (first, answer) = found[:2]
            end = first + len(answer.text)
            behind = [one._replace(start=max(one.start, end)) for one in segments]
            if first <= at <= end - len(reasoning.text) and self._find(reasoning.text, behind) < 0:
                del found[0]
        return found

    def _is_by_chance(self, message: int, piece: Utterance) -> bool:
        """Whether reasoning is so short that its letters may stand anywhere, and the template does not write it."""
        return piece.kind == "reasoning" and len(piece.text) < 2 * _TELLING and self._is_unwritten(message, piece)

    def _is_unwritten(self, message: int, piece: Utterance) -> bool:
        """Whether marks tell that the template does not write an utterance, even if its letters stand somewhere."""
        if not re.search(r"\w", piece.text) or self._places is None:
            return False
        number = utterances_of(self._messages[message]).index(piece)
        return not any((place.message, place.utterance) == (message, number) for place in self._places)

    def _require_words(
        self, message: int, pieces: list[Utterance], segments: list[Segment], found: list[tuple[int, Utterance]]
    ) -> None:
        """Refuse the row where an utterance is missing, in any spelling: escaped, or with other whitespace."""
        if len(found) < len(pieces):
            whole = "".join(self._text[one.start : one.stop] for one in segments)
            standing = {piece for _, piece in found}
            for piece in pieces:
                if piece in standing:
                    continue
                text = whole
                for other in standing if piece.kind == "reasoning" else ():
                    text = text.replace(other.text, "\n", 1)  # an answer that repeats the reasoning is not it
                escaped = json.dumps(piece.text, ensure_ascii=False)[1:-1]
                spelt = escaped in text or escape(piece.text) in text or squeezed(piece.text) in squeezed(text)
                if spelt and not self._is_by_chance(message, piece):
                    continue
                if piece.kind == "reasoning":
                    self._count_or_refuse_dropped(message)
                    continue
                what = f"the call of {piece.text}" if piece.kind == "call" else f"the words {short(piece.text)}"
                raise self._refused(message, what)
        if pieces and pieces[-1].kind == "call":  # which come last
            self._require_calls(message, pieces, segments)

    def _count_or_refuse_dropped(self, message: int) -> None:
        """The template leaves out the message's reasoning: count that, if the options say to, or refuse the row."""
        options = self._rules.options
        if options.turns == "whole" or not options.train_on_thinking:
            self.notes["reasoning_dropped"] += 1
            return
        split = "" if options.turns == "split" else "--turns split makes a sequence of each turn, as the model sees it;"
        raise unusable(
            f"the chat template {self._rules.name} leaves out the reasoning of assistant message {message + 1};"
            f" {split} --turns whole trains without it and counts it; --no-train-on-thinking trains on no reasoning"
        )

    def _require_calls(
        self, message: int, pieces: list[Utterance], segments: list[Segment], how: tuple[str, str] = _LEAVES
    ) -> None:
        """Refuse the row unless each call's name stands in the segments as often as it is called.

        Names in other words of the message do not count: an answer that speaks of a function does not call it.
        """
        names = [piece.text for piece in pieces if piece.kind == "call"]
        others = [piece.text for piece in pieces if piece.kind != "call"] + [*self._rules.ends]
        for name in dict.fromkeys(names):
            text = "".join([self._text[one.start : one.stop] for one in segments])
            for words in [words for words in others if name in words]:
                if name != words:
                    text = text.replace(words, "\n")
            found = text.count(name if name.isidentifier() else json.dumps(name, ensure_ascii=False)[1:-1])
            if found < names.count(name):
                found = max(found, squeezed(text).count(squeezed(name)))
            if found < names.count(name):
                what = f"{names.count(name) - found} of {names.count(name)} calls of {name}"
                raise self._refused(message, what, how)
        if names and not self._sure_of_arguments:
            text = "".join(self._text[one.start : one.stop] for one in segments)
            lost = [word for word in words_called_with(self._messages[message]) if word not in text]
            if lost:
                raise self._refused(message, f"{short(lost[0])} of the arguments of the calls", how)

    def _refused(self, message: int, what: str, how: tuple[str, str] = _LEAVES) -> SequenceError:
        verb, remedy = how
        return unusable(
            f"the chat template {self._rules.name} {verb} {what} of assistant message {message + 1}; {remedy}"
        )

    # The edges of a turn

    def _edges_of(
        self, message: int, segments: list[Segment], found: list[tuple[int, Utterance]], traced: bool
    ) -> tuple[int, int]:
        """Where the text that a message generated starts and stops: as remembered for its kind of turn, or learnt."""
        text, known = self._text, self._rules.learnt_edges
        low = segments[0][0]
        begin, end, _, _ = segments[-1]
        high = begin + len(text[begin:end].rstrip())
        first, said = high, low
        for at, piece in found:
            first = min(first, at)
            if (behind := at + len(piece[1])) > said:
                said = behind
        shapes = self._shapes
        around = (shapes[message], shapes[message + 1], shapes[message + 2])  # of the message and its neighbours
        before = text[max(0, low - 64) : low].rstrip()  # only a tag counts, as data there would be a new kind each time
        tag = end_piece(before) if before[-1:] in (">", "]") else ""
        place = (message > self._last_question, traced, len(segments), high == end, tag)
        # Arguments of calls, and text in several segments, cannot be told from the template's own text.
        opaque = traced and (len(segments) > 1 or (bool(found) and found[-1][1].kind == "call"))
        tail = end_piece(text[max(said, begin, high - 64) : high]) if opaque else self._beside(found, said, high)
        turn = Turn(message, low, first, said, high)
        fed = self._edges.fed(turn) if self._rules.prompt_varies else 0
        key = (self._variables, self._shape_set, around, place, text[low:first], tail, fed)
        edge = known.get(key)
        if (
            edge is None
            or not text.startswith(edge.head, low)
            or not text.startswith(edge.late, end)
            or not text.endswith(edge.dropped, said, high)
            or (opaque and any(self._find(words, segments) >= 0 for words in self._around(message)))
        ):
            start, stop, ended = self._learn_edges(message, segments, found, traced)
            late = text[end:stop] if stop > high else ""
            if len(known) >= MAX_REMEMBERED:
                known.clear()
            known[key] = LearntEdges(text[low:start], text[stop:high], late, ended)
        else:
            start, ended = low + len(edge.head), edge.ended
            stop = end + len(edge.late) if edge.late else high - len(edge.dropped)
        if not ended:
            self.notes["no_end_of_turn"] += 1
        return start, stop

    def _beside(self, found: list[tuple[int, Utterance]], said: int, high: int) -> str:
        """The template's own text between the utterances of a turn and behind them."""
        if len(found) < 2:
            return self._text[said:high]
        stretches = sorted((at, at + len(piece.text)) for at, piece in found)
        ends = [*(at for at, _ in stretches[1:]), high]
        return "\n".join(self._text[stop:at] for (_, stop), at in zip(stretches, ends, strict=True))

    def _around(self, message: int) -> list[str]:
        """Contents of the message before and of those up to the next answer, if too long to be the template's own."""
        others = list(self._messages[max(message - 1, 0) : message])
        others += takewhile(lambda one: one.get("role") != "assistant", self._messages[message + 1 :])
        return [words for words in map(content_of, others) if len(words) >= _TELLING]

    def _learn_edges(
        self, message: int, segments: list[Segment], found: list[tuple[int, Utterance]], traced: bool
    ) -> tuple[int, int, bool]:
        """Find, by renderings, where a turn of a new kind starts and stops, and whether an end of turn is in it."""
        text, rules, last = self._text, self._rules, segments[-1]
        low, high = segments[0].start, last.start + len(text[last.start : last.stop].rstrip())
        places, pieces = self._places or [], utterances_of(self._messages[message])
        mine = [
            place
            for place in places
            if place.message == message and any(one.start <= place.at <= one.stop for one in segments)
        ]
        for piece in pieces:  # letters that stand there by chance are not the message's words
            if piece.kind == "content" and places and self._is_unwritten(message, piece):
                raise self._refused(message, f"the words {short(piece.text)}")
        found = [(at, piece) for at, piece in found if piece.kind == "call" or not self._is_unwritten(message, piece)]
        words = [place.at for place in mine if not place.stops and place.utterance >= 0]
        words = words or [at for at, piece in found if piece.kind != "call"]
        # The name of a function may also stand in a header, so a call counts from the start of its arguments.
        first = min([*words, *(place.at for place in mine if not place.stops)], default=last.stop)
        ends = [place.at for place in mine if place.stops]
        said = max(ends or [at + len(piece.text) for at, piece in found], default=low)
        for at, end in self._names_called(segments, found, traced):
            # Arguments without words have no marks, so a call before the words is found by its name.
            first = at if first in words and at < first else first
            said = max(said, end)
        own = first - (self._said_before(message, first) if first in words else 0)
        reasons = any(piece.kind == "reasoning" and piece.field != "content" for piece in pieces)
        turn = Turn(message, low, first, said, high)
        start = min(first, self._edges.start(turn, own if first in words else None, reasons, traced))
        turn = turn._replace(said=(said := max(said, start)))
        if traced:
            written = Written(last.stop, *self._neighbours(message, low, start, last.stop))
            stop = self._edges.stop_of_traced(turn, written)
        elif self._edges.always_prompts(turn._replace(low=start)):
            raise unusable(
                f"the chat template {rules.name} writes a header behind all messages and cannot be traced, so nothing"
                f" tells where assistant message {message + 1} ends; put {{% generation %}} markers around what it says"
            )
        else:
            stop = self._edges.stop_of_untraced(turn)
        stop = max(said, stop)
        closed = text[:stop].removesuffix(rules.bos).rstrip() if rules.bos else text[:stop]
        if len(closed) < stop and rules.eos and closed.endswith(rules.eos, said):
            stop = len(closed)  # the beginning of the next sequence, which follows the end of this one
        self._refuse_mixture(message, segments, start, stop)
        return start, stop, said != stop

    def _names_called(self, segments: list[Segment], found: list[tuple[int, Utterance]], traced: bool) -> Ranges:
        """Where a message names the functions that it calls, each as often as it calls it.

        The header before the calls may hold a name by chance, so the last places count. Text that was not traced may go
        on into the next message, so the first places count there.
        """
        names = [piece.text for _, piece in found if piece.kind == "call"]
        words = [(at, at + len(piece.text)) for at, piece in found if piece.kind != "call"]
        result: Ranges = []
        for name in dict.fromkeys(names):
            pattern = re.compile("|".join([*map(re.escape, self._rules.ends), rf"(?<!\w)({re.escape(name)})(?!\w)"]))
            matches = (match for one in segments for match in pattern.finditer(self._text, one.start, one.stop))
            spans = [match.span() for match in matches if match[1]]
            spans = [(at, end) for at, end in spans if not any(low <= at < high for low, high in words)]
            result += spans[-names.count(name) :] if traced else spans[: names.count(name)]
        return result

    def _said_before(self, message: int, first: int) -> int:
        """The length of a tag before ``first`` that opens reasoning in the content, such as ``<think>``; 0 if none."""
        for piece in utterances_of(self._messages[message]):
            if piece.field == "content" and piece.offset:
                content = self._messages[message]["content"]
                content = content if isinstance(content, str) else content[0]["text"]
                tag = content[: piece.offset].lstrip()
                return len(tag) if self._text.endswith(tag, 0, first) else 0
        return 0

    def _neighbours(self, message: int, low: int, start: int, stop: int) -> tuple[str, bool | None]:
        """``Written.head`` and ``Written.answered`` of a message whose text is ``low`` to ``stop``."""
        roles = [one.get("role") for one in self._messages]
        first = message
        while first and roles[first - 1] == "assistant":
            first -= 1
        if not first:  # no question before it: one behind it may be answered
            later = range(message + 1, len(roles))
            first = next((i for i in later if roles[i - 1 : i + 1] == ["user", "assistant"]), 0)
        head = self._text[low:start] if first == message else ""
        if first != message and (written := self._written.get(first)):
            words = [place.at for place in self._places or () if place.message == first and place.utterance >= 0]
            words = words or [
                at for piece in utterances_of(self._messages[first]) if (at := self._find(piece.text, written)) >= 0
            ]
            head = self._text[written[0].start : min(words, default=written[0].stop)]
        behind = [(one.start, one.message) for some in self._written.values() for one in some if one.start >= stop]
        return head, roles[min(behind)[1]] == "assistant" if behind else None

    def _refuse_mixture(self, message: int, segments: list[Segment], start: int, stop: int) -> None:
        """Refuse the row where words of other messages lie inside the turn, or words of its own outside."""
        spans = [
            (max(start, one.start), min(stop, one.stop) if one.stop < segments[-1].stop else stop) for one in segments
        ]
        places = self._places
        if places is None:  # marks change what the template does
            self._refuse_mixture_by_words(message, spans)
        own: dict[tuple[int, bool], bool] = {}
        for place in places or ():
            inside = any(a <= place.at <= b and place.at != (a if place.stops else b) for a, b in spans)
            if place.message == message:
                key = (place.string, place.stops)
                own[key] = own.get(key, False) or inside
            elif inside:
                raise unusable(self._mixed(message, f"words of message {place.message + 1} in", place.at))
        for (string, _), inside in own.items():
            if not inside:
                at = next(place.at for place in self._places or () if place.string == string)
                raise unusable(self._mixed(message, "words outside", at))

    def _refuse_mixture_by_words(self, message: int, spans: Ranges) -> None:
        """As ``_refuse_mixture``, without marks: only a long content of another message is found inside the turn."""
        text = "\n".join(self._text[start:stop] for start, stop in spans)
        own = [piece.text for piece in utterances_of(self._messages[message]) if piece.kind != "call"]
        for words in sorted([*own, *words_called_with(self._messages[message])], key=len, reverse=True):
            text = text.replace(words, "\n", 1)
        for index, other in enumerate(self._messages):
            words = content_of(other) if index != message else ""
            if len(words) >= _TELLING and words in text:
                raise unusable(self._mixed(message, f"words of message {index + 1} in", self._text.find(words)))

    def _mixed(self, message: int, what: str, at: int) -> str:
        return (
            f"the chat template {self._rules.name} writes {what} what it writes for assistant message {message + 1}"
            f" ({short(self._text[max(0, at - 20) : at + 20])}): put {{% generation %}} markers around what the"
            " assistant says, or train on all tokens"
        )

    # What the options leave of a turn

    def _without_cuts(self, message: int, found: list[tuple[int, Utterance]], spans: Ranges) -> Ranges:
        """The spans of a message without reasoning and calls, where the options do not train on these."""
        if self._keeps_all:
            return spans
        options = self._rules.options
        cuts: Ranges = []
        if not options.train_on_thinking:
            cuts += self._thinking(message, found, spans)
            if any(piece.kind == "content" and THINKING_TAG.search(piece.text) for _, piece in found):
                self.notes["thinking_tags_kept"] += 1
        if not options.train_on_tool_calls and any(piece.kind == "call" for _, piece in found):
            cuts += self._calls(message, found, spans)
        return _cut(spans, cuts)

    def _stretches(self, message: int, found: list[tuple[int, Utterance]], spans: Ranges, kind: str) -> Ranges:
        """Where the utterances of one kind stand: (start, stop), ascending.

        An utterance whose words occur twice in the message's text is looked up by its mark. Where marks fail, the first
        occurrence is taken and counted in ``notes``.
        """
        result: Ranges = []
        pieces = utterances_of(self._messages[message])
        low, high = spans[0][0], spans[-1][1]
        for first, piece in found:
            if piece.kind != kind:
                continue
            at = first
            repeated = self._text.find(piece.text, low) != at or self._text.find(piece.text, at + 1, high) >= 0
            if repeated:
                wanted = (message, pieces.index(piece), False)
                marked = [
                    place.at
                    for place in self._places or ()
                    if (place.message, place.utterance, place.stops) == wanted and low <= place.at < high
                ]
                if marked:
                    at = marked[0]
                elif kind == "reasoning" and self._is_unwritten(message, piece):
                    self._count_or_refuse_dropped(message)  # the words stand there by chance
                    continue
                else:
                    self.notes["words_placed_by_search"] += 1
            result.append((at, at + len(piece.text)))
        return sorted(result)

    def _thinking(self, message: int, found: list[tuple[int, Utterance]], spans: Ranges) -> Ranges:
        """The range of a message's reasoning and the tags around it, such as ``<think></think>``; [] without either."""
        start, stop = spans[0][0], spans[-1][1]
        said = self._stretches(message, found, spans, "content")
        thought = self._stretches(message, found, spans, "reasoning")
        if not thought:
            limit = min((low for low, _ in said), default=stop)
            empty = _EMPTY_THINKING.match(self._text, start, limit)
            return [(start, empty.end())] if empty else []
        low, high = thought[0]
        low = max((end for _, end in said if end <= low), default=start)
        limit = min((begin for begin, _ in said if begin >= high), default=stop)
        closing = _CLOSING.match(self._text, high, limit)
        if closing is None or self._opens_without_reasoning(message, start, closing[1]):
            return [(low, high)]
        return [(low, closing.end())]

    def _opens_without_reasoning(self, message: int, start: int, tag: str) -> bool:
        """Whether the turn begins with the tag behind the reasoning even without reasoning: it then closes nothing."""
        if tag.startswith(("</", "[/")) or "end" in tag.lower() or (tag.endswith("|>") and not tag.startswith("<|")):
            return False  # it says itself that it closes something
        bare = {key: value for key, value in self._messages[message].items() if key not in REASONING_FIELDS}
        messages = [*self._messages[:message], bare, *self._messages[message + 1 :]]
        other = self._render(messages=messages, add_generation_prompt=False)
        return other is not None and other.startswith(self._text[:start]) and other[start:].lstrip().startswith(tag)

    def _calls(self, message: int, found: list[tuple[int, Utterance]], spans: Ranges) -> Ranges:
        """Where the calls of a message stand: between its words, or behind them up to the end of the turn."""
        start, stop = spans[0][0], spans[-1][1]
        said = sorted(
            self._stretches(message, found, spans, "content") + self._stretches(message, found, spans, "reasoning")
        )
        names = [piece.text for _, piece in found if piece.kind == "call"]
        after = said[-1][1] if said else start
        if said and not any(self._text.find(name, after, stop) >= 0 for name in names):
            # Calls before the answer: between the words before them and the answer.
            before = said[-2][1] if len(said) > 1 else start
            return [(self._past_thinking(before, said[-1][0]), said[-1][0])]
        return [(self._past_thinking(after, stop), stop)]

    def _past_thinking(self, start: int, stop: int) -> int:
        """The end of an empty block of reasoning, or of its closing tag, at ``start``; else ``start``."""
        closing = _EMPTY_THINKING.match(self._text, start, stop)
        return closing.end() if closing else start


def _cut(spans: Ranges, cuts: Ranges) -> Ranges:
    """What the cuts leave of spans."""
    for low, high in cuts:
        spans = [part for start, stop in spans for part in ((start, min(stop, low)), (max(start, high), stop))]
        spans = [(start, stop) for start, stop in spans if start < stop]
    return spans
