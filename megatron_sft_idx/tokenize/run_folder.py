"""The folder of a run's parts: who works in it, and what the run is of that left it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard.prefix import lock_journal
from megatron_sft_idx.storage.local import read_most
from megatron_sft_idx.storage.publish import Kind, describe, head_of, write_file
from megatron_sft_idx.tokenize.parts import PART_MAGIC

__all__ = ["RunFolder", "RunState"]

_MAX_NBYTES = 1 << 28
_VERSION = 2
_LOCK = "run.journal"
_BEGIN = b'{"version":'
_KIND = Kind("the record of a run", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)
# The lock, what the run is of, parts, and what a kill left of them; a file that is open somewhere on NFS.
_OURS = re.compile(
    r"run\.journal|run\.json|\.run\.json\.([0-9a-f]+\.)?tmp|\d+-\d+(\.[0-9a-f]+)?\.part(\.([0-9a-f]+\.)?tmp)?|\.nfs.+"
)


@dataclass(frozen=True, slots=True)
class RunState:
    """What a run is of, and how far it has come, for telling a person what differs before hours of work.

    Attributes:
        inputs: path and size of each file.
        metadata: all that decides over tokens and masks, as in a header.
        packing: what decides over packs.
        cutting: bytes a piece, and pieces a part.
        overwrite: shards may be replaced.
        keep_corpus: the corpus is a result too.
        tokenized: all parts are there.
    """

    inputs: list[list[Any]]
    metadata: dict[str, Any]
    packing: dict[str, Any]
    cutting: list[int]
    overwrite: bool
    keep_corpus: bool
    tokenized: bool = False

    @classmethod
    def decode(cls, raw: bytes) -> RunState | None:
        """From JSON; None where it is nothing that ``RunFolder.write`` wrote."""
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            content = json.loads(raw)
            if isinstance(content, dict) and content.pop("version", None) == _VERSION:
                state = cls(**content)
                if state._is_valid():
                    return state
        return None

    def _is_valid(self) -> bool:
        return (
            isinstance(self.metadata, dict)
            and isinstance(self.packing, dict)
            and isinstance(self.inputs, list)
            and all(isinstance(file, list) and list(map(type, file)) == [str, int] for file in self.inputs)
            and isinstance(self.cutting, list)
            and all(type(value) is bool for value in (self.overwrite, self.keep_corpus, self.tokenized))
        )

    def other_inputs(self, wanted: RunState) -> str:
        """The first file that differs in its place and size from what this run would read; "" where none does."""
        for number, (found, now) in enumerate(zip_longest(self.inputs, wanted.inputs), 1):
            if found is None or now is None or found[1] != now[1]:
                return f"file {number} was {_shown(found)}, is {_shown(now)}"
        return ""


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether a run made this, by its name and by what it begins with; a kill may have left it empty."""
    if not _OURS.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
        return False
    if entry.name == _LOCK or entry.name.startswith(".nfs"):
        return True
    begin = _BEGIN if "run.json" in entry.name else PART_MAGIC
    found = head_of(entry.path, len(begin))
    return not found.strip(b"\0") or begin.startswith(found)


def _shown(file: list[Any] | None) -> str:
    return f"{file[0]} of {file[1]:,} bytes" if file else "none"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """``PREFIX.parts``: the parts of one run, and in ``run.json`` what it is of.

    Parts say for themselves what they were made from, so those of two runs are never mixed; ``run.json`` is for
    telling a person what differs before hours of work.

    Attributes:
        path: of the folder, absolute.
    """

    path: str

    @classmethod
    def of(cls, prefix: str) -> RunFolder:
        """The folder of the run that makes ``prefix``."""
        return cls(os.path.abspath(prefix) + ".parts")

    @property
    def state_path(self) -> str:
        """Of the file that says what the run is of."""
        return os.path.join(self.path, "run.json")

    @property
    def exists(self) -> bool:
        """Whether an interrupted run left it."""
        return os.path.lexists(self.state_path) and os.lstat(self.state_path).st_size > 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other drivers out; the folder is made where it is missing, and goes where nothing is left to resume.

        Raises:
            FormatError: another driver is at work, or the folder is not of such runs.
        """
        if os.path.lexists(self.path) and (os.path.islink(self.path) or not os.path.isdir(self.path)):
            raise FormatError(
                f"{self.path}: {describe(self.path)} is here, where the tokenised parts would be for a while; move it"
                " away, or choose another --output-prefix"
            )
        with contextlib.suppress(FileNotFoundError):
            if other := next((entry.name for entry in os.scandir(self.path) if not _is_ours(entry)), None):
                raise FormatError(
                    f"{self.path}: holds {other}, which is not of a run; the folder is made for one and removed after"
                    " it: move it away, or choose another --output-prefix"
                )
        fd = self._lock()
        try:
            yield
        finally:
            try:
                if not self.exists:
                    self._remove()
            finally:
                os.close(fd)

    def _remove(self) -> None:
        """Remove the folder with what is left in it; one in which somebody put something else stays."""
        with contextlib.suppress(OSError):
            self.clear()
            os.unlink(os.path.join(self.path, _LOCK))
            os.rmdir(self.path)

    def _lock(self) -> int:
        """The descriptor of the lock, held."""
        while True:
            os.makedirs(self.path, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a driver that ended meanwhile took the folder with it
                return lock_journal(ShardPaths(os.path.join(self.path, "run")), create=True)

    def write(self, state: RunState) -> None:
        """Say what the run is of, durably."""
        content = {"version": _VERSION, **asdict(state)}
        write_file(self.state_path, json.dumps(content).encode(), _KIND, overwrite=True)

    def read(self) -> RunState:
        """What the run is of that left this folder. FormatError where that is no such run."""
        state = RunState.decode(read_most(self.state_path, _MAX_NBYTES))
        if state is None:
            raise FormatError(
                f"{self.state_path}: not a run of this command, or of another version of it; remove the folder"
                f" {self.path}, or pass --overwrite"
            )
        return state

    def clear(self) -> None:
        """Remove the parts, and what says what they are of; the lock, which is held, stays."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.state_path)  # first: a kill on the way leaves nothing that seems worth resuming
        self.remove_parts()

    def remove_parts(self) -> None:
        """Remove the parts alone."""
        for entry in os.scandir(self.path):
            if entry.path != self.state_path and entry.name != _LOCK and _is_ours(entry):
                os.unlink(entry.path)

    def has_parts(self) -> bool:
        """Whether any work is done that can be gone on with."""
        return any(entry.name.endswith(".part") for entry in os.scandir(self.path))
