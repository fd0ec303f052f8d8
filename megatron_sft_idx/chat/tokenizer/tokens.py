"""The tokenizer of a ``tokenizer.json``, ``JsonModel``, and what all kinds of tokenizers share.

Ids are those of the tokenizers library, which defines them. ``FastEngine`` has gigatoken make them, several times as
fast, where it is known to give the same ids; no speed is worth another id. ``AddedTokens`` keeps control tokens that
are spelt in the data plain text. ``TokenSpellings`` knows the bytes of tokens, and so which tokens a span trains on.

The masks agree with transformers' ``return_assistant_tokens_mask``: a span begins with the token that holds its first
character and ends with the first token that holds its last one. They differ only where the look-up of transformers
fails. There it trains to the end of the text (a span that ends in the text's first token, or on a character that no
token covers), or drops the rest of the row's spans (a span that begins on such a character). Here a span never trains a
token that does not overlap it, and a token is never lost to another span. The same holds where the bytes of tokens are
not those of the text, and ``tokenizer`` goes by the characters that the library says each token holds.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from base64 import b85decode
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
import tokenizers
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.chat.tokenizer.tokenizer_files import TOKEN_FLAGS, AddedToken, TokenizerFiles
from megatron_sft_idx.chat.types import Span
from megatron_sft_idx.errors import FormatError

Backend = Literal["auto", "tokenizers"]
# Where a text stands, for tokenizers that put a space before texts. A "whole" text gets it. A "later" stretch, behind a
# control token, gets it unless it is for the first stretch alone. In the "middle" of other text there is none.
Spaces = Literal["whole", "later", "middle"]


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


# ---- what tokens spell, and the weights that follow ----


def unknown_id(index: int) -> str:
    """What stands for an id that is no token where ids are shown as text: its number in angle brackets."""
    return f"\u27e8{index}\u27e9"


def byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level tokenizers use for the 256 bytes, as GPT-2 chose them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class TokenSpellings:
    """The bytes that each token of a tokenizer stands for, and the masks that follow from that.

    Args:
        spellings: bytes by id; an id that is not in it spells nothing.

    Attributes:
        nbytes: how many bytes each id stands for, int64.
    """

    def __init__(self, spellings: Mapping[int, bytes]) -> None:
        table = [spellings.get(i, b"") for i in range(max(spellings, default=-1) + 1)]
        self._bytes, self._offsets = b"".join(table), _offsets_of(table)
        self.nbytes = np.diff(self._offsets)

    def spell(self, ids: Sequence[int] | NDArray[np.integer]) -> bytes:
        """The bytes that the tokens stand for, end to end; an id without bytes is shown as ``unknown_id`` shows it."""
        valid, offsets = range(len(self._offsets) - 1), self._offsets.data  # a memoryview gives plain ints, and fast
        return b"".join(
            (i in valid and self._bytes[offsets[i] : offsets[i + 1]]) or unknown_id(i).encode()
            for i in np.asarray(ids, np.int64).tolist()
        )

    def edges(self, ids: NDArray[np.uint32], utf8: bytes) -> NDArray[np.int64]:
        """The characters ``[begin, end)`` that each token holds of the text that all of them spell; [tokens, 2]."""
        number = np.cumsum((np.frombuffer(utf8, np.uint8) & 0xC0) != 0x80)  # of each byte's character, from 1
        ends = np.cumsum(self.nbytes[ids])
        return np.stack([number[ends - self.nbytes[ids]] - 1, number[ends - 1]], axis=1)

    def weights(
        self, ids: list[NDArray[np.uint32]], utf8: list[bytes], spans: list[list[Span]]
    ) -> tuple[list[NDArray[np.float32]], list[int], list[bool]]:
        """The loss weights of the tokens of several texts.

        Args:
            ids: the ids of each text.
            utf8: each text as UTF-8.
            spans: the spans of each text.

        Returns:
            Three lists with one item a text: the weights of its tokens, float32; how many of its spans begin within a
            token; and whether its tokens spell it byte for byte, which is checked here. Where they do not, the caller
            must not use the weights.

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
    """Where each row begins when all rows stand end to end, and where the last one ends."""
    return np.fromiter(accumulate(map(len, rows), initial=0), np.int64, len(rows) + 1)


# ---- gigatoken, where it is known to give the same ids ----


def build_tokenizer(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer that tokenises and nothing else.

    Truncation and padding would lose tokens or add some, and post-processors narrow the offsets of tokens
    that hold white space, so that a span's edge may fall on no token at all.

    Raises:
        Exception: whatever the tokenizers library says about a spec it cannot use.
    """
    bare = {**spec, "truncation": None, "padding": None, "post_processor": None}
    return tokenizers.Tokenizer.from_str(orjson.dumps(bare).decode())


def exact_ids(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[NDArray[np.uint32]]:
    """Token ids by the tokenizers library, which are right by definition; no special tokens are added."""
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.uint32) for encoding in encodings]


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

# The time to load gigatoken grows with the square of the longest added token: half a minute at 30,000 characters.
LONGEST_ADDED_NBYTES = 512

# The code points that Unicode 13.0 of 2020 assigns; the tables of every library in use are newer. As 32-bit numbers:
# how many code points are unassigned, how many after these are assigned, and so on. Python's own table will not do: it
# is another one in each release of Python, and may be newer than those of a library.
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

COMPARED_FIRST, COMPARED_LATER = 1000, 128
"""How many texts are tokenised by both libraries at first; and of how many later texts one is."""

COMPARED_NBYTES = 2 << 20
"""The first comparison ends after so many characters: long texts would take it many seconds."""

# After this much text, which takes seconds, an encoder is made anew, which takes a tenth of a second.
RENEWAL_NBYTES = 64 << 20

PROOF = (
    "Hello, world! It's 3.14159 or 12345678; we'll see. I'M SURE they'Ve   gone\n\n\n"
    "  def f(x):\r\n\treturn x**2  \n"
    "naïve café Ünïcödé — “quotes” … Привет, мир! 你好，世界。こんにちは 한국어 مرحبا بالعالم שָׁלוֹם हिन्दी ไทย "
    "e\u0301 \u00a0\u3000\u200b\u2028 😀👨‍👩‍👧🏽 🇫🇷 x²½ Ⅻ ſ's 'ſ \u0000\u0001\x1c\x85end "
    "<|im_ start|> </ think> "
)


def known_class(spec: dict[str, Any]) -> str | None:
    """The class of a tokenizer, such as ``llama3+nfc``; None if gigatoken is not known to give the ids of its class."""
    model, step, added = spec["model"], spec.get("pre_tokenizer"), spec["added_tokens"]
    normalizer, normalized = spec.get("normalizer"), {bool(token.get("normalized")) for token in added}
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if (
        model.get("type") != "BPE"
        or any(map(model.get, options))
        or normalizer not in (None, {"type": "NFC"})
        or any(len(token["content"].encode()) > LONGEST_ADDED_NBYTES for token in added)
        or any(token.get(flag) for token in added for flag in ("single_word", "lstrip", "rstrip"))
        or (True in normalized and (normalizer is not None or False in normalized))
        or step is None
    ):
        return None

    def holds(found: dict[str, Any], **wanted: Any) -> bool:
        return all(found.get(key) == value for key, value in wanted.items())

    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    suffix = "+nfc" if normalizer else ""
    if holds(step, **byte_level) and step.get("use_regex", True):
        return f"gpt2{suffix}"
    parts = step.get("pretokenizers") if step.get("type") == "Sequence" else None
    if parts and len(parts) == 2 and holds(parts[1], **byte_level, use_regex=False):
        for name, pattern in KNOWN_SPLITS.items():
            if holds(parts[0], type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False):
                return f"{name}{suffix}"
    return None


class FastEngine:
    """gigatoken where a text allows it, tokenizers for the rest.

    One young library does not decide ids alone: the first ``COMPARED_FIRST`` texts of every engine, and then one text
    in ``COMPARED_LATER``, are tokenised by both libraries. A job with several workers has an engine in each, so these
    compare the first texts of the job too. Which of the later texts are compared depends on the text alone.

    gigatoken remembers every word it has met, up to ten bytes per byte of text that never repeats itself, so its
    encoder is renewed now and then: memory stays bounded however long the input.
    """

    def __init__(self, make: Callable[[], Any], exact: tokenizers.Tokenizer, *, nfc: bool) -> None:
        self._make, self._exact, self._nfc = make, exact, nfc
        self._encoder, self._seen_nbytes = make(), 0
        self._num_compared = self._compared_nbytes = 0

    def ids(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Token ids of the texts, without special tokens added.

        Raises:
            FormatError: the two libraries give different ids for a text that is compared.
        """
        ids = self._settled_ids(texts)
        first = 0
        while first < len(texts) and self._num_compared < COMPARED_FIRST and self._compared_nbytes < COMPARED_NBYTES:
            self._num_compared += 1
            self._compared_nbytes += len(texts[first])
            first += 1
        compared = [
            i
            for i, text in enumerate(texts)
            if i < first or xxhash.xxh3_64_intdigest(text.encode()) % COMPARED_LATER == 0
        ]
        if compared:
            for i, exact in zip(compared, exact_ids(self._exact, [texts[i] for i in compared]), strict=True):
                if not np.array_equal(ids[i], exact):
                    raise FormatError(_difference(texts[i], ids[i], exact))
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
        """Whether every library's Unicode tables say the same about a text, so that gigatoken's ids can be taken.

        The class of a character that Unicode has hardly ever changes, its decomposition never; but libraries learn new
        characters at different times. So the text must hold none that is younger than ``ASSIGNED``.
        """
        return bool(settled().take(np.frombuffer(text.encode("utf-32-le"), np.uint32)).all()) and (
            not self._nfc or unicodedata.is_normalized("NFC", text)
        )

    def raw_ids(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Gigatoken's own answer, whatever the text."""
        if self._seen_nbytes > RENEWAL_NBYTES:
            self._encoder, self._seen_nbytes = self._make(), 0
        # As quick as a batch, which would import the awkward package: half a second.
        ids = [np.asarray(self._encoder.encode(text), np.uint32) for text in texts]
        self._seen_nbytes += sum(len(text.encode()) for text in texts)  # quick, as strings keep their UTF-8
        return ids


def _difference(text: str, found: NDArray[np.uint32], expected: NDArray[np.uint32]) -> str:
    """The message about a text for which gigatoken and tokenizers give different ids."""
    shorter = min(len(found), len(expected))
    different = np.flatnonzero(found[:shorter] != expected[:shorter])
    at = int(different[0]) if different.size else shorter
    return (
        f"the tokenizers library and gigatoken give different ids for the text that begins {text[:60]!r}: token {at} is"
        f" {expected[at : at + 1].tolist()} by tokenizers and {found[at : at + 1].tolist()} by gigatoken; nothing was"
        " written with wrong ids. Go on without gigatoken: --tokenizer-backend tokenizers"
    )


@lru_cache(maxsize=1)
def settled() -> NDArray[np.bool_]:
    """For each code point whether Unicode has had it for so long that every library's tables do; bool [0x110000]."""
    counts = np.frombuffer(zlib.decompress(b85decode(ASSIGNED)), "<u4")
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts)


def load_fast_engine(spec: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> FastEngine | None:
    """Gigatoken for this tokenizer; None where it is not installed, or not known to give the same ids."""
    if find_spec("gigatoken") is None or known_class(spec) is None:
        return None
    import gigatoken

    try:
        nfc = spec.get("normalizer") is not None
        engine = FastEngine(lambda: gigatoken.Tokenizer.from_json(tokenizer.to_str()), tokenizer, nfc=nfc)
        # The tokenizers library caches up to ten thousand words for each tokenizer and thread, until the thread ends.
        # In a thread of its own the sample's odd words do not fill the cache of this one.
        with ThreadPoolExecutor(max_workers=1) as thread:
            agrees = thread.submit(_agrees, engine, tokenizer).result()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic in Rust is a BaseException; whatever it was, tokenizers will do
        return None
    return engine if agrees else None


def _agrees(engine: FastEngine, tokenizer: tokenizers.Tokenizer) -> bool:
    """Compares the two libraries on every added token and on characters from all over Unicode."""
    letters = [chr(c) for c in range(0x21, 0x30000, 61) if settled()[c] and not 0xD800 <= c < 0xE000]
    texts = [PROOF, PROOF.upper(), "".join(f"a{c}b {c}{c} 9{c}\n{c} \t" for c in letters)]
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        texts.append(f"a{text}b {text} \n {text}{text}\n\n{text}1 {text[:-1]} {text[1:]}")
    texts = [unicodedata.normalize("NFC", text) for text in texts]
    expected, found = exact_ids(tokenizer, texts), engine.raw_ids(texts)
    return all(map(np.array_equal, expected, found))


# ---- a tokenizer.json ----


class JsonModel:
    """A loaded ``tokenizer.json``: ids by the library that defines them, and its vocabulary.

    Every kind of model has these methods and attributes.

    Args:
        files: the parsed ``tokenizer.json`` and what the folder adds to it.
        backend: as for ``load_tokenizer``.

    Attributes:
        name: the library that tokenises.
        size: the largest id + 1.
        added: the control tokens and their ids, by id.
        named: texts of ``bos_token`` and the like, where the vocabulary itself names them.
        spellings: the bytes of every token, where tokens spell their text byte for byte, otherwise None.
        fingerprint: xxh3_128 of everything that decides the ids.

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
        # The steps are as the library writes them; the vocabulary, which takes it long to write, is as the file has it.
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
        vocabulary = spec["model"]["vocab"]  # an object, but in Unigram models a list
        own = vocabulary if isinstance(vocabulary, dict) else {str(i): i for i in range(len(vocabulary))}
        self.size = 1 + max([*own.values(), *(token.number for token in self.added)])
        self.spellings = _byte_level_spellings(own, self.added, steps["pre_tokenizer"])
        # The fingerprint is of the parts that decide ids, whatever their order or white space in the file.
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
            ValueError: a passage that cannot be tokenised.
        """
        plain = [i for i, p in enumerate(passages) if not p.literals and not (p.middle and self._puts_space)]
        texts = [passages[i].text for i in plain]
        ids = exact_ids(self._tokenizer, texts) if self._fast is None else self._fast.ids(texts)
        if len(plain) == len(passages):
            return ids
        plain_ids = dict(zip(plain, ids, strict=True))
        return [plain_ids[i] if i in plain_ids else self.locate(p)[0] for i, p in enumerate(passages)]

    def locate(self, passage: Passage) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Ids, and the characters ``[begin, end)`` of the passage that each stands for: int64 [tokens, 2].

        Raises:
            ValueError: a passage that cannot be tokenised.
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
                raise ValueError("control tokens in the data cannot be kept as text: this tokenizer always knows them")
            return encoding.ids, encoding.offsets

        without = passage._replace(literals=())
        if not np.array_equal(self._control.encode(without, encode_text)[0], self.locate(without)[0]):
            raise ValueError("control tokens in the data cannot be kept as text: this tokenizer does not split at them")
        return _as_arrays(*self._control.encode(passage, encode_text))

    @cached_property
    def _control(self) -> AddedTokens:
        """Made when first needed: few corpora spell control tokens, and thousands of them take half a second."""
        return AddedTokens(self.added)

    def _variant(self, spaces: Spaces, *, plain: bool) -> tokenizers.Tokenizer:
        """The same tokenizer for a stretch of text; ``plain`` without added tokens. Made when it is first needed."""
        steps = {step: self._spec[step] for step in ("normalizer", "pre_tokenizer")}
        if spaces != "whole":
            steps = {name: _without_prefix(step, later=spaces == "later") for name, step in steps.items()}
        spec = {**self._spec, **steps, **({"added_tokens": []} if plain else {})}
        key = (orjson.dumps(steps), plain)  # most tokenizers put no space before any text, so these keys are equal
        if key not in self._variants:
            self._variants[key] = build_tokenizer(spec)
        return self._variants[key]

    def token_id(self, text: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        index = self._tokenizer.token_to_id(text)
        return None if index is None else int(index)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text that ids stand for; see ``Tokenizer.decode``."""
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
    """The spellings of a byte-level tokenizer's tokens; None for other tokenizers.

    Byte-level is one with such a pre-tokenizer. Whether the tokens of a text spell it is checked for each text.
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
    """A normalizer or pre-tokenizer, changed to put no space before a text; None if nothing is left of it.

    With ``later`` it loses only the spaces that the library puts before the first stretch of a text alone.
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
