"""Obstacles in the way of commands, as cells of a table, and checks of what a run may change.

``python tests/obstacles.py FOLDER [COMMAND...]`` runs the whole table in a new folder and shows all problems.
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

# Names that programs of this package have used, but that do not appear in a calm run.
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
    "short file": lambda path: Path(path).write_text("x"),  # without a line end
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
# May be overwritten or left alone.
EMPTY: dict[str, Callable[[str], object]] = {"empty file": lambda path: Path(path).touch(), "empty folder": os.mkdir}
LONG = "n" * 250
NOT_UTF8 = os.fsdecode(b"caf\xe9")
# Paths without a file name; a prefix needs one too.
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
        slot: the marked place to change.
        value: its new value; None to keep it.
        way: kind of obstacle.
        name: path of the obstacle.
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
    """Yield obstacles at the destinations, and at all names that the command touches or other commands have used.

    Without ``all_of_them``: half of the obstacles at each name, each with one set of flags in turn.
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
    """Yield destinations that are not plain names."""
    flag_sets = recipe.flag_sets()
    for slot in recipe.writes:
        for i, value in enumerate(SPELLINGS):
            if recipe.verb == "rebuild" and value in (*FOLDERS, "*"):
                continue  # it takes folders and globs, which match the shard in the world
            for flags in flag_sets if all_of_them else [flag_sets[i % len(flag_sets)]]:
                yield Cell(recipe, flags, slot, value)


def the_input_itself(recipe: Recipe, calm: Calm) -> Iterator[Cell]:
    """Yield destinations that are, or overlap with, other inputs or outputs of the command."""
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
        # The input, or a link to it, is at a path that the command would write to.
        for pattern, slot in calm.touched.items():
            name = pattern.format(slot.rstrip("/"))
            for read in recipe.reads:
                if read.endswith(".jsonl") and slot:
                    yield Cell(recipe, flags, "", None, f"{read} itself", name, ((read, name),))
                    yield Cell(recipe, flags, "", None, f"another name of {read}", name)


def again(recipe: Recipe, calm: Calm) -> Iterator[Cell]:
    """Yield cells in which the destination has the command's result for other input."""
    for flags in recipe.flag_sets():
        yield Cell(recipe, flags, "", None, OLD)


OLD = "an older result"


def prepare(world: World, cell: Cell) -> None:
    """Put the obstacle of a cell into the working folder."""
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
    elif not os.path.lexists(cell.name):  # existing files of the world stay, such as the other files of a lost .idx
        (OBSTACLES | EMPTY)[cell.way](cell.name)


class _Hangs(BaseException):
    pass


def _ring(*_: Any) -> None:
    raise _Hangs


def attempt(argv: list[str]) -> Outcome:
    """Run a command. If it hangs or raises, it gets an exit code that no cell accepts."""
    before = signal.signal(signal.SIGALRM, _ring)
    signal.alarm(PATIENCE)
    try:
        return command(*argv)
    except _Hangs:
        return Outcome(-1, "", "it hangs")
    except Exception as error:  # the user would see a traceback
        return Outcome(-2, "", f"Traceback: {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_cell(world: World, cell: Cell) -> list[str]:
    """Run one cell and return all problems."""
    here = world.fresh()
    with within(here):
        prepare(world, cell)
        before = world.look()
        outcome = attempt(cell.argv())
    return [f"{cell}: {wrong}" for wrong in judge(world, cell, outcome, before, world.look())]


def judge(
    world: World, cell: Cell, outcome: Outcome, before: dict[str, Entry], after: dict[str, Entry]
) -> Iterator[str]:
    """Yield problems: the command must be rejected with a sentence or succeed, and must change nothing else."""
    yield from judge_words(cell, outcome)
    done, expected = outcome.code == 0, results(world, cell)
    may_go = _replaceable(world, cell) if done else set()
    kept = f"here/{cell.name}.damaged"
    if cell.recipe.verb == "rebuild" and what(after.get(kept, (0, 0, 0))) == what(before.get(kept[:-8], (1, 1, 1))):
        may_go, expected = {kept[:-8]}, {**expected, kept: None}  # rebuild keeps the replaced file next to the new one
    yield from judge_bystanders(before, after, may_go=may_go)
    new = sorted(after.keys() - before.keys())
    if not done:
        if cell.recipe.verb == "produce":
            # A catalog is made shard by shard. If one is rejected, earlier shards stay, and the command can continue.
            catalog = {f"here/{cell.value if cell.slot == 'live' else 'live'}/"}
            new = [
                name for name in new if not name.startswith(tuple(catalog)) or not cell.name.startswith("live/shard")
            ]
        if cell.recipe.verb == "rebuild" and cell.name.endswith(".col"):
            new = [name for name in new if name not in expected]  # the five files are written, the column is not
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
    """Return the names under the root that a successful run may have replaced."""
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
        # Empty and similar names appear in messages in quotes, or by the option that was given.
        name = os.path.basename(os.path.normpath(cell.value)) if cell.value.strip("/.") else ""
        places |= {cell.value, name, f"error: {cell.value}: ", f"{cell.value!r}: ", *_OPTIONS}
        places |= {
            f"{ShardPaths.of(name).prefix}." for suffix in SUFFIXES if name.endswith(suffix) and name not in SUFFIXES
        }
    # A name may be shortened, and special characters are shown in other forms.
    shown = {re.split(r"[^ -~]", place)[0][:9] if "error" not in place else place for place in places}
    if not any(part in said for part in shown - {"", ".", ".."}):
        yield f"names no path: {said.strip()[-300:]}"


def results(world: World, cell: Cell) -> dict[str, Any]:
    """Return the results of a successful run, by name under the root."""
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
            value = ShardPaths.of(value).prefix  # X.bin refers to the shard X
        if cell.way == "link to a folder" and cell.name == value and slot in CONTAINERS:
            value = "project"  # files are put into the folder, and links in the path to a destination are followed
            if pattern == "{}":
                continue
        name = os.path.normpath(os.path.join("here", pattern.format(value)))
        found[name] = content
    return found


def _is_folder(world: World, value: str) -> bool:
    return value.endswith("/") or (world.here / value).is_dir()


def run_cells(world: World, cells: Iterable[Cell]) -> tuple[int, list[str]]:
    """Run cells. Return their number and all problems."""
    count, complaints = 0, []
    for cell in cells:
        count += 1
        complaints += run_cell(world, cell)
    return count, complaints


def table(world: World, recipe: Recipe, *, all_of_them: bool) -> Iterator[Cell]:
    """Yield all cells of a recipe, each once."""
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
    """Run the whole table and show all problems."""
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
