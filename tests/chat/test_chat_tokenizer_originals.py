"""SentencePiece models, tiktoken's ranks and tekken.json: ids equal the ids of their original libraries."""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import tokenizer_zoo as zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_probe import probe

from megatron_sft_idx.chat.tokenizer import Tokenizer, load_tokenizer, originals
from megatron_sft_idx.chat.tokenizer.spellings import byte_alphabet
from megatron_sft_idx.chat.types import Conversation, Rendered, Span
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.tokenize import EncodingOptions, RowEncoder

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")

SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<start_of_turn>"],
    },
    "t5": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "suffix": {"model_type": "bpe", "treat_whitespace_as_suffix": True, "normalization_rule_name": "nfkc_cf"},
}
RANKED = ["kimi", "ranks", "tekken", "tekken-listed"]
KINDS = [*SENTENCEPIECE, *RANKED]
CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]


@lru_cache
def sentencepiece_model(kind: str) -> bytes:
    rng = random.Random(5)
    text = [line for _ in range(400) for line in zoo.random_text(rng, 40).splitlines() if line.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=model,
        vocab_size=1_000,
        character_coverage=0.98,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        hard_vocab_limit=False,
        minloglevel=2,
        **{"remove_extra_whitespaces": False, **SENTENCEPIECE[kind]},
    )
    return model.getvalue()


@lru_cache
def ranks() -> list[bytes]:
    """Return tokens in the order of their ranks: the bytes, then the tokens that a byte-level tokenizer learned."""
    spec, alphabet = zoo.spec_of("llama3"), byte_alphabet()
    learned = sorted(spec["model"]["vocab"].items(), key=lambda item: item[1])
    words = [bytes(alphabet[c] for c in text) for text, _ in learned if text not in zoo.SPECIAL]
    return [*(bytes([byte]) for byte in range(256)), *(word for word in words if len(word) > 1)]


def rank_lines() -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks()))


def tekken(**changes: Any) -> dict[str, Any]:
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(ranks())
    ]
    config = {"pattern": PATTERNS["tekken"], "default_vocab_size": len(ranks()) + 30, "default_num_special_tokens": 40}
    config = {**config, "num_vocab_tokens": len(ranks()), "version": "v3", **changes.pop("config", {})}
    return {"config": config, "vocab": vocabulary, "version": 1, "type": "Tekken", **changes}


LISTED = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(["<unk>", "<s>", "</s>", "[INST]"])]
PATTERNS = {
    "tekken": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "ranks": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


def config_of(kind: str) -> dict[str, Any]:
    if kind in SENTENCEPIECE:
        return {"tokenizer_class": "T5Tokenizer" if kind == "t5" else "LlamaTokenizerFast", "eos_token": "<|im_end|>"}
    if kind.startswith("tekken"):
        return {}
    first = len(ranks())
    added = {str(first + i): zoo.flags(text) for i, text in enumerate([*CONTROL, "<|im"])}
    config = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "bos_token": "<s>"}
    if kind == "kimi":
        code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
        return {**config, "tokenizer_class": "TikTokenTokenizer", "auto_map": code}
    return {**config, "pat_str": PATTERNS["ranks"]}


def write(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a tokenizer folder without tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if config := {**config_of(kind), **changes}:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if kind in SENTENCEPIECE:
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(kind))
    elif kind.startswith("tekken"):
        listed = {} if kind == "tekken" else {"special_tokens": LISTED, "config": {"version": "v11"}}
        (folder / "tekken.json").write_text(json.dumps(tekken(**listed)))
    else:
        (folder / ("tiktoken.model" if kind == "kimi" else "x.tiktoken")).write_bytes(rank_lines())
    return folder


@lru_cache
def load(kind: str) -> Tokenizer:
    return load_tokenizer(write(Path(mkdtemp()), kind))


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Any:
    """Drop the tokenizers after the tests. Each holds some MB, and every later fork would copy their page tables."""
    yield
    for cache in (load, sentencepiece_model, ranks, original, added):
        cache.cache_clear()


@lru_cache
def original(kind: str) -> Callable[[str, bool], list[int]]:
    """Return the library's own function from ordinary text to ids. Its flag is true if other text came before."""
    if kind in SENTENCEPIECE:
        library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(kind))
        if kind == "llama":  # after a line feed, which never merges, it adds no space
            ahead = len(library.encode("\n"))
            return lambda text, later: library.encode("\n" + text)[ahead:] if later else library.encode(text)
        return lambda text, later: library.encode(text)
    first = 40 if kind.startswith("tekken") else 0
    pattern = {"kimi": "|".join(originals.KIMI_SPLIT), "ranks": PATTERNS["ranks"]}.get(kind, PATTERNS["tekken"])
    encoding = tiktoken.Encoding(
        kind,
        pat_str=pattern,
        mergeable_ranks={t: r for r, t in enumerate(ranks()) if r < len(ranks()) - 10 or not first},
        special_tokens={},
    )
    return lambda text, later: [rank + first for rank in encoding.encode(text, disallowed_special=())]


@lru_cache
def added(kind: str) -> dict[str, int]:
    """Return the control tokens from the files."""
    if kind in SENTENCEPIECE:
        library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(kind))
        pieces = {library.id_to_piece(i): i for i in range(library.get_piece_size())}
        return {piece: i for piece, i in pieces.items() if library.is_control(i) or library.is_unknown(i)}
    if kind == "tekken":
        known = dict(enumerate(originals.TEKKEN_TOKENS))
        return {known.get(i, f"<SPECIAL_{i}>"): i for i in range(40)}
    if kind == "tekken-listed":
        known = {token["rank"]: token["token_str"] for token in LISTED}
        return {known.get(i, f"<SPECIAL_{i}>"): i for i in range(40)}
    first = len(ranks())
    decoder = {int(i): token["content"] for i, token in config_of(kind)["added_tokens_decoder"].items()}
    reserved = range(first, first + 256) if kind == "kimi" else decoder
    return {decoder.get(i, f"<|reserved_token_{i}|>"): i for i in reserved}


def expected(kind: str, text: str) -> list[int]:
    """Return the ids: control tokens are cut out, the longest first, and the library encodes the rest."""
    tokens = added(kind)
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    ids: list[int] = []
    for number, part in enumerate(re.split(f"({pattern})", text)):
        if number % 2:
            ids.append(tokens[part])
        elif part:
            ids += original(kind)(part, number > 0 and kind != "t5")
    return ids


def differences(kind: str, texts: list[str]) -> list[str]:
    found = load(kind).encode([Rendered(text, []) for text in texts])
    return [t for t, ours in zip(texts, found, strict=True) if ours.input_ids.tolist() != expected(kind, t)]


# After a control token, these models insert a space before text, or remove spaces. The library has no interface for
# encoding the continuation of a text.
ONLY_WHOLE = ("suffix",)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [400, pytest.param(100_000, marks=pytest.mark.slow)])
def test_every_kind_of_text_has_the_ids_of_the_original(kind: str, count: int) -> None:
    assert differences(kind, list(probe(count, seed=1))) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ONLY_WHOLE])
@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_control_tokens_are_found_first_and_the_rest_is_the_original(kind: str, count: int) -> None:
    texts = list(probe(count, [*added(kind)][:12], seed=2))
    assert sum(any(token in text for token in added(kind)) for text in texts) > count // 10
    assert differences(kind, texts) == []


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(zoo.texts(), max_size=3))
@settings(deadline=None, max_examples=60)
def test_any_text_has_the_ids_of_the_original(kind: str, texts: list[str]) -> None:
    assert differences(kind, texts) == []


def held(kind: str, row: Rendered, ids: list[int]) -> list[tuple[int, int]]:
    """Return the characters of each token, by counting the bytes of tokens."""
    text = row.text.replace("\u2581", " ") if kind == "llama" else row.text  # such a model treats this as a space
    owner = [i for i, character in enumerate(text) for _ in character.encode()]
    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(kind)) if kind == "llama" else None
    names = {index: text for text, index in added(kind).items()}
    first = 40 if kind.startswith("tekken") else 0
    ranges, done = [], 0
    for number, index in enumerate(ids):
        if index in names:
            length = len(names[index].encode())
        elif library is None:
            length = len(ranks()[index - first])
        else:
            piece = library.id_to_piece(index)
            length = 1 if library.is_byte(index) else len(piece.replace("\u2581", " ").encode())
            # The inserted space belongs to the first character of the text.
            length -= number == 0 and piece.startswith("\u2581")
        last = owner[max(done + length - 1, done)]
        ranges.append((owner[done], last + 1))
        done += length
    assert done == len(owner)
    return ranges


def masked(kind: str, row: Rendered, ids: list[int]) -> list[float]:
    tokens = held(kind, row, ids)
    weights = [0.0] * len(ids)
    for span in row.spans:
        for token, (begin, end) in enumerate(tokens):
            if max(begin, span.start) < min(end, span.stop):
                weights[token] = max(weights[token], span.weight)
    return weights


def without_literals(kind: str, row: Rendered) -> list[int]:
    """Return ids of a text in which some control tokens are ordinary words, stretch by stretch."""
    tokens, ids, stretch, at = added(kind), [], 0, 0
    longest = sorted(tokens, key=len, reverse=True)

    def flush(stop: int) -> None:
        if stretch < stop:
            ids.extend(original(kind)(row.text[stretch:stop], stretch > 0))

    while at < len(row.text):
        inside = next((stop for start, stop in row.literals if start <= at < stop), None)
        stop = next((start for start, _ in row.literals if start >= at), len(row.text))
        token = next((t for t in longest if row.text.startswith(t, at) and at + len(t) <= stop), None)
        if inside is not None or token is None:
            at = at + 1 if inside is None else inside
            continue
        flush(at)
        ids.append(tokens[token])
        at = stretch = at + len(token)
    flush(len(row.text))
    return ids


@pytest.mark.parametrize("kind", ["llama", *RANKED])
@given(row=zoo.rendered(CONTROL, literals=True))
@settings(deadline=None, max_examples=150)
def test_masks_and_literals_equal_the_twin(kind: str, row: Rendered) -> None:
    encoded = load(kind).encode([row])[0]
    ids = encoded.input_ids.tolist()
    assert ids == without_literals(kind, row)
    assert encoded.loss_mask.tolist() == masked(kind, row, ids)
    assert encoded.notes.get("literals", 0) == len(row.literals)
    text = load(kind).decode(ids)
    assert text == (row.text.replace("\u2581", " ") if kind == "llama" else row.text)


@pytest.mark.parametrize("kind", ["llama", *RANKED])
@given(row=zoo.rendered(CONTROL, literals=True))
@settings(deadline=None, max_examples=60)
def test_span_by_span_leaves_no_token_across_an_edge(kind: str, row: Rendered) -> None:
    encoded = load(kind).encode([row], span_by_span=True)[0]
    edges = [0, *(edge for span in row.spans for edge in (span.start, span.stop)), len(row.text)]
    ids: list[int] = []
    for start, stop in pairwise(edges):
        inside = [(max(a, start) - start, min(b, stop) - start) for a, b in row.literals if a < stop and b > start]
        piece = Rendered(row.text[start:stop], [], inside)
        later = start > 0 and not row.text[:start].endswith(tuple(added(kind)))
        if kind == "llama" and later:
            # As a continuation after a line feed.
            whole = Rendered("\n" + piece.text, [], [(a + 1, b + 1) for a, b in inside])
            ids += without_literals(kind, whole)[len(original(kind)("\n", False)) :]
        else:
            ids += without_literals(kind, piece)
    assert encoded.input_ids.tolist() == ids
    assert "straddling" not in encoded.notes


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_every_answer_is_trained_to_its_edges_whatever_the_model_normalizes(kind: str) -> None:
    """Test full-width letters, ligatures and runs of spaces, which some of these models rewrite or drop."""
    for answer in ("ﬁne １２３", "a   b ", "é😀", "x", "カ\u3099 ﷺ", "the lazy dog"):
        text = f"<|im_start|>{answer}<|im_end|>\n"
        start = len("<|im_start|>")
        encoded = load(kind).encode([Rendered(text, [Span(start, len(text) - 1)])])[0]
        trained = [bool(w) for w in encoded.loss_mask.tolist()]
        ids = encoded.input_ids.tolist()
        end = ids.index(added(kind)["<|im_end|>"])
        assert trained == [False, *[True] * end, *[False] * (len(ids) - end - 1)], (answer, ids)


def test_a_piece_of_the_users_own_definition_in_the_data_is_refused_by_row(tmp_path: Path) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model("gemma"))
    index = library.piece_to_id("<start_of_turn>")
    tokenizer = load_tokenizer(
        write(tmp_path, "gemma", added_tokens_decoder={str(index): zoo.flags("<start_of_turn>")})
    )
    assert tokenizer.encode([Rendered("a<start_of_turn>b", [])])[0].input_ids.tolist().count(index) == 1
    for span_by_span in (False, True):
        with pytest.raises(SequenceError, match="rendered:1: control tokens in the data cannot be kept as text"):
            tokenizer.encode(
                [Rendered("fine", []), Rendered("a<start_of_turn>b", [], [(1, 16)])], span_by_span=span_by_span
            )


@pytest.mark.parametrize(
    ("settings_", "spaces"),
    [({}, "first"), ({"legacy": False}, "first"), ({"legacy": True}, "every"), ({"add_prefix_space": False}, "none")],
)
def test_where_a_sentencepiece_model_puts_a_space(tmp_path: Path, settings_: dict[str, Any], spaces: str) -> None:
    tokenizer = load_tokenizer(write(tmp_path, "llama", **settings_))
    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model("llama"))
    with_space, without = library.encode("fox"), library.encode("\nfox")[len(library.encode("\n")) :]
    assert with_space != without
    stop = library.piece_to_id("</s>")
    ids = tokenizer.encode([Rendered("fox</s>fox", [])])[0].input_ids.tolist()
    first, later = {"first": (True, False), "every": (True, True), "none": (False, False)}[spaces]
    assert ids == [*(with_space if first else without), stop, *(with_space if later else without)]
    assert load_tokenizer(tmp_path / "tokenizer.model").fingerprint == tokenizer.fingerprint or spaces != "first"


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_and_its_pickle_are_the_same_tokenizer(kind: str) -> None:
    tokenizer = load(kind)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert len(pickle.dumps(tokenizer)) < 400
    assert (again.fingerprint, again.backend, again.vocab_size) == (
        tokenizer.fingerprint,
        "sentencepiece" if kind in SENTENCEPIECE else "tiktoken",
        tokenizer.vocab_size,
    )
    assert tokenizer.eos_id == added(kind)[tokenizer.special_tokens["eos_token"]]
    row = Rendered("привет 😀<|im_end|>", [Span(0, 4)])
    assert again.encode([row])[0].input_ids.tolist() == tokenizer.encode([row])[0].input_ids.tolist()
    assert tokenizer.encode([]) == []
    empty = tokenizer.encode([Rendered("", [])])[0]
    assert (empty.input_ids.shape, empty.input_ids.dtype) == ((0,), np.int32)
    assert tokenizer.decode([0, 10**6]).endswith("⟨1000000⟩")
    assert all(isinstance(tokenizer.decode([index]), str) for index in range(0, tokenizer.vocab_size, 7))
    assert len({load(other).fingerprint for other in KINDS}) == len(KINDS)


def kimi_pieces(text: str) -> list[str]:
    """Split text like Kimi's own code, character by character."""
    pieces = []
    for start in range(0, len(text), 400_000):
        chunk, begin, run = text[start : start + 400_000], 0, 0
        for at, character in enumerate(chunk):
            run = run + 1 if at and character.isspace() == chunk[at - 1].isspace() else 1
            if run > 25_000:
                pieces.append(chunk[begin:at])
                begin, run = at, 1
        pieces.append(chunk[begin:])
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "the" * 25_000 + "fox",
        "x" * 25_001 + " " * 60_001 + "<|im_end|>" * 3_000,
        "\n\u3000\x1c" * 9_000 + "a",
        "the lazy dog " * 35_000 + "<|im_start|>" * 2 + "\t" * 25_000,
        "ab " + "é" * 49_999 + " " + "y" * 25_000,
    ],
)
def test_kimi_cuts_long_texts_and_long_runs(text: str) -> None:
    wanted = [index for piece in kimi_pieces(text) for index in expected("kimi", piece)]
    assert load("kimi").encode([Rendered(text, [])])[0].input_ids.tolist() == wanted
    assert len(kimi_pieces(text)) > 1


def test_kimi_is_known_by_name_and_its_code_is_read_not_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "kimi")
    known = "\n".join(f'r"""{part}""",' for part in originals.KIMI_SPLIT) + "\n256\n400_000\n25_000\nraise SystemExit"
    (folder / "tokenization_kimi.py").write_text(known)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.fingerprint == load("kimi").fingerprint
    assert tokenizer.vocab_size == len(ranks()) + 256
    for changed in (known.replace("{1,3}", "{1,2}"), known.replace("25_000", "50_000")):
        (folder / "tokenization_kimi.py").write_text(changed)
        with pytest.raises(FormatError, match=r'is in tokenization_kimi\.py, which is not run here; .*"pat_str"'):
            load_tokenizer(folder)
    other = write(tmp_path / "b", "kimi", auto_map={"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]})
    with pytest.raises(FormatError, match=r"tokenization_other\.py, which is not run here"):
        load_tokenizer(other)
    with pytest.raises(FormatError, match="a tiktoken file, tokenizer_class None"):
        load_tokenizer(folder / "tiktoken.model")


def file(name: str, content: bytes | str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def with_config(kind: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder, kind, **changes) and None


def tekken_with(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "tekken.json").write_text(json.dumps(tekken(**changes)))  # type: ignore[func-returns-value]


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "sentencepiece, not a model": (file("tokenizer.model", b"\n\x03abc"), "sentencepiece cannot load it"),
    "neither": (
        file("tokenizer.model", b"\x00\x01"),
        "not JSON, a tiktoken file or a SentencePiece model",
    ),
    "empty": (file("tokenizer.model", b""), "not JSON, a tiktoken file"),
    "LFS pointer": (file("tiktoken.model", "version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "a class that renumbers": (
        with_config("llama", tokenizer_class="XLMRobertaTokenizer"),
        r"tokenizer_class XLMRobertaTokenizer: .*its code, which is not run here, defines .*; convert it once",
    ),
    "code that came along": (
        with_config("llama", auto_map={"AutoTokenizer": ["tokenization_x.X", None]}),
        "trust_remote_code=True",
    ),
    "another id": (
        with_config("llama", added_tokens_decoder={"7": zoo.flags("</s>")}),
        r"'</s>' has the id 7, but in tokenizer\.model, 2 is '</s>'; do the files belong to the same tokenizer\?",
    ),
    "an id that is taken": (
        with_config("llama", added_tokens_decoder={"2": zoo.flags("<|x|>")}),
        r"'<\|x\|>' has the id 2, but in tokenizer\.model, 2 is '</s>'",
    ),
    "strips": (
        with_config("llama", added_tokens_decoder={"2": zoo.flags("</s>", rstrip=True)}),
        r"'</s>' has rstrip set, which is only supported in a tokenizer\.json; convert it once",
    ),
    "ranks without a pattern": (with_config("ranks", pat_str=None), r'"pat_str" and the control tokens'),
    "a pattern that is none": (with_config("ranks", pat_str="("), "tiktoken cannot load it"),
    "a control token on a rank": (
        with_config("ranks", added_tokens_decoder={"300": zoo.flags("<|x|>")}),
        "has the id 300, which is a token of the model",
    ),
    "cut short": (
        file("x.tiktoken", rank_lines()[:2000]),
        "line 2[0-9]{2} is not a token|no token for the single byte 0x",
    ),
    "a rank twice": (file("x.tiktoken", rank_lines() + b"dGhlIGxhenkgZG9n 5\n"), "a token or a rank occurs twice"),
    "half a line": (file("x.tiktoken", rank_lines() + b"dGhl"), r"is not a token with its rank: b'dGhl'"),
    "tekken without pattern": (tekken_with(config={"pattern": None}), "expected a config with pattern"),
    "tekken too large": (tekken_with(config={"default_vocab_size": 10**6}), "each rank from 0 exactly once"),
    "tekken without a list": (tekken_with(config={"version": "v13"}), "each rank from 0 exactly once"),
    "tekken, a name twice": (
        tekken_with(special_tokens=[*LISTED, {**LISTED[0], "rank": 9}]),
        "each rank from 0 exactly once",
    ),
    "tekken, a rank too large": (
        tekken_with(special_tokens=[{**LISTED[0], "rank": 40}]),
        "each rank from 0 exactly once",
    ),
    "tekken, tokens of another kind": (tekken_with(vocab=[1] * 2000), "each rank from 0 exactly once"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    make, message = BROKEN[name]
    folder = tmp_path / "tok"
    folder.mkdir()
    if name in ("cut short", "a rank twice", "half a line"):
        write(folder, "ranks")
    make(folder)
    with pytest.raises(FormatError, match=message) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "library"), [("llama", "sentencepiece"), ("kimi", "tiktoken"), ("tekken", "tiktoken")]
)
def test_a_missing_library_is_named(tmp_path: Path, kind: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(FormatError, match=rf"needs {library}, .*pip install 'megatron-sft-idx\[tokenizers\]'"):
        load_tokenizer(write(tmp_path, kind))


def test_a_pattern_that_leaves_text_out_is_refused_by_row(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, "ranks", pat_str=r"\w+| "))
    rows = [Rendered("the fox", []), Rendered("the fox!", [])]
    for span_by_span in (False, True):
        with pytest.raises(SequenceError, match="rendered:1: tiktoken drops a part of 'the fox!'"):
            tokenizer.encode(rows, span_by_span=span_by_span)


def test_rows_become_sequences_by_such_tokenizers(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    for kind in KINDS:
        tokenizer = load(kind)
        encoder = RowEncoder(EncodingOptions(tokenizer.path, chat_template=template))
        assert encoder.describe()["tokenizer"]["fingerprint"] == tokenizer.fingerprint
        row = {"messages": [{"role": "user", "content": "привет"}, {"role": "assistant", "content": "the fox 😀"}]}
        assert encoder.template is not None
        encoded = encoder.tokenizer.encode([encoder.template.render(Conversation(row["messages"], [0.0, 1.0]))])[0]
        trained = tokenizer.decode(encoded.input_ids[encoded.loss_mask > 0])
        assert trained.strip().startswith("the fox")
