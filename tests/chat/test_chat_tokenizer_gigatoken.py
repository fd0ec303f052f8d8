"""gigatoken is used only for the tokenizer classes that are compared here."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import random
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import chats
import numpy as np
import pytest
import tokenizer_zoo as zoo
import xxhash
from chats import ROOT, TOKENIZER
from hypothesis import given, settings
from hypothesis import strategies as st
from productions import piped, produced
from tokenizers import Tokenizer

from megatron_sft_idx.chat.tokenizer import DifferentIdsError, comparing_all_texts, fast_engine, load_tokenizer
from megatron_sft_idx.chat.tokenizer.exact import build_tokenizer, exact_ids
from megatron_sft_idx.chat.tokenizer.fast_engine import FastEngine, load_fast_engine
from megatron_sft_idx.chat.tokenizer.known_ids import known_class, settled
from megatron_sft_idx.chat.types import Rendered
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Limits
from megatron_sft_idx.live.chunks import LiveChunks
from megatron_sft_idx.tokenize import EncodingOptions, preprocess

pytest.importorskip("gigatoken")


def engines(spec: dict[str, Any]) -> tuple[FastEngine, Tokenizer]:
    tokenizer = build_tokenizer(spec)
    fast = load_fast_engine(spec, tokenizer)
    assert fast is not None
    return fast, tokenizer


@lru_cache
def engines_of(kind: str) -> tuple[FastEngine, Tokenizer]:
    return engines(zoo.spec_of(kind))


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """Drop the encoders after the tests.

    Each holds 30 MB and cached words, and every later fork would copy the page tables.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # the library's own threads would keep them permanently
        yield
    engines_of.cache_clear()


def differing(fast: FastEngine, exact: Tokenizer, texts: list[str]) -> list[str]:
    """Return the texts whose ids differ."""
    ours = fast.ids(texts)
    with ThreadPoolExecutor(1) as thread:  # the tokenizers library caches words per thread until the thread ends
        theirs = thread.submit(exact_ids, exact, texts).result()
    return [text for text, a, b in zip(texts, ours, theirs, strict=True) if not np.array_equal(a, b)]


def in_context(character: str) -> str:
    """Return a character in contexts that can change a split: next to letters, digits, spaces, apostrophes, itself."""
    c = character
    return f"a{c}b {c}{c} x9{c}\n{c} \tit'{c} '{c}e {c}'l{c} A{c}B.{c}/{c}\r{c}Ab{c}12{c}3  {c}<|im_end|>"


@lru_cache
def characters(step: int) -> list[str]:
    """Return every ``step``-th character that this Python knows, and a few others."""
    found = []
    for code in range(0x110000):
        category = unicodedata.category(chr(code))
        rare = category == "Cn" or code >= 0xF0000
        if category != "Cs" and code % (1021 if rare else step) == 0:
            found.append(chr(code))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", zoo.FAST)
@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_every_character_of_unicode_is_tokenised_the_same(kind: str, step: int) -> None:
    """This justifies ``known_class``. One character in 61 is tested here, all of them in the slow tests."""
    spec = zoo.spec_of(kind)
    assert known_class(spec) == zoo.FAST[kind]
    fast, exact = engines(spec)
    assert differing(fast, exact, [in_context(c) for c in characters(step)]) == []


@pytest.mark.parametrize("kind", zoo.FAST)
def test_the_normalizer_makes_no_difference_to_that(kind: str) -> None:
    spec = zoo.spec_of(kind)
    spec["normalizer"] = None if spec["normalizer"] else {"type": "NFC"}
    assert known_class(spec) == (kind if spec["normalizer"] is None else f"{kind}+nfc")
    fast, exact = engines(spec)
    rng = random.Random(3)
    texts = [in_context(c) for c in characters(211)] + [zoo.random_text(rng, 40) for _ in range(100)]
    assert differing(fast, exact, texts) == []


@pytest.mark.parametrize("kind", zoo.FAST)
def test_new_characters_go_to_the_library_that_defines_the_ids(kind: str) -> None:
    """U+11DE0 became a digit in Unicode 17, which only one of the libraries has."""
    fast, exact = engines(zoo.spec_of(kind))
    assert differing(fast, exact, [in_context("\U00011de0"), "plain", "é", in_context("\U00016ff4")]) == []
    assert not settled()[[0x11DE0, 0x16FF4]].any()


def test_what_all_tables_know_is_no_matter_of_this_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python with newer Unicode tables once misinterpreted characters that the library did not have."""
    here = np.array([unicodedata.category(chr(code)) != "Cn" for code in range(0x110000)])
    assert (here >= settled()).all(), "characters stay"
    assert (unicodedata.unidata_version != "13.0.0") or (here == settled()).all()
    assert not settled()[[0x378, 0xFFFE, 0x2FFFF]].any()
    assert settled()[[0, 0x41, 0x4E00, 0x1F600, 0x1F9FF, 0xE000, 0x10FFFD]].all()
    assert xxhash.xxh3_64_hexdigest(np.packbits(settled()).tobytes()) == "490e3951eb6e0d9d"

    def unasked(character: str) -> str:
        raise AssertionError(f"{character!r}: asked this Python's tables")

    monkeypatch.setattr(fast_engine.unicodedata, "category", unasked)
    fast, exact = engines(zoo.spec_of("qwen2"))
    assert differing(fast, exact, ["plain", "naïve 😀", in_context("\U00011de0")]) == []


def variant(kind: str, **flags: bool) -> dict[str, Any]:
    """Return a tokenizer whose ordinary added tokens have these flags; some tokens overlap."""
    spec = zoo.spec_of(kind)
    last = max(token["id"] for token in spec["added_tokens"])
    for i, text in enumerate(["<think>\n", "<|im", "the fox", "\n\n", "é好"]):
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        spec["added_tokens"].append({"id": last + 1 + i, "content": text, **plain})
    for token in spec["added_tokens"]:
        token.update(flags)
    return spec


VARIANTS = {
    "overlapping": {},
    "all special": {"special": True},
    "all ordinary": {"special": False},
    "all normalized": {"normalized": True},
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("flags", VARIANTS)
@pytest.mark.parametrize("kind", zoo.FAST)
def test_added_tokens_of_every_kind_are_found_the_same(kind: str, flags: str) -> None:
    spec = variant(kind, **VARIANTS[flags])
    if spec["normalizer"] is not None and flags == "all normalized":
        assert known_class(spec) is None
        return
    fast, exact = engines(spec)
    rng = random.Random(11)
    added = [token["content"] for token in spec["added_tokens"]]
    texts = []
    for _ in range(400):
        parts = [rng.choice([rng.choice(added), zoo.random_text(rng, 2), " ", "\n"]) for _ in range(12)]
        texts.append("".join(parts))
    assert differing(fast, exact, texts) == []


@pytest.mark.parametrize("kind", zoo.FAST)
@given(texts=st.lists(zoo.texts(), max_size=4))
@settings(deadline=None, max_examples=100)
def test_any_text_is_tokenised_the_same(kind: str, texts: list[str]) -> None:
    assert differing(*engines_of(kind), texts) == []


UNKNOWN: dict[str, dict[str, Any]] = {
    "another normalizer": {"normalizer": {"type": "NFKC"}},
    "another split": {"pre_tokenizer": {"type": "Whitespace"}},
    "a space in front": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
    "no split": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
    "no pre-tokenizer": {"pre_tokenizer": None},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_changed_steps_make_a_class_unknown(name: str) -> None:
    assert known_class({**zoo.spec_of("gpt2"), **UNKNOWN[name]}) is None


@pytest.mark.parametrize(
    "option",
    [
        {"byte_fallback": True},
        {"continuing_subword_prefix": "##"},
        {"end_of_word_suffix": "</w>"},
        {"unk_token": "<unk>"},
    ],
)
def test_model_options_make_a_class_unknown(option: dict[str, Any]) -> None:
    spec = zoo.spec_of("gpt2")
    spec["model"].update(option)
    assert known_class(spec) is None


def test_flags_of_added_tokens_make_a_class_unknown() -> None:
    for changes in ({"single_word": True}, {"lstrip": True}, {"rstrip": True}, {"normalized": True}):
        spec = zoo.spec_of("qwen2")
        spec["added_tokens"][-1].update(changes)
        assert known_class(spec) is None
    mixed = zoo.spec_of("gpt2")
    mixed["added_tokens"][-1]["normalized"] = True
    assert known_class(mixed) is None


@pytest.mark.parametrize("kind", ["split-unknown", "prefix-space", *zoo.OTHERS])
def test_other_tokenizers_are_not_known(kind: str) -> None:
    assert known_class(zoo.spec_of(kind)) is None


class Wrong:
    """A replacement for gigatoken's encoder that gets one id wrong."""

    def __init__(self, right: Any) -> None:
        self.right = right

    def encode(self, text: bytes) -> Any:
        found = self.right.encode(text).copy()
        found[5] += 1
        return found


def test_a_wrong_answer_on_the_sample_sends_everything_to_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    import gigatoken

    spec = zoo.spec_of("gpt2")
    right = gigatoken.Tokenizer.from_json(json.dumps(spec))
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda data: Wrong(right))
    assert load_fast_engine(spec, build_tokenizer(spec)) is None


def test_a_library_that_cannot_load_it_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_engine, "known_class", lambda spec: "gpt2")
    spec = zoo.spec_of("split-unknown")
    assert load_fast_engine(spec, build_tokenizer(spec)) is None


def test_the_encoder_is_renewed_before_it_remembers_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, exact = engines(zoo.spec_of("gpt2"))
    rng = random.Random(2)
    before = fast._encoder
    texts = [zoo.random_text(rng, 20) for _ in range(10)]
    assert differing(fast, exact, texts) == []
    assert fast._encoder is before
    monkeypatch.setattr(fast_engine, "RENEWAL_NBYTES", 100)
    assert differing(fast, exact, texts) == []
    assert fast._encoder is not before


LOADS = """
import os, sys
from pathlib import Path
from megatron_sft_idx.chat.tokenizer import DifferentIdsError, comparing_all_texts, load_tokenizer

def loaded(times):
    for _ in range(times):
        assert load_tokenizer(sys.argv[1]).backend == "gigatoken"
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

print(-loaded(4) + loaded(16))
"""


def test_what_the_sample_took_is_given_back() -> None:
    """The tokenizers library keeps a thread's words after the tokenizer is gone; 3 MB for the sample."""
    # One arena: with more, free memory depends on the timing of threads.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"}
    grown = subprocess.run([sys.executable, "-c", LOADS, TOKENIZER], check=True, env=environment, capture_output=True)
    assert int(grown.stdout) < 8 << 20


def test_loading_and_encoding_import_nothing_large() -> None:
    script = (
        "import sys; from megatron_sft_idx.chat.tokenizer import load_tokenizer as load; "
        "from megatron_sft_idx.chat.types import Rendered; "
        "t = load(sys.argv[1]); t.encode([Rendered('é', [])]); "
        "print({'awkward', 'transformers', 'sentencepiece', 'tiktoken', 'mistral_common', 'torch'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", script, TOKENIZER], check=True, env=environment, capture_output=True)
    assert found.stdout.decode().strip() == "set()"


@pytest.mark.sample(1)
@pytest.mark.parametrize("piece", ["a", "é", "<", "abcdefg"])
def test_a_long_added_token_is_left_to_the_library_that_takes_it_in_its_stride(tmp_path: Path, piece: str) -> None:
    long = (piece * 30_000)[:30_000]
    tokenizer = load_tokenizer(zoo.write_folder(tmp_path, "gpt2", {"extra_special_tokens": [long]}))
    assert tokenizer.backend == "tokenizers"
    text = f"the {long} fox {long[:-1]}"
    ids = tokenizer.encode([Rendered(text, [])])[0].input_ids
    assert tokenizer.decode(ids) == text
    assert np.count_nonzero(ids == tokenizer.vocab_size - 1) == 1
    literal = tokenizer.encode([Rendered(text, [], [(4, 4 + len(long))])])[0].input_ids
    assert tokenizer.decode(literal) == text
    assert not np.count_nonzero(literal == tokenizer.vocab_size - 1)


def test_no_texts_are_no_rows() -> None:
    fast, _ = engines(zoo.spec_of("gpt2"))
    assert fast.ids([]) == []


# The ids of a young library are checked


class WrongAtTimes:
    """gigatoken with wrong ids for texts that end with an odd word."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def encode(self, text: str) -> Any:
        ids = np.asarray(self.engine.encode(text), np.uint32)
        return np.append(ids[:-1], (ids[-1] + 1) % 100) if "zqwrong" in text else ids


def wrong_text(*, is_sampled: bool) -> str:
    """Return a text for which gigatoken gives wrong ids, and that is always, or never, in the compared sample."""
    texts = (f"zqwrong {number}" for number in range(10_000))
    return next(text for text in texts if fast_engine.is_sampled(text) == is_sampled)


def test_texts_are_compared_by_what_they_say_and_not_by_where_they_stand() -> None:
    fast, tokenizer = engines(zoo.spec_of("qwen2"))
    for at in (0, 999, 1000, 2500):
        texts = [f"the text of number {number}" for number in range(3000)]
        for is_sampled, all_of_them in itertools.product([False, True], repeat=2):
            wrong = FastEngine(lambda: WrongAtTimes(fast._make()), tokenizer, nfc=fast._nfc)
            texts[at] = wrong_text(is_sampled=is_sampled)
            is_found = is_sampled or all_of_them
            refused = pytest.raises(FormatError, match=r"give different ids .* --tokenizer-backend tokenizers")
            with comparing_all_texts(all_of_them), refused if is_found else contextlib.nullcontext():
                for first in range(0, 3000, 128):
                    wrong.ids(texts[first : first + 128])
        assert len(fast.ids(texts)) == 3000


def test_the_error_stays_what_it_is_between_processes() -> None:
    error = DifferentIdsError("differs", "text", place="rows.jsonl:1: ")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.text, again.difference) == ("rows.jsonl:1: differs", "text", "differs")


def test_about_one_text_in_five_hundred_is_compared() -> None:
    assert 150 <= sum(fast_engine.is_sampled(f"text {number}") for number in range(100_000)) <= 250


@pytest.fixture
def wrong_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ids wrong for texts with an odd word, and compare only texts with another word."""
    right = FastEngine.raw_ids

    def wrong(self: FastEngine, texts: list[str]) -> list[Any]:
        ids = right(self, texts)
        return [one[::-1] if "zqwrong" in text else one for text, one in zip(texts, ids, strict=True)]

    monkeypatch.setattr(FastEngine, "raw_ids", wrong)
    monkeypatch.setattr(fast_engine, "is_sampled", lambda text: "zqsampled" in text)


def numbered(folder: Path, answers: Mapping[int, str], *, rows: int = 2000, more: str = "") -> Path:
    """Write a file of short chats, one per line, with these answers on these lines."""
    lines = [
        {"prompt": f"Number {line}", "completion": answers.get(line, f"It is. {more}")} for line in range(1, rows + 1)
    ]
    return chats.write_rows(folder / "rows.jsonl", lines)


@pytest.mark.sample(4)
@pytest.mark.usefixtures("wrong_at_times")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
@pytest.mark.parametrize("line", [1, 700, 1000])
def test_other_ids_for_one_of_the_first_rows_stop_a_job(
    tmp_path: Path, workers: int, on_bad_row: Literal["error", "skip"], line: int
) -> None:
    source = numbered(tmp_path, {line: "zqwrong it is"})
    job: dict[str, Any] = {"tokenizer": TOKENIZER, "seq_length": 256, "on_bad_row": on_bad_row, "workers": workers}
    with pytest.raises(FormatError, match=rf"rows\.jsonl:{line}: .*give different ids"):
        preprocess(source, output_prefix=tmp_path / "x", **job)
    assert chats.remains(tmp_path) == []
    if line == 700 and on_bad_row == "error":
        preprocess(source, output_prefix=tmp_path / "y", tokenizer_backend="tokenizers", **job)
        assert (tmp_path / "y.bin").exists()


@pytest.mark.usefixtures("wrong_at_times")
def test_rows_that_cannot_be_used_are_not_among_the_first(tmp_path: Path) -> None:
    source = numbered(tmp_path, {1003: "zqwrong it is", **dict.fromkeys(range(5, 8), "")})
    with pytest.raises(FormatError, match=r"rows\.jsonl:1003: .*give different ids"):
        preprocess(
            source, output_prefix=tmp_path / "x", tokenizer=TOKENIZER, seq_length=256, on_bad_row="skip", workers=0
        )


@pytest.mark.usefixtures("wrong_at_times")
def test_later_rows_are_compared_where_they_are_of_the_sample_alone(tmp_path: Path) -> None:
    job: dict[str, Any] = {"tokenizer": TOKENIZER, "seq_length": 2048, "workers": 0}
    # No process counts earlier texts: the second job compares the same rows as the first.
    for name in ("x", "y"):
        preprocess(numbered(tmp_path, {1700: "zqwrong it is"}), output_prefix=tmp_path / name, **job)
    with pytest.raises(FormatError, match=r"rows\.jsonl:1700: .*give different ids"):
        preprocess(numbered(tmp_path, {1700: "zqwrong zqsampled"}), output_prefix=tmp_path / "z", **job)
    # The number of rows before a part in the middle of a file is unknown.
    source = numbered(tmp_path, {1700: "zqwrong zqsampled"}, more="so " * 300)
    with pytest.raises(FormatError, match="give different ids") as caught:
        preprocess(source, output_prefix=tmp_path / "z", **job)
    row, offset = re.findall(
        r"rows\.jsonl:(\d+): .*\(row numbers count from byte (\d+) of the file\)", str(caught.value)
    )[0]
    assert 1 + source.read_bytes()[: int(offset)].count(b"\n") + int(row) - 1 == 1700


@pytest.mark.usefixtures("wrong_at_times")
def test_a_row_of_several_spans_is_named(tmp_path: Path) -> None:
    source = numbered(tmp_path, {300: "zqwrong it is"})
    with pytest.raises(FormatError, match=r"rows\.jsonl:300: .*give different ids"):
        preprocess(
            source, output_prefix=tmp_path / "x", tokenizer=TOKENIZER, seq_length=256, span_by_span=True, workers=0
        )


@pytest.mark.sample(1)
@pytest.mark.usefixtures("wrong_at_times")
@pytest.mark.parametrize("is_piped", [False, True])
def test_produce_compares_the_first_rows_of_its_first_file(tmp_path: Path, is_piped: bool) -> None:
    def made(line: int) -> chats.Outcome:
        source = numbered(tmp_path, {line: "zqwrong it is"}, more="so " * 300)
        catalog, sizes = tmp_path / f"catalog{line}", ("--seq-length", 1024, "--tokens-per-shard", 200_000)
        return piped(source, catalog, *sizes) if is_piped else produced(catalog, "--input", source, *sizes)

    done = made(900)
    assert done.code == 1
    assert re.search(r":900: the tokenizers library and gigatoken give different ids", done.err), done.err
    assert made(1990).code == 0


@pytest.mark.usefixtures("wrong_at_times")
def test_training_compares_the_first_lines_of_the_first_live_chunk(tmp_path: Path) -> None:
    for number, answer in enumerate(["zqwrong it is", "zqwrong it is", "zqwrong zqsampled"]):
        lines = numbered(tmp_path, {2: answer}, rows=3).read_text()
        (tmp_path / f"chunk_{number:05d}.jsonl").write_text(f"\n\n{lines}")
    chunks = LiveChunks(str(tmp_path), Limits(128, 8), EncodingOptions(str(TOKENIZER)), num_chunks=3)
    for number in range(3):
        load = chunks.open(number).load
        assert load is not None
        load(np.array([0, 2]))
        refused = pytest.raises(FormatError, match=rf"chunk_{number:05d}\.jsonl:4: .*give different ids")
        with refused if number != 1 else contextlib.nullcontext():
            load(np.array([1]))
