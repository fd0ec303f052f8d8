"""System messages after answers, as in Megatron's ``--sft`` lines: one decision applies to the whole input."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from chats import TOKENIZER, command, files_of, preprocess, sequences_of, write_rows
from productions import piped, produced, tokens_of

from megatron_sft_idx import preprocess as preprocess_rows
from megatron_sft_idx.chat.packed_rows import UndecidedError
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.shard import Shard, read_header
from megatron_sft_idx.tokenize.encoding import read_row

CONVERSATION, TURN = ("--system-starts", "conversation"), ("--system-starts", "turn")


def said(roles: str, name: str = "") -> list[dict[str, str]]:
    names = {"s": "system", "u": "user", "a": "assistant", "d": "developer", "t": "tool"}
    return [{"role": names[role], "content": f"{name} {role}{at} said"} for at, role in enumerate(roles)]


# Lines as in Megatron's documentation: one with three conversations, and one with one.
LINES = [
    {"messages": said("sua", "alpha") + said("suaua", "beta") + said("sua", "gamma")},
    {"messages": said("sua", "delta")},
]


def split_as_megatron_does(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split messages by Megatron's rule: each system message begins a conversation."""
    found: list[list[dict[str, Any]]] = []
    for message in messages:
        if message["role"] == "system" or not found:
            found.append([])
        found[-1].append(message)
    return found


def some_messages(draws: random.Random) -> list[dict[str, Any]]:
    roles = "".join(draws.choices("suad", weights=(2, 3, 3, 1), k=draws.randint(1, 9))) + "a"
    return said(roles, str(draws.random()))


def needs_decision(messages: list[dict[str, Any]]) -> bool:
    roles = [message["role"] for message in messages]
    return any(role == "system" and "assistant" in roles[:at] for at, role in enumerate(roles))


def conversations(row: dict[str, Any], starts: str) -> list[list[dict[str, Any]]]:
    sources, label = read_row(row, RowOptions(system_starts=starts))
    assert label is None
    return [source.messages for source in sources]


def test_a_row_is_split_as_megatron_splits_it() -> None:
    draws = random.Random(0)
    undecided = 0
    for _ in range(500):
        messages = some_messages(draws)
        row = {"messages": copy.deepcopy(messages)}
        assert conversations(row, "conversation") == split_as_megatron_does(messages)
        assert conversations(row, "turn") == [messages]
        if needs_decision(messages):
            undecided += 1
            with pytest.raises(UndecidedError):
                conversations(row, "error")
        else:
            assert conversations(row, "error") == [messages]
        assert row == {"messages": messages}
    assert 100 < undecided < 450


def test_a_row_is_split_as_megatrons_own_function_splits_it() -> None:
    datasets = pytest.importorskip("megatron.training.datasets.sft_dataset")
    draws = random.Random(1)
    for _ in range(200):
        messages = some_messages(draws)
        expected = datasets.SFTDataset._split_conversations(None, copy.deepcopy(messages))
        assert conversations({"messages": messages}, "conversation") == expected


def test_what_stands_next_to_messages_holds_for_each_conversation() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [message | {"weight": at} for at, message in enumerate(said("uasua"))]
    row = {"messages": messages, "tools": tools, "system": "S", "chat_template_kwargs": {"a": 1}}
    first, second = read_row(row, RowOptions(system_starts="conversation"))[0]
    assert [message["content"] for message in first.messages] == ["S", " u0 said", " a1 said"]
    assert (first.weights, second.weights) == ([1, 0, 1], [2, 3, 4])
    assert first.tools == second.tools == tools
    assert first.kwargs == second.kwargs == {"a": 1}


@pytest.mark.parametrize(
    "row",
    [
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "gpt", "value": "A"},
                {"from": "system", "value": "S"},
            ]
        },
        {"prompt": said("sua") + said("su"), "completion": said("a")},
        {"prompt": said("sua"), "completion": said("sua")},
        {"messages": json.dumps(said("sua") + said("sua"))},
        {"messages": said("uas")},
    ],
)
def test_rows_of_every_kind_need_the_decision(row: dict[str, Any]) -> None:
    with pytest.raises(UndecidedError):
        read_row(row, RowOptions())
    assert len(read_row(row, RowOptions(system_starts="turn"))[0]) == 1
    assert len(read_row(row, RowOptions(system_starts="conversation"))[0]) == 2


@pytest.mark.parametrize("roles", ["sua", "ssua", "ususa", "uadua", "uaua", "suadua"])
def test_rows_without_a_system_message_after_an_answer_need_none(roles: str) -> None:
    assert len(read_row({"messages": said(roles)}, RowOptions())[0]) == 1


def test_pairs_and_verdicts_are_of_one_conversation() -> None:
    prompt = said("sua") + said("su")
    pair = {"prompt": prompt, "chosen": said("a", "good"), "rejected": said("a", "bad")}
    verdict = {"messages": said("sua") + said("sua"), "label": True}
    for row, kind in ((pair, "preference"), (verdict, "kto")):
        with pytest.raises(UndecidedError):
            read_row(row, RowOptions(kind=kind))
        with pytest.raises(
            RowError, match=r"with --system-starts conversation, the row has 2 conversations, but .* turn$"
        ):
            read_row(row, RowOptions(kind=kind, system_starts="conversation"))
        read_row(row, RowOptions(kind=kind, system_starts="turn"))


# ---- the run ----


def texts_of(prefix: Path) -> list[str]:
    from megatron_sft_idx.chat.tokenizer import load_tokenizer

    decode = load_tokenizer(str(TOKENIZER)).decode
    return sorted(decode(ids) for ids, _ in sequences_of(prefix))


def test_each_conversation_is_a_sequence(tmp_path: Path) -> None:
    apart = [{"messages": messages} for row in LINES for messages in split_as_megatron_does(row["messages"])]
    assert preprocess(tmp_path / "apart", rows=apart).code == 0
    done = preprocess(tmp_path / "x", *CONVERSATION, rows=LINES)
    assert done.code == 0, done.err
    assert texts_of(tmp_path / "x") == texts_of(tmp_path / "apart")
    assert len(texts_of(tmp_path / "x")) == 4
    assert "rows            2\n" in done.out
    assert "1 row with several conversations, each beginning with a system message" in done.out
    shard = Shard(tmp_path / "x", columns=("source",))
    assert sorted(row for pack in shard for _, row in pack["source"].tolist()) == [0, 0, 0, 1]
    assert read_header(tmp_path / "x").metadata["options"]["system_starts"] == "conversation"
    done = preprocess(tmp_path / "y", *TURN, rows=LINES)
    assert done.code == 0, done.err
    assert len(texts_of(tmp_path / "y")) == 2
    done = preprocess(
        tmp_path / "z", *CONVERSATION, "--dedup", "exact", "--valid-fraction", 0.5, rows=[*LINES * 2, *FEW]
    )
    assert "2 left out by --dedup" in done.out, done.err
    valid = [{name for name in ("alpha", "beta", "gamma") if name in text} for text in texts_of(tmp_path / "z.valid")]
    assert sorted(map(len, valid))[-3:] in ([0, 0, 0], [1, 1, 1])
    assert "system_starts" not in read_header(tmp_path / "apart").metadata["options"]


def test_a_conversation_without_an_answer_trains_nothing_and_one_that_fails_spoils_its_row(tmp_path: Path) -> None:
    rows = [{"messages": said("sua") + said("su")}]
    done = preprocess(tmp_path / "x", *CONVERSATION, rows=rows)
    assert done.code == 0, done.err
    assert sorted(bool(mask.any()) for _, mask in sequences_of(tmp_path / "x")) == [False, True]
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% if messages[-1]['role'] != 'assistant' %}{{ raise_exception('no answer') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )
    done = preprocess(tmp_path / "y", *CONVERSATION, "--chat-template", template, rows=[*rows, *LINES])
    assert done.code == 1
    assert "rows.jsonl:1: " in done.err
    assert "no answer" in done.err


FEW = [{"messages": said("sua", str(number))} for number in range(40)]


BAD: list[dict[str, Any]] = [{"messages": []}, {"nothing": 1}]


@pytest.mark.parametrize("more", [(), ("--workers", 2)])
def test_a_run_without_the_decision_stops_before_it_begins(tmp_path: Path, more: tuple[Any, ...]) -> None:
    rows = [*FEW, *BAD, *LINES, *FEW, LINES[0]]
    done = preprocess(tmp_path / "x", *more, rows=rows)
    assert done.code == 1
    assert done.err == (
        f"megatron-sft-idx: error: {tmp_path}/rows.jsonl:43: a system message comes after an assistant message in this"
        f" row (the first of 2 such rows among the first 85); choose for the whole input: --system-starts"
        f" conversation starts a new conversation, stored as a separate sequence, at each system message (like"
        f" Megatron's --sft); --system-starts turn keeps one conversation with several system messages; to skip such"
        f" rows, pass --on-bad-row skip\n"
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.jsonl"]


def test_single_rows_of_the_kind_are_bad_rows(tmp_path: Path) -> None:
    rows = [*FEW, *BAD, *LINES, *FEW, LINES[0], {"messages": said("asua")}]
    made = preprocess(tmp_path / "x", "--on-bad-row", "skip", rows=rows)
    assert made.code == 0, made.err
    skipped = [line.split(": ")[0] for line in made.err.splitlines() if line.startswith("skipped ")]
    assert skipped == [f"skipped {tmp_path}/rows.jsonl:{line}" for line in (41, 42, 43, 85, 86)]
    assert len(sequences_of(tmp_path / "x")) == 81
    for more in ((), ("--full",)):
        dry = preprocess(tmp_path / "y", "--dry-run", *more, rows=rows)
        assert (dry.code, dry.out.count("bad row  "), "would stop      5 rows" in dry.out) == (1, 5, True)
    assert preprocess(tmp_path / "y", "--on-bad-row", "skip", *CONVERSATION, rows=rows).code == 0


@pytest.mark.parametrize("more", [(), ("--on-bad-row", "skip"), ("--on-bad-row", "skip", "--dry-run")])
def test_an_input_of_such_rows_is_not_skipped(tmp_path: Path, more: tuple[Any, ...]) -> None:
    done = preprocess(tmp_path / "x", *more, rows=[*FEW, *BAD, *LINES[:1] * 41])
    assert done.code == 1
    assert (
        "rows.jsonl:43: a system message comes after an assistant message in this row (the first of 41 such" in done.err
    )
    assert ("--on-bad-row" in done.err) == (not more)


def many_rows(count: int) -> list[dict[str, Any]]:
    return [{"messages": said("sua", f"{number} {'words ' * 40}")} for number in range(count)]


@pytest.fixture(scope="module")
def late(tmp_path_factory: Any) -> Path:
    """Write several pieces of rows. One row long after the first 1,000 is undecided, and others are bad."""
    rows = many_rows(9000)
    for at in (100, 6000, 8500):
        rows[at] = {"messages": []}
    rows[7000] = rows[7001] = rows[8999] = LINES[0]
    return write_rows(tmp_path_factory.mktemp("late") / "rows.jsonl", rows)


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [0, 2, 4])
def test_a_row_behind_the_first_thousand_is_skipped_whoever_meets_it(tmp_path: Path, late: Path, workers: int) -> None:
    done = preprocess(tmp_path / "x", "--on-bad-row", "skip", "--workers", workers, "--input", late)
    assert done.code == 0, done.err
    skipped = [line.split(": ")[0].removeprefix(f"skipped {late}:") for line in done.err.splitlines()]
    assert [line for line in skipped if line.isdigit()] == ["101", "6001", "7001", "7002", "8501", "9000"]
    # Without that option, the first bad row stops the run.
    done = preprocess(tmp_path / "y", "--workers", workers, "--input", late)
    assert f"error: {late}:101: " in done.err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("y")]


def test_a_row_behind_those_that_are_taken_stops_nothing(tmp_path: Path, late: Path) -> None:
    done = preprocess(tmp_path / "x", "--on-bad-row", "skip", "--max-rows", 6990, "--input", late)
    assert done.code == 0, done.err
    assert "6,990 used" in done.out
    assert ":7001: " not in done.err
    done = preprocess(tmp_path / "y", "--on-bad-row", "skip", "--max-rows", 6999, "--input", late)
    assert done.code == 0, done.err
    assert f"skipped {late}:7001: a system message" in done.err
    few = [*FEW, LINES[0]]
    assert preprocess(tmp_path / "z", "--max-rows", 40, rows=few).code == 0
    assert preprocess(tmp_path / "z", "--max-rows", 41, "--overwrite", rows=few).code == 1


def test_the_decision_is_one_of_the_options_of_a_run(tmp_path: Path) -> None:
    rows = LINES * 20
    assert preprocess(tmp_path / "x", *CONVERSATION, rows=rows).code == 0
    done = preprocess(tmp_path / "x", *TURN, rows=rows)
    assert done.code == 1
    assert "system starts was 'conversation', is 'turn'" in done.err
    assert preprocess(tmp_path / "x", *CONVERSATION, rows=rows).code == 0
    assert preprocess(tmp_path / "x", "--system-starts", "guess", rows=rows).code == 2


def test_the_same_from_python(tmp_path: Path) -> None:
    given: dict[str, Any] = {"tokenizer": TOKENIZER, "seq_length": 1024, "workers": 0, "earlier_reasoning": "drop"}
    with pytest.raises(SequenceError, match=r"^rows:1: a system message comes after an assistant message in this row"):
        preprocess_rows(LINES, output_prefix=tmp_path / "x", **given)
    preprocess_rows(LINES, output_prefix=tmp_path / "x", system_starts="conversation", **given)
    assert preprocess(tmp_path / "y", *CONVERSATION, rows=LINES).code == 0
    assert files_of(tmp_path / "x")[".bin"] == files_of(tmp_path / "y")[".bin"]
    with pytest.raises(FormatError, match="system_starts"):
        preprocess_rows(LINES, output_prefix=tmp_path / "z", system_starts="guess", **given)


def test_the_same_by_produce(tmp_path: Path, late: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", LINES)
    done = produced(tmp_path / "live", "--input", source)
    assert done.code == 1
    assert (
        "rows.jsonl:1: a system message comes after an assistant message in this row (the first of 1 such row"
        in done.err
    )
    done = produced(tmp_path / "live", "--input", source, *CONVERSATION)
    assert done.code == 0, done.err
    assert tokens_of(tmp_path / "live").total() == 4
    # Rows from a pipe or a watched folder cannot be read before the run.
    done = piped(source, tmp_path / "pipe")
    assert done.code == 1
    assert "standard input:1: a system message comes after an assistant message in this row" in done.err
    assert piped(source, tmp_path / "pipe", *TURN).code == 0
    assert tokens_of(tmp_path / "pipe").total() == 2
    done = produced(tmp_path / "late", "--input", late, "--on-bad-row", "skip", "--tokens-per-shard", 50_000)
    assert done.code == 0
    assert f"{late}:7001: a system message comes after an assistant message in this row" in done.err


def test_it_is_taught(capsys: Any) -> None:
    for verb in ("preprocess", "produce"):
        shown = command(verb, "--help").out
        assert "--system-starts {error,conversation,turn}" in shown


def test_a_conversation_may_become_a_sequence_for_each_turn(tmp_path: Path) -> None:
    thinks = {"role": "assistant", "content": "A", "reasoning_content": "R"}
    rows = [{"messages": [*said("su"), thinks, *said("u"), thinks, *said("su"), thinks]}, *FEW]
    done = preprocess(tmp_path / "x", *CONVERSATION, "--earlier-reasoning", "split", "--dedup", "exact", rows=rows)
    assert done.code == 0, done.err
    assert len(texts_of(tmp_path / "x")) == 3 + len(FEW)
    shard = Shard(tmp_path / "x", columns=("source",))
    assert [row for pack in shard for _, row in pack["source"].tolist()].count(0) == 3


def test_files_that_appear_are_looked_at_as_they_come(tmp_path: Path) -> None:
    (tmp_path / "watched").mkdir()
    write_rows(tmp_path / "watched/1.jsonl", FEW)
    write_rows(tmp_path / "watched/2.jsonl", [*FEW, LINES[0]])
    (tmp_path / "watched/_END").touch()
    done = produced(tmp_path / "live", "--watch", tmp_path / "watched", "--on-bad-row", "skip")
    assert done.code == 0
    assert "2.jsonl:41: a system message comes after an assistant message in this row" in done.err
