"""The kernel that weights tokens by character spans, compared with a slow, simple twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sft_idx import _native

TOKENS = [bytes([i]) for i in range(256)] + [b"", b"ab", b" the", "é".encode(), "你好".encode(), b"\x9f\x98", b"0<|"]


def call(rows, *, tokens=TOKENS, ids_dtype=np.uint32, **changes):
    """Run the kernel on rows of (ids, text, spans)."""

    def offsets(lengths):
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)

    spans = [span for _, _, row_spans in rows for span in row_spans]
    arguments = {
        "ids": np.array([i for ids, _, _ in rows for i in ids], ids_dtype),
        "id_offsets": offsets([len(ids) for ids, _, _ in rows]),
        "text": b"".join(text for _, text, _ in rows),
        "text_offsets": offsets([len(text) for _, text, _ in rows]),
        "token_bytes": b"".join(tokens),
        "token_offsets": offsets([len(token) for token in tokens]),
        "span_edges": np.array([span[:2] for span in spans], np.int64).reshape(len(spans), 2),
        "span_weights": np.array([span[2] for span in spans], np.float32),
        "span_offsets": offsets([len(row_spans) for _, _, row_spans in rows]),
    }
    return _native.weigh_tokens(**{**arguments, **changes})


def twin(ids, text, spans):
    """Record token and character of every byte, then compute weights from these."""
    if any(i >= len(TOKENS) or not TOKENS[i] for i in ids) or b"".join(TOKENS[i] for i in ids) != text:
        return [0.0] * len(ids), 0, 0
    owner = [token for token, i in enumerate(ids) for _ in TOKENS[i]]
    starts = []
    for character in text.decode():
        starts.append((starts[-1][1] if starts else 0, (starts[-1][1] if starts else 0) + len(character.encode())))
    weights = [0.0] * len(ids)
    straddling = 0
    for start, stop, weight in spans:
        counted = [b for c in range(start, stop) for b in range(*starts[c])]
        for token in {owner[b] for b in counted}:
            weights[token] = max(weights[token], weight)
        first = counted[0] if counted else 0
        straddling += bool(counted and weight and first and owner[first - 1] == owner[first])
    return weights, straddling, 1


@st.composite
def row(draw):
    text = draw(st.text("abé你好 the😀0<|\n\x00", max_size=30)).encode()
    ids, at = [], 0
    while at < len(text):
        fitting = [i for i, token in enumerate(TOKENS) if token and text.startswith(token, at)]
        ids.append(draw(st.sampled_from(fitting)))
        at += len(TOKENS[ids[-1]])
    if draw(st.integers(0, 9)) == 0:  # sometimes tokens that do not spell the text
        ids = draw(st.lists(st.integers(0, len(TOKENS)), max_size=5))
    edges = sorted(draw(st.lists(st.integers(0, len(text.decode())), max_size=8)))
    edges = edges[: len(edges) // 2 * 2]
    weights = st.sampled_from([0.0, 0.25, 1.0, 2.0])
    return ids, text, [(a, b, draw(weights)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@given(rows=st.lists(row(), max_size=4))
@settings(deadline=None, max_examples=300)
def test_the_kernel_equals_its_twin(rows):
    weights, straddling, spelled = call(rows)
    expected = [twin(*one) for one in rows]
    assert weights.tolist() == [weight for row_weights, _, _ in expected for weight in row_weights]
    assert straddling.tolist() == [count for _, count, _ in expected]
    assert spelled.tolist() == [flag for _, _, flag in expected]
    assert (weights.dtype, straddling.dtype, spelled.dtype) == (np.float32, np.int64, np.uint8)


def test_a_long_ascii_text_is_walked_eight_bytes_at_a_time_and_no_further():
    text = ("x" * 1000 + "é" + "y" * 1000).encode()
    ids = [*text[:1000], TOKENS.index("é".encode()), *text[1002:]]
    weights = call([(ids, text, [(3, 999, 1.0), (1000, 1001, 0.5), (1007, 2001, 1.0)])])[0]
    assert np.flatnonzero(weights == 1.0).tolist() == [*range(3, 999), *range(1007, 2001)]
    assert np.flatnonzero(weights == 0.5).tolist() == [1000]


def test_a_span_that_ends_in_a_split_character_ends_at_its_last_token():
    text = "a😀b".encode()
    assert call([(list(text), text, [(0, 2, 1.0)])])[0].tolist() == [1, 1, 1, 1, 1, 0]


def test_rows_that_tokens_do_not_spell_are_named_and_weigh_nothing():
    for ids in ([97, 99], [97], [97, 98, 99], [TOKENS.index(b""), 97, 98], [len(TOKENS)], [2**32 - 1], []):
        weights, straddling, spelled = call([(ids, b"ab", [(0, 2, 1.0)]), ([97], b"a", [(0, 1, 1.0)])])
        assert weights.tolist() == [0.0] * len(ids) + [1.0]
        assert spelled.tolist() == [0, 1]
        assert straddling.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(2, 1, 1.0)], r"row 0: span \[2, 1\) descends"),
        ([(-1, 1, 1.0)], r"row 0: span \[-1, 1\) descends"),
        ([(0, 2, 1.0), (1, 3, 1.0)], r"row 0: span \[1, 3\) descends or overlaps"),
        ([(0, 4, 1.0)], r"row 0: span \[0, 4\) ends after the text"),
        ([(9, 9, 1.0)], r"row 0: span \[9, 9\) ends after the text"),
        ([(0, 2**62, 1.0)], "ends after the text"),
    ],
)
def test_bad_spans_are_refused(spans, message):
    with pytest.raises(ValueError, match=message):
        call([([97, 98, 99], b"abc", spans)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id_offsets": np.array([0, 2], np.int64)}, "id_offsets must run"),
        ({"id_offsets": np.array([], np.int64)}, "id_offsets must be one-dimensional"),
        ({"id_offsets": np.array([0, 5, 3], np.int64)}, "id_offsets must not descend"),
        ({"text_offsets": np.array([1, 3], np.int64)}, "text_offsets must run"),
        ({"span_offsets": np.array([0, 0, 1], np.int64)}, "same number of rows"),
        ({"token_offsets": np.zeros((2, 2), np.int64)}, "token_offsets must be one-dimensional"),
        ({"span_weights": np.zeros(2, np.float32)}, "one value per span"),
        ({"span_edges": np.zeros(2, np.int64)}, r"span_edges must be \[spans, 2\]"),
        ({"ids": np.zeros((1, 3), np.uint32)}, "ids must be one-dimensional"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call([([97, 98, 99], b"abc", [(0, 1, 1.0)])], **changes)


def test_a_table_that_points_outside_its_bytes_spells_nothing():
    for bad in ([0, 10**12], [-5, 1], [3, 1]):
        spelled = call([([0], b"a", [])], token_bytes=b"abc", token_offsets=np.array(bad, np.int64))[2]
        assert spelled.tolist() == [0]


def test_wrong_dtypes_are_refused_not_converted():
    with pytest.raises(TypeError):
        call([([97], b"a", [])], ids_dtype=np.int64)
    with pytest.raises(TypeError):
        call([([97], b"a", [])], id_offsets=np.array([0, 1], np.int32))
