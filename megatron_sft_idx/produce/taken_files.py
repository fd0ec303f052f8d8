"""The ordered list of the files that a producer took as input, in a file next to the shards.

A position in the input refers to a file by its number, and other files may have appeared in a watched folder since. The
list maps numbers to files. A file is in the list before any piece of it is used.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import OutputFile, read_beginning, sync_folder
from megatron_sft_idx.storage.publish import describe

_MAX_NBYTES = 1 << 30
_LINE = b'{"name":'


class TakenFile(NamedTuple):
    """A file that was taken: its name in the watched folder, or its path; and its size at that time."""

    name: str
    num_bytes: int


class TakenFiles:
    """The list of taken files, one line of JSON each. It is on disk as soon as ``add`` returns.

    Args:
        path: path of the list. It need not exist: the first ``add`` creates it.

    Raises:
        FormatError: the file at ``path`` was not written by this class.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: OutputFile | None = None
        self._exists = os.path.lexists(path)  # if a file appears at this path later, it is unrelated
        if self._exists and describe(path) != "a file":
            raise FormatError(f"{path}: expected a file or nothing, found {describe(path)}; move it away")
        content = read_beginning(path, _MAX_NBYTES + 1) if self._exists else b""
        if len(content) > _MAX_NBYTES:
            raise FormatError(
                f"{path}: larger than {_MAX_NBYTES} bytes, so no producer wrote this file; use another catalog folder"
            )
        # An incomplete last line was being written when the producer was killed; its file was not read yet.
        self._nbytes = content.rfind(b"\n") + 1
        torn = content[self._nbytes :]
        if not (_LINE.startswith(torn) or torn.startswith(_LINE)):
            raise FormatError(
                f"{path}: this file was not written by a producer; move it away, or choose another folder"
            )
        self.files: list[TakenFile] = []
        for line in content[: self._nbytes].splitlines():
            try:
                file = TakenFile(**json.loads(line))
                if list(map(type, file)) != [str, int]:
                    raise TypeError
            except (ValueError, TypeError, RecursionError):
                raise FormatError(
                    f"{path}: line {len(self.files) + 1} is {line[:60]!r}, expected a name and a number of bytes; the"
                    " file is damaged: use another catalog folder"
                ) from None
            self.files.append(file)

    def add(self, *files: TakenFile) -> None:
        """Add files to the end of the list, durably."""
        if self._file is None:
            self._file = OutputFile(self.path, append=self._exists)
            self._file.truncate(self._nbytes)
            sync_folder(Path(self.path).parent)
        self._file.write(b"".join(json.dumps(file._asdict()).encode() + b"\n" for file in files))
        self._file.sync()
        self.files += files

    def clear(self) -> None:
        """Empty the list. The caller must know that nothing was made from these files."""
        self.files, self._nbytes = [], 0

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
