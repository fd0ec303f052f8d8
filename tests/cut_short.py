"""Runs of the recipes that fail or are killed on their way: what they may leave, and that they can be finished."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from chats import ROOT, SUFFIXES, Outcome
from hostile import Cell, Entry, Recipe, World, attempt, judge_bystanders, results, what, within

# What changes a disk.
STEPS = ("open", "write", "pwrite", "fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir", "ftruncate")


@contextlib.contextmanager
def counted(at: int, then: Callable[[str | None], object]) -> Iterator[list[str]]:
    """Do ``then``, with the path of the step, before that step that would change the disk; yields the steps taken."""
    taken: list[str] = []

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **more: Any) -> Any:
            if name != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                taken.append(name)
                if len(taken) == at + 1:
                    then(os.fspath(arguments[0]) if not isinstance(arguments[0], int) else None)
            return call(*arguments, **more)

        return step

    before = {name: getattr(os, name) for name in STEPS}
    for name, call in before.items():
        setattr(os, name, counting(name, call))
    try:
        yield taken
    finally:
        for name, call in before.items():
            setattr(os, name, call)


def replacing(recipe: Recipe) -> tuple[str, ...]:
    """The flag to write over an older result with; none where the verb has none."""
    return ("--overwrite",) if ("--overwrite",) in recipe.flag_sets() else ()


def documented() -> list[str]:
    """Patterns of what docs/repair.md says that a run may leave; ``X`` in the place of the destination's base name."""
    spans = re.findall(r"`([^`\s]+)`", (ROOT / "docs/repair.md").read_text())
    found = [re.fullmatch(r"(\.?)(?:PREFIX|DST|FILE|CATALOG)((?:[-./].*|\*.*)?)", span) for span in spans]
    return [f"{match[1]}X{match[2]}" for match in found if match and match[2]]


def undocumented(world: World, recipe: Recipe, names: Iterable[str]) -> list[str]:
    """Of new names under the root those that are no result, and that the documents do not tell of."""
    made = {*results(world, Cell(recipe, ())), *(f"here/{name}" for name in world.old(recipe))}
    stems = {slot.rstrip("/") for slot in recipe.writes} | {"rows.idx"}
    # Several shards at one prefix have names of their own.
    stems |= {Path(name).name.removesuffix(".seq.idx") for name in made if name.endswith(".seq.idx")}
    patterns = [pattern.replace("X", stem, 1) for pattern in documented() for stem in stems]
    return sorted(
        name
        for name in set(names) - made
        if not any(fnmatch.fnmatch(path, f"*/{pattern}") for path in (name, f"{name}/") for pattern in patterns)
    )


def state_of(world: World, recipe: Recipe, after: dict[str, Entry]) -> str:
    """Whether the destination holds the older result, the new one, neither, or something else."""
    new = results(world, Cell(recipe, ()))
    old = {f"here/{name}": content for name, content in world.old(recipe).items()}
    for state, wanted in (("new", new), ("old", old)):
        # How a catalog was made may differ from run to run; what is in it may not.
        same = (
            name in after and ("/_" in name or content in (None, what(after[name]))) for name, content in wanted.items()
        )
        if all(same):
            return state
    return "nothing" if not any(name in after for name in new.keys() | old.keys()) else "parts"


def finish_forward(world: World, recipe: Recipe) -> Iterator[str]:
    """Give the same command again after a run that was cut short: it ends well, and nothing is left over."""
    with within(world.here):
        outcome = attempt(recipe.argv(None, *replacing(recipe)))
        after = world.look()
    if outcome.code and recipe.verb not in ("produce", "inspect", "create-raw-index"):
        with within(world.here):
            for prefix in {name.removesuffix(".journal") for name in os.listdir() if name.endswith(".journal")}:
                attempt(["rebuild", prefix])
            outcome = attempt(recipe.argv(None, *replacing(recipe)))
            after = world.look()
    if outcome.code or state_of(world, recipe, after) != "new":
        yield f"cannot be finished: {state_of(world, recipe, after)}, {outcome.code}: {outcome.err.strip()[-300:]}"
    if left := undocumented(world, recipe, after.keys() - world.pristine.keys()):
        yield f"after the same command again, {left} are left"


def lost(world: World, recipe: Recipe, after: dict[str, Entry]) -> Iterator[str]:
    """Of an older result each shard, file or folder that is neither itself nor the new one, nor can be finished."""
    new, old = results(world, Cell(recipe, ())), {f"here/{name}": entry for name, entry in world.old(recipe).items()}
    names = {name.removesuffix(".seq.idx"): [name.removesuffix(".seq.idx") + end for end in SUFFIXES] for name in old}
    units = {unit: files for unit, files in names.items() if f"{unit}.seq.idx" in old}
    loose = old.keys() - {file for files in units.values() for file in files}
    units |= {name: [other for other in old if f"{other}/".startswith(f"{name}/")] for name in loose}

    def whole(files: list[str], now: dict[str, Entry]) -> bool:
        return any(
            all(name in now and wanted.get(name) in (None, what(now[name])) for name in files) for wanted in (old, new)
        )

    for unit, files in units.items():
        if whole(files, after):
            continue
        if f"{unit}.seq.idx" in files:
            said = attempt(["rebuild", os.fspath(world.root / unit)])
            if whole(files, world.look()):
                continue
            yield f"{unit}: neither the older one nor the new one, and rebuild says: {(said.out + said.err)[-200:]}"
        else:
            yield f"{unit}: neither the older one nor the new one"


def judge_interrupted(world: World, recipe: Recipe, outcome: Outcome | None, step: str = "") -> Iterator[str]:
    """What a run that failed at a step (or, without an outcome, was killed) over an older result has left."""
    after = world.look()
    yield from judge_bystanders(world.pristine, after, may_go={"here/lost.idx"})
    state = state_of(world, recipe, after)
    strange = undocumented(world, recipe, after.keys() - world.pristine.keys())
    if strange and step not in ("unlink", "rmdir"):  # which may have been to remove it
        yield f"left {strange}"
    if outcome is not None:
        if outcome.code not in (0, 1) or "Traceback" in outcome.err:
            yield f"exit code {outcome.code}: {outcome.err.strip()[-300:]}"
        elif outcome.code and "[Errno" in outcome.err:
            yield f"no sentence: {outcome.err.strip()[-300:]}"
        elif not outcome.code and state != "new":
            yield f"exit code 0, and {state} at the destination"
    if any(f"here/{name}" in world.put for name in world.old(recipe)):
        yield from lost(world, recipe, after)
    yield from finish_forward(world, recipe)
