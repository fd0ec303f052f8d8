"""A run that fails at any step removes only files that it made itself."""

from __future__ import annotations

import functools
import os
import random
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from chats import SUFFIXES
from cut_short import counted, failures, killed, race, replacing, seconds_of, undocumented
from hostile import OTHERS, RECIPES, Recipe, World, within
from obstacles import OBSTACLES, Cell, attempt, judge, judge_bystanders, judge_words

from megatron_sft_idx.cli import main

WRITING = [text for text in RECIPES if "[" in text or "create" in text]
# Every how many steps of a run one fails; the slow tests take all steps.
EVERY = 7


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(main, "build_parser", functools.cache(main.build_parser))
        yield World(tmp_path_factory.mktemp("failures"))


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", WRITING)
def test_a_disk_that_says_no_at_any_step_destroys_nothing(world: World, text: str) -> None:
    complaints = failures(world, Recipe(text), range(RECIPES.index(text) % EVERY, 10_000, EVERY))[1]
    assert not complaints, "\n".join(complaints[:40])


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", WRITING)
def test_what_appears_meanwhile_is_left_alone(world: World, text: str) -> None:
    """Another program creates something at the destination after the command's check."""
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

                # At the time when the first temporary file is written.
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
            # rebuild keeps the replaced file, which looks damaged, under another name.
            is_kept = recipe.verb == "rebuild" and stranger_is_there(way, f"{name}.damaged", world.root)
            wrong += [] if outcome.code or is_kept else ["exit code 0"]
            wrong += [] if is_kept or stranger_is_there(way, name, world.root) else ["the stranger's is gone"]
            complaints += [f"{cell}, meanwhile: {one}" for one in wrong]
    assert not complaints, "\n".join(complaints[:40])


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", WRITING)
def test_two_at_once_mix_nothing(world: World, text: str) -> None:
    recipe, chance = Recipe(text), random.Random(text)
    seconds = seconds_of(world, recipe)
    wrong = [race(world, recipe, flags, chance.uniform(0, seconds)) for flags in recipe.flag_sets()]
    assert not any(wrong), "\n".join(chain(*wrong))


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", WRITING)
def test_a_killed_run_is_finished_by_the_next(world: World, text: str) -> None:
    recipe, chance = Recipe(text), random.Random(text)
    seconds = seconds_of(world, recipe)
    wrong = [killed(world, recipe, chance.uniform(0, seconds), over_an_older=bool(i % 2))[1] for i in range(2)]
    assert not any(wrong), "\n".join(chain(*wrong))


# --- what a run may remove ---

READING_SHARDS = [text for text in WRITING if {*Recipe(text).reads} & {"s", "c"}]
READING_ROWS = [text for text in WRITING if "<rows.jsonl>" in text]


@pytest.mark.parametrize("text", [*READING_SHARDS, *READING_ROWS])
def test_input_that_is_bad_in_the_end_destroys_no_older_result(world: World, text: str) -> None:
    recipe = Recipe(text)
    world.calm(recipe), world.old(recipe)
    with within(world.fresh()):
        if text in READING_SHARDS:
            with open(f"{recipe.reads[0]}.bin", "r+b") as tokens:
                tokens.seek(-1, os.SEEK_END)
                tokens.write(b"\xff")
        else:
            with open("rows.jsonl", "a") as rows:
                rows.write('{"messages": 5}\n{')
        if recipe.verb != "produce":
            world.put_old(recipe)
        before = world.look()
        outcome = attempt(recipe.argv(None, *replacing(recipe)))
    after = world.look()
    if outcome.code == 0:  # a command that does not verify checksums of its source
        return
    bad = f"{recipe.reads[0]}.bin" if text in READING_SHARDS else "rows.jsonl"
    assert list(judge_words(Cell(recipe, (), name=bad), outcome)) == []
    assert list(judge_bystanders(before, after, may_go=set())) == []
    assert undocumented(world, recipe, after.keys() - before.keys()) == []


PREPROCESS = Recipe(next(text for text in RECIPES if text.startswith("preprocess") and "--keep-corpus" in text))
FORGETFUL = Recipe(PREPROCESS.text.replace(" --keep-corpus", ""))


@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
@pytest.mark.parametrize("missing", ["nothing", "the shard"])
def test_a_corpus_that_was_to_be_kept_is_kept(world: World, flags: tuple[str, ...], missing: str) -> None:
    """The next run keeps it too, without the option."""
    with within(world.fresh()):
        assert attempt(PREPROCESS.argv()).code == 0
        if missing == "the shard":
            for suffix in SUFFIXES:
                os.unlink(f"out{suffix}")
        os.unlink("said.json")
        before = world.look()
        outcome = attempt(FORGETFUL.argv(None, *flags))
    kept = {name: entry for name, entry in before.items() if ".unpacked" in name or "out" not in name}
    assert list(judge_bystanders(kept, world.look(), may_go=set())) == []
    assert list(judge_words(Cell(FORGETFUL, flags), outcome)) == []


@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
@pytest.mark.parametrize("recipe", [PREPROCESS, FORGETFUL], ids=["keeping", "forgetful"])
def test_a_shard_of_others_where_the_corpus_would_be_is_left_alone(
    world: World, recipe: Recipe, flags: tuple[str, ...]
) -> None:
    with within(world.fresh()):
        for suffix in SUFFIXES:
            shutil.copy(f"t{suffix}", f"out.unpacked{suffix}")
        before = world.look()
        outcome = attempt(recipe.argv(None, *flags))
    asked = recipe is PREPROCESS and flags == ("--overwrite",)
    may_go = {f"here/out.unpacked{suffix}" for suffix in SUFFIXES} if asked else set()
    assert list(judge_bystanders(before, world.look(), may_go=may_go)) == []
    assert list(judge_words(Cell(recipe, flags), outcome)) == []


def test_a_catalog_that_is_refused_stays_as_it_was(world: World) -> None:
    recipe = Recipe(next(text for text in RECIPES if text.startswith("produce --input")))
    with within(world.fresh()):
        assert attempt(recipe.argv()).code == 0
        os.mkdir("live/_producer.building")
        Path("live/_producer.building/mine.txt").write_text("mine")
        Path("live/notes.txt").write_text("mine as well")
        before = world.look()
        outcome = attempt([*recipe.argv(OTHERS)])
    assert outcome.code == 1
    assert list(judge_bystanders(before, world.look(), may_go=set())) == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", WRITING)
def test_temporary_names_that_are_all_one_file_are_not_written_through(world: World, text: str) -> None:
    recipe = Recipe(text)
    calm = world.calm(recipe)
    with within(world.fresh()):
        for pattern, slot in calm.touched.items():
            name = pattern.format(slot.rstrip("/"))
            inside = any(other.startswith(f"{pattern}/") for other in calm.touched)
            if pattern not in calm.made and not inside and not os.path.lexists(name):
                os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
                os.link("notes.txt", name)
        before = world.look()
        name = "rows.idx" if recipe.verb == "create-raw-index" else "notes.txt"
        cell = Cell(recipe, replacing(recipe), "", None, "hard links of one file", name)
        outcome = attempt(cell.argv())
        assert list(judge(world, cell, outcome, before, world.look())) == []


def stranger_is_there(way: str, name: str, root: Path) -> bool:
    path = root / "here" / name
    if way == "file":
        return path.is_file() and not path.is_symlink() and path.read_text() == "a stranger's\n"
    if way == "short file":
        return path.is_file() and path.read_text() == "x"
    if way == "folder":
        return (path / "keep.txt").exists()
    if way == "hard link":
        return path.exists() and path.samefile(root / "here/notes.txt")
    if "link" in way:
        return path.is_symlink()
    return os.path.lexists(path) and not path.is_file() and not path.is_dir()
