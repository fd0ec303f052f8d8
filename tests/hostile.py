"""A folder tree (the world) with unrelated files in it, and commands that write there, for tests of hostile paths.

A recipe is a command that works in a fresh copy of the world. Its inputs are marked ``<so>`` and its outputs ``[so]``.
The names of the files that it writes, including temporary ones, are not listed here. They are recorded in two calm
runs, in which nothing is in the way.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from chats import command, write_rows
from columned import SOURCE, write_columned
from sample_packs import demo_samples, sample_of, write_samples
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_sft_idx.cli.main import build_parser
from megatron_sft_idx.formats.registry import WRITABLE
from megatron_sft_idx.shard import write_column

_TEXT = "--tokenizer-model <tok> --seq-length 16 --workers 0"
_ROWS = f"--input <rows.jsonl> {_TEXT}"
RECIPES = (
    f"preprocess {_ROWS} --chat-template <t.jinja> --output-prefix [out] --summary [said.json] --keep-corpus",
    f"preprocess {_ROWS} --output-prefix [out] --output-shards 2",
    f"produce {_ROWS} --catalog [live] --ack-dir [acks] --tokens-per-shard 20 --keep-recent 0",
    f"produce --watch <incoming> {_TEXT} --chat-template <t.jinja> --catalog [live] --tokens-per-shard 99",
    "pack <s> --seq-length 32 --output-prefix [out] --summary [said.json]",
    "pack <s> --seq-length 32 --output-prefix [out] --output-shards 2",
    "merge <c> <d> --output-prefix [out]",
    "split <c> --shards 2 --output-prefix [out]",
    "copy <c> [out]",
    "copy <c> <d> [into/]",
    *(f"convert <s> [out] --lossy --to {name}" for name in WRITABLE),
    "convert <stock> [out] --from megatron --mask-path <masks> --to sft-idx",
    "inspect <s> --tokenizer <tok> --html [page.html]",
    "inspect <s> --diff <t>",
    "verify <s>",
    "rebuild [lost]",
    "create-raw-index <rows.jsonl> --output [raw.idx]",
    "create-raw-index <rows.jsonl>",
)
# Recipes that write to an object store; its URL replaces URL.
TO_A_BUCKET = (
    "copy <c> [URL/out]",
    "merge <c> <d> --output-prefix [URL/out] --staging [stage]",
    "pack <s> --seq-length 32 --output-prefix [URL/out] --staging [stage]",
    f"preprocess {_ROWS} --output-prefix [URL/out] --staging [stage]",
)
# Options with free text, not paths.
WORDS = {"template_date", "chat_template_kwargs", "ray_address", "find", "row"}
WORDS |= {"ignore_fields", "loss_weight", "max_bad_rows", "repeat"}
WORDS |= {"where", "keep_fields", "loss_weight_column"}
WORDS |= {"config"}  # a file that is read completely before a command begins
# Read only if rows have images or audio.
WORDS |= {"processor", "media_root"}
# For each input another one that gives a different result.
OTHERS = {"rows.jsonl": "more.jsonl", "s": "t", "t": "s", "c": "d", "d": "c", "stock": "stock2", "masks": "masks2"}
# Slots for folders to which files are added.
CONTAINERS = ("live", "acks", "into/")


@cache
def verbs() -> dict[str, Any]:
    (action,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    return dict(action.choices)


# --- the world ---


def build_world(root: Path) -> None:
    """Create ``root/here``, the folder in which commands run, with unrelated files in it and above it."""
    here = root / "here"
    for folder in ("here/tok", "here/incoming", "here/project/src", "here/sub", "above"):
        (root / folder).mkdir(parents=True)
    for stranger in ("notes.txt", "above/notes.txt", "here/notes.txt", "here/project/src/main.py", "here/sub/keep.txt"):
        (root / stranger).write_text(f"the only copy of {stranger}\n")
    (here / "project/x.bin").write_bytes(bytes(range(256)))
    _write_tokenizer(here / "tok")
    (here / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, first in (("rows", 3), ("more", 33)):
        rows = [{"input_ids": [first + i, 4, 5, 6 + i], "loss_mask": [0, 0, 1, 1]} for i in range(12)]
        write_rows(here / f"{name}.jsonl", rows)
    shutil.copy(here / "rows.jsonl", here / "incoming/0.jsonl")
    (here / "incoming/_END").touch()
    for shard, rows in (("s", "rows"), ("t", "more")):
        with within(here):
            made = command(*Recipe(f"preprocess {_ROWS} --output-prefix {shard}").argv({"rows.jsonl": f"{rows}.jsonl"}))
        assert made.code == 0, made.err
    samples = demo_samples(4)
    # Shards with columns, written with the shard and attached later.
    for name, packs in (("c", samples[1:]), ("d", samples[:0:-1])):
        write_columned(here / name, packs, {"source": SOURCE})
        write_column(here / name, "late", np.arange(len(packs)), per="pack")
    for path in here.glob("c.*"):
        if path.suffix != ".idx" or path.name == "c.seq.idx":
            shutil.copy(path, here / path.name.replace("c.", "lost.", 1))
    for name, packs in (
        ("stock", samples),
        ("stock2", samples[::-1]),
        ("masks", [sample_of([len(s.tokens)], lambda i: 0, lambda i: i % 2) for s in samples]),
        ("masks2", [sample_of([len(s.tokens)], lambda i: 0, lambda i: 0) for s in samples[::-1]]),
    ):
        write_samples(here / name, packs)
        for suffix in (".loss.bin", ".seq.bin", ".seq.idx"):
            (here / f"{name}{suffix}").unlink()


def _write_tokenizer(folder: Path) -> None:
    """Write a small tokenizer that loads quickly."""
    words = {word: i for i, word in enumerate([*(f"w{i}" for i in range(99)), "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def within(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


Entry = tuple[Any, ...]


def snapshot(root: Path, known: dict[tuple[int, ...], bytes] | None = None) -> dict[str, Entry]:
    """Record everything under a folder: kind and mode, inode, content, and the modification times of files.

    Args:
        root: the folder.
        known: contents of files that were read before, by inode, times and size, which change with the content.
    """
    found: dict[str, Entry] = {}
    known = {} if known is None else known

    def visit(folder: str) -> None:
        for entry in os.scandir(folder):
            state = entry.stat(follow_symlinks=False)
            content: Any = None
            if entry.is_symlink():
                content = os.readlink(entry.path)
            elif stat.S_ISREG(state.st_mode):
                key = state.st_ino, state.st_ctime_ns, state.st_mtime_ns, state.st_size
                if key not in known:
                    known[key] = Path(entry.path).read_bytes()
                content = known[key], state.st_mtime_ns
            found[os.path.relpath(entry.path, root)] = (state.st_mode, state.st_ino, content)
            if entry.is_dir(follow_symlinks=False):
                visit(entry.path)

    visit(os.fspath(root))
    return found


def what(entry: Entry) -> Any:
    """Return only kind and content of an entry."""
    mode, _, content = entry
    return stat.S_IFMT(mode), content[0] if isinstance(content, tuple) else content


# --- recipes ---


@dataclass(frozen=True)
class Recipe:
    """A command with its inputs and outputs marked."""

    text: str

    @property
    def verb(self) -> str:
        return self.text.split()[0]

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return tuple(re.findall(r"<(.*?)>", self.text))

    @cached_property
    def writes(self) -> tuple[str, ...]:
        return tuple(re.findall(r"\[(.*?)\]", self.text))

    def argv(self, changes: dict[str, str] | None = None, *flags: str) -> list[str]:
        """Return the command with other values in marked places."""
        changes = changes or {}
        words = []
        for word in self.text.split():
            marked = word[0] in "<["
            words.append(changes.get(word[1:-1], word[1:-1]) if marked else word)
        return [*words, *flags]

    def flag_sets(self) -> list[tuple[str, ...]]:
        known = verbs()[self.verb]._option_string_actions
        return [(), *((flag,) for flag in ("--overwrite",) if flag in known)]


@dataclass
class Calm:
    """The effect of a recipe if nothing is in its way.

    Attributes:
        made: new or changed files, as slot and content, by a name in which ``{}`` replaces the value of the slot. The
            content is None if it differs from run to run.
        touched: all names that it creates or opens for writing, including temporary ones, each with its slot.
    """

    made: dict[str, tuple[str, Any]] = field(default_factory=dict)
    touched: dict[str, str] = field(default_factory=dict)


_tracing: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _tracing is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, (str, bytes)) and flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            _tracing.append(os.fsdecode(path))
    elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate"):
        _tracing.extend(os.fsdecode(path) for path in arguments[:2] if isinstance(path, (str, bytes)))


sys.addaudithook(_audit)


@contextlib.contextmanager
def traced() -> Iterator[list[str]]:
    """Yield a list that collects the paths that are created, opened for writing, renamed or removed."""
    global _tracing  # noqa: PLW0603
    _tracing = names = []
    try:
        yield names
    finally:
        _tracing = None


class World:
    """A world, and fresh copies of it to run commands in."""

    def __init__(self, root: Path) -> None:
        self.template = root / "template"
        self.template.mkdir()
        build_world(self.template)
        self.root = root / "w"
        self.here = self.root / "here"
        self._calm: dict[str, Calm] = {}
        self._old: dict[str, dict[str, Any]] = {}
        self._known: dict[tuple[int, ...], bytes] = {}
        self._seen: dict[str, Entry] | None = None

    def look(self) -> dict[str, Entry]:
        """Return the present content of the world."""
        self._seen = snapshot(self.root, self._known)
        return self._seen

    def fresh(self) -> Path:
        """Restore the world as it was built. Return the folder to run commands in."""
        if not self.root.exists():
            shutil.copytree(self.template, self.root, symlinks=True)
            self._known = {}
            self.pristine = self.look()
            self._seen, self.put = None, set()
            return self.here
        seen = self.look() if self._seen is None else self._seen
        changed = [name for name, entry in seen.items() if self.pristine.get(name) != entry]
        for name in sorted(changed, key=len, reverse=True):
            path = self.root / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for name in sorted((set(changed) | (self.pristine.keys() - seen.keys())) & self.pristine.keys(), key=len):
            source, path = self.template / name, self.root / name
            if source.is_dir():
                if not path.exists():
                    shutil.copytree(source, path, symlinks=True)
            else:
                shutil.copy2(source, path)
        if set(changed) & self.pristine.keys() or self.pristine.keys() - seen.keys():
            self.pristine = self.look()
        self._seen, self.put = None, set()
        return self.here

    def calm(self, recipe: Recipe) -> Calm:
        """Return what two runs in a fresh world have in common."""
        if recipe.text not in self._calm:
            self._calm[recipe.text] = self._run_calmly(recipe)
        return self._calm[recipe.text]

    def _run_calmly(self, recipe: Recipe) -> Calm:
        runs = []
        for _ in range(2):
            here = self.fresh()
            before = self._in_here()
            with within(here), traced() as names:
                outcome = command(*recipe.argv())
            assert outcome.code in (0, 1 if "--diff" in recipe.text else 0), (recipe, outcome)
            after = self._in_here()
            made = {name: what(after[name]) for name in after if after.get(name) != before.get(name)}
            gone = before.keys() - after.keys()
            assert not gone, f"{recipe.text}: removed {gone}"
            runs.append((made, {os.path.relpath(os.path.join(here, name), here) for name in names}))
            with within(here):
                verified = [
                    command("verify", "--full", n[:-8]) for n in made if n.endswith(".seq.idx") and n[:1] != "."
                ]
            assert all(done.code == 0 for done in verified), verified
        (made, names), (again, names_again) = runs
        assert made.keys() == again.keys(), recipe
        calm = Calm()
        for name, content in made.items():
            pattern, slot = self._pattern(recipe, name)
            calm.made[pattern] = slot, content if again[name] == content else None
        for name in sorted((names & names_again) | made.keys()):
            if not name.startswith("..") and name != ".":
                pattern, slot = self._pattern(recipe, name)
                calm.touched[pattern] = slot
        return calm

    def old(self, recipe: Recipe) -> dict[str, Any]:
        """Return the recipe's results for other input, by name, or for the same input if there is no other."""
        if recipe.text not in self._old:
            here = self.fresh()
            before = self._in_here()
            with within(here):
                assert command(*recipe.argv(OTHERS)).code == 0
            after = self._in_here()
            self._old[recipe.text] = {name: what(entry) for name, entry in after.items() if name not in before}
            self.fresh()
        return self._old[recipe.text]

    def put_old(self, recipe: Recipe) -> None:
        """Put an older result at the destination of the recipe."""
        self.put = {f"here/{name}" for name in self.old(recipe)}
        for name, (kind, content) in sorted(self.old(recipe).items()):
            if kind == stat.S_IFDIR:
                os.mkdir(name)
            else:
                Path(name).write_bytes(content)

    def _in_here(self) -> dict[str, Entry]:
        return {name[5:]: entry for name, entry in self.look().items() if name.startswith("here/")}

    @staticmethod
    def _pattern(recipe: Recipe, name: str) -> tuple[str, str]:
        for slot in recipe.writes:
            if (value := slot.rstrip("/")) in name.split("/", maxsplit=1)[0]:
                return name.replace(value, "{}", 1), slot
        return name, ""
