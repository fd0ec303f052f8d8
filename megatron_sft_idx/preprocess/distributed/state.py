"""The folder of a run's parts: who works in it, and what of it may be used again."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from megatron_sft_idx.chat.inputs.files import InputFile
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.preprocess.distributed.stretches import Cutting
from megatron_sft_idx.preprocess.encoding import RowEncoder
from megatron_sft_idx.preprocess.identity import option_differences
from megatron_sft_idx.shard.prefix import lock_journal
from megatron_sft_idx.storage import read_most
from megatron_sft_idx.storage.publish import Kind, head_of, write_file

__all__ = ["RunFolder"]

_MAX_NBYTES = 1 << 28
_VERSION = 1
_LOCK = "run.journal"
_BEGIN = b'{"version":'
_KIND = Kind("the record of a run", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)
# The lock, what the run is of, parts, and what a kill left of them; a file that is open somewhere on NFS.
_OURS = re.compile(r"run\.journal|run\.json|\.run\.json\.[0-9a-f]+\.tmp|\d+-\d+\.part(\.[0-9a-f]+\.tmp)?|\.nfs.+")


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
    def _state(self) -> str:
        return os.path.join(self.path, "run.json")

    @property
    def exists(self) -> bool:
        """Whether an interrupted run left it."""
        return os.path.lexists(self._state)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other drivers out; the folder is made where it is missing, and goes where nothing is left to resume.

        Raises:
            FormatError: another driver is at work, or the folder is not of such runs.
        """
        with contextlib.suppress(FileNotFoundError):
            if other := next((entry.name for entry in os.scandir(self.path) if not _OURS.fullmatch(entry.name)), None):
                raise FormatError(
                    f"{self.path}: holds {other}, which is not of a run; the folder is made for one and removed after"
                    " it: move it away, or choose another --output-prefix"
                )
        fd = self._lock()
        try:
            yield
        finally:
            if not self.exists:
                self._remove()
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

    def write(self, files: Sequence[InputFile], encoder: RowEncoder, cutting: Cutting, *, overwrite: bool) -> None:
        """Say what the run is of, durably."""
        state = {
            "version": _VERSION,
            "inputs": [[file.path, file.num_bytes] for file in files],
            "metadata": encoder.describe(),
            "cutting": [cutting.piece_nbytes, cutting.pieces],
            "overwrite": overwrite,
        }
        write_file(self._state, json.dumps(state).encode(), _KIND, overwrite=True)

    def resume(self, files: Sequence[InputFile], encoder: RowEncoder, cutting: Cutting) -> bool:
        """Whether the interrupted run was to overwrite.

        Raises:
            FormatError: it was of other input or options, and says which.
        """
        state = self._read()
        remedy = "pass the same to go on, or --overwrite to start anew"
        if differs := option_differences(state["metadata"], encoder):
            raise FormatError(f"{self._state}: the interrupted run had other options: {'; '.join(differs)}; {remedy}")
        for number, (found, wanted) in enumerate(zip_longest(state["inputs"], files), 1):
            if found is None or wanted is None or found[1] != wanted.num_bytes:
                was = f"{found[0]} of {found[1]:,} bytes" if found else "none"
                now = f"{wanted.path} of {wanted.num_bytes:,} bytes" if wanted else "none"
                raise FormatError(
                    f"{self._state}: the interrupted run had other input: file {number} was {was}, is {now}; {remedy}"
                )
        if state["cutting"] != [cutting.piece_nbytes, cutting.pieces]:
            raise FormatError(f"{self._state}: left by another version of this command; pass --overwrite to start anew")
        return bool(state["overwrite"])

    def _read(self) -> dict[str, Any]:
        raw = read_most(self._state, _MAX_NBYTES)
        with contextlib.suppress(ValueError, RecursionError):
            state = json.loads(raw)
            if (
                isinstance(state, dict)
                and state.get("version") == _VERSION
                and isinstance(state.get("metadata"), dict)
                and isinstance(state.get("inputs"), list)
                and all(isinstance(file, list) and list(map(type, file)) == [str, int] for file in state["inputs"])
                and isinstance(state.get("cutting"), list)
                and type(state.get("overwrite")) is bool
            ):
                return state
        raise FormatError(
            f"{self._state}: not a run of this command; remove the folder {self.path}, or pass --overwrite"
        )

    def clear(self) -> None:
        """Remove the parts, and what says what they are of; the lock, which is held, stays."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._state)  # first: a kill on the way leaves nothing that seems worth resuming
        for entry in os.scandir(self.path):
            if entry.name != _LOCK and _OURS.fullmatch(entry.name):
                os.unlink(entry.path)

    def has_parts(self) -> bool:
        """Whether any work is done that can be gone on with."""
        return any(entry.name.endswith(".part") for entry in os.scandir(self.path))
