"""The content of messages.

``utterances_of`` lists the utterances of an assistant message in the order in which templates write them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from megatron_sft_idx.errors import SequenceError

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry reasoning; the first one that is set counts."""

_CLOSED = re.compile(
    r"\s*(?:<(think|thinking|thought|reasoning)>|\[THINK\])?(.*?)(?:</(think|thinking|thought|reasoning)>|\[/THINK\])",
    re.DOTALL,
)
# Texts that reasoning without an opening tag does not contain: an opening tag, or a control token of a quoted
# conversation.
_NO_REASONING = re.compile(r"<[|\uff5c]|\[/?INST\]|<(?:think|thinking|thought|reasoning)>|\[THINK\]")
THINKING_TAG = re.compile(r"</?(?:think|thinking|thought|reasoning)>|\[/?THINK\]")
THOUGHT = r"(?:think|thinking|thought|reasoning)"
# The spellings of <think>, <seed:think>, [THINK], <|START_THINKING|>, <|begin_of_thought|> and <|channel>thought.
EMPTY_THINKING = re.compile(
    rf"\s*(?:<(?:\w+:)?{THOUGHT}>\s*)?</(?:\w+:)?{THOUGHT}>\s*"
    rf"|\s*(?:<\|(?:start|begin)_(?:of_)?{THOUGHT}\|>\s*)?<\|end_(?:of_)?{THOUGHT}\|>\s*"
    r"|\s*(?:\[THINK\]\s*)?\[/THINK\]\s*|\s*(?:<\|channel>thought\s*)?<channel\|>\s*",
    re.IGNORECASE,
)
"""Matches a block of reasoning without words, or its closing tag alone."""

Ranges: TypeAlias = list[tuple[int, int]]
"""Characters from a start up to a stop, ascending."""


class Utterance(NamedTuple):
    """One part of an assistant message.

    Attributes:
        kind: ``"reasoning"``, ``"content"`` or ``"call"`` (a called function's name).
        text: the words, stripped, never empty.
        field: the message's field that contains them; for calls ``"tool_calls"``.
        offset: the character of that field at which ``text`` starts; for calls the number of the call, from 0.
    """

    kind: str
    text: str
    field: str
    offset: int


def utterances_of(message: Mapping[str, Any]) -> list[Utterance]:
    """List the utterances of an assistant message in the order of templates: reasoning, content, calls.

    Reasoning inside ``content`` (``<think>...</think>`` before the answer) is a separate utterance, as in the templates
    of reasoning models.
    """
    utterances: list[Utterance] = []
    if not message.keys().isdisjoint(REASONING_FIELDS):
        for field in REASONING_FIELDS:
            if message.get(field) is not None:
                _add(utterances, "reasoning", message[field], field, 0)
                break
    content = message.get("content")
    if type(content) is list and len(content) == 1:  # as `in_text_parts` makes it
        content = content[0].get("text")
    if type(content) is str:
        inline = _CLOSED.match(content) if "</" in content or "[/THINK]" in content else None
        if inline is not None and _is_reasoning(content, inline):
            _add(utterances, "reasoning", inline[2], "content", inline.start(2))
            _add(utterances, "content", content[inline.end() :], "content", inline.end())
        else:
            _add(utterances, "content", content, "content", 0)
    calls = message.get("tool_calls")
    for number, call in enumerate(calls) if calls else ():
        name = called(call).get("name")
        if isinstance(name, str) and name:
            utterances.append(Utterance("call", name, "tool_calls", number))
    return utterances


def _is_reasoning(content: str, inline: re.Match[str]) -> bool:
    """Return whether a content begins with reasoning, up to a closing tag. The opening tag may be in the prompt."""
    opened = inline.start(2) > 0 and content[: inline.start(2)].strip() != ""
    if not opened:
        return _NO_REASONING.search(inline[2]) is None
    return inline[3] is None or inline[1] == inline[3]


def called(call: Any) -> Mapping[str, Any]:
    """Return the dict with a call's name and arguments: its ``function`` or the call itself; {} for anything else."""
    function = call.get("function") if isinstance(call, Mapping) else None
    holder = function if isinstance(function, Mapping) else call
    return holder if isinstance(holder, Mapping) else {}


def short(words: str) -> str:
    """Return words in quotation marks for messages; long ones are shortened."""
    return repr(words if len(words) <= 60 else words[:57] + "...")


class UnplacedError(SequenceError):
    """All assistant words may be in the text, but their location in it is ambiguous."""


def unplaced(reason: str) -> UnplacedError:
    """Return an ``UnplacedError`` like ``unusable``."""
    return UnplacedError("conversation", None, reason)


def unusable(reason: str) -> SequenceError:
    """Return the error of an unusable row. The caller must add the row's file and line."""
    return SequenceError("conversation", None, reason)


def selected(messages: Sequence[Mapping[str, Any]], weights: Sequence[float], train_on: str) -> list[int]:
    """Return the positions of the assistant messages that are trained on. See ``MaskOptions`` for ``train_on``."""
    users = (index + 1 for index, message in enumerate(messages) if message.get("role") == "user")
    first = max(users, default=0) if train_on == "last-turn" else 0
    return [
        index
        for index in range(first, len(messages))
        if messages[index].get("role") == "assistant" and weights[index] != 0
    ]


def _add(utterances: list[Utterance], kind: str, text: object, field: str, offset: int) -> None:
    if isinstance(text, str):
        words = text.strip()
        if words:
            utterances.append(Utterance(kind, words, field, offset if words is text else offset + text.index(words[0])))


def in_text_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its string content as a list of one content part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a call with changed arguments; the call itself if ``change`` returns None."""
    function = call.get("function") if isinstance(call, dict) else None
    holder = function if isinstance(function, dict) else call
    arguments = change(holder.get("arguments")) if isinstance(holder, dict) else None
    if arguments is None:
        return call
    holder = {**holder, "arguments": arguments}
    return {**call, "function": holder} if isinstance(function, dict) else holder


def strings_in(value: Any) -> Iterator[str]:
    """All strings of a JSON-like value, keys included."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            waiting += one
