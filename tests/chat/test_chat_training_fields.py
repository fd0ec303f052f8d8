"""Fields that control training: each has the same effect as in its trainer, or the row is rejected."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from chats import command, preprocess
from productions import produced

from megatron_sft_idx import preprocess as preprocess_rows
from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.preferences import read_judged
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.training_fields import is_training_name
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.shard import Shard, read_header

HERE = Path(__file__).parents[1]
DOCS = HERE.parent / "docs/masks.md"
TOKENIZER = str(HERE.parent / "tools/demo/tokenizer")
USER = {"role": "user", "content": "Q"}
BOT = {"role": "assistant", "content": "A"}
CHAT = [USER, BOT]
NOWHERE = "refused"

# ---- the oracle: the meaning of a field in each trainer ----

WEIGHTS = ("weight", "loss_weight", "loss_scale")
ASSISTANTS_FLAGS = ("loss", "step_loss_mask")
ANY_ROLES_FLAGS = ("train", "training", "trainable", "loss_mask")
PARTIAL = ("train_detail", "training_detail", "reasoning_training_detail", "mask")
FIELDS = (*WEIGHTS, *ASSISTANTS_FLAGS, *ANY_ROLES_FLAGS, "masked", *PARTIAL)
VALUES: tuple[Any, ...] = (
    *(True, False, 0, 1, 0.0, 1.0, 0.5, 2, -1, 10**400, math.nan, math.inf, None),
    *("true", "false", "", "0", "1", "yes", [], [0, 1], [True], {}, {"train": False}),
)


def expected(field: str, value: Any, role: str) -> Any:
    """Return the weight of a message of this role according to the field, or ``NOWHERE`` if it must be rejected."""
    if value is None:
        return 1.0
    if field in PARTIAL or not isinstance(value, (int, float)):
        return NOWHERE
    if field in WEIGHTS:
        return float(value) if 0 <= value < 1e38 else NOWHERE
    if value not in (0, 1):
        return NOWHERE
    trained = (value == 0) if field == "masked" else (value == 1)
    if trained and role != "assistant" and field in (*ANY_ROLES_FLAGS, "masked"):
        return NOWHERE
    return 1.0 if trained else 0.0


def spellings(messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the same conversation in every form of row with messages."""
    speakers = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}
    turns = []
    for each in messages:
        rest = {key: value for key, value in each.items() if key not in ("role", "content")}
        turns.append({"from": speakers[each["role"]], "value": each["content"], **rest})
    forms = {
        "messages": {"messages": messages},
        "sharegpt": {"conversations": turns},
        "nemo": {"conversations": [turn | {"from": turn["from"].capitalize()} for turn in turns], "system": ""},
    }
    text = json.dumps(messages)
    if not re.search(r"NaN|Infinity|\d{99}", text):  # JSON does not have these values
        forms["text"] = {"messages": text}
    return forms


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_in_every_place_with_every_value(field: str) -> None:
    talk = [{"role": "system", "content": "S"}, USER, BOT, {"role": "tool", "content": "T"}, BOT, USER, BOT]
    for place, value in itertools.product(range(len(talk)), VALUES):
        messages = [dict(message) for message in talk]
        messages[place][field] = value
        wanted = expected(field, value, talk[place]["role"])
        for row in spellings(messages).values():
            before = repr(row)
            if wanted is NOWHERE:
                with pytest.raises(RowError, match=rf"\[{place}\]\W* ?(has )?{field}\b.*--ignore-field {field}\b"):
                    to_sequence_source(row)
            else:
                source = to_sequence_source(row)
                assert source.weights == [1.0] * place + [wanted] + [1.0] * (len(talk) - place - 1), (row, wanted)
                assert not any(field in message for message in source.messages)
            assert repr(row) == before
            ignored = to_sequence_source(row, RowOptions(ignore_fields=(field,)))
            assert ignored.weights == [1.0] * len(talk)
            assert ignored.notes == ({} if value is None else {f"ignored_field:{field}": 1})


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_in_pairs_and_judged_rows(field: str) -> None:
    for value in VALUES:
        wanted = expected(field, value, "assistant")
        said = BOT | {field: value}
        pair = {"prompt": [USER], "chosen": [said], "rejected": [BOT | {"content": "B"}]}
        judged = {"messages": [USER, said], "label": True}
        completed = {"prompt": [USER], "completion": [said], "label": False}
        for row, kind in ((pair, "preference"), (judged, "kto"), (completed, "kto")):
            options = RowOptions(kind=kind)
            if wanted is NOWHERE or not wanted:
                with pytest.raises(RowError, match=field if wanted is NOWHERE else "nothing|label but no"):
                    read_judged(row, options)
            else:
                (first, *_), _ = read_judged(row, options)
                assert first.weights[-1] == wanted
            (first, *_), _ = read_judged(row, RowOptions(kind=kind, ignore_fields=(field,)))
            assert first.weights[-1] == 1
            assert sum(first.notes.values()) == (value is not None)


def test_fields_that_contradict_each_other_are_refused() -> None:
    flags = (*ASSISTANTS_FLAGS, *ANY_ROLES_FLAGS, "masked")
    for one, other in itertools.combinations((*WEIGHTS, *flags), 2):
        for first, second in itertools.product((0, 1), (0, 1)):
            message = BOT | {one: first, other: second}
            agree = (first ^ (one == "masked")) == (second ^ (other == "masked"))
            scaled = {one, other} == {"loss", "loss_scale"}
            if agree or scaled:
                weight = min(first ^ (one == "masked"), second ^ (other == "masked"))
                assert to_sequence_source({"messages": [USER, message]}).weights == [1, weight]
            else:
                with pytest.raises(
                    RowError, match=rf"has ({one} and {other}|{other} and {one}), which contradict each other; keep"
                ):
                    to_sequence_source({"messages": [USER, message]})
    with pytest.raises(RowError, match="weight and train, which contradict each other"):
        to_sequence_source({"messages": [USER, BOT | {"train": False, "weight": 0.5}]})


# ---- unknown names ----

SOUND_LIKE_TRAINING = (
    *("turn_loss_mask", "is_trainable", "train_on_turn", "no_loss", "ignore_loss", "lossMask", "maskLoss", "loss-mask"),
    *("should_train", "do_not_train", "isTrained", "tokenWeight", "sample_weight", "assistant_mask", "response_mask"),
    *("unmask", "unmasked", "supervised", "LOSS", "Train", "trainFlag", "mask_prompt", "lossweight", "loss_multiplier"),
)
SOUND_LIKE_NOTHING = (
    *("constraint", "constraints", "restrained", "glossary", "lossless", "trainer_notes", "trains", "lightweighted"),
    *("classes", "colossal", "maskara", "masquerade", "label", "score", "channel", "end_turn", "n", "掩码", ""),
)


def test_names() -> None:
    assert [name for name in SOUND_LIKE_TRAINING if not is_training_name(name)] == []
    assert [name for name in SOUND_LIKE_NOTHING if is_training_name(name)] == []
    assert not is_training_name(3)
    assert not is_training_name("attention_mask")


@pytest.mark.parametrize("name", SOUND_LIKE_TRAINING)
def test_a_flag_under_a_name_that_speaks_of_training_is_refused(name: str) -> None:
    quoted = re.escape(name)
    for value in (True, False, 0, 1, 0.0, "false", "True", "0", [0, 1], [[0, 3]]):
        with pytest.raises(RowError, match=rf"messages\[1\] has {quoted}, .*--ignore-field {quoted}"):
            to_sequence_source({"messages": [USER, BOT | {name: value}]})
        with pytest.raises(RowError, match=rf"the row has {quoted} .*--ignore-field {quoted}"):
            to_sequence_source({"messages": CHAT, name: value})
        with pytest.raises(RowError, match=rf"the row has {quoted}"):
            read_judged({"prompt": "Q", "chosen": "A", "rejected": "B", name: value}, RowOptions(kind="preference"))
        with pytest.raises(RowError, match=rf"the row has {quoted}"):
            to_sequence_source({"input_ids": [1, 2], "loss_mask": [0, 1], name: value})
    for value in (None, "", "medium", "the words of it", [], {}):
        assert to_sequence_source({"messages": [USER, BOT | {name: value}]}).weights == [1, 1]
        assert to_sequence_source({"messages": CHAT, name: value}).weights == [1, 1]


METADATA: dict[str, Any] = {
    "used_in_training": "yes",
    "trained_on": "2024-05-01",
    "train_id": 1,
    "training_example_index": 0,
    "train_split": "train",
    "split": "train",
    "loss": 2.37,
    "mask": "none that is a speaker",
    "mask_file": "a.npy",
    "masks": ["a.png"],
    "training_data": [{"x": 1}],
    "weights": "model.bin",
    "train": "Amsterdam to Paris",
    "label": 1,
    "labels": ["math", "code"],
    "type": "chat",
    "channel": "general",
    "score": 0,
    "constraints": [1, 0],
    "attention_mask": [1, 1],
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_rows_is_no_flag(name: str) -> None:
    alpaca = {"instruction": "Q", "output": "A", name: METADATA[name]}
    assert to_sequence_source(alpaca).weights == [1, 1]
    if name != "mask":
        assert to_sequence_source({"messages": CHAT, name: METADATA[name]}).weights == [1, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("weight", 0.5), ("weight", 2), ("loss_weight", 0), ("sample_weight", 0.1), ("weight", "0.5"), ("loss", 0)],
        *[
            ("loss", 1.0),
            ("train", False),
            ("mask", 1),
            ("masked", True),
            ("loss_mask", [0, 1]),
            ("train", [True, False]),
        ],
        *[("assistant_masks", [0, 1]), ("completion_mask", [0, 1]), ("weights", [1, 0.5]), ("loss_scale", [0.0, 2.0])],
        *[("step_loss_mask", 0), ("mask", np.array([0, 1])), ("train", np.bool_(False)), ("loss_spans", [[0, 4]])],
    ],
)
def test_fields_of_rows_that_weigh_or_mask_are_refused(name: str, value: Any) -> None:
    for row in ({"messages": CHAT}, {"instruction": "Q", "output": "A"}, {"prompt": "Q", "completion": "A"}):
        with pytest.raises(RowError, match=rf"the row has {name} .*pass --ignore-field {name} to ignore it"):
            to_sequence_source(row | {name: value})
        source = to_sequence_source(row | {name: value}, RowOptions(ignore_fields=(name,)))
        assert source.weights == [1, 1]
        assert source.notes == {f"ignored_field:{name}": 1}


def test_a_verdict_on_a_message_is_refused() -> None:
    for name in ("label", "labels", "kto_tag"):
        with pytest.raises(RowError, match=rf"messages\[1\].{name} is false, a rating"):
            to_sequence_source({"messages": [USER, BOT | {name: False}]})
        assert to_sequence_source({"messages": [USER, BOT | {name: "quality:4"}]}).messages[1][name] == "quality:4"


# ---- parts of messages ----


def test_parts_with_flags() -> None:
    def row(role: str, *flags: dict[str, Any], key: str = "content") -> dict[str, Any]:
        parts = [{"type": "text", "text": f"w{i}", **flag} for i, flag in enumerate(flags)]
        other = [BOT] if role == "user" else [USER]
        return {"messages": [*other, {"role": role, "content": "C", key: parts}]}

    for flag in ({"train": True}, {"weight": 1}, {"masked": False}, {"train": None}, {"loss": 1}, {"train": 1.0}):
        assert to_sequence_source(row("assistant", flag, {})).weights == [1, 1]
    refused = [{"train": False}, {"weight": 0}, {"weight": 0.5}, {"masked": True}, {"loss_mask": 0}, {"no_loss": True}]
    for flag in [*refused, {"train": "false"}, {"train_detail": []}]:
        (name,) = flag
        for key in ("content", "reasoning_content"):
            with pytest.raises(RowError, match=rf"messages\[1\].{key}\[1\] has {name}, .*--ignore-field {name}"):
                to_sequence_source(row("assistant", {}, flag, key=key))
            ignored = to_sequence_source(row("assistant", {}, flag, key=key), RowOptions(ignore_fields=(name,)))
            assert ignored.messages[1][key] == "w0w1"
            assert ignored.notes == {f"ignored_field:{name}": 1}
        turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": [{"type": "text", "text": "A", **flag}]}]
        with pytest.raises(RowError, match=rf"conversations\[1\].value\[0\] has {name}"):
            to_sequence_source({"conversations": turns})
    with pytest.raises(RowError, match=r"messages\[1\].content\[0\] has train"):
        to_sequence_source(row("user", {"train": True}))
    assert to_sequence_source(row("user", {"train": False}, {"weight": 0})).weights == [1, 1]


# ---- words in fields that are not read ----


@pytest.mark.parametrize("content", ["", " \n", None, []])
def test_an_answer_whose_words_stand_elsewhere_is_refused(content: Any) -> None:
    elsewhere: list[dict[str, Any]] = [{"value": "A"}, {"text": "A"}, {"parts": ["A"]}, {"refusal": "No."}]
    elsewhere += [{"my_words": "the answer"}, {"message": {"content": "A"}}]
    for fields in elsewhere:
        (name,) = fields
        row = {"messages": [*CHAT, USER, {"role": "assistant", "content": content, **fields}]}
        with pytest.raises(RowError, match=rf"messages\[3\] has no text in content, but has text in {name}"):
            to_sequence_source(row)
        row["messages"][-1]["train"] = False
        if content is not None:
            assert to_sequence_source(row).weights == [1, 1, 1, 0]
    metadata = {
        "model": "gpt 4",
        "created_at": "1 May",
        "id": "a",
        "value": "",
        "text": None,
        "parts": [],
        "lang": "en",
    }
    if content is not None:
        assert (
            len(to_sequence_source({"messages": [*CHAT, USER, {**BOT, "content": content, **metadata}]}).messages) == 4
        )


def test_words_beside_calls_and_reasoning() -> None:
    result = {"role": "tool", "content": "", "command": "ls of the folder"}
    assert len(to_sequence_source({"messages": [*CHAT, result, BOT]}).messages) == 4
    with pytest.raises(RowError, match=r"messages\[0\] has no text in content, but has text in text"):
        to_sequence_source({"messages": [{"role": "user", "content": "", "text": "Q"}, BOT]})
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    assert len(to_sequence_source({"messages": [USER, call | {"note": "a long note"}]}).messages) == 2
    with pytest.raises(RowError, match=r"messages\[1\] has no text in content, but has text in text"):
        to_sequence_source({"messages": [USER, call | {"text": "Let me look."}]})
    turn = {"from": "gpt", "value": "", "content": "A"}
    with pytest.raises(RowError, match=r"value and content of conversations\[1\] differ"):
        to_sequence_source({"conversations": [{"from": "human", "value": "Q"}, turn]})


# ---- rows of NVIDIA's ----


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "rows" / name).read_text(encoding="utf-8").splitlines()]


def test_a_step_that_is_masked_is_not_trained() -> None:
    (row,) = rows_of("step_loss_mask.jsonl")
    assert to_sequence_source(row).weights == [1, 0, 1, 1]


def test_nvidias_rows() -> None:
    plain, chat, listed = map(to_sequence_source, rows_of("nvidia_row_forms.jsonl"))
    asked = {"role": "user", "content": "2+2?"}
    answered = {"role": "assistant", "content": "4"}
    assert (plain.messages, plain.weights) == ([asked, answered], [1, 1])
    assert [(each["role"], each["content"]) for each in chat.messages] == [
        ("system", "be nice"),
        ("user", "hi"),
        ("assistant", "ho"),
    ]
    assert chat.messages[2]["label"] == "quality:4"
    assert chat.weights == [1, 1, 1]
    system = {"role": "system", "content": "detailed thinking off"}
    assert (listed.messages, listed.weights) == ([system, asked, answered], [1, 0, 1])


@pytest.mark.parametrize("key", ["input", "prompt", "query", "question", "instruction", "context"])
def test_a_prompt_of_messages_with_an_answer(key: str) -> None:
    before = [USER, BOT, USER]
    for answer in ("A", BOT, [BOT], [BOT, USER, BOT], [{"from": "gpt", "value": "A"}]):
        row = {key: before, "output": answer}
        after = 3 if isinstance(answer, list) and len(answer) == 3 else 1
        source = to_sequence_source(row)
        assert source.messages == [*before, *[BOT, USER, BOT][:after]]
        assert source.weights == [0, 0, 0, *[1] * after]
    masked = to_sequence_source({key: before, "output": [BOT, BOT | {"train": False}]})
    assert masked.weights == [0, 0, 0, 1, 0]
    for answer in ("", [USER], None):
        with pytest.raises(RowError, match=r"the answer is empty|^output is empty$"):
            to_sequence_source({key: before, "output": answer})
    with pytest.raises(RowError, match=rf"{key} is a list, expected a string"):
        to_sequence_source({key: before, "history": [["Q", "A"]], "output": "A"})
    if key in ("input", "context"):
        assert to_sequence_source({key: json.dumps(before), "output": "A"}).messages == [*before, BOT]
        with pytest.raises(RowError, match=rf"{key} is a list, expected a string"):
            to_sequence_source({"instruction": "I", key: before, "output": "A"})


def test_a_prompt_of_one_message() -> None:
    assert to_sequence_source({"input": USER, "output": "A"}).weights == [0, 1]
    assert to_sequence_source({"input": {"from": "User", "value": "Q"}, "output": BOT}).messages == CHAT


def trained_turns(row: dict[str, Any]) -> list[bool] | None:
    """Return the turns that NeMo trains, by the rule of its chat dataset, or None if it fails."""
    mask = row.get("mask", "User")
    speakers = [turn["from"] for turn in row["conversations"]]
    if not all(name in speakers for name in mask.split(",")):
        return None
    return [i > 0 and speaker not in mask for i, speaker in enumerate(speakers)]


def test_masks_of_speakers_against_nemos_rule() -> None:
    draw, outcomes = Random(7), {"read": 0, "refused": 0}
    for _ in range(3000):
        names = draw.choice(
            [("User", "Assistant"), ("user", "assistant"), ("Human", "GPT"), ("User", "Assistant", "Tool")]
        )
        count = draw.randint(2, 6)
        speakers = [draw.choice(names) for _ in range(count)]
        if draw.random() < 0.6:
            speakers = [names[i % 2] for i in range(count)]
        masks = [
            names[0],
            names[1],
            ",".join(names),
            names[0] + ",Tool",
            "Bob",
            names[0] + "," + names[0],
            names[0] + "x",
        ]
        row: dict[str, Any] = {
            "system": draw.choice(["", "S"]),
            "mask": draw.choice(masks[:1] * 8 + masks),
            "conversations": [{"from": speaker, "value": f"w{i}"} for i, speaker in enumerate(speakers)],
        }
        if draw.random() < 0.3:
            row["type"] = draw.choice(["VALUE_TO_TEXT", "chat", None])
        trained, is_bots = trained_turns(row), [speaker == names[1] for speaker in speakers]
        try:
            source = to_sequence_source(row)
        except RowError:
            # Rejected if NeMo fails, trains another role's words or nothing, or if the first turn is an answer.
            outcomes["refused"] += 1
            assert (
                trained is None
                or is_bots[0]
                or not any(trained)
                or any(one and not other for one, other in zip(trained, is_bots, strict=True))
            ), row
            continue
        outcomes["read"] += 1
        weights = source.weights[bool(row["system"]) :]
        assert [bool(w) and bot for w, bot in zip(weights, is_bots, strict=True)] == trained, row
    assert min(outcomes.values()) > 500, outcomes


def test_what_nemos_masks_cannot_say_here() -> None:
    talk = [{"from": "User", "value": "Q"}, {"from": "Assistant", "value": "A"}]
    for columns, reason in (
        ({"mask": "Assistant"}, "what 'User' says|so nothing in this row is trained on"),
        ({"mask": "Nobody"}, "the conversation has no speaker 'Nobody'.*--ignore-field mask"),
        ({"mask": ""}, "the conversation has no speaker ''"),
        ({"mask": "User,Assistant"}, "nothing in this row is trained on"),
        ({"type": "TEXT_TO_VALUE"}, "type is TEXT_TO_VALUE: .*--ignore-field type"),
        ({"mask": "User", "type": "TEXT_TO_VALUE"}, "type is TEXT_TO_VALUE"),
        ({"mask": True}, "the row has mask"),
        ({"mask": [0, 1]}, "the row has mask"),
    ):
        with pytest.raises(RowError, match=reason):
            to_sequence_source({"conversations": talk, **columns})
        assert to_sequence_source({"conversations": talk, **columns}, RowOptions(ignore_fields=tuple(columns))).weights
    with pytest.raises(RowError, match="NeMo never trains on the first turn"):
        to_sequence_source({"conversations": talk[::-1] + talk[1:], "mask": "User"})
    first = to_sequence_source({"conversations": [talk[1] | {"train": False}, *talk], "mask": "User"})
    assert first.weights == [0, 1, 1]
    third = [*talk, {"from": "Tool", "value": "T"}, talk[1]]
    with pytest.raises(RowError, match="asks to train on 'Tool'"):
        to_sequence_source({"conversations": third, "mask": "User"})
    assert to_sequence_source({"conversations": third, "mask": "User,Tool"}).weights == [1, 1, 1, 1]
    assert to_sequence_source({"conversations": talk, "mask": None, "type": None}).weights == [1, 1]


# ---- tokenised rows ----


def test_a_token_is_trained_where_every_mask_says_so() -> None:
    draw = Random(3)
    ids = list(range(5, 13))
    for _ in range(500):
        names = draw.sample(["loss_mask", "assistant_masks", "completion_mask", "loss_scale", "loss_weights"], 2)
        masks = {name: [draw.choice([0, 1, 1]) for _ in ids] for name in names}
        wanted = np.prod(list(masks.values()), axis=0)
        row: dict[str, Any] = {"input_ids": ids, **masks}
        if draw.random() < 0.5:
            kept = [draw.random() < 0.6 for _ in ids]
            row["labels"] = [i if keep else -100 for i, keep in zip(ids, kept, strict=True)]
            wanted = wanted * kept
        assert to_sequence_source(row).loss_mask.tolist() == wanted.tolist()
    weighed = {"input_ids": ids, "labels": [-100] * 4 + ids[4:], "loss_scale": [9] * 4 + [1, 0.5, 0, 2]}
    assert to_sequence_source(weighed).loss_mask.tolist() == [0, 0, 0, 0, 1, 0.5, 0, 2]


def test_a_mask_of_tokens_under_another_name_is_told_its_name() -> None:
    for columns in ({"mask": [0, 1]}, {"response_mask": [0, 1], "labels": [-100, 2]}, {"token_weights": [0, 0.5]}):
        with pytest.raises(
            RowError, match="rename it to loss_mask if it is a mask of the tokens, or pass --ignore-field"
        ):
            to_sequence_source({"input_ids": [1, 2], **columns})


# ---- rows of any kind ----


NAMES = (*FIELDS, *SOUND_LIKE_TRAINING[:6], "role", "content", "from", "value", "text", "type", "label", "tool_calls")
COLUMNS = ("messages", "conversations", "prompt", "completion", "input", "output", "input_ids", "loss_mask", "labels")


def any_value(draw: Random, depth: int = 0) -> Any:
    leaves: list[Any] = [None, True, 0, 1, 0.5, "", "user", "assistant", "User", "A b", [0, 1], np.array([0, 1])]
    if depth > 3 or draw.random() < 0.5:
        return draw.choice([*leaves, np.float32(1), np.bool_(True), "TEXT_TO_VALUE", '[{"role": "user", "mask": 1}]'])
    if draw.random() < 0.5:
        return [any_value(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    names = [draw.choice(NAMES) for _ in range(draw.randint(0, 4))]
    return {**draw.choice([{}, USER, BOT]), **{name: any_value(draw, depth + 1) for name in names}}


@pytest.mark.parametrize("count", [4_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_rows_of_any_kind_are_read_or_refused_with_a_reason(count: int) -> None:
    draw = Random(11)
    for _ in range(count):
        names = [draw.choice((*COLUMNS, *NAMES)) for _ in range(draw.randint(1, 5))]
        row = {name: any_value(draw) for name in names}
        if draw.random() < 0.5:
            row["messages"] = [dict(each) | {draw.choice(NAMES): any_value(draw)} for each in CHAT]
        for ignored in ((), ("train", "mask"), NAMES[:8]):
            for kind in ("auto", "preference", "kto"):
                options = RowOptions(kind=kind, ignore_fields=ignored)
                try:
                    sources = [to_sequence_source(row, options)] if kind == "auto" else read_judged(row, options)[0]
                except RowError:
                    continue
                assert all(getattr(source, "weights", None) != [] for source in sources)


# ---- --train-on all ----


def test_a_message_that_is_not_to_be_trained_and_an_option_that_trains_everything() -> None:
    everything = RowOptions(train_on="all")
    row = {"messages": [USER | {"step_loss_mask": 0}, BOT | {"step_loss_mask": 0}]}
    with pytest.raises(RowError, match=r"messages\[0\] has the weight 0, but --train-on all"):
        to_sequence_source(row, everything)
    assert to_sequence_source({"messages": [USER, BOT | {"step_loss_mask": 0}]}, everything).weights == [1, 0]


# ---- the way out, on the command line and in Python ----

FLAGGED = [
    {"messages": [USER | {"audit_mask": 1}, BOT | {"audit_mask": 0}], "weight": 3},
    {"messages": json.dumps([USER, BOT | {"audit_mask": 0}]), "weight": None},
]


def test_ignored_fields_are_counted_and_recorded(tmp_path: Path) -> None:
    refused = preprocess(tmp_path / "a/x", rows=FLAGGED)
    assert refused.code == 1
    assert re.search(r"rows.jsonl:1: the row has weight .*--ignore-field weight", refused.err)
    ignoring = ("--ignore-field", "weight", "--ignore-field", "audit_mask")
    made = preprocess(tmp_path / "b/x", *ignoring, rows=FLAGGED)
    assert made.code == 0, made.err
    assert "note            3 fields 'audit_mask' not read because of --ignore-field" in made.out
    assert "note            1 field 'weight' not read because of --ignore-field" in made.out
    header = read_header(str(tmp_path / "b/x"))
    assert header.metadata["options"]["ignore_fields"] == ["audit_mask", "weight"]
    summary = preprocess_rows(
        FLAGGED, tokenizer=TOKENIZER, output_prefix=tmp_path / "c/x", seq_length=1024, workers=0,
        ignore_fields=["weight", "audit_mask"], source=False,
    )  # fmt: skip
    assert summary.corpus is not None
    assert summary.corpus.notes == {"ignored_field:audit_mask": 3, "ignored_field:weight": 1}
    plain = [{"messages": CHAT}] * 2
    assert preprocess(tmp_path / "d/x", rows=plain).code == 0
    for one, other in zip(Shard(str(tmp_path / "b/x")), Shard(str(tmp_path / "d/x")), strict=True):
        assert one["input_ids"].tolist() == other["input_ids"].tolist()
        assert one["loss_mask"].tolist() == other["loss_mask"].tolist()


def test_resuming_with_other_ignored_fields_is_refused(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "note": "n"}]
    assert preprocess(tmp_path / "x", "--ignore-field", "note", rows=rows).code == 0
    again = preprocess(tmp_path / "x", "--ignore-field", "note", rows=rows)
    assert (again.code, "found" in again.out) == (0, True), again.err
    other = preprocess(tmp_path / "x", rows=rows)
    assert other.code == 1
    assert re.search(r"ignore fields was \['note'\], is None", other.err), other.err


def test_a_producer_ignores_fields_too(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in FLAGGED * 99), encoding="utf-8")
    ignoring = ("--ignore-field", "weight", "--ignore-field", "audit_mask")
    assert produced(tmp_path / "live", "--input", tmp_path / "rows.jsonl").code == 1
    made = produced(tmp_path / "live2", "--input", tmp_path / "rows.jsonl", *ignoring)
    assert made.code == 0, made.err


def test_help_names_the_way_out() -> None:
    for verb in ("preprocess", "produce"):
        assert "--ignore-field NAME" in command(verb, "--help").out


def test_the_table_in_the_docs_has_every_field() -> None:
    text = DOCS.read_text(encoding="utf-8")
    named = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([\w]+)`", row)}
    assert {*FIELDS, "mask", "type", "label", "kto_tag", "loss_scale", "loss_weights", "assistant_masks"} <= named


def test_labels_of_numpy_are_verdicts_too() -> None:
    with pytest.raises(RowError, match="label is false: this is a KTO row"):
        to_sequence_source({"messages": CHAT, "label": np.bool_(False)})
    with pytest.raises(RowError, match="label is 0: this is a KTO row"):
        to_sequence_source({"prompt": "Q", "completion": "A", "label": np.int64(0)})
