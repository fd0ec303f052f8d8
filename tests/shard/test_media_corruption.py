"""Damaged, swapped and foreign media files: they are found, never crash a reader, and never get into a new shard."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from damage import folder_for_copies, outcomes_of
from media_damage import DATA, ITEMS, media_damages, media_shards, put_placed, some_of
from media_samples import media_samples, write_media
from sample_packs import tree_of, write_samples

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.packs.buckets import copy_shard
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import SplitSize, split
from megatron_sft_idx.shard import Shard, remove_shard


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_for_copies() as made:
        yield made


@pytest.mark.parametrize("count", [90, pytest.param(0, marks=pytest.mark.slow, id="all")])
def test_damage_to_images_and_audio_is_found_and_goes_into_no_new_shard(folder: Path, count: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        # Each of two processes takes every other case.
        halves = pool.map(
            lambda first: outcomes_of("corrupt_media.py", folder / str(first), 0, count, first, 2), (0, 1)
        )
        counts = sum(halves, Counter[str]())
    assert counts.total() == (count or len(media_damages(media_shards(folder))))
    print(f"\n{counts.total()} damaged copies:", dict(counts))
    for outcome in ("refused, no", "refused in part, no", "read, no"):
        assert any(each.startswith(outcome) for each in counts), outcome


def test_the_sample_has_some_of_everything(tmp_path: Path) -> None:
    """Each case differs from the whole shard. There are many kinds of damage, the same in each run."""
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


# ---- files at the prefix of a new shard ----

SAMPLES = media_samples(2, 6)
LOST: dict[str, Callable[[Path], object]] = {
    "nothing": lambda prefix: None,
    "no items": lambda prefix: Path(f"{prefix}{ITEMS}").unlink(),
    "no data": lambda prefix: Path(f"{prefix}{DATA}").unlink(),
    "neither": lambda prefix: [Path(f"{prefix}{suffix}").unlink() for suffix in (ITEMS, DATA)],
    "items of other magic": lambda prefix: Path(f"{prefix}{ITEMS}").write_bytes(b"somebody's?"),
    "items cut short": lambda prefix: os.truncate(f"{prefix}{ITEMS}", 20),
}


def new_at(sources: Path) -> dict[str, Callable[[Path], object]]:
    """Return functions that replace a shard, with and without images and audio."""
    for name in ("new", "text"):
        if not (sources / f"{name}.bin").exists():
            packs = [sample.pack for sample in SAMPLES]
            make = {"new": partial(write_media, samples=SAMPLES), "text": partial(write_samples, packs=packs)}
            make[name](sources / name, capacity=64)
    return {
        "build": lambda prefix: write_media(prefix, SAMPLES, capacity=64, overwrite=True),
        "merge": lambda prefix: merge([sources / "new"], prefix, overwrite=True),
        "copy": lambda prefix: copy_shard(str(sources / "new"), str(prefix), overwrite=True),
        "copy text": lambda prefix: copy_shard(str(sources / "text"), str(prefix), overwrite=True),
        "build text": lambda prefix: write_samples(prefix, [sample.pack for sample in SAMPLES], overwrite=True),
        "remove": lambda prefix: remove_shard(ShardPaths.of(prefix)),
    }


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("name", ["build", "merge", "copy", "copy text", "build text", "remove"])
def test_a_shard_that_lost_its_images_is_replaced_whole(tmp_path: Path, lost: str, name: str) -> None:
    """Files that its ``.seq.idx`` lists belong to the shard even if they are damaged, so all are removed."""
    replace, prefix = new_at(tmp_path)[name], tmp_path / "at" / "x"
    write_media(prefix, media_samples(1, 6), capacity=64)
    LOST[lost](prefix)
    replace(prefix)
    left = {path.suffix for path in prefix.parent.glob("x.media.*")}
    assert left == (set() if name in ("copy text", "build text", "remove") else {".data", ".items"})
    if name != "remove":
        assert verify_shard(prefix, full=True).ok
    else:
        assert not [*prefix.parent.iterdir()]


@pytest.mark.parametrize("name", ["build", "merge", "copy", "copy text", "build text", "remove"])
@pytest.mark.parametrize("suffix", [DATA, ITEMS])
@pytest.mark.parametrize("beside", ["nothing", "text"])
def test_files_of_somebody_else_are_neither_replaced_nor_removed(
    tmp_path: Path, name: str, suffix: str, beside: str
) -> None:
    replace, prefix = new_at(tmp_path)[name], tmp_path / "at" / "x"
    prefix.parent.mkdir()
    if beside == "text":
        write_samples(prefix, [sample.pack for sample in SAMPLES[:2]])
    Path(f"{prefix}{suffix}").write_bytes(b"the only copy of somebody's file")
    if "text" in name or name == "remove":
        replace(prefix)
        assert name == "remove" or verify_shard(prefix, full=True).ok
    else:
        before = tree_of(prefix.parent)
        with pytest.raises(FormatError, match=re.escape(f"{prefix}{suffix}")):
            replace(prefix)
        assert tree_of(prefix.parent) == before
    assert Path(f"{prefix}{suffix}").read_bytes() == b"the only copy of somebody's file"


def test_files_left_over_from_an_earlier_shard_are_no_part_of_a_text_shard(tmp_path: Path) -> None:
    """Its header lists no media, so these files are not read, verified or copied."""
    write_media(tmp_path / "x", SAMPLES, capacity=64)
    write_samples(tmp_path / "text", [sample.pack for sample in SAMPLES[:-1]], capacity=64)
    for path in tmp_path.glob("text.*"):
        path.replace(tmp_path / f"x{path.name.removeprefix('text')}")
    shard = Shard(tmp_path / "x")
    assert shard.media is None
    assert "media" not in shard[0]
    assert verify_shard(tmp_path / "x", full=True).ok
    merge([tmp_path / "x"], tmp_path / "merged", durable=False)
    split(tmp_path / "x", tmp_path / "split", SplitSize(shards=2), durable=False)
    copy_shard(str(tmp_path / "x"), str(tmp_path / "copied"))
    convert(str(tmp_path / "x"), tmp_path / "converted", "sft-idx", ConvertOptions())
    assert {path.name for path in tmp_path.glob("*.media.*")} == {f"x{DATA}", f"x{ITEMS}"}
    assert rebuild(tmp_path / "x").whole
    # Without its header, the owner of the files is unknown: they are reported and not used.
    (tmp_path / "x.seq.idx").unlink()
    with pytest.raises(FormatError, match=r"x\.media\.items: belongs to shard \w+, but the other files would form"):
        rebuild(tmp_path / "x")
