"""Hostile things in the way of commands, as cells of a table, and what a run may have changed.

``python tests/obstacles.py FOLDER [VERB...]`` runs the whole table in a new folder and shows what is wrong.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from chats import SUFFIXES, Outcome, command
from hostile import CONTAINERS, OTHERS, RECIPES, Calm, Entry, Recipe, World, what, within

from megatron_sft_idx.layout import ShardPaths

# Names that programs of this package have used, and that a calm run does not show.
KNOWN = (
    *("{}.journal", "{}.failed", "{}.unpacked.bin", "{}.bin.tmp", "{}.bin.copy", "{}.idx.damaged"),
    *(
        "{}.parts",
        "{}.tmp",
        ".{}.tmp",
        ".{}.old",
        "{}.building",
        "{}.building/notes.txt",
        "{}.building/build.json",
        "{}/_work",
        "{}/_producer.journal",
        "{}/_producer.building/notes.txt",
        "{}.lock",
        "{}.done",
        "{}.seq.idx.failed",
        "{}.notes.col",
        "{}.notes.col.tmp",
    ),
)
PATIENCE = 20


def _socket(path: str) -> None:
    folder, name = os.path.split(path)
    with within(Path(folder or ".")), socket.socket(socket.AF_UNIX) as made:
        made.bind(name)


def _folder(path: str) -> None:
    os.mkdir(path)
    Path(path, "keep.txt").write_text("in a stranger's folder\n")


def _file(path: str) -> None:
    Path(path).write_text("a stranger's\n")


def _device(path: str) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


OBSTACLES: dict[str, Callable[[str], object]] = {
    "file": _file,
    "short file": lambda path: Path(path).write_text("x"),  # which has no line's end
    "folder": _folder,
    "link to a file": lambda path: os.symlink(os.path.abspath("notes.txt"), path),
    "link to a folder": lambda path: os.symlink(os.path.abspath("project"), path),
    "dangling link": lambda path: os.symlink(os.path.abspath("nowhere"), path),
    "looping link": lambda path: os.symlink(os.path.basename(path), path),
    "hard link": lambda path: os.link("notes.txt", path),
    "FIFO": os.mkfifo,
    "socket": _socket,
    **({"device": _device} if os.geteuid() == 0 else {}),
}
# May be taken, or left alone.
EMPTY: dict[str, Callable[[str], object]] = {"empty file": lambda path: Path(path).touch(), "empty folder": os.mkdir}
LONG = "n" * 250
NOT_UTF8 = os.fsdecode(b"caf\xe9")
# What is no name of a file; a prefix needs a name too.
FOLDERS = ("", ".", "..", "sub/..")
SPELLINGS = (
    *FOLDERS,
    "sub",
    "sub/",
    "project",
    "sub/../x",
    "./x",
    "x/",
    "sub/../../here/x",
    "no/such/x",
    "notes.txt/x",
)
SPELLINGS += (LONG, NOT_UTF8, "x\ny", "~", "-", "*")


@dataclass(frozen=True)
class Cell:
    """One command in one situation.

    Attributes:
        slot: the marked place that is changed.
        value: what it is set to; None where it stays.
        way: kind of what is in the way.
        name: where that is.
    """

    recipe: Recipe
    flags: tuple[str, ...]
    slot: str = ""
    value: str | None = None
    way: str = ""
    name: str = ""
    changes: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        at = f" with {self.way} at {self.name!r}" if self.way else ""
        return f"{' '.join(map(_shown, self.argv()))}{at}"

    def argv(self) -> list[str]:
        changes = dict(self.changes)
        if self.value is not None:
            changes[self.slot] = self.value
        return self.recipe.argv(changes, *self.flags)


def _shown(word: str) -> str:
    return word if re.fullmatch(r"[\w./=:-]+", word) else repr(word)


def in_the_way(recipe: Recipe, calm: Calm, *, all_of_them: bool) -> Iterator[Cell]:
    """Obstacles at the destinations, and at each of the names that the command touches or others have used.

    Not ``all_of_them``: half of the ways at each name, and each with one set of flags, in turn.
    """
    flag_sets, ways = recipe.flag_sets(), list(OBSTACLES | EMPTY)
    names = dict(calm.touched)
    for slot in recipe.writes:
        names |= {f"{slot} {known}": slot for known in ("{}", *KNOWN) if not slot.endswith("/")}
    for i, (pattern, slot) in enumerate(names.items()):
        name = pattern.rpartition(" ")[2].format(slot.rstrip("/"))
        for j, way in enumerate(ways):
            if all_of_them:
                yield from (Cell(recipe, flags, slot, None, way, name) for flags in flag_sets)
            elif (i + j) % (2 if pattern in calm.touched else 6) == 0:
                yield Cell(recipe, flag_sets[(i + j // 2) % len(flag_sets)], slot, None, way, name)


def spelled(recipe: Recipe, *, all_of_them: bool) -> Iterator[Cell]:
    """Destinations that are no plain names."""
    flag_sets = recipe.flag_sets()
    for slot in recipe.writes:
        for i, value in enumerate(SPELLINGS):
            if recipe.verb == "rebuild" and value in (*FOLDERS, "*"):
                continue  # it takes folders and globs, which name the shard in the world
            for flags in flag_sets if all_of_them else [flag_sets[i % len(flag_sets)]]:
                yield Cell(recipe, flags, slot, value)


def the_input_itself(recipe: Recipe, calm: Calm) -> Iterator[Cell]:
    """Destinations that are, or touch, what the command reads or writes elsewhere."""
    inside = {"tok": ("tok/tokenizer.json",), "incoming": ("incoming/0.jsonl", "incoming/x", "incoming/_END")}
    for flags in recipe.flag_sets():
        for slot in recipe.writes:
            values = []
            for read in recipe.reads:
                values += [read, f"sub/../{read}", f"../here/{read}", *inside.get(read, ())]
                values += [f"{read}{suffix}" for suffix in SUFFIXES if read in OTHERS and "." not in read]
            others = {name.format(of.rstrip("/")) for name, of in calm.touched.items() if of and of != slot}
            for value in [*values, *sorted(others | set(recipe.writes) - {slot})]:
                yield Cell(recipe, flags, slot, value)
        # The input lies where the command would write, or another name of it does.
        for pattern, slot in calm.touched.items():
            name = pattern.format(slot.rstrip("/"))
            for read in recipe.reads:
                if read.endswith(".jsonl") and slot:
                    yield Cell(recipe, flags, "", None, f"{read} itself", name, ((read, name),))
                    yield Cell(recipe, flags, "", None, f"another name of {read}", name)


def again(recipe: Recipe, calm: Calm) -> Iterator[Cell]:
    """The destination holds what the same command made of other input."""
    for flags in recipe.flag_sets():
        yield Cell(recipe, flags, "", None, OLD)


OLD = "an older result"


def prepare(world: World, cell: Cell) -> None:
    """Put into the working folder what the cell says is in the way."""
    if not cell.way:
        return
    if cell.way == OLD:
        world.put_old(cell.recipe)
        return
    if folder := os.path.dirname(cell.name):
        os.makedirs(folder, exist_ok=True)
    if cell.way.endswith(" itself"):
        os.rename(cell.way.removesuffix(" itself"), cell.name)
    elif cell.way.startswith("another name of "):
        os.link(cell.way.removeprefix("another name of "), cell.name)
    elif not os.path.lexists(cell.name):  # what a world holds, such as the other files of a lost .idx, stays
        (OBSTACLES | EMPTY)[cell.way](cell.name)


class _Hangs(BaseException):
    pass


def _ring(*_: Any) -> None:
    raise _Hangs


def attempt(argv: list[str]) -> Outcome:
    """Run a command; one that hangs or raises has a code that no cell may have."""
    before = signal.signal(signal.SIGALRM, _ring)
    signal.alarm(PATIENCE)
    try:
        return command(*argv)
    except _Hangs:
        return Outcome(-1, "", "it hangs")
    except Exception as error:  # a traceback, to whoever ran the command
        return Outcome(-2, "", f"Traceback: {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_cell(world: World, cell: Cell) -> list[str]:
    """Run one cell; what is wrong with how it went."""
    here = world.fresh()
    with within(here):
        prepare(world, cell)
        before = world.look()
        outcome = attempt(cell.argv())
    return [f"{cell}: {wrong}" for wrong in judge(world, cell, outcome, before, world.look())]


def judge(
    world: World, cell: Cell, outcome: Outcome, before: dict[str, Entry], after: dict[str, Entry]
) -> Iterator[str]:
    """Refused with a sentence, or done; and nothing else has changed."""
    yield from judge_words(cell, outcome)
    done, expected = outcome.code == 0, results(world, cell)
    may_go = _replaceable(world, cell) if done else set()
    kept = f"here/{cell.name}.damaged"
    if cell.recipe.verb == "rebuild" and what(after.get(kept, (0, 0, 0))) == what(before.get(kept[:-8], (1, 1, 1))):
        may_go, expected = {kept[:-8]}, {**expected, kept: None}  # what rebuild replaces stays beside
    yield from judge_bystanders(before, after, may_go=may_go)
    new = sorted(after.keys() - before.keys())
    if not done:
        if cell.recipe.verb == "produce":
            # A catalog is made shard by shard: where one is refused, those before it stay, and the command goes on.
            catalog = {f"here/{cell.value if cell.slot == 'live' else 'live'}/"}
            new = [
                name for name in new if not name.startswith(tuple(catalog)) or not cell.name.startswith("live/shard")
            ]
        if cell.recipe.verb == "rebuild" and cell.name.endswith(".col"):
            new = [name for name in new if name not in expected]  # the five files are made whole, the column is not
        if new:
            yield f"left {new}, refusing with: {outcome.err.strip()[-200:]}"
        if cell.way == OLD and "--overwrite" in cell.flags:
            yield f"an older result may be replaced, and is not: {outcome.err.strip()[-200:]}"
        return
    if strange := [
        name for name in new if name not in expected and not any(e.startswith(f"{name}/") for e in expected)
    ]:
        yield f"made {strange}, where the result is {sorted(expected)}"
    if cell.value in FOLDERS and cell.slot not in CONTAINERS and cell.recipe.verb != "copy":
        yield "exit code 0, where a name is needed"
    for name, content in expected.items():
        if name in (".", "here"):
            continue
        if name not in after:
            yield f"exit code 0, and no {name!r}"
        elif content is not None and what(after[name]) != content and not cell.changes:
            yield f"exit code 0, and {name!r} is not what a calm run makes"


def _replaceable(world: World, cell: Cell) -> set[str]:
    """Names under the root of what a run that is done may have taken the place of."""
    if cell.way in EMPTY:
        return {f"here/{path}" for path in (cell.name, *map(str, Path(cell.name).parents))}
    if cell.way == OLD and "--overwrite" in cell.flags:
        return {f"here/{name}" for name in world.old(cell.recipe)}
    return set()


def judge_bystanders(before: dict[str, Entry], after: dict[str, Entry], may_go: set[str]) -> Iterator[str]:
    for name, entry in before.items():
        now = after.get(name)
        if now == entry or name in may_go:
            continue
        if now is None:
            yield f"removed {name!r}"
        elif what(now) != what(entry):
            yield f"changed {name!r} from {str(what(entry)[1])[:60]} to {str(what(now)[1])[:60]}"
        else:
            yield f"touched {name!r}: same content, another inode, mode or time"


_OPTIONS = ("--output-prefix", "--summary", "--catalog", "--ack-dir", "--html", "--output", "DST")


def judge_words(cell: Cell, outcome: Outcome) -> Iterator[str]:
    if outcome.code not in (0, 1, 2):
        yield f"exit code {outcome.code}: {outcome.err.strip()[-300:]}"
        return
    if outcome.code == 0:
        return
    said = outcome.err
    if not said.strip():
        yield f"exit code {outcome.code} without a word"
    if "Traceback" in said or "[Errno" in said:
        yield f"no sentence: {said.strip()[-300:]}"
    places = {os.path.basename(cell.name), *([] if cell.slot else cell.recipe.writes)}
    if cell.value is None:
        places.add(cell.slot.rstrip("/"))
    else:
        # The empty name and its kin are known by how they stand there, or by the option they came with.
        name = os.path.basename(os.path.normpath(cell.value)) if cell.value.strip("/.") else ""
        places |= {cell.value, name, f"error: {cell.value}: ", f"{cell.value!r}: ", *_OPTIONS}
        places |= {
            f"{ShardPaths.of(name).prefix}." for suffix in SUFFIXES if name.endswith(suffix) and name not in SUFFIXES
        }
    # A name may be shortened, and what is no letter is shown in other ways.
    shown = {re.split(r"[^ -~]", place)[0][:9] if "error" not in place else place for place in places}
    if not any(part in said for part in shown - {"", ".", ".."}):
        yield f"names no path: {said.strip()[-300:]}"


def results(world: World, cell: Cell) -> dict[str, Any]:
    """What a run that is done has made, by name under the root."""
    found = {}
    for pattern, (slot, content) in world.calm(cell.recipe).made.items():
        value = cell.value if cell.value is not None and slot == cell.slot else slot
        if cell.recipe.text.startswith("copy") and slot == cell.slot and _is_folder(world, value):
            name = cell.recipe.reads[0]
            value = os.path.join(value, name) if slot == "out" else value
            value = f"project/{name}" if cell.way == "link to a folder" and cell.name == "out" else value
        value = value.rstrip("/")
        if (
            slot == "out"
            and pattern != "{}"
            and value not in FOLDERS
            and not os.path.lexists(world.here / pattern.format(value))
        ):
            value = ShardPaths.of(value).prefix  # X.bin names the shard X
        if cell.way == "link to a folder" and cell.name == value and slot in CONTAINERS:
            value = "project"  # files go into the folder, and links above a destination are followed
            if pattern == "{}":
                continue
        name = os.path.normpath(os.path.join("here", pattern.format(value)))
        found[name] = content
    return found


def _is_folder(world: World, value: str) -> bool:
    return value.endswith("/") or (world.here / value).is_dir()


def run_cells(world: World, cells: Iterable[Cell]) -> tuple[int, list[str]]:
    """How many there were, and what is wrong with them."""
    count, complaints = 0, []
    for cell in cells:
        count += 1
        complaints += run_cell(world, cell)
    return count, complaints


def table(world: World, recipe: Recipe, *, all_of_them: bool) -> Iterator[Cell]:
    """All cells of a recipe, each once."""
    calm = world.calm(recipe)
    if not calm.made:
        return
    cells = (
        spelled(recipe, all_of_them=all_of_them),
        the_input_itself(recipe, calm),
        in_the_way(recipe, calm, all_of_them=all_of_them),
        again(recipe, calm),
    )
    yield from dict.fromkeys(chain(*cells))


def main(folder: str, *chosen: str) -> None:
    """Run the whole table and show it: ``python tests/hostile.py FOLDER [VERB...]``."""
    world = World(Path(folder))
    total = wrong = 0
    for recipe in map(Recipe, RECIPES):
        if chosen and recipe.verb not in chosen:
            continue
        count, complaints = run_cells(world, table(world, recipe, all_of_them=True))
        print(f"{count} cells, {len(complaints)} complaints: {recipe.text}", *complaints, sep="\n    ", flush=True)
        total, wrong = total + count, wrong + len(complaints)
    print(f"{total} cells, {wrong} complaints")


if __name__ == "__main__":
    main(*sys.argv[1:])
