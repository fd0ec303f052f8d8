"""What a program begins with: ``preprocess`` as a function, to the bytes of the command."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from chats import CHATS, TOKENIZER, files_of, remains, write_rows
from chats import preprocess as run_command

from megatron_sft_idx import FormatError, SequenceError, preprocess
from megatron_sft_idx.cli.main import build_parser

ROWS: list[dict[str, Any]] = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
USUAL: dict[str, Any] = {"tokenizer": TOKENIZER, "seq_length": 1024, "turns": "whole", "workers": 0, "log_interval": 0}


# ---- preprocess ----


@pytest.fixture(scope="module")
def by_command(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("command")
    assert run_command(folder / "x", rows=ROWS).code == 0
    return files_of(folder / "x")


@pytest.mark.parametrize("given", ["path", "paths", "list", "generator", "stdin"])
def test_files_and_rows_make_the_bytes_of_the_command(
    given: str, tmp_path: Path, by_command: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    piped = io.TextIOWrapper(io.BytesIO(path.read_bytes()))
    monkeypatch.setattr(sys, "stdin", piped)
    rows: Any = {"path": path, "paths": [str(path)], "list": ROWS, "generator": (row for row in ROWS), "stdin": "-"}
    made = preprocess(rows[given], out=tmp_path / "new/x", **USUAL)
    assert files_of(tmp_path / "new/x") == by_command
    assert remains(tmp_path / "new") == sorted(f"x{suffix}" for suffix in by_command)
    assert str(made).startswith(f"wrote {tmp_path}/new/x\nrows            318")
    assert made.packing.tokens == made.to_dict()["packing"]["tokens"] > 0


def test_a_dataset_makes_the_bytes_of_the_command_on_its_saved_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    chats = [row for row in ROWS if all(message.keys() == {"role", "content"} for message in row["messages"])]
    plain = [row for row in chats if all(isinstance(message["content"], str) for message in row["messages"])]
    saved = datasets.Dataset.from_list([{"messages": row["messages"]} for row in plain]).select(range(0, 90, 2))
    saved.save_to_disk(tmp_path / "saved")
    assert run_command(tmp_path / "there/x", "--input", tmp_path / "saved").code == 0
    preprocess(saved, out=tmp_path / "here/x", **USUAL)
    assert files_of(tmp_path / "here/x") == files_of(tmp_path / "there/x")
    with pytest.raises(FormatError, match=r"rows: a DatasetDict, expected .* one split of a dataset"):
        preprocess(datasets.DatasetDict(train=saved), out=tmp_path / "other", **USUAL)


def test_the_command_reads_a_pipe(
    tmp_path: Path, by_command: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run_command(tmp_path / "x", "--input", "-").code == 0
    assert files_of(tmp_path / "x") == by_command
    refused = run_command(tmp_path / "y", "--input", "-", CHATS)
    assert (refused.code, "--input - takes everything from the pipe" in refused.err) == (1, True)


def test_a_plain_script_with_worker_processes_and_no_guard(tmp_path: Path) -> None:
    """Processes that are spawned run the main module again, which would begin the work again, without an end."""
    path = write_rows(tmp_path / "rows.jsonl", ROWS * 12)  # two pieces, so that there is work for others
    script = tmp_path / "script.py"
    script.write_text(
        "from megatron_sft_idx import preprocess\n"
        f"print(preprocess({str(path)!r}, tokenizer={str(TOKENIZER)!r}, out='x', seq_length=1024, turns='whole',"
        " workers=2))\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.partition("\n")[0]) == (0, "wrote x"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ({"messages": []}, FormatError, "rows: a dict, expected paths, an iterable of rows.*single row in a list"),
        (7, FormatError, "rows: a int, expected paths"),
        ([ROWS[0], "chats.jsonl"], SequenceError, "rows:2: cannot be written as JSON: a str, expected a dict"),
        ([{"messages": [{"role": "user", "content": "x", "weight": float("nan")}]}], SequenceError, "rows:1: .*float"),
        ([{"messages": object()}], SequenceError, "rows:1: .* a value of type object"),
        ([], FormatError, "no input"),
    ],
)
def test_what_are_no_rows_is_said(rows: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        preprocess(rows, out=tmp_path / "x", **USUAL)
    assert remains(tmp_path) == []


def test_rows_with_arrays_are_read(tmp_path: Path) -> None:
    ids, mask = [5, 6, 7, 8], [0, 0, 1, 1]
    for name, kind in (("lists", list), ("arrays", np.array)):
        preprocess([{"input_ids": kind(ids), "loss_mask": kind(mask)}], out=tmp_path / name, **USUAL)
    assert files_of(tmp_path / "lists") == files_of(tmp_path / "arrays")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on": "user"}, "train_on: 'user', choose one of assistant, last-turn, all"),
        ({"straddling": "exlude"}, "straddling: 'exlude', choose one of include, exclude"),
        ({"seq_length": 0}, "seq_length: 0, expected a whole number from 1"),
        ({"seq_length": "1024"}, "seq_length: '1024', expected a whole number"),
        ({"workers": -1}, "workers: -1, expected a whole number from 0"),
        ({"packing": "best"}, "packing: 'best', choose one of auto, "),
        ({"resume": True, "overwrite": True}, "choose one"),
        ({"engine": "ray", "workers": 0}, "--workers 1"),
        ({"chat_template": "nowhere.jinja"}, "--chat-template nowhere.jinja: No such file"),
    ],
)
def test_a_value_that_is_none_of_the_choices(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        preprocess(ROWS, out=tmp_path / "x", **{**USUAL, **options})
    assert remains(tmp_path) == []


def test_every_option_of_the_command_is_one_of_the_function() -> None:
    (verbs,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    parser: argparse.ArgumentParser = verbs.choices["preprocess"]
    options = {action.dest: action for action in parser._actions if action.help is not argparse.SUPPRESS}
    for name, option in (("rows", "input"), ("out", "output_prefix"), ("tokenizer", "tokenizer_model")):
        options[name] = options.pop(option)
    del options["help"], options["dry_run"]
    parameters = inspect.signature(preprocess).parameters
    hints = get_type_hints(preprocess)
    assert options.keys() == parameters.keys()
    for name, action in options.items():
        default = parameters[name].default
        assert action.required == (default is inspect.Parameter.empty), name
        assert action.required or action.default == default or (action.default, default) == ({}, None), name
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else None
        assert choices == (tuple(action.choices) if action.choices else None), name


def test_both_names_of_the_tokenizer_are_taken_and_one_is_shown(tmp_path: Path) -> None:
    shown = build_parser("preprocess").parse_args
    usual = ["preprocess", "--input", "x", "--seq-length", "8", "--output-prefix", "x"]
    found = [shown([*usual, option, "tok"]).tokenizer_model for option in ("--tokenizer", "--tokenizer-model")]
    assert found == ["tok", "tok"]
    (verbs,) = (action for action in build_parser("preprocess")._actions if isinstance(action.choices, dict))
    text = verbs.choices["preprocess"].format_help().partition("examples:")[0]
    assert "--tokenizer PATH" in text
    assert "--tokenizer-model" not in text
