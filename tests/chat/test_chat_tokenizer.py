"""``Tokenizer.encode``: masks compared with a simple twin, and control tokens in the data."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import tokenizer_zoo as zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from megatron_sft_idx.chat.tokenizer import Tokenizer, append_eod, load_tokenizer
from megatron_sft_idx.chat.tokenizer.exact import build_tokenizer
from megatron_sft_idx.chat.types import Encoded, Rendered, Span, TokenizedRow
from megatron_sft_idx.errors import SequenceError

CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]


@lru_cache
def load(kind: str, backend: str = "auto") -> Tokenizer:
    return load_tokenizer(zoo.write_folder(Path(mkdtemp()), kind), backend=backend)


@lru_cache
def library(kind: str) -> Library:
    return build_tokenizer(zoo.spec_of(kind))


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """Drop the tokenizers after the tests. Each holds 10 MB, and every later fork would copy their page tables."""
    yield
    load.cache_clear()
    library.cache_clear()


def twin(kind: str, row: Rendered) -> tuple[list[int], list[float], int]:
    """Encode the slow way: compare every token's offsets with every span."""
    encoding = library(kind).encode(row.text, add_special_tokens=False)
    weights = [0.0] * len(encoding.ids)
    straddling = 0
    for span in row.spans:
        holders = {
            c: [t for t, (a, b) in enumerate(encoding.offsets) if a <= c < b] for c in range(span.start, span.stop)
        }
        held = [c for c in holders if holders[c]]
        if not held:
            continue
        last = max(held)
        for token in range(holders[min(held)][0], holders[last][-1] + 1):
            weights[token] = max(weights[token], span.weight)
        straddling += bool(span.weight) and encoding.offsets[holders[min(held)][0]][0] < span.start
    return encoding.ids, weights, straddling


def check_against_twin(kind: str, rows: list[Rendered], encoded: list[Encoded]) -> None:
    for row, found in zip(rows, encoded, strict=True):
        ids, weights, straddling = twin(kind, row)
        assert found.input_ids.tolist() == ids
        assert found.loss_mask.tolist() == weights
        assert found.notes.get("straddling", 0) == straddling
        assert set(found.notes) <= {"straddling", "straddling_header"}
        assert (found.input_ids.dtype, found.loss_mask.dtype) == (np.int32, np.float32)


# For the other kinds "auto" is "tokenizers"; see the test of the classes that gigatoken supports.
@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, "auto") for kind in zoo.FAST), *((kind, "tokenizers") for kind in zoo.KINDS)]
)
@given(rows=st.lists(zoo.rendered(CONTROL), max_size=3))
@settings(deadline=None, max_examples=60)
def test_masks_equal_the_twin(kind: str, backend: str, rows: list[Rendered]) -> None:
    encoded = load(kind, backend).encode(rows)
    check_against_twin(kind, rows, encoded)


@pytest.mark.parametrize("kind", zoo.FAST)
@given(text=zoo.texts())
@settings(deadline=None, max_examples=60)
def test_byte_level_ids_decode_to_the_text(kind: str, text: str) -> None:
    tokenizer = load(kind)
    decoded = tokenizer.decode(tokenizer.encode([Rendered(text, [])])[0].input_ids)
    assert decoded == (library(kind).normalizer.normalize_str(text) if "+nfc" in zoo.FAST[kind] else text)


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2", "split-unknown", "metaspace", "llama2"])
@given(row=zoo.rendered([*CONTROL, "<think>"], literals=True))
@settings(deadline=None, max_examples=60)
def test_literals_never_become_control_tokens(kind: str, row: Rendered) -> None:
    tokenizer = load(kind)
    kept = sum(map(row.text.count, [*CONTROL, "<think>"])) - len(row.literals)
    encoded = tokenizer.encode([row])[0]
    added = [library(kind).token_to_id(text) for text in [*CONTROL, "<think>"]]
    assert np.isin(encoded.input_ids, added).sum() == kept
    assert encoded.notes.get("literals", 0) == len(row.literals)
    plain = Rendered(row.text, row.spans)
    if kind in ("gpt2", "llama3", "split-unknown"):
        assert tokenizer.decode(encoded.input_ids) == row.text
    if not row.literals:
        assert encoded.input_ids.tolist() == library(kind).encode(row.text, add_special_tokens=False).ids
    else:
        assert len(encoded.input_ids) > len(tokenizer.encode([plain])[0].input_ids)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "metaspace", "llama2"])
@given(row=zoo.rendered(CONTROL))
@settings(deadline=None, max_examples=60)
def test_shielding_nothing_changes_nothing(kind: str, row: Rendered) -> None:
    """An empty literal makes a text be encoded as stretches between its control tokens."""
    stretched = load(kind).encode([row._replace(literals=[(0, 0)])])[0]
    whole = load(kind).encode([row])[0]
    assert stretched.input_ids.tolist() == whole.input_ids.tolist()
    assert stretched.loss_mask.tolist() == whole.loss_mask.tolist()


def flagged(folder: Path, kind: str, **flags: bool) -> Tokenizer:
    """Return a tokenizer whose control tokens have these flags."""
    added = [{**token, **flags} for token in zoo.spec_of(kind)["added_tokens"]]
    return load_tokenizer(zoo.write_folder(folder, kind, added_tokens=added))


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "metaspace", "prefix-space"])
def test_beside_literals_control_tokens_take_the_white_space_of_their_flags(
    tmp_path: Path, kind: str, flags: dict[str, bool]
) -> None:
    tokenizer = flagged(tmp_path, kind, **flags)
    text = " a \n<s>\t\tthe fox<|im_end|>  <|im_start|>\nuser </s> x "
    for start in range(len(text)):
        row = Rendered(text, [Span(start, len(text))])
        stretched, whole = tokenizer.encode([row._replace(literals=[(0, 0)]), row])
        assert stretched.input_ids.tolist() == whole.input_ids.tolist()
        assert stretched.loss_mask.tolist() == whole.loss_mask.tolist()


def test_control_tokens_that_the_tokenizer_finds_otherwise_are_refused_by_row(tmp_path: Path) -> None:
    """A combining mark is part of a word for the library, but not for Python's patterns."""
    tokenizer = flagged(tmp_path, "llama3", single_word=True)
    literal = Rendered("<think> a </s> b", [], [(0, 7)])
    assert tokenizer.decode(tokenizer.encode([literal])[0].input_ids) == literal.text
    with pytest.raises(SequenceError, match=r"rendered:1: control tokens .* this tokenizer does not split at them"):
        tokenizer.encode([literal, Rendered("<think> a </s>\u0957 b", [], [(0, 7)])])


def test_masks_of_rows_with_literals_follow_the_true_text() -> None:
    user = "<|im_start|>user\nsay <|im_end|> twice: <|im_end|> 😀<|im_end|>\n"
    text = user + "<|im_start|>assistant\nno<|im_end|>\n"
    quotes = [(21, 31), (39, 49)]
    answer = Span(text.index("no<"), len(text) - 1)
    for kind in ("gpt2", "qwen2", "metaspace", "llama2"):
        tokenizer = load(kind)
        encoded = tokenizer.encode([Rendered(text, [Span(17, 49), answer], quotes)])[0]
        parts = np.flatnonzero(np.diff(np.concatenate([[0], encoded.loss_mask > 0, [0]]).astype(int)))
        trained = [tokenizer.decode(encoded.input_ids[a:b]).strip() for a, b in parts.reshape(-1, 2)]
        assert [part.replace(" ", "") for part in trained] == ["say<|im_end|>twice:<|im_end|>", "no<|im_end|>"]
        assert encoded.notes["literals"] == 2


def test_a_tokenizer_that_knows_its_control_tokens_as_words_says_so() -> None:
    with pytest.raises(SequenceError, match="rendered:1: control tokens in the data cannot be kept as text"):
        load("unigram").encode([Rendered("fine", []), Rendered("a </s> b", [], [(2, 6)])])


@pytest.mark.parametrize("kind", zoo.BYTE_LEVEL)
@given(row=zoo.rendered(CONTROL))
@settings(deadline=None, max_examples=40)
def test_span_by_span_leaves_no_token_across_an_edge(kind: str, row: Rendered) -> None:
    encoded = load(kind).encode([row], span_by_span=True)[0]
    ids: list[int] = []
    weights: list[float] = []
    edges = [(0, 0.0), *((e, w) for s in row.spans for e, w in ((s.start, s.weight), (s.stop, 0.0)))]
    for (start, weight), (stop, _) in zip(edges, [*edges[1:], (len(row.text), 0.0)], strict=True):
        spec = zoo.spec_of(kind)
        middle = start > 0 and not row.text[:start].endswith((*CONTROL, "<unk>", "<think>", "</think>"))
        if kind == "prefix-space" and middle:
            spec["pre_tokenizer"]["add_prefix_space"] = False
        tokenizer = library(kind) if spec == zoo.spec_of(kind) else build_tokenizer(spec)
        piece = tokenizer.encode(row.text[start:stop], add_special_tokens=False).ids
        ids += piece
        weights += [weight] * len(piece)
    assert encoded.input_ids.tolist() == ids
    assert encoded.loss_mask.tolist() == weights
    assert "straddling" not in encoded.notes


def test_span_by_span_keeps_spaces_as_they_are() -> None:
    text = "<s>user: hello<|im_end|> assistant: the fox jumps<|im_end|>"
    start = text.index(" the")
    for kind in zoo.KINDS:
        if kind == "wordpiece":  # has no spaces to keep
            continue
        tokenizer = load(kind)
        pieces = tokenizer.encode([Rendered(text, [Span(start + 3, len(text))])], span_by_span=True)[0]
        whole = tokenizer.encode([Rendered(text, [])])[0]
        assert tokenizer.decode(pieces.input_ids) == tokenizer.decode(whole.input_ids), kind


def test_span_by_span_takes_literals_too() -> None:
    row = Rendered("<s>a<|im_end|>b<|im_end|>", [Span(4, 15), Span(15, 25, 0.5)], [(4, 14)])
    encoded = load("gpt2").encode([row], span_by_span=True)[0]
    assert load("gpt2").decode(encoded.input_ids) == row.text
    assert encoded.input_ids.tolist().count(load("gpt2").eos_id) == 1
    assert encoded.loss_mask[-1] == 0.5
    assert encoded.notes == {"literals": 1}


def test_a_straddling_token_is_trained_and_counted() -> None:
    tokenizer = load("gpt2")
    row = Rendered("ask: the fox", [Span(5, 8)], notes={"dropped reasoning": 2})
    encoded = tokenizer.encode([row])[0]
    assert tokenizer.decode(encoded.input_ids[encoded.loss_mask > 0]) == " the"
    assert encoded.notes == {"dropped reasoning": 2, "straddling": 1}
    assert row.notes == {"dropped reasoning": 2}


@pytest.mark.parametrize("kind", ["gpt2", "metaspace"])
def test_a_straddling_token_that_brings_a_header_in_is_named_and_can_be_left_out(kind: str) -> None:
    tokenizer = load(kind)
    text = "x the quick fox"
    whole = tokenizer.encode([Rendered(text, [Span(0, len(text))])])[0]
    # The span begins inside the first token of several letters; its first letters belong to a header.
    first, length = next((i, n) for i, n in enumerate(len(tokenizer.decode([one])) for one in whole.input_ids) if n > 2)
    start = len(tokenizer.decode(whole.input_ids[:first])) + length - 1
    row = Rendered(text, [Span(start, len(text), 0.5)])
    kept, left_out = (tokenizer.encode([row], straddling=straddling)[0] for straddling in (True, False))
    assert kept.notes == {"straddling": 1, "straddling_header": 1}
    assert left_out.notes == {"straddling_left_out": 1}
    assert kept.straddling
    assert kept.straddling.strip() in text
    assert (kept.loss_mask > 0).tolist()[first:] == [True] * (len(whole.input_ids) - first)
    assert (left_out.loss_mask > 0).tolist()[first:] == [False] + [True] * (len(whole.input_ids) - first - 1)
    # A token shared by two trained spans stays trained, because no header is in it.
    both = Rendered(text, [Span(0, start), Span(start, len(text), 0.5)])
    assert (tokenizer.encode([both], straddling=False)[0].loss_mask > 0).all()


def test_empty_texts_and_batches() -> None:
    for kind in zoo.KINDS:
        tokenizer = load(kind)
        assert tokenizer.encode([]) == []
        for span_by_span in (False, True):
            encoded = tokenizer.encode([Rendered("", [Span(0, 0)])], span_by_span=span_by_span)[0]
            assert encoded.input_ids.shape == encoded.loss_mask.shape == (0,)
            assert (encoded.input_ids.dtype, encoded.loss_mask.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("kind", ["gpt2", "metaspace"])
def test_bad_spans_are_refused(kind: str) -> None:
    for spans in ([Span(2, 1)], [Span(0, 2), Span(1, 3)], [Span(2, 9)]):
        for span_by_span in (False, True):
            with pytest.raises(ValueError, match="span"):
                load(kind).encode([Rendered("abc", spans)], span_by_span=span_by_span)


def test_half_a_surrogate_pair_is_refused_by_name() -> None:
    with pytest.raises(SequenceError, match=r"rendered:1: character 2 is '\\ud83d', half of a surrogate pair"):
        load("gpt2").encode([Rendered("fine", []), Rendered("ab\ud83d", [])])


def test_token_rows_are_checked() -> None:
    tokenizer = load("gpt2")
    row = TokenizedRow(np.array([0, tokenizer.vocab_size - 1]), np.array([0, 1], np.float32))
    encoded = tokenizer.from_token_row(row)
    assert encoded.input_ids.tolist() == [0, tokenizer.vocab_size - 1]
    assert (encoded.input_ids.dtype, encoded.loss_mask.dtype) == (np.int32, np.float32)
    for bad in (-1, tokenizer.vocab_size, 2**40):
        wrong = TokenizedRow(np.array([0, bad]), np.zeros(2, np.float32))
        with pytest.raises(ValueError, match=rf"input_ids\[1\] is {bad}, outside the tokenizer's vocabulary"):
            tokenizer.from_token_row(wrong)


@pytest.mark.parametrize("kind", ["qwen2", "llama3", "metaspace"])
def test_the_end_of_document_is_trained_where_the_sequence_ends_in_a_trained_answer(kind: str) -> None:
    tokenizer = load(kind)
    eod = tokenizer.eos_id
    assert eod is not None
    end = tokenizer.decode([eod])

    def ends(text: str, *spans: Span) -> tuple[str, list[float]]:
        """Return the text of a sequence with its end of document, and the weights of the tokens at its end."""
        longer = append_eod(tokenizer.encode([Rendered(text, list(spans), (), {"straddling": 1})])[0], tokenizer)
        assert (longer.input_ids.dtype, longer.loss_mask.dtype) == (np.int32, np.float32)
        at = np.flatnonzero(longer.input_ids == eod).tolist()
        return tokenizer.decode(longer.input_ids), longer.loss_mask[at].tolist()

    assert ends("ask answer", Span(4, 10)) == (f"ask answer{end}", [1.0])
    assert ends("ask answer", Span(4, 10, 0.25)) == (f"ask answer{end}", [0.25])
    assert ends("ask answer") == (f"ask answer{end}", [0.0])
    assert ends("ask answer ask", Span(4, 10)) == (f"ask answer ask{end}", [0.0])
    for space in ("\n", " \n\n", " "):
        assert ends(f"ask answer{space}", Span(4, 10)) == (f"ask answer{space}{end}", [1.0])
        # The text already has one: as the end of the turn, or after it.
        assert ends(f"ask answer{end}{space}", Span(4, 10 + len(end))) == (f"ask answer{end}{space}", [1.0])
        assert ends(f"ask answer{space}{end}", Span(4, 10)) == (f"ask answer{space}{end}", [1.0])
        assert ends(f"ask answer{end}{space}") == (f"ask answer{end}{space}", [0.0])
        assert ends(f"a{end}answer{space}", Span(1, 1 + len(end))) == (f"a{end}answer{space}{end}", [1.0, 0.0])
    empty = append_eod(Encoded(np.zeros(0, np.int32), np.zeros(0, np.float32)), tokenizer)
    assert (empty.input_ids.tolist(), empty.loss_mask.tolist()) == ([eod], [0.0])


@pytest.mark.parametrize("kind", ["qwen2", "llama3", "prefix-space", "metaspace", "llama2", "unigram"])
def test_the_end_of_document_by_the_book(kind: str) -> None:
    """Compare with the written rule, on sequences built from pieces with weights."""
    tokenizer = load(kind)
    eod = tokenizer.eos_id
    assert eod is not None
    spaces = ["\n", " ", " \n\n", "\t"] + ["\u205f", "\u2003\n", "\x85"] * (kind != "unigram")
    texts = ["word", "\u4f60\u597d", "a b", "<|im_start|>", "\U0001f44d", *spaces * 2]
    made = {text: tokenizer.encode([Rendered(text, [])])[0].input_ids for text in texts} | {"EOD": np.int32([eod])}
    assert kind in ("metaspace", "llama2", "unigram") or len(made["\u205f"]) > 1  # this white space is several tokens
    rng = random.Random(kind)
    seen: Counter[str] = Counter()
    for _ in range(1500):
        pieces = [(rng.choice(["EOD", *texts]), rng.choice([0.0, 0.0, 0.5, 1.0])) for _ in range(rng.randrange(6))]
        ids = np.concatenate([np.zeros(0, np.int32), *(made[text] for text, _ in pieces)])
        mask = np.concatenate([np.zeros(0, np.float32), *(np.full(len(made[t]), w, np.float32) for t, w in pieces)])
        longer = append_eod(Encoded(ids, mask), tokenizer)

        words = [(text, weight) for text, weight in pieces if text not in spaces]
        expected = [*pieces] if words and words[-1][0] == "EOD" else [*pieces, ("EOD", 0.0)]
        answer = max((i for i, (_, weight) in enumerate(expected) if weight), default=-1)
        closed = answer >= 0 and all(text == "EOD" or text in spaces for text, _ in expected[answer + 1 :])
        run = len(expected)  # start of the final ends of document and white space
        while run and (expected[run - 1][0] == "EOD" or expected[run - 1][0] in spaces):
            run -= 1
        if closed and ("EOD", True) not in [(text, weight > 0) for text, weight in expected[run:]]:
            behind = [i for i in range(answer + 1, len(expected)) if expected[i][0] == "EOD"]
            for i in behind[:1]:
                expected[i] = ("EOD", expected[answer][1])
                seen["trained now"] += 1
        seen["added"] += len(expected) > len(pieces)
        assert longer.input_ids.tolist() == [int(i) for text, _ in expected for i in made[text]], pieces
        assert longer.loss_mask.tolist() == [w for text, w in expected for _ in made[text]], pieces
        again = append_eod(longer, tokenizer)
        assert again.input_ids.tolist() == longer.input_ids.tolist()
        assert again.loss_mask.tolist() == longer.loss_mask.tolist()
    assert min(seen["trained now"], seen["added"], 1500 - seen["added"]) > 100


def test_a_pickled_tokenizer_is_small_and_the_same() -> None:
    tokenizer = load("qwen2")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert len(pickle.dumps(tokenizer)) < 400
    assert (again.fingerprint, again.backend) == (tokenizer.fingerprint, tokenizer.backend)
    row = Rendered("привет 😀<|im_end|>", [Span(0, 4)])
    assert again.encode([row])[0].input_ids.tolist() == tokenizer.encode([row])[0].input_ids.tolist()


def test_token_texts_are_for_people() -> None:
    tokenizer = load("gpt2")
    ids = tokenizer.encode([Rendered("the fox<|im_end|>", [])])[0].input_ids
    assert "".join(tokenizer.decode([one]) for one in ids) == "the fox<|im_end|>"
    smile = tokenizer.encode([Rendered("\U0001f92f", [])])[0].input_ids.tolist()
    assert tokenizer.decode(smile[:1]) == "\ufffd"
    assert load("wordpiece").decode([load("wordpiece").eos_id]) == "<|im_end|>"


@pytest.mark.parametrize("kind", ["gpt2", "wordpiece"])
def test_ids_that_are_no_token_are_shown_by_their_number(kind: str) -> None:
    tokenizer = load(kind)
    word = tokenizer.encode([Rendered("the", [])])[0].input_ids.tolist()
    assert tokenizer.decode([-1, *word, 10**6, 2**31 - 1]) == "⟨-1⟩the⟨1000000⟩⟨2147483647⟩"
