"""The content of a building folder (``building``): names of its files, their ownership, and ``done.json``.

A file is unrelated if no build creates a file of that name, or if its folder does not begin like ours. Unrelated files
are reported by name and left alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.files import BUILDING, MEDIA_SUFFIXES, SUFFIXES, column_of
from megatron_sft_idx.storage.publish import MAX_NAME_NBYTES, describe, head_of, read_head

OUTPUT, OLD_OUTPUT, REMOVED, PARTS = "output", "output.old", "removed", "parts"
# Logs of a writer: of packs, of the items of images and audio in them, and of the encoded files that these show.
PACKS, ITEMS, BLOBS = LOGS = "packs", "items", "blobs"
LOCK, BUILD, DONE = "lock", "build.json", "done.json"
# The beginning of build.json and done.json.
MARK = {"sft-building": 1}
_BEGIN = json.dumps(MARK).removesuffix("}").encode()
_OF_SHARDS = (*SUFFIXES, *MEDIA_SUFFIXES)
_OURS = {LOCK, BUILD, DONE, BUILD + ".tmp", DONE + ".tmp", OUTPUT, OLD_OUTPUT, REMOVED, *LOGS, PARTS, *_OF_SHARDS}
_PART = re.compile(r"[0-9a-f]{32}\.part(\.[0-9a-f]+\.tmp)?")
_MAX_NBYTES = 1 << 28


class Done(NamedTuple):
    """The remaining steps for an output with complete files: the content of ``done.json``.

    Attributes:
        files: names in the folder of the files to rename, in order.
        replaces: inodes of the files to replace or remove, by the same names.
        outputs: for a job with several outputs, the suffixes of the others.
        awaits: whether this is one of several outputs, which are published by the job's own ``done.json``.
    """

    files: list[str]
    replaces: dict[str, int]
    outputs: list[str]
    awaits: bool


def building_of(output: str) -> str | None:
    """Return the folder of unfinished work for an output; None if there is none or it is unrelated."""
    folder = output + BUILDING
    return folder if _is_begun(folder) and not os.path.islink(folder) else None


def is_whole_at(output: str) -> bool:
    """Return whether an interrupted writer left all files of an output complete, perhaps waiting for a job's others."""
    return building_of(output) is not None and os.path.lexists(os.path.join(output + BUILDING, DONE))


def _is_begun(folder: str) -> bool:
    return any(head_of(os.path.join(folder, name), len(_BEGIN)) == _BEGIN for name in (BUILD, DONE))


def is_half_finished(output: str) -> bool:
    """Return whether a file in ``done.json`` was already renamed or removed, so that the rest must follow."""
    done = read_done(output)
    for name in done.files:
        staged = inode_at(os.path.join(output + BUILDING, name))
        # After an exchange the folder is the old one. If renaming uses a second link, a file may have both names.
        if staged in (None, done.replaces.get(name), inode_at(target_of(output, name))):
            return True
    if any(inode_at(target_of(output, name)) is None for name in done.replaces):
        return True
    others = [output + end for end in done.outputs]
    return any(not is_whole_at(other) or is_half_finished(other) for other in others)


def lost_files(output: str) -> list[str]:
    """Return paths of files that ``done.json`` lists as complete, but that disappeared before their renames."""
    done = read_done(output)
    lost = []
    for name in done.files:
        path = os.path.join(output + BUILDING, name)
        if inode_at(path) is None and inode_at(target_of(output, name)) in (None, done.replaces.get(name)):
            lost.append(path)
    for end in done.outputs:
        if os.path.lexists(os.path.join(output + end + BUILDING, DONE)):
            lost += lost_files(output + end)
    return lost


def require_no_lost_files(output: str) -> None:
    """Raise FormatError if there are ``lost_files``."""
    for path in lost_files(output):
        raise FormatError(
            f"{path}: this file was removed before it was moved to its final path; run the command that wrote it"
            " again, with overwrite (--overwrite)"
        )


def target_of(output: str, name: str) -> str:
    """Return the final path of the file ``name`` of a building folder."""
    return output if name == OUTPUT else output + name


def inode_at(path: str) -> int | None:
    """Return the inode at a path, without following links; None if nothing exists."""
    try:
        return os.lstat(path).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_done(output: str) -> Done:
    """Return the remaining steps for an output.

    FormatError: ``done.json`` is not as ``Building.complete`` wrote it. FileNotFoundError: it does not exist.
    """
    path = os.path.join(output + BUILDING, DONE)
    if (content := read_json(path)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    files, replaces, outputs, awaits = (content.get(name) for name in Done._fields)
    if isinstance(files, list) and isinstance(outputs, list) and isinstance(replaces, dict) and type(awaits) is bool:
        known = all(isinstance(name, str) and is_file_name(name) for name in (*files, *replaces))
        ends = all(isinstance(end, str) and end and not {"/", "\0"} & {*end} for end in outputs)
        if known and ends and all(type(inode) is int for inode in replaces.values()):
            return Done(files, replaces, outputs, awaits)
    raise _damaged(path)


def require_short(output: str) -> None:
    """Raise FormatError if the name of the folder of an output would be too long."""
    if len(os.fsencode(os.path.basename(output) + BUILDING)) > MAX_NAME_NBYTES:
        raise FormatError(
            f"{output}: with the suffix {BUILDING}, longer than {MAX_NAME_NBYTES} bytes, the maximum for one name;"
            " choose a shorter one"
        )


def require_ours(output: str) -> None:
    """Raise FormatError if the folder of an output is, or contains, something that no build creates.

    ``build.json`` and ``done.json`` must not be damaged, either.
    """
    folder = output + BUILDING
    try:
        if os.path.islink(folder) or not os.path.isdir(folder):
            if os.path.lexists(folder):
                raise FormatError(
                    f"{folder}: {describe(folder)} exists at the path of the folder for unfinished work; move it away"
                )
            return
        # Checked twice: without the lock, a writer may begin in between.
        for name in _strangers(folder) if any(_strangers(folder)) else ():
            is_begun = _is_begun(folder)
            if is_begun and name in (BUILD, DONE):
                raise _damaged(os.path.join(folder, name))
            what = "it" if is_begun else "the folder"  # nothing shows then that anything in it is ours
            raise FormatError(
                f"{folder}: contains {name}, which is not part of a build. This folder is for unfinished work, and is"
                f" removed at the end: move {what} away"
            )
        read_json(os.path.join(folder, BUILD))
        if os.path.lexists(os.path.join(folder, DONE)):
            read_done(output)
    except FileNotFoundError:  # its writer has just removed it
        return


def _strangers(folder: str) -> Iterator[str]:
    """Yield names in the folder and its subfolders that no build creates there."""
    begun = _is_begun(folder)
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            name = entry.name
            if name.startswith(".nfs"):  # a file that is removed and still open somewhere
                continue
            if name not in _OURS and not is_file_name(name):
                yield name
            elif entry.is_dir(follow_symlinks=False) and name in (OUTPUT, OLD_OUTPUT, REMOVED, PARTS):
                yield from (f"{name}/{inner}" for inner in _strange_in(entry.path, parts=name == PARTS, begun=begun))
            elif not entry.is_file(follow_symlinks=False) or name == PARTS or not _may_hold(entry, begun=begun):
                yield name


def _may_hold(entry: os.DirEntry[str], *, begun: bool) -> bool:
    """Return whether a file with one of our names has content that it may have."""
    with contextlib.suppress(FileNotFoundError):
        if not (nbytes := entry.stat(follow_symlinks=False).st_size):
            return entry.name not in (BUILD, DONE)
        if entry.name.startswith((BUILD, DONE)):
            head = head_of(entry.path, min(nbytes, len(_BEGIN)))
            is_torn = entry.name.endswith(".tmp") and not head.strip(b"\0")  # after a power failure
            return is_torn or _BEGIN.startswith(head)
        # Before build.json exists, nothing is written to any other file. Nothing is ever written to the lock.
        return begun and entry.name != LOCK
    return True


def _strange_in(folder: str, *, parts: bool, begun: bool) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            is_ours = not parts or _PART.fullmatch(entry.name) or entry.name.startswith(".nfs")
            if not is_ours or not entry.is_file(follow_symlinks=False) or not _may_hold(entry, begun=begun):
                yield entry.name


def is_file_name(name: str) -> bool:
    """Return whether a file of an output may have this name in the folder."""
    return name in (OUTPUT, ".json", *_OF_SHARDS) or (name.startswith(".") and column_of("x" + name) is not None)


def read_json(path: str) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file. FormatError: other content."""
    # The writer may remove or replace the file at any time, so it is opened once and the path is not used again.
    raw = b""
    try:
        raw = read_head(path, _MAX_NBYTES)
    except FileNotFoundError:
        return None
    except OSError:
        pass  # a link, or unreadable: treated as damaged
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(raw)
        if isinstance(content, dict):
            return content
    raise _damaged(path)


def _damaged(path: str) -> FormatError:
    """Return the error about a damaged ``build.json`` or ``done.json``."""
    folder = os.path.dirname(path)
    return FormatError(
        f"{path}: damaged, so the state of the unfinished work is unknown; remove the folder {folder} and the output"
        f" {folder.removesuffix(BUILDING)}, unless that is complete; then run the command again"
    )
