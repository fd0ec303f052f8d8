"""Passages, which are what is tokenised, and the added tokens in them.

A control token is a token only where the template wrote it: ``AddedTokens`` keeps one that the data spells plain text.
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
        middle: whether it runs on from other text, so that a tokenizer that puts a space before each text must put
            none here.
    """

    text: str
    literals: Sequence[tuple[int, int]] = ()
    middle: bool = False

    def stretch(self, start: int, stop: int, *, middle: bool) -> Passage:
        """The characters ``[start, stop)`` of the passage, with the parts of its literals that lie there."""
        inside = [(max(a, start) - start, min(b, stop) - start) for a, b in self.literals if a < stop and b > start]
        return Passage(self.text[start:stop], inside, middle)


# The ids of a text, and for each id the characters ``(begin, end)`` that it holds.
Located = tuple[Sequence[int], Sequence[tuple[int, int]]]


class AddedTokens:
    """Finds the added tokens in texts: the longest of those at one place, and none with ``single_word`` inside a word.

    Args:
        added: the added tokens; of their flags ``lstrip``, ``rstrip`` and ``single_word`` count.
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
        """Tokenises a passage: added tokens outside its literals become their ids, ``encode_text`` does the rest.

        Args:
            passage: what to tokenise.
            encode_text: tokenises the text between two added tokens, never empty, given where in the passage it begins.

        Returns:
            The ids, and the characters ``(begin, end)`` of the passage that each holds, if ``encode_text`` gives them.
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
        """The passage cut at added tokens: ``(start, stop)``, and the id of an added token or None for other text."""
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
