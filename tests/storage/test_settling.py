"""How long a value has been unchanged, and when a file counts as complete, with a clock that the test controls."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx.live import Settling, Unchanged


class Clock:
    """A clock with the time set by a test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(
    looks=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=30), gap=st.integers(1, 20)
)
def test_only_time_in_which_somebody_looked_counts(looks: list[tuple[int, int]], gap: int) -> None:
    """Compared with the plain way: sum the gaps between looks, back to the first look with the same value."""
    clock = Clock()
    unchanged = Unchanged(clock, gap)
    seen: list[tuple[int, int]] = []
    for pause, sight in looks:
        clock.now += pause
        seen.append((pause, sight))
        expected = 0
        for (later_pause, _), (_, earlier) in zip(reversed(seen), reversed(seen[:-1]), strict=False):
            if earlier != sight:
                break
            expected += later_pause if later_pause <= gap else 0
        assert unchanged.seconds(sight) == expected


def test_a_file_is_whole_when_neither_size_nor_time_changes(tmp_path: Path) -> None:
    clock = Clock()
    settling = Settling(5.0, clock)
    path = tmp_path / "a.jsonl"

    def is_whole(seconds: float) -> bool:
        clock.now += seconds
        return settling.is_whole(str(path), path.stat() if path.exists() else None)

    path.write_bytes(b"1\n")
    assert [is_whole(0), is_whole(4.9), is_whole(0.1)] == [False, False, True]
    assert (settling.nbytes, settling.seconds()) == (2, 5.0)
    path.write_bytes(b"1\n2\n")
    assert [is_whole(9), is_whole(5)] == [False, True]
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # as after writing the same bytes again
    assert [is_whole(9), is_whole(5)] == [False, True]
    # A missing file can settle too.
    path.unlink()
    assert [is_whole(9), is_whole(5)] == [False, True]
    assert settling.nbytes == 0
