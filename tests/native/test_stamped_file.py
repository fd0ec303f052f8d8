"""Files opened for each read, compared with a slow twin; changed, truncated, replaced and removed files; and errors."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sft_idx import _native

BYTES = bytes(range(256)) * 40


def look_at(path: Path) -> _native.StampedFile:
    return _native.StampedFile(os.fsencode(path))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("stamped")
    paths = [folder / f"file {i}" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(BYTES[i:])
    return paths


def slow_read(paths: list[Path], offsets: list[int], nbytes: list[int]) -> bytes:
    return b"".join(
        path.read_bytes()[offset : offset + size] for path, offset, size in zip(paths, offsets, nbytes, strict=True)
    )


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10_000), st.integers(0, 200)), max_size=8))
def test_ranges_are_the_slow_ones(files: list[Path], ranges: list[tuple[int, int, int]]) -> None:
    which, offsets, nbytes = ([r[i] for r in ranges] for i in range(3))
    out = np.full(sum(nbytes), 99, np.uint8)
    stamped = [look_at(path) for path in files]
    chosen = tuple(stamped[i] for i in which)
    assert _native.read_ranges(chosen, longs(*offsets), longs(*nbytes), out) == len(ranges)
    assert out.tobytes() == slow_read([files[i] for i in which], offsets, nbytes)
    assert _native.advise_ranges(chosen, longs(*offsets), longs(*nbytes)) <= len(ranges)


def test_one_read_fills_an_array_of_any_dtype(files: list[Path]) -> None:
    file, out = look_at(files[0]), np.empty(50, np.int32)
    assert file.nbytes == len(BYTES)
    assert file.read(12, out)
    assert out.tobytes() == BYTES[12:212]
    assert file.read(len(BYTES), np.empty(0, np.uint8))


@pytest.mark.parametrize(
    ("offset", "nbytes", "message"),
    [
        (-1, 4, "is outside"),
        (0, -4, "is outside"),
        (len(BYTES) - 3, 4, "is outside"),
        (2**63 - 1, 4, "is outside"),
        (0, 2**63 - 1, "is outside"),
        (0, 5, "do not fit"),
        (0, 3, "do not fill"),
    ],
)
def test_ranges_outside_are_refused(files: list[Path], offset: int, nbytes: int, message: str) -> None:
    out = np.full(4, 99, np.uint8)
    with pytest.raises(ValueError, match=message):
        _native.read_ranges((look_at(files[0]),), longs(offset), longs(nbytes), out)
    assert out.tolist() == [99] * 4


def test_arguments_of_another_kind_are_refused(files: list[Path]) -> None:
    file, out = look_at(files[0]), np.empty(4, np.uint8)
    with pytest.raises((TypeError, RuntimeError)):
        _native.read_ranges(("x",), longs(0), longs(4), out)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _native.read_ranges((file,), np.zeros(1, np.int32), longs(4), out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one offset"):
        _native.read_ranges((file,), longs(0, 1), longs(4), out)
    with pytest.raises(ValueError, match="contiguous"):
        file.read(0, np.empty(8, np.uint8)[::2])
    with pytest.raises(ValueError, match="writeable"):
        file.read(0, np.frombuffer(bytes(4), np.uint8))
    with pytest.raises(ValueError, match="zero byte"):
        _native.StampedFile(b"a\0b")


def rewrite(path: Path) -> None:
    path.write_bytes(BYTES[::-1])


def replace(path: Path) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(BYTES)
    other.rename(path)


def cut(path: Path) -> None:
    os.truncate(path, 8)


def make_a_pipe_of(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [rewrite, replace, cut, Path.unlink, make_a_pipe_of])
def test_what_is_no_longer_the_same_file_is_not_read(tmp_path: Path, change: object) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(BYTES)
    second.write_bytes(BYTES)
    files, out = (look_at(first), look_at(second)), np.zeros(16, np.uint8)
    os.utime(second, ns=(1, 1))
    files = (files[0], look_at(second))
    change(second)  # type: ignore[operator]
    assert not files[1].read(0, out[:8])
    assert _native.read_ranges(files, longs(0, 0), longs(8, 8), out) == 1
    assert out[:8].tobytes() == BYTES[:8]


def test_errors_of_the_system_say_which_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not here"):
        look_at(tmp_path / "not here")
    with pytest.raises(IsADirectoryError):
        look_at(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe"):
        look_at(tmp_path / "pipe")
    odd = os.fsencode(tmp_path) + b"/\xff\xfe"
    with pytest.raises(FileNotFoundError) as caught:
        _native.StampedFile(odd)
    assert os.fsencode(caught.value.filename) == odd


def test_no_descriptor_is_left_open(files: list[Path]) -> None:
    file, out = look_at(files[0]), np.empty(64, np.uint8)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        file.read(0, out)
    with pytest.raises(ValueError, match="outside"):
        file.read(len(BYTES), out)
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_may_share_a_file(files: list[Path]) -> None:
    file, wrong = look_at(files[0]), []

    def read(offset: int) -> None:
        out = np.empty(500, np.uint8)
        for _ in range(200):
            if not file.read(offset, out) or out.tobytes() != BYTES[offset : offset + 500]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(offset,)) for offset in (0, 77, 4000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
