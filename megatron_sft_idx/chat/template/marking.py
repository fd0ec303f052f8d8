"""Finding out where strings of the data went, by rendering them altered.

Two questions need it, both in few rows. Which of the text comes from which message, told without tracing? And which
control tokens in the text were spelt by the data? Either way strings get marks, the template renders them, and the
marks are taken out again; the answer holds only if what is left is the plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from megatron_sft_idx.chat.template.forms import REASONING_FIELDS, pieces_of

__all__ = ["ControlTokens", "Place", "locate"]

_SENTINELS = tuple(chr(base) for base in range(0xF1000, 0xF1040, 2))

_THINKING_TAG = re.compile(r"</?(?:think|thinking|thought|reasoning)>|\[/?THINK\]")


class Place(NamedTuple):
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
) -> list[Place] | None:
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
    places: list[Place] = []
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
        self.marks: list[tuple[Place, str]] = []  # with what lies between the mark and the end of the string it is for
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
                copy["tool_calls"] = [self._call(call, index) for call in copy["tool_calls"]]
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

    def _call(self, call: Any, index: int) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        holder = function if isinstance(function, dict) else call
        if not isinstance(holder, dict) or not holder.get("arguments"):
            return call
        arguments = holder["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.dumps(self._strings(json.loads(arguments), index), ensure_ascii=False)
            except ValueError:
                arguments = self._around(arguments, index)
        else:
            arguments = self._strings(arguments, index)
        holder = {**holder, "arguments": arguments}
        return {**call, "function": holder} if isinstance(function, dict) else holder

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
        self.marks.append((Place(0, index, piece, number, False), text[first:start]))
        self.marks.append((Place(0, index, piece, number, True), text[stop:last]))
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
        with suppress(TypeError, ValueError):  # a quick look at the JSON text settles nearly every row
            text = orjson.dumps(value) if self._plain_letters else None
            if text is not None and not (
                any(first in text for first in self._firsts_utf8) and self._pattern.search(text.decode())
            ):
                return found
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
