"""Rows that are nested too deeply are ordinary bad rows, for every kind of input and every field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import TOKENIZER, command, files_of, write_rows
from productions import produced

from megatron_sft_idx import preprocess
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import InputRow, Piece
from megatron_sft_idx.chat.values import MAX_DEPTH, parse_json, refuse_deep
from megatron_sft_idx.errors import SequenceError
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder

ASKED, SAID = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}
GOOD = {"messages": [ASKED, SAID]}
DEPTHS = (600, 5000, 100_000)
# An ordinary template writes tools and arguments; this one writes everything, also with indentation.
WRITES_ALL = (
    "{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}{% if x %}{{ x | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.extra %}{{ m.extra | tojson(indent=1) }}{% endif %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson(indent=1) }}{{ c.function.arguments }}{% endfor %}\n{% endfor %}"
)


def deep(levels: int, kind: str = "object") -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if kind == "object" else [value]
    return value


def calling(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
    return {"messages": [ASKED, {**SAID, "tool_calls": [call]}]}


def tools(parameters: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "look_up", "description": "x", "parameters": parameters}}]


def rows_with(value: Any) -> dict[str, Any]:
    """Return rows that contain a value, by its place."""
    return {
        "tools": {**GOOD, "tools": tools(value)},
        "functions": {**GOOD, "functions": value},
        "arguments": calling(value),
        "content": {"messages": [{**ASKED, "content": value}, SAID]},
        "part": {"messages": [{**ASKED, "content": [{"type": "text", "text": "a", "x": value}]}, SAID]},
        "text of a part": {"messages": [{**ASKED, "content": [{"type": "text", "text": value}]}, SAID]},
        "metadata": {**GOOD, "metadata": value},
        "message": {"messages": [{**ASKED, "extra": value}, SAID]},
        "weight": {"messages": [ASKED, {**SAID, "weight": value}]},
        "role": {"messages": [ASKED, {**SAID, "role": value}]},
        "chat_template_kwargs": {**GOOD, "chat_template_kwargs": {"x": value}},
        "messages": {"messages": value},
        "turn": {"conversations": [value, value]},
        "system": {**GOOD, "system": value},
        "images": {**GOOD, "images": value},
        "label": {"prompt": "a", "completion": "b", "label": value},
        "prompt": {"prompt": value, "completion": "b"},
        "completion": {"prompt": "a", "completion": value, "label": True},
        "history": {"prompt": "a", "response": "b", "history": value},
        "chosen": {"prompt": "a", "chosen": value, "rejected": "c"},
        "rejected": {"prompt": "a", "chosen": "b", "rejected": value},
        "ids": {"input_ids": value, "labels": [1, 2]},
        "labels": {"input_ids": [1, 2], "labels": value},
        "loss_mask": {"input_ids": [1, 2], "loss_mask": value, "prompt": "a", "chosen": "b", "rejected": "c"},
        "seq_lengths": {"input_ids": [1, 2], "labels": [1, 2], "seq_lengths": value},
        "row": value,
    }


FINE = {
    "auto": GOOD,
    "messages": GOOD,
    "preference": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "kto": {"prompt": "a", "completion": "b", "label": True},
}


class Rows(Piece):
    """A piece of rows that are Python objects."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__("here", 1, 1, b"")
        self.__dict__["given"] = rows

    def rows(self) -> Iterator[InputRow]:
        yield from (InputRow(number, row) for number, row in enumerate(self.__dict__["given"], 1))

    def fingerprint(self) -> str:
        return ""


def encoder(tmp_path: Path, **rows: Any) -> RowEncoder:
    options = {"chat_template": WRITES_ALL, "template_name": "all", "on_bad_row": "skip"}
    return RowEncoder(EncodingOptions(tokenizer=str(TOKENIZER), rows=RowOptions(**rows), **options))


def test_what_is_just_deep_enough_is_read_and_written(tmp_path: Path) -> None:
    """At the limit, including JSON text in a row, every filter and every step still works."""
    text = json.dumps(deep(MAX_DEPTH))
    rows = [
        {**calling(text), "chat_template_kwargs": {"x": deep(MAX_DEPTH - 2)}, "tools": tools(deep(MAX_DEPTH - 5))},
        {**calling(deep(MAX_DEPTH - 6)), "metadata": deep(MAX_DEPTH - 1)},
        {"messages": [{**ASKED, "extra": deep(MAX_DEPTH - 3)}, SAID]},
    ]
    for row in rows:
        refuse_deep(row)
    for on in ("auto", "messages"):
        done = encoder(tmp_path, kind=on).encode(Rows(rows))
        assert done.bad_rows == []
        assert len(done.lengths) == len(rows)


def test_text_is_as_deep_as_a_row() -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        for levels in (1, MAX_DEPTH):
            parse_json((opening * levels + "1" + closing * levels).encode())
        for levels in (MAX_DEPTH + 1, 600, 1024, 1025, *DEPTHS):
            for whole in (closing * levels, closing * levels + "x"):
                with pytest.raises(ValueError, match=r"nested more than 128 levels deep|not valid JSON"):
                    parse_json((opening * levels + "12345678901234567890" + whole).encode())


def test_python_values_that_hold_themselves_are_deep() -> None:
    itself: dict[str, Any] = {}
    itself["a"] = [itself, itself]
    with pytest.raises(ValueError, match="nested more than"):
        refuse_deep(itself)
    shared: list[Any] = []
    for _ in range(MAX_DEPTH - 1):
        shared = [shared] * 9
    refuse_deep(shared)


# ---- runs ----


def text_of(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


def lines_with(levels: int) -> list[str]:
    """Return JSON lines: a good row, bad rows, a good row."""
    rows = [json.dumps(row).replace('"@@"', text_of(levels)) for row in rows_with("@@").values()]
    as_text = [json.dumps(row) for row in (calling(text_of(levels)), {"messages": "[" * levels + "]" * levels})]
    return [json.dumps(GOOD), *rows, *as_text, json.dumps(GOOD)]


def run(prefix: Path, source: Path, *options: object) -> Any:
    given = ("--tokenizer-model", TOKENIZER, "--seq-length", 512, "--output-prefix", prefix)
    given += () if "--workers" in options else ("--workers", 0)
    return command("preprocess", "--input", source, *given, *options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("levels", DEPTHS)
@pytest.mark.parametrize("form", ["lines", "array"])
def test_deep_rows_of_json_are_bad_rows(form: str, levels: int, tmp_path: Path) -> None:
    lines = lines_with(levels)
    source = tmp_path / "rows.json"
    source.write_text("\n".join(lines) if form == "lines" else "[" + ",\n".join(lines) + "]", encoding="utf-8")
    skipped = run(tmp_path / "x", source, "--on-bad-row", "skip")
    assert skipped.code == 0, skipped.err
    assert f"skipped       {len(lines) - 2}" in skipped.out
    refused = run(tmp_path / "y", source)
    assert refused.code == 1
    what = "tools is " if levels < 1024 else ""  # orjson rejects deeper values completely
    assert f"error: {source}:2: {what}nested more than 128 levels deep; flatten it" in refused.err
    assert refused.err.count("\n") == 1
    assert not [*tmp_path.glob("y*")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_survives_deep_rows(workers: int, tmp_path: Path) -> None:
    (source := tmp_path / "rows.jsonl").write_text("\n".join(lines_with(600)), encoding="utf-8")
    assert run(tmp_path / "alone", source, "--on-bad-row", "skip").code == 0
    skipped = run(tmp_path / "x", source, "--on-bad-row", "skip", "--workers", workers)
    assert skipped.code == 0, skipped.err
    assert files_of(tmp_path / "x") == files_of(tmp_path / "alone")
    refused = run(tmp_path / "y", source, "--workers", workers)
    assert refused.code == 1
    assert f"error: {source}:2: " in refused.err
    assert refused.err.count("\n") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("levels", DEPTHS)
def test_deep_rows_of_python_are_bad_rows(levels: int, tmp_path: Path) -> None:
    rows = [GOOD, *rows_with(deep(levels)).values(), GOOD]
    rows = [row for row in rows if "role" not in row]
    header = preprocess(
        rows, tokenizer=str(TOKENIZER), seq_length=512, output_prefix=str(tmp_path / "x"), on_bad_row="skip"
    )
    assert header
    with pytest.raises(SequenceError, match="rows:2: nested more than 128 levels deep"):
        preprocess(rows, tokenizer=str(TOKENIZER), seq_length=512, output_prefix=str(tmp_path / "y"))


def nest(array: pa.Array, levels: int) -> pa.Array:
    for _ in range(levels):
        array = pa.StructArray.from_arrays([array], ["a"])
    return array


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("levels", DEPTHS)
def test_deep_text_of_tables_is_a_bad_row(kind: str, levels: int, tmp_path: Path) -> None:
    good = json.dumps([ASKED, SAID])
    texts = [good, json.dumps(calling("@@")["messages"]).replace('"@@"', text_of(levels)), good]
    typed = pa.array([None, None, text_of(levels)], pa.json_())
    for name, columns in {
        "text": {"messages": texts},
        "typed": {"messages": [good] * 3, "tools": typed},
        "in a struct": {"messages": [good] * 3, "chat_template_kwargs": pa.StructArray.from_arrays([typed], ["x"])},
    }.items():
        path = tmp_path / f"{name}.{kind}"
        write_table(path, kind, pa.table(columns))
        skipped = run(tmp_path / name, path, "--on-bad-row", "skip")
        assert skipped.code == 0, skipped.err
        assert "skipped       1" in skipped.out
        refused = run(tmp_path / f"{name} no", path)
        assert refused.code == 1
        assert f"error: {path}:{2 if name == 'text' else 3}: " in refused.err
        assert refused.err.count("\n") == 1


def write_table(path: Path, kind: str, table: pa.Table) -> None:
    if kind == "parquet":
        pq.write_table(table, path)
        return
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.sample(3)
@pytest.mark.parametrize("levels", [30, 59, 60, 61, 63, 64, 80, 90])
def test_deep_fields_of_tables_are_read_or_refused(levels: int, tmp_path: Path) -> None:
    """Parquet can be nested deeper than the Arrow streams that are sent to workers."""
    messages = pa.array([json.dumps([ASKED, SAID])] * 2)
    plain = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"messages": messages}), plain)
    assert run(tmp_path / "plain", plain).code == 0
    for name in ("metadata", "chat_template_kwargs"):
        inner = (
            pa.array([1, 2])
            if levels % 2
            else pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["a", "b"]), pa.array([1, 2]))
        )
        pq.write_table(
            pa.table({"messages": messages, name: nest(inner, levels - 2)}), path := tmp_path / f"{name}.parquet"
        )
        outcome = run(tmp_path / name, path)
        if name == "metadata" or levels < 60:
            assert outcome.code == 0, outcome.err
            assert (tmp_path / f"{name}.bin").read_bytes() == (tmp_path / "plain.bin").read_bytes()
        elif outcome.code:
            assert outcome.err.count("\n") == 1
            assert f"{path}:1: chat_template_kwargs is nested more than 60 levels deep" in outcome.err


def test_tables_that_pyarrow_cannot_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"messages": pa.array(["[]"]), "a": nest(pa.array([1]), 300)}), path)
    refused = run(tmp_path / "x", path)
    assert refused.code == 1
    assert f"error: {path}: not a readable Parquet file: " in refused.err
    assert refused.err.count("\n") == 1


@pytest.mark.parametrize("levels", DEPTHS)
def test_producing_goes_on(levels: int, tmp_path: Path) -> None:
    (source := tmp_path / "rows.jsonl").write_text("\n".join(lines_with(levels)) + "\n", encoding="utf-8")
    done = produced(tmp_path / "catalog", "--input", source, "--on-bad-row", "skip")
    assert done.code == 0, done.err
    assert "Traceback" not in done.err


def test_a_template_that_recurses_over_a_row_is_stopped(tmp_path: Path) -> None:
    """A macro needs several calls per level. A row that is too deep for it is a bad row; the next row is unaffected."""
    keys = "{% for k in v %}{{ f(v[k]) }}{% endfor %}"
    macro = "{% macro f(v) %}{% if v is mapping %}" + keys + "{% else %}{{ v }}{% endif %}{% endmacro %}"
    source = macro + "{{ f(x) }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    rows = [{**GOOD, "chat_template_kwargs": {"x": deep(levels)}} for levels in (3, MAX_DEPTH - 2, 3)]
    (path := tmp_path / "t.jinja").write_text(source, encoding="utf-8")
    given = (write_rows(tmp_path / "rows.jsonl", rows), "--chat-template", path)
    skipped = run(tmp_path / "x", *given, "--on-bad-row", "skip")
    assert skipped.code == 0, skipped.err
    refused = run(tmp_path / "y", *given)
    assert refused.code in (0, 1)
    assert refused.err.count("\n") == refused.code
