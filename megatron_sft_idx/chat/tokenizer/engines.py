"""What turns text into token ids, and what it knows beside that: the interfaces, and the tokenizers library."""

from __future__ import annotations

import unicodedata
import zlib
from base64 import b85decode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import orjson
import tokenizers
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megatron_sft_idx.chat.tokenizer.token_masks import TokenSpellings

__all__ = [
    "KNOWN_SPLITS",
    "AddedToken",
    "Engine",
    "FastEngine",
    "Ids",
    "Located",
    "Model",
    "Passage",
    "TokenizersEngine",
    "build_tokenizer",
    "is_installed",
    "known_class",
    "library_versions",
    "load_fast_engine",
    "settled",
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


def is_installed() -> bool:
    """Whether gigatoken can be imported."""
    return find_spec("gigatoken") is not None


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

    name = "gigatoken"

    def __init__(self, make: Callable[[], Any], exact: TokenizersEngine, *, nfc: bool, parallel: bool) -> None:
        self._make = make
        self._encoder = make()
        self._seen_nbytes = 0
        self._exact = exact
        self._nfc = nfc
        self._parallel = parallel

    def ids(self, texts: list[str], utf8: list[bytes]) -> Ids:
        """See ``Engine.ids``."""
        doubtful = [i for i, text in enumerate(texts) if not text.isascii() and not self._is_settled(text)]
        ids = self.raw_ids(utf8)
        if not doubtful:
            return ids
        rows = ids.rows()
        exact = self._exact.ids([texts[i] for i in doubtful], [])
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
    return f"tokenizers {tokenizers.__version__}, gigatoken {version('gigatoken') if is_installed() else None}"


def load_fast_engine(
    spec: dict[str, Any], tokenizer: tokenizers.Tokenizer, *, parallel: bool, proven: bool = False
) -> tuple[FastEngine | None, str]:
    """Gigatoken for this tokenizer, or None and the reason why not; ``proven`` spares the sample."""
    if not is_installed():
        return None, "gigatoken is not installed: pip install gigatoken"
    if known_class(spec) is None:
        return None, "gigatoken is not known to be identical for this kind of tokenizer"
    import gigatoken

    try:
        engine = FastEngine(
            lambda: gigatoken.Tokenizer.from_json(tokenizer.to_str()),
            TokenizersEngine(tokenizer),
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
    expected = TokenizersEngine(tokenizer).ids(texts, [])
    found = engine.raw_ids([text.encode() for text in texts])
    return np.array_equal(expected.offsets, found.offsets) and np.array_equal(expected.flat, found.flat)
