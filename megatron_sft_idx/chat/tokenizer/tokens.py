"""Token ids and what they stand for: the libraries that make them, the text they spell, the masks that follow.

Masks are made in two ways, by the bytes that tokens spell and by a library's own offsets. Both agree with transformers'
``return_assistant_tokens_mask``: a span begins with the token that holds its first character and ends with the first
token that holds its last one. They differ from it only where its own look-up fails. There it trains to the end of the
text (a span that ends in the text's first token, or on a character that no token covers), or drops the rest of the
row's spans (a span that begins on such a character); here a span never trains a token that does not overlap it, and
never loses one to another span.
"""

from __future__ import annotations

import unicodedata
import zlib
from base64 import b85decode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson
import tokenizers
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.chat.types import Span

__all__ = [
    "KNOWN_SPLITS",
    "AddedToken",
    "Crossing",
    "FastEngine",
    "Ids",
    "Located",
    "Model",
    "Passage",
    "TokenSpellings",
    "build_tokenizer",
    "byte_alphabet",
    "exact_ids",
    "known_class",
    "library_versions",
    "load_fast_engine",
    "settled",
    "spelling_table",
    "unknown_id",
    "weights_by_offsets",
]


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


# What tokens spell, and the weights that follow


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
        self, ids: Ids, utf8: list[bytes], texts: Sequence[str], spans: list[list[Span]], straddling: list[int]
    ) -> dict[int, list[Crossing]]:
        """By text, the tokens that begin before a span that they are trained for; of texts that the tokens spell.

        Where ``straddling`` counts none, as ``weights`` found, none are looked for.
        """
        flat = ids.flat.astype(np.int64)
        ends = np.cumsum(self._offsets[flat + 1] - self._offsets[flat])
        bounds, base = ids.offsets.tolist(), 0
        wanted: list[tuple[int, Span, Span, int]] = []  # text, the span before, the span, its first byte
        bases = []
        for row, (data, text) in enumerate(zip(utf8, texts, strict=True)):
            bases.append(base)
            for before, span in pairwise([Span(0, 0), *spans[row]]) if straddling[row] else ():
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


# The libraries


def build_tokenizer(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer that tokenises and nothing else.

    Truncation and padding would lose tokens or add some, and post-processors narrow the offsets of tokens
    that hold white space, so that a span's edge may fall on no token at all.

    Raises:
        Exception: whatever the tokenizers library says about a spec it cannot use.
    """
    bare = {**spec, "truncation": None, "padding": None, "post_processor": None}
    return tokenizers.Tokenizer.from_str(orjson.dumps(bare).decode())


def exact_ids(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> Ids:
    """Token ids by the tokenizers library, right by definition for every tokenizer.json; it adds no special ones."""
    return Ids.of([encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)])


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# Split patterns of the byte-level tokenizers in use, by the family that brought them.
KNOWN_SPLITS = {
    "llama3": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen3.5": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

# What loading gigatoken takes grows with the square of the longest added token: half a minute at 30,000 characters.
LONGEST_ADDED_NBYTES = 512

# The code points that Unicode 13.0 assigns: of 2020, before the tables of any library that may be in play. Unassigned
# and assigned ones in turn, how many of each, as 32-bit numbers. What this Python knows would be another set on each
# Python, and one that is newer than a library knows too much.
ASSIGNED = (
    b"c-oy<OOI4V6uxy|ef#!vMwnr`XSzo+%;-G8VHjX!)SjS#fe<42AQHj?B+;NIvXE$uVdFwbOf=DGbY)l?-6$r85aZ()NZiQ6H49g2T%c9fcj%9k+oC"
    b"Qi)wk-@sq^^GqdEwJ;N>U?LOZ8+#CDYIFf`U-zG(bB9eDb!m?P}(up_gh4L*)v#f}N=|AKiH=T6yCw__K+7cn<LH;!+S!|__SV?DlyvGy6hGtkQz!"
    b"8+>`K{mHvR`fA=7@~2%6Z{@i`lduzbYEC7vp$JB9}({o_6&Uw*^v`XnRGJ$aKFf(EBc6N8YD{<JW7iGPWILJY5PW?jRx3v7&3-rU$#lCWHxkfq-+>"
    b"Lj~M(lAHKr?hwDLGQ+khLZelG{`w}xDt+Q`)?2ioKn-|z^5P!yUto#~6b}j#s`WD<aai*pAhw*!Z!kHl%ShiI8Bg0xwK5@RdAM`FCY%1_$f_Z~l9|"
    b"diq)>G17;&;-Heb}GE+6;Xg$}cs@@m+xoj^8<RyPb7jl=XYn_uaw2J126isP)~LCt<r5bbTV|=V>>882bIAxT8k#Sb^Qj$luihTu7`RCp)GzHwd38"
    b"-7^O}?ZI9bbP{h>%3bcRS@NHgYaaV8su7OvLC~$?>;%3mO0GKAT|RusjsxJg06u4d!Bu=WFt3vQ!Z#y*{=mI$bGx0VmEAMtPd&PzTUL0h6Cd||m#Q"
    b"ZcXQ#-XA?m5%H3BZ0z?tKH0s6li`WjV1E?ZaX<H((V5Aznx??CT`0r=lZd8dxJEEAsp@B9+(l)Q5kx?aPY;HQUu!To8-H;47(n2+F$==IYXZ>Ni~p"
    b"Lam+W5&nAW%%$a<=a{48xhWSf^HAyD%Q`!#vRZfr2ZtP_?LU@Do>q;EywAuP|ZblUIqWxRJ?vX=Vcqk{vzh*H+s5ff#DK#NHAK;=Vn0P@+xBOjPbb"
    b"ZVQ;$~_mF-P&r5`F$!js)^M=a(S765?J8(^Bd*oCvt5|QTd%3p}3|o@~uTW3GdE+S+XA&!$?KqEo6v4g?_%B9XDFY7)<&zG0Yyw>!IQvNXZ;JTDu&"
    b"Kk_Hekx}c+26*_<KfhHbYFO%AWJ8FOuKVZ|uWa$Ll_2uLSswkaxsqJ;XzddLsQlpVNKO1j!InA0*iBAveuX-6#WB5uI-nUQ0ylejl>qQN-F3e7A(X"
    b"&5+66J8k-PYF72XA!1nUK8u_)4qc^=9>m=p_<uL~N8Se|^6N77QyKJhd`{52s)Bv-+uDGBf$NCW!(FgTPCea!?b8kArBL<K+#e^Z2bCW8O_x`RrbG"
    b"C0d@sSDQb%3<Jpvs>?iw(-LiXDZzlZcTX(DI4Jb2QM!@xnNa#p7F?5Ovb;4G)y9s)1Y7qm%_!@%O-@|k{}UZA?3Q+}9KcCQ1Y+WzwtE4*GN`=#WAk"
    b"n)L9KDuQ$<8k-}VP-3A{DHmf89To~{&Kp0W5-wa@RqoL|M&LbUVFipHW{pho`09{BE9Mf*f*peP5Q!I;ZELH&exyX15cyZ*$;jz^v>;(e3H9=AN6*"
    b"*7W)`=a{guk)ipjRM>s3*_zQMDwnWd-yDp;qlM`N!S)qQ#+6>mOBKDm=?^7TBBzTOWmOT#r_7=SJ_5TZo>XlLUSyS(TOzn@We2}RBHH7X6`qwGUS3"
    b"-}2gfMX^>C+FXcM9i+AE-WZA0slpX#BfQc)K6pVy}s}(E-Z;a&E{nd>DHV*zq;#)mC!o-?_4beiIJbGX?LTBK~(8`dqC16c3OgCwnI(M?&k{1n;K*"
    b"PC5z9G}ODXLHWS({sc980$7*xW!1;0!1Irh$C$)LjowdHdhb;U`!V&!lAok*c2qq*2l*bOzOPC+;{Rn5>J7%||EDs^Rsx>hrv6%VPpx3rFZuei-1K"
    b"?lI_^0?;_qCvhUr=XI(G4Ad*OZ?^Pk_yZ`BBw%U;L-l+Bw#aPv=pUgp05?8$zU"
)

# A fresh encoder takes a tenth of a second, this much text several.
RENEWAL_NBYTES = 64 << 20

PROOF = (
    "Hello, world! It's 3.14159 or 12345678; we'll see. I'M SURE they'Ve   gone\n\n\n"
    "  def f(x):\r\n\treturn x**2  \n"
    "naïve café Ünïcödé — “quotes” … Привет, мир! 你好，世界。こんにちは 한국어 مرحبا بالعالم שָׁלוֹם हिन्दी ไทย "
    "e\u0301 \u00a0\u3000\u200b\u2028 😀👨‍👩‍👧🏽 🇫🇷 x²½ Ⅻ ſ's 'ſ \u0000\u0001\x1c\x85end "
    "<|im_ start|> </ think> "
)


def known_class(spec: dict[str, Any]) -> str | None:
    """The name of the tokenizer's class where gigatoken was found identical on it, otherwise None."""
    model = spec["model"]
    plain_bpe = model.get("type") == "BPE" and not any(
        model.get(option)
        for option in (
            "dropout",
            "unk_token",
            "continuing_subword_prefix",
            "end_of_word_suffix",
            "byte_fallback",
        )
    )
    normalizer = spec.get("normalizer")
    if not plain_bpe or normalizer not in (None, {"type": "NFC"}):
        return None
    added = spec["added_tokens"]
    if any(len(token["content"].encode()) > LONGEST_ADDED_NBYTES for token in added):
        return None
    if any(token.get(flag) for token in added for flag in ("single_word", "lstrip", "rstrip")):
        return None
    if normalizer is not None and any(token.get("normalized") for token in added):
        return None
    if len({bool(token.get("normalized")) for token in added}) > 1:
        return None
    split = _split_name(spec.get("pre_tokenizer"))
    if split is None:
        return None
    return split + ("+nfc" if normalizer else "")


def _split_name(step: dict[str, Any] | None) -> str | None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    if step is None:
        return None
    if _subset(byte_level, step) and step.get("use_regex", True):
        return "gpt2"
    parts = step.get("pretokenizers") if step.get("type") == "Sequence" else None
    if not parts or len(parts) != 2 or not _subset({**byte_level, "use_regex": False}, parts[1]):
        return None
    for name, pattern in KNOWN_SPLITS.items():
        wanted = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        if _subset(wanted, parts[0]):
            return name
    return None


def _subset(wanted: dict[str, Any], found: dict[str, Any]) -> bool:
    return all(found.get(key) == value for key, value in wanted.items())


class FastEngine:
    """gigatoken where a text allows it, tokenizers for the rest.

    gigatoken remembers every word it has met, up to ten bytes a byte of text that never repeats itself, so
    its encoder is made anew now and then: memory stays bounded however long the input.
    """

    def __init__(self, make: Callable[[], Any], exact: tokenizers.Tokenizer, *, nfc: bool, parallel: bool) -> None:
        self._make = make
        self._encoder = make()
        self._seen_nbytes = 0
        self._exact = exact
        self._nfc = nfc
        self._parallel = parallel

    def ids(self, texts: list[str]) -> Ids:
        """Token ids of the texts, without special tokens added."""
        doubtful = [i for i, text in enumerate(texts) if not text.isascii() and not self._is_settled(text)]
        ids = self.raw_ids([text.encode() for text in texts])
        if not doubtful:
            return ids
        rows = ids.rows()
        exact = exact_ids(self._exact, [texts[i] for i in doubtful])
        for i, row in zip(doubtful, exact.rows(), strict=True):
            rows[i] = row
        return Ids.join(rows)

    def raw_ids(self, utf8: list[bytes]) -> Ids:
        """Gigatoken's own answer, whatever the text."""
        if not utf8:
            return Ids.of([])
        self._seen_nbytes += sum(map(len, utf8))
        if self._seen_nbytes > RENEWAL_NBYTES:
            self._encoder, self._seen_nbytes = self._make(), 0
        if not self._parallel:  # as quick as a batch, which would import the awkward package: half a second
            return Ids.join([self._encoder.encode(text) for text in utf8])
        layout = self._encoder.encode_batch(utf8, parallel=True).layout
        offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        return Ids(np.asarray(layout.content.data, dtype=np.uint32)[: offsets[-1]], offsets)

    def _is_settled(self, text: str) -> bool:
        """Whether all Unicode tables in play say the same about the text.

        Characters are hardly ever reclassified once assigned, and never decomposed otherwise, but libraries learn
        new ones at different times; what is old, all know.
        """
        if not settled()[np.frombuffer(text.encode("utf-32-le"), np.uint32)].all():
            return False
        return not self._nfc or unicodedata.is_normalized("NFC", text)


@lru_cache(maxsize=1)
def settled() -> NDArray[np.bool_]:
    """By code point: whether Unicode has it since so long that the tables of every library do."""
    counts = np.frombuffer(zlib.decompress(b85decode(ASSIGNED)), "<u4")
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts)


def library_versions() -> str:
    """Of the libraries that are compared; a sample says nothing about others."""
    return f"tokenizers {tokenizers.__version__}, gigatoken {version('gigatoken') if find_spec('gigatoken') else None}"


def load_fast_engine(
    spec: dict[str, Any], tokenizer: tokenizers.Tokenizer, *, parallel: bool, proven: bool = False
) -> tuple[FastEngine | None, str]:
    """Gigatoken for this tokenizer, or None and the reason why not; ``proven`` spares the sample."""
    if find_spec("gigatoken") is None:
        return None, "gigatoken is not installed: pip install gigatoken"
    if known_class(spec) is None:
        return None, "gigatoken is not known to be identical for this kind of tokenizer"
    import gigatoken

    try:
        engine = FastEngine(
            lambda: gigatoken.Tokenizer.from_json(tokenizer.to_str()),
            tokenizer,
            nfc=spec.get("normalizer") is not None,
            parallel=parallel,
        )
        if proven:
            return engine, ""
        # The tokenizers library keeps the words a thread has met, up to ten thousand a tokenizer, until the thread
        # ends, though the tokenizer be long gone. The sample's odd words must not stay, nor take the text's places.
        with ThreadPoolExecutor(max_workers=1) as thread:
            proven = thread.submit(_agrees, engine, tokenizer).result()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is a BaseException; whatever it was, tokenizers will do
        return None, f"gigatoken cannot load it: {error}"
    if not proven:
        return None, "gigatoken's ids differ from those of tokenizers on a sample"
    return engine, ""


def _agrees(engine: FastEngine, tokenizer: tokenizers.Tokenizer) -> bool:
    """Compares the two libraries on every added token and on characters from all over Unicode."""
    letters = [chr(c) for c in range(0x21, 0x30000, 61) if settled()[c] and not 0xD800 <= c < 0xE000]
    texts = [PROOF, PROOF.upper(), "".join(f"a{c}b {c}{c} 9{c}\n{c} \t" for c in letters)]
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        texts.append(f"a{text}b {text} \n {text}{text}\n\n{text}1 {text[:-1]} {text[1:]}")
    texts = [unicodedata.normalize("NFC", text) for text in texts]
    expected = exact_ids(tokenizer, texts)
    found = engine.raw_ids([text.encode() for text in texts])
    return np.array_equal(expected.offsets, found.offsets) and np.array_equal(expected.flat, found.flat)
