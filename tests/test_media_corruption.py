"""Damaged, swapped and foreign files of images and audio: found, never a crash, and nothing of it in a new shard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from media_damage import media_damages, media_shards, put_placed, some_of

from megatron_sft_idx.check import verify_shard

ROOT = Path(__file__).parent.parent
MEMORY = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where the system has such a folder: packing syncs each time."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as made:
        yield Path(made)


def outcomes_of(folder: Path, count: int, first: int) -> Counter[str]:
    """Use every other one of some damaged copies, in another process: a reader outside its files dies by a signal."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "tests/corrupt_media.py", str(folder), "0", str(count), str(first), "2"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Counter(json.loads(done.stdout))


@pytest.mark.parametrize("count", [90, pytest.param(0, marks=pytest.mark.slow, id="all")])
def test_damage_to_images_and_audio_is_found_and_goes_into_no_new_shard(folder: Path, count: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        counts = sum(pool.map(lambda first: outcomes_of(folder / str(first), count, first), (0, 1)), Counter[str]())
    assert counts.total() == (count or len(media_damages(media_shards(folder))))
    print(f"\n{counts.total()} damaged copies:", dict(counts))
    for outcome in ("refused, no", "refused in part, no", "read, no"):
        assert any(each.startswith(outcome) for each in counts), outcome


def test_the_sample_has_some_of_everything(tmp_path: Path) -> None:
    """Each is another set of files than the whole shard, and the ways of damage are many and the same each time."""
    shards = media_shards(tmp_path)
    damages = media_damages(shards)
    assert len(damages) > 350
    assert all(each.files != shards.whole for each in damages)
    assert damages == media_damages(shards)
    sample = some_of(damages, 90, 0)
    assert {each.is_found for each in sample} == {True, False}
    for words in ("right", "blob", "item_offsets", "cut to", "exchanged", "foreign", "older", " for ."):
        assert any(words in each.name for each in sample), words


def test_the_whole_shard_would_pass(tmp_path: Path) -> None:
    put_placed(str(tmp_path / "x"), {**media_shards(tmp_path).whole})
    assert verify_shard(tmp_path / "x", full=True).ok
