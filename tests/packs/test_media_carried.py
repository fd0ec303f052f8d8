"""All ways to make shards from several shards with images and audio, with any division into runs of packs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from media_samples import as_plain, media_samples, write_media
from sample_packs import write_samples

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.formats.convert import ContentHash, ConvertOptions, convert
from megatron_sft_idx.layout.media_layout import Items
from megatron_sft_idx.packs import run
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.run import PackRun
from megatron_sft_idx.packs.run_media import BlobsInMemory, RunMedia
from megatron_sft_idx.shard import Shard


@pytest.mark.parametrize("window", [None, 1, 3])
def test_several_shards_are_converted_into_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """The result is read in other runs of packs than the sources, always with the same values."""
    if window is not None:
        assert hasattr(run, "WINDOW_PACKS")
        monkeypatch.setattr(run, "WINDOW_PACKS", window)
    sources = [media_samples(seed, 10) for seed in (1, 2)]
    for number, samples in enumerate(sources):
        write_media(tmp_path / str(number), samples, capacity=64)
    report = convert([str(tmp_path / "0"), str(tmp_path / "1")], tmp_path / "out", "sft-idx", ConvertOptions())
    assert report.verified
    assert verify_shard(tmp_path / "out", full=True).ok
    expected = [as_plain(sample.items) for samples in sources for sample in samples]
    assert [as_plain(pack["media"]) for pack in Shard(tmp_path / "out")] == expected
    write_media(tmp_path / "whole", [*sources[0], *sources[1]], capacity=64)
    assert (tmp_path / "out.media.data").read_bytes() == (tmp_path / "whole.media.data").read_bytes()


@pytest.mark.parametrize("order", [("text", "media"), ("media", "text"), ("media", "none", "text"), ("none",)])
@pytest.mark.parametrize("verb", ["convert", "merge"])
def test_shards_with_and_without_images_go_together(tmp_path: Path, verb: str, order: tuple[str, ...]) -> None:
    samples = media_samples(4, 9)
    write_media(tmp_path / "media", samples, capacity=64)
    write_samples(tmp_path / "text", [sample.pack for sample in samples], capacity=64)
    write_media(tmp_path / "none", [], capacity=64)
    sources = [str(tmp_path / name) for name in order]
    if verb == "convert":
        convert(sources, tmp_path / "out", "sft-idx", ConvertOptions())
    else:
        merge(sources, tmp_path / "out", durable=False)
    assert verify_shard(tmp_path / "out", full=True).ok
    items = {"media": [as_plain(sample.items) for sample in samples], "text": [[]] * len(samples), "none": []}
    assert [as_plain(pack["media"]) for pack in Shard(tmp_path / "out")] == [
        each for name in order for each in items[name]
    ]


def test_a_conversion_that_lost_an_item_would_be_seen() -> None:
    """The hash that is compared at both ends depends on each item's file, position, kind and sequence."""
    blobs = BlobsInMemory([b"a", b"b"])

    def hashed(counts: list[int], *items: list[int]) -> ContentHash:
        content = ContentHash()
        media = RunMedia(np.array(counts), Items(*map(np.array, items)), blobs)
        arrays = np.zeros(6, np.int32), np.zeros(6, np.uint8), np.array([0, 3]), np.array([6]), np.array([2])
        content.add(PackRun(*arrays, media=media))
        return content

    whole = hashed([1, 1], [0, 0], [1, 1], [1, 1], [0, 1])
    assert not whole.differences(hashed([1, 1], [0, 0], [1, 1], [1, 1], [0, 1]))
    for other in (
        hashed([2, 0], [0, 0], [1, 1], [1, 1], [0, 1]),
        hashed([1, 1], [0, 1], [1, 1], [1, 1], [0, 1]),
        hashed([1, 1], [0, 0], [1, 2], [1, 1], [0, 1]),
        hashed([1, 1], [0, 0], [1, 1], [1, 2], [0, 1]),
        hashed([1, 1], [0, 0], [1, 1], [1, 1], [0, 0]),
        hashed([1, 0], [0], [1], [1], [0]),
    ):
        assert whole.differences(other)
