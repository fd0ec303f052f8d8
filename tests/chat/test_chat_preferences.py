"""Rows with preference pairs, in all shapes that data sets use, and with verdicts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_sft_idx.chat.preferences import read_judged
from megatron_sft_idx.chat.row_mapping import RowMapping
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import Conversation, RowError

PAIRS, VERDICTS = RowOptions(kind="preference"), RowOptions(kind="kto")


def said(*texts: str, roles: str = "ua") -> list[dict[str, str]]:
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[roles[i % len(roles)]], "content": text} for i, text in enumerate(texts)]


def turns(*texts: str, first: str = "human") -> list[dict[str, str]]:
    speakers = ["human", "gpt"] if first == "human" else ["gpt", "human"]
    return [{"from": speakers[i % 2], "value": text} for i, text in enumerate(texts)]


HH = "\n\nHuman: Q\n\nAssistant:"
Q, GOOD, BAD = said("Q"), said("A", roles="a"), said("B", roles="a")
# All are the same pair: the question Q with the better answer A and the worse answer B.
SHAPES: dict[str, dict[str, Any]] = {
    "TRL, with its prompt": {"prompt": Q, "chosen": GOOD, "rejected": BAD},
    "TRL, the prompt in both": {"chosen": said("Q", "A"), "rejected": said("Q", "B")},
    "TRL, strings": {"prompt": "Q", "chosen": "A", "rejected": "B"},
    "UltraFeedback": {
        **{"prompt": "Q", "prompt_id": "x", "messages": said("Q", "A"), "score_chosen": 8.0, "score_rejected": 3.0},
        **{"chosen": said("Q", "A"), "rejected": said("Q", "B")},
    },
    "whole beside a prompt": {"prompt": Q, "chosen": said("Q", "A"), "rejected": said("Q", "B")},
    "LLaMA-Factory": {"conversations": turns("Q"), "chosen": turns("A", first="gpt")[0], "rejected": BAD[0]},
    "LLaMA-Factory, OpenAI": {"messages": Q, "chosen": GOOD[0], "rejected": BAD[0]},
    "LLaMA-Factory, Alpaca": {"instruction": "Q", "input": "", "chosen": "A", "rejected": "B"},
    "ms-swift": {"messages": said("Q", "A"), "rejected_response": "B"},
    "ms-swift, messages": {"messages": said("Q", "A"), "rejected_messages": said("Q", "B")},
    "Orca": {"system": "", "question": "Q", "chosen": "A", "rejected": "B"},
    "input alone": {"input": "Q", "chosen_response": "A", "rejected_response": "B"},
    "Anthropic": {"chosen": f"{HH} A", "rejected": f"{HH} B"},
    "Anthropic, the prompt apart": {"prompt": HH, "chosen": " A", "rejected": " B"},
    "ShareGPT in both": {"chosen": turns("Q", "A"), "rejected": turns("Q", "B")},
    "answers as lists": {"conversations": turns("Q"), "chosen": turns("A", first="gpt"), "rejected": BAD},
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_pair_in_any_shape(name: str) -> None:
    row = SHAPES[name]
    before = repr(row)
    (chosen, rejected), label = read_judged(row, PAIRS)
    assert isinstance(chosen, Conversation)
    assert isinstance(rejected, Conversation)
    told = [[(turn["role"], turn["content"].strip()) for turn in one.messages] for one in (chosen, rejected)]
    assert told == [[("user", "Q"), ("assistant", answer)] for answer in "AB"]
    assert chosen.weights == rejected.weights == [0.0, 1.0]
    assert label is None
    assert repr(row) == before


@pytest.mark.parametrize("key", ["role", "from", "content", "value", "weight", "tool_calls"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_null_in_one_column_changes_no_pair(name: str, key: str) -> None:
    expected = read_judged(SHAPES[name], PAIRS)
    for column, value in SHAPES[name].items():
        one = [{key: None} | turn for turn in value] if isinstance(value, list) else value
        row = SHAPES[name] | {column: {key: None} | value if isinstance(value, dict) else one}
        assert read_judged(row, PAIRS) == expected


def test_only_what_follows_the_common_messages_is_trained_on() -> None:
    before = said("Be kind", roles="s") + said("Q1", "A1", "Q2")
    row = {
        "chosen": before + said("A", "Q3", "A3", roles="au"),
        "rejected": before + said("B", roles="a"),
        "tools": "[]",
    }
    (chosen, rejected), _ = read_judged(row, PAIRS)
    assert [chosen.weights, rejected.weights] == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]
    # An answer with which both conversations begin is part of the prompt.
    row = {"messages": Q, "chosen": said("A", "Q", "C", roles="au"), "rejected": said("A", "Q", "D", roles="au")}
    assert [one.weights for one in read_judged(row, PAIRS)[0]] == [[0, 0, 0, 1]] * 2


def test_messages_may_stand_in_their_fields_as_json_text() -> None:
    rows = [
        {"messages": Q, "chosen": said("A", roles="a"), "rejected": said("B", roles="a")},
        {"prompt": Q, "chosen": said("Q", "A"), "rejected": said("Q", "B")},
        {"messages": said("Q", "A"), "rejected_messages": said("Q", "B")},
    ]
    for row in rows:
        text = {key: json.dumps(turns) for key, turns in row.items()}
        assert read_judged(text, PAIRS) == read_judged(row, PAIRS)
    (chosen, _), _ = read_judged({"prompt": "Q", "chosen": "[1, 2]", "rejected": "[Note] no"}, PAIRS)
    assert chosen.messages[-1]["content"] == "[1, 2]"


def test_what_stands_beside_a_pair_is_read() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    row = {"system": "Be kind", "tools": tools, "history": [["H", "I"]], "instruction": "Q", "input": "more"}
    (chosen, rejected), _ = read_judged({**row, "chosen": "A", "rejected": "B"}, PAIRS)
    assert [turn["content"] for turn in chosen.messages] == ["Be kind", "H", "I", "Q\nmore", "A"]
    assert chosen.tools == rejected.tools == tools
    keyed = {"turns": Q, "messages": said("other"), "chosen": "A", "rejected": "B"}
    (chosen, _), _ = read_judged(
        keyed,
        RowOptions(
            kind="preference", mapping=RowMapping.of({"prompt": "turns", "chosen": "chosen", "rejected": "rejected"})
        ),
    )
    assert chosen.messages == said("Q", "A")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": said("Q", "A")}, "not a preference row: rejected is missing"),
        ({"prompt": "Q", "chosen": "A", "rejected": ""}, "not a preference row: rejected is empty"),
        ({"prompt": "Q", "rejected": "B"}, "not a preference row: chosen is missing"),
        (
            {"messages": said("Q", "A", "Q", "B"), "chosen": "", "rejected": "C"},
            "chosen: no assistant message is trained on",
        ),
        (
            {"messages": said("Q", "A"), "chosen": [], "rejected": "C"},
            "chosen is not a string, a message or a list",
        ),
        ({"chosen": "A", "rejected": "B"}, "have no common prompt"),
        ({"chosen": said("Q", "A"), "rejected": said("P", "B")}, "have no common prompt"),
        ({"prompt": "Q", "chosen": "A", "rejected": "A"}, "are equal"),
        ({"chosen": said("Q", "A"), "rejected": said("Q")}, "one is a prefix of the other"),
        ({"prompt": "Q", "chosen": "A", "rejected": [1]}, "rejected is not a string"),
        ({"prompt": "Q", "chosen": 1.5, "rejected": "B"}, "chosen is not a string"),
        ({"prompt": 3, "chosen": "A", "rejected": "B"}, "prompt is a number, expected a string"),
        ({"messages": "Q", "chosen": "A", "rejected": "B"}, "messages is not a list"),
        (
            {"history": ["x"], "prompt": "Q", "chosen": "A", "rejected": "B"},
            r"history is not a list of \[prompt, answer\] pairs",
        ),
        ({"prompt": "X", "chosen": said("Q", "A"), "rejected": said("Q", "B")}, "do not begin with the row's prompt"),
        (
            {"messages": said("X"), "chosen": said("Q", "A"), "rejected": said("Q", "B")},
            "do not begin with the row's messages",
        ),
        (
            {"prompt": Q, "chosen": GOOD, "rejected": [{"role": "tool", "content": "B"}]},
            "rejected: no assistant message is trained on",
        ),
        ({"prompt": Q, "chosen": [{"role": "x", "content": "A"}], "rejected": BAD}, r"^chosen\[0\] has the role 'x'"),
        (
            {"prompt": "Q", "chosen": "A", "rejected": "B", "images": ["a.png"]},
            "images; pass --processor FOLDER to read",
        ),
        ({"prompt": "Q", "chosen": "A", "rejected": "B", "label": True}, r"label .true."),
        (None, "the row is null, expected an object"),
    ],
)
def test_no_pair(row: Any, words: str) -> None:
    with pytest.raises(RowError, match=words):
        read_judged(row, PAIRS)


OTHER = {
    "another question": said("S", "OTHER", roles="su"),
    "no system message": said("Q"),
    "another system message": said("OTHER", "Q", roles="su"),
    "the question in another role": said("S", "Q", roles="ss"),
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("rejected_is_whole", [True, False])
@pytest.mark.parametrize("chosen_is_whole", [True, False])
def test_both_answers_are_to_the_prompt_whether_it_stands_before_them_or_not(
    chosen_is_whole: bool, rejected_is_whole: bool, other: str
) -> None:
    prompt = said("S", "Q", roles="su")
    row: dict[str, Any] = {
        "prompt": prompt,
        "chosen": prompt * chosen_is_whole + GOOD,
        "rejected": prompt * rejected_is_whole + BAD,
    }
    for prompted in (row, {"messages": prompt} | row, {"prompt": "Q", "system": "S"} | row):
        (chosen, rejected), _ = read_judged(prompted, PAIRS)
        assert (chosen.messages, rejected.messages) == (prompt + GOOD, prompt + BAD)
        assert chosen.weights == rejected.weights == [0, 0, 1]
    for name, is_whole, answer in (("chosen", chosen_is_whole, GOOD), ("rejected", rejected_is_whole, BAD)):
        if is_whole:
            for prompted in (row, {"messages": prompt} | row):
                with pytest.raises(RowError, match=r"do not begin with the row's (prompt|messages)"):
                    read_judged({**prompted, name: OTHER[other] + answer}, PAIRS)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": said("S", "Q", "A", roles="sua"), "rejected_messages": said("S", "OTHER", "B", roles="sua")},
        {"chosen": said("S", "Q", "A", roles="sua"), "rejected": said("S", "OTHER", "B", roles="sua")},
        {"prompt": said("Q"), "chosen": said("Q", "A", "P", "C"), "rejected": said("Q", "A", "OTHER", "D")},
        {"messages": Q, "chosen": said("A", "P", "C", roles="aua"), "rejected": said("A", "OTHER", "D", roles="aua")},
    ],
    ids=["ms-swift", "whole", "in the end", "answers of several turns"],
)
def test_the_two_differ_in_answers_alone(row: dict[str, Any]) -> None:
    with pytest.raises(RowError, match="have different prompts"):
        read_judged(row, PAIRS)


def test_an_answer_within_the_prompt_is_that_of_both() -> None:
    prompt = said("Q", "A", "P")
    row = {"chosen": said("Q", "A", "P", "C"), "rejected": said("Q", "OTHER", "P", "D")}
    for key in ("prompt", "messages", "conversations"):
        with pytest.raises(RowError, match=f"do not begin with the row's {key}"):
            read_judged({key: prompt, **row}, PAIRS)
    with pytest.raises(RowError, match="do not begin with the row's messages"):
        read_judged({"messages": prompt, "chosen": prompt, "rejected": row["rejected"]}, PAIRS)
    for rejected in (BAD, said("B", "P", "C", roles="aua")):
        tooled = [*Q, *GOOD, {"role": "tool", "content": "T"}]
        with pytest.raises(RowError, match="one is a prefix of the other"):
            read_judged({"messages": tooled, "chosen": tooled, "rejected": rejected}, PAIRS)
    # Without a prompt, these are two answers to Q of several turns each. The same holds if the messages equal the
    # chosen.
    for beside in ({}, {"prompt": "Q"}, {"messages": row["chosen"]}):
        (chosen, rejected), _ = read_judged({**beside, **row}, PAIRS)
        assert chosen.weights == rejected.weights == [0, 1, 1, 1]


def parts(text: str, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


@pytest.mark.parametrize("same", [parts("A"), {"from": "gpt", "value": "A"}, GOOD[0] | {"weight": 0.5}, "A", GOOD])
def test_an_answer_in_two_spellings_is_one_answer(same: Any) -> None:
    for whole in (parts("Q", "user"), {"from": "human", "value": "Q"}):
        row: dict[str, Any] = {"prompt": "Q", "chosen": said("Q", "A"), "rejected": same}
        with pytest.raises(RowError, match="are equal"):
            read_judged(row, PAIRS)
        if isinstance(same, dict) and ("from" in same) == ("from" in whole):
            with pytest.raises(RowError, match="are equal"):
                read_judged({"chosen": said("Q", "A"), "rejected": [whole, same]}, PAIRS)


@pytest.mark.parametrize("spelled", [[parts("Q", "user"), parts("B")], turns("Q", "B"), json.dumps(turns("Q", "B"))])
def test_a_question_in_two_spellings_is_one_question(spelled: Any) -> None:
    expected = read_judged({"chosen": said("Q", "A"), "rejected": said("Q", "B")}, PAIRS)
    for row in ({}, {"prompt": "Q"}, {"prompt": turns("Q")}, {"messages": [parts("Q", "user")]}):
        assert read_judged({**row, "chosen": said("Q", "A"), "rejected": spelled}, PAIRS) == expected


def test_a_rejected_answer_stands_in_the_place_of_the_chosen_one() -> None:
    tool = [{"role": "tool", "content": "T"}]
    call, other = said("C", roles="a"), said("D", roles="a")
    for before, rejected, answers in (
        (said("Q", "A", "P"), "B", BAD),
        (Q + call + tool, "B", BAD),
        (Q, "B", BAD),
        (Q, other + tool + BAD, other + tool + BAD),
    ):
        for chosen in (GOOD, call + GOOD, call + tool + GOOD):
            if before[-1] in tool and tool[0] in chosen:
                continue  # here the text before the answer ends elsewhere
            at = len(before) + 2 * (tool[0] in chosen and len(answers) == 1)
            pair, _ = read_judged({"messages": before + chosen, "rejected_response": rejected}, PAIRS)
            assert [one.messages for one in pair] == [before + chosen, (before + chosen)[:at] + answers]
            assert [sum(one.weights) for one in pair] == [len(before + chosen) - at, len(answers)]


@pytest.mark.parametrize("answer", ["A", GOOD, GOOD[0]])
def test_messages_that_end_with_an_answer_do_not_ask_for_it_again(answer: Any) -> None:
    for name, other in (("chosen", "rejected"), ("rejected", "chosen")):
        with pytest.raises(RowError, match="the row's messages already ends with the answer"):
            read_judged({"messages": said("Q", "A"), name: answer, other: "B"}, PAIRS)


def test_what_ms_swift_gives_the_rejected_alone_is_not_passed_over() -> None:
    row = {"messages": said("Q", "A"), "rejected_messages": said("Q", "B"), "tools": [{"name": "f"}]}
    assert read_judged({**row, "rejected_tools": [{"name": "f"}], "rejected_images": []}, PAIRS) == read_judged(
        row, PAIRS
    )
    for key, value in {"rejected_tools": [{"name": "g"}], "rejected_images": ["x.png"]}.items():
        with pytest.raises(RowError, match=f"{key} and {key[9:]} differ"):
            read_judged({**row, key: value}, PAIRS)


def test_an_answer_of_weight_0_makes_no_pair() -> None:
    for name in ("chosen", "rejected"):
        row: dict[str, Any] = {"prompt": "Q", "chosen": "A", "rejected": "B"}
        with pytest.raises(RowError, match=f"{name}: no assistant message is trained on"):
            read_judged({**row, name: [GOOD[0] | {"content": "C", "weight": 0}]}, PAIRS)
    row = {"prompt": Q, "chosen": [GOOD[0] | {"weight": 0.5}], "rejected": BAD}
    assert [one.weights for one in read_judged(row, PAIRS)[0]] == [[0, 0.5], [0, 1]]


@pytest.mark.parametrize("options", [PAIRS, VERDICTS], ids=["preference", "kto"])
def test_a_row_of_both_kinds_is_told_what_to_leave_out(options: RowOptions) -> None:
    with pytest.raises(RowError) as caught:
        read_judged({"prompt": "Q", "chosen": "A", "rejected": "B", "label": False}, options)
    assert str(caught.value) == (
        "the row has a preference pair (chosen, rejected) and also label (false), the label of a single answer: remove"
        " one of the two"
    )


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*said("A", "Q", roles="au"), {"role": "tool", "content": "T"}]},
        {"messages": said("A", "Q", roles="au") + said("S", roles="s")},
        {"messages": [*said("Q", "A", "P"), {"role": "assistant", "content": ""}]},
        {"messages": [*said("Q", "A", "P"), {"role": "assistant", "content": "B", "weight": 0}]},
        {"messages": [*said("Q", "A", "P"), {"role": "assistant", "content": "B", "train": False}]},
        {"prompt": Q, "completion": [{"role": "assistant", "content": "B", "loss_weight": 0}]},
        {"input_ids": [1, 2], "loss_mask": [0, 0]},
        {"input_ids": [1, 2], "loss_mask": [1, 0]},
    ],
    ids=["a tool", "a system", "empty", "weight 0", "not to train", "completion", "mask", "first token"],
)
def test_a_verdict_is_on_something_that_is_trained_on(row: dict[str, Any]) -> None:
    with pytest.raises(RowError, match="a label but no answer"):
        read_judged({**row, "label": True}, VERDICTS)


def test_two_verdicts_that_differ_are_none() -> None:
    row = {"prompt": "Q", "completion": "A"}
    with pytest.raises(RowError, match="label and kto_tag of the row differ; keep one"):
        read_judged({**row, "label": True, "kto_tag": False}, VERDICTS)
    assert read_judged({**row, "label": 1, "kto_tag": True}, VERDICTS) == read_judged({**row, "label": 1}, VERDICTS)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": said("Q", "A", "Q", "B"), "completion": None},
        {"messages": said("Q", "A", "Q", "B"), "completion": "not read"},
        {"instruction": "Q", "history": [["Q", "A"]], "completion": "B"},
        {"prompt": "Q", "history": [["Q", "A"]], "completion": None, "response": "B"},
    ],
    ids=["null", "beside messages", "an answer with a history", "null beside an answer"],
)
def test_a_verdict_trains_no_earlier_answer_whatever_stands_beside_the_row(row: dict[str, Any]) -> None:
    (source,), _ = read_judged({**row, "label": True}, VERDICTS)
    assert [message["content"] for message in source.messages] == ["Q", "A", "Q", "B"]
    assert source.weights == [0, 0, 0, 1]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_class_of_a_pair_is_no_verdict(number: int) -> None:
    sources, _ = read_judged({"prompt": "Q", "chosen": "A", "rejected": "B", "label": number}, PAIRS)
    assert [source.messages for source in sources] == [said("Q", "A"), said("Q", "B")]


@pytest.mark.parametrize("label", [True, False, 0, 1])
@pytest.mark.parametrize("column", ["label", "kto_tag"])
def test_a_verdict_is_on_the_last_answer(column: str, label: int) -> None:
    (source,), found = read_judged({"messages": said("Q", "A", "Q", "B"), column: label}, VERDICTS)
    assert source.weights == [0, 0, 0, 1]
    assert found == int(label)
    (source,), _ = read_judged({"prompt": Q, "completion": said("A", "Q", "B", roles="au"), column: label}, VERDICTS)
    assert source.weights == [0, 1, 1, 1]
    (source,), _ = read_judged({"prompt": "Q", "completion": "A", column: label}, VERDICTS)
    assert source.messages == said("Q", "A")
    (source,), found = read_judged({"input_ids": [1, 2], "loss_mask": [0, 1], column: label}, VERDICTS)
    assert np.array_equal(source.loss_mask, [0, 1])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": said("Q", "A")}, "not a KTO row: it has no label or kto_tag"),
        ({"messages": said("Q", "A"), "label": "good"}, "label is 'good', expected true or false"),
        ({"messages": said("Q", "A"), "label": 2}, "label is '2'"),
        ({"messages": said("Q", "A"), "label": 0.5}, "label is '0.5'"),
        ({"messages": said("Q", "A", "P"), "label": True}, "ends with a user message"),
        ({"chosen": "A", "rejected": "B", "prompt": "Q", "label": True}, "a preference pair"),
        ([1], "the row is a list, expected an object"),
    ],
)
def test_no_verdict(row: Any, words: str) -> None:
    with pytest.raises(RowError, match=words):
        read_judged(row, VERDICTS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from(["", "Q", "A", HH, "user", "assistant", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "text", "weight"]), inner, max_size=3)
    ),
    max_leaves=8,
)
TURNS = st.lists(st.sampled_from([*said("Q", "A", "B"), *turns("Q", "A"), {"role": "user"}, 3]), max_size=3)
COLUMNS = "chosen rejected rejected_response rejected_messages messages conversations prompt input history label system"


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(COLUMNS.split()), JSON | TURNS | st.just(SHAPES["Anthropic"]["chosen"])))
def test_any_row_is_judged_answers_or_refused(row: dict[str, Any]) -> None:
    for options in (PAIRS, VERDICTS):
        try:
            sources, label = read_judged(row, options)
        except RowError:
            continue
        assert len(sources) == (2 if options is PAIRS else 1)
        assert (label is None) == (options is PAIRS)
        for source in sources:
            assert isinstance(source, Conversation)
            assert any(source.weights)
