"""The notes of a run: what was counted, in the singular and the plural, and the first row of each."""

from __future__ import annotations

import json
from pathlib import Path

from chats import preprocess, write_rows

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
