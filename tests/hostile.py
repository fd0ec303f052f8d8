"""Commands that write, hostile things in their way, and what a run may have changed: the support of test_hostile_paths.

A recipe is a command that works in a fresh copy of the world, with ``<what it reads>`` and ``[what it writes]`` marked.
The names that it writes are not typed here: two calm runs of it tell them, the passing ones too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from chats import SUFFIXES, Outcome, command, write_rows
from packs import demo_samples, sample_of, write_samples
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_sft_idx.cli.main import build_parser
from megatron_sft_idx.formats.registry import WRITABLE
from megatron_sft_idx.layout import ShardPaths

_TEXT = "--tokenizer-model <tok> --seq-length 16 --workers 0"
_ROWS = f"--input <rows.jsonl> {_TEXT}"
RECIPES = (
    f"preprocess {_ROWS} --chat-template <t.jinja> --output-prefix [out] --summary [said.json] --keep-corpus",
    f"preprocess {_ROWS} --output-prefix [out] --output-shards 2",
    f"produce {_ROWS} --catalog [live] --ack-dir [acks] --tokens-per-shard 20 --keep-recent 0",
    f"produce --watch <incoming> {_TEXT} --chat-template <t.jinja> --catalog [live] --tokens-per-shard 99",
    "pack <s> --seq-length 32 --output-prefix [out] --summary [said.json]",
    "pack <s> --seq-length 32 --output-prefix [out] --output-shards 2",
    "merge <s> <t> --output-prefix [out]",
    "split <s> --shards 2 --output-prefix [out]",
    "copy <s> [out]",
    "copy <s> <t> [into/]",
    *(f"convert <s> [out] --allow-loss --to {name}" for name in WRITABLE),
    "convert <stock> [out] --from megatron --mask-path <masks> --to sft-idx",
    "inspect <s> --tokenizer <tok> --html [page.html]",
    "inspect <s> --diff <t>",
    "verify <s>",
    "bench-read <s> --packs 1",
    "rebuild [lost]",
    "create-raw-index <rows.jsonl> --output [raw.idx]",
    "create-raw-index <rows.jsonl>",
)
# What is free text and no path.
WORDS = {"messages_key", "template_date", "chat_template_kwargs", "ray_address", "find"}
# What only goes with a remote prefix, and has recipes of its own.
REMOTE = {"staging"}
# Other inputs, whose result is another.
OTHERS = {"rows.jsonl": "more.jsonl", "s": "t", "t": "s", "stock": "stock2", "masks": "masks2"}
# Slots for a folder that files are put into, beside what is there.
CONTAINERS = ("live", "acks", "into/")
# Names that programs of this package have used, and that a calm run does not show.
KNOWN = (
    *(
        "{}.journal",
        "{}.failed",
        "{}.unpacked.bin",
        "{}.bin.tmp",
        "{}.bin.copy",
        "{}.idx.damaged",
        "{}.parts",
        "{}.tmp",
    ),
    *(".{}.tmp", ".{}.old", "{}/_work", "{}/_producer.journal", "{}.lock", "{}.done", "{}.seq.idx.failed"),
)
PATIENCE = 20


@cache
def verbs() -> dict[str, Any]:
    (action,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    return dict(action.choices)


# --- the world ---


def build_world(root: Path) -> None:
    """``root/here``, where commands run, and strangers in it and above it."""
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
    for suffix in (".bin", ".loss.bin", ".seq.bin", ".seq.idx"):
        shutil.copy(here / f"s{suffix}", here / f"lost{suffix}")
    samples = demo_samples(4)
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
    """Small, and of a kind that loads at once."""
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
    """Everything under a folder: kind and mode, inode, what it holds, and of files when they were written.

    Args:
        root: the folder.
        known: contents of files that were read before, by inode and what changes with every change.
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
    """Kind and content alone."""
    mode, _, content = entry
    return stat.S_IFMT(mode), content[0] if isinstance(content, tuple) else content


# --- recipes ---


@dataclass(frozen=True)
class Recipe:
    """A marked command."""

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
        """The command, with other values in marked places."""
        changes = changes or {}
        words = []
        for word in self.text.split():
            marked = word[0] in "<["
            words.append(changes.get(word[1:-1], word[1:-1]) if marked else word)
        return [*words, *flags]

    def flag_sets(self) -> list[tuple[str, ...]]:
        known = verbs()[self.verb]._option_string_actions
        return [(), *((flag,) for flag in ("--overwrite", "--resume") if flag in known)]


@dataclass
class Calm:
    """What a recipe does where nothing is in its way.

    Attributes:
        made: what is new or changed afterwards, by a name in which ``{}`` stands for the value of a slot: the slot and
            the content. None for content that differs from run to run.
        touched: all names that it makes or opens to write, those too that are gone afterwards, each with its slot.
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
    """Paths that are made, opened to write, renamed or removed meanwhile."""
    global _tracing  # noqa: PLW0603
    _tracing = names = []
    try:
        yield names
    finally:
        _tracing = None


class World:
    """A built world, and fresh copies of it to run commands in."""

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
        """What is in the world now."""
        self._seen = snapshot(self.root, self._known)
        return self._seen

    def fresh(self) -> Path:
        """The world as it was built, with the working folder to run in."""
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
        """What two runs in a fresh world have in common."""
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
        """What the recipe makes of other input, by name; of the same where there is no other."""
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
        """Put an older result at the destination."""
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


# --- what is in the way ---


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
                if read.endswith(".jsonl") and slot and "/" not in name:
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
    if cell.way == OLD and {"--overwrite", "--resume"} & set(cell.flags):
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
        places |= {f"{ShardPaths.of(name).prefix}." for suffix in SUFFIXES if name.endswith(suffix)}
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
            value = os.path.join(value, "s") if slot == "out" else value
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


def _parent_of_any(name: str, paths: dict[str, Any]) -> bool:
    return any(path.startswith(f"{name}/") for path in paths)


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
