"""Finding out where strings of the data went, by rendering them altered.

Two questions need it, both in few rows. Where do a message's words start, when they occur twice in what it
wrote? And which control tokens in the text were spelt by the data? Either way strings get marks, the template
renders them, and the marks are taken out again; the answer holds only if what is left is the plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from megatron_sft_idx.chat.template.words import REASONING_FIELDS, pieces_of

__all__ = ["ControlTokens", "locate_pieces"]

_SENTINELS = tuple(chr(base) for base in range(0xF1000, 0xF1040, 2))

_THINKING_TAG = re.compile(r"</?(?:think|thinking|thought|reasoning)>|\[/?THINK\]")

RenderMessages = Callable[[list[dict[str, Any]]], str]


def locate_pieces(
    messages: Sequence[dict[str, Any]], text: str, render: RenderMessages
) -> dict[tuple[int, int], int] | None:
    """Find where the words of assistant messages start in ``text``.

    Args:
        messages: the conversation as the template saw it.
        text: what the template made of it.
        render: renders altered messages.

    Returns:
        (message, number of the piece) to character; calls are left out. None where marks change what the
        template does.
    """
    sentinel = next((one for one in _SENTINELS if one not in text), None)
    if sentinel is None:
        return None
    close = chr(ord(sentinel) + 1)
    altered: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        copy = dict(message)
        if message.get("role") == "assistant":
            pieces = [(number, piece) for number, piece in enumerate(pieces_of(message)) if piece.kind != "call"]
            for number, piece in reversed(pieces):  # from the back, so that offsets stay true
                mark = f"{sentinel}{index}.{number}{close}"
                value = copy[piece.field]
                if isinstance(value, list):
                    value = [{**value[0], "text": _inserted(value[0]["text"], piece.offset, mark)}]
                else:
                    value = _inserted(value, piece.offset, mark)
                for field in REASONING_FIELDS if piece.field in REASONING_FIELDS else (piece.field,):
                    if copy.get(field) is not None:
                        copy[field] = value
        altered.append(copy)
    marked = render(altered)
    places: dict[tuple[int, int], int] = {}
    removed = 0
    pattern = re.compile(f"{sentinel}([0-9]+)[.]([0-9]+){close}")
    for match in pattern.finditer(marked):
        places.setdefault((int(match[1]), int(match[2])), match.start() - removed)
        removed += len(match[0])
    return places if pattern.sub("", marked) == text else None


def _inserted(text: str, offset: int, mark: str) -> str:
    return text[:offset] + mark + text[offset:]


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
        if not self._plain_letters or self._may_hold(value):
            self._collect(value, found, self._pattern)
        return found

    def _may_hold(self, value: Any) -> bool:
        """Whether the value's JSON text holds a control token: a quick look that settles nearly every row."""
        try:
            text = orjson.dumps(value)
        except (TypeError, ValueError):
            return True
        return any(first in text for first in self._firsts_utf8) and self._pattern.search(text.decode()) is not None

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
