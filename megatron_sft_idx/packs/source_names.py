"""Names of input files: how the column ``source`` names them, and which file a user means by a spelling.

A file has the shortest part of its path that no other file of the job ends with: ``chats.jsonl``, or ``a/train.jsonl``
and ``b/train.jsonl``. So names are the same wherever the files lie, and never absolute paths.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.lines import shortened
from megatron_sft_idx.storage import is_remote

# Files that the Hugging Face hub gave lie in its cache under the name of their repository, and under its revision.
_HUB_FILE = re.compile(r".*/datasets--([^/]+)--([^/]+)/snapshots/[0-9a-f]{40}/(.+)", re.DOTALL)
_MAX_CHARACTERS = 200
_MAX_LISTED = 10


def shortest_names(paths: Sequence[str]) -> list[str]:
    """A name for each file: the shortest end of its path, in whole folders, that no other of these paths has.

    Where one path ends with all of another, below the folder that all share, the shorter one is its own name.

    Args:
        paths: of all files of a job, no file twice; local ones relative or absolute, or of object stores.

    Example:
        >>> shortest_names(["data/a/train.jsonl", "data/b/train.jsonl", "/data/more.jsonl"])
        ['a/train.jsonl', 'b/train.jsonl', 'more.jsonl']
    """
    parts = [_parts_of(path) for path in paths]
    if len(parts) > 1:
        first, last = min(parts), max(parts)
        shared = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        shared = min(shared, *(len(each) - 1 for each in parts))
        parts = [each[shared:] for each in parts]
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


def _parts_of(path: str) -> list[str]:
    """The folders of a whole path, and the name of the file."""
    text = os.fsencode(path).decode(errors="backslashreplace")  # some names are no text
    if is_remote(text):
        return [part for part in text.split("/") if part]
    text = os.path.abspath(text)
    if of_hub := _HUB_FILE.fullmatch(text):
        text = "/".join(of_hub.groups())
    return [part for part in text.split("/") if part]


def listed_names(spec: ColumnSpec) -> list[str]:
    """Names of the input files of a column ``source`` by number, for people; equal ones as ``a.jsonl (0)``."""
    files = spec.metadata.get("files")
    listed: list[Any] = files if isinstance(files, list) else []
    # Anybody may write anything into the metadata.
    names = [str(one["name"] if isinstance(one, dict) and "name" in one else "a file") for one in listed]
    names = [shortened(name, _MAX_CHARACTERS) for name in names]
    times = Counter(names)
    return [name if times[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]


def find_name(spelling: str, names: Sequence[str], where: str) -> int:
    """The number of the file that a user means.

    A name itself is taken first. Else it is the end of a name, such as its base name, or a longer path that ends with a
    name, of which the longest counts.

    Args:
        spelling: what the user wrote.
        names: of the files, as ``shortest_names`` or ``listed_names`` gives them.
        where: how errors begin.

    Raises:
        FormatError: no file is meant, or several.

    Example:
        >>> find_name("/mnt/b/train.jsonl", ["a/train.jsonl", "b/train.jsonl"], "--where")
        1
    """
    if names.count(spelling) == 1:
        return names.index(spelling)
    text = os.fsencode(spelling).decode(errors="backslashreplace")
    text = shortened(text if is_remote(text) else os.path.normpath(text), _MAX_CHARACTERS)
    if names.count(text) == 1:
        return names.index(text)
    plain = [name.removesuffix(f" ({number})") for number, name in enumerate(names)]
    found = [number for number, name in enumerate(plain) if f"/{name}".endswith(f"/{text}")]
    if not found:
        longer = {number: len(name) for number, name in enumerate(plain) if text.endswith(f"/{name}")}
        found = [number for number, length in longer.items() if length == max(longer.values())]
    if len(found) == 1:
        return found[0]
    if found:
        raise FormatError(f"{where}: {text} is any of {_listed([names[n] for n in found])}; name one of them")
    raise FormatError(f"{where}: no input file matches {text}; there are {_listed(names)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) + (f" and {len(names) - _MAX_LISTED:,} more" * (len(names) > _MAX_LISTED))
