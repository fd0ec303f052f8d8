"""A disk on which some looks at a path fail, and a clock that moves only when somebody waits for the next look."""

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

# Faults that a network file system may have for a moment, apart from a torn file.
ERRORS = (errno.EIO, errno.ESTALE, errno.ENOENT)


def hurry(patch: pytest.MonkeyPatch, pause: Callable[[], object] = lambda: None) -> None:
    """Make waits between looks take no time; ``pause`` is called in each of them."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        pause()

    patch.setattr(waiting, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))


@contextmanager
def failing(path: Path, number: int, looks: float) -> Iterator[list[int]]:
    """Within this context so many looks at a path fail with an error; yields a list with the number of those that did.

    Opening, listing and the status are looks. Two paths are one if their texts are the same.
    """
    failed = [0]

    def faulty(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(where: Any, *more: Any, **named: Any) -> Any:
            # Where a lock or a rename is at work, its own file has another name.
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
    """Within this context only the first bytes of a file are there; if it ``heals``, until the next look."""
    whole = path.read_bytes()
    path.write_bytes(whole[:nbytes])
    hurry(patch, (lambda: path.write_bytes(whole)) if heals else lambda: None)
    try:
        yield
    finally:
        path.write_bytes(whole)


def lengths_of(path: Path, most: int) -> list[int]:
    """Some lengths at which a document is torn: empty, just begun, one byte short, and others."""
    nbytes = path.stat().st_size
    inside = random.Random(nbytes).sample(range(2, nbytes - 1), min(most, nbytes - 3))
    return sorted({0, 1, nbytes - 1, *inside})


class Look(NamedTuple):
    """Something that is looked at.

    Attributes:
        path: where.
        value: what is found there, in a form that can be compared.
        is_document: whether it is a document, which may be torn.
    """

    path: Path
    value: Callable[[], Any]
    is_document: bool = False


def survives_bad_looks(look: Look, patch: pytest.MonkeyPatch, most: int = 12) -> None:
    """One bad look changes nothing, whatever is bad about it. A document is torn at ``most`` lengths or so."""
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
    """A fault that lasts is an error that names the file, and the number of the system's error."""
    hurry(patch)
    for number in (errno.EIO, errno.ESTALE):
        with failing(look.path, number, float("inf")), pytest.raises(SFTIndexError) as error:
            look.value()
        assert str(error.value).startswith(f"{look.path}: {os.strerror(number)} ({errno.errorcode[number]}, errno ")
    for nbytes in lengths_of(look.path, most) if look.is_document else ():
        with torn(look.path, nbytes, patch, heals=False), pytest.raises(FormatError) as refused:
            look.value()
        assert str(refused.value).startswith(f"{look.path}: ")
