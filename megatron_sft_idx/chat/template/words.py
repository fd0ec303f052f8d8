"""What an assistant message says: its reasoning, its answer and the functions it calls.

The words are what must be found again in the rendered text. They are compared stripped: templates trim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["REASONING_FIELDS", "Piece", "pieces_of", "squeezed"]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry reasoning; the first one that is set counts."""

_CLOSED = re.compile(
    r"\s*(?:<(think|thinking|thought|reasoning)>|\[THINK\])?(.*?)(?:</(think|thinking|thought|reasoning)>|\[/THINK\])",
    re.DOTALL,
)


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

    Reasoning that is part of ``content`` (``<think>...</think>`` before the answer) is told apart from the
    answer, as the templates of reasoning models do.
    """
    pieces: list[Piece] = []
    for field in REASONING_FIELDS:
        reasoning = message.get(field)
        if reasoning is not None:
            _add(pieces, "reasoning", reasoning, field, 0)
            break
    content = message.get("content")
    if type(content) is list and len(content) == 1:  # as `probes.in_text_parts` makes it
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
        if isinstance(call, Mapping):
            function = call.get("function")
            name = (function if isinstance(function, Mapping) else call).get("name")
            if isinstance(name, str) and name:
                pieces.append(Piece("call", name, "tool_calls", number))
    return pieces


def squeezed(text: str) -> str:
    """The text without any whitespace, for templates that reflow it."""
    return "".join(text.split())


def _add(pieces: list[Piece], kind: str, text: object, field: str, offset: int) -> None:
    if isinstance(text, str):
        words = text.strip()
        if words:
            pieces.append(Piece(kind, words, field, offset + len(text) - len(text.lstrip())))
