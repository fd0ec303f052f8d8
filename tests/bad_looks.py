"""A disk on which some reads of a path fail, and a clock that advances only when the code waits before a retry."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.live import waiting

# Temporary faults of a network file system, apart from a torn file.
ERRORS = (errno.EIO, errno.ESTALE, errno.ENOENT)


def hurry(patch: pytest.MonkeyPatch, pause: Callable[[], object] = lambda: None) -> None:
    """Make waits between looks take no time, and call ``pause`` in each of them."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        pause()

    patch.setattr(waiting, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))


@contextmanager
def failing(path: Path, number: int, looks: float) -> Iterator[list[int]]:
    """Make the next ``looks`` looks at a path fail with an error. Yield a list with the number of failures so far.

    Opening a file, listing a folder and reading the status are looks. Paths are compared as text.
    """
    failed = [0]

    def faulty(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(where: Any, *more: Any, **named: Any) -> Any:
            # The files of locks and renames have other names.
            if isinstance(where, str | os.PathLike) and os.fspath(where) == str(path) and failed[0] < looks:
                failed[0] += 1
                if name == "access":
                    return False
                raise OSError(number, os.strerror(number), str(path))
            return real(where, *more, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "stat", "listdir", "access"):
            patch.setattr(os, name, faulty(name, getattr(os, name)))
        yield failed


@contextmanager
def torn(path: Path, nbytes: int, patch: pytest.MonkeyPatch, *, heals: bool) -> Iterator[None]:
    """Truncate a file to its first bytes within this context, or only until the next look if it ``heals``."""
    whole = path.read_bytes()
    path.write_bytes(whole[:nbytes])
    hurry(patch, (lambda: path.write_bytes(whole)) if heals else lambda: None)
    try:
        yield
    finally:
        path.write_bytes(whole)


def lengths_of(path: Path, most: int) -> list[int]:
    """Return lengths to truncate a document to: empty, just begun, one byte short, and others."""
    nbytes = path.stat().st_size
    inside = random.Random(nbytes).sample(range(2, nbytes - 1), min(most, nbytes - 3))
    return sorted({0, 1, nbytes - 1, *inside})


class Look(NamedTuple):
    """A function that reads a path, with the result to expect.

    Attributes:
        path: the path that it reads.
        value: reads the path and returns a value that can be compared.
        is_document: whether it reads a document, which can be torn.
    """

    path: Path
    value: Callable[[], Any]
    is_document: bool = False


def survives_bad_looks(look: Look, patch: pytest.MonkeyPatch, most: int = 12) -> None:
    """Check that one bad look of any kind does not change the result. A document is torn at about ``most`` lengths."""
    hurry(patch)
    expected = look.value()
    for number in ERRORS:
        with failing(look.path, number, 1) as failed:
            assert look.value() == expected, errno.errorcode[number]
        assert failed == [1]
    for number in (errno.EIO, errno.ESTALE):
        with failing(look.path, number, 7):
            assert look.value() == expected, errno.errorcode[number]
    for nbytes in lengths_of(look.path, most) if look.is_document else ():
        with torn(look.path, nbytes, patch, heals=True):
            assert look.value() == expected, nbytes


def reports_lasting_faults(look: Look, patch: pytest.MonkeyPatch, most: int = 12) -> None:
    """Check that a permanent fault raises an error with the file and the system's error number."""
    hurry(patch)
    for number in (errno.EIO, errno.ESTALE):
        with failing(look.path, number, float("inf")), pytest.raises(SFTIndexError) as error:
            look.value()
        assert str(error.value).startswith(f"{look.path}: {os.strerror(number)} ({errno.errorcode[number]}, errno ")
    for nbytes in lengths_of(look.path, most) if look.is_document else ():
        with torn(look.path, nbytes, patch, heals=False), pytest.raises(FormatError) as refused:
            look.value()
        assert str(refused.value).startswith(f"{look.path}: ")
