"""Names of input files: how the column ``source`` names them, and which file a user means by a spelling.

A file has the shortest part of its path that no other file of the job ends with: ``chats.jsonl``, or ``a/train.jsonl``
and ``b/train.jsonl``. So names are the same wherever the files lie, and never absolute paths. Data that a program
passes is written to a file in a folder that is removed later, which no name tells.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

from megatron_sft_idx.errors import FormatError, nearest_names
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.lines import shortened
from megatron_sft_idx.storage import is_remote

# Files that the Hugging Face hub gave lie in its cache under the name of their repository, and under its revision.
_HUB_FILE = re.compile(r".*/datasets--([^/]+)--([^/]+)/snapshots/[0-9a-f]{40}/(.+)", re.DOTALL)
# In the name of the folder of data that a program passes, or that comes through a pipe; ``tempfile`` adds the end.
PASSED_FOLDER = ".rows-"
_PASSED_FILE = re.compile(rf".*{re.escape(PASSED_FOLDER)}[^/]{{8}}/[^/]+", re.DOTALL)
_MAX_CHARACTERS = 200
_MAX_LISTED = 10


def shortest_names(paths: Sequence[str]) -> list[str]:
    """A name for each file: the shortest end of its path, in whole folders, that no other of these paths has.

    Where one path ends with all of another, below the folder that all share, the shorter one is its own name.

    Args:
        paths: of all files of a job, no file twice; local ones relative or absolute, or of object stores. Data that a
            program passes has the name of its file, whatever the others are called.

    Example:
        >>> shortest_names(["data/a/train.jsonl", "data/b/train.jsonl", "/data/more.jsonl"])
        ['a/train.jsonl', 'b/train.jsonl', 'more.jsonl']
    """
    parts = [_parts_of(path) for path in paths]
    with_folders = [each for each, path in zip(parts, paths, strict=True) if not is_passed(path)]
    if len(with_folders) > 1:
        first, last = min(with_folders), max(with_folders)
        shared = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        shared = min(shared, *(len(each) - 1 for each in with_folders))
        passed = {each[-1] for each, path in zip(parts, paths, strict=True) if is_passed(path)}
        for each in with_folders:
            del each[: max(shared - (each[-1] in passed), 0)]
    names = [""] * len(parts)
    waiting, depth = list(range(len(parts))), 0
    while waiting:
        depth += 1
        ends = {number: "/".join(parts[number][-depth:]) for number in waiting}
        times = Counter(ends.values())
        for number, end in ends.items():
            names[number] = end
        waiting = [number for number, end in ends.items() if times[end] > 1 and depth < len(parts[number])]
    return names


def is_passed(path: str) -> bool:
    """Whether a file holds data that a program passes, or that came through a pipe."""
    return _PASSED_FILE.fullmatch(path) is not None


def _parts_of(path: str) -> list[str]:
    """The folders of a whole path, and the name of the file; the name alone of data that a program passes."""
    text = os.fsencode(path).decode(errors="backslashreplace")  # some names are no text
    if is_remote(text):
        return [part for part in text.split("/") if part]
    text = os.path.basename(text) if is_passed(text) else os.path.abspath(text)
    if of_hub := _HUB_FILE.fullmatch(text):
        text = "/".join(of_hub.groups())
    return [part for part in text.split("/") if part]


def listed_names(spec: ColumnSpec) -> list[str]:
    """Names of the input files of a column ``source`` by number, for people, as of ``told_apart``."""
    files = spec.metadata.get("files")
    listed: list[Any] = files if isinstance(files, list) else []
    # Anybody may write anything into the metadata.
    return told_apart([str(one["name"] if isinstance(one, dict) and "name" in one else "a file") for one in listed])


def told_apart(names: Sequence[str]) -> list[str]:
    """The names for people: none is very long, and equal ones have their numbers, as ``a.jsonl (0)``."""
    names = [shortened(name, _MAX_CHARACTERS) for name in names]
    times = Counter(names)
    return [name if times[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]


def find_name(spelling: str, names: Sequence[str], where: str, paths: Sequence[str] = ()) -> int:
    """The number of the file that a user means, in every verb and option that takes a file of the input.

    A file is meant by its path as in the input, where ``paths`` are known, or by its name. Else it is meant by the end,
    in whole folders, of its name or path, if no other file has that end. So no folder is ignored that the user wrote.

    Args:
        spelling: what the user wrote.
        names: of the files, as ``told_apart`` or ``listed_names`` gives them.
        where: how errors begin.
        paths: of the files, where the input is at hand.

    Raises:
        FormatError: no file is meant, or several: the error lists the names that are nearest.

    Example:
        >>> find_name("b/train.jsonl", ["a/train.jsonl", "new/b/train.jsonl"], "--where")
        1
    """
    text = _normal(spelling)
    shown = shortened(text, _MAX_CHARACTERS)
    by_path = [number for number, path in enumerate(paths) if path == spelling or _is_path(spelling, path)]
    found = _named(spelling, names)
    is_name = bool(found)
    if not found:
        plain = [name.removesuffix(f" ({number})") for number, name in enumerate(names)]
        found = [number for number, name in enumerate(plain) if f"/{name}".endswith(f"/{shown}")]
    if by_path:
        if len(found) == 1 and found != by_path:
            raise _two_meanings(shown, f"the path of {names[by_path[0]]}", where, names[found[0]])
        return by_path[0]
    if not is_name:
        ends = (number for number, path in enumerate(paths) if f"/{'/'.join(_parts_of(path))}".endswith(f"/{text}"))
        found = sorted({*found, *ends})
    if len(found) == 1:
        return found[0]
    if found:
        raise FormatError(f"{where}: {shown} is any of {_listed([names[n] for n in found])}; name one of them")
    raise FormatError(f"{where}: no input file matches {shown}; there are {_listed(_nearest(shown, names))}")


def find_names(spelling: str, names: Sequence[str], where: str, paths: Sequence[str]) -> list[int]:
    """The numbers of the files that a user means by a glob or folder of the input, or as of ``find_name``.

    A path of the input is that file, whatever a glob of its letters would match.

    Raises:
        FormatError: as of ``find_name``, or a folder or glob is also the name of a file that is not in it.
    """
    folder = spelling.rstrip("/") + "/"
    found = [n for n, path in enumerate(paths) if fnmatch(path, spelling) or path.startswith(folder)]
    if not found or spelling in paths:
        return [find_name(spelling, names, where, paths)]
    named = [] if spelling.endswith("/") else _named(spelling, names)
    if named and named[0] not in found:
        raise _two_meanings(spelling, "a folder or glob of the input", where, names[named[0]])
    return found


def _named(spelling: str, names: Sequence[str]) -> list[int]:
    """The number of the file that has this very name, if one has."""
    texts = spelling, shortened(_normal(spelling), _MAX_CHARACTERS)
    return next(([names.index(text)] for text in texts if names.count(text) == 1), [])


def _normal(spelling: str) -> str:
    """A spelling as names have it: readable, and without ``./`` and the like."""
    text = os.fsencode(spelling).decode(errors="backslashreplace")
    return text if is_remote(text) else os.path.normpath(text)


def _is_path(spelling: str, path: str) -> bool:
    """Whether a spelling is the path of a local file, relative or whole."""
    if is_remote(spelling) or is_remote(path):
        return False
    return os.path.abspath(os.path.expanduser(spelling)) == os.path.abspath(path)


def _two_meanings(text: str, what: str, where: str, name: str) -> FormatError:
    other = "" if name == text else f", {name}"
    return FormatError(
        f"{where}: {text} is {what}, and the name of another input{other}; write the whole path of the file that you"
        " mean, or give a data set another name"
    )


def _nearest(text: str, names: Sequence[str]) -> Sequence[str]:
    """The names, of very many those first that are like the text."""
    if len(names) <= _MAX_LISTED:
        return names
    base = os.path.basename(text)
    near = [name for name in names if os.path.basename(name) == base] or nearest_names(text, names)
    chosen = {*near}
    return [*near, *(name for name in names if name not in chosen)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) + (f" and {len(names) - _MAX_LISTED:,} more" * (len(names) > _MAX_LISTED))
