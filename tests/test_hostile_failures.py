"""A run that fails on its way, at any step, removes nothing but what it made itself."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cut_short import counted, judge_interrupted, replacing, undocumented
from hostile import (
    OBSTACLES,
    RECIPES,
    Cell,
    Outcome,
    Recipe,
    World,
    attempt,
    judge_bystanders,
    judge_words,
    within,
)

from megatron_sft_idx.cli import main

WRITING = [text for text in RECIPES if "[" in text or "create" in text]
# Of the steps of a run, in turn; all of them in the slow tests.
EVERY = int(os.environ.get("HOSTILE_EVERY", "7"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(main, "build_parser", functools.cache(main.build_parser))
        yield World(tmp_path_factory.mktemp("failures"))


def says_no(path: str | None) -> None:
    raise OSError(errno.EIO, "Input/output error", path)


@pytest.mark.parametrize("text", WRITING)
def test_a_disk_that_says_no_at_any_step_destroys_nothing(world: World, text: str) -> None:
    recipe = Recipe(text)
    complaints: list[str] = []
    for step in range(RECIPES.index(text) % EVERY, 10_000, EVERY):
        outcome, steps = failing(world, recipe, step)
        if len(steps) <= step:
            break
        complaints += [
            f"{text} over an older result, failing at step {step}, {steps[step]}: {wrong}"
            for wrong in judge_interrupted(world, recipe, outcome, steps[step])
        ]
    assert not complaints, "\n".join(complaints[:40])


def failing(world: World, recipe: Recipe, step: int) -> tuple[Outcome, list[str]]:
    """Run a recipe over an older result, with one step failing; what it said, and the steps it took."""
    world.old(recipe), world.calm(recipe)
    with within(world.fresh()):
        if "lost" not in recipe.writes and recipe.verb != "produce":
            world.put_old(recipe)
        with counted(step, says_no) as steps:
            outcome = attempt(recipe.argv(None, *replacing(recipe)))
    return outcome, steps


@pytest.mark.parametrize("text", WRITING)
def test_what_appears_meanwhile_is_left_alone(world: World, text: str) -> None:
    """A stranger makes something at the destination after the command has looked there."""
    recipe = Recipe(text)
    calm, _ = world.calm(recipe), world.old(recipe)
    complaints: list[str] = []
    finals = [pattern.format(slot.rstrip("/")) for pattern, (slot, _) in calm.made.items()]
    for i, name in enumerate(finals):
        for way in list(OBSTACLES)[i % 2 :: 2]:
            cell = Cell(recipe, replacing(recipe), "", None, way, name)
            with within(world.fresh()):
                planted = None

                def plant(_: str | None, path: str = name, way: str = way) -> None:
                    nonlocal planted
                    if not os.path.lexists(path) and os.path.isdir(os.path.dirname(path) or "."):
                        OBSTACLES[way](path)
                        planted = path

                # When the first temporary file is written.
                with counted(3, plant):
                    outcome = attempt(cell.argv())
                if planted is None:
                    continue
                after = world.look()
            own = f"here/{name}"
            new = [
                path for path in after.keys() - world.pristine.keys() if path != own and not path.startswith(f"{own}/")
            ]
            wrong = [*judge_words(cell, outcome), *judge_bystanders(world.pristine, after, may_go=set())]
            wrong += [f"left {left}" for left in [undocumented(world, recipe, new)] if left]
            wrong += [] if outcome.code else ["exit code 0"]
            wrong += [] if stranger_is_there(way, name, world.root) else ["the stranger's is gone"]
            complaints += [f"{cell}, meanwhile: {one}" for one in wrong]
    assert not complaints, "\n".join(complaints[:40])


def stranger_is_there(way: str, name: str, root: Path) -> bool:
    path = root / "here" / name
    if way == "file":
        return path.is_file() and not path.is_symlink() and path.read_text() == "a stranger's\n"
    if way == "folder":
        return (path / "keep.txt").exists()
    if way == "hard link":
        return path.exists() and path.samefile(root / "here/notes.txt")
    if "link" in way:
        return path.is_symlink()
    return os.path.lexists(path) and not path.is_file() and not path.is_dir()
