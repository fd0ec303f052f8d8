"""Recipes that fail or are killed halfway: check what they leave, and that the same command can finish the work."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from chats import ROOT, SUFFIXES, Outcome, command
from hostile import OTHERS, Entry, Recipe, World, what, within
from kills import killed_after
from obstacles import Cell, attempt, judge_bystanders, results

# System calls that change a disk.
STEPS = ("open", "write", "pwrite", "fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir")
STEPS += ("ftruncate", "posix_fallocate")


@contextlib.contextmanager
def counted(at: int, then: Callable[[str | None], object]) -> Iterator[list[str]]:
    """Call ``then`` with the path before step number ``at`` that would change the disk.

    Yield the list of steps taken.
    """
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
    """Return the flag for overwriting an older result, or nothing if the command has none."""
    return ("--overwrite",) if ("--overwrite",) in recipe.flag_sets() else ()


def documented() -> list[str]:
    """Return the patterns of files that a run may leave, from docs/repair.md. ``X`` is the destination's base name."""
    spans = re.findall(r"`([^`\s]+)`", (ROOT / "docs/repair.md").read_text())
    found = [re.fullmatch(r"(\.?)(?:PREFIX|DST|FILE|CATALOG)((?:[-./].*|\*.*)?)", span) for span in spans]
    return [f"{match[1]}X{match[2]}" for match in found if match and match[2]]


def undocumented(world: World, recipe: Recipe, names: Iterable[str]) -> list[str]:
    """Return the new names under the root that are neither a result nor documented."""
    made = {*results(world, Cell(recipe, ())), *(f"here/{name}" for name in world.old(recipe))}
    stems = {slot.rstrip("/") for slot in recipe.writes} | {"rows.idx"}
    # If there are several shards at one prefix, each has its own name.
    stems |= {Path(name).name.removesuffix(".seq.idx") for name in made if name.endswith(".seq.idx")}
    patterns = [pattern.replace("X", stem, 1) for pattern in documented() for stem in stems]

    def told(name: str) -> bool:
        paths = [name, *map(str, Path(name).parents)]
        return any(fnmatch.fnmatch(path, f"*/{pattern}") for path in paths for pattern in patterns)

    return sorted(name for name in set(names) - made if not told(name))


def older(world: World, recipe: Recipe) -> dict[str, Any]:
    """Return the older result by name under the root; None for content that differs from run to run."""
    new = results(world, Cell(recipe, ()))
    return {
        name: content if new.get(name, content) is not None else None
        for name, content in ((f"here/{name}", content) for name, content in world.old(recipe).items())
    }


def state_of(world: World, recipe: Recipe, after: dict[str, Entry]) -> str:
    """Return whether the destination holds the older result, the new one, neither, or something else."""
    new = results(world, Cell(recipe, ()))
    old = older(world, recipe)
    for state, wanted in (("new", new), ("old", old)):
        # The creation of a catalog may differ between runs, but not its content.
        same = (
            name in after and ("/_" in name or content in (None, what(after[name]))) for name, content in wanted.items()
        )
        if all(same):
            return state
    return "nothing" if not any(name in after for name in new.keys() | old.keys()) else "parts"


def finish_forward(world: World, recipe: Recipe) -> Iterator[str]:
    """Run the same command again after an interrupted run. It must succeed and leave nothing unfinished."""
    with within(world.here):
        outcome = attempt(recipe.argv(None, *replacing(recipe)))
        after = world.look()
    if outcome.code and recipe.verb not in ("produce", "inspect", "create-raw-index"):
        with within(world.here):
            for prefix in [name.removesuffix(".building") for name in os.listdir() if name.endswith(".building")]:
                attempt(["rebuild", prefix])
            outcome = attempt(recipe.argv(None, *replacing(recipe)))
            after = world.look()
    if outcome.code or state_of(world, recipe, after) != "new":
        yield f"cannot be finished: {state_of(world, recipe, after)}, {outcome.code}: {outcome.err.strip()[-300:]}"
    if left := undocumented(world, recipe, after.keys() - world.pristine.keys()):
        yield f"after the same command again, {left} are left"


def lost(world: World, recipe: Recipe, after: dict[str, Entry]) -> Iterator[str]:
    """Yield each shard, file or folder of an older result that is neither old nor new, and cannot be finished."""
    new, old = results(world, Cell(recipe, ())), older(world, recipe)
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
        # With the file next to it, which is a part of the output, the same command finishes it.
        elif f"{unit.removesuffix('.json')}.building/done.json" not in after:
            yield f"{unit}: neither the older one nor the new one"


def judge_interrupted(world: World, recipe: Recipe, outcome: Outcome | None, step: str = "") -> Iterator[str]:
    """Yield what is wrong after a run over an older result that failed at a step or, without an outcome, was killed."""
    after = world.look()
    yield from judge_bystanders(world.pristine, after, may_go={"here/lost.idx"})
    state = state_of(world, recipe, after)
    strange = undocumented(world, recipe, after.keys() - world.pristine.keys())
    if strange and step not in ("unlink", "rmdir"):  # the failed step may be its removal
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


# --- runs that are killed, and two at once ---


def killed(world: World, recipe: Recipe, seconds: float, *, over_an_older: bool) -> tuple[bool, list[str]]:
    """Kill a run after some seconds. Return whether it was still running, and what is wrong with what it left."""
    world.calm(recipe), world.old(recipe)
    with within(world.fresh()):
        if over_an_older and "lost" not in recipe.writes and recipe.verb != "produce":
            world.put_old(recipe)
        argv = recipe.argv(None, *replacing(recipe))
        cut = killed_after(seconds, lambda: command(*argv))
    how = "over an older result" if over_an_older else "to a free place"
    return cut, [
        f"{recipe.text} {how}, killed after {seconds:.4f} s: {e}" for e in judge_interrupted(world, recipe, None)
    ]


def seconds_of(world: World, recipe: Recipe) -> float:
    """Return the duration of a run in a fork."""
    world.fresh()
    begin = time.monotonic()
    with within(world.here):
        in_forks(world, [recipe.argv()], [0.0])
    return time.monotonic() - begin


def in_forks(world: World, runs: list[list[str]], delays: list[float]) -> list[Outcome]:
    """Run commands in parallel processes, each after its delay, and return their outcomes."""
    said = [world.root.with_name(f"said-{number}") for number in range(len(runs))]
    waiting, start = os.pipe()
    children = []
    for argv, path, delay in zip(runs, said, delays, strict=True):
        if (child := os.fork()) == 0:
            code = 99
            try:
                os.close(start)
                os.read(waiting, 1)
                time.sleep(delay)
                outcome = attempt(argv)
                path.write_text(outcome.err)
                code = outcome.code % 256
            finally:
                os._exit(code)
        children.append(child)
    os.close(waiting)
    os.close(start)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [Outcome(code, "", path.read_text()) for code, path in zip(codes, said, strict=True)]


def race(world: World, recipe: Recipe, flags: tuple[str, ...], delay: float) -> list[str]:
    """Run a recipe twice at once with different input and the same destination. Return what is wrong afterwards."""
    world.calm(recipe), world.old(recipe)
    with within(world.fresh()):
        first, second = in_forks(world, [recipe.argv(None, *flags), recipe.argv(OTHERS, *flags)], [0.0, delay])
    after = world.look()
    state = state_of(world, recipe, after)
    wrong = [f"exit code {run.code}: {run.err[-300:]}" for run in (first, second) if run.code not in (0, 1)]
    wrong += [f"no sentence: {run.err[-300:]}" for run in (first, second) if run.code and "error: " not in run.err]
    wrong += judge_bystanders(world.pristine, after, may_go={"here/lost.idx"})
    if left := undocumented(world, recipe, after.keys() - world.pristine.keys()):
        wrong.append(f"left {left}")
    same = older(world, recipe) == results(world, Cell(recipe, ()))
    winners = {"new": first, "old": second}
    if state in winners and winners[state].code and not same:
        wrong.append(f"the result is of the run that said: {winners[state].err[-300:]}")
    if state == "parts" or (state == "nothing" and 0 in (first.code, second.code)):
        wrong.append(
            f"exit codes {first.code} and {second.code}, and {state} at the destination: {first.err}{second.err}"
        )
    return [f"{recipe.text} {' '.join(flags)} twice at once: {one}" for one in wrong]


# --- a disk that reports errors ---


def says_no(path: str | None) -> None:
    raise OSError(errno.EIO, "Input/output error", path)


def failures(world: World, recipe: Recipe, steps: Iterable[int]) -> tuple[int, list[str]]:
    """Run a recipe over an older result repeatedly, each time with another failing step.

    Returns:
        The number of runs, until one had no such step, and what is wrong with what they left.
    """
    world.calm(recipe), world.old(recipe)
    complaints: list[str] = []
    for count, step in enumerate(steps):
        with within(world.fresh()):
            if "lost" not in recipe.writes and recipe.verb != "produce":
                world.put_old(recipe)
            with counted(step, says_no) as taken:
                outcome = attempt(recipe.argv(None, *replacing(recipe)))
        if len(taken) <= step:
            return count, complaints
        at = f"{recipe.text} over an older result, failing at step {step}, {taken[step]}"
        complaints += [f"{at}: {wrong}" for wrong in judge_interrupted(world, recipe, outcome, taken[step])]
    raise AssertionError("a run has no end")
