"""Conversion of all kinds of rows to conversations."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.row_mapping import RowMapping
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import Conversation, RowError, TokenizedRow
from megatron_sft_idx.chat.values import read_values

USER = {"role": "user", "content": "Q"}
BOT = {"role": "assistant", "content": "A"}
SYSTEM = {"role": "system", "content": "S"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "1"}
TOOL = {"name": "f", "parameters": {"type": "object"}}
CHAT = [USER, BOT]


def bot(**keys):
    return {"messages": [USER, {"role": "assistant", **keys}]}


def part(text):
    return {"type": "text", "text": text}


def turn(speaker, value, **keys):
    return {"from": speaker, "value": value, **keys}


def shared(*turns, **columns):
    return {"conversations": [turn("human", "Q"), *turns], **columns}


# Rows by name, each with the expected messages.
GOOD = {
    "messages": ({"messages": CHAT}, CHAT),
    "under-conversations": ({"conversations": CHAT}, CHAT),
    "under-conversation": ({"conversation": CHAT, "conversations": None}, CHAT),
    "messages-as-json": ({"messages": json.dumps(CHAT)}, CHAT),
    "other-columns": ({"messages": CHAT, "id": 7, "text": "..", "images": [], "image": None}, CHAT),
    "developer": ({"messages": [{"role": "developer", "content": "D"}, *CHAT]}, None),
    "system-column": ({"messages": CHAT, "system": "S"}, [SYSTEM, *CHAT]),
    "system-twice-the-same": ({"messages": [SYSTEM, *CHAT], "system": "S"}, [SYSTEM, *CHAT]),
    "system-column-empty": ({"messages": CHAT, "system": ""}, CHAT),
    "parts": (bot(content=[part("a"), part(" b\n"), {"type": "output_text", "text": "c"}, "d"]), "a b\ncd"),
    "parts-under-value": (bot(content=[{"type": "text", "value": "a"}, {"type": "text", "content": "b"}]), "ab"),
    "parts-of-every-kind": (
        bot(
            content=[
                {"type": "reasoning", "value": "T"},
                {"type": "text", "value": "A"},
                {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"type": "tool_call", "name": "f", "arguments": {"x": 1}},
            ]
        ),
        [USER, CALLS | {"content": "A", "reasoning_content": "T", "tool_calls": [CALL, CALL]}],
    ),
    "parts-that-think": (
        bot(content=[{"type": "thinking", "thinking": [part("T")]}, part("A")]),
        [USER, BOT | {"reasoning_content": "T"}],
    ),
    "parts-none": ({"messages": [*CHAT, {"role": "assistant", "content": []}]}, [*CHAT, BOT | {"content": ""}]),
    "kept-keys": (bot(content="A", name="Ann", extra={"a": None}), [USER, BOT | {"name": "Ann", "extra": {"a": None}}]),
    "null-keys": (bot(content="A", tool_calls=None, function_call=None, refusal=None, audio=None), CHAT),
    "no-calls": (bot(content="A", tool_calls=[]), CHAT),
    "calls": ({"messages": [USER, CALLS, RESULT]}, [USER, CALLS, RESULT]),
    "calls-without-content": (bot(tool_calls=[CALL]), [USER, CALLS]),
    "calls-with-content": (bot(content="A", tool_calls=[CALL]), [USER, CALLS | {"content": "A"}]),
    "calls-json-arguments": (
        bot(content=None, tool_calls=[{"id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}]),
        [USER, CALLS | {"tool_calls": [CALL | {"id": "c1"}]}],
    ),
    "calls-bare": (
        bot(tool_calls=[{"id": "c1", "name": "f", "arguments": {"x": 1}}]),
        [USER, CALLS | {"tool_calls": [CALL | {"id": "c1"}]}],
    ),
    "calls-as-json": (bot(tool_calls=json.dumps([CALL])), [USER, CALLS]),
    "calls-llama-parameters": (bot(tool_calls=[{"name": "f", "parameters": {"x": 1}}]), [USER, CALLS]),
    "calls-no-arguments": (
        bot(tool_calls=[{"name": "f"}, {"name": "f", "arguments": ""}, {"name": "f", "arguments": "{}"}]),
        [USER, CALLS | {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}] * 3}],
    ),
    "calls-big-integer": (
        bot(tool_calls=[{"name": "f", "arguments": '{"x": 100000000000000000000001}'}]),
        [
            USER,
            CALLS | {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 10**23 + 1}}}]},
        ],
    ),
    "old-call": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
                {"role": "function", "name": "f", "content": "1"},
            ]
        },
        [USER, CALLS, RESULT | {"name": "f"}],
    ),
    "reasoning-alone": (
        bot(content=None, reasoning="T"),
        [USER, {"role": "assistant", "reasoning": "T", "reasoning_content": "T"}],
    ),
    "reasoning": (bot(content="A", reasoning_content="T"), [USER, BOT | {"reasoning_content": "T"}]),
    "thinking": (bot(content="A", thinking="T"), [USER, BOT | {"thinking": "T", "reasoning_content": "T"}]),
    "reasoning-parts": (
        bot(content="A", reasoning=[part("T"), part("U")]),
        [USER, BOT | {"reasoning": "TU", "reasoning_content": "TU"}],
    ),
    "reasoning-twice": (
        bot(content="A", reasoning="T", reasoning_content=""),
        [USER, BOT | {"reasoning": "T", "reasoning_content": "T"}],
    ),
    "reasoning-empty": (bot(content="A", reasoning_content=""), [USER, BOT | {"reasoning_content": ""}]),
    "sharegpt": (shared(turn("gpt", "A")), CHAT),
    "sharegpt-under-messages": ({"messages": [turn("user", "Q"), turn("chatgpt", "A")]}, CHAT),
    "sharegpt-system": (
        {"conversations": [turn("system", "S"), turn("human", "Q"), turn("bot", "A")]},
        [SYSTEM, *CHAT],
    ),
    "sharegpt-system-column": (shared(turn("model", "A"), system="S"), [SYSTEM, *CHAT]),
    "sharegpt-call": (
        shared(
            turn("function_call", '{"name": "f", "arguments": {"x": 1}}'), turn("observation", "1"), turn("gpt", "A")
        ),
        [USER, CALLS, RESULT, BOT],
    ),
    "sharegpt-calls": (
        shared(
            turn("gpt", "A"), turn("function_call", '[{"name": "f", "arguments": "{\\"x\\": 1}"}]'), turn("tool", "1")
        ),
        [USER, BOT, CALLS, RESULT],
    ),
    "sharegpt-parts": (shared(turn("gpt", [part("A")])), CHAT),
    "alpaca": ({"instruction": "Q", "input": "", "output": "A"}, CHAT),
    "alpaca-input": ({"instruction": "Q", "input": "I", "output": "A"}, [USER | {"content": "Q\nI"}, BOT]),
    "alpaca-only-input": ({"instruction": "", "input": "Q", "output": "A"}, CHAT),
    "alpaca-system": ({"instruction": "Q", "output": "A", "system": "S", "history": None}, [SYSTEM, *CHAT]),
    "alpaca-history": (
        {"instruction": "Q2", "input": None, "output": "A2", "history": [["Q", "A"]]},
        [*CHAT, USER | {"content": "Q2"}, BOT | {"content": "A2"}],
    ),
    "dolly": (
        {"instruction": "Q", "context": "C", "response": "A", "category": "x"},
        [USER | {"content": "Q\nC"}, BOT],
    ),
    "orca": ({"system_prompt": "S", "question": "Q", "response": "A"}, [SYSTEM, *CHAT]),
    "query-answer": ({"query": "Q", "answer": "A"}, CHAT),
    "whole-prompt-beside": ({"instruction": "Q", "output": "A", "prompt": "### Q: Q", "text": "Q A"}, CHAT),
    "prompt-completion": ({"prompt": "Q", "completion": "A"}, CHAT),
    "prompt-completion-wins": ({"prompt": "Q", "completion": "A", "instruction": "Q", "output": "A"}, CHAT),
    "messages-win": ({"messages": CHAT, "prompt": "x", "chosen": [], "rejected": []}, CHAT),
    "conversational": ({"prompt": [USER, BOT, USER], "completion": [BOT]}, [USER, BOT, USER, BOT]),
    "conversational-json": ({"prompt": json.dumps([USER]), "completion": json.dumps([BOT])}, CHAT),
    "answer-is-json": ({"prompt": "Q", "completion": "[{}]"}, [USER, {"role": "assistant", "content": "[{}]"}]),
}


@pytest.mark.parametrize("case", GOOD)
def test_good_row(case):
    row, expected = GOOD[case]
    before = copy.deepcopy(row)
    got = to_sequence_source(row)
    assert row == before
    if expected is None:
        expected = row["messages"]
    if isinstance(expected, str):
        expected = [USER, BOT | {"content": expected}]
    assert isinstance(got, Conversation)
    assert got.messages == expected
    assert len(got.weights) == len(expected)
    assert (got.tools, got.kwargs) == (None, {})


# All keys of all kinds of rows, messages, parts, calls and tools. A table with all of them has nulls elsewhere.
COLUMNS = (
    "messages conversations conversation input_ids loss_mask labels prompt completion instruction input output history"
    " system tools functions chat_template_kwargs chosen rejected rejected_response label kto_tag images"
    " role content from value type text weight train reasoning_content thinking tool_calls function_call"
    " function id name arguments parameters enable_thinking add_generation_prompt"
)
KEYS = COLUMNS.split()
TWO_STYLES = {
    "messages": [
        turn("human", "Q"),
        turn("function_call", '{"name": "f", "parameters": {}}'),
        turn("tool", "1", name="f"),
        turn("gpt", "A"),
    ],
    "tools": [TOOL],
    "chat_template_kwargs": {"x": 1},
}


def with_nulls(value, keys):
    """Return the value with a null for each of these keys that an object in it lacks, as in exports of tables."""
    if isinstance(value, list):
        return [with_nulls(each, keys) for each in value]
    if not isinstance(value, dict):
        return value
    lacking = dict.fromkeys(key for key in keys if key not in value)
    return lacking | {key: with_nulls(each, keys) for key, each in value.items()}


@pytest.mark.parametrize("keys", [*([key] for key in KEYS), KEYS], ids=[*KEYS, "all"])
def test_a_null_is_as_a_key_that_is_absent(keys):
    verdict = {"messages": CHAT, "label": 1}  # this label is a class, because there is no completion
    for row in [TWO_STYLES, verdict, *(row for row, _ in GOOD.values())]:
        without, given = (to_sequence_source(read_values(each)[0]) for each in (row, with_nulls(row, keys)))
        assert json.dumps(given) == json.dumps(without)  # in the same order, too


@pytest.mark.parametrize(
    ("row", "weights"),
    [
        ({"messages": CHAT}, [1, 1]),
        (bot(content="A", weight=0), [1, 0]),
        (bot(content="A", weight=0.25), [1, 0.25]),
        (bot(content="A", weight=True), [1, 1]),
        (bot(content="A", loss_weight=0), [1, 0]),
        (bot(content="A", loss_weight=0.5, weight=0.5, trainable=True), [1, 0.5]),
        (shared(turn("gpt", "A", loss_weight=0.5)), [1, 0.5]),
        (bot(content="A", train=False), [1, 0]),
        (bot(content="A", loss=0, loss_scale=2), [1, 0]),
        (bot(content="A", loss=True, weight=2), [1, 2]),
        (bot(content="A", weight=None, train=None), [1, 1]),
        (bot(content="A", weight=0) | {"system": "S"}, [1, 1, 0]),
        (shared(turn("gpt", "A", weight=0), turn("human", "Q"), turn("gpt", "A", train=True)), [1, 0, 1, 1]),
        ({"prompt": [USER, BOT, USER], "completion": [BOT, USER, BOT | {"weight": 0}]}, [0, 0, 0, 1, 1, 0]),
        ({"prompt": "Q", "completion": "A"}, [1, 1]),
    ],
)
def test_weights_of_messages(row, weights):
    conversation = to_sequence_source(row)
    assert conversation.weights == weights
    assert all(isinstance(weight, float) for weight in conversation.weights)
    assert not any(
        {"weight", "loss_weight", "train", "trainable", "loss"} & set(message) for message in conversation.messages
    )


WRAPPED = {"type": "function", "function": TOOL}


@pytest.mark.parametrize(
    ("columns", "tools"),
    [
        *(
            ({name: form}, [WRAPPED])
            for name in ("tools", "functions")
            for tool in (TOOL, WRAPPED, {"type": "function", **TOOL}, {"type": None, "function": None, **TOOL})
            for form in ([tool], [json.dumps(tool)], json.dumps([tool]))
        ),
        (
            {"tools": [{"type": "web_search", "name": "w"}, {"custom": 1}]},
            [{"type": "web_search", "name": "w"}, {"custom": 1}],
        ),
        ({"tools": None, "functions": [TOOL]}, [WRAPPED]),
        ({"tools": []}, None),
        ({"tools": "[]"}, None),
        ({"tools": " "}, None),
        ({"tools": "null"}, None),
    ],
)
@pytest.mark.parametrize("row", [{"messages": CHAT}, shared(turn("gpt", "A")), {"query": "Q", "answer": "A"}])
def test_tools(row, columns, tools):
    assert to_sequence_source(row | columns).tools == tools


@pytest.mark.parametrize("given_kwargs", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_template_kwargs(given_kwargs):
    row = {"messages": CHAT, "chat_template_kwargs": given_kwargs}
    assert to_sequence_source(row).kwargs == {"enable_thinking": False}
    assert to_sequence_source({"messages": CHAT, "chat_template_kwargs": {}}).kwargs == {}


IDS = [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("columns", "alignment", "mask"),
    [
        ({"loss_mask": [0, 0, 1, 1]}, "token", [0, 0, 1, 1]),
        ({"loss_mask": [1, 0, 0.5, 1]}, "token", [1, 0, 0.5, 1]),
        ({"loss_mask": [False, True, True, False]}, "token", [0, 1, 1, 0]),
        ({"loss_mask": [0, 1, 1, 0]}, "label", [0, 0, 1, 1]),
        ({"loss_mask": np.array([0, 1, 1, 0], np.uint8)}, "token", [0, 1, 1, 0]),
        ({"labels": [-100, -100, 7, 8]}, "token", [0, 0, 1, 1]),
        ({"labels": [-100, 7, 8, -100]}, "label", [0, 0, 1, 1]),
        ({"labels": [5, 6, 7, 8]}, "token", [1, 1, 1, 1]),
        ({"assistant_masks": [0, 0, 0, 1]}, "token", [0, 0, 0, 1]),
        ({"completion_mask": [0, 0, 0, 1], "attention_mask": [1] * 4}, "token", [0, 0, 0, 1]),
        ({"loss_mask": [0, 0, 0, 1], "labels": [5, 6, 7, 8], "messages": CHAT}, "token", [0, 0, 0, 1]),
    ],
)
def test_tokenised_rows(columns, alignment, mask):
    row = {"input_ids": IDS, **columns}
    got = to_sequence_source(row, RowOptions(mask_alignment=alignment))
    assert isinstance(got, TokenizedRow)
    assert (got.input_ids.dtype, got.loss_mask.dtype) == (np.int64, np.float32)
    assert got.input_ids.tolist() == IDS
    assert got.loss_mask.tolist() == mask


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1), st.booleans())
def test_masks_and_labels_say_the_same(tokens, as_labels):
    ids, mask = [i for i, _ in tokens], [0, *(int(m) for _, m in tokens[1:])]
    column, off = ("labels", -100) if as_labels else ("loss_mask", 0)
    on_tokens = [(i if as_labels else 1) if m else off for i, m in zip(ids, mask, strict=True)]
    on_labels = [*on_tokens[1:], off]
    for alignment, values in (("token", on_tokens), ("label", on_labels)):
        row = {"input_ids": ids, column: values}
        assert to_sequence_source(row, RowOptions(mask_alignment=alignment)).loss_mask.tolist() == mask


def mapped(**fields):
    return RowOptions(mapping=RowMapping.of(fields))


def test_options_override_the_columns():
    row = {"messages": CHAT, "instruction": "I", "output": "O", "turns": [USER, BOT, USER, BOT]}
    assert to_sequence_source(row, RowOptions(kind="alpaca")).messages[0]["content"] == "I"
    with pytest.raises(RowError, match="the row has reasoning, which looks like text of the reasoning"):
        to_sequence_source(row | {"reasoning": "T"}, RowOptions(kind="alpaca"))
    assert len(to_sequence_source(row, mapped(messages="turns")).messages) == 4
    with pytest.raises(RowError, match="the row has no chat, which --fields maps; it has messages"):
        to_sequence_source(row, mapped(messages="chat"))
    with pytest.raises(RowError, match="the row has no messages or conversations or conversation"):
        to_sequence_source({"prompt": "Q", "completion": "A"}, RowOptions(kind="messages"))
    pair = {"chosen": CHAT, "rejected": CHAT}
    assert to_sequence_source(pair, mapped(messages="chosen")).messages == CHAT
    lonely = to_sequence_source({"messages": [USER]}, RowOptions(train_on="all"))
    assert lonely.messages == [USER]
