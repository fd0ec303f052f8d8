"""What a template puts around an assistant's words, learnt by rendering small made-up conversations.

A template does not say which of its text the trainer feeds to the model and which the model must write. Its own
generation prompt does: it is what a server feeds before the model starts to write. So the prompt is rendered,
once for each set of template variables, and later taken off what each assistant message wrote.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sft_idx.chat.trace import Traced

__all__ = ["Scaffold", "argument_styles", "learn_scaffold", "shared_length"]

Message = Mapping[str, Any]
Render = Callable[[Sequence[dict[str, Any]], bool], Traced | None]
"""Renders made-up messages, with the generation prompt or without; None where the template refuses them."""

_ASKED, _SAID, _CALLED, _RESULT = "zqasked", "zqsaid", "zqcalled", "zqresult"
_USER = {"role": "user", "content": _ASKED}
_ASSISTANT = {"role": "assistant", "content": _SAID}
_TOOL = {"role": "tool", "content": _RESULT, "name": _CALLED, "tool_call_id": "abcdefghi"}

# Prompts are shared in whole pieces: a tag, a word, one character of anything else.
_PROMPT_PIECE = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]|\w+|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Scaffold:
    """The template's text around assistant messages.

    Attributes:
        prompts: generation prompts, after a question and after a tool's result; none where the template has none.
        headers: what came before the words of made-up assistant messages, longest first: stands in where no
            prompt fits.
        inner_end: what follows the words inside the message's own iteration, stripped: its end of turn.
        late_end: what always follows an assistant message, whatever comes next, where ``inner_end`` is empty:
            the end of turn of templates that write it with the next message or after the loop.
    """

    prompts: tuple[str, ...]
    headers: tuple[str, ...]
    inner_end: str
    late_end: str


def tool_call(arguments: object) -> dict[str, Any]:
    """A made-up assistant message that calls a function."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _CALLED, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def learn_scaffold(render: Render, arguments: object) -> Scaffold:
    """Render made-up conversations and see what surrounds the assistant's words.

    Args:
        render: the template, with the row's variables.
        arguments: made-up arguments of a tool call, in the form that the template takes.
    """
    prompts: dict[str, None] = {}
    tooled = [_USER, tool_call(arguments), _TOOL]
    for history in ([_USER], [_USER, _ASSISTANT, _USER], tooled):
        prompt = _prompt(render, history)
        if prompt.strip():
            prompts[prompt] = None
    headers: dict[str, None] = {}
    inner_end = ""
    after: list[str] = []
    asking_again = [_USER, _ASSISTANT, _USER, _ASSISTANT]
    for history in ([_USER, _ASSISTANT], asking_again, [*tooled, _ASSISTANT]):
        traced = render([dict(message) for message in history], False)
        for position, message in enumerate(history):
            if traced is None or message is not _ASSISTANT:
                continue
            region = _region(traced, position)
            if region is None:
                continue
            start, stop = region
            header, said, end = traced.text[start:stop].partition(_SAID)
            if said:
                headers[header] = None
                inner_end = inner_end or end.strip()
                after.append(traced.text[stop:])
    late_end = "" if inner_end or len(after) < 2 else os.path.commonprefix(after).rstrip()
    return Scaffold(tuple(prompts), tuple(sorted(headers, key=len, reverse=True)), inner_end, late_end)


def _prompt(render: Render, history: Sequence[Message]) -> str:
    """What ``add_generation_prompt`` adds, whole even where the text without it goes on in the same way."""
    messages = [dict(message) for message in history]
    asked, closed = render(messages, True), render(messages, False)
    if asked is None or closed is None:
        return ""
    differs = len(os.path.commonprefix([asked.text, closed.text]))
    written = asked.segments[-1].stop if asked.segments else 0
    return asked.text[min(differs, written) :]


def _region(traced: Traced, message: int) -> tuple[int, int] | None:
    own = [segment for segment in traced.segments if segment.message == message]
    return (own[0].start, own[-1].stop) if own else None


def shared_length(region: str, scaffold: Scaffold) -> int | None:
    """How much of a message's text its generation prompt has already written.

    Args:
        region: what the message wrote, from its first character.
        scaffold: what is known of the template.

    Returns:
        A length, or None where neither a prompt nor a known header fits.
    """
    best = 0
    for prompt in scaffold.prompts:
        best = max(best, len(prompt) if region.startswith(prompt) else _whole_pieces(prompt, region))
    if best:
        return best
    for prompt in scaffold.prompts:  # some close the turn before first, or the message before wrote a part
        for start in range(1, len(prompt)):
            if prompt[start:].strip() and region.startswith(prompt[start:]):
                return len(prompt) - start
    for header in scaffold.headers:
        if region.startswith(header):
            return len(header)
    return None


def _whole_pieces(prompt: str, region: str) -> int:
    shared = 0
    for match in _PROMPT_PIECE.finditer(prompt):
        if not region.startswith(match[0], shared):
            break
        shared = match.end()
    return shared if prompt[:shared].strip() else 0


def argument_styles(render: Render) -> tuple[bool, bool]:
    """Whether the template writes tool-call arguments well from JSON text, and from a dict.

    Well means that the arguments are legible: no JSON inside a JSON string, no Python repr. Where neither
    fares well, or the template refuses both, both count as fine and the row goes in as it is.
    """
    text = _rendered_call(render, '{"zqkey": "zqvalue"}')
    parsed = _rendered_call(render, {"zqkey": "zqvalue"})
    text_fits = text is not None and "zqvalue" in text and '\\"zqkey' not in text
    parsed_fits = parsed is not None and "zqvalue" in parsed and "'zqkey'" not in parsed
    return (text_fits, parsed_fits) if text_fits or parsed_fits else (True, True)


def _rendered_call(render: Render, arguments: object) -> str | None:
    closing = [_TOOL, _ASSISTANT]
    for history in ([_USER, tool_call(arguments), *closing], [_USER, tool_call(arguments)]):
        traced = render([dict(message) for message in history], False)
        if traced is not None:
            return traced.text
    return None
