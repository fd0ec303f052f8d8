"""Unusable input on the command line: each kind has a clear error and leaves no files."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
from chats import TOKENIZER, Outcome, command, preprocess

ASK = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "A test."}
GOOD = {"messages": [ASK, ANSWER]}


def chat(*messages):
    return {"messages": list(messages)}


# name: (row, the error); one for each step that rejects rows. Tests of the steps have all reasons. The row is line 2 of
# its file.
ROWS = {
    "not JSON": ("{", "not valid JSON"),
    "not an object": ([1, 2], "expected an object"),
    "no chat": ({"url": "hello"}, "no columns of a chat"),
    "text alone": ({"text": "hello"}, "the row has only text"),
    "a bad message": (chat(ASK, {**ANSWER, "weight": -1}), "messages[1].weight"),
    "assistant never speaks": (chat(ASK), "the row has no assistant message"),
    "preference pair": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "a preference pair"),
    "shifted labels": ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels"),
    "id beyond the vocabulary": ({"input_ids": [1, 999_999], "loss_mask": [0, 1]}, "999999"),
    "lone surrogate": (chat(ASK, {"role": "assistant", "content": "\ud800"}), "surrogate"),
}


def clean_failure(done: Outcome, *says: str, code: int = 1) -> None:
    assert done.code == code, done
    assert "Traceback" not in done.err
    for words in says:
        assert words in done.err, done.err


def nothing_made(folder: Path) -> None:
    left = [path.name for path in folder.rglob("*") if path.name.startswith("x.")]
    assert left == []


@pytest.mark.parametrize("kind", ROWS)
def test_bad_row(tmp_path, kind):
    row, says = ROWS[kind]
    lines = [json.dumps(GOOD), row if isinstance(row, str) else json.dumps(row), json.dumps(GOOD)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    done = preprocess(tmp_path / "x", "--input", tmp_path / "in.jsonl")
    clean_failure(done, f"{tmp_path / 'in.jsonl'}:2: ", says)
    nothing_made(tmp_path)
    skipped = preprocess(tmp_path / "x", "--input", tmp_path / "in.jsonl", "--on-bad-row", "skip")
    assert skipped.code == 0, skipped
    assert "skipped       1" in skipped.out


def test_first_bad_row_is_the_one_named_whatever_the_workers(tmp_path):
    rows = [json.dumps(GOOD)] * 9000
    rows[4000], rows[8000] = '{"messages": []}', "{"
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    for workers in (0, 2):
        done = preprocess(tmp_path / "x", "--input", tmp_path / "in.jsonl", "--workers", workers)
        clean_failure(done, f"{tmp_path / 'in.jsonl'}:4001: ")
        nothing_made(tmp_path)


def test_a_bad_row_is_named_though_a_later_one_shows_the_template_to_be_unusable(tmp_path):
    """Rows are read, rendered and tokenised in groups; the first error in the file is still reported first."""
    picky = "{% if 'date' in m %}{{ strftime_now('%Y') }}{% elif 'odd' in m %}{{ raise_exception('odd') }}{% endif %}"
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}" + picky + "<|im_end|>{% endfor %}")
    arguments = ("--chat-template", tmp_path / "t.jinja")
    asks_date, odd = ({"messages": [{**ASK, key: 1}, ANSWER]} for key in ("date", "odd"))
    for bad, says in (({"messages": []}, "messages is empty"), (odd, "rejects it: odd")):
        done = preprocess(tmp_path / "x", *arguments, rows=[GOOD, bad, asks_date])
        clean_failure(done, f"{tmp_path / 'rows.jsonl'}:2: ", says)
        done = preprocess(tmp_path / "x", *arguments, rows=[GOOD, asks_date, bad])
        clean_failure(done, "uses today's date", "--template-date")
        nothing_made(tmp_path)


# name: (file name, how to make it, the error); test_chat_files_malformed.py has other malformed files
FILES = {
    "missing": ("in.jsonl", lambda path: None, "no such file"),
    "folder": ("in.jsonl", lambda path: path.mkdir(), "folder"),
    "empty": ("in.jsonl", lambda path: path.write_bytes(b""), "no row of the input can be used"),
    "empty array": ("in.json", lambda path: path.write_bytes(b"[]"), "no row of the input can be used"),
    "line not JSON": ("in.jsonl", lambda path: path.write_bytes(b'{"messages": [}\n'), "in.jsonl:1: "),
    "UTF-16": ("in.jsonl", lambda path: path.write_text(json.dumps(GOOD), "utf-16"), "convert the file to UTF-8"),
    "binary": ("in.jsonl", lambda path: path.write_bytes(bytes(range(256)) * 9), "in.jsonl"),
    "gzip cut short": ("in.jsonl.gz", lambda path: path.write_bytes(gzip.compress(b"{}")[:-3]), "in.jsonl.gz"),
    "unknown text": ("in.txt", lambda path: path.write_text("prompt,completion\na,b\n"), "in.txt"),
}


@pytest.mark.parametrize("kind", FILES)
def test_bad_file(tmp_path, kind):
    name, make, says = FILES[kind]
    make(tmp_path / name)
    clean_failure(preprocess(tmp_path / "x", "--input", tmp_path / name), says)
    nothing_made(tmp_path)


def test_same_file_twice(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(GOOD))
    done = preprocess(tmp_path / "x", "--input", tmp_path / "in.jsonl", tmp_path / "*.jsonl")
    clean_failure(done, "matched twice")


def edit_config(folder: Path, **changes) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# name: (damage to a valid tokenizer folder, the error); test_chat_tokenizer_files.py has other damage
TOKENIZERS = {
    "missing": (shutil.rmtree, "tokenizer"),
    "not JSON": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
    "no template": (lambda folder: edit_config(folder, chat_template=None), "--chat-template"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_bad_tokenizer(tmp_path, kind):
    spoil, says = TOKENIZERS[kind]
    shutil.copytree(TOKENIZER, tmp_path / "tok")
    spoil(tmp_path / "tok")
    clean_failure(preprocess(tmp_path / "x", "--tokenizer-model", tmp_path / "tok", rows=[GOOD]), says)
    nothing_made(tmp_path)


def test_tokenizer_named_as_on_a_hub(tmp_path):
    done = preprocess(tmp_path / "x", "--tokenizer-model", "Qwen/Qwen3-8B", rows=[GOOD])
    clean_failure(done, "Qwen/Qwen3-8B")


# name: (template, options, the error)
TEMPLATES = {
    "syntax": ("{% for m in messages %}{{ m.content }}", (), "line 1"),
    "unknown filter": ("{% for m in messages %}{{ m.content | nope }}{% endfor %}", (), "nope"),
    "raises": ("{{ raise_exception('no system message') }}", (), "no system message"),
    "drops the answer": ("{% for m in messages %}{{ m.role }}\n{% endfor %}", (), "drops the words 'A test.'"),
    "writes nothing": ("", (), "rows.jsonl:1: "),
    "asks for the date": (
        "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}\n{% endfor %}", (), "--template-date",
    ),
    "reaches into Python": ("{{ messages.__class__.__mro__ }}", (), "t.jinja: line 1: not allowed in a template"),
    "loops for ever": ("{% for i in range(10 ** 12) %}x{% endfor %}", (), "Range too big"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TEMPLATES)
def test_bad_template(tmp_path, kind):
    text, options, says = TEMPLATES[kind]
    (tmp_path / "t.jinja").write_text(text)
    done = preprocess(tmp_path / "x", "--chat-template", tmp_path / "t.jinja", *options, rows=[GOOD])
    clean_failure(done, says)
    nothing_made(tmp_path)


# arguments that are always wrong: exit code 2
USAGE = {
    "no command": ((), "command"),
    "unknown command": (("prepare",), "prepare"),
    "no input": (("preprocess", "--tokenizer-model", "t", "--seq-length", "8", "--output-prefix", "x"), "--input"),
    "capacity zero": (("--seq-length", "0"), "--seq-length"),
    "capacity negative": (("--seq-length", "-5"), "--seq-length"),
    "capacity huge": (("--seq-length", str(2**31)), "--seq-length"),
    "capacity a word": (("--seq-length", "4k"), "4k"),
    "workers negative": (("--workers", "-1"), "--workers"),
    "multiple zero": (("--sequence-multiple", "0"), "--sequence-multiple"),
    "multiple above the capacity": (("--seq-length", "7", "--sequence-multiple", "8"), "--sequence-multiple 8"),
    "unknown packing": (("--packing", "magic"), "magic"),
    "unknown overlong": (("--overlong", "ignore"), "ignore"),
    "unknown train-on": (("--train-on", "user"), "user"),
    "kwargs not JSON": (("--chat-template-kwargs", "{x"), "--chat-template-kwargs"),
    "kwargs not an object": (("--chat-template-kwargs", "[1]"), "JSON object"),
    "kwargs with NaN": (("--chat-template-kwargs", '{"a": NaN}'), "NaN"),
    "kwargs with half a character": (("--chat-template-kwargs", '{"a": "\\ud800"}'), "surrogate"),
    "kwargs nested too deeply": (("--chat-template-kwargs", '{"a": ' + "[" * 20000), "levels deep"),
    "date not a date": (("--template-date", "tomorrow"), "tomorrow"),
    "template missing": (("--chat-template", "missing.jinja"), "missing.jinja"),
    "summary without a folder": (("--summary", "missing/summary.json"), "the folder missing does not exist"),
    "summary is a folder": (("--summary", "."), "expected the path of a file, found a folder"),
    "unknown option": (("--quick",), "--quick"),
}


@pytest.mark.parametrize("kind", USAGE)
def test_wrong_usage(tmp_path, kind):
    arguments, says = USAGE[kind]
    done = command(*arguments) if "preprocess" in arguments or not "".join(arguments).startswith("--") else preprocess(
        tmp_path / "x", *arguments, rows=[GOOD]
    )  # fmt: skip
    clean_failure(done, says, code=2)
    nothing_made(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--output-prefix", "folder/"), "not a prefix"),
        (("--chat-template-kwargs", '{"messages": []}'), "messages"),
        (("--append-eod", "--tokenizer-model", "no-eos"), "--append-eod"),
    ],
)
def test_options_that_cannot_be(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TOKENIZER, tmp_path / "no-eos")
    edit_config(tmp_path / "no-eos", eos_token=None)
    arguments = [*arguments, *(() if "--output-prefix" in arguments else ("--output-prefix", "x"))]
    clean_failure(preprocess(tmp_path / "x", *arguments, rows=[GOOD]), says)
    assert not (tmp_path / "x.seq.idx").exists()


def test_help_teaches():
    for verb in ("preprocess", "pack"):
        done = command(verb, "--help")
        assert done.code == 0
        assert "examples:" in done.out


def test_a_row_that_renders_but_cannot_be_tokenised(tmp_path):
    odd = "{% if m.content == 'odd' %}{{ '\\ud800' }}{% endif %}"
    half = "{% for m in messages %}{{ m.content }}" + odd + "<|im_end|>{% endfor %}"
    (tmp_path / "t.jinja").write_text(half)
    rows = [GOOD, {"messages": [{**ASK, "content": "odd"}, ANSWER]}, GOOD]
    arguments = ("--chat-template", tmp_path / "t.jinja")
    done = preprocess(tmp_path / "x", *arguments, rows=rows)
    clean_failure(done, f"{tmp_path / 'rows.jsonl'}:2: ", "surrogate")
    nothing_made(tmp_path)
    skipped = preprocess(tmp_path / "x", *arguments, "--on-bad-row", "skip", rows=rows)
    assert skipped.code == 0, skipped
    assert "sequences       2" in skipped.out
