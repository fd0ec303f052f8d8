"""The contract that fuzz targets check: bad input raises SFTIndexError, never another error."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron_sft_idx.errors import SFTIndexError

_MEMORY = Path("/dev/shm")

Run = Callable[[bytes], None]


class Target(NamedTuple):
    """One fuzz target.

    Attributes:
        module: module in this folder; its ``run(data)`` fails if the contract is broken.
        max_nbytes: maximum length of an input.
    """

    module: str
    max_nbytes: int = 4096


@contextmanager
def refused(path: str = "", *also: type[Exception]) -> Iterator[None]:
    """Accept a SFTIndexError (or one of ``also``) in the block. Its message must begin with ``path``."""
    try:
        yield
    except SFTIndexError as error:
        assert str(error).startswith(path), error  # noqa: PT017
    except also as error:
        assert str(error), type(error)  # noqa: PT017


def memory_folder() -> Path | None:
    """Return a folder in memory if the system has one, because targets write input files thousands of times."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else None


def scratch(name: str) -> Path:
    """Return a target's folder for the files of one input. It is removed when the process ends."""
    folder = Path(_root().name) / name
    folder.mkdir(exist_ok=True)
    return folder


def put_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder and its subfolders contain exactly these files."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    # libFuzzer ends its process without Python's cleanup, so the driver passes a folder and removes it.
    named = os.environ.get("TMPDIR")
    return tempfile.TemporaryDirectory(prefix="sft-idx-fuzz-", dir=named or memory_folder())
