"""The number of bytes of a map in the page cache."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from megatron_sft_idx import _native

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [1, PAGE, 3 * PAGE + 5])
def test_what_was_just_written_is_resident_to_the_byte(tmp_path: Path, nbytes: int) -> None:
    (tmp_path / "x").write_bytes(bytes(nbytes))
    with open(tmp_path / "x", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert _native.resident_nbytes(np.frombuffer(mapped, np.uint8)) == nbytes


def test_pages_are_told_apart() -> None:
    mapped = mmap.mmap(-1, 100 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(mapped, np.uint8)
    assert _native.resident_nbytes(array) == 0
    for page in (3, 4, 70):
        mapped[page * PAGE] = 1
    assert _native.resident_nbytes(array) == 3 * PAGE
    assert _native.resident_nbytes(array[: 4 * PAGE]) == PAGE


def test_more_pages_than_are_asked_about_at_a_time() -> None:
    mapped = mmap.mmap(-1, 70_000 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    mapped[0] = mapped[69_999 * PAGE] = 1
    assert _native.resident_nbytes(np.frombuffer(mapped, np.uint8)) == 2 * PAGE


def test_nothing_is_resident_of_nothing() -> None:
    assert _native.resident_nbytes(np.empty(0, np.uint8)) == 0


def test_an_array_that_begins_inside_a_page_is_refused() -> None:
    mapped = mmap.mmap(-1, 2 * PAGE)
    with pytest.raises(ValueError, match="mincore"):
        _native.resident_nbytes(np.frombuffer(mapped, np.uint8)[1:])
    with pytest.raises(ValueError, match="one-dimensional"):
        _native.resident_nbytes(np.frombuffer(mapped, np.uint8).reshape(2, -1))
