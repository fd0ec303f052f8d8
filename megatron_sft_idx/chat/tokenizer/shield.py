"""Texts in which some control tokens are only words: a user's message that spells ``<|im_end|>``.

The tokenizers library either matches added tokens everywhere in a text or nowhere. To have both in one text,
a copy of the tokenizer matches none of them, but knows a private stand-in for each, with the same flags; the
control tokens that the template wrote are replaced by their stand-ins, and the ids translated back. All else
in the tokenizer then acts as it would on the plain text, which cutting the text into pieces would not ensure.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.engines import build_tokenizer

__all__ = ["Shield", "Shielded"]

# Code points that Unicode sets aside for private use inside programs, never for text.
NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True, slots=True)
class Shielded:
    """One text with its stand-ins.

    Attributes:
        text: what is tokenised.
        swaps: (start, stop, start in ``text``, stop in ``text``) of each control token replaced, ascending.
    """

    text: str
    swaps: list[tuple[int, int, int, int]]

    def position(self, character: int) -> int:
        """Where a character of the original text stands in ``text``."""
        at = bisect_right(self.swaps, character, key=lambda swap: swap[0]) - 1
        if at < 0:
            return character
        _, stop, new_start, new_stop = self.swaps[at]
        return new_start if character < stop else new_stop + character - stop


class Shield:
    """Tokenises texts with literals; built on first need, since few corpora have any.

    Args:
        spec: the tokenizer as ``tokenizers`` itself writes it.

    Raises:
        ValueError: the tokenizer treats stand-ins differently from the tokens they stand for.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        added = [token for token in spec["added_tokens"] if token["content"]]
        self._ids = {token["content"]: token["id"] for token in added}
        by_length = sorted(added, key=lambda token: len(token["content"]), reverse=True)
        self._pattern = re.compile("|".join(_pattern(token) for token in by_length) or r"(?!)")
        unknown = self._ids.get(str(spec["model"].get("unk_token")))
        self._added = np.array([i for i in self._ids.values() if i != unknown], np.uint32)
        self._spec = {**spec, "added_tokens": [{**token, "special": True} for token in added]}
        self._flags = {token["content"]: {flag: token[flag] for flag in ("lstrip", "rstrip")} for token in added}
        self._variants: dict[str, tuple[tokenizers.Tokenizer, NDArray[np.uint32]]] = {}
        self._check(build_tokenizer(spec))

    def encode(
        self, text: str, literals: Sequence[tuple[int, int]]
    ) -> tuple[Shielded, tokenizers.Encoding, NDArray[np.uint32]]:
        """The text with stand-ins, its encoding (with offsets into that text), and the true ids.

        Raises:
            ValueError: the tokenizer has no way to spell a literal without its control token.
        """
        mark = next((c for c in NONCHARACTERS if c not in text), None)
        if mark is None:
            raise ValueError("the text holds all of U+FDD0 to U+FDEF, which are not characters")
        shielded = self._replace(text, literals, mark)
        tokenizer, translation = self._variant(mark)
        encoding = tokenizer.encode(shielded.text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        if np.isin(ids, self._added).any():
            raise ValueError("control tokens in the data cannot be kept as text: this tokenizer always knows them")
        return shielded, encoding, translation[ids]

    def _replace(self, text: str, literals: Sequence[tuple[int, int]], mark: str) -> Shielded:
        parts: list[str] = []
        swaps: list[tuple[int, int, int, int]] = []
        done = length = begin = 0
        for literal_start, literal_stop in [*literals, (len(text), len(text))]:
            for match in self._pattern.finditer(text, begin, literal_start):
                stand_in = f"{mark}{self._ids[match.group()]}{mark}"
                length += match.start() - done
                parts += [text[done : match.start()], stand_in]
                swaps.append((match.start(), match.end(), length, length + len(stand_in)))
                length += len(stand_in)
                done = match.end()
            begin = literal_stop
        parts.append(text[done:])
        return Shielded("".join(parts), swaps)

    def _variant(self, mark: str) -> tuple[tokenizers.Tokenizer, NDArray[np.uint32]]:
        """The copy whose stand-ins are spelled with ``mark``, and its ids' true ones."""
        if mark not in self._variants:
            tokenizer = build_tokenizer(self._spec)
            tokenizer.encode_special_tokens = True
            names = {f"{mark}{index}{mark}": content for content, index in self._ids.items()}
            tokenizer.add_tokens(
                [
                    tokenizers.AddedToken(name, special=False, normalized=False, **self._flags[content])
                    for name, content in names.items()
                ]
            )
            vocabulary = tokenizer.get_vocab(with_added_tokens=True)
            translation = np.arange(max(vocabulary.values()) + 1, dtype=np.uint32)
            for name, content in names.items():
                translation[vocabulary[name]] = self._ids[content]
            self._variants[mark] = (tokenizer, translation)
        return self._variants[mark]

    def _check(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Without literals, stand-ins must change nothing."""
        for content in self._ids:
            text = f"word {content} word\n{content}{content}word {content} \n"
            if tokenizer.encode(text, add_special_tokens=False).ids != self.encode(text, [])[2].tolist():
                raise ValueError(f"control tokens in the data cannot be kept as text: {content!r} behaves oddly")


def _pattern(token: dict[str, Any]) -> str:
    text = re.escape(token["content"])
    return rf"(?<!\w){text}(?!\w)" if token.get("single_word") else text
