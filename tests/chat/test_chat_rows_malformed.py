"""Errors for rows that cannot be used."""

import pytest

from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import RowError

USER = {"role": "user", "content": "Q"}
BOT = {"role": "assistant", "content": "A"}
CHAT = [USER, BOT]


def says(**keys):
    return {"messages": [USER, {"role": "assistant", **keys}]}


def calls(*tool_calls):
    return says(tool_calls=list(tool_calls))


def turns(*pairs, **columns):
    return {"conversations": [{"from": a, "value": b} for a, b in pairs], **columns}


def ids(**columns):
    return {"input_ids": [5, 6, 7], **columns}


BAD = [
    ([1], "the row is a list, expected an object"),
    (None, "the row is null, expected an object"),
    ("text", "the row is a string"),
    ({}, "no columns of a chat: .* found no field"),
    ({"text": "a book", "url": "x", "n": None}, "the row has only text, without roles: pass --train-on all"),
    ({"url": "x", "meta": {"id": 3, "n": None}}, "no columns of a chat: .* found url, meta.id; .*--fields"),
    ({"instruction": "Q"}, "no columns of a chat: .* found instruction"),
    (
        {"prompt": "Q", "chosen": "A", "rejected": "B"},
        r"pair \(chosen, rejected\).* --fields prompt=prompt completion=chosen to train",
    ),
    ({"question": "Q", "chosen": "A", "rejected": "B"}, "--fields prompt=question completion=chosen"),
    ({"chosen": CHAT, "rejected": CHAT}, "--fields messages=chosen to train"),
    ({"instruction": "Q", "input": None, "output": None}, "^output is empty"),
    ({"instruction": None, "input": None, "output": "A"}, "^instruction and input are empty"),
    ({"prompt": "Q", "completion": None, "url": "x"}, "^completion is empty"),
    ({"conversations": CHAT, "chosen": BOT, "rejected": BOT}, "a preference pair"),
    ({"messages": CHAT, "rejected_response": "B"}, r"a preference pair \(rejected_response\)"),
    ({"instruction": "Q", "output": "A", "rejected": ["B"]}, "a preference pair"),
    (ids(loss_mask=[0, 1, 1], chosen="A", rejected="B"), "a preference pair"),
    ({"prompt": "Q", "completion": "A", "label": False}, "label is false: this is a KTO row"),
    ({"prompt": [USER], "completion": [BOT], "label": 1}, "label is 1: this is a KTO row"),
    ({"messages": CHAT, "label": True}, "label is true: this is a KTO row"),
    ({"conversations": CHAT, "kto_tag": False}, "kto_tag is false: this is a KTO row"),
    ({"messages": CHAT, "images": ["a.png"]}, "the row has images; pass --processor FOLDER to read"),
    ({"instruction": "Q", "output": "A", "audio": {"path": "a.wav"}}, "the row has audio"),
    ({"messages": CHAT, "videos": "a.mp4"}, "the row has videos"),
    # messages
    ({"messages": []}, "messages is empty"),
    ({"messages": {"role": "user"}}, "messages is an object, expected a list"),
    ({"messages": (USER, BOT)}, "messages is tuple, expected a list"),
    ({"messages": "hello"}, "messages is a string that is not valid JSON"),
    ({"messages": '{"role": "user"}'}, "messages is an object, expected a list"),
    (
        {"messages": ["hello"]},
        "messages has 1 string, expected an even number: ",
    ),
    (
        {"messages": [USER, {"role": "robot", "content": "A"}]},
        r"messages\[1\] has the role 'robot'; known roles are sys",
    ),
    ({"messages": [USER, {"content": "A"}]}, r"messages\[1\] has no role; if another field"),
    ({"messages": [{"role": ["user"], "content": "Q"}]}, r"has the role \['user'\]"),
    ({"messages": [{"role": "x" * 99, "content": "Q"}]}, r"has the role 'x{39};"),
    ({"messages": [{"role": "user"}, BOT]}, r"messages\[0\] \(user\) has no content"),
    ({"messages": [{"role": "user", "content": None}, BOT]}, r"messages\[0\] \(user\) has no content"),
    (says(content=None), r"messages\[1\] \(assistant\) has neither content nor reasoning nor tool calls"),
    (says(content=3), r"messages\[1\].content is a number, expected a string or a list of text parts"),
    (says(content={"text": "A"}), r"messages\[1\].content is an object"),
    (
        says(content=[{"type": "image_url", "image_url": {}}]),
        r"content\[0\] is of type 'image_url'; pass --processor FOLDER to read",
    ),
    (says(content=[{"type": "input_audio"}]), "is of type 'input_audio'"),
    (says(content=[{"type": "text"}]), r"content\[0\].text is null, expected a string"),
    (says(content=[{"text": "A"}]), r"content\[0\] is of type None"),
    (
        says(content=["A", {"type": "thinking", "thinking": "T"}]),
        "parts in the order text, thinking; .* several messages",
    ),
    (says(content=[{"type": "reasoning", "value": "T"}, "A"], reasoning="U"), "keep one"),
    (says(content=[{"type": "tool_call", "value": "f(x)"}]), r"content\[0\] is a string that is not valid JSON"),
    (says(content=[{"type": "tool_call"}]), r"tool_calls\[0\] has no function name"),
    (says(content=[3]), r"content\[0\] is a number, expected a text part"),
    (says(content="A", images=["a.png"]), r"messages\[1\] has images"),
    (says(content="A", name=3), r"messages\[1\].name is a number"),
    (says(content="A", weight=-1), r"messages\[1\].weight is -1, expected a finite number >= 0"),
    (says(content="A", weight=float("nan")), "weight is nan"),
    (says(content="A", weight=1e300), "weight is 1e"),
    (says(content="A", weight=10**400), "weight is 1000"),
    (says(content="A", weight="1"), "weight is '1'"),
    (says(content="A", loss_weight="1"), r"messages\[1\].loss_weight is '1'"),
    (says(content="A", loss_weight=0, weight=1), "has weight and loss_weight, which contradict each other; keep one"),
    (says(content="A", train_detail=[{"train": False}]), r"messages\[1\] has train_detail, which is not supported"),
    (says(content="A", train="no"), r"messages\[1\].train is 'no', expected true or false"),
    (says(content="A", loss=0.5), r"messages\[1\].loss is 0.5"),
    (says(content="A", thinking="T", reasoning="U"), r"reasoning and thinking of messages\[1\] differ; keep one"),
    (says(content="A", reasoning_content=3), "reasoning_content is a number"),
    ({"messages": [USER]}, "the row has no assistant message, so there is nothing"),
    (says(content=""), "the assistant messages in this row are empty"),
    ({"messages": CHAT, "system": ["S"]}, "system is a list, expected a string"),
    ({"messages": [{"role": "system", "content": "A"}, *CHAT], "system": "B"}, "different system prompts"),
    # tool calls
    (says(tool_calls={"name": "f"}), r"tool_calls is an object, expected a list"),
    (says(tool_calls="f(x)"), r"tool_calls is a string that is not valid JSON"),
    (calls("f"), r"tool_calls\[0\] is a string, expected an object with name and arguments"),
    (calls({"type": "code", "code": "1"}), r"tool_calls\[0\] is of type 'code', expected 'function'"),
    (calls({"function": "f"}), r"tool_calls\[0\].function is a string"),
    (calls({"function": {"arguments": "{}"}}), r"tool_calls\[0\] has no function name"),
    (calls({"name": "", "arguments": {}}), "has no function name"),
    (calls({"name": "f", "arguments": "{x: 1}"}), r"\(f\).arguments is a string that is not valid JSON"),
    (calls({"name": "f", "arguments": "[1]"}), r"\(f\).arguments is a list, expected an object"),
    (calls({"name": "f", "arguments": 7}), r"\(f\).arguments is a number"),
    ({"messages": [USER | {"tool_calls": [{"name": "f"}]}, BOT]}, "has tool calls and the role 'user'"),
    (says(tool_calls=[{"name": "f"}], function_call={"name": "f"}), "both tool_calls and function_call"),
    (says(function_call={"arguments": "{}"}), r"messages\[1\].function_call has no function name"),
    # tools and template variables
    ({"messages": CHAT, "tools": "search(x)"}, "tools is a string that is not valid JSON"),
    ({"messages": CHAT, "tools": {"name": "f"}}, "tools is an object, expected a list of tool schemas"),
    ({"messages": CHAT, "tools": [3]}, r"tools\[0\] is a number, expected an object"),
    ({"messages": CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs is a list"),
    ({"messages": CHAT, "chat_template_kwargs": {"tools": 1}}, "sets tools, which a row cannot set"),
    # ShareGPT
    (turns(("human", "Q"), ("alien", "A")), r"conversations\[1\] has the role 'alien'; known roles are system"),
    (turns(("human", "Q"), (["gpt"], "A")), r"has the role \['gpt'\]"),
    (turns(("human", "Q"), ("gpt", None)), r"conversations\[1\] \(gpt\) has no value"),
    (turns(("human", "Q"), ("gpt", 3)), r"conversations\[1\].value is a number"),
    ({"conversations": [{"from": "human", "value": "Q"}, BOT]}, r"conversations\[1\] has no role"),
    ({"conversations": [{"from": "human", "value": "Q"}, "A"]}, "is a string, expected an object with from"),
    (turns(("human", "Q"), ("function_call", "f(1)")), r"\(function_call\) is a string that is not valid JSON"),
    (turns(("human", "Q"), ("function_call", "[]")), r"\(function_call\) contains no call"),
    (turns(("human", "Q"), ("function_call", "{}")), r"\(function_call\) has no function name"),
    (turns(("human", "Q"), ("function_call", "3")), r"\(function_call\) is a number, expected an object"),
    (turns(("human", "Q")), "the row has no assistant message"),
    # Alpaca, prompt and completion
    ({"instruction": 3, "output": "A"}, "instruction is a number, expected a string"),
    ({"instruction": "Q", "output": ["A"]}, "output is a list, expected a string"),
    ({"instruction": "Q", "input": {"a": 1}, "output": "A"}, "input is an object, expected a string"),
    ({"instruction": "", "input": "", "output": "A"}, "the prompt is empty"),
    ({"instruction": "Q", "output": ""}, "the answer is empty"),
    ({"instruction": "Q", "output": "A", "history": "Q"}, r"history is not a list of \[prompt, answer\] pairs"),
    ({"instruction": "Q", "output": "A", "history": [["Q"]]}, r"history is not a list of \[prompt, answer\] pairs"),
    (
        {"instruction": "Q", "output": "A", "history": [["Q", None]]},
        r"history is not a list of \[prompt, answer\] pairs",
    ),
    ({"prompt": "", "completion": "A"}, "prompt is empty"),
    ({"prompt": "Q", "completion": ""}, "the answer is empty"),
    ({"prompt": "Q", "completion": [BOT]}, "prompt is a string and completion is a list, expected two"),
    ({"prompt": [USER, BOT], "completion": [USER]}, "the answer is empty .completion."),
    ({"prompt": [USER], "completion": []}, "completion is empty"),
    # tokenised
    (ids(), "no columns of a chat: .* or input_ids with a mask; found input_ids"),
    ({"input_ids": [], "loss_mask": []}, "input_ids is empty"),
    ({"input_ids": "abc", "loss_mask": [1]}, "input_ids is not a flat list of numbers"),
    ({"input_ids": [[1, 2]], "loss_mask": [1]}, "input_ids is not a flat list of numbers"),
    ({"input_ids": [[1], [2, 3]], "loss_mask": [1]}, "input_ids is not a flat list of numbers"),
    ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, "input_ids is not a flat list of integers"),
    ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, "input_ids is not a flat list of numbers"),
    ({"input_ids": [1, None], "loss_mask": [1, 1]}, "input_ids is not a flat list of numbers"),
    ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "input_ids contains -2, which is not a token id"),
    ({"input_ids": [1, 2**31], "loss_mask": [1, 1]}, "input_ids contains 2147483648, which is not a token id"),
    (
        {"input_ids": [1 + 2**63, 2**63], "loss_mask": [1, 1]},
        "input_ids contains 9223372036854775809, which is not a token id",
    ),
    ({"input_ids": [1, 2**70], "loss_mask": [1, 1]}, "input_ids is not a flat list of numbers"),
    (ids(loss_mask=[1, 1]), "loss_mask has 2 entries for 3 input_ids"),
    (ids(loss_mask=[1, float("nan"), 0]), r"loss_mask\[1\] is nan, expected a finite number >= 0"),
    (ids(loss_mask=[1, 0, -1]), r"loss_mask\[2\] is -1"),
    (ids(loss_mask=[1, 0, 1e200]), r"loss_mask\[2\] is inf"),
    (ids(loss_mask=[1, 0, "1"]), "loss_mask is not a flat list of numbers"),
    (ids(loss_mask=1), "loss_mask is not a flat list of numbers"),
    (ids(labels=[-100, 6]), "labels has 2 entries"),
    (ids(labels=[-100, 6.5, 7]), "labels is not a flat list of integers"),
    (ids(labels=[-100, 9, 7]), r"labels\[1\] is 9, but the token there is 6; expected the same id or -100$"),
    ({"input_ids": [5], "labels": [9]}, r"labels\[0\] is 9, .* expected the same id or -100$"),
    (ids(labels=[-100, -100, 9]), r"labels\[2\] is 9, .* expected the same id or -100$"),
    (ids(labels=[6, 7, -100]), "the labels look shifted by one: pass them as label-aligned"),
    (ids(labels=[5, 6, 7], attention_mask=[1, 1, 0]), "padding is trained on: the row marks its last 1 tokens"),
]


@pytest.mark.parametrize(("row", "reason"), BAD, ids=range(len(BAD)))
def test_bad_row(row, reason):
    before = repr(row)
    with pytest.raises(RowError, match=reason):
        to_sequence_source(row)
    assert repr(row) == before


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            ids(loss_mask=[0, 1, 1]),
            r"loss_mask is 1 at the last position, expected 0, because no token .*; is the mask token-aligned\?",
        ),
        (
            ids(labels=[-100, 6, 7]),
            r"labels is 7 at the last position, expected -100, because no token .*; is the mask token-aligned\?",
        ),
        (ids(labels=[6, 9, -100]), r"labels\[1\] is 9, but the token there is 7; expected the same id or -100$"),
        (ids(loss_mask=[-1, 1, 0]), r"loss_mask\[0\] is -1"),
    ],
)
def test_bad_row_with_label_aligned_masks(row, reason):
    with pytest.raises(RowError, match=reason):
        to_sequence_source(row, RowOptions(mask_alignment="label"))
