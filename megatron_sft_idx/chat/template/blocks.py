"""The generated part of each answer for a template with ``{% generation %}`` markers: the text inside them."""

from __future__ import annotations

from collections.abc import Callable

from megatron_sft_idx.chat.template.cuts import Cuts
from megatron_sft_idx.chat.template.messages import Ranges, unusable, utterances_of
from megatron_sft_idx.chat.template.scaffold import TAG, Rules
from megatron_sft_idx.chat.template.stand_in import StandIn
from megatron_sft_idx.chat.template.trace import Segment, Traced, own_segments
from megatron_sft_idx.chat.template.turn import Said, TurnFinder, numbered

_OUTSIDE = (
    "writes outside its generation markers",
    "fix the markers, or accept them as they are with --partial-markers keep",
)


class BlockFinder:
    """Finds the text inside generation markers for each assistant message.

    Args:
        rules: the rules for every conversation.
        traced: the rendering, and which message wrote which part.
        row: the stand-in.
        render: renders other ``messages`` and variables; returns None if the template rejects them.
    """

    def __init__(
        self,
        rules: Rules,
        traced: Traced,
        row: StandIn,
        render: Callable[..., str | None],
    ) -> None:
        self._rules, self._traced, self._messages, self._render = rules, traced, row.messages, render
        self._holes = row.holes
        self._text = traced.text
        self._finder = TurnFinder(rules, traced.text, row.messages, row, traced, render)
        self._written: dict[int, list[Segment]] = {}
        for segment in own_segments(traced, row.messages):
            self._written.setdefault(segment.message, []).append(segment)
        self._blocks: dict[int, Ranges] | None = None

    def said(self, message: int) -> Said:
        """Return the text inside the markers for one assistant message.

        Raises:
            SequenceError: the template or the markers omit some of the message's words, or the markers contain words of
                another speaker.
        """
        if self._blocks is None:
            self._require_answers_only()
            self._blocks = self._by_message()
        spans = self._blocks.get(message, [])
        notes: dict[str, int] = {}
        pieces = self._finder.pieces(message)
        segments = self._written.get(message) or [Segment(0, len(self._text), 0, message)]
        found = self._finder.standing(pieces, segments)
        self._finder.require_words(message, pieces, segments, found, notes)
        blocks = [Segment(start, stop, 0, message) for start, stop in spans]
        inside = self._finder.standing(pieces, blocks)
        if self._rules.options.partial_markers == "error":
            standing = [one.piece for one in found]
            self._finder.require_words(
                message, [piece for piece in pieces if piece in standing], blocks, inside, notes, _OUTSIDE
            )
        said = max([one.stop for one in inside], default=0)
        if inside and not self._text[said : spans[-1][1]].strip():
            notes["no_end_of_turn"] = 1
        trained = spans
        if spans and not self._rules.keeps_all:
            cuts = Cuts(self._rules, self._text, self._messages, message, self._render)
            trained = cuts.without(spans, self._finder.found_for_cuts(message, found))
        return Said(spans, trained, notes)

    def _require_answers_only(self) -> None:
        """Reject markers around words of any role except the assistant."""
        for one in self._finder.placed:
            speaker = self._holes[one.number].message
            role = self._messages[speaker].get("role")
            if role != "assistant" and any(
                start < one.stop and one.start < stop for start, stop in self._traced.generated
            ):
                raise unusable(
                    f"{self._rules.name}: the generation markers enclose text of message {numbered(speaker)} ({role});"
                    " fix the markers, or train on exactly the enclosed text with --train-on markers"
                )

    def _by_message(self) -> dict[int, Ranges]:
        """Return the template's generation blocks by message.

        A block outside every loop belongs to the next answer that was not written by a loop and whose words it
        contains. If there is none, it may be an end of turn written after the loop, and belongs to the message before
        it. A block without words, written by a question or a result, may also be an end of turn, and belongs to the
        answer before it.

        Raises:
            SequenceError: a block outside every loop belongs to no message.
        """
        spans: dict[int, Ranges] = {}
        segments = self._traced.segments
        at, message = 0, None
        for start, stop in self._traced.generated:
            while at < len(segments) and segments[at].stop <= start:
                at += 1
            if at < len(segments) and segments[at].start <= start:
                message = segments[at].message
                # An end of turn has no words except for its tags; a tag begins with its bracket.
                if not self._text[start : start + 1].isalnum() and not any(
                    map(str.isalnum, TAG.sub("", self._text[start:stop]))
                ):
                    before = range(message, -1, -1)
                    message = next((i for i in before if self._messages[i].get("role") == "assistant"), message)
            else:
                behind = range(0 if message is None else message + 1, len(self._messages))
                message = next((i for i in behind if self._stands_alone(i, start, stop)), message)
            if message is None:
                raise unusable(
                    f"{self._rules.name}: a generation block is around or outside the loop over the messages, so it"
                    " belongs to no message; put the markers around the assistant's text inside the loop, or train on"
                    " exactly the enclosed text with --train-on markers"
                )
            spans.setdefault(message, []).append((start, stop))
        return spans

    def _stands_alone(self, message: int, start: int, stop: int) -> bool:
        """Return whether the text from ``start`` to ``stop`` contains the words of an answer not written by a loop."""
        pieces = utterances_of(self._messages[message])
        answers = self._messages[message].get("role") == "assistant" and message not in self._written
        return answers and bool(pieces) and all(self._text.find(one.text, start, stop) >= 0 for one in pieces)
