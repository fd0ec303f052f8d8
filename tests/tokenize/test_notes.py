"""The notes of a run: what was counted, in the singular and the plural, and the first row of each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from chats import preprocess, write_rows

from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.tokenize.report import CorpusReport

GOOD = {"prompt": "Hi", "completion": "Hello"}
# Kept as text, because the data may not write control tokens.
SPELLED = {"prompt": "Hi", "completion": "I write <|im_end|> here"}


def notes_of(text: str) -> list[str]:
    return [line.removeprefix("note            ") for line in text.splitlines() if line.startswith("note ")]


def test_a_note_names_its_first_row(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "first.jsonl", [GOOD, GOOD])
    second = write_rows(tmp_path / "second.jsonl", [GOOD, SPELLED, GOOD])
    given = ("--input", first, second)
    made = preprocess(tmp_path / "x", *given, "--summary", tmp_path / "x.json")
    assert made.code == 0, made
    assert notes_of(made.out) == [f"1 control token in the data kept as text; first in {second}:2"]
    corpus = json.loads((tmp_path / "x.json").read_text())["corpus"]
    assert (corpus["notes"], corpus["first_rows"]) == ({"literals": 1}, {"literals": f"{second}:2"})

    write_rows(second, [GOOD, SPELLED, GOOD, SPELLED])
    again = preprocess(tmp_path / "y", *given)
    assert notes_of(again.out) == [f"2 control tokens in the data kept as text; first in {second}:2"]


def test_parts_of_an_earlier_run_know_the_first_row(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [GOOD, SPELLED, {"prompt": "Hi", "completion": "Hello " * 100}])
    assert preprocess(tmp_path / "x", "--input", source, capacity=64).code == 1
    again = preprocess(tmp_path / "x", "--input", source, "--overlong", "drop", capacity=64)
    assert "corpus reused" in again.out
    assert notes_of(again.out) == [f"1 control token in the data kept as text; first in {source}:2"]


# Writes nothing after an answer that would end it.
ENDLESS = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def test_a_dry_run_prints_the_notes_of_the_run(tmp_path: Path) -> None:
    template = tmp_path / "endless.jinja"
    template.write_text(ENDLESS)
    source = write_rows(tmp_path / "rows.jsonl", [GOOD, SPELLED])
    given = ("--input", source, "--chat-template", template)
    made = preprocess(tmp_path / "x", *given)
    assert made.code == 0, made
    assert any(note.startswith("2 answers without an end-of-turn token") for note in notes_of(made.out)), made
    for more in ((), ("--full",)):
        assert notes_of(preprocess(tmp_path / "y", *given, "--dry-run", *more).out) == notes_of(made.out)


def test_messages_that_the_template_leaves_out_are_noted(tmp_path: Path) -> None:
    told = {"messages": [{"role": "developer", "content": "Rules"}, {"role": "user", "content": "Hi"}]}
    told["messages"].append({"role": "assistant", "content": "Hello"})
    source = write_rows(tmp_path / "rows.jsonl", [GOOD, told, told])
    made = preprocess(tmp_path / "x", "--input", source, "--summary", tmp_path / "x.json")
    assert made.code == 0, made
    assert notes_of(made.out) == [
        "2 developer messages left out by the chat template, so the model never sees the text (--chat-template FILE"
        f" sets another one); first in {source}:2"
    ]
    corpus = json.loads((tmp_path / "x.json").read_text())["corpus"]
    assert corpus["notes"] == {"left_out_message:developer": 2}
    assert corpus["first_rows"] == {"left_out_message:developer": f"{source}:2"}
    for more in ((), ("--full",)):
        assert notes_of(preprocess(tmp_path / "y", "--input", source, "--dry-run", *more).out) == notes_of(made.out)
    assert notes_of(preprocess(tmp_path / "z", "--input", source, "--roles", "developer=system").out) == []


def test_the_order_of_roles_is_noted(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    rows = [turns[:3], turns, turns[:1] + turns[2:], turns[2:3]]
    made = preprocess(tmp_path / "x", rows=[{"messages": row} for row in rows])
    assert made.code == 0, made
    source = tmp_path / "rows.jsonl"
    assert notes_of(made.out) == [
        f"2 rows beginning with an assistant message, before any user message; first in {source}:3",
        f"2 rows ending with a user message, which no answer follows; first in {source}:2",
    ]


@pytest.mark.parametrize(("count", "unit"), [(1, "token"), (2, "tokens")])
def test_the_note_about_tokens_across_the_beginning_of_an_answer(count: int, unit: str) -> None:
    said = [f"note            {count} trained {unit} also containing the end of the text before an answer"]
    assert [line.split(" (")[0] for line in CorpusReport(notes={"straddling": count}).note_lines()] == said


def test_progress_after_a_resume_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("tokenising", 100, unit="B", log_interval=1, items="rows") as progress:
        progress.count_earlier(26, 3)
        progress.update(74, 7)
    earlier, later = capsys.readouterr().err.splitlines()
    assert earlier == "tokenising: 3 rows, 26.0%, from an earlier run"
    assert re.fullmatch(r"tokenising: 10 rows, 100.0%, [\d,]+ rows/s, \S+/s, 00:00 left", later)
