"""Small real tokenizers of every kind, trained when they are needed, and text for them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_sft_idx.chat.tokenizer.known_ids import KNOWN_SPLITS
from megatron_sft_idx.chat.types import Rendered, Span

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
FAST = {
    **{kind: kind for kind in ("gpt2", "llama3", "o200k", "tekken")},
    **{kind: f"{kind}+nfc" for kind in ("qwen2", "qwen3.5")},
}
BYTE_LEVEL = [*FAST, "split-unknown", "prefix-space"]
OTHERS = ["metaspace", "llama2", "unigram", "wordpiece"]
KINDS = [*BYTE_LEVEL, *OTHERS]

WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "return", "value", "Paris", "it's", "WE'LL"),
    *(
        "naïve",
        "café",
        "über",
        "你好",
        "世界",
        "機械学習",
        "こんにちは",
        "привет",
        "мир",
        "مرحبا",
        "שלום",
        "हिन्दी",
        "ไทย",
    ),
    *("😀", "👨\u200d👩\u200d👧", "🇫🇷", "e\u0301", "def", "foo(x):", "12345", "3.14", "<p>", "user", "assistant"),
]
SPACES = [" ", " ", " ", "  ", "\n", "\n\n", "\t", ", ", ". ", "", "\r\n", "\u00a0", "\u3000", "\u200b"]


def random_text(rng: random.Random, words: int) -> str:
    """Return words of many scripts, odd white space and random code points."""
    parts = []
    for _ in range(words):
        parts.append(rng.choice(WORDS) if rng.random() < 0.9 else chr(rng.choice([rng.randrange(1, 0x3000), 0x1F600])))
        parts.append(rng.choice(SPACES))
    return "".join(parts)


def texts() -> st.SearchStrategy[str]:
    """Draw any text, often of difficult kinds."""
    pieces = st.one_of(
        st.sampled_from([*WORDS, *SPACES]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        st.sampled_from(
            ["\u0301\u0323", "🏽", "👩🏽‍🚀", "\u202eabc", "\x00", "\x1b", "\n", "<|im_", "▁", "Ġ", "\ufffd", "Å"]
        ),
    )
    return st.lists(pieces, max_size=12).map("".join)


@st.composite
def rendered(draw: st.DrawFn, control: Sequence[str], *, literals: bool = False) -> Rendered:
    """Draw a text with control tokens and spans. With ``literals``, some control tokens are ordinary text."""
    parts = draw(st.lists(st.one_of(texts(), st.sampled_from(control)), max_size=8))
    words, at = [], 0
    for part in parts:
        if literals and part in control and draw(st.booleans()):
            words.append((at, at + len(part)))
        at += len(part)
    edges = sorted(draw(st.lists(st.integers(0, at), max_size=6)))
    edges = edges[: len(edges) // 2 * 2]
    weights = st.sampled_from([1.0, 0.5, 0.0])
    spans = [Span(a, b, draw(weights)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return Rendered("".join(parts), spans, words)


def flags(content: str, **changes: Any) -> dict[str, Any]:
    """Return a control token in the form of configurations."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **plain, **changes}


@lru_cache
def train(kind: str) -> str:
    """Train a small tokenizer of this kind and return its tokenizer.json."""
    tokenizer, trainer = _parts(kind)
    rng = random.Random(5)
    tokenizer.train_from_iterator([random_text(rng, 300) for _ in range(60)], trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer.to_str()


def _parts(kind: str) -> tuple[Tokenizer, Any]:
    common: dict[str, Any] = {"vocab_size": 900, "special_tokens": SPECIAL, "show_progress": False}
    if kind in BYTE_LEVEL:
        tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
        split = {**KNOWN_SPLITS, "split-unknown": r"\w+|\W"}.get(kind)
        if split is None:
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix-space")
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(split), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        if kind in ("qwen2", "qwen3.5"):
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **common)
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
        return tokenizer, trainers.UnigramTrainer(unk_token="<unk>", **{**common, "vocab_size": 4000})
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer, trainers.WordPieceTrainer(**common)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:  # like Llama 2: spaces by normalizer, no pre-tokenizer
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    return tokenizer, trainers.BpeTrainer(limit_alphabet=80, **{**common, "special_tokens": [*SPECIAL, *alphabet]})


def strip_byte_specials(spec: dict[str, Any]) -> dict[str, Any]:
    """Remove byte-fallback tokens from the added tokens; they belong to the model's vocabulary."""
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    return spec


def spec_of(kind: str) -> dict[str, Any]:
    """Return a new copy of the tokenizer's parsed JSON."""
    return strip_byte_specials(json.loads(train(kind)))


def write_folder(folder: Path, kind: str, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a tokenizer folder in the form of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({**spec_of(kind), **changes}), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "</s>",
        "unk_token": "<unk>",
        **(config or {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
