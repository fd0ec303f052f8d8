"""With any obstacle at its output, a command succeeds or fails with a sentence, and never changes unrelated files."""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import hostile
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bad_looks import hurry
from cut_short import replacing
from hostile import RECIPES, TO_A_BUCKET, WORDS, Recipe, World, verbs, within
from obstacles import OBSTACLES, attempt, judge_bystanders, run_cells, table

from megatron_sft_idx.cli import main


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make waits short: an empty file in a catalog may be a torn document, which is read again after a pause."""
    hurry(monkeypatch)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        # Durability is not tested here, and the parser is the same for every command.
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(main, "build_parser", functools.cache(main.build_parser))
        yield World(tmp_path_factory.mktemp("hostile"))


def takes_paths(action: argparse.Action) -> bool:
    """Return whether the value is text that may be a path, and not a number, a choice or a switch."""
    if action.choices is not None or action.nargs == 0 or action.dest in WORDS:
        return False
    try:
        return action.type is None or isinstance(action.type("name"), str)  # type: ignore[operator]
    except (argparse.ArgumentTypeError, ValueError):
        return False


@pytest.mark.parametrize("verb", verbs())
def test_every_path_that_a_command_takes_is_marked_in_a_recipe(verb: str, tmp_path: Path) -> None:
    """This ensures that new commands, and new options for paths, get a recipe."""
    marked: dict[str, set[str]] = {}
    for recipe in (Recipe(text) for text in (*RECIPES, *TO_A_BUCKET) if text.split()[0] == verb):
        with hostile.within(tmp_path):
            parsed = vars(main.build_parser().parse_args(recipe.argv()))
        for dest, value in parsed.items():
            values = value if isinstance(value, list) else [value]
            marked.setdefault(dest, set()).update(text for text in (*recipe.reads, *recipe.writes) if text in values)
    paths = [action.dest for action in verbs()[verb]._actions if takes_paths(action)]
    assert paths, "a command without paths"
    missing = [dest for dest in paths if not marked.get(dest)]
    assert not missing, f"{verb}: mark {missing} in a recipe in hostile.py, or name it in WORDS if it is no path"


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", RECIPES)
def test_nothing_of_a_stranger_is_changed(world: World, text: str) -> None:
    count, complaints = run_cells(world, table(world, Recipe(text), all_of_them=False))
    assert not complaints, f"{len(complaints)} complaints in {count} cells\n" + "\n".join(complaints[:40])


def stock_dataset(path: str) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"stock{suffix}", f"{path}{suffix}")


# Files of other programs with the same format: they open, but were not written by the command.
LOOKALIKES = {
    "npy": lambda path: np.save(open(path, "wb"), np.arange(9)),  # noqa: SIM115
    "npy of objects": lambda path: np.save(open(path, "wb"), np.array([{"mine": 1}, 2], object)),  # noqa: SIM115
    "parquet": lambda path: pq.write_table(pa.table({"mine": [1, 2]}), path),
    "json": lambda path: Path(path).write_text(json.dumps({"prefix": "mine", "capacity": 1})),
    "html": lambda path: Path(path).write_text("<!doctype html><title>mine</title>"),
    "pickle": lambda path: Path(path).write_bytes(pickle.dumps([1, 2, "mine"])),
    "a stock dataset": stock_dataset,
    "its .idx": lambda path: shutil.copy("stock.idx", f"{path}.idx"),
    "its part": lambda path: stock_dataset(f"{path}-00000-of-00002"),
    "a journal of others": lambda path: Path(f"{path}.journal").write_text('{"journal": "mine"}'),
    "another version": lambda path: Path(f"{path}.bin").write_bytes(b"SFTIDX"),
    "a folder of chunks": lambda path: (
        os.mkdir(path),
        Path(path, "chunk_00000.jsonl").write_text('{"text": "mine"}\n'),
    ),
    "a folder of arrays": lambda path: (os.mkdir(path), np.save(f"{path}/input_ids.npy", np.arange(3))),
    "a catalog of others": lambda path: (os.mkdir(path), Path(path, "_producer.json").write_text('{"mine": 1}')),
}
WRITING = [text for text in RECIPES if "[" in text and "[lost]" not in text]


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", WRITING)
def test_what_only_looks_like_an_older_result_is_not_replaced(world: World, text: str) -> None:
    recipe = Recipe(text)
    complaints = []
    for slot in recipe.writes:
        for what, make in LOOKALIKES.items():
            with within(world.fresh()):
                make(slot.rstrip("/"))
                before = world.look()
                outcome = attempt(recipe.argv(None, *replacing(recipe)))
            wrong = [*judge_bystanders(before, world.look(), may_go=set())]
            wrong += [] if outcome.code in (0, 1, 2) and "[Errno" not in outcome.err else [str(outcome)]
            complaints += [f"{what} at {slot}: {one}" for one in wrong]
    assert not complaints, "\n".join(complaints)


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", [text for text in WRITING if not text.startswith("produce")])
def test_a_stranger_in_an_older_result_is_not_replaced_with_it(world: World, text: str) -> None:
    """A link, pipe or folder at one of its names, or an additional file in a folder, is an error. All files stay."""
    recipe = Recipe(text)
    old = {name for name in world.old(recipe) if "." in name or "/" in name}
    folders = {name for name in world.old(recipe) if any(other.startswith(f"{name}/") for other in world.old(recipe))}
    places = [
        (name, way) for name in sorted(old) for way in OBSTACLES if way not in ("file", "short file", "hard link")
    ]
    places += [(f"{name}/{more}", "file") for name in sorted(folders) for more in ("mine.txt", ".git", "chunk_9.jsonl")]
    complaints = []
    for name, way in places:
        if recipe.verb == "copy" and way == "file":
            continue  # it replaces shards, not their folder
        with within(world.fresh()):
            world.put_old(recipe)
            if os.path.lexists(name):
                os.unlink(name)
            OBSTACLES[way](name)
            before = world.look()
            outcome = attempt(recipe.argv(None, "--overwrite"))
        wrong = [*judge_bystanders(before, world.look(), may_go=set())]
        wrong += [] if outcome.code in (1, 2) and os.path.basename(name) in outcome.err else [str(outcome)]
        complaints += [f"{way} at {name}: {one}" for one in wrong]
    assert not complaints, "\n".join(complaints[:40])


@pytest.mark.sample(12)
@pytest.mark.parametrize("text", WRITING)
def test_another_name_of_an_input_is_known_for_it(world: World, text: str) -> None:
    """This includes the result and the files that a run always writes.

    It is found by inode; the error has both names.
    """
    recipe = Recipe(text)
    inputs = [name for read in recipe.reads for name in (read, f"{read}.bin") if Path(world.fresh(), name).is_file()]
    fixed = {"{}/_inputs.jsonl", "{}/_producer.json", "{}/_END.json"}
    made = world.calm(recipe).made.items()
    names = [
        name for name, (_, what) in made if name in fixed or (what and what[0] == stat.S_IFREG and "/" not in name)
    ]
    unknown = []
    for name, slot in ((name, world.calm(recipe).made[name][0].rstrip("/")) for name in names):
        for read in inputs:
            with within(world.fresh()):
                os.makedirs(os.path.dirname(name.format(slot)) or ".", exist_ok=True)
                os.link(read, name.format(slot))
                outcome = attempt(recipe.argv(None, *replacing(recipe)))
            # Anything at the name of a column that is not a column is never replaced.
            said = ("used as both", "which is never replaced", "but is not a column")[
                : 3 if name.endswith(".col") else 1
            ]
            if outcome.code != 1 or not any(words in outcome.err for words in said):
                unknown.append(f"{name.format(slot)} is {read}: {outcome}")
    assert not unknown, "\n".join(unknown)
    assert names or "/" in recipe.writes[0] or any(f"to {form}" in text for form in ("memmap", "jsonl", "save_to_disk"))


@pytest.mark.parametrize("text", [text for text in WRITING if text.startswith("produce")])
def test_a_file_of_others_without_a_line_is_no_list_of_input(world: World, text: str) -> None:
    with within(world.fresh()):
        os.mkdir("live")
        Path("live/_inputs.jsonl").write_text("mine")
        outcome = attempt(Recipe(text).argv())
        assert (outcome.code, Path("live/_inputs.jsonl").read_text()) == (1, "mine")
        assert "live/_inputs.jsonl: this file was not written by a producer" in outcome.err
