"""Token ids from gigatoken, several times as fast as tokenizers, if it is known to give the same ids.

Speed never justifies a different id, so the ids of a young library are checked. Texts with characters that the two
libraries may treat differently are left to tokenizers. To detect unexpected differences, a job also computes the ids of
some texts with tokenizers.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.exact import exact_ids
from megatron_sft_idx.chat.tokenizer.known_ids import known_class, settled
from megatron_sft_idx.errors import FormatError

COMPARED_ROWS, COMPARED_ONE_IN = 1000, 512
"""How many rows at the beginning of a job are tokenised by both libraries; and of how many other texts one is."""

_compares_all: ContextVar[bool] = ContextVar("compares_all", default=False)

# After this much text, which takes seconds, an encoder is rebuilt, which takes a tenth of a second.
RENEWAL_NBYTES = 64 << 20

PROOF = (
    "Hello, world! It's 3.14159 or 12345678; we'll see. I'M SURE they'Ve   gone\n\n\n"
    "  def f(x):\r\n\treturn x**2  \n"
    "naïve café Ünïcödé — “quotes” … Привет, мир! 你好，世界。こんにちは 한국어 مرحبا بالعالم שָׁלוֹם हिन्दी ไทย "
    "e\u0301 \u00a0\u3000\u200b\u2028 😀👨‍👩‍👧🏽 🇫🇷 x²½ Ⅻ ſ's 'ſ \u0000\u0001\x1c\x85end "
    "<|im_ start|> </ think> "
)


class DifferentIdsError(FormatError):
    """gigatoken and tokenizers give different ids for a text; no row is at fault.

    Attributes:
        difference: the message, without the position of the text in the input.
        text: the text.
    """

    def __init__(self, difference: str, text: str = "", *, place: str = "") -> None:
        super().__init__(f"{place}{difference}")
        self.difference, self.text = difference, text


@contextmanager
def comparing_all_texts(compares_all: bool = True) -> Iterator[None]:
    """In this context, tokenizers checks every text that gigatoken tokenises; if False, only the sample."""
    before = _compares_all.set(compares_all)
    try:
        yield
    finally:
        _compares_all.reset(before)


def is_sampled(text: str) -> bool:
    """Return whether a text is tokenised by both libraries, independent of its position."""
    return xxhash.xxh3_64_intdigest(text.encode()) % COMPARED_ONE_IN == 0


class FastEngine:
    """gigatoken for suitable texts, tokenizers for the rest.

    The ids of a young library are checked: one text in ``COMPARED_ONE_IN``, and inside ``comparing_all_texts`` every
    text, is tokenised by both libraries. The selection depends only on the text, so every process of a job compares the
    same texts, whatever it tokenised before.

    gigatoken caches every word, up to ten bytes per byte of text without repetition. Its encoder is therefore rebuilt
    now and then, so that memory stays bounded for any input.
    """

    def __init__(self, make: Callable[[], Any], exact: tokenizers.Tokenizer, *, nfc: bool) -> None:
        self._make, self._exact, self._nfc = make, exact, nfc
        self._encoder, self._seen_nbytes = make(), 0

    def ids(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Token ids of the texts, without special tokens added.

        Raises:
            DifferentIdsError: the two libraries give different ids for a text that is compared.
        """
        ids = self._settled_ids(texts)
        compared = [i for i, text in enumerate(texts) if _compares_all.get() or is_sampled(text)]
        for i, expected in zip(compared, exact_ids(self._exact, [texts[i] for i in compared]), strict=True):
            if not np.array_equal(ids[i], expected):
                raise DifferentIdsError(_difference(texts[i], ids[i], expected), texts[i])
        return ids

    def _settled_ids(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        ids = self.raw_ids(texts)
        doubtful = [i for i, text in enumerate(texts) if not text.isascii()]
        if self._is_settled("".join([texts[i] for i in doubtful])):  # then each of its parts is settled, too
            return ids
        doubtful = [i for i in doubtful if not self._is_settled(texts[i])]
        for i, exact in zip(doubtful, exact_ids(self._exact, [texts[i] for i in doubtful]), strict=True):
            ids[i] = exact
        return ids

    def _is_settled(self, text: str) -> bool:
        """Return whether all libraries' Unicode tables agree about a text, so that gigatoken's ids can be used.

        The class of a character in Unicode hardly ever changes, its decomposition never. But libraries add new
        characters at different times. So the text must not have any that is newer than ``ASSIGNED``.
        """
        return bool(settled().take(np.frombuffer(text.encode("utf-32-le"), np.uint32)).all()) and (
            not self._nfc or unicodedata.is_normalized("NFC", text)
        )

    def raw_ids(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Return gigatoken's own ids for any text."""
        if self._seen_nbytes > RENEWAL_NBYTES:
            self._encoder, self._seen_nbytes = self._make(), 0
        # As fast as a batch, which would import the awkward package: half a second.
        ids = [np.asarray(self._encoder.encode(text), np.uint32) for text in texts]
        self._seen_nbytes += sum(len(text.encode()) for text in texts)  # fast, because strings cache their UTF-8
        return ids


def _difference(text: str, found: NDArray[np.uint32], expected: NDArray[np.uint32]) -> str:
    """Return the message about a text for which gigatoken and tokenizers give different ids."""
    shorter = min(len(found), len(expected))
    different = np.flatnonzero(found[:shorter] != expected[:shorter])
    at = int(different[0]) if different.size else shorter
    return (
        f"the tokenizers library and gigatoken give different ids for the text that begins {text[:60]!r}: token {at}"
        f" is {expected[at : at + 1].tolist()} with tokenizers and {found[at : at + 1].tolist()} with gigatoken; no"
        " wrong ids were written. Continue without gigatoken: --tokenizer-backend tokenizers"
    )


def load_fast_engine(spec: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> FastEngine | None:
    """Return gigatoken for this tokenizer; None if it is not installed, or not known to give the same ids."""
    if find_spec("gigatoken") is None or known_class(spec) is None:
        return None
    import gigatoken

    try:
        nfc = spec.get("normalizer") is not None
        engine = FastEngine(lambda: gigatoken.Tokenizer.from_json(tokenizer.to_str()), tokenizer, nfc=nfc)
        # The tokenizers library caches up to ten thousand words per tokenizer and thread, until the thread ends. In a
        # separate thread, the sample's rare words do not fill the cache of this one.
        with ThreadPoolExecutor(max_workers=1) as thread:
            agrees = thread.submit(_agrees, engine, tokenizer).result()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic in Rust is a BaseException; in any case, use tokenizers
        return None
    return engine if agrees else None


def _agrees(engine: FastEngine, tokenizer: tokenizers.Tokenizer) -> bool:
    """Compare the two libraries on every added token and on characters from all parts of Unicode."""
    letters = [chr(c) for c in range(0x21, 0x30000, 61) if settled()[c] and not 0xD800 <= c < 0xE000]
    texts = [PROOF, PROOF.upper(), "".join(f"a{c}b {c}{c} 9{c}\n{c} \t" for c in letters)]
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        texts.append(f"a{text}b {text} \n {text}{text}\n\n{text}1 {text[:-1]} {text[1:]}")
    texts = [unicodedata.normalize("NFC", text) for text in texts]
    expected, found = exact_ids(tokenizer, texts), engine.raw_ids(texts)
    return all(map(np.array_equal, expected, found))
