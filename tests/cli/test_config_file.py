"""``--config`` reads the output of ``--print-config`` as the same run; errors contain file and line."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from chats import CHATS, TOKENIZER, command, files_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_sft_idx.cli.config_file import (
    MAX_DEPTH,
    MAX_NBYTES,
    YamlJson,
    YamlList,
    YamlMapping,
    YamlNumber,
    YamlText,
    YamlValue,
    config_text,
    read_config,
    to_json,
)
from megatron_sft_idx.cli.main import build_parser
from megatron_sft_idx.cli.parsers import Collected, Mapped
from megatron_sft_idx.errors import FormatError

REQUIRED = ["--input", "a.jsonl", "--tokenizer", "tok", "--seq-length", "8"]
# Texts that YAML, a shell or a terminal would misread.
NASTY = [
    *("*", "?", "a b", "x=y", "=", "'q'", '"', "\\", "\\n", "#c", "a #b", "a: b", "a:", ": a", "%x", "@x", "`x`", "|"),
    *("no", "Yes", "on", "null", "~", "true", "0x1f", "0o17", "1_000", "12:30", "2026-01-01", ".5", "<<", "1e3"),
    *("{a}", "[a]", "{a: b}", "&a", "*a", "!t", ">", "? a", "- a", "-", "-x", "--", "--input", "---", "...", "- "),
    *("", " ", " x", "x ", "\n", "a\nb", "a\n", "\t", "\r", "\r\n", "\x01", "\x7f", "\x85", "\xa0", "\ufeff", "\u2028"),
    *("\udcff", "caf\udce9.jsonl", "é", "你好", "\U0001f600", "\u202e", "s3://b/k=1/*.jsonl", "C:\\x", "a" * 2000),
]  # fmt: skip


@functools.cache
def verbs() -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    return dict(action.choices)


def parsed(*words: object) -> dict[str, Any]:
    """Return the namespace that the command runs with, without the configuration file."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            namespace = vars(verbs()[str(words[0])].parse_args([str(word) for word in words[1:]]))
        except SystemExit:
            raise AssertionError(said.getvalue()) from None
    return {name: value for name, value in namespace.items() if name not in ("config", "print_config")}


def refusal(*words: object) -> str:
    """Return the error of a command that is rejected for its usage."""
    outcome = command(*words)
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err
    lines = outcome.err.splitlines()
    assert len(lines) == 3, outcome.err
    return lines[-1].partition("error: ")[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(text: str) -> str:
    Path("run.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
    return "run.yaml"


# ---- --print-config, and the way back ----


def random_words(verb: str, draw: random.Random) -> list[str]:
    """Return random options of a command with nasty values; arguments come last."""
    parser = verbs()[verb]
    skipped = {"help", "config", "print_config"}
    for group in parser._mutually_exclusive_groups:
        chosen = draw.choice([None, *group._group_actions] if not group.required else group._group_actions)
        skipped |= {action.dest for action in group._group_actions if action is not chosen}
    words: list[str] = []
    for action in draw.sample(parser._actions, len(parser._actions)):
        alone = any(action in group._group_actions for group in parser._mutually_exclusive_groups)
        if not action.option_strings or action.dest in skipped:
            continue
        if action.required or alone or draw.random() < 0.4:
            for _ in range(draw.randint(1, 3) if isinstance(action, (Collected, argparse._AppendAction)) else 1):
                words += words_of(action, draw.choice(action.option_strings), draw, parser)
    arguments = [action for action in parser._actions if not action.option_strings]
    return [*words, "--", *(f"x{number}" for number, _ in enumerate(arguments))] if arguments else words


def words_of(action: argparse.Action, option: str, draw: random.Random, parser: Any) -> list[str]:
    if action.nargs == 0:
        return [option]
    if action.nargs == "+":
        last = "y=2" if "=" in str(action.metavar) else "y"
        values = dict.fromkeys(value_of(action, draw, parser) for _ in range(draw.randint(1, 4)))
        if isinstance(action, Mapped):  # each name may be given once
            values = dict.fromkeys({value.partition("=")[0]: value for value in values}.values())
        # Other values cannot follow an option on a command line.
        return [option, *(value for value in values if not value.startswith("-") or value == "-" or " " in value), last]
    return [f"{option}={value_of(action, draw, parser)}"]


def value_of(action: argparse.Action, draw: random.Random, parser: Any) -> str:
    if action.choices is not None:
        return str(draw.choice(list(action.choices)))
    if action.metavar == "JSON":
        return json.dumps(
            {draw.choice(NASTY[:-1]).encode("utf-8", "replace").decode(): json_value(draw) for _ in range(3)}
        )
    numbers = [str(draw.randint(1, 999)), f"{draw.random()}", "1e3", "2GiB"]
    name = "a=2" if "=" in str(action.metavar) else ""
    for _ in range(99):
        value = draw.choice(NASTY if action.type is None else [*NASTY, *numbers * 9]) + name
        with contextlib.suppress(argparse.ArgumentError):
            parser._get_value(action, value)
            return value
    raise AssertionError(action)


def json_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(8 if depth < 3 else 6)
    if kind < 6:
        texts = [text.encode("utf-8", "replace").decode() for text in NASTY[:-1]]
        return draw.choice([None, True, False, draw.randint(-9, 10**20), draw.uniform(-1, 1e9), draw.choice(texts)])
    values = [json_value(draw, depth + 1) for _ in range(draw.randrange(3))]
    return values if kind == 6 else {str(number): value for number, value in enumerate(values)}


@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", verbs())
def test_what_is_printed_is_read_as_the_same_run(verb: str, here: Path, times: int) -> None:
    # Every command has the mechanism; preprocess has most options.
    for seed in range(times * (8 if verb == "preprocess" else 2)):
        words = random_words(verb, random.Random(seed))
        shown = command(verb, "--print-config", *words)
        assert (shown.code, shown.err) == (0, ""), words
        assert os.listdir(here) in ([], ["run.yaml"])
        arguments = words[words.index("--") :] if "--" in words else []
        file = config(shown.out)
        assert parsed(verb, "--config", file, *arguments) == parsed(verb, *words), words
        assert command(verb, f"--config={file}", "--print-config", *arguments).out == shown.out
        # Other programs also read every text value as text.
        texts = yaml.load(shown.out, yaml.BaseLoader)
        for key, value in yaml.safe_load(shown.out).items():
            action = verbs()[verb]._option_string_actions[f"--{key}"]
            if action.type is None and action.nargs != 0:
                assert value == texts[key], key


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "words",
    [
        ["--packing", "sequential", "--shuffle", "--seed", 7],
        ["--earlier-reasoning", "split", "--overlong", "split", "--no-source", "--workers", 0, "--output-shards", 2],
        ["--repeat", "*.jsonl=2", "--loss-weight", "chats.jsonl=0.5", "--dedup", "exact", "--sample", "0.5"],
        ["--chat-template-kwargs", '{"enable_thinking": false, "date_string": "2026-10-01"}', "--append-eod"],
    ],
)
def test_the_file_makes_the_same_bytes(words: list[str], here: Path) -> None:
    usual = ["--input", CHATS, "--tokenizer", TOKENIZER, "--seq-length", 1024, "--output-prefix", "x/train"]
    usual += [] if "--earlier-reasoning" in words else ["--earlier-reasoning", "drop"]
    usual += ["--max-rows", 40, "--workers", 0] if "--dedup" not in words else ["--workers", 0]
    for folder in ("x", "y"):
        os.mkdir(folder)
    shown = command("preprocess", *usual, *words, "--print-config")
    assert (shown.code, os.listdir("x")) == (0, [])
    made = command("preprocess", *usual, *words)
    assert made.code == 0, made.err
    again = command("preprocess", "--config", config(shown.out), "--output-prefix", "y/train")
    assert again.code == 0, again.err
    prefixes = [path.name.removesuffix(".seq.idx") for path in Path("x").glob("*.seq.idx")]
    assert prefixes
    for prefix in prefixes:
        assert files_of(Path("x", prefix)) == files_of(Path("y", prefix))


@pytest.mark.sample(1)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_any_output_holds_every_name(encoding: str, here: Path) -> None:
    """Redirected output can be read by --config, for any locale in which it was written."""
    words = ["preprocess", *REQUIRED, "--output-prefix", "你 é\udcff\u202e"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_sft_idx", *map(os.fsencode, words), "--print-config"],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"},
        capture_output=True,
        check=True,
    )
    Path("run.yaml").write_bytes(done.stdout)
    assert ("你 é".encode() in done.stdout) == (encoding == "utf-8")
    assert parsed("preprocess", "--config", "run.yaml") == parsed(*words)


def test_what_is_not_given_and_has_no_default_is_left_out(here: Path) -> None:
    shown = yaml.safe_load(command("preprocess", *REQUIRED, "--print-config").out)
    assert shown["seq-length"] == 8
    assert shown["packing"] == "auto"
    assert shown["source"] is True
    assert shown["overwrite"] is False
    assert not {"output-prefix", "max-rows", "repeat", "ignore-field", "config", "print-config", "help"} & shown.keys()


# ---- what a file sets ----


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("output_prefix: x", "output_prefix", "x"),
        ("output-prefix: no", "output_prefix", "no"),
        ("output-prefix: 1e3", "output_prefix", "1e3"),
        ("output-prefix: 2026-01-01", "output_prefix", "2026-01-01"),
        ('output-prefix: "\\udcff"', "output_prefix", "\udcff"),
        ("output-prefix: -x", "output_prefix", "-x"),
        ("output-prefix: ''", "output_prefix", ""),
        ("output-prefix: |-\n  a\n  b", "output_prefix", "a\nb"),
        ("overwrite: true", "overwrite", True),
        ("overwrite: FALSE", "overwrite", False),
        ("source: false", "source", False),
        ("no-source: True", "source", False),
        ("no_source: false", "source", True),
        ("no-train-on-thinking: true", "no_train_on_thinking", True),
        ("ignore-field: x", "ignore_fields", ("x",)),
        ("ignore-field: [x, 'y', z]", "ignore_fields", ("x", "y", "z")),
        ("ignore-field: []", "ignore_fields", ()),
        ("repeat: a.jsonl=2", "repeat", {"a.jsonl": 2}),
        ("repeat: {a.jsonl: 2, 'k=1/*': 0.5}", "repeat", {"a.jsonl": 2, "k=1/*": 0.5}),
        ("loss-weight:\n- a=1\n- --b=2", "loss_weight", {"a": 1, "--b": 2}),
        ("repeat: {}", "repeat", None),
        ("fields: {messages: data.turns, system: no}", "fields", {"messages": "data.turns", "system": "no"}),
        ("turn_fields:\n  role: who\n  content: said.en", "turn_fields", {"role": "who", "content": "said.en"}),
        ("roles: [Kunde=user, agent=assistant]", "roles", {"Kunde": "user", "agent": "assistant"}),
        ("sample: 1e-1", "sample", 0.1),
        ("chat-template-kwargs: {a: false, b: No name, c: 2026-01-01}", "chat_template_kwargs",
         {"a": False, "b": "No name", "c": "2026-01-01"}),
        ("chat-template-kwargs: {a: 'no', b: [1, 1.5, ~], c: {d: True}}", "chat_template_kwargs",
         {"a": "no", "b": [1, 1.5, None], "c": {"d": True}}),
        ("chat-template-kwargs: '{\"a\": 1}'", "chat_template_kwargs", {"a": 1}),
        ("{seed: 3}", "seed", 3),
        ("\ufeffseed: 3 # a comment", "seed", 3),
    ],
)  # fmt: skip
def test_a_value_is_what_the_flag_would_set(text: str, name: str, value: Any, here: Path) -> None:
    assert parsed("preprocess", *REQUIRED, "--config", config(text))[name] == value


def test_required_options_may_come_from_the_file(here: Path) -> None:
    file = config("input: [a.jsonl, -b]\ntokenizer: tok\nseq-length: 8")
    assert parsed("preprocess", "--config", file) == {**parsed("preprocess", *REQUIRED), "input": ["a.jsonl", "-b"]}
    assert "required: --input, --tokenizer" in refusal("preprocess", "--config", config("seq-length: 8"))
    file = config("watch: raw\ntokenizer: t\nseq-length: 8\ncatalog: c\ntokens-per-shard: 9")
    assert parsed("produce", "--config", file)["watch"] == "raw"
    assert parsed("pack", "source", "--config", config("seq-length: 8\noutput-prefix: x"))["output_prefix"] == "x"
    # Settings of a file do not persist.
    assert "required: --seq-length" in refusal("pack", "source", "--output-prefix", "x")


def test_the_command_line_wins(here: Path) -> None:
    file = config(
        "seed: 3\nignore-field: [x, y]\nrepeat: {a: 2}\ntokenizer: no\nsource: false\nsummary: no/such/folder"
    )
    words = [*REQUIRED, "--seed", 4, "--ignore-field", "z", "--repeat", "b=1", "--source", "--summary", "s.json"]
    flags = parsed("preprocess", *words)
    for at in (0, len(REQUIRED), len(words)):
        assert parsed("preprocess", *words[:at], "--config", file, *words[at:]) == flags
    file = config("input: x\ntokenizer: t\nseq-length: 8\ncatalog: c\ntokens-per-shard: 9")
    assert parsed("produce", "--config", file, "--watch", "raw")["input"] is None


def test_relative_paths_are_relative_to_the_current_folder(here: Path) -> None:
    os.mkdir("configs")
    Path("configs/run.yaml").write_text("summary: said.json\n")
    assert parsed("preprocess", *REQUIRED, "--config", "configs/run.yaml")["summary"] == "said.json"
    assert "current folder" in command("preprocess", "--help").out.replace("\n", " ")


def test_help_is_shown_whatever_the_file_is(here: Path) -> None:
    assert command("preprocess", "--config", "missing.yaml", "--help").code == 0


# ---- errors ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\nsequence-lenght: 4", "run.yaml:2: unknown option 'sequence-lenght'"),
        ("seq-lenght: 4", "run.yaml:1: unknown option 'seq-lenght'; did you mean seq-length?"),
        ("json-keys: [text]", "run.yaml:1: unknown option 'json-keys': set the name of the field"),
        ("max_seq_length: 4", "run.yaml:1: unknown option 'max_seq_length': set the number of token positions"),
        ("config: x.yaml", "run.yaml:1: config: only allowed on the command line"),
        ("help: true", "run.yaml:1: help: only allowed"),
        ("print_config: true", "run.yaml:1: print_config: only allowed"),
        ("--seed: 1", "run.yaml:1: unknown option '--seed'; did you mean seed?"),
        ("run: x", "unknown option 'run'"),
        ("seed: 1\n\nseed: 2", "run.yaml:3: 'seed' occurs twice, first on line 1; remove one"),
        ("max-rows: 1\nmax_rows: 2", "run.yaml:2: max_rows: already set on line 1, as max-rows; remove one"),
        ("tokenizer: a\ntokenizer-model: b", "run.yaml:2: tokenizer-model: already set on line 1, as tokenizer"),
        ("source: true\nno-source: true", "run.yaml:2: no-source: already set on line 1"),
        ("chat-template-kwargs:\n  a: 1\n  a: 2", "run.yaml:3: 'a' occurs twice"),
        ("seed:", 'run.yaml:1: seed: no value; leave the option out, or write ""'),
        ("seed: x", "run.yaml:1: seed: 'x': expected a whole number from 0"),
        ("sample: x", "run.yaml:1: sample: invalid float value"),
        ("packing: sequental", "run.yaml:1: packing: 'sequental', choose one of auto"),
        ("tokenizer-type: SFTTokenizer", "tokenizer-type: 'SFTTokenizer': leave it out"),
        ("summary: no/such/folder", "run.yaml:1: summary: no/such/folder: the folder no/such does not exist"),
        ("seed: [1]", "run.yaml:1: seed: expected one value, found a list"),
        ("seed: {a: 1}", "run.yaml:1: seed: expected one value, found a mapping"),
        ("input: {a: 1}", "run.yaml:1: input: expected one value or a list, found a mapping"),
        ("input: []", "run.yaml:1: input: a list without values; leave the option out"),
        ("input: [[a]]", "run.yaml:1: input: expected only strings inside, found a list"),
        ("input: [a, {b: c}]", "run.yaml:1: input: expected only strings inside, found a mapping"),
        ("input: [a,\n ~, '']\nseed:", "run.yaml:3: seed: no value"),
        ("input:\n- a\n-", "run.yaml:1: input: an entry without a value"),
        ("repeat: {a: {b: 1}}", "run.yaml:1: repeat: expected only strings inside, found a mapping"),
        ("overwrite: yes", "run.yaml:1: overwrite: expected true or false, found 'yes'"),
        ("overwrite: [true]", "run.yaml:1: overwrite: expected true or false, found a list"),
        ("overwrite:", "run.yaml:1: overwrite: expected true or false, found ''"),
        ("chat-template-kwargs: {a: no}", "run.yaml:1: 'no' is a string in some versions of YAML"),
        ("chat-template-kwargs:\n  a:\n  - 0x1f", "run.yaml:3: '0x1f' is a string in some"),
        ("chat-template-kwargs: [1]", "run.yaml:1: chat-template-kwargs: [1]: expected a JSON object"),
        ("chat-template-kwargs: abc", "run.yaml:1: chat-template-kwargs: \"abc\": expected a JSON object"),
        ("", "run.yaml: expected a mapping of options, such as seq-length: 4096, found nothing"),
        ("# nothing", "run.yaml: expected a mapping of options"),
        ("seed", "run.yaml: expected a mapping of options, such as seq-length: 4096, found a string"),
        ("- seed: 1", "run.yaml: expected a mapping of options, such as seq-length: 4096, found a list"),
        ("seed: 1\n---\nseed: 2", "run.yaml:2: a second document begins"),
        ("seed: &a 1", "run.yaml:1: anchors and aliases"),
        ("input: [a]\nrepeat: *x", "run.yaml:2: anchors and aliases"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "run.yaml:1: anchors and aliases"),
        ("seed: !!int 1", "run.yaml:1: tags (tag:yaml.org,2002:int) are not supported"),
        ("seed: !!python/object/apply:os.system [ls]", "run.yaml:1: tags"),
        ("? [a, b]\n: 1", "run.yaml:1: a key must be a string, not a list or mapping"),
        ("seed: 1\n bad: [", "run.yaml:2: not valid YAML: mapping values are not allowed here"),
        ("seed: 1\ninput: [a", "not valid YAML: "),
        ("seed:\t- 1\n\t- 2", "not valid YAML: "),
        ('output-prefix: "\\0"', "run.yaml:1: output-prefix: contains a NUL byte"),
        ("seed: 1\noutput-prefix: a\0b", "run.yaml:2: character 0x0, which YAML does not allow; remove it"),
        ("output-prefix: a\x07", 'character 0x7, which YAML does not allow; escape it in double quotes: "\\u0007"'),
        ("seed: 1\nsummary: \udcff", 'run.yaml:2: byte 18 is not UTF-8; for byte 0xff of a file name, write "\\udcff"'),
        ('output-prefix: "\\UFFFFFFFF"', "run.yaml:1: not valid YAML: "),
        ("chat-template-kwargs: " + "[" * 999, f"run.yaml:1: nested more than {MAX_DEPTH} levels deep"),
        ("input: " + "a" * MAX_NBYTES, "run.yaml: larger than 1,048,576 bytes"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_understood_is_refused_in_a_line(text: str, said: str, here: Path) -> None:
    assert said in refusal("preprocess", "--config", config(text))


def test_what_is_no_file_is_refused(here: Path) -> None:
    os.mkdir("folder")
    assert refusal("preprocess", "--config", "missing.yaml") == "missing.yaml: No such file or directory"
    assert refusal("preprocess", "--config", "folder") == "folder: Is a directory"
    assert refusal("preprocess", "--config") == "argument --config: expected one argument"
    assert refusal("preprocess", "--config", "--overwrite") == "argument --config: expected one argument"
    file = config("seed: 1")
    assert "--config is given twice" in refusal("preprocess", "--config", file, f"--config={file}")
    assert refusal("pack", "--config", config("source_: x")).startswith("run.yaml:1: unknown option 'source_'")
    assert refusal("verify", "--config", config("shards: x")).endswith(
        "it is not an option, so pass it on the command line, without a flag"
    )
    file = config("input: x\nwatch: y\ntokenizer: t\nseq-length: 8\ncatalog: c\ntokens-per-shard: 9")
    assert refusal("produce", "--config", file) == "run.yaml:2: watch: cannot be combined with input on line 1"


# ---- the reader, searched ----


def plain(value: YamlValue) -> Any:
    """Return a value as YAML's own loader of texts does."""
    if isinstance(value, YamlText):
        return value.text
    if isinstance(value, YamlList):
        return [plain(item) for item in value.items]
    return {key.text: plain(one) for key, one in value.entries}


def read(text: bytes, folder: Path) -> YamlMapping:
    (folder / "f.yaml").write_bytes(text)
    return read_config(str(folder / "f.yaml"))


PARTS = [
    *("a", "seed", "b", ":", ": ", "- ", "-", "\n", "\n  ", "  ", "[", "]", "{", "}", ",", ", ", "&a ", "*a", "!"),
    *("|\n", ">\n", "'", '"', "\\", "\\u00e9", "\\ud800", "#", " # c", "? ", "---\n", "...\n", "%YAML 1.2\n", "!!str "),
    *("\t", "\r", "\x85", "\u2028", "\ufeff", "\0", "é", "<<", "~", "=", "@", "`", "1e3", "no", "0x1", "null"),
]  # fmt: skip
QUIET = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUIET
@given(st.lists(st.sampled_from(PARTS), max_size=40).map("".join).map(str.encode) | st.binary(max_size=60))
@example(b"%YAML 9.9\n---\n{}")
@example(b'"\\U00110000": 1')
@example(b"a: !<tag:%FF> x")
@example(b"\xff\xfea\0:\0")
def test_any_bytes_are_read_as_yaml_reads_them_or_refused(tmp_path: Path, data: bytes) -> None:
    ours = refused = None
    try:
        ours = read(data, tmp_path)
    except FormatError as error:
        refused = str(error)
    if ours is None:
        assert re.match(rf"{re.escape(str(tmp_path))}/f.yaml(:\d+)?: ", str(refused))
        assert str(refused).isprintable()
        return
    assert plain(ours) == yaml.load(data.decode("utf-8-sig"), yaml.BaseLoader)
    assert all(0 < key.line <= len(data.decode().splitlines()) for key, _ in ours.entries)


TEXTS = (
    st.sampled_from(NASTY)
    | st.text(max_size=20)
    | st.text(st.characters(categories=["Cs", "Cc", "Zs", "P"]), max_size=9)
)
KEYS = st.from_regex(r"[a-z]+(-[a-z]+)*", fullmatch=True).filter(lambda key: isinstance(yaml.safe_load(key), str))


@QUIET
@given(st.dictionaries(KEYS, TEXTS | st.booleans() | st.lists(TEXTS, max_size=4), min_size=1), st.booleans())
def test_any_texts_are_written_and_read_again(tmp_path: Path, values: dict[str, Any], ascii_only: bool) -> None:
    text = config_text(values.items(), ascii_only=ascii_only)
    assert text.isascii() or not ascii_only
    assert all(line.isprintable() for line in text.split("\n"))
    texts = {key: str(one).lower() if isinstance(one, bool) else one for key, one in values.items()}
    assert plain(read(text.encode(), tmp_path)) == texts
    assert list(yaml.safe_load(text).values()) == list(values.values())


# JSON has no half surrogate pairs, and joins two adjacent halves.
WHOLE = TEXTS.map(lambda text: text.encode("utf-8", "replace").decode())
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WHOLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WHOLE, inner, max_size=4),
)


@QUIET
@given(st.dictionaries(WHOLE, JSONS, max_size=4), st.booleans())
@example({"a": [[]] * 600}, False)
@example({"k" * 2000: 1}, True)
@example({"a": json.loads("[" * 140 + "]" * 140)}, True)
def test_any_json_is_written_and_read_again(tmp_path: Path, value: dict[str, Any], ascii_only: bool) -> None:
    text = config_text([("key", YamlJson(json.dumps(value)))], ascii_only=ascii_only)
    assert "\n" not in text
    ((_, found),) = read(text.encode(), tmp_path).entries
    as_text = isinstance(found, YamlText) and not found.is_plain
    assert json.loads(found.text if isinstance(found, YamlText) and as_text else to_json(found, "f")) == value


@pytest.mark.parametrize("text", ["1", "-0.5", "1e3", "2GiB", "nan", "1_000"])
def test_numbers_are_written_as_they_were_given(text: str, tmp_path: Path) -> None:
    assert plain(read(config_text([("a", YamlNumber(text))], ascii_only=True).encode(), tmp_path)) == {"a": text}
