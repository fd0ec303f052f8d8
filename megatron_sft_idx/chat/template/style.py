"""The form of messages that a template accepts, and conversion of messages to that form.

Templates disagree about their input. Some write a dict of tool-call arguments as JSON, others paste text. Some want
contents as lists of content parts. Most want a missing content to be absent, some want ``""`` and a few want None.
``learn_style`` finds the form for a template by rendering artificial conversations, and ``prepared`` converts messages
to that form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatron_sft_idx.chat.template.messages import REASONING_FIELDS, in_text_parts, with_arguments

ABSENT: Final = object()
NULL_FORMS: tuple[tuple[str, object], ...] = (
    ("content_left_out", ABSENT),
    ("content_empty", ""),
    ("content_none", None),
)
"""Values for a content that is missing, each with the note that counts its use; transformers uses the first."""

ASKED, SAID, _CALLED, _RESULT = "zqasked", "zqsaid", "zqcalled", "zqresult"
"""Words of made-up messages, which no template writes by itself: a question, an answer, a function, its result."""

PRINTED_PART = "{'type': 'text'"
"""What a template writes that writes out a list of content parts as Python does, instead of the text in it."""

_USER = {"role": "user", "content": ASKED}
_ASSISTANT = {"role": "assistant", "content": SAID}
_TOOL = {"role": "tool", "content": _RESULT, "name": _CALLED, "tool_call_id": "abcdefghi"}


@dataclass(frozen=True, slots=True)
class Style:
    """The form of messages that a template accepts.

    Attributes:
        text_arguments: whether arguments of calls may be JSON text: it is pasted, and not written as a JSON string.
        parsed_arguments: whether arguments of calls may be dicts: they are written as JSON, not as ``{'a': 1}``.
        in_parts: whether contents must be lists of content parts, because the template loses strings.
        null_forms: possible replacements for the missing content of a call, from ``NULL_FORMS``, in the order to try.
    """

    text_arguments: bool = True
    parsed_arguments: bool = True
    in_parts: bool = False
    null_forms: tuple[tuple[str, object], ...] = NULL_FORMS


def prepared(
    messages: Sequence[dict[str, Any]], style: Style, notes: dict[str, int], missing: object = ABSENT
) -> list[dict[str, Any]]:
    """Convert messages to the form that a template accepts. The given messages are not changed.

    Reasoning is stored under the two names that templates read, ``reasoning_content`` and ``thinking``. No two messages
    of the result are the same object, because tracing identifies messages by object identity.

    Args:
        messages: a conversation.
        style: the form.
        notes: counts by name, to which the number of converted arguments is added.
        missing: replacement for a missing assistant content, one of ``NULL_FORMS``.
    """
    result: list[dict[str, Any]] = []
    one_form = style.text_arguments != style.parsed_arguments
    for original in messages:
        message = original
        bare = message.get("content") is None
        if bare and (
            message.get("content", missing) is None or (missing is not ABSENT and message.get("role") == "assistant")
        ):
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
            calls = [
                with_arguments(call, lambda given: _fitting(given, style.text_arguments))
                for call in message["tool_calls"]
            ]
            changed = sum(one is not other for one, other in zip(calls, message["tool_calls"], strict=True))
            if changed:
                notes["tool_arguments_converted"] = notes.get("tool_arguments_converted", 0) + changed
            message = {**message, "tool_calls": calls}
        if style.in_parts:
            message = in_text_parts(message)
        result.append(message)
    if len({id(message) for message in result}) < len(result):
        result = [dict(message) for message in result]
    return result


def _fitting(arguments: object, as_text: bool) -> object:
    """Convert the arguments of a call from a dict to JSON text (``as_text``) or back; None if nothing changes."""
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
    """Return an artificial assistant message that calls a function, without a content."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _CALLED, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def learn_style(render: Callable[[list[dict[str, Any]]], str | None]) -> Style:
    """Find the form of contents and arguments that a template accepts, by rendering artificial conversations.

    If no form is written better than the others, messages stay in the form of the data.

    Args:
        render: renders messages; returns None if the template rejects them.
    """
    in_parts = False
    for history in ([_USER, _ASSISTANT], [_USER, _ASSISTANT, _USER]):
        if SAID in (render([dict(message) for message in history]) or ""):
            break
        text = render(prepared(history, Style(in_parts=True), {})) or ""
        in_parts = SAID in text and PRINTED_PART not in text
        if in_parts:
            break
    pasted, as_text = _rendered_call(render, '{"zqkey": "zqvalue"}', in_parts)
    parsed, as_object = _rendered_call(render, {"zqkey": "zqvalue"}, in_parts)
    text_fits = "zqvalue" in pasted and '\\"zqkey' not in pasted
    parsed_fits = "zqvalue" in parsed and "'zqkey'" not in parsed
    if not (text_fits or parsed_fits):
        text_fits = parsed_fits = True
    # Some templates omit the calls of a message without a content, without an error.
    number = min((number for text, number in ((pasted, as_text), (parsed, as_object)) if text), default=0)
    null_forms = NULL_FORMS
    if number == 2 or (number == 1 and SAID in (render([_USER, _tool_call({}), _TOOL, _ASSISTANT]) or "")):
        null_forms = (NULL_FORMS[number], NULL_FORMS[3 - number], NULL_FORMS[0])
    return Style(text_fits, parsed_fits, in_parts, null_forms)


def _rendered_call(
    render: Callable[[list[dict[str, Any]]], str | None], arguments: object, in_parts: bool
) -> tuple[str, int]:
    """Render an artificial call with the first of ``NULL_FORMS`` for which the template writes its arguments.

    Returns:
        The text and the number of that form; ("", 0) if the template writes the arguments in no form.
    """
    for number, (_, missing) in enumerate(NULL_FORMS):
        for closing in ([_TOOL, _ASSISTANT], []):
            history = prepared([_USER, _tool_call(arguments), *closing], Style(in_parts=in_parts), {}, missing)
            text = render(history)
            if text is not None and "zqvalue" in text:
                return text, number
    return "", 0
