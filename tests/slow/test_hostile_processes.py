"""The whole table of hostile paths, partly in processes; two of each command at once; three hundred kills."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter

import pytest
from bad_looks import hurry
from chats import Outcome
from cut_short import failures, killed, race, seconds_of
from hostile import RECIPES, Recipe, World, within
from obstacles import PATIENCE, Cell, judge, prepare, run_cells, table

pytestmark = pytest.mark.slow

WRITING = [Recipe(text) for text in RECIPES if "[" in text or "create" in text]
PROCESSES, ROUNDS, KILLS = 240, 10, 300
# Commands to kill; preprocess also has a separate test.
KILLED = (
    "convert",
    "copy",
    "merge",
    "split",
    "rebuild",
    "inspect",
    "produce",
    "pack",
    "create-raw-index",
    "preprocess",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("hostile"))


def show(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        print(f"\n{line}")


def test_the_whole_table(world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    hurry(monkeypatch)
    total, wrong = 0, []
    for recipe in WRITING:
        count, complaints = run_cells(world, table(world, recipe, all_of_them=True))
        total, wrong = total + count, wrong + complaints
    show(capsys, f"{total} cells, {len(wrong)} complaints")
    assert not wrong, "\n".join(wrong[:100])


def as_process(world: World, cell: Cell) -> Outcome:
    """Run a cell's command in a separate process, in the working folder."""
    try:
        done = subprocess.run(
            [os.fsencode(word) for word in (sys.executable, "-m", "megatron_sft_idx", *cell.argv())],
            cwd=world.here,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=3 * PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(-1, "", "it hangs")
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode(errors="surrogateescape"))


def test_cells_as_processes(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell for recipe in WRITING for cell in table(world, recipe, all_of_them=True)]
    wrong, chosen = [], random.Random(0).sample(cells, PROCESSES)
    for cell in chosen:
        world.calm(cell.recipe), world.old(cell.recipe)
        with within(world.fresh()):
            prepare(world, cell)
            before = world.look()
            outcome = as_process(world, cell)
        wrong += [f"{cell}: {complaint}" for complaint in judge(world, cell, outcome, before, world.look())]
    show(capsys, f"{len(chosen)} of {len(cells)} cells as processes, {len(wrong)} complaints")
    assert not wrong, "\n".join(wrong[:100])


def test_every_step_fails(world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    hurry(monkeypatch)
    total, wrong = 0, []
    for recipe in WRITING:
        count, complaints = failures(world, recipe, range(10_000))
        total, wrong = total + count, wrong + complaints
    show(capsys, f"{total} runs with a failing step, {len(wrong)} complaints")
    assert not wrong, "\n".join(wrong[:100])


def test_two_hundred_races(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    chance, rounds = random.Random(0), Counter[str]()
    wrong: list[str] = []
    for recipe in WRITING:
        seconds = seconds_of(world, recipe)
        flag_sets = recipe.flag_sets()
        for number in range(ROUNDS):
            delay = chance.choice((0, chance.uniform(0, seconds)))
            wrong += race(world, recipe, flag_sets[number % len(flag_sets)], delay)
            rounds[recipe.verb] += 1
    show(capsys, f"{rounds.total()} rounds, {len(wrong)} complaints: {dict(rounds)}")
    assert rounds.total() >= 200
    assert not wrong, "\n".join(wrong[:100])


def test_three_hundred_kills(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    chance, kills = random.Random(0), Counter[str]()
    wrong: list[str] = []
    seconds = {recipe: seconds_of(world, recipe) for recipe in WRITING}
    number = 0
    while kills.total() < KILLS:
        recipe = list(seconds)[number % len(seconds)]
        cut, complaints = killed(
            world, recipe, chance.uniform(0, 1.1 * seconds[recipe]), over_an_older=chance.random() < 0.6
        )
        kills[recipe.verb] += cut
        wrong += complaints
        number += 1
    show(capsys, f"{kills.total()} kills in {number} runs, {len(wrong)} complaints: {dict(kills)}")
    assert not wrong, "\n".join(wrong[:100])
