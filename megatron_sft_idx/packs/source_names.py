"""Names of input files: the names in the column ``source``, and the lookup of a file from the user's spelling.

A file's name is the shortest end of its path that is unique among the files of the job: ``chats.jsonl``, or
``a/train.jsonl`` and ``b/train.jsonl``. So names do not depend on the location of the files, and are never absolute
paths. Data passed by a program is written to a file in a temporary folder, which is not part of the name.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from megatron_sft_idx.errors import FormatError, nearest_names
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.lines import shortened
from megatron_sft_idx.shard.columns import ShardColumn
from megatron_sft_idx.storage import is_remote

SOURCE = "source"
# Files from the Hugging Face hub are in its cache, under the name of their repository and under its revision.
_HUB_FILE = re.compile(r".*/datasets--([^/]+)--([^/]+)/snapshots/[0-9a-f]{40}/(.+)", re.DOTALL)
# Part of the name of the folder for data passed by a program or through a pipe; ``tempfile`` adds the end.
PASSED_FOLDER = ".rows-"
_PASSED_FILE = re.compile(rf".*{re.escape(PASSED_FOLDER)}[^/]{{8}}/[^/]+", re.DOTALL)
_MAX_CHARACTERS = 200
_MAX_LISTED = 10


def shortest_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each file: the shortest end of its path, in whole folders, that is unique among these paths.

    If one path ends with all of another one (below the folder that all share), the shorter one is its own name.

    Args:
        paths: paths of all files of a job without duplicates: local ones, relative or absolute, or in object stores.
            Data passed by a program gets the name of its file, whatever the names of the others are.

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
    """Return whether a file holds data passed by a program or through a pipe."""
    return _PASSED_FILE.fullmatch(path) is not None


def _parts_of(path: str) -> list[str]:
    """Return the folders of an absolute path and the file name; only the file name for data passed by a program."""
    text = os.fsencode(path).decode(errors="backslashreplace")  # some names are not text
    if is_remote(text):
        return [part for part in text.split("/") if part]
    text = os.path.basename(text) if is_passed(text) else os.path.abspath(text)
    if of_hub := _HUB_FILE.fullmatch(text):
        text = "/".join(of_hub.groups())
    return [part for part in text.split("/") if part]


def source_names(columns: Mapping[str, ShardColumn]) -> list[str] | None:
    """Return the display names of the input files by number; None without a column ``source``."""
    column = columns.get(SOURCE)
    if column is None or column.spec.kind[:3] != ("sequence", "<u4", 2):
        return None
    return listed_names(column.spec)


def origin_name(names: Sequence[str], origin: Sequence[int]) -> str:
    """Return ``chats.jsonl:1`` for file 0 and row 0."""
    file, row = origin
    return f"{names[file] if file < len(names) else f'file {file}'}:{row + 1}"


def listed_names(spec: ColumnSpec) -> list[str]:
    """Return display names of the input files of a column ``source``, by number. See ``told_apart``."""
    files = spec.metadata.get("files")
    listed: list[Any] = files if isinstance(files, list) else []
    # The metadata is untrusted.
    return told_apart([str(one["name"] if isinstance(one, dict) and "name" in one else "a file") for one in listed])


def told_apart(names: Sequence[str]) -> list[str]:
    """Return names for display: long ones are shortened, and equal ones get numbers, such as ``a.jsonl (0)``."""
    names = [shortened(name, _MAX_CHARACTERS) for name in names]
    times = Counter(names)
    return [name if times[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]


def find_name(spelling: str, names: Sequence[str], where: str, paths: Sequence[str] = ()) -> int:
    """Return the number of the file that a user means. All commands and options that take an input file use this.

    A file matches by its path in the input, if ``paths`` are known, or by its name. Otherwise it matches by the end of
    its name or path, in whole folders, if no other file has that end. So no folder that the user wrote is ignored.

    Args:
        spelling: the user's text.
        names: names of the files, from ``told_apart`` or ``listed_names``.
        where: the beginning of errors.
        paths: paths of the files, if the input is available.

    Raises:
        FormatError: no file matches, or several do; the error lists the nearest names.

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
        raise FormatError(
            f"{where}: {shown} matches several files: {_listed([names[n] for n in found])}; use one of these names"
        )
    raise FormatError(f"{where}: no input file matches {shown}; the input files are {_listed(_nearest(shown, names))}")


def find_names(spelling: str, names: Sequence[str], where: str, paths: Sequence[str]) -> list[int]:
    """Return the numbers of the files for a glob or folder of the input, or for a name as in ``find_name``.

    A path of the input always means that file, even if it is also a glob.

    Raises:
        FormatError: see ``find_name``; or a folder or glob is also the name of a file that is not in it.
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
    """Return the number of the file with exactly this name, as a list; empty if there is none."""
    texts = spelling, shortened(_normal(spelling), _MAX_CHARACTERS)
    return next(([names.index(text)] for text in texts if names.count(text) == 1), [])


def _normal(spelling: str) -> str:
    """Normalize a spelling like names: readable, and without parts such as ``./``."""
    text = os.fsencode(spelling).decode(errors="backslashreplace")
    return text if is_remote(text) else os.path.normpath(text)


def _is_path(spelling: str, path: str) -> bool:
    """Return whether a spelling is the relative or absolute path of a local file."""
    if is_remote(spelling) or is_remote(path):
        return False
    return os.path.abspath(os.path.expanduser(spelling)) == os.path.abspath(path)


def _two_meanings(text: str, what: str, where: str, name: str) -> FormatError:
    other = "" if name == text else f", {name}"
    return FormatError(
        f"{where}: {text} is {what}, and also the name of another input{other}; write the whole path of the file that"
        " you mean, or give a data set another name"
    )


def _nearest(text: str, names: Sequence[str]) -> Sequence[str]:
    """Return the names; if there are very many, the most similar ones first."""
    if len(names) <= _MAX_LISTED:
        return names
    base = os.path.basename(text)
    near = [name for name in names if os.path.basename(name) == base] or nearest_names(text, names)
    chosen = {*near}
    return [*near, *(name for name in names if name not in chosen)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) + (f" and {len(names) - _MAX_LISTED:,} more" * (len(names) > _MAX_LISTED))
