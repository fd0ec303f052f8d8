"""Input with a strange name, that cannot be read, or that claims to be huge; and full disks."""

from __future__ import annotations

import functools
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from chats import SUFFIXES, Outcome
from cut_short import replacing, undocumented
from disks import PAGE_NBYTES, filled, mounted
from hostile import RECIPES, Recipe, World, traced, within
from obstacles import NOT_UTF8, Cell, attempt, judge_bystanders, judge_words, results, what

from megatron_sft_idx.check import rebuild
from megatron_sft_idx.cli import main
from megatron_sft_idx.formats.memmap import read_manifest
from megatron_sft_idx.live.documents import read_document
from megatron_sft_idx.produce.taken_files import TakenFiles
from megatron_sft_idx.shard import find_remains, read_header

READING = [text for text in RECIPES if "<" in text]
# Places in recipes that are not one file, with their files.
INSIDE = {"tok": ["tok/tokenizer.json", "tok/tokenizer_config.json"], "incoming": ["incoming/0.jsonl"]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(main, "build_parser", functools.cache(main.build_parser))
        yield World(tmp_path_factory.mktemp("inputs"))


def named(read: str) -> list[Path]:
    """Return the files, or the folder, of a place in a recipe."""
    columns = Path(".").glob(f"{read}.*.col")
    return [path for path in (Path(read), *(Path(read + suffix) for suffix in SUFFIXES), *columns) if path.exists()]


@pytest.mark.sample(5)
@pytest.mark.parametrize("text", READING)
@pytest.mark.parametrize("above", [False, True], ids=["the name", "a folder above it"])
def test_input_whose_name_is_not_utf8(world: World, text: str, above: bool) -> None:
    """A recipe gives the same bytes as under another name, or an error with the name."""
    recipe = Recipe(text)
    for read in recipe.reads:
        with within(world.fresh()):
            new = f"{NOT_UTF8}/{read}" if above else NOT_UTF8 + Path(read).suffix
            Path(new).parent.mkdir(exist_ok=True)
            for path in named(read):
                path.rename(new + path.name.removeprefix(read))
            before = world.look()
            outcome = attempt(recipe.argv({read: new}))
            after = world.look()
        cell = Cell(recipe, (), name=new.removesuffix(".jsonl"))
        if "--diff" not in text:
            assert list(judge_words(cell, outcome)) == []
        assert list(judge_bystanders(before, after, may_go=set())) == []
        for name, content in results(world, cell).items() if outcome.code == 0 else ():
            # Headers, pages and documents of catalogs contain the path of the input, and a column contains its name.
            told = (".seq.idx", ".source.col", ".json", ".jsonl", ".html")
            if content is not None and not name.endswith(told) and "/_" not in name:
                copied = name.replace("/s.", f"/{NOT_UTF8}.") if text.startswith("copy") and not above else name
                assert name in after or copied in after, name
                assert what(after.get(name, after.get(copied, (0, 0, 0)))) == content, name


@pytest.mark.parametrize("text", [text for text in READING if "<rows.jsonl>" in text and "create" not in text])
def test_a_run_goes_on_whose_input_is_not_utf8(world: World, text: str) -> None:
    """The record of the input that a run writes can be read back."""
    recipe = Recipe(text)
    argv = recipe.argv({"rows.jsonl": NOT_UTF8 + ".jsonl"})
    with within(world.fresh()):
        os.rename("rows.jsonl", NOT_UTF8 + ".jsonl")
        assert attempt(argv).code == 0
        again = attempt(argv)
        assert (again.code, again.err) == (0, again.err)
        assert "different input" not in again.err


@pytest.mark.sample(5)
@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="no file here that cannot be read")
@pytest.mark.parametrize("text", READING)
def test_input_that_the_disk_does_not_give_back(world: World, text: str) -> None:
    """Reading /proc/self/mem fails like a bad disk or a lost file server. The error must name the file."""
    recipe = Recipe(text)
    complaints = []
    for read in recipe.reads:
        with within(world.fresh()):
            files = [str(path) for path in named(read) if path.is_file()] + INSIDE.get(read, [])
        assert files
        for file in files:
            with within(world.fresh()):
                os.unlink(file)
                os.symlink("/proc/self/mem", file)
                before = world.look()
                outcome = attempt(recipe.argv())
                after = world.look()
            cell = Cell(recipe, (), name=file)
            # The answer of some commands is on stdout; an error about the format names the dataset, not a file of it.
            said = Outcome(outcome.code, "", outcome.err or outcome.out)
            wrong = [*judge_words(cell, said), *judge_bystanders(before, after, may_go=set())]
            complaints += [
                f"{file}: {one}" for one in wrong if "names no path" not in one or f"error: {read}: " not in said.err
            ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", [text for text in RECIPES if "[" in text or "create" in text])
def test_a_disk_that_is_full(text: str, full_world: World) -> None:
    """The system's error, from any call, becomes a message with the name of a file, and nothing is left behind."""
    recipe, world = Recipe(text), full_world
    world.calm(recipe), world.old(recipe)
    refused, complaints = 0, []
    for pages in (0, 1, 2, 4, 7, 11):
        with within(world.fresh()):
            if "lost" not in recipe.writes and recipe.verb != "produce":
                world.put_old(recipe)
            before = world.look()
            with filled(world.root.parent, pages * PAGE_NBYTES):
                outcome = attempt(recipe.argv(None, *replacing(recipe)))
            after = world.look()
        if outcome.code == 0:
            continue
        refused += 1
        wrong = list(judge_bystanders(before, after, may_go=set()))
        wrong += [str(outcome)] if "[Errno" in outcome.err or "Traceback" in outcome.err else []
        wrong += [] if "No space left on device" in outcome.err or "bytes are needed" in outcome.err else [str(outcome)]
        wrong += [] if any(slot.rstrip("/") in outcome.err for slot in (*recipe.writes, "rows.idx")) else [str(outcome)]
        wrong += [f"left {left}" for left in [undocumented(world, recipe, after.keys() - before.keys())] if left]
        complaints += [f"{pages} pages free: {one}" for one in wrong]
    assert refused or "into/" in recipe.writes
    assert not complaints, "\n".join(complaints[:40])


@pytest.fixture(scope="module")
def full_world() -> Iterator[World]:
    with mounted("size=16m") as disk, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(disk))
        patch.setattr(main, "build_parser", functools.cache(main.build_parser))
        yield World(disk)


TO = "convert <s> [out] --lossy --to "
# Commands whose minimum output size is unknown, because output is compressed, or input is small or endless. Padded
# arrays are also here: their space is reserved on the disk before writing.
UNKNOWN_SIZE = ("produce", "inspect", "create-raw-index", "rebuild", *(TO + name for name in ("parquet", "memmap")))


@pytest.mark.parametrize("lacking", ["f_bavail", "f_favail"])
@pytest.mark.parametrize("text", [text for text in RECIPES if "[" in text or "create" in text])
def test_too_little_room_is_found_before_the_work(
    world: World, text: str, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few inodes, or too few bytes if some are known to be needed, is an error before anything is created."""
    if lacking == "f_bavail" and text.startswith(UNKNOWN_SIZE):
        return
    real = os.statvfs("/")
    names = [name for name in dir(real) if name.startswith("f_")]
    fake = {name: getattr(real, name) for name in names} | {"f_files": 9, "f_favail": 9**9, lacking: 0}
    recipe = Recipe(text)
    with within(world.fresh()), traced() as touched:
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda path: SimpleNamespace(**fake))
            before = world.look()
            outcome = attempt(recipe.argv())
        after = world.look()
    assert outcome.code == 1
    assert "are needed, but only 0 are free" in outcome.err or "0 inodes are free" in outcome.err
    assert after == before
    made = [name for name in touched if not name.startswith(("/dev/", "/proc/"))]
    assert {os.path.basename(name) for name in made} <= {".", "", "live", "into"}


HEADER = b"\x89SFTIDX\n" + (1).to_bytes(4, "little") + (16 << 20).to_bytes(4, "little")
CLAIMS: dict[str, tuple[str, bytes, Callable[[str], object]]] = {
    "a manifest": ("x/manifest.json", json.dumps({"format": "none"}).encode(), read_manifest),
    "a header": ("x/s.seq.idx", HEADER.ljust(1024, b"\0"), lambda path: read_header(f"{path}/s")),
    "a header to be rebuilt": ("x/s.seq.idx", HEADER.ljust(1024, b"\0"), lambda path: rebuild(f"{path}/s")),
    "a document": ("x/_live.json", b"[]", lambda path: read_document(f"{path}/_live.json")),
    "a list of input": ("x/_inputs.jsonl", b"[]\n", lambda path: TakenFiles(f"{path}/_inputs.jsonl")),
    "a journal": ("x/s.journal", b"SFTJRNL2" + b"\xff" * 1016, lambda path: find_remains(f"{path}/s")),
}


@pytest.mark.parametrize("kind", CLAIMS)
def test_a_small_file_gets_little_memory_whatever_it_claims(kind: str, tmp_path: Path) -> None:
    name, data, read = CLAIMS[kind]
    (tmp_path / "x").mkdir()
    (tmp_path / name).write_bytes(data)
    for measured in (False, True):  # the first run imports modules and creates messages
        tracemalloc.start()
        with pytest.raises((ValueError, OSError)):
            read(str(tmp_path / "x"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert not measured or peak < 1 << 20, f"{peak:,} bytes for a file of {len(data)}"
