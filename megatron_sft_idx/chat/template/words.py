"""What messages say, the form in which a template writes it well, and where in its text that went.

Templates disagree about their input. Some write a dict of tool-call arguments as JSON, some paste text; some want
contents as lists of parts; most want a content that is not there left out, some want ``""`` and a few want None.
``learn_style`` finds out the first two from a template's own renderings, ``prepared`` puts messages into a form.
``pieces_of`` lists what an assistant message says: the words that must be found again in the rendered text. They are
compared stripped, because templates trim.

Where strings of the data went is found by rendering them altered, in few rows. ``locate`` tells which of the text comes
from which message, without tracing; ``ControlTokens`` which control tokens in the text were spelt by the data. Either
way strings get marks, the template renders them, and the marks are taken out again; the answer holds only if what is
left is the plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

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
_THINKING_TAG = re.compile(r"</?(?:think|thinking|thought|reasoning)>|\[/?THINK\]")
_SENTINELS = tuple(chr(base) for base in range(0xF1000, 0xF1040, 2))
ASKED, SAID, _CALLED, _RESULT = "zqasked", "zqsaid", "zqcalled", "zqresult"
_USER = {"role": "user", "content": ASKED}
_ASSISTANT = {"role": "assistant", "content": SAID}
_TOOL = {"role": "tool", "content": _RESULT, "name": _CALLED, "tool_call_id": "abcdefghi"}


class Wording(NamedTuple):
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


def pieces_of(message: Mapping[str, Any]) -> list[Wording]:
    """List what a message says, in the order in which templates write it.

    Reasoning that is part of ``content`` (``<think>...</think>`` before the answer) is told apart from the answer, as
    the templates of reasoning models do.
    """
    pieces: list[Wording] = []
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
        name = called(call).get("name")
        if isinstance(name, str) and name:
            pieces.append(Wording("call", name, "tool_calls", number))
    return pieces


def called(call: Any) -> Mapping[str, Any]:
    """The name and arguments of a call, which may stand in its ``function``."""
    function = call.get("function") if isinstance(call, Mapping) else None
    found = function if isinstance(function, Mapping) else call
    return found if isinstance(found, Mapping) else {}


def words_called_with(message: Mapping[str, Any]) -> list[str]:
    """The words in the arguments of a message's calls, however a template writes what is between them."""
    found: list[str] = []
    for call in message.get("tool_calls") or ():
        arguments = called(call).get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = [arguments]
        waiting = [arguments]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                found += re.findall(r"[A-Za-z0-9]{2,}", value)
            elif isinstance(value, (Mapping, list, tuple)):
                items = [part for pair in value.items() for part in pair] if isinstance(value, Mapping) else value
                waiting.extend(reversed(items))
    return found


def content_of(message: Mapping[str, Any]) -> str:
    """A message's content, stripped, be it a string or one text part; "" for anything else."""
    content = message.get("content")
    content = content[0].get("text") if type(content) is list and len(content) == 1 else content
    return content.strip() if type(content) is str else ""


def squeezed(text: str) -> str:
    """The text without any whitespace, for templates that reflow it."""
    return "".join(text.split())


def _add(pieces: list[Wording], kind: str, text: object, field: str, offset: int) -> None:
    if isinstance(text, str):
        words = text.strip()
        if words:
            pieces.append(Wording(kind, words, field, offset if words is text else offset + text.index(words[0])))


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


def in_text_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its string content as a list of one text part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def prints_parts(text: str) -> bool:
    """Whether a template wrote a list of parts out as Python writes it, instead of the text in it."""
    return "{'type': 'text'" in text


def with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a call with its arguments changed; the call itself where ``change`` gives None."""
    function = call.get("function") if isinstance(call, dict) else None
    holder = function if isinstance(function, dict) else call
    arguments = change(holder.get("arguments")) if isinstance(holder, dict) else None
    if arguments is None:
        return call
    holder = {**holder, "arguments": arguments}
    return {**call, "function": holder} if isinstance(function, dict) else holder


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


# Where strings of the data went


class Anchor(NamedTuple):
    """Where one string of the data starts or stops in a rendered text.

    Attributes:
        at: the character.
        message: position of the message it is from.
        piece: for reasoning and content of the assistant its number among ``pieces_of``, else -1.
        string: its number among all strings.
        stops: whether the string stops here, rather than starts.
    """

    at: int
    message: int
    piece: int
    string: int
    stops: bool


def locate(
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    text: str,
    render: Callable[..., str | None],
) -> list[Anchor] | None:
    """Find the data of every message in ``text``: contents, reasoning and string arguments of calls.

    Descriptions of tools are found as well, as data of message -1.

    Args:
        messages: the conversation as the template saw it.
        tools: the functions that can be called.
        text: what the template made of it.
        render: renders altered ``messages`` and ``tools``; None where the template refuses them.

    Returns:
        Ascending places; a string that the template writes twice has two. None where marks change what the template
        does, even where they are put only beside letters and digits.
    """
    sentinel = next((one for one in _SENTINELS if one not in text), None)
    if sentinel is None:
        return None
    close = chr(ord(sentinel) + 1)
    spelt = [f"(?:{one}|{re.escape(json.dumps(one)[1:-1])})" for one in (sentinel, close)]
    pattern = re.compile(f"{spelt[0]}([0-9]+){spelt[1]}")
    for gently in (False, True):
        marker = _DataMarker(sentinel, close, gently)
        altered = [marker.message(index, message) for index, message in enumerate(messages)]
        marked = render(messages=altered, tools=tools and [marker.described(tool) for tool in tools])
        if marked is not None and pattern.sub("", marked) == text:
            break
    else:
        return None
    places: list[Anchor] = []
    removed = 0
    for match in pattern.finditer(marked):
        place, beyond = marker.marks[int(match[1])]
        at = match.start() - removed
        removed += len(match[0])
        if place.stops and text.startswith(beyond, at):
            at += len(beyond)
        elif not place.stops and text.endswith(beyond, 0, at):
            at -= len(beyond)
        places.append(place._replace(at=at))
    return places


class _DataMarker:
    """Puts marks around the strings of messages; ``gently``, only beside letters and digits, which few look for."""

    def __init__(self, sentinel: str, close: str, gently: bool) -> None:
        self.marks: list[tuple[Anchor, str]] = []  # with what lies between the mark and the end of the string it is for
        self._sentinel, self._close, self._gently = sentinel, close, gently

    def message(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        """A copy of a message with its data marked."""
        copy = dict(message)
        if message.get("role") == "assistant":
            pieces = [(number, piece) for number, piece in enumerate(pieces_of(message)) if piece.kind != "call"]
            for number, piece in reversed(pieces):  # from the back, so that offsets stay true
                value = copy[piece.field]
                words = value[0]["text"] if isinstance(value, list) else value
                stop = piece.offset + len(piece.text)
                words = words[: piece.offset] + self._around(piece.text, index, number) + words[stop:]
                value = [{**value[0], "text": words}] if isinstance(value, list) else words
                for field in REASONING_FIELDS if piece.field in REASONING_FIELDS else (piece.field,):
                    if copy.get(field) is not None:
                        copy[field] = value
            if copy.get("tool_calls"):
                copy["tool_calls"] = [
                    with_arguments(call, lambda given: self._arguments(given, index)) for call in copy["tool_calls"]
                ]
        elif copy.get("content"):
            content = copy["content"]
            if isinstance(content, list):
                copy["content"] = [{**part, "text": self._around(part["text"], index)} for part in content]
            else:
                copy["content"] = self._around(content, index)
        return copy

    def described(self, value: Any, under: str = "") -> Any:
        """A copy of a tool with its descriptions marked, wherever they are."""
        if isinstance(value, dict):
            return {key: self.described(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [self.described(item) for item in value]
        return self._around(value, -1) if under == "description" and isinstance(value, str) else value

    def _arguments(self, arguments: Any, index: int) -> Any:
        """The arguments of a call, marked; None where there are none."""
        if not isinstance(arguments, str):
            return self._strings(arguments, index) if arguments else None
        try:
            return json.dumps(self._strings(json.loads(arguments), index), ensure_ascii=False) if arguments else None
        except ValueError:
            return self._around(arguments, index)

    def _strings(self, value: Any, index: int) -> Any:
        """A JSON-like value with its strings marked."""
        if isinstance(value, dict):
            return {key: self._strings(item, index) for key, item in value.items()}
        if isinstance(value, list):
            return [self._strings(item, index) for item in value]
        return self._around(value, index) if isinstance(value, str) else value

    def _around(self, text: str, index: int, piece: int = -1) -> str:
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        start, stop = first, last
        if self._gently:
            words = [match.span() for match in re.finditer(r"\w+", text)]
            start, stop = (words[0][0], words[-1][1]) if words else (0, 0)
        if start >= stop:
            return text
        number = len(self.marks)
        self.marks.append((Anchor(0, index, piece, number, False), text[first:start]))
        self.marks.append((Anchor(0, index, piece, number, True), text[stop:last]))
        marks = [f"{self._sentinel}{number + end}{self._close}" for end in (0, 1)]
        return f"{text[:start]}{marks[0]}{text[start:stop]}{marks[1]}{text[stop:]}"


class ControlTokens:
    """Finds control tokens that the data spells.

    The tags around reasoning are let through in what the assistant says: there they are meant.

    Args:
        texts: what control tokens look like; empty ones are ignored.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        self.texts = tuple(longest_first)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        untagged = [text for text in longest_first if not _THINKING_TAG.fullmatch(text)]
        self._assistant = re.compile("|".join(map(re.escape, untagged)) or "(?!)")
        self._firsts = tuple(sorted({text[0] for text in longest_first}))
        self._firsts_utf8 = tuple(first.encode("utf-8", "surrogatepass") for first in self._firsts)
        # JSON writes these tokens as they are.
        self._plain_letters = not any(re.search(r'["\\\x00-\x1f\ud800-\udfff]', text) for text in longest_first)

    def among(self, value: Any) -> set[str]:
        """The control tokens spelt anywhere in a JSON-like value, keys included."""
        found: set[str] = set()
        try:
            text = orjson.dumps(value) if self._plain_letters else None
        except (TypeError, ValueError):
            text = None
        # A quick look at the JSON text settles nearly every row.
        if text is None or (
            any(first in text for first in self._firsts_utf8) and self._pattern.search(text.decode()) is not None
        ):
            self._collect(value, found, self._pattern)
        return found

    def _collect(self, value: Any, found: set[str], pattern: re.Pattern[str]) -> None:
        kind = type(value)
        if kind is str:
            for first in self._firsts:
                if first in value:
                    found.update(pattern.findall(value))
                    return
        elif kind is dict:
            pattern = self._assistant if value.get("role") == "assistant" else pattern
            for key, item in value.items():
                self._collect(key, found, pattern)
                self._collect(item, found, pattern)
        elif kind is list or kind is tuple:
            for item in value:
                self._collect(item, found, pattern)

    def spelt(
        self, data: Mapping[str, Any], text: str, render: Callable[[Mapping[str, Any]], str | None]
    ) -> tuple[list[tuple[int, int]], set[str]]:
        """Find where control tokens spelt by the data ended up in ``text``.

        Args:
            data: the template variables that hold strings of the data.
            text: what the template made of them.
            render: renders altered data; None where the template refuses it.

        Returns:
            Ascending ``(start, stop)`` ranges, and the control tokens that the template itself reads in the
            data (such as a ``</think>`` that it splits an answer at): those mean what the template makes of
            them.
        """
        tokens = self.among(data)
        ranges = self._ranges(data, tokens, text, render) if tokens else []
        if ranges is not None:
            return ranges, set()
        kept = {token for token in tokens if self._ranges(data, {token}, text, render) is not None}
        ranges = self._ranges(data, kept, text, render) if kept else []
        return (ranges, tokens - kept) if ranges is not None else ([], tokens)

    def _ranges(
        self,
        data: Mapping[str, Any],
        tokens: set[str],
        text: str,
        render: Callable[[Mapping[str, Any]], str | None],
    ) -> list[tuple[int, int]] | None:
        nonce = "Zq"
        while nonce in text or nonce in repr(data):
            nonce += "Zq"
        order = sorted(tokens, key=lambda token: (-len(token), token))
        # Letters and digits pass through tojson, escaping and trimming alike.
        names = {token: f"{nonce}{number}x" for number, token in enumerate(order)}
        altered = render(_replaced(data, names, order))
        if altered is None:
            return None
        pieces: list[str] = []
        ranges: list[tuple[int, int]] = []
        length = 0
        for number, piece in enumerate(re.split(f"{nonce}([0-9]+)x", altered)):
            restored = order[int(piece)] if number % 2 else piece
            if number % 2:
                ranges.append((length, length + len(restored)))
            pieces.append(restored)
            length += len(restored)
        return ranges if "".join(pieces) == text else None


def _replaced(value: Any, names: Mapping[str, str], order: Sequence[str]) -> Any:
    """A copy of a JSON-like value with other names for its control tokens."""
    if isinstance(value, str):
        for token in order:
            value = value.replace(token, names[token])
        return value
    if isinstance(value, dict):
        if value.get("role") == "assistant":
            order = [token for token in order if not _THINKING_TAG.fullmatch(token)]
        return {_replaced(key, names, order): _replaced(item, names, order) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, names, order) for item in value]
    return value
