"""Character spans to token weights.

Both ways here agree with transformers' ``return_assistant_tokens_mask``: a span begins with the token that
holds its first character and ends with the first token that holds its last one. They differ from it only
where its own look-up fails. There it trains to the end of the text (a span that ends in the text's first
token, or on a character that no token covers), or drops the rest of the row's spans (a span that begins on
such a character); here a span never trains a token that does not overlap it, and never loses one to another
span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.chat.tokenizer.engines import AddedToken, Ids, Located
from megatron_sft_idx.chat.types import Span

__all__ = ["Crossing", "TokenSpellings", "byte_alphabet", "spelling_table", "unknown_id", "weights_by_offsets"]


class Crossing(NamedTuple):
    """A token that is trained on and begins before its span.

    Attributes:
        token: its number in the text.
        before: what of it lies before the span.
        text: all that it spells.
        held: whether a span that is trained on holds its beginning too.
    """

    token: int
    before: str
    text: str
    held: bool


def unknown_id(index: int) -> str:
    """What stands in a text for an id that is no token."""
    return f"\u27e8{index}\u27e9"


def byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level tokenizers use for the 256 bytes, as GPT-2 chose them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return alphabet


class TokenSpellings:
    """What bytes each token of a byte-level tokenizer stands for, and the masks that follow from that.

    Args:
        spellings: bytes by id; ids without any spell nothing.
    """

    def __init__(self, spellings: dict[int, bytes]) -> None:
        table = [spellings.get(i, b"") for i in range(max(spellings, default=-1) + 1)]
        self._bytes = b"".join(table)
        self._offsets = _running_sum(map(len, table), len(table))

    def spell(self, ids: Sequence[int] | NDArray[np.integer]) -> bytes:
        """The bytes that the tokens stand for, end to end; ids that are none by their number, as ``unknown_id``."""
        known, offsets = range(len(self._offsets) - 1), self._offsets.data  # a memoryview gives plain ints, and fast
        return b"".join(
            (i in known and self._bytes[offsets[i] : offsets[i + 1]]) or unknown_id(i).encode()
            for i in np.asarray(ids, np.int64).tolist()
        )

    def weights(
        self, ids: Ids, utf8: list[bytes], spans: list[list[Span]], *, whole_characters: bool
    ) -> tuple[NDArray[np.float32], list[int], list[bool]]:
        """Weights of all tokens end to end; by text, how many spans straddle and whether the weights hold.

        They hold where the tokens spell the text byte for byte, which is checked, never assumed.

        Raises:
            ValueError: spans descend, overlap or end past their text.
        """
        count = sum(map(len, spans))
        edges = np.fromiter(
            chain.from_iterable((span.start, span.stop) for row in spans for span in row), np.int64, 2 * count
        )
        weights, straddling, spelled = _native.weigh_tokens(
            ids.flat,
            ids.offsets,
            b"".join(utf8),
            _running_sum(map(len, utf8), len(utf8)),
            self._bytes,
            self._offsets,
            edges.reshape(count, 2),
            np.fromiter((span.weight for row in spans for span in row), np.float32, count),
            _running_sum(map(len, spans), len(spans)),
            whole_characters,
        )
        return weights, straddling.tolist(), spelled.astype(bool).tolist()

    def crossings(
        self, ids: Ids, utf8: list[bytes], texts: Sequence[str], spans: list[list[Span]]
    ) -> dict[int, list[Crossing]]:
        """By text, the tokens that begin before a span that they are trained for; of texts that the tokens spell."""
        flat = ids.flat.astype(np.int64)
        ends = np.cumsum(self._offsets[flat + 1] - self._offsets[flat])
        bounds, base = ids.offsets.tolist(), 0
        wanted: list[tuple[int, Span, Span, int]] = []  # text, the span before, the span, its first byte
        bases = []
        for row, (data, text) in enumerate(zip(utf8, texts, strict=True)):
            bases.append(base)
            for before, span in pairwise([Span(0, 0), *spans[row]]):
                if span.weight and span.start < span.stop:
                    at = span.start if len(data) == len(text) else len(text[: span.start].encode())
                    wanted.append((row, before, span, base + at))
            base += len(data)
        begins = np.array([begin for *_, begin in wanted], np.int64)
        tokens = np.searchsorted(ends, begins, "right")
        firsts = np.where(tokens > 0, ends[np.maximum(tokens - 1, 0)], 0) if len(ends) else tokens
        found: dict[int, list[Crossing]] = {}
        for which in np.flatnonzero(firsts < begins).tolist():
            row, before, _, begin = wanted[which]
            token, first = int(tokens[which]), int(firsts[which]) - bases[row]
            held = bool(before.weight) and first < len(texts[row][: before.stop].encode())
            spelt = utf8[row][first : int(ends[token]) - bases[row]].decode("utf-8", "replace")
            begun = utf8[row][first : begin - bases[row]].decode("utf-8", "replace")
            found.setdefault(row, []).append(Crossing(token - bounds[row], begun, spelt, held))
        return found


def _running_sum(lengths: map[int], count: int) -> NDArray[np.int64]:
    return np.fromiter(accumulate(lengths, initial=0), np.int64, count + 1)


def spelling_table(
    vocabulary: Mapping[str, int], added: Sequence[AddedToken], pre_tokenizer: dict[str, object] | None
) -> TokenSpellings | None:
    """The table for a byte-level tokenizer, None for others.

    No more is asked of it than to use that alphabet: whether tokens spell a text is checked text by text.
    """
    if b'"type":"ByteLevel"' not in orjson.dumps(pre_tokenizer):
        return None
    alphabet = byte_alphabet()
    spellings: dict[int, bytes] = {}
    for text, index in vocabulary.items():
        try:
            spellings[index] = bytes([alphabet[c] for c in text])
        except KeyError:  # not of the alphabet, so never produced from bytes: spells nothing
            continue
    for token in added:
        spellings[token.number] = token.text.encode()
    return TokenSpellings(spellings)


def weights_by_offsets(
    encoding: Located,
    text: str,
    spans: Sequence[Span],
    *,
    whole_characters: bool,
    position: Callable[[int], int] = int,
) -> tuple[NDArray[np.float32], list[Crossing]]:
    """Weights of an encoding's tokens by its own offsets, and the tokens that begin before their span.

    Args:
        encoding: with offsets.
        text: the rendered text.
        spans: in its characters.
        whole_characters: count all tokens of a span's last character, not only the first.
        position: where a character of the text stands in the one that was encoded, if that is another.

    Raises:
        ValueError: spans descend, overlap or end past the text.
    """
    edges = [0, *(edge for span in spans for edge in (span.start, span.stop)), len(text)]
    if edges != sorted(edges):
        raise ValueError(f"spans descend, overlap or end past the text of {len(text)} characters: {spans!r:.200}")
    weights = np.zeros(len(encoding.ids), np.float32)
    crossings = []
    done = 0
    for span in spans:
        first = _first_token(encoding, map(position, range(span.start, span.stop)))
        last = _first_token(encoding, map(position, range(span.stop - 1, span.start - 1, -1)))
        if first is None or last is None:
            continue
        stop = position(span.stop - 1) + 1
        while whole_characters and last + 1 < len(weights) and _begin(encoding, last + 1) < stop:
            last += 1
        weights[first : last + 1] = np.maximum(weights[first : last + 1], np.float32(span.weight))
        begin = _begin(encoding, first)
        if span.weight and begin < position(span.start):
            before = text[span.start - (position(span.start) - begin) : span.start]
            crossings.append(Crossing(first, before, before + text[span.start : span.start + 1], begin < done))
        done = stop if span.weight else done
    return weights, crossings


def _first_token(encoding: Located, characters: map[int]) -> int | None:
    """The token that holds the first of the characters that any token holds."""
    for character in characters:
        token = encoding.char_to_token(character)
        if token is not None:
            return int(token)
    return None


def _begin(encoding: Located, token: int) -> int:
    characters = encoding.token_to_chars(token)
    return int(characters[0]) if characters is not None else 0
