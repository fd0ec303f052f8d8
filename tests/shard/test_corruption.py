"""Damaged copies of a shard: any damage is an error with the file's name, or reads stay inside the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from corrupt_copies import two_shards
from damage import KINDS, damaged, folder_for_copies, outcomes_of


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_for_copies() as made:
        yield made


@pytest.mark.parametrize("copies", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_copies_are_refused_or_read_in_bounds(folder: Path, copies: int) -> None:
    half = copies // 2
    with ThreadPoolExecutor(2) as pool:
        parts = list(
            pool.map(
                lambda first: outcomes_of("corrupt_copies.py", folder / str(first), first, first + half), (0, half)
            )
        )
    counts = parts[0] + parts[1]
    assert counts.total() == copies
    by_outcome: Counter[str] = Counter()
    for name, count in counts.items():
        by_outcome[name.rpartition(": ")[2]] += count
    print(f"\n{copies} damaged copies:", dict(by_outcome))
    assert min(by_outcome[outcome] for outcome in ("refused", "refused in part", "read")) > 0
    # Sizes are checked when a shard is opened, and the header has a checksum.
    resized = [name for name in counts if name.split()[0] in ("truncation", "extension", "duplicated", "loss")]
    assert resized
    assert all(name.endswith(": refused") for name in resized)


def test_the_damages_are_of_every_kind_and_repeatable(tmp_path: Path) -> None:
    whole, other = two_shards(tmp_path)
    copies = [damaged(whole, other, np.random.default_rng(seed)) for seed in range(300)]
    assert all(copy.files != whole for copy in copies)
    assert {copy.name.rpartition(" of ")[0] for copy in copies} == set(KINDS)
    assert copies == [damaged(whole, other, np.random.default_rng(seed)) for seed in range(300)]
