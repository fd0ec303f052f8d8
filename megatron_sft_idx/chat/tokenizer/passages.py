"""Passages, the unit of tokenization, and the added tokens in them.

A control token is a token only if the template wrote it: ``AddedTokens`` keeps one spelled by the data as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_sft_idx.chat.tokenizer.tokenizer_files import AddedToken


class Passage(NamedTuple):
    """A text to tokenise.

    Attributes:
        text: a whole text, or a stretch of one.
        literals: character ranges in which control tokens are plain text; ascending ``(start, stop)``.
        middle: whether it continues other text, so that a tokenizer that puts a space before each text must not put one
            here.
    """

    text: str
    literals: Sequence[tuple[int, int]] = ()
    middle: bool = False

    def stretch(self, start: int, stop: int, *, middle: bool) -> Passage:
        """Return the characters ``[start, stop)`` of the passage, with the corresponding parts of its literals."""
        inside = [(max(a, start) - start, min(b, stop) - start) for a, b in self.literals if a < stop and b > start]
        return Passage(self.text[start:stop], inside, middle)


# The ids of a text, and for each id its characters ``(begin, end)``.
Located = tuple[Sequence[int], Sequence[tuple[int, int]]]


class AddedTokens:
    """Finds the added tokens in texts: the longest at each position, and none with ``single_word`` inside a word.

    Args:
        added: the added tokens. Their flags ``lstrip``, ``rstrip`` and ``single_word`` are used.
    """

    def __init__(self, added: Sequence[AddedToken]) -> None:
        self._tokens = {token.text: token for token in added if token.text}
        longest_first = sorted(self._tokens.values(), key=lambda token: len(token.text), reverse=True)
        parts = (
            rf"(?<!\w){re.escape(token.text)}(?!\w)" if token.flags.get("single_word") else re.escape(token.text)
            for token in longest_first
        )
        self._pattern = re.compile("|".join(parts) or r"(?!)")

    def encode(self, passage: Passage, encode_text: Callable[[str, int], Located]) -> tuple[list[int], list[Any]]:
        """Tokenise a passage: added tokens outside its literals become their ids, ``encode_text`` does the rest.

        Args:
            passage: the passage.
            encode_text: tokenises nonempty text between two added tokens, given its position in the passage.

        Returns:
            The ids, and the characters ``(begin, end)`` of the passage for each, if ``encode_text`` returns them.
        """
        ids: list[int] = []
        edges: list[tuple[int, int]] = []
        for start, stop, control in self._stretches(passage):
            if control is not None:
                ids.append(control)
                edges.append((start, stop))
            else:
                found, ranges = encode_text(passage.text[start:stop], start)
                ids += found
                edges += [(start + begin, start + end) for begin, end in ranges]
        return ids, edges

    def _stretches(self, passage: Passage) -> Iterator[tuple[int, int, int | None]]:
        """Divide the passage at added tokens: yields ``(start, stop)``, and the id of an added token or None."""
        text = passage.text
        given = begin = 0
        for literal_start, literal_stop in [*passage.literals, (len(text), len(text))]:
            for match in self._pattern.finditer(text, begin, literal_start):
                token = self._tokens[match[0]]
                start, stop = match.span()
                if token.flags.get("lstrip"):
                    start = given + len(text[given:start].rstrip())
                if token.flags.get("rstrip"):
                    stop = len(text) - len(text[stop:].lstrip())
                if given < start:
                    yield given, start, None
                yield start, stop, token.number
                given = stop
            begin = literal_stop
        if given < len(text):
            yield given, len(text), None
