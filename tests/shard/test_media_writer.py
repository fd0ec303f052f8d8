"""Writing images and audio: rejected packs leave nothing, equal files are stored once, and all readers agree."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_samples import (
    MediaSample,
    array_values,
    as_plain,
    item_of,
    media_sample,
    media_samples,
    seven_files,
    write_media,
)
from sample_packs import five_files

from megatron_sft_idx.check import media_rules, verify_shard
from megatron_sft_idx.errors import SequenceError
from megatron_sft_idx.layout.media_layout import Items, MediaItem
from megatron_sft_idx.packs.run import PackRun
from megatron_sft_idx.packs.run_media import BlobsInMemory, RunMedia
from megatron_sft_idx.shard import Shard, ShardWriter, media_writer, pack_log, writer

# Rule, and items that break it in a pack of two sequences with five and three tokens.
REFUSED: list[tuple[str, list[MediaItem]]] = [
    ("M6", [item_of("image", 4, 2)]),
    ("M6", [item_of("image", 0, 8)]),
    ("M6", [item_of("image", 7, 2)]),
    ("M6", [item_of("image", 8, 1)]),
    ("M6", [item_of("image", 2**31 - 2, 2**31 - 2)]),
    ("M7", [item_of("image", 2, 1), item_of("audio", 0, 1)]),
    ("M7", [item_of("image", 0, 2), item_of("audio", 1, 1)]),
    ("M7", [item_of("image", 0, 1), item_of("image", 0, 1)]),
    ("M12", [item_of("image", 3, 1)]),
    ("M12", [item_of("image", 0, 1), item_of("image", 2, 3)]),
]
TOKENS, MASK, STARTS = range(8), [0, 0, 1, 0, 0, 0, 0, 0], [0, 5]


def assert_refused_and_gone(tmp_path: Path, samples: list[MediaSample], match: str, *pack: Any, **options: Any) -> None:
    """Check that a rejected pack before, between and after others leaves nothing."""
    with ShardWriter(tmp_path / "x", media=True, durable=False) as shard:
        for count, sample in enumerate([*samples, None]):
            with pytest.raises(SequenceError, match=rf"pack {count}: .*{match}"):
                shard.add_pack(*pack, **options)
            if sample is not None:
                good = sample.pack
                shard.add_pack(good.tokens, good.label_mask, good.starts, media=sample.items)
    write_media(tmp_path / "y", samples)
    assert seven_files(tmp_path / "x") == seven_files(tmp_path / "y")


@pytest.mark.parametrize("alignment", ["label", "token"])
@pytest.mark.parametrize(("rule", "items"), REFUSED)
def test_an_item_that_breaks_a_rule_is_refused(
    tmp_path: Path, rule: str, items: list[MediaItem], alignment: Any
) -> None:
    mask = MASK if alignment == "label" else [0, *MASK[:-1]]
    pack = TOKENS, mask, STARTS
    match = rf"\(rule {rule}\)"
    assert_refused_and_gone(tmp_path, media_samples(1, 4), match, *pack, media=items, mask_alignment=alignment)


@pytest.mark.parametrize(
    "media",
    [
        *([item_of(kind, 0, 1)] for kind in ("video", 1, None, ["image"])),
        *([item_of("image", start, 1)] for start in (-1, 0.0, "0", None, 2**31)),
        *([item_of("image", 0, length)] for length in (0, -1, 1.5, "1", 2**31)),  # type: ignore[arg-type]
        *(
            [item_of("image", 0, 1, data)]  # type: ignore[arg-type]
            for data in (b"", "abc", None, 5, [1, 2], np.arange(4), memoryview(b"abcdef")[::2])
        ),
        [("image", 0, 1, b"a")],
        [None],
        item_of("image", 0, 1),
        iter([item_of("image", 0, 1)]),
        {"image": b"a"},
        np.zeros(3),
        5,
        "image",
    ],
)
def test_what_is_no_item_is_refused(tmp_path: Path, media: Any) -> None:
    pack = TOKENS, MASK, STARTS
    assert_refused_and_gone(tmp_path, media_samples(2, 3), "media: .*expected", *pack, media=media)


@pytest.mark.parametrize("alignment", ["label", "token"])
@pytest.mark.parametrize(
    ("rule", "tokens", "mask", "starts"),
    [
        ("P1", [], [], [0]),
        ("P2", [1, 2], [0, 0], []),
        ("P2", [1, 2], [0, 0], [1]),
        ("P2", [1, 2], [0, 0], [-1]),
        ("P3", [1, 2, 3], [0, 0, 0], [0, 0]),
        ("P3", [1, 2, 3, 4], [0] * 4, [0, -5]),
        ("P4", [1, 2], [0, 0], [0, 2]),
        ("P4", [1, 2], [0, 0], [0, 2**63 - 1]),
        ("P7", [1, 2], [-1, 0], [0]),
        ("P8", [1, -1], [0, 0], [0]),
    ],
)
def test_a_pack_that_breaks_another_rule_is_refused_with_its_items(
    tmp_path: Path, rule: str, tokens: Any, mask: Any, starts: Any, alignment: Any
) -> None:
    options = {"media": [item_of("audio", 0, 1)], "mask_alignment": alignment}
    assert_refused_and_gone(tmp_path, media_samples(3, 3), rf"\(rule {rule}\)", tokens, mask, starts, **options)


def test_a_list_of_items_is_of_one_pack(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", media=True, durable=False) as shard:
        for lengths in ([], [1, 1]):
            arrays = np.zeros(len(lengths), int), np.zeros(len(lengths), int), np.zeros(len(lengths), int)
            with pytest.raises(SequenceError, match="of MediaItem objects"):
                shard.add_packs(*arrays, lengths, [1] * len(lengths), media=[item_of("image", 0, 1)])
        assert shard.num_packs == 0


@pytest.mark.parametrize("long_run", [1, 1 << 20])
def test_an_error_names_the_pack_of_a_run_whose_item_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: int
) -> None:
    monkeypatch.setattr(writer, "_LONG_RUN", long_run)
    items = Items(*(np.array(values) for values in ([0, 1], [1, 1], [1, 1], [0, 0])))
    media = RunMedia(np.array([1, 0, 1]), items, BlobsInMemory([b"x"]))
    # The last of three packs trains a label that belongs to its item.
    mask = np.array([0, 0, 0, 0, 1, 0], np.uint8)
    run = PackRun(np.arange(6, dtype=np.uint16), mask, np.zeros(3, np.int64), np.full(3, 2), np.ones(3, np.int64))
    with ShardWriter(tmp_path / "x", media=True, durable=False) as shard:
        shard.add_pack([1, 2], [1, 0], [0])
        with pytest.raises(SequenceError, match=r"pack 3: .*\(rule M12\)"):
            shard.add_run(replace(run, media=media))
        assert shard.num_packs == 1


def test_a_writer_without_media_refuses_items(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as shard:
        shard.add_pack([1, 2], [1, 0], [0], media=[])
        with pytest.raises(SequenceError, match="opened without media=True"):
            shard.add_pack([1, 2], [0, 0], [0], media=[item_of("image", 0, 1)])
    with ShardWriter(tmp_path / "y", durable=False) as shard:
        shard.add_pack([1, 2], [1, 0], [0])
    assert five_files(tmp_path / "x") == five_files(tmp_path / "y")
    assert not list(tmp_path.glob("x.media*"))
    assert Shard(tmp_path / "x").media is None


def test_a_shard_with_media_may_show_none(tmp_path: Path) -> None:
    for name, packs in (("none", []), ("text", [media_sample([3], [])])):
        write_media(tmp_path / name, packs)
        shard = Shard(tmp_path / name)
        assert [pack["media"] for pack in shard] == [[] for _ in packs]
        assert verify_shard(tmp_path / name, full=True).ok
        assert (tmp_path / f"{name}.media.data").read_bytes() == b""


def test_equal_files_are_stored_once_in_the_order_of_first_use(tmp_path: Path) -> None:
    samples = [
        media_sample([6], [item_of("image", 0, 1, b"second"), item_of("audio", 2, 1, b"first")]),
        media_sample([6], [item_of("audio", 1, 2, b"second"), item_of("image", 4, 2, b"third")]),
        media_sample([2], [item_of("image", 0, 2, bytearray(b"first"))]),  # type: ignore[arg-type]
    ]
    write_media(tmp_path / "x", samples)
    files = seven_files(tmp_path / "x")
    assert files[".media.data"] == b"secondfirstthird"
    assert array_values(files[".media.items"], "blobs") == [0, 1, 0, 2, 1]
    media = Shard(tmp_path / "x").media
    assert media is not None
    assert [bytes(media.data(number)) for number in range(len(media))] == [b"second", b"first", b"third"]


def test_the_callers_buffer_may_change_once_a_pack_is_added(tmp_path: Path) -> None:
    buffer = bytearray(b"one")
    with ShardWriter(tmp_path / "x", media=True, durable=False) as shard:
        for data in (b"one", b"two"):
            buffer[:] = data
            shard.add_pack([1], [0], [0], media=[MediaItem("image", 0, 1, memoryview(buffer))])
    assert (tmp_path / "x.media.data").read_bytes() == b"onetwo"


@pytest.mark.parametrize("seed", range(3))
def test_every_way_of_reading_gives_the_same_items(tmp_path: Path, seed: int) -> None:
    samples = media_samples(seed, 20)
    write_media(tmp_path / "x", samples)
    expected = [as_plain(sample.items) for sample in samples]
    for options in ({}, {"backend": "pread"}, {"backend": "reopen"}, {"copy": True}, {"advice": "random"}):
        shard = Shard(tmp_path / "x", **options)  # type: ignore[arg-type]
        unpickled = pickle.loads(pickle.dumps(shard))
        for each in (shard, unpickled, pickle.loads(pickle.dumps(unpickled))):
            assert [as_plain(pack["media"]) for pack in each] == expected
        assert as_plain(shard[-1]["media"]) == expected[-1]
        packs = shard[:]
        del shard  # returned views stay valid
        assert [as_plain(pack["media"]) for pack in pickle.loads(pickle.dumps(packs))] == expected
        assert [as_plain(pack["media"]) for pack in packs] == expected


def test_small_runs_write_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files do not depend on the number of packs, items and blobs in memory."""
    samples = media_samples(5, 60)
    write_media(tmp_path / "x", samples)
    for module, name, value in (
        *((writer, "STAGE_TOKENS", 40), (media_writer, "CHUNK_PACKS", 7), (pack_log, "_MAX_RECORDS", 5)),
        *((pack_log, "CHUNK_PACKS", 7), (writer, "CHUNK_PACKS", 7), (media_rules, "_CHUNK", 6)),
    ):
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    write_media(tmp_path / "y", samples)
    assert seven_files(tmp_path / "x") == seven_files(tmp_path / "y")
    assert verify_shard(tmp_path / "y", full=True).ok


def test_many_different_files_keep_their_numbers(tmp_path: Path) -> None:
    """There are more files than the initial table of hashes can hold."""
    count = 2500
    with ShardWriter(tmp_path / "x", media=True, durable=False) as shard:
        for number in [*range(count), *range(0, count, 7)]:
            shard.add_pack([1], [0], [0], media=[MediaItem("audio", 0, 1, b"%d" % number)])
    files = seven_files(tmp_path / "x")
    assert array_values(files[".media.items"], "blobs") == [*range(count), *range(0, count, 7)]
    assert verify_shard(tmp_path / "x", full=True).ok
    assert bytes(Shard(tmp_path / "x")[count + 2]["media"][0].data) == b"14"


def _mapped_nbytes(path: str) -> int:
    """Return the resident bytes of a file's maps: touched bytes, and bytes that the kernel mapped around them."""
    total, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_file = line.endswith(" " + path)
        elif is_of_file and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what is mapped")
def test_a_pack_is_read_without_the_files_of_others(tmp_path: Path) -> None:
    nbytes, around = 1 << 20, 256 << 10
    with ShardWriter(tmp_path / "x", media=True, durable=False) as shard:
        for number in range(8):
            data = bytes([number]) * nbytes
            shard.add_pack([1, 2], [0, 0], [0], media=[MediaItem("image", 0, 1, data)])
    path = str(tmp_path / "x.media.data")
    opened = Shard(tmp_path / "x")
    (item,) = opened[3]["media"]
    assert _mapped_nbytes(path) <= around
    assert bytes(item.data) == bytes([3]) * nbytes
    assert nbytes <= _mapped_nbytes(path) <= nbytes + 2 * around
