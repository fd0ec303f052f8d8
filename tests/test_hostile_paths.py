"""Whatever lies where a command writes, it is refused with a sentence or done, and what is not ours stays as it was."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import hostile
import pytest
from hostile import RECIPES, REMOTE, WORDS, Recipe, World, run_cells, table, verbs

from megatron_sft_idx.cli import main


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        # Durability is not judged here, and the parser is the same for every command.
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(main, "build_parser", functools.cache(main.build_parser))
        yield World(tmp_path_factory.mktemp("hostile"))


def takes_paths(action: argparse.Action) -> bool:
    """Whether the value is text that may be a path, rather than a number, a choice or a switch."""
    if action.choices is not None or action.nargs == 0 or action.dest in WORDS | REMOTE:
        return False
    try:
        return action.type is None or isinstance(action.type("name"), str)  # type: ignore[operator]
    except (argparse.ArgumentTypeError, ValueError):
        return False


@pytest.mark.parametrize("verb", verbs())
def test_every_path_that_a_verb_takes_is_marked_in_a_recipe(verb: str, tmp_path: Path) -> None:
    """A new verb, or a new option that takes a path, is in the table once it has a recipe; it is not left out."""
    marked: dict[str, set[str]] = {}
    for recipe in (Recipe(text) for text in RECIPES if text.split()[0] == verb):
        with hostile.within(tmp_path):
            parsed = vars(main.build_parser().parse_args(recipe.argv()))
        for dest, value in parsed.items():
            values = value if isinstance(value, list) else [value]
            marked.setdefault(dest, set()).update(text for text in (*recipe.reads, *recipe.writes) if text in values)
    paths = [action.dest for action in verbs()[verb]._actions if takes_paths(action)]
    assert paths, "a verb without paths"
    missing = [dest for dest in paths if not marked.get(dest)]
    assert not missing, f"{verb}: mark {missing} in a recipe in hostile.py, or name it in WORDS if it is no path"


# Measuring takes seconds, and writes nothing.
@pytest.mark.parametrize("text", [text for text in RECIPES if not text.startswith("bench-read")])
def test_nothing_of_a_stranger_is_changed(world: World, text: str) -> None:
    count, complaints = run_cells(world, table(world, Recipe(text), all_of_them=False))
    assert not complaints, f"{len(complaints)} complaints in {count} cells\n" + "\n".join(complaints[:40])
