"""Check the project's English against a list of words: ``python tests/prose.py [FILE ...]``.

The rules are in ``prose_words.txt``. They apply to Markdown outside of code, also in notebooks, and to docstrings and
comments of Python, C++, YAML, shell scripts and the Makefile. Prints one line per match, and exits with 1 if there are
any.

``prose_known.txt`` has the number of matches of older files. Without FILE, a file is reported only if it has more.
``--update`` writes the numbers again; they should only fall.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = Path(__file__).with_name("prose_words.txt")
KNOWN = Path(__file__).with_name("prose_known.txt")
SUFFIXES, NAMES = (".md", ".py", ".cc", ".h", ".sh", ".yaml", ".ipynb"), ("Makefile", "pyproject.toml")
# Written by a program from names and strings elsewhere.
GENERATED = ("tools/bench/RESULTS.md", "tools/bench/results/")

LOWER = {letter: letter + 32 for letter in range(ord("A"), ord("Z") + 1)}
# Replaces each character of code, so that offsets stay the same and words around it do not become neighbours.
CODE = "\x01"
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\1(?!`)", re.DOTALL)
LINK_TARGET = re.compile(r"(?<=\])\([^)\s]*\)")
TAG = re.compile(r"<!--.*?-->|<[a-zA-Z/][^>\n]*>|\{\{[^}\n]*\}\}", re.DOTALL)  # and the fields of a template
DOCTEST = re.compile(r"^ *>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
# Strings and comments; a docstring is a long string at the start of a module or after a colon.
PYTHON = re.compile(
    r"(?s:[rR]?(?P<long>\"{3}|'{3})(?:\\.|[^\\])*?(?P=long)|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')|(?P<comment>#[^\n]*)"
)
CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
HASH_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*", re.MULTILINE)
# The end of the text before a sentence: a full stop, a bullet, a table cell, the start of a line.
START = re.compile(r"(?:\A|\n|[.!?:|-]|(?<!\*)\*) *\Z")
REST = rf"[^.?!|\n]*(?:\n(?!\n)[^.?!|\n]*)*[.,:|{CODE}]"


@dataclass(frozen=True)
class Rule:
    """One line of the word list.

    Attributes:
        where: ``docs``, ``code`` or ``all``.
        pattern: what to look for in prose.
        by_case: whether capital letters matter.
        at_start: whether it counts only at the start of a sentence.
        instead: what to write.
        reason: why.
        unless: a match next to this one is fine.
    """

    where: str
    pattern: re.Pattern[str]
    by_case: bool
    at_start: bool
    instead: str
    reason: str
    unless: re.Pattern[str] | None = None


def read_rules(text: str) -> list[Rule]:
    """Parse the word list.

    Raises:
        ValueError: a line does not have four or five fields, or its first field is unknown.
    """
    rules = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        where, pattern, *rest = line.split(" :: ")
        if where not in ("docs", "code", "all") or len(rest) not in (2, 3):
            raise ValueError(f"not a rule: {line}")
        unless = re.compile(rest[2], re.IGNORECASE) if len(rest) == 3 else None
        at_start, pattern = pattern.startswith("START"), pattern.removeprefix("START")
        plain = pattern.replace("REST", "").replace("CODE", "")
        rules.append(Rule(where, _compiled(pattern), plain != plain.lower(), at_start, rest[0], rest[1], unless))
    return rules


def _compiled(pattern: str) -> re.Pattern[str]:
    written = pattern.replace(" ", r"\s+").replace("REST", REST).replace("CODE", f"{CODE}+")
    # Unlike a word boundary, this also holds next to code and punctuation.
    return re.compile(rf"(?<!\w)(?:{written})(?!\w)")


def _blank(text: str, pattern: re.Pattern[str], filler: str) -> str:
    """Replace all matches by as many fillers; line breaks stay."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", filler, found[0]), text)


def prose_of_markdown(text: str) -> str:
    """The text with code, link targets and tags replaced."""
    for pattern, filler in ((FENCE, " "), (TAG, " "), (INLINE, CODE), (LINK_TARGET, " ")):
        text = _blank(text, pattern, filler)
    return text


def prose_of_python(source: str) -> str:
    """The docstrings and comments of a module at their places, and spaces elsewhere."""
    spans = []
    last, end = "", 0  # the last character of code, and where the last string or comment ends
    for found in PYTHON.finditer(source):
        between = source[end : found.start()].strip()
        last, end = between[-1:] or last, found.end()
        if found["comment"]:
            spans.append((found.start(), end, "#"))
            continue
        if found["long"] and last in ("", ":"):
            spans.append((found.start(), end, found["long"]))
        last = '"'
    return _only(source, spans)


def prose_of_comments(source: str, comment: re.Pattern[str]) -> str:
    """The comments of a source at their places, and spaces elsewhere."""
    return _only(source, [(found.start(), found.end(), "#") for found in comment.finditer(source)])


def _only(source: str, spans: list[tuple[int, int, str]]) -> str:
    """Keep the spans, without their marks and without code."""
    kept = list(re.sub(r"[^\n]", " ", source))
    for begin, end, mark in spans:
        text = source[begin:end]
        if mark == "#":
            text = re.sub(r"^(?:#+|//+|/\*+)|\*/$", lambda found: " " * len(found[0]), text)
        else:
            text = _blank(text.replace(mark, "   "), DOCTEST, " ")
        kept[begin:end] = _blank(text, INLINE, CODE)
    return re.sub(r" +$", "", "".join(kept), flags=re.MULTILINE)


def prose_of(path: Path) -> tuple[str, str]:
    """The kind of prose that a file has, ``docs`` or ``code``, and the prose."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return "docs", prose_of_markdown(text)
    if path.suffix == ".py":
        return "code", prose_of_python(text)
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        return "docs", prose_of_markdown("\n\n".join("".join(cell["source"]) for cell in cells))
    hashes = path.name in NAMES or path.suffix in (".sh", ".yaml")
    return "code", prose_of_comments(text, HASH_COMMENT if hashes else CPP_COMMENT)


def matches(prose: str, kind: str, rules: list[Rule]) -> list[tuple[int, str, Rule]]:
    """Line number, text and rule of every match, in order."""
    found = []
    lower = prose.translate(LOWER)
    for rule in rules:
        if rule.where not in (kind, "all"):
            continue
        for match in rule.pattern.finditer(prose if rule.by_case else lower):
            begin, end = match.span()
            if rule.at_start and not START.search(prose, max(0, begin - 12), begin):
                continue
            if rule.unless and rule.unless.search(lower, max(0, begin - 30), end + 30):
                continue
            words = " ".join(prose[begin:end].replace(CODE, "`").split())
            found.append((prose.count("\n", 0, begin) + 1, words, rule))
    return sorted(found, key=lambda one: one[0])


def tracked_files() -> list[Path]:
    """The files of the project that have prose."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        print("tests/prose.py: not a git checkout, so only files that are named can be checked")
        return []
    names = [name for name in listed.stdout.decode().split("\0") if name and not name.startswith(GENERATED)]
    paths = [ROOT / name for name in names]
    return [path for path in paths if path.is_file() and (path.suffix in SUFFIXES or path.name in NAMES)]


def read_known(text: str) -> dict[str, int]:
    """Parse the lines ``NUMBER FILE`` of ``prose_known.txt``."""
    fields = [line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: int(number) for number, name in fields}


def write_known(counts: dict[str, int]) -> None:
    """Write ``prose_known.txt``."""
    head = "# Matches of prose_words.txt that older files have. Written by: python tests/prose.py --update\n"
    lines = [f"{number} {name}\n" for name, number in sorted(counts.items())]
    KNOWN.write_text(head + "".join(lines), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the project's English against tests/prose_words.txt.")
    parser.add_argument("files", nargs="*", type=Path, help="files to check (default: all files of the project)")
    parser.add_argument(
        "--update", action="store_true", help="write the number of matches of each file to prose_known.txt"
    )
    options = parser.parse_args()
    rules = read_rules(WORDS.read_text(encoding="utf-8"))
    known = {} if options.files else read_known(KNOWN.read_text(encoding="utf-8"))
    counts: dict[str, int] = {}
    failed = False
    for path in options.files or tracked_files():
        name = os.path.relpath(path, ROOT)
        kind, prose = prose_of(path)
        found = matches(prose, kind, rules)
        if found:
            counts[name] = len(found)
        if len(found) > known.get(name, 0) and not options.update:
            failed = True
            for line, words, rule in found:
                print(f"{name}:{line}: {words[:60]!r}: write {rule.instead} ({rule.reason})")
            if name in known:
                print(f"{name}: {len(found)} matches, {known[name]} are known")
    if options.update:
        write_known(counts)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
