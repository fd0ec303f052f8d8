"""``--append-eod`` on the command line, for all kinds of templates, rows and trained text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TOKENIZER, preprocess, sequences_of

from megatron_sft_idx.chat.tokenizer import load_tokenizer

LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}END{% endfor %}"
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}END"
    "{% else %}{{ m.role }}: {{ m.content }}END{% endif %}{% endfor %}"
)
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}END{% endfor %}"
)
ENDS = {
    "no end of turn": "\n",
    "the token": "<|im_end|>",
    "the token and a line feed": "<|im_end|>\n",
    "another token": "<|endoftext|>\n",
    "white space of several tokens": " \u205f\n",
}
Q, A = {"role": "user", "content": "One and two?"}, {"role": "assistant", "content": "It is three"}
IDS = [5, 6, 7]


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [*messages], **more}


def thought(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "reasoning_content": "I count them"}


# For each case: template, row, options, and the weight of the final end of document of each sequence.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], list[float]]] = {
    "an answer": (LOOP, chat(Q, A), (), [1]),
    "two answers": (LOOP, chat(Q, A, Q, A), (), [1]),
    "the last turn": (LOOP, chat(Q, A, Q, A), ("--train-on", "last-turn"), [1]),
    "a last question": (LOOP, chat(Q, A, Q), (), [0]),
    "a last answer of weight 0": (LOOP, chat(Q, A, Q, {**A, "weight": 0}), (), [0]),
    "a last answer that is not trained": (LOOP, chat(Q, A, Q, {**A, "train": False}), (), [0]),
    "another weight": (LOOP, chat(Q, {**A, "weight": 0.5}), (), [0.5]),
    "the weight of the last answer": (LOOP, chat(Q, A, Q, {**A, "weight": 0.25}), (), [0.25]),
    "everything": (LOOP, chat(Q, A, Q), ("--train-on", "all"), [1]),
    "markers": (MARKED, chat(Q, A), ("--train-on", "markers"), [1]),
    "markers, a last question": (MARKED, chat(Q, A, Q), ("--train-on", "markers"), [0]),
    "markers taken for the assistant's words": (MARKED, chat(Q, A), (), [1]),
    "a prompt and a completion": (LOOP, {"prompt": "One?", "completion": "Two"}, (), [1]),
    "a pair": (LOOP, {"prompt": "One?", "chosen": "Two", "rejected": "Three"}, ("--row-kind", "preference"), [1, 1]),
    "KTO": (LOOP, {"prompt": "One?", "completion": "Two", "label": False}, ("--row-kind", "kto"), [1]),
    "a sequence for each turn": (
        THINKING,
        chat(Q, thought(A), Q, thought({**A, "weight": 0.5})),
        ("--earlier-reasoning", "split"),
        [1, 0.5],
    ),
}


@pytest.mark.sample(20)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("case", CASES)
def test_the_end_of_document_is_trained_where_a_sequence_ends_in_a_trained_answer(
    tmp_path: Path, case: str, end: str
) -> None:
    source, row, options, weights = CASES[case]
    template = tmp_path / "t.jinja"
    template.write_text(source.replace("END", ENDS[end]), encoding="utf-8")
    given = ("--packing", "none", "--chat-template", template, *options)
    for name, more in (("without", ()), ("with", ("--append-eod",))):
        done = preprocess(tmp_path / name, *given, *more, rows=[row])
        assert done.code == 0, done.err
    eod = load_tokenizer(TOKENIZER).eos_id
    found = []
    pairs = zip(sequences_of(tmp_path / "without"), sequences_of(tmp_path / "with"), strict=True)
    for (ids, mask), (longer, longer_mask) in pairs:
        added = [] if "<|im_end|>" in ENDS[end] else [eod]
        assert longer.tolist() == [*ids.tolist(), *added]
        at = int(np.flatnonzero(longer == eod)[-1])
        found.append(float(longer_mask[at]))
        others = np.arange(len(ids)) != at
        assert longer_mask[: len(ids)][others].tolist() == mask[others].tolist()
    # A control token follows the markers, so the sequence does not end with trained text.
    outside = source == MARKED and end == "another token"
    assert found == ([0] if outside else weights)


def test_the_line_feed_behind_an_answer_does_not_hide_it(tmp_path: Path) -> None:
    template = Path(__file__).parents[1] / "masks" / "ne.jinja"
    given = ("--packing", "none", "--append-eod", "--chat-template", template)
    assert preprocess(tmp_path / "x", *given, rows=[chat(Q, A)]).code == 0
    tokenizer = load_tokenizer(TOKENIZER)
    [(ids, mask)] = sequences_of(tmp_path / "x")
    assert tokenizer.decode(ids) == "user: One and two?\nassistant: It is three\n<|im_end|>"
    assert tokenizer.decode(ids[mask == 1]).split() == ["It", "is", "three<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "weights"),
    [
        ({"input_ids": IDS, "loss_mask": [0, 1, 1]}, [1]),
        ({"input_ids": IDS, "loss_mask": [0, 1, 0]}, [0]),
        ({"input_ids": IDS, "loss_mask": [0, 0, 0.5]}, [0.5]),
        ({"input_ids": IDS * 2, "loss_mask": [0, 1, 1, 0, 1, 0], "seq_lengths": [3, 3]}, [1, 0]),
    ],
)
def test_rows_that_came_with_ids(tmp_path: Path, row: dict[str, Any], weights: list[float]) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    done = preprocess(tmp_path / "x", "--packing", "none", "--append-eod", rows=[row])
    assert done.code == 0, done.err
    found = sequences_of(tmp_path / "x")
    assert [ids.tolist() for ids, _ in found] == [[*IDS, tokenizer.eos_id]] * len(weights)
    assert [float(mask[-1]) for _, mask in found] == weights
