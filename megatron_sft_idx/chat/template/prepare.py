"""Messages in the form that a template writes well.

Templates disagree about their input. Some write a dict of tool-call arguments as JSON, some paste text; some
want contents as lists of parts. ``probes.learn_style`` finds out which; here messages are put into that form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sft_idx.chat.template.words import REASONING_FIELDS

__all__ = ["Style", "in_text_parts", "prepared"]


@dataclass(frozen=True, slots=True)
class Style:
    """The forms of input that a template writes well.

    Attributes:
        text_arguments: tool-call arguments as JSON text come out legible, not as JSON inside a JSON string.
        parsed_arguments: tool-call arguments as a dict come out legible, not as a Python repr.
        in_parts: contents must be lists of text parts; the template loses strings.
    """

    text_arguments: bool
    parsed_arguments: bool
    in_parts: bool


def prepared(messages: Sequence[dict[str, Any]], style: Style, notes: dict[str, int]) -> list[dict[str, Any]]:
    """Put messages into a template's form, each an object of its own; the given ones stay as they are.

    Reasoning goes under every name that templates read it by, as in transformers.

    Args:
        messages: a conversation.
        style: the template's form.
        notes: counts conversions.
    """
    result: list[dict[str, Any]] = []
    seen: set[int] = set()
    for original in messages:
        message = original
        for field in REASONING_FIELDS:
            if message.get(field) is not None:
                reasoning = message[field]
                message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
                break
        if style.text_arguments != style.parsed_arguments and message.get("tool_calls"):
            message = _with_arguments(message, style.text_arguments, notes)
        if style.in_parts:
            message = in_text_parts(message)
        if id(message) in seen:
            message = dict(message)
        seen.add(id(message))
        result.append(message)
    return result


def in_text_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its string content as a list of one text part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


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
