"""What messages say, and the form in which a template writes it well.

Templates disagree about their input. Some write a dict of tool-call arguments as JSON, some paste text; some want
contents as lists of parts; most want a content that is not there left out, some want ``""`` and a few want None.
``learn_style`` finds out the first two from a template's own renderings, ``prepared`` puts messages into a form.
``pieces_of`` lists what an assistant message says: the words that must be found again in the rendered text. They are
compared stripped, because templates trim.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

__all__ = [
    "ABSENT",
    "ASKED",
    "NULL_FORMS",
    "REASONING_FIELDS",
    "SAID",
    "Piece",
    "Style",
    "content_of",
    "in_text_parts",
    "lacks_content",
    "learn_style",
    "pieces_of",
    "prepared",
    "prints_parts",
    "squeezed",
    "words_called_with",
]  # fmt: skip

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry reasoning; the first one that is set counts."""

ABSENT: Final = object()
NULL_FORMS: tuple[tuple[str, object], ...] = (
    ("content_left_out", ABSENT),
    ("content_empty", ""),
    ("content_none", None),
)
"""What stands for a content that a message lacks, and the note that counts it: as transformers has it first."""

_CLOSED = re.compile(
    r"\s*(?:<(think|thinking|thought|reasoning)>|\[THINK\])?(.*?)(?:</(think|thinking|thought|reasoning)>|\[/THINK\])",
    re.DOTALL,
)
ASKED, SAID, _CALLED, _RESULT = "zqasked", "zqsaid", "zqcalled", "zqresult"
_USER = {"role": "user", "content": ASKED}
_ASSISTANT = {"role": "assistant", "content": SAID}
_TOOL = {"role": "tool", "content": _RESULT, "name": _CALLED, "tool_call_id": "abcdefghi"}


class Piece(NamedTuple):
    """One stretch of words.

    Attributes:
        kind: ``"reasoning"``, ``"content"`` or ``"call"`` (a called function's name).
        text: the words, stripped, never empty.
        field: the message's field that holds them; for calls ``"tool_calls"``.
        offset: where the words start in that field; for calls the call's number.
    """

    kind: str
    text: str
    field: str
    offset: int


def pieces_of(message: Mapping[str, Any]) -> list[Piece]:
    """List what a message says, in the order in which templates write it.

    Reasoning that is part of ``content`` (``<think>...</think>`` before the answer) is told apart from the answer, as
    the templates of reasoning models do.
    """
    pieces: list[Piece] = []
    if not message.keys().isdisjoint(REASONING_FIELDS):
        for field in REASONING_FIELDS:
            if message.get(field) is not None:
                _add(pieces, "reasoning", message[field], field, 0)
                break
    content = message.get("content")
    if type(content) is list and len(content) == 1:  # as `in_text_parts` makes it
        content = content[0].get("text")
    if type(content) is str:
        inline = _CLOSED.match(content) if "</" in content or "[/THINK]" in content else None
        if inline is not None and (inline[3] is None or inline[1] in (None, inline[3])):
            _add(pieces, "reasoning", inline[2], "content", inline.start(2))
            _add(pieces, "content", content[inline.end() :], "content", inline.end())
        else:
            _add(pieces, "content", content, "content", 0)
    calls = message.get("tool_calls")
    for number, call in enumerate(calls) if calls else ():
        if type(call) is dict or isinstance(call, Mapping):
            function = call.get("function")
            name = (function if type(function) is dict or isinstance(function, Mapping) else call).get("name")
            if isinstance(name, str) and name:
                pieces.append(Piece("call", name, "tool_calls", number))
    return pieces


def words_called_with(message: Mapping[str, Any]) -> list[str]:
    """The words in the arguments of a message's calls, however a template writes what is between them."""
    found: list[str] = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = (function if isinstance(function, Mapping) else call).get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = [arguments]
        _collect_words(arguments, found)
    return found


def _collect_words(value: object, found: list[str]) -> None:
    if isinstance(value, str):
        found += re.findall(r"[A-Za-z0-9]{2,}", value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect_words(key, found)
            _collect_words(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect_words(item, found)


def content_of(message: Mapping[str, Any]) -> str:
    """A message's content, stripped, be it a string or one text part; "" for anything else."""
    content = message.get("content")
    content = content[0].get("text") if type(content) is list and len(content) == 1 else content
    return content.strip() if type(content) is str else ""


def squeezed(text: str) -> str:
    """The text without any whitespace, for templates that reflow it."""
    return "".join(text.split())


def _add(pieces: list[Piece], kind: str, text: object, field: str, offset: int) -> None:
    if isinstance(text, str):
        words = text.strip()
        if words:
            pieces.append(Piece(kind, words, field, offset if words is text else offset + text.index(words[0])))


@dataclass(frozen=True, slots=True)
class Style:
    """The forms of input that a template writes well.

    Attributes:
        text_arguments: tool-call arguments as JSON text come out legible, not as JSON inside a JSON string.
        parsed_arguments: tool-call arguments as a dict come out legible, not as a Python repr.
        in_parts: contents must be lists of text parts; the template loses strings.
        writes_arguments: arguments come out at all, as far as a made-up call tells.
        null_forms: what may stand for a content that a call lacks, in the order in which to try them.
    """

    text_arguments: bool = True
    parsed_arguments: bool = True
    in_parts: bool = False
    writes_arguments: bool = True
    null_forms: tuple[tuple[str, object], ...] = NULL_FORMS


def lacks_content(message: Mapping[str, Any]) -> bool:
    """Whether an assistant message has no content at all, as one that only calls functions may."""
    return message.get("content") is None and message.get("role") == "assistant"


def prepared(
    messages: Sequence[dict[str, Any]], style: Style, notes: dict[str, int], missing: object = ABSENT
) -> list[dict[str, Any]]:
    """Put messages into a template's form, each an object of its own; the given ones stay as they are.

    Reasoning goes under every name that templates read it by, as in transformers.

    Args:
        messages: a conversation.
        style: the template's form.
        notes: counts conversions.
        missing: what stands for a content that an assistant message lacks, one of ``NULL_FORMS``.
    """
    result: list[dict[str, Any]] = []
    one_form = style.text_arguments != style.parsed_arguments
    for original in messages:
        message = original
        bare = message.get("content") is None
        if bare and (message.get("content", missing) is None or (missing is not ABSENT and lacks_content(message))):
            message = {key: value for key, value in message.items() if key != "content"}
            if missing is not ABSENT:
                message["content"] = missing
        if not message.keys().isdisjoint(REASONING_FIELDS):
            for field in REASONING_FIELDS:
                if message.get(field) is not None:
                    reasoning = message[field]
                    message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
                    break
        if one_form and message.get("tool_calls"):
            message = _with_arguments(message, style.text_arguments, notes)
        if style.in_parts:
            message = in_text_parts(message)
        result.append(message)
    if len({id(message) for message in result}) < len(result):
        result = [dict(message) for message in result]
    return result


def in_text_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its string content as a list of one text part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def prints_parts(text: str) -> bool:
    """Whether a template wrote a list of parts out as Python writes it, instead of the text in it."""
    return "{'type': 'text'" in text


def _with_arguments(message: dict[str, Any], as_text: bool, notes: dict[str, int]) -> dict[str, Any]:
    calls = []
    for original in message["tool_calls"]:
        call = original
        function = call.get("function") if isinstance(call, dict) else None
        holder = function if isinstance(function, dict) else call
        fitting = _fitting(holder.get("arguments"), as_text) if isinstance(holder, dict) else None
        if fitting is not None:
            notes["tool_arguments_converted"] = notes.get("tool_arguments_converted", 0) + 1
            holder = {**holder, "arguments": fitting}
            call = {**call, "function": holder} if isinstance(function, dict) else holder
        calls.append(call)
    return {**message, "tool_calls": calls}


def _fitting(arguments: object, as_text: bool) -> object:
    """Arguments in the form a template writes well, or None where they are in it already."""
    if as_text and isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    if not as_text and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return None
        return parsed if isinstance(parsed, dict) else None
    return None


def _tool_call(arguments: object) -> dict[str, Any]:
    """A made-up assistant message that calls a function, without a content."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _CALLED, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def learn_style(render: Callable[[list[dict[str, Any]]], str | None]) -> Style:
    """Find out in which form the template takes contents and arguments.

    Where no form fares better than the one the data has, the data goes in as it is.

    Args:
        render: the template; None where it refuses the messages.
    """
    in_parts = False
    for history in ([_USER, _ASSISTANT], [_USER, _ASSISTANT, _USER]):
        if SAID in (render([dict(message) for message in history]) or ""):
            break
        text = render(prepared(history, Style(in_parts=True), {})) or ""
        in_parts = SAID in text and not prints_parts(text)
        if in_parts:
            break
    pasted, as_text = _rendered_call(render, '{"zqkey": "zqvalue"}', in_parts)
    parsed, as_object = _rendered_call(render, {"zqkey": "zqvalue"}, in_parts)
    text_fits = "zqvalue" in pasted and '\\"zqkey' not in pasted
    parsed_fits = "zqvalue" in parsed and "'zqkey'" not in parsed
    written = "zqvalue" in pasted or "zqvalue" in parsed
    if not (text_fits or parsed_fits):
        text_fits = parsed_fits = True
    # Some templates call no function in a message without a content, and say nothing of it.
    number = min((number for text, number in ((pasted, as_text), (parsed, as_object)) if text), default=0)
    null_forms = NULL_FORMS
    if number == 2 or (number == 1 and SAID in (render([_USER, _tool_call({}), _TOOL, _ASSISTANT]) or "")):
        null_forms = (NULL_FORMS[number], NULL_FORMS[3 - number], NULL_FORMS[0])
    return Style(text_fits, parsed_fits, in_parts, written, null_forms)


def _rendered_call(
    render: Callable[[list[dict[str, Any]]], str | None], arguments: object, in_parts: bool
) -> tuple[str, int]:
    """What becomes of a call in the first form of it that the template writes at all, and which of them that is."""
    for number, (_, missing) in enumerate(NULL_FORMS):
        for closing in ([_TOOL, _ASSISTANT], []):
            history = prepared([_USER, _tool_call(arguments), *closing], Style(in_parts=in_parts), {}, missing)
            text = render(history)
            if text is not None and "zqvalue" in text:
                return text, number
    return "", 0
