"""Text to token ids, by whichever library is at hand: the ids are the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson
import tokenizers
from numpy.typing import NDArray

__all__ = ["Engine", "Ids", "TokenizersEngine", "build_tokenizer", "middle_spec"]


class Ids(NamedTuple):
    """Token ids of many texts end to end: text i has ``flat[offsets[i]:offsets[i + 1]]``."""

    flat: NDArray[np.uint32]
    offsets: NDArray[np.int64]

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Ids:
        """Joins rows of ids."""
        offsets = np.fromiter(accumulate(map(len, rows), initial=0), np.int64, len(rows) + 1)
        return Ids(np.fromiter(chain.from_iterable(rows), np.uint32, int(offsets[-1])), offsets)

    def rows(self) -> list[NDArray[np.uint32]]:
        """The texts' ids one by one, as views."""
        return [self.flat[a:b] for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]


class Engine(Protocol):
    """What turns texts into ids, without adding special tokens."""

    name: str

    def ids(self, texts: list[str], utf8: list[bytes]) -> Ids:
        """Token ids of the texts, which come as UTF-8 too, since some libraries want that."""
        ...


class TokenizersEngine:
    """The tokenizers library: every tokenizer, and the one whose ids are right by definition."""

    name = "tokenizers"

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer

    def ids(self, texts: list[str], utf8: list[bytes]) -> Ids:
        """See ``Engine.ids``."""
        del utf8
        return Ids.of([e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)])


def build_tokenizer(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer that tokenises and nothing else.

    Truncation and padding would lose tokens or add some, and post-processors narrow the offsets of tokens
    that hold white space, so that a span's edge may fall on no token at all.

    Raises:
        Exception: whatever the tokenizers library says about a spec it cannot use.
    """
    bare = {**spec, "truncation": None, "padding": None, "post_processor": None}
    return tokenizers.Tokenizer.from_str(orjson.dumps(bare).decode())


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
