"""What every fuzz target holds a parser to: bad input is refused with an error of the family, never with another."""

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
        module: in this folder; its ``run(data)`` fails where the contract is broken.
        max_nbytes: longest input that is tried.
    """

    module: str
    max_nbytes: int = 4096


@contextmanager
def refused(path: str = "", *also: type[Exception]) -> Iterator[None]:
    """Lets an error of the family (or one of ``also``) end the block; its message begins with ``path``."""
    try:
        yield
    except SFTIndexError as error:
        assert str(error).startswith(path), error  # noqa: PT017
    except also as error:
        assert str(error), type(error)  # noqa: PT017


def memory_folder() -> Path | None:
    """A folder in memory where the system has one: targets write their input to files thousands of times."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else None


def scratch(name: str) -> Path:
    """A target's folder for the files of one input; it goes when the process ends."""
    folder = Path(_root().name) / name
    folder.mkdir(exist_ok=True)
    return folder


def put_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """These files in a folder and in the folders in it, and no others."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    # libFuzzer ends its process without a word to Python: the driver, which lives on, names a folder that it removes.
    named = os.environ.get("TMPDIR")
    return tempfile.TemporaryDirectory(prefix="sft-idx-fuzz-", dir=named or memory_folder())
