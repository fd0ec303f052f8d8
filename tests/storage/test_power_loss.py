"""After a power failure that keeps only synced data, the old or the new shard is there, and work can continue."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from media_samples import MediaSample, item_of, write_media
from power_loss import images, watched
from sample_packs import Sample, demo_samples, write_samples

from megatron_sft_idx.check import rebuild, verify_shard
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import SplitSize, split
from megatron_sft_idx.shard import find_remains
from megatron_sft_idx.storage import building

Write = Callable[..., None]
OLD, NEW = demo_samples(4), demo_samples(30)


def write(prefix: Path, packs: list[Sample], **options: Any) -> None:
    write_samples(prefix, packs, **options)


def write_shown(prefix: Path, packs: list[Sample], **options: Any) -> None:
    """Write packs with an image in every other pack, from a few files."""
    shown = [item_of("image", 0, 1, b"image %d" % (number % 5)) for number in range(len(packs))]
    samples = [
        MediaSample(pack, [item] if len(pack.tokens) % 2 else []) for pack, item in zip(packs, shown, strict=True)
    ]
    write_media(prefix, samples, **options)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def build(root: Path, sources: Path, write: Write) -> None:
    write(root / "x", NEW, durable=True)


def overwrite(root: Path, sources: Path, write: Write) -> None:
    write(root / "x", NEW, overwrite=True, durable=True)


def merge_over(root: Path, sources: Path, write: Write) -> None:
    merge([sources / "a", sources / "b"], root / "x", overwrite=True)


def split_over(root: Path, sources: Path, write: Write) -> None:
    split(sources / "a", root / "x", SplitSize(shards=3), overwrite=True)


@pytest.mark.sample(5)
@pytest.mark.parametrize("write", [write, write_shown])
@pytest.mark.parametrize("work", [build, overwrite, merge_over, split_over])
@pytest.mark.parametrize("way_on", ["the same again", "rebuild"])
def test_only_what_was_synced(
    tmp_path: Path, work: Callable[[Path, Path, Write], None], way_on: str, write: Write
) -> None:
    sources, kept, root = tmp_path / "sources", tmp_path / "kept", tmp_path / "data"
    for name, packs in (("a", NEW), ("b", NEW[:7])):
        write(sources / name, packs, capacity=64)
    root.mkdir()
    if work is split_over:
        write(sources / "old", OLD)
        split(sources / "old", root / "x", SplitSize(shards=3))
    elif work is not build:
        write(root / "x", OLD)
    old = files_in(root)
    # On a real disk, files keep their inodes during a power failure.
    kept.mkdir()
    inodes = {os.stat(root / name).st_ino: kept / name for name in old}
    for name in old:
        os.link(root / name, kept / name)
    with watched(root) as disk:
        work(root, sources, write)
    new = files_in(root)
    assert len(disk.images) > 8
    seen = set()
    for folder in images(disk, lambda number: tmp_path / str(number), inodes):
        prefixes = sorted({name.split(".")[0] for name in {*old, *new}})
        for prefix in prefixes:
            found = {name: raw for name, raw in files_in(folder).items() if name.startswith(f"{prefix}.")}
            if f"{prefix}.seq.idx" in found:
                is_old = found == {name: raw for name, raw in old.items() if name.startswith(f"{prefix}.")}
                assert is_old or verify_shard(folder / prefix, full=True).ok
        opened = {name: raw for name, raw in files_in(folder).items() if name.endswith(".seq.idx")}
        of_old, of_new = (all(whole.get(name) == raw for name, raw in opened.items()) for whole in (old, new))
        assert of_old or of_new, "old outputs next to new ones"
        if way_on == "rebuild" and work in (build, overwrite):
            remains = find_remains(folder / "x")
            if remains is not None and (remains.num_packs or remains.is_complete):
                rebuild(folder / "x", overwrite=True)
                assert verify_shard(folder / "x", full=True).ok
                seen.add("rebuilt")
                if remains.is_complete:
                    assert files_in(folder) == new
                    seen.add("finished")
                continue
        work_again = overwrite if work is build else work
        work_again(folder, sources, write)
        assert files_in(folder) == new
        assert not [path for path in folder.iterdir() if path.is_dir()]
    assert way_on != "rebuild" or work not in (build, overwrite) or seen == {"rebuilt", "finished"}


def test_it_would_be_seen_if_renames_were_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "sync_folder", lambda folder, durable=True: None)
    with pytest.raises((AssertionError, FormatError)):
        test_only_what_was_synced(tmp_path, overwrite, "the same again", write)
