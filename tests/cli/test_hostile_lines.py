"""Names and data with line ends and terminal codes: one printed line stays one line."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from chats import Outcome, command
from hostile import RECIPES, Recipe, World, verbs, within

from megatron_sft_idx.cli import main
from megatron_sft_idx.cli.streams import standard_streams
from megatron_sft_idx.lines import EscapedLines, get_logger, log_line, on_one_line, print_layout
from megatron_sft_idx.storage.progress import Progress

# All kinds of line ends, colours, cursor codes, a byte that is not UTF-8, reordering and invisible characters.
NOT_UTF8 = "\udcff"
EVIL = "a\nb\r\x1b[2Jc\x0b\x85\u2028\u2029\u202e\u2066\ufeff\udcff\x07\x7f"
CALM = "calm-"
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(main, "build_parser", functools.cache(main.build_parser))
        yield World(tmp_path_factory.mktemp("lines"))


def runs(world: World, text: str, mark: str) -> list[Outcome]:
    """Run a recipe with all names beginning with ``mark``: normally, again, and without its inputs."""
    recipe, here = Recipe(text), world.fresh()
    for name in os.listdir(here):
        of_output = any(name.startswith(f"{slot}.") for slot in recipe.writes)
        os.rename(here / name, here / f"{mark.replace(NOT_UTF8, '') if of_output else mark}{name}")
    # Names of outputs must be UTF-8.
    names = {slot: mark.replace(NOT_UTF8, "") + slot for slot in recipe.writes}
    names |= {slot: mark + slot for slot in recipe.reads}
    missing = names | dict.fromkeys(recipe.reads, f"{mark}missing")
    with within(here):
        done = [command(*recipe.argv(each)) for each in (names, names, missing)]
        done += [command(*recipe.argv(names, "--no-such-option", mark))]
        if "--json" in verbs()[recipe.verb]._option_string_actions and "html" not in text:
            done.append(command(*recipe.argv(names, "--json")))
            json.loads(done[-1].out)
    return done


def require_safe(out: str) -> None:
    for line in out.split("\n"):
        assert not UNSAFE.search(line), repr(line)


@pytest.mark.sample(16)
@pytest.mark.parametrize("text", RECIPES)
def test_names_that_are_hostile_change_no_line_count(world: World, text: str) -> None:
    for hostile, calm in zip(runs(world, text, EVIL), runs(world, text, CALM), strict=True):
        if "the name is not valid UTF-8" in hostile.err:  # for a file that is written next to an input
            require_safe(hostile.err)
            assert hostile.err.count("\n") == 1
            continue
        assert hostile.code == calm.code, hostile.err
        for said, meant in ((hostile.out, calm.out), (hostile.err, calm.err)):
            require_safe(said)
            assert said.count("\n") == meant.count("\n"), f"{said}\n{meant}"


def test_every_command_is_run() -> None:
    assert {Recipe(text).verb for text in RECIPES} == set(verbs())


@pytest.mark.parametrize("verb", verbs())
def test_an_argument_of_each_command_that_is_hostile_is_on_one_line(verb: str) -> None:
    options = [action for action in verbs()[verb]._actions if action.option_strings]
    for action in (each for each in options if each.choices or each.type):
        refused = command(verb, action.option_strings[0], EVIL)
        require_safe(refused.out + refused.err)
        assert refused.err.split("\n")[-2].startswith(f"megatron-sft-idx {verb}: error: "), refused.err


@pytest.mark.parametrize("text", [text for text in RECIPES if "rows.jsonl" in text and "create" not in text])
def test_data_that_are_hostile_change_no_line_count(world: World, text: str) -> None:
    said = []
    for mark in (EVIL.replace(NOT_UTF8, ""), CALM):
        here = world.fresh()
        bad = [{"messages": mark}, {mark: mark}, {"input_ids": [mark], "loss_mask": [1]}, {"input_ids": [1], mark: 1}]
        with open(here / "rows.jsonl", "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in bad)
        with within(here):
            said.append(command(*Recipe(text).argv(), "--on-bad-row", "skip"))
    hostile, calm = said
    assert (hostile.code, calm.code) == (0, 0), hostile.err
    assert hostile.err.count("skipped") == calm.err.count("skipped") > 0
    for line in (hostile.out, hostile.err):
        require_safe(line)
    assert [s.count("\n") for s in hostile[1:]] == [s.count("\n") for s in calm[1:]]


def test_a_command_that_just_prints_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with standard_streams():
        for stream in (sys.stdout, sys.stderr):
            print(EVIL, EVIL, file=stream)
            print(EVIL + "\n", file=stream)
            print(file=stream)
        print_layout("a\n\tb")
    out, err = capsys.readouterr()
    assert err == f"{on_one_line(f'{EVIL} {EVIL}')}\n{on_one_line(EVIL)}␊\n\n"
    assert out == err + "a\n\tb\n"


def test_lines_of_progress_are_escaped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress(EVIL, 9, unit="B", log_interval=1, items="rows") as progress:
        progress.update(9, 1)
    log_line(EVIL)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{on_one_line(EVIL)}: 1 rows, 100.0%")
    assert second == on_one_line(EVIL)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with standard_streams(), Progress(EVIL, 9, unit="B", log_interval=1, items="rows") as progress:
        progress.update(9, 1)
    bar = capsys.readouterr().err
    assert "\r" in bar  # it moves the cursor
    assert on_one_line(EVIL) in bar
    require_safe(bar.replace("\r", ""))


def test_a_notebook_shows_a_bar_where_it_has_widgets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tqdm.auto
    from tqdm import autonotebook

    def shown() -> str:
        with Progress("packing", 9, unit="B", log_interval=1, items="rows") as progress:
            progress.update(9, 1)
        return capsys.readouterr().err

    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert shown().startswith("packing: 1 rows, 100.0%")  # tqdm has no widgets here
    monkeypatch.setattr(autonotebook, "tqdm", type("Widget", (tqdm.auto.tqdm,), {}))
    assert "\r" in shown()


def test_a_handler_of_logging_ends_its_lines() -> None:
    log, stream = get_logger("megatron_sft_idx.test_lines"), io.StringIO()
    for target in (stream, EscapedLines(stream)):
        handler = logging.StreamHandler(target)
        log.addHandler(handler)
        log.error("%s is bad", EVIL)
        log.error("next")
        log.removeHandler(handler)
    assert stream.getvalue() == f"{on_one_line(EVIL)} is bad\nnext\n" * 2


def test_every_logger_of_the_package_escapes() -> None:
    for path in (Path(main.__file__).parents[1]).rglob("*.py"):
        assert path.name == "lines.py" or "logging.getLogger" not in path.read_text(), f"{path}: use lines.get_logger"


def test_a_page_and_a_line_of_a_hostile_file(world: World) -> None:
    here = world.fresh()
    os.rename(here / "rows.jsonl", here / f"{EVIL}rows.jsonl")
    with within(here):
        recipe = Recipe(next(text for text in RECIPES if "--output-shards 2" in text and "rows" in text))
        made = command(*recipe.argv({"rows.jsonl": f"{EVIL}rows.jsonl"})[:-2])
        assert made.code == 0, made.err
        for shown in (["--pack", 0], ["--row", f"{EVIL}rows.jsonl:1"], ["--html", "page.html"], []):
            done = command("inspect", "out", "--tokenizer", "tok", *shown)
            require_safe(done.out + done.err)
            assert done.code == 0, (shown, done)
        page = (here / "page.html").read_text()
    assert not UNSAFE.search(re.sub("[\n\t]", "", page))
    assert "a␊b␍␛[2Jc␋" in page
