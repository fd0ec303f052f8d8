"""What lies in a building folder (``building``): names of its files, whose it is, and what ``done.json`` says.

Whatever has a name that no build makes belongs to somebody else, and so does whatever lies in a folder that does not
begin as ours: it is refused by name and left alone.
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
# What a writer notes of packs, of the items of images and audio in them, and of the encoded files that these show.
PACKS, ITEMS, BLOBS = LOGS = "packs", "items", "blobs"
LOCK, BUILD, DONE = "lock", "build.json", "done.json"
# What build.json and done.json begin with.
MARK = {"sft-building": 1}
_BEGIN = json.dumps(MARK).removesuffix("}").encode()
_OF_SHARDS = (*SUFFIXES, *MEDIA_SUFFIXES)
_OURS = {LOCK, BUILD, DONE, BUILD + ".tmp", DONE + ".tmp", OUTPUT, OLD_OUTPUT, REMOVED, *LOGS, PARTS, *_OF_SHARDS}
_PART = re.compile(r"[0-9a-f]{32}\.part(\.[0-9a-f]+\.tmp)?")
_MAX_NBYTES = 1 << 28


class Done(NamedTuple):
    """What is left to do for an output whose files are whole: the content of ``done.json``.

    Attributes:
        files: names in the folder of the files to rename, in order.
        replaces: inodes of the files that are replaced or removed, by the same names.
        outputs: of a job with several outputs, what is added to its own output for each of the others.
        awaits: whether this is one of several outputs, which the job's own ``done.json`` lets appear.
    """

    files: list[str]
    replaces: dict[str, int]
    outputs: list[str]
    awaits: bool


def building_of(output: str) -> str | None:
    """Path of the folder of unfinished work for an output; None if there is none, or it is somebody else's."""
    folder = output + BUILDING
    return folder if _is_begun(folder) and not os.path.islink(folder) else None


def is_whole_at(output: str) -> bool:
    """Whether an interrupted writer left all files of an output whole; it may await the other outputs of a job."""
    return building_of(output) is not None and os.path.lexists(os.path.join(output + BUILDING, DONE))


def _is_begun(folder: str) -> bool:
    return any(head_of(os.path.join(folder, name), len(_BEGIN)) == _BEGIN for name in (BUILD, DONE))


def is_half_finished(output: str) -> bool:
    """Whether a file that ``done.json`` names was renamed or removed already, so that the rest has to follow."""
    done = read_done(output)
    for name in done.files:
        staged = inode_at(os.path.join(output + BUILDING, name))
        # A folder that was exchanged is the old one; where renaming takes a second link, a file may have both names.
        if staged in (None, done.replaces.get(name), inode_at(target_of(output, name))):
            return True
    if any(inode_at(target_of(output, name)) is None for name in done.replaces):
        return True
    others = [output + end for end in done.outputs]
    return any(not is_whole_at(other) or is_half_finished(other) for other in others)


def lost_files(output: str) -> list[str]:
    """Paths of files that ``done.json`` says are whole, and that are gone before they got their names."""
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
    """FormatError if there are ``lost_files``."""
    for path in lost_files(output):
        raise FormatError(
            f"{path}: was removed before it got its name; run the command that wrote it again, with overwrite"
            " (--overwrite)"
        )


def target_of(output: str, name: str) -> str:
    """Path that the file ``name`` of a building folder gets in the end."""
    return output if name == OUTPUT else output + name


def inode_at(path: str) -> int | None:
    """Inode of what is at a path, a link not followed; None for nothing."""
    try:
        return os.lstat(path).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_done(output: str) -> Done:
    """What is left to do for an output.

    FormatError: ``done.json`` is not as ``Building.complete`` wrote it. FileNotFoundError: there is none.
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
    """FormatError if the name of the folder of an output would be too long."""
    if len(os.fsencode(os.path.basename(output) + BUILDING)) > MAX_NAME_NBYTES:
        raise FormatError(
            f"{output}: with {BUILDING}, a name of more than {MAX_NAME_NBYTES} bytes; choose a shorter one"
        )


def require_ours(output: str) -> None:
    """FormatError if something is in the place of the folder of an output, or in it, that no build makes.

    Nor may ``build.json`` and ``done.json`` be damaged.
    """
    folder = output + BUILDING
    try:
        if os.path.islink(folder) or not os.path.isdir(folder):
            if os.path.lexists(folder):
                raise FormatError(
                    f"{folder}: {describe(folder)} is here, where the folder of unfinished work would be; move it away"
                )
            return
        # Looked at twice: without its lock, a writer may begin in between.
        for name in _strangers(folder) if any(_strangers(folder)) else ():
            is_begun = _is_begun(folder)
            if is_begun and name in (BUILD, DONE):
                raise _damaged(os.path.join(folder, name))
            what = "it" if is_begun else "the folder"  # nothing says then that anything in it is ours
            raise FormatError(
                f"{folder}: holds {name}, which no build makes; the folder is for unfinished work and is removed after"
                f" it: move {what} away"
            )
        read_json(os.path.join(folder, BUILD))
        if os.path.lexists(os.path.join(folder, DONE)):
            read_done(output)
    except FileNotFoundError:  # its writer has just removed it
        return


def _strangers(folder: str) -> Iterator[str]:
    """Names in the folder, and in the folders in it, of what no build makes there."""
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
    """Whether a file that has the name of one of ours may hold what it holds."""
    with contextlib.suppress(FileNotFoundError):
        if not (nbytes := entry.stat(follow_symlinks=False).st_size):
            return entry.name not in (BUILD, DONE)
        if entry.name.startswith((BUILD, DONE)):
            head = head_of(entry.path, min(nbytes, len(_BEGIN)))
            is_torn = entry.name.endswith(".tmp") and not head.strip(b"\0")  # by a power failure
            return is_torn or _BEGIN.startswith(head)
        # Before build.json, nothing is written to any other file; to the lock, nothing ever is.
        return begun and entry.name != LOCK
    return True


def _strange_in(folder: str, *, parts: bool, begun: bool) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            is_ours = not parts or _PART.fullmatch(entry.name) or entry.name.startswith(".nfs")
            if not is_ours or not entry.is_file(follow_symlinks=False) or not _may_hold(entry, begun=begun):
                yield entry.name


def is_file_name(name: str) -> bool:
    """Whether a file of an output may have this name in the folder."""
    return name in (OUTPUT, ".json", *_OF_SHARDS) or (name.startswith(".") and column_of("x" + name) is not None)


def read_json(path: str) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file. FormatError: something else is in it."""
    # Its writer may remove or replace the file at any time: it is opened once, and nothing is asked of the path again.
    raw = b""
    try:
        raw = read_head(path, _MAX_NBYTES)
    except FileNotFoundError:
        return None
    except OSError:
        pass  # a link, or unreadable: as damaged
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(raw)
        if isinstance(content, dict):
            return content
    raise _damaged(path)


def _damaged(path: str) -> FormatError:
    """The error about a ``build.json`` or ``done.json`` that does not say any more what it should."""
    folder = os.path.dirname(path)
    return FormatError(
        f"{path}: damaged, so it does not say any more what is unfinished; remove the folder {folder}, and what is at"
        f" {folder.removesuffix(BUILDING)} unless it is whole; then run the command again"
    )
