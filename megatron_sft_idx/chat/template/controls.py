"""Find control tokens spelled by the data in a rendered text, by renaming them in the data and rendering again.

Rendering again costs as much as the first time, so only rows whose data spells a control token are rendered again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import orjson

from megatron_sft_idx.chat.template.messages import THINKING_TAG


class ControlTokens:
    """Finds the tokenizer's control tokens that are spelled by the data and not by the template.

    In assistant messages, the tags around reasoning do not count, because there they are meant as control tokens.

    Args:
        texts: the texts of the control tokens; empty ones are ignored.

    Attributes:
        texts: the same texts without duplicates, longest first.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        self.texts = tuple(longest_first)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        untagged = [text for text in longest_first if not THINKING_TAG.fullmatch(text)]
        self._assistant = re.compile("|".join(map(re.escape, untagged)) or "(?!)")
        self._firsts = tuple(sorted({text[0] for text in longest_first}))
        self._firsts_utf8 = tuple(first.encode("utf-8", "surrogatepass") for first in self._firsts)
        # Whether JSON writes all these tokens without escapes, so that they can be searched in JSON text.
        self._plain_in_json = not any(re.search(r'["\\\x00-\x1f\ud800-\udfff]', text) for text in longest_first)

    def among(self, value: Any) -> set[str]:
        """Return the control tokens spelled anywhere in a JSON-like value, including keys."""
        found: set[str] = set()
        try:
            text = orjson.dumps(value) if self._plain_in_json else None
        except (TypeError, ValueError):
            text = None
        # For nearly every row, the JSON text quickly shows that it spells none.
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
        """Find the positions in ``text`` of control tokens spelled by the data.

        Args:
            data: the template variables that contain strings of the data.
            text: their plain rendering.
            render: renders modified ``data``; returns None if the template rejects it.

        Returns:
            The ascending ``(start, stop)`` ranges of these tokens; and the control tokens that the template itself
            searches for in the data, such as a ``</think>`` at which it splits an answer. The latter have no ranges:
            they belong to the template, and stay control tokens.
        """
        tokens = self.among(data)
        ranges = self._ranges(data, tokens, text, render) if tokens else []
        if ranges is not None:
            return ranges, set()
        unread = {token for token in tokens if self._ranges(data, {token}, text, render) is not None}
        ranges = self._ranges(data, unread, text, render) if unread else []
        return (ranges, tokens - unread) if ranges is not None else ([], tokens)

    def _ranges(
        self,
        data: Mapping[str, Any],
        tokens: set[str],
        text: str,
        render: Callable[[Mapping[str, Any]], str | None],
    ) -> list[tuple[int, int]] | None:
        """Return the ranges of these tokens; None if the template writes other text after renaming them in the data."""
        nonce = "Zq"
        while nonce in text or nonce in repr(data):
            nonce += "Zq"
        order = sorted(tokens, key=lambda token: (-len(token), token))
        # Letters and digits are not changed by tojson, escaping or trimming.
        names = {token: f"{nonce}{number}x" for number, token in enumerate(order)}
        altered = render(_renamed(data, names, order))
        if altered is None:
            return None
        split = re.split(f"{nonce}([0-9]+)x", altered)  # alternating text and numbers of tokens
        split[1::2] = [order[int(number)] for number in split[1::2]]
        ends = [*accumulate(map(len, split))]
        return list(zip(ends[:-1:2], ends[1::2], strict=True)) if "".join(split) == text else None


def _renamed(value: Any, names: Mapping[str, str], order: Sequence[str]) -> Any:
    """A copy of a JSON-like value with control tokens replaced by their ``names``, in this ``order``."""
    if isinstance(value, str):
        for token in order:
            value = value.replace(token, names[token])
        return value
    if isinstance(value, dict):
        if value.get("role") == "assistant":
            order = [token for token in order if not THINKING_TAG.fullmatch(token)]
        return {_renamed(key, names, order): _renamed(item, names, order) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(item, names, order) for item in value]
    return value
