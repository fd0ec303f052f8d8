"""The tokenizer of a ``tokenizer.json``: ids from tokenizers, or from gigatoken if it is known to give the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import numpy as np
import orjson
import tokenizers
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.exact import build_tokenizer, exact_ids
from megatron_sft_idx.chat.tokenizer.fast_engine import load_fast_engine
from megatron_sft_idx.chat.tokenizer.passages import AddedTokens, Located, Passage
from megatron_sft_idx.chat.tokenizer.spellings import TokenSpellings, byte_alphabet, unknown_id
from megatron_sft_idx.chat.tokenizer.tokenizer_files import TOKEN_FLAGS, AddedToken, TokenizerFiles
from megatron_sft_idx.errors import FormatError

Backend = Literal["auto", "tokenizers"]
# The position of a text, for tokenizers that put a space before texts. A "whole" text gets one. A "later" stretch,
# after a control token, gets one unless the tokenizer adds it only to the first stretch. In the "middle" of other text
# there is none.
Spaces = Literal["whole", "later", "middle"]


class JsonModel:
    """A loaded ``tokenizer.json``: ids from the library that defines them, and its vocabulary.

    Every kind of model has these methods and attributes.

    Args:
        files: the parsed ``tokenizer.json`` and the additions of its folder.
        backend: see ``load_tokenizer``.

    Attributes:
        name: the library that tokenises.
        size: the largest id + 1.
        added: the control tokens and their ids, by id.
        named: texts of ``bos_token`` and similar tokens, if the vocabulary itself names them.
        spellings: the bytes of every token, if tokens spell their text byte for byte, otherwise None.
        fingerprint: xxh3_128 of everything that determines the ids.

    Raises:
        FormatError: the tokenizers library cannot load it.
    """

    def __init__(self, files: TokenizerFiles, backend: Backend) -> None:
        spec = files.spec
        try:
            self._tokenizer = build_tokenizer(spec)
        except Exception as error:
            raise FormatError(f"{files.path}: the tokenizers library cannot load it: {error}") from error
        before = _added_tokens(self._tokenizer)
        self._tokenizer.add_tokens([tokenizers.AddedToken(one.text, **one.flags) for one in files.additions])
        self.added = _added_tokens(self._tokenizer)
        # The steps are in the library's form. The vocabulary, which it writes slowly, is as in the file.
        steps = {
            key: None if step is None else orjson.loads(step.__getstate__())
            for key in ("normalizer", "pre_tokenizer")
            for step in [getattr(self._tokenizer, key)]
        }
        kind = type(self._tokenizer.model).__name__
        added = [{"id": token.number, "content": token.text, **token.flags} for token in self.added]
        self._spec = {**spec, **steps, "model": {**spec["model"], "type": kind}, "added_tokens": added}
        self._variants = {(orjson.dumps(steps), False): self._tokenizer}
        self._puts_space = any(_without_prefix(step) != step for step in steps.values())
        unknown = spec["model"].get("unk_token")
        self._added_ids = {token.number for token in self.added if token.text not in ("", unknown)}

        self.named: dict[str, str] = {}
        vocabulary = spec["model"]["vocab"]  # an object, or a list for Unigram models
        own = vocabulary if isinstance(vocabulary, dict) else {str(i): i for i in range(len(vocabulary))}
        self.size = 1 + max([*own.values(), *(token.number for token in self.added)])
        self.spellings = _byte_level_spellings(own, self.added, steps["pre_tokenizer"])
        # The fingerprint covers the parts that determine ids, independent of their order or white space in the file.
        decisive = ("normalizer", "pre_tokenizer", "model", "added_tokens", "decoder")
        changed = [] if self.added == before else [*map(list, self.added)]
        options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
        decided = orjson.dumps([{key: spec.get(key) for key in decisive}, changed], option=options)
        self.fingerprint = xxhash.xxh3_128_hexdigest(decided)
        self._fast = load_fast_engine(self._spec, self._tokenizer) if backend == "auto" else None
        self.name = "gigatoken" if self._fast is not None else "tokenizers"

    def ids(self, passages: Sequence[Passage]) -> list[NDArray[np.uint32]]:
        """Token ids of the passages.

        Raises:
            ValueError: a passage cannot be tokenised.
        """
        plain = [i for i, p in enumerate(passages) if not p.literals and not (p.middle and self._puts_space)]
        texts = [passages[i].text for i in plain]
        ids = exact_ids(self._tokenizer, texts) if self._fast is None else self._fast.ids(texts)
        if len(plain) == len(passages):
            return ids
        plain_ids = dict(zip(plain, ids, strict=True))
        return [plain_ids[i] if i in plain_ids else self.locate(p)[0] for i, p in enumerate(passages)]

    def locate(self, passage: Passage) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return ids, and the characters ``[begin, end)`` of the passage for each: int64 [tokens, 2].

        Raises:
            ValueError: a passage cannot be tokenised.
        """
        middle = passage.middle and self._puts_space
        if not passage.literals:
            tokenizer = self._variant("middle" if middle else "whole", plain=False)
            encoding = tokenizer.encode(passage.text, add_special_tokens=False)
            return _as_arrays(encoding.ids, encoding.offsets)

        def encode_text(text: str, start: int) -> Located:
            tokenizer = self._variant("middle" if middle else "later" if start else "whole", plain=True)
            encoding = tokenizer.encode(text, add_special_tokens=False)
            if not self._added_ids.isdisjoint(encoding.ids):
                raise ValueError(
                    "control tokens in the data cannot be kept as text: this tokenizer always recognizes them"
                )
            return encoding.ids, encoding.offsets

        without = passage._replace(literals=())
        if not np.array_equal(self._control.encode(without, encode_text)[0], self.locate(without)[0]):
            raise ValueError("control tokens in the data cannot be kept as text: this tokenizer does not split at them")
        return _as_arrays(*self._control.encode(passage, encode_text))

    @cached_property
    def _control(self) -> AddedTokens:
        """Created on first use: few corpora spell control tokens, and thousands of them take half a second."""
        return AddedTokens(self.added)

    def _variant(self, spaces: Spaces, *, plain: bool) -> tokenizers.Tokenizer:
        """Return the same tokenizer for a stretch of text, created on first use; ``plain`` without added tokens."""
        steps = {step: self._spec[step] for step in ("normalizer", "pre_tokenizer")}
        if spaces != "whole":
            steps = {name: _without_prefix(step, later=spaces == "later") for name, step in steps.items()}
        spec = {**self._spec, **steps, **({"added_tokens": []} if plain else {})}
        key = (orjson.dumps(steps), plain)  # most tokenizers put no space before any text, so these keys are equal
        if key not in self._variants:
            self._variants[key] = build_tokenizer(spec)
        return self._variants[key]

    def token_id(self, text: str) -> int | None:
        """Return the id of a token by its name in the vocabulary."""
        index = self._tokenizer.token_to_id(text)
        return None if index is None else int(index)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of ids. See ``Tokenizer.decode``."""
        if self.spellings is not None:
            return self.spellings.spell(ids).decode("utf-8", "replace")

        def is_token(index: int) -> bool:
            return 0 <= index < self.size and self._tokenizer.id_to_token(index) is not None

        runs = groupby(np.asarray(ids).tolist(), is_token)
        return "".join(
            self._tokenizer.decode(list(run), skip_special_tokens=False) if known else "".join(map(unknown_id, run))
            for known, run in runs
        )


def _byte_level_spellings(
    vocabulary: Mapping[str, int], added: Sequence[AddedToken], pre_tokenizer: dict[str, object] | None
) -> TokenSpellings | None:
    """Return the spellings of a byte-level tokenizer's tokens; None for other tokenizers.

    A tokenizer is byte-level if it has such a pre-tokenizer. Whether the tokens of a text spell it is checked for each
    text.
    """
    if b'"type":"ByteLevel"' not in orjson.dumps(pre_tokenizer):
        return None
    alphabet = byte_alphabet()
    spellings: dict[int, bytes] = {}
    for text, index in vocabulary.items():
        try:
            spellings[index] = bytes([alphabet[c] for c in text])
        except KeyError:  # not all in the byte alphabet, so no text becomes this token
            continue
    return TokenSpellings(spellings | {token.number: token.text.encode() for token in added})


def _without_prefix(step: dict[str, Any] | None, *, later: bool = False) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer that puts no space before a text; None if nothing of it is left.

    With ``later``, remove only the spaces that the library puts before the first stretch of a text.
    """
    kind = None if step is None else step["type"]
    if step is None or (kind == "Prepend" and not later):
        return None
    if kind == "Sequence":
        parts = "normalizers" if "normalizers" in step else "pretokenizers"
        kept = (_without_prefix(part, later=later) for part in step[parts])
        return {**step, parts: [part for part in kept if part is not None]}
    if kind == "Metaspace" and (not later or step["prepend_scheme"] == "first"):
        return {**step, "prepend_scheme": "never"}
    return {**step, "add_prefix_space": False} if "add_prefix_space" in step and not later else step


def _added_tokens(tokenizer: tokenizers.Tokenizer) -> list[AddedToken]:
    found = sorted(tokenizer.get_added_tokens_decoder().items())
    return [AddedToken(i, one.content, {flag: getattr(one, flag) for flag in TOKEN_FLAGS}) for i, one in found]


def _as_arrays(ids: Sequence[int], edges: Sequence[tuple[int, int]]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    return np.array(ids, np.uint32), np.array(edges, np.int64).reshape(len(ids), 2)
