"""Usage errors have three lines: required arguments, a reference to --help, and a suggestion."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import re
import sys
from pathlib import Path

import pytest
from chats import command

from megatron_sft_idx.cli.habits import _COMMANDS, HABITS
from megatron_sft_idx.cli.main import build_parser


@functools.cache
def verbs() -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    return dict(action.choices)


def complaint(verb: str, *words: str) -> str:
    """Check the first lines of a usage error and return the last one."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as refused:
        verbs()[verb].parse_args(list(words))
    assert refused.value.code == 2
    usage, more, error = said.getvalue().splitlines()
    assert usage.startswith(f"usage: megatron-sft-idx {verb} ")
    assert usage.endswith("[options]")
    assert more == f"       megatron-sft-idx {verb} --help lists all options"
    assert len(usage) < 160
    start = f"megatron-sft-idx {verb}: error: "
    assert error.startswith(start)
    return error.removeprefix(start)


def options(verb: str) -> set[str]:
    return {option for option in verbs()[verb]._option_string_actions if option.startswith("--")}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("preprocess --toknizer x", "unknown option --toknizer; did you mean --tokenizer?"),
        ("preprocess --inp x", "unknown option --inp; did you mean --input?"),
        ("preprocess --output x", "unknown option --output: pass the path that the five files share with --out"),
        ("preprocess --outp x", "unknown option --outp; did you mean --output-prefix or --output-shards?"),
        ("preprocess --output_prefix x", "unknown option --output_prefix; did you mean --output-prefix?"),
        ("preprocess --Seq-Length=8", "unknown option --Seq-Length; did you mean --seq-length?"),
        ("preprocess --qqq", "unknown option --qqq"),
        ("preprocess --json-keys text", "set the name of the field with the turns: --fields messages=NAME"),
        ("preprocess --turns whole", "choose what happens to removed reasoning with --earlier-reasoning"),
        ("preprocess --partitions 4", "write several shards with --output-shards N"),
        ("produce --partitions 4", "--tokens-per-shard N sets the size of a shard"),
        ("preprocess --num-workers 4", "set it with --workers N"),
        ("preprocess --keep-sequential-samples", "--packing sequential, or --packing none"),
        ("preprocess --vocab-file v --merge-file m", "unknown option --vocab-file: pass the folder of the tokenizer"),
        ("preprocess --merge-file m", "with --tokenizer PATH"),
        ("preprocess --tokenizer-type SFTTokenizer", "argument --tokenizer-type: 'SFTTokenizer': leave it out; "),
        ("preprocess --tokenizer-type=GPT2BPETokenizer", "its chat template decide"),
        ("preprocess --split-sentences", "leave it out; text is tokenised unchanged"),
        ("preprocess --dataset-impl mmap", "leave it out; there is one format"),
        ("preprocess --lang english", "leave it out"),
        ("preprocess --find-optimal-num-workers", "leave it out, or set the number of processes with --workers N"),
        ("preprocess --max_seq_length 8", "set the number of token positions in a pack with --seq-length N"),
        ("preprocess --cutoff-len 8", "with --seq-length N"),
        ("preprocess --model ./Qwen3-8B", "with --tokenizer PATH"),
        ("preprocess --dataset x", "with --input PATH..."),
        ("pack x --capacity 8", "with --seq-length N"),
        ("rebuild x --eos-id 8", "pass the id with --eod-id"),
        ("pack x --allow-loss", "--lossy leaves out what the result has no place for"),
        ("rebuild --input x", "pass it without a flag, as in megatron-sft-idx rebuild PREFIX..."),
        ("rebuild --input-prefix x", "pass it without a flag, as in megatron-sft-idx rebuild PREFIX..."),
        ("merge --input x --output-prefix y", "pass it without a flag, as in megatron-sft-idx merge SOURCE..."),
        ("convert x --output y --to npy", "pass it without a flag, as in megatron-sft-idx convert SRC... DST"),
        ("preprocess --resume", "run the same command again; it continues the interrupted run"),
        ("preprocess --packing sequental", "argument --packing: 'sequental', choose one of auto, "),
        ("preprocess --packing sequental", "; did you mean sequential?"),
        ("convert x y --to parket", "; did you mean parquet?"),
        ("preprocess", "the following arguments are required: --input, --tokenizer/--tokenizer-model, --seq-length"),
        ("preprocess a --input b --tokenizer t --seq-length 8", "unexpected argument 'a'; pass input with --input"),
        ("inspect a b c", "unexpected argument 'b'; quote a value that contains spaces"),
        ("inspect x --find -foo", "unknown option -foo; if -foo is the value of --find, write --find=-foo"),
        ("preprocess --no-overwrite", "unknown option --no-overwrite; did you mean --overwrite?"),
        ("split x", "the following arguments are required: --output-prefix"),
        ("split x --output-prefix y", "one of the arguments --packs --nbytes --shards is required"),
    ],
)  # fmt: skip
def test_what_was_meant_is_said(line: str, said: str) -> None:
    verb, *words = line.split()
    assert said in complaint(verb, *words)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("preproces --input x", "unknown command 'preproces'; did you mean preprocess?"),
        ("tokenize", "unknown command 'tokenize'; did you mean preprocess?"),
        ("rebuild_index --input x", "unknown command 'rebuild_index'; did you mean rebuild?"),
        ("merge-datasets", "did you mean merge?"),
        ("xyzzy", "unknown command 'xyzzy', choose one of preprocess, pack, "),
        ("--input x preprocess", "unknown option --input: options must come after the command"),
        ("--config run.yaml preprocess", "unknown option --config: options must come after the command"),
        ("--verison", "unknown option --verison; did you mean --version?"),
        ("", "the following arguments are required: <command>"),
    ],
)
def test_the_program_itself_says_what_was_meant(line: str, said: str) -> None:
    refused = command(*line.split())
    usage, more, error = refused.err.splitlines()
    assert (refused.code, refused.out) == (2, "")
    assert usage == "usage: megatron-sft-idx <command> [options]"
    assert more == "       megatron-sft-idx --help lists all commands"
    assert error.startswith("megatron-sft-idx: error: ")
    assert said in error


@pytest.mark.parametrize("verb", verbs())
def test_every_line_of_the_table_is_given_where_it_applies(verb: str) -> None:
    said: dict[str, str] = {}
    for habit in HABITS:
        if habit.needs and habit.needs not in options(verb):
            continue
        named = set(re.findall(r"--[a-z][a-z-]*[a-z]", habit.advice))
        assert named <= options(verb), habit
        for name in habit.names:
            if f"--{name}" not in options(verb):
                said.setdefault(name, complaint(verb, f"--{name}", "x"))
                dashed = f"--{name.replace('-', '_')}"
                assert complaint(verb, f"{dashed}=x") == said[name].replace(f"--{name}", dashed, 1)
        shown = [name for name in habit.names if habit.advice in said.get(name, "")]
        assert shown or not set(habit.names) & said.keys() or verb not in ("preprocess", "produce"), habit


def test_every_line_of_the_table_applies_somewhere() -> None:
    every = set().union(*map(options, verbs()))
    assert {habit.needs for habit in HABITS} - {""} <= every
    assert _COMMANDS.keys() <= verbs().keys()
    assert not {name for names in _COMMANDS.values() for name in names.split()} & verbs().keys()


@pytest.mark.parametrize("verb", verbs())
def test_a_typo_is_told_and_never_completed(verb: str) -> None:
    every, arguments = options(verb), [name for habit in HABITS for name in habit.names]
    for option in sorted(every):
        wrong = {option[:at] + option[at + 1 :] for at in range(3, len(option))} if len(option) > 7 else set()
        for typed in sorted(wrong - every)[:3]:
            if typed[2:] not in arguments:
                said = complaint(verb, f"{typed}=x")
                assert "did you mean" in said or "pass it without a flag" in said, (typed, said)
        assert option[:-1] in every or complaint(verb, option[:-1]).startswith(f"unknown option {option[:-1]}")


def test_the_program_has_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shown in (("sft-idx", "sft-idx"), ("x/sft-idx", "sft-idx"), ("other", "megatron-sft-idx")):
        monkeypatch.setattr(sys, "argv", [name])
        refused = command("preprocess")
        assert refused.err.startswith(f"usage: {shown} preprocess ")
        assert f"\n{shown} preprocess: error: " in refused.err
        assert command("verify", "no/such/shard").err.startswith(f"{shown}: error: ")
    scripts = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'sft-idx = "megatron_sft_idx.cli.main:main"' in scripts.splitlines()
