"""What a template puts around an assistant's words, learnt by rendering small made-up conversations.

A template does not say which of its text is fed to the model and which the model must write. Its own
generation prompt does: it is what a server feeds before the model starts to write. So the prompt is rendered,
once for each set of template variables, and later taken off what each assistant message wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sft_idx.chat.template.prepare import Style, in_text_parts
from megatron_sft_idx.chat.template.trace import Traced

__all__ = ["Scaffold", "learn_scaffold", "learn_style", "shared_length"]

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
        prompts: generation prompts, after a question and after a tool's result; none where there is none.
        headers: what came before the words of made-up assistant messages, longest first: stands in where no
            prompt fits.
        inner_ends: what follows the words inside the message's own iteration, stripped: its end of turn.
        late_end: what always follows an assistant message, whatever comes next, where there are no
            ``inner_ends``: the end of turn of templates that write it with the next message or after the
            loop.
    """

    prompts: tuple[str, ...]
    headers: tuple[str, ...]
    inner_ends: tuple[str, ...]
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
    inner_ends: dict[str, None] = {}
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
                if end.strip():
                    inner_ends[end.strip()] = None
                after.append(traced.text[stop:])
    late_end = "" if inner_ends or len(after) < 2 else _common_start(*after).rstrip()
    longest_first = tuple(sorted(headers, key=len, reverse=True))
    return Scaffold(tuple(prompts), longest_first, tuple(inner_ends), late_end)


def _prompt(render: Render, history: Sequence[Message]) -> str:
    """What ``add_generation_prompt`` adds, whole even where the text without it goes on in the same way."""
    messages = [dict(message) for message in history]
    asked, closed = render(messages, True), render(messages, False)
    if asked is None or closed is None:
        return ""
    differs = len(_common_start(asked.text, closed.text))
    written = asked.segments[-1].stop if asked.segments else 0
    return asked.text[min(differs, written) :]


def _region(traced: Traced, message: int) -> tuple[int, int] | None:
    own = [segment for segment in traced.segments if segment.message == message]
    return (own[0].start, own[-1].stop) if own else None


def _common_start(*texts: str) -> str:
    first, last = min(texts), max(texts)  # in sorted order, what these two share they all share
    length = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


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


def learn_style(render: Callable[[list[dict[str, Any]]], str | None]) -> Style:
    """Find out in which form the template takes contents and arguments.

    Where no form fares better than the one the data has, the data goes in as it is.

    Args:
        render: the template; None where it refuses the messages.
    """
    in_parts = False
    for history in ([_USER, _ASSISTANT], [_USER, _ASSISTANT, _USER]):
        if _SAID in (render([dict(message) for message in history]) or ""):
            break
        if _SAID in (render([in_text_parts(dict(message)) for message in history]) or ""):
            in_parts = True
            break
    text = _rendered_call(render, '{"zqkey": "zqvalue"}', in_parts)
    parsed = _rendered_call(render, {"zqkey": "zqvalue"}, in_parts)
    text_fits = "zqvalue" in text and '\\"zqkey' not in text
    parsed_fits = "zqvalue" in parsed and "'zqkey'" not in parsed
    if not (text_fits or parsed_fits):
        text_fits = parsed_fits = True
    return Style(text_fits, parsed_fits, in_parts)


def _rendered_call(render: Callable[[list[dict[str, Any]]], str | None], arguments: object, in_parts: bool) -> str:
    closing = [_TOOL, _ASSISTANT]
    for history in ([_USER, tool_call(arguments), *closing], [_USER, tool_call(arguments)]):
        text = render([in_text_parts(dict(message)) if in_parts else dict(message) for message in history])
        if text is not None:
            return text
    return ""
