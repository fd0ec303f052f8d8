"""A ``tokenizer.json``: ids by the tokenizers library, or by gigatoken where that is known to give the same.

A text may hold control tokens that are only words: a user's message that spells ``<|im_end|>``. The tokenizers
library either matches added tokens everywhere in a text or nowhere. To have both in one text, a copy of the tokenizer
matches none of them, but knows a private stand-in for each, with the same flags; the control tokens that the template
wrote are replaced by their stand-ins, and the ids translated back. All else in the tokenizer then acts as it would on
the plain text, which cutting the text into pieces would not ensure.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import orjson
import tokenizers
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.engines import (
    AddedToken,
    Engine,
    Ids,
    Located,
    Passage,
    TokenizersEngine,
    build_tokenizer,
)
from megatron_sft_idx.chat.tokenizer.fast_engine import library_versions, load_fast_engine
from megatron_sft_idx.chat.tokenizer.token_masks import spelling_table, unknown_id
from megatron_sft_idx.chat.tokenizer.tokenizer_files import AddedTokenSpec, TokenizerFiles
from megatron_sft_idx.errors import FormatError

__all__ = ["Backend", "JsonModel", "Shield", "Shielded"]

Backend = Literal["auto", "tokenizers", "gigatoken"]

# Code points that Unicode sets aside for private use inside programs, never for text.
NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]


class JsonModel:
    """See ``Model``.

    Args:
        files: the parsed ``tokenizer.json`` and what the folder adds to it.
        backend: as for ``load_tokenizer``.
        parallel: tokenise a batch on all cores.
        proof: ``proof`` of the same tokenizer loaded before, here or in another process.

    Attributes:
        proof: says for which tokenizer and libraries gigatoken was compared with tokenizers on a sample; empty where
            it was not or where it failed.

    Raises:
        FormatError: the tokenizers library cannot load it, or gigatoken cannot where that was asked for.
    """

    def __init__(self, files: TokenizerFiles, *, backend: Backend, parallel: bool, proof: str) -> None:
        try:
            self._tokenizer = build_tokenizer(files.spec)
        except Exception as error:
            raise FormatError(f"{files.path}: the tokenizers library cannot load it: {error}") from error
        before = _added_tokens(self._tokenizer)
        self._tokenizer.add_tokens([_added_token(token) for token in files.additions])
        after = _added_tokens(self._tokenizer)
        # As the library itself would write it, which for the vocabulary is long and what the file says.
        self._spec = {
            **files.spec,
            "normalizer": _written(self._tokenizer.normalizer),
            "pre_tokenizer": _written(self._tokenizer.pre_tokenizer),
            "model": {**files.spec["model"], "type": type(self._tokenizer.model).__name__},
            "added_tokens": [{"id": index, "content": text, **flags} for index, text, flags in after],
        }
        vocabulary = files.spec["model"]["vocab"]  # an object, but in Unigram models a list
        own: dict[str, int] = (
            vocabulary if isinstance(vocabulary, dict) else {str(i): i for i in range(len(vocabulary))}
        )
        self.fingerprint = _fingerprint(files.spec, [] if after == before else after)
        self.named: dict[str, str] = {}
        self.added = [AddedToken(index, text, flags["special"]) for index, text, flags in after]
        self.size = 1 + max([*own.values(), *(token.number for token in self.added)])
        self.spellings = spelling_table(own, self.added, self._spec["pre_tokenizer"])
        self.proof = ""
        self._engine: Engine = TokenizersEngine(self._tokenizer)
        if backend != "tokenizers":
            wanted = f"{self.fingerprint} {library_versions()}"
            engine, reason = load_fast_engine(self._spec, self._tokenizer, parallel=parallel, proven=proof == wanted)
            if engine is not None:
                self._engine, self.proof = engine, wanted
            elif backend == "gigatoken":
                raise FormatError(f"{files.path}: {reason}")
        self.name = self._engine.name
        middle = middle_spec(self._spec)
        self._middle_spec = middle if middle != self._spec else None
        self._variants: dict[bool, tokenizers.Tokenizer] = {False: self._tokenizer}
        self._shields: dict[bool, Shield] = {}

    def ids(self, passages: Sequence[Passage]) -> Ids:
        """See ``Model.ids``."""
        plain = [i for i, p in enumerate(passages) if not p.literals and not self._is_middle(p)]
        texts = [passages[i].text for i in plain]
        ids = self._engine.ids(texts, [text.encode() for text in texts])
        if len(plain) == len(passages):
            return ids
        rows = dict(zip(plain, ids.rows(), strict=True))
        return Ids.join([rows[i] if i in rows else self.locate(p)[0] for i, p in enumerate(passages)])

    def locate(self, passage: Passage) -> tuple[NDArray[np.uint32], Located, Callable[[int], int]]:
        """See ``Model.locate``."""
        middle = self._is_middle(passage)
        if passage.literals:
            shielded, encoding, ids = self.shield(middle).encode(passage.text, passage.literals)
            return ids, encoding, shielded.position
        if middle not in self._variants:
            self._variants[middle] = build_tokenizer(self._middle_spec or self._spec)
        encoding = self._variants[middle].encode(passage.text, add_special_tokens=False)
        return np.array(encoding.ids, np.uint32), encoding, int

    def shield(self, middle: bool) -> Shield:
        """What keeps control tokens in the data as text; made on first need, since few corpora have any."""
        if middle not in self._shields:
            self._shields[middle] = Shield(self._middle_spec or self._spec if middle else self._spec)
        return self._shields[middle]

    def token_id(self, text: str) -> int | None:
        """See ``Model.token_id``."""
        index = self._tokenizer.token_to_id(text)
        return None if index is None else int(index)

    def token_name(self, index: int) -> str | None:
        """See ``Model.token_name``."""
        return self._tokenizer.id_to_token(index) if 0 <= index < self.size else None

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """See ``Model.decode``."""
        if self.spellings is not None:
            return self.spellings.spell(ids).decode("utf-8", "replace")
        runs = groupby(np.asarray(ids).tolist(), lambda index: self.token_name(index) is not None)
        return "".join(
            self._tokenizer.decode(list(run), skip_special_tokens=False) if known else "".join(map(unknown_id, run))
            for known, run in runs
        )

    def _is_middle(self, passage: Passage) -> bool:
        return passage.middle and self._middle_spec is not None


def middle_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer for a text that goes on from another: it puts no space in front."""
    spec = dict(spec)
    spec["normalizer"] = _without_prefix(spec.get("normalizer"), "normalizers")
    spec["pre_tokenizer"] = _without_prefix(spec.get("pre_tokenizer"), "pretokenizers")
    return spec


def _without_prefix(step: dict[str, Any] | None, parts: str) -> dict[str, Any] | None:
    if step is None or step.get("type") == "Prepend":
        return None
    if step.get("type") == "Sequence":
        kept = [part for part in (_without_prefix(part, parts) for part in step[parts]) if part is not None]
        return {**step, parts: kept}
    if step.get("type") == "Metaspace":
        return {**step, "prepend_scheme": "never", "add_prefix_space": False}
    if "add_prefix_space" in step:
        return {**step, "add_prefix_space": False}
    return step


def _written(step: Any) -> dict[str, Any] | None:
    return None if step is None else orjson.loads(step.__getstate__())


def _added_token(token: AddedTokenSpec) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token.content, **token.flags)


def _added_tokens(tokenizer: tokenizers.Tokenizer) -> list[tuple[int, str, dict[str, bool]]]:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    found = sorted(tokenizer.get_added_tokens_decoder().items())
    return [(i, token.content, {flag: getattr(token, flag) for flag in flags}) for i, token in found]


def _fingerprint(spec: dict[str, Any], added: list[tuple[int, str, dict[str, bool]]]) -> str:
    """Of the parts of tokenizer.json that decide ids, whatever their order or white space in the file."""
    decisive = {key: spec.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens", "decoder")}
    content = orjson.dumps([decisive, added], option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return xxhash.xxh3_128_hexdigest(content)


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
