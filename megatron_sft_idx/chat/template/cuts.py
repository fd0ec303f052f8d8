"""Apply the options to a turn: remove reasoning and calls, with the tags around them, from its spans."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from megatron_sft_idx.chat.template.messages import EMPTY_THINKING, REASONING_FIELDS, THOUGHT, Ranges
from megatron_sft_idx.chat.template.scaffold import Rules

_CLOSING = re.compile(r"\s*(<[^<>\s]*>|\[/?[A-Z_]+(?: [A-Z_]+)*\])\s*")
_OPENING = re.compile(
    rf"(?:<(?:\w+:)?{THOUGHT}>|<\|(?:start|begin)_(?:of_)?{THOUGHT}\|>|\[THINK\]|<\|channel>thought)\s*\Z",
    re.IGNORECASE,
)

Found = Sequence[tuple[int, int, str]]
"""Where the utterances of a message stand: start, stop and kind."""


class Cuts:
    """Cuts one message of a rendered conversation.

    Args:
        rules: the rules for every conversation.
        text: the rendering.
        messages: the messages, as given to the template.
        message: position of the message.
        render: renders other ``messages`` and variables; returns None if the template rejects them.
    """

    def __init__(
        self,
        rules: Rules,
        text: str,
        messages: Sequence[dict[str, Any]],
        message: int,
        render: Callable[..., str | None],
    ) -> None:
        self._options, self._text, self._messages, self._message = rules.options, text, messages, message
        self._render = render

    def without(self, spans: Ranges, found: Found) -> Ranges:
        """Return the spans without reasoning and calls, if the options exclude these."""
        cuts: Ranges = []
        if not self._options.train_on_thinking:
            cuts += self._thinking(found, spans)
        if not self._options.train_on_tool_calls and any(kind == "call" for _, _, kind in found):
            cuts += self._calls(found, spans)
        return cut(spans, cuts)

    def _thinking(self, found: Found, spans: Ranges) -> Ranges:
        """Return the range of a message's reasoning with its tags, such as ``<think></think>``; [] if it has none."""
        start, stop = spans[0][0], spans[-1][1]
        said = _stretches(found, "content")
        thought = _stretches(found, "reasoning")
        if not thought:
            limit = min((low for low, _ in said), default=stop)
            empty = EMPTY_THINKING.match(self._text, start, limit)
            return [(start, empty.end())] if empty else []
        low, high = thought[0]
        called = [span for span in _stretches(found, "call") if span[1] <= low]
        if called:
            # Calls before the reasoning end with their own text; after it, only a tag opens the reasoning.
            opening = _OPENING.search(self._text[called[-1][1] : low])
            low = called[-1][1] + opening.start() if opening else low
        else:
            low = max((end for _, end in said if end <= low), default=start)
        limit = min((begin for begin, _ in said if begin >= high), default=stop)
        closing = _CLOSING.match(self._text, high, limit)
        if closing is None or self._opens_without_reasoning(start, closing[1]):
            return [(low, high)]
        return [(low, closing.end())]

    def _opens_without_reasoning(self, start: int, tag: str) -> bool:
        """Return whether the turn begins with this tag even without reasoning; the tag then closes nothing."""
        if tag.startswith(("</", "[/")) or "end" in tag.lower() or (tag.endswith("|>") and not tag.startswith("<|")):
            return False  # its spelling shows that it closes something
        at = self._message
        bare = {key: value for key, value in self._messages[at].items() if key not in REASONING_FIELDS}
        messages = [*self._messages[:at], bare, *self._messages[at + 1 :]]
        other = self._render(messages=messages, add_generation_prompt=False)
        return other is not None and other.startswith(self._text[:start]) and other[start:].lstrip().startswith(tag)

    def _calls(self, found: Found, spans: Ranges) -> Ranges:
        """Return the ranges of the calls of a message: between its words, or after them up to the end of the turn."""
        start, stop = spans[0][0], spans[-1][1]
        said = sorted(_stretches(found, "content") + _stretches(found, "reasoning"))
        after = said[-1][1] if said else start
        names = {self._text[low:high] for low, high, kind in found if kind == "call"}
        if said and not any(self._text.find(name, after, stop) >= 0 for name in names):
            # Calls before the answer: between the previous words and the answer.
            before = said[-2][1] if len(said) > 1 else start
            return [(self._past_thinking(before, said[-1][0]), said[-1][0])]
        return [(self._past_thinking(after, stop), stop)]

    def _past_thinking(self, start: int, stop: int) -> int:
        """Return the end of an empty block of reasoning, or of its closing tag, at ``start``; else ``start``."""
        closing = EMPTY_THINKING.match(self._text, start, stop)
        return closing.end() if closing else start


def _stretches(found: Found, wanted: str) -> Ranges:
    return sorted((start, stop) for start, stop, kind in found if kind == wanted)


def cut(spans: Ranges, cuts: Ranges) -> Ranges:
    """Return spans without the cuts."""
    for low, high in cuts:
        spans = [part for start, stop in spans for part in ((start, min(stop, low)), (max(start, high), stop))]
        spans = [(start, stop) for start, stop in spans if start < stop]
    return spans
