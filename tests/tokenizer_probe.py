"""Strings on which tokenizers are known to disagree, for comparisons of two tokenizers."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator, Sequence

SPACES = [
    *(" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x1f", "\x85", "\xa0", "\u1680"),
    *("\u2000", "\u2003", "\u2007", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\u200b"),
    *("\ufeff", "\u2060", "\u180e", "\u2581", " \u2581 "),
]
DIGITS = ["0", "7", "42", "100", "1234", "3.14", "1,000,000", "0x1F", "1e-9", "²", "½", "Ⅻ", "①", "٣", "९", "𝟘", "𑁦"]
CODE = [
    "def f(x):\n\treturn x ** 2  # twice\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]->c; }",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}}',
    "<p class='x'>&nbsp;a &amp; b</p><!-- -->",
    "https://example.org/a_b-c?q=1&r=%20#frag",
    "$ git commit -m 'x' && ls -la | grep \"y\"\r\n",
    "\\begin{equation} \\sum_{i=0}^{\\infty} x_i^2 \\end{equation}",
    "SELECT * FROM t WHERE a <> 'it''s' -- no",
    "aGVsbG8gd29ybGQ=QUJDRA==0123456789abcdefABCDEF",
]
WORDS = [
    *("the", "Hello", "HELLO", "it's", "WE'LL", "they'Ve", "ſ's", "don’t", "naïve", "straße", "ǅ", "ﬁre", "über"),
    *(
        "Привет",
        "мир",
        "γειά",
        "שָׁלוֹם",
        "مَرْحَبًا",
        "नमस्ते",
        "สวัสดี",
        "你好世界",
        "機械学習",
        "こんにちは",
        "カﾀｶﾅ",
        "한국어",
    ),
    *(
        "한",
        "각",
        "ក្រុង",
        "ᠮᠣᠩᠭᠣᠯ",
        "𐍈𐌰",
        "𠮷野家",
        "🯰🯱",
        "𝔘𝔫𝔦",
        "e\u0301",
        "A\u030a",
        "\u1e9b\u0323",
        "a\u0300\u0316\u0327",
    ),
    *("Z\u0351\u036b\u0343a\u0363l\u0348\u034dgo", "\u0301", "\u200d", "\u202eabc\u202c", "ﷺ", "½", "™", "㍿", "㌔"),
]
EMOJI = [
    "😀",
    "👨\u200d👩\u200d👧\u200d👦",
    "🏳️\u200d🌈",
    "👩🏽\u200d🚀",
    "🇫🇷🇩🇪",
    "1️⃣",
    "☺️",
    "☺",
    "🫠",
    "🏴\U000e0067\U000e007f",
    "🏽",
]
EDGES = [
    "\x00",
    "\x7f",
    "\x80",
    "\xff",
    "\ud7ff",
    "\ue000",
    "\ufdd0",
    "\ufffd",
    "\ufffe",
    "\uffff",
    "\U00010000",
    "\U0010ffff",
]


def probe(count: int, control: Sequence[str] = (), *, seed: int = 0, longest: int = 3_000) -> Iterator[str]:
    """Yield ``count`` strings of all kinds of text in turn, with every code point if there are enough strings.

    Args:
        count: number of strings. With 100,000 or more, each code point except surrogates occurs in one of them.
        control: control tokens, put in about one string in four.
        seed: seed of the random choices.
        longest: length of the longest runs, in characters.
    """
    rng = random.Random(seed)
    codes = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    known = [c for c in codes if unicodedata.category(chr(c)) not in ("Cn", "Co")]
    rng.shuffle(codes)
    at = 0
    pieces = [*WORDS, *WORDS, *SPACES, *DIGITS, *EMOJI, *EDGES]
    for number in range(count):
        kind = number % 8
        if kind < 3:  # thirty random code points, in contexts that influence splits
            some = codes[at : at + 30]
            at = at + 30 if at + 30 < len(codes) else 0
            parts = [chr(c) + rng.choice(["", " ", "a", "1", "\n", "'s", "", " "]) for c in some]
        elif kind == 3:  # neighbouring code points, mostly of one script
            start = rng.choice(known)
            parts = [
                chr(c) for c in range(start, start + rng.randrange(1, 40)) if c < 0x110000 and not 0xD800 <= c < 0xE000
            ]
        elif kind == 4:  # runs
            length = rng.choice([2, 3, 7, 16, 17, 64, 200, longest]) if number % 64 == 4 else rng.randrange(1, 20)
            parts = [rng.choice([*pieces, *"aA0.-=_#*\n\t /"]) * length, rng.choice(pieces)]
        elif kind == 5:
            parts = [rng.choice(CODE)[rng.randrange(10) :], rng.choice(SPACES), rng.choice(CODE)]
        elif kind == 6:
            parts = [rng.choice(SPACES) for _ in range(rng.randrange(1, 5))] + [rng.choice(pieces)]
            parts = rng.choice([parts, parts[::-1], [" ", *parts, " "]])
        else:
            parts = [rng.choice(pieces) + rng.choice(["", " ", " ", "-", "\n"]) for _ in range(rng.randrange(1, 30))]
        if control and rng.random() < 0.25:
            for _ in range(rng.randrange(1, 4)):
                token = rng.choice(control)
                parts.insert(rng.randrange(len(parts) + 1), rng.choice([token, token * 2, token[:-1], f" {token} "]))
        yield "".join(parts)
