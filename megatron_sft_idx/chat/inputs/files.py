"""What the user names as input, made into a list of files of a known kind.

Files are recognised by their content; a suffix only says how a text that could be either is meant.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_sft_idx.chat.inputs.columnar import (
    KNOWN_FILES,
    SAVED_DATASET_NAMES,
    files_of_folder,
    is_saved_dataset,
)
from megatron_sft_idx.chat.inputs.opening import Compression, compression_of, find_object, open_stream, read_blocks
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import is_remote, read_most
from megatron_sft_idx.storage.remote.store import exists, in_folder, matching

__all__ = ["InputFile", "Kind", "expand_inputs", "total_bytes"]

Kind = Literal["lines", "array", "parquet", "arrow"]

_MAGIC_NBYTES = 8
_HEAD_NBYTES = 1 << 16
_JSON_SPACE = b" \t\r\n"
_FOREIGN = {
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a numpy file",
}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file with rows.

    Attributes:
        path: as given, or as found under the folder or glob that was given.
        kind: JSON lines, one JSON array of objects, Parquet, or an Arrow IPC stream or file.
        compression: of JSON files.
        num_bytes: size on disk, or of the object.
        etag: of a remote file, which must stay the object that it was when it was found.
    """

    path: str
    kind: Kind
    compression: Compression
    num_bytes: int
    etag: str | None = None


def total_bytes(files: Iterable[InputFile]) -> int:
    """What the files take on disk, compressed as they are: the end of the progress bar."""
    return sum(file.num_bytes for file in files)


def expand_inputs(patterns: Sequence[str | os.PathLike[str]]) -> list[InputFile]:
    """Finds the files that paths, globs (``**`` too) and ``save_to_disk`` folders stand for.

    The order is the order given; what a glob finds is sorted by name, what a folder holds is in its own
    order. A name that exists is never taken for a glob. Of a remote folder, which ends in ``/``, all objects right
    in it are taken whose names do not begin with ``_`` or ``.``.

    Raises:
        FormatError: nothing there, the same file twice, a folder of another kind, a file that cannot be read
            or whose kind is not known.
    """
    if isinstance(patterns, (str, os.PathLike)):
        patterns = [patterns]
    if not patterns:
        raise FormatError("no input: name at least one file, glob or save_to_disk folder")
    files: list[InputFile] = []
    found_by: dict[str, str] = {}
    for given in patterns:
        pattern = os.fspath(given)
        for path in _paths_of(pattern):
            real = path if is_remote(path) else os.path.realpath(path)
            if other := found_by.get(real):
                raise FormatError(f"{path}: named twice, by {other!r} and {pattern!r}; its rows would be used twice")
            found_by[real] = pattern
            files.append(_recognise_object(path) if is_remote(path) else _recognise_file(path))
    return files


def _paths_of(pattern: str) -> list[str]:
    if not pattern.strip():
        raise FormatError("an input is an empty string; name a file, glob or save_to_disk folder")
    if is_remote(pattern):
        return _objects_of(pattern)
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        return files_of_folder(path)
    if os.path.lexists(path):
        return [path]
    if not re.search(r"[*?\[]", path):
        raise FormatError(f"{pattern}: no such file or folder")
    matches = sorted(glob.glob(path, recursive=True))
    folders = {match for match in matches if is_saved_dataset(match)}
    paths: list[str] = []
    for match in matches:
        if match in folders:
            paths += files_of_folder(match)
        # Plain folders are what ** runs into; what lies in a dataset's folder came with that.
        elif not os.path.isdir(match) and os.path.dirname(match) not in folders:
            paths.append(match)
    if not paths:
        raise FormatError(f"{pattern}: no file matches")
    return paths


def _objects_of(pattern: str) -> list[str]:
    if pattern.endswith("/"):
        found = in_folder(pattern)
        names = {os.path.basename(path) for path in found}
        if saved := names & SAVED_DATASET_NAMES:
            raise FormatError(
                f"{pattern}: holds {min(saved)}, so it was made by save_to_disk; name its data: {pattern}*.arrow"
            )
        found = [path for path in found if not os.path.basename(path).startswith(("_", "."))]
    elif not glob.has_magic(pattern) or exists(pattern):
        return [pattern]
    elif "**" in pattern:
        raise FormatError(f"{pattern}: ** does not reach into folders of an object store; name each with *")
    else:
        found = matching(pattern)
    if not found:
        raise FormatError(f"{pattern}: no object matches")
    return sorted(found)


def _recognise_file(path: str) -> InputFile:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path}: not a regular file; pipes and devices cannot be read twice")
        magic = read_most(path, _MAGIC_NBYTES)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    return _recognise(path, magic, status.st_size)


def _recognise_object(path: str) -> InputFile:
    info = find_object(path)
    with open_stream(path, info.etag, peek=True) as file:
        magic = file.read(_MAGIC_NBYTES)
    return _recognise(path, magic, info.nbytes, info.etag)


def _recognise(path: str, magic: bytes, num_bytes: int, etag: str | None = None) -> InputFile:
    if magic.startswith(b"PAR1"):
        return InputFile(path, "parquet", "", num_bytes, etag)
    if magic.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return InputFile(path, "arrow", "", num_bytes, etag)
    compression = compression_of(magic)
    head = b""
    for block, _ in read_blocks(path, compression, etag, peek=True):
        head += block
        if len(head) >= _HEAD_NBYTES:
            break
    return InputFile(path, _kind_of_text(path, head[:_HEAD_NBYTES]), compression, num_bytes, etag)


def _kind_of_text(path: str, head: bytes) -> Kind:
    text = head.lstrip(_JSON_SPACE)
    means_lines = bool(re.search(r"\.(jsonl|ndjson)(\.|$)", path, re.IGNORECASE))
    # A line of JSON lines is an object, so an array of objects is one array whatever the file is called.
    if re.match(rb"\[\s*(\{|\]|$)", text) or (text.startswith(b"[") and not means_lines):
        return "array"
    for start, what in _FOREIGN.items():
        if text.startswith(start):
            raise FormatError(f"{path}: this is {what}; expected {KNOWN_FILES}")
    if not text or means_lines:
        return "lines"
    if not text.startswith(b"{"):
        raise FormatError(f"{path}: starts like no known file, {text[:20]!r}; expected {KNOWN_FILES}")
    line = text.partition(b"\n")[0].rstrip()
    if len(line) < len(text.rstrip()) and line.endswith((b"{", b"[", b",")):
        raise FormatError(
            f"{path}: one JSON object over several lines; expected an object a line, or an array of objects. "
            "If a key of it holds the rows: jq -c '.KEY[]' FILE > rows.jsonl"
        )
    return "lines"
