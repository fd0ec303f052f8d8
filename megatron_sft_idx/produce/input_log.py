"""``_inputs.jsonl``: the files of the input in the order in which they are read, each noted before it is.

So a producer that was killed knows which files of a folder it had taken, whatever has appeared there since.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import OutputFile, read_most, sync_folder
from megatron_sft_idx.storage.publish import describe

__all__ = ["INPUTS", "InputLog", "TakenFile"]

INPUTS = "_inputs.jsonl"
_MAX_NBYTES = 1 << 30
_LINE = b'{"name":'


class TakenFile(NamedTuple):
    """A file of the input.

    Attributes:
        name: in the folder that is watched, or the path as it was found.
        num_bytes: its size when it was taken.
    """

    name: str
    num_bytes: int


class InputLog:
    """The list of files, on disk as soon as ``add`` returns.

    Args:
        path: of the log; made with the first file.

    Raises:
        FormatError: what is there was not written by this class.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: OutputFile | None = None
        if os.path.lexists(path) and describe(path) != "a file":
            raise FormatError(f"{path}: {describe(path)} is here, expected a file or nothing; move it away")
        self._found = os.path.lexists(path)  # one that appears later is not this one
        content = self._read()
        # A line without its end was being written when the producer was killed: its file was not read yet.
        self._nbytes = content.rfind(b"\n") + 1
        torn = content[self._nbytes :]
        if not (_LINE.startswith(torn) or torn.startswith(_LINE)):
            raise FormatError(f"{path}: a file that no producer wrote is here; move it away, or name another folder")
        lines = content[: self._nbytes].splitlines()
        self.files = [self._parse(line, number) for number, line in enumerate(lines, 1)]

    def add(self, *files: TakenFile) -> None:
        """Note files that come after those noted."""
        if self._file is None:
            self._file = OutputFile(self.path, keep=self._found)
            self._file.cut(self._nbytes)
            sync_folder(Path(self.path).parent)
        self._file.write(b"".join(json.dumps(file._asdict()).encode() + b"\n" for file in files))
        self._file.sync()
        self.files += files

    def clear(self) -> None:
        """Forget all files: nothing was made of them."""
        assert self._file is None
        self.files, self._nbytes = [], 0

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self) -> bytes:
        try:
            content = read_most(self.path, _MAX_NBYTES + 1)
        except FileNotFoundError:
            return b""
        if len(content) > _MAX_NBYTES:
            raise FormatError(f"{self.path}: more than {_MAX_NBYTES} bytes, which it never has; make another catalog")
        return content

    def _parse(self, line: bytes, number: int) -> TakenFile:
        try:
            entry = json.loads(line)
            name, num_bytes = entry["name"], entry["num_bytes"]
        except (ValueError, KeyError, TypeError, RecursionError):
            name = num_bytes = None
        if not isinstance(name, str) or type(num_bytes) is not int:
            raise FormatError(
                f"{self.path}: line {number} is {line[:60]!r}, expected a name and a number of bytes; the file is"
                " damaged: make another catalog"
            )
        return TakenFile(name, num_bytes)
