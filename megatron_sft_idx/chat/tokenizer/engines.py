"""What turns text into token ids, and what it knows beside that: the interfaces, and the tokenizers library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import orjson
import tokenizers
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megatron_sft_idx.chat.tokenizer.token_masks import TokenSpellings

__all__ = ["AddedToken", "Engine", "Ids", "Located", "Model", "Passage", "TokenizersEngine", "build_tokenizer"]


class Passage(NamedTuple):
    """A text to tokenise.

    Attributes:
        text: whole, or a piece of one.
        literals: character ranges whose control tokens are only words; ascending ``(start, stop)``.
        middle: whether text before it runs on into it, so that a tokenizer that begins texts with a space of its own
            must not.
    """

    text: str
    literals: Sequence[tuple[int, int]] = ()
    middle: bool = False


class Ids(NamedTuple):
    """Token ids of many texts end to end: text i has ``flat[offsets[i]:offsets[i + 1]]``."""

    flat: NDArray[np.uint32]
    offsets: NDArray[np.int64]

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Ids:
        """Joins rows of ids."""
        offsets = np.fromiter(accumulate(map(len, rows), initial=0), np.int64, len(rows) + 1)
        return Ids(np.fromiter(chain.from_iterable(rows), np.uint32, int(offsets[-1])), offsets)

    @staticmethod
    def join(rows: Sequence[NDArray[np.uint32]]) -> Ids:
        """Joins rows that are arrays."""
        offsets = np.fromiter(accumulate(map(len, rows), initial=0), np.int64, len(rows) + 1)
        return Ids(np.concatenate([np.zeros(0, np.uint32), *rows]), offsets)

    def rows(self) -> list[NDArray[np.uint32]]:
        """The texts' ids one by one, as views."""
        return [self.flat[a:b] for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]


class AddedToken(NamedTuple):
    """A control token: text that becomes this id wherever a template writes it."""

    number: int
    text: str
    special: bool


class Located(Protocol):
    """Which characters a text's tokens stand for, as ``tokenizers.Encoding`` tells it."""

    @property
    def ids(self) -> Sequence[int]:
        """Token ids."""
        ...

    def char_to_token(self, character: int, /) -> int | None:
        """The first token that holds the character."""
        ...

    def token_to_chars(self, token: int, /) -> tuple[int, int] | None:
        """Where a token's characters begin and end."""
        ...


class Engine(Protocol):
    """What turns texts into ids, without adding special tokens."""

    name: str

    def ids(self, texts: list[str], utf8: list[bytes]) -> Ids:
        """Token ids of the texts, which come as UTF-8 too, since some libraries want that."""
        ...


class Model(Protocol):
    """A loaded tokenizer of one kind: ids by the library that defines them, and its vocabulary.

    Attributes:
        name: the library that tokenises.
        size: the largest id + 1.
        added: the control tokens, by id.
        named: what the vocabulary itself says of ``bos_token`` and the like.
        fingerprint: xxh3_128 of all that decides the ids.
    """

    name: str
    size: int
    added: list[AddedToken]
    named: dict[str, str]
    fingerprint: str

    @property
    def spellings(self) -> TokenSpellings | None:
        """The bytes of every token, where tokens spell their text byte for byte, otherwise None."""
        ...

    def ids(self, passages: Sequence[Passage]) -> Ids:
        """Token ids of the passages.

        Raises:
            ValueError: a passage that cannot be tokenised.
        """
        ...

    def locate(self, passage: Passage) -> tuple[NDArray[np.uint32], Located, Callable[[int], int]]:
        """Ids, where they stand, and where a character of the passage stands in the text that was located.

        Raises:
            ValueError: a passage that cannot be tokenised.
        """
        ...

    def token_id(self, text: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        ...

    def token_name(self, index: int) -> str | None:
        """The vocabulary's name for an id, None where it is no token."""
        ...

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text that ids stand for; see ``Tokenizer.decode``."""
        ...


class TokenizersEngine:
    """The tokenizers library, whose ids are right by definition for every tokenizer.json."""

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
