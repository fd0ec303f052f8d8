"""The bytes of tokens, and the masks of texts that their tokens spell byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.chat.types import Span


def unknown_id(index: int) -> str:
    """Return the text shown for an id that is not a token: its number in angle brackets."""
    return f"\u27e8{index}\u27e9"


def byte_alphabet() -> dict[str, int]:
    """Return the printable substitutes that byte-level tokenizers use for the 256 bytes, as chosen by GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class TokenSpellings:
    """The bytes of each token of a tokenizer, and the masks that follow from them.

    Args:
        spellings: bytes by id; a missing id spells nothing.

    Attributes:
        nbytes: number of bytes of each id, int64.
    """

    def __init__(self, spellings: Mapping[int, bytes]) -> None:
        table = [spellings.get(i, b"") for i in range(max(spellings, default=-1) + 1)]
        self._bytes, self._offsets = b"".join(table), _offsets_of(table)
        self.nbytes = np.diff(self._offsets)

    def spell(self, ids: Sequence[int] | NDArray[np.integer]) -> bytes:
        """Return the concatenated bytes of the tokens; an id without bytes is shown like in ``unknown_id``."""
        valid, offsets = range(len(self._offsets) - 1), self._offsets.data  # a memoryview returns plain ints quickly
        return b"".join(
            (i in valid and self._bytes[offsets[i] : offsets[i + 1]]) or unknown_id(i).encode()
            for i in np.asarray(ids, np.int64).tolist()
        )

    def edges(self, ids: NDArray[np.uint32], utf8: bytes) -> NDArray[np.int64]:
        """Return the characters ``[begin, end)`` of each token in the text that all of them spell; [tokens, 2]."""
        number = np.cumsum((np.frombuffer(utf8, np.uint8) & 0xC0) != 0x80)  # of each byte's character, from 1
        ends = np.cumsum(self.nbytes[ids])
        return np.stack([number[ends - self.nbytes[ids]] - 1, number[ends - 1]], axis=1)

    def weights(
        self, ids: list[NDArray[np.uint32]], utf8: list[bytes], spans: list[list[Span]]
    ) -> tuple[list[NDArray[np.float32]], list[int], list[bool]]:
        """Return the loss weights of the tokens of several texts.

        Args:
            ids: the ids of each text.
            utf8: each text as UTF-8.
            spans: the spans of each text.

        Returns:
            Three lists with one item per text: the weights of its tokens, float32; the number of its spans that begin
                inside a token; and whether its tokens spell it byte for byte, which is checked here. If they do not,
                the caller must not use the weights.

        Raises:
            ValueError: spans descend, overlap or end past their text.
        """
        count, offsets = sum(map(len, spans)), _offsets_of(ids)
        edges = chain.from_iterable((span.start, span.stop) for row in spans for span in row)
        weights, straddling, spelled = _native.weigh_tokens(
            np.concatenate([np.zeros(0, np.uint32), *ids]),
            offsets,
            b"".join(utf8),
            _offsets_of(utf8),
            self._bytes,
            self._offsets,
            np.fromiter(edges, np.int64, 2 * count).reshape(count, 2),
            np.fromiter((span.weight for row in spans for span in row), np.float32, count),
            _offsets_of(spans),
        )
        by_text = [weights[begin:end] for begin, end in pairwise(offsets.tolist())]
        return by_text, straddling.tolist(), spelled.astype(bool).tolist()


def _offsets_of(rows: Sequence[Sized]) -> NDArray[np.int64]:
    """Return the start of each row when all rows are concatenated, and the end of the last one."""
    return np.fromiter(accumulate(map(len, rows), initial=0), np.int64, len(rows) + 1)
