"""Images and audio in Parquet: exact round trips of shards, files of other programs, and errors."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import command
from media_samples import MediaSample, as_plain, item_of, media_sample, media_samples, seven_files, write_media
from parquet_tables import table_of, write_groups
from sample_packs import assert_is

from megatron_sft_idx import as_torch, open_dataset
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.formats import parquet
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.formats.parquet import Reader
from megatron_sft_idx.formats.registry import WRITABLE
from megatron_sft_idx.shard import Shard

STRUCT = pa.struct([("kind", pa.string()), ("start", pa.int64()), ("length", pa.int64()), ("bytes", pa.binary())])


def rows_of(sample: MediaSample) -> list[dict[str, Any]]:
    return [
        {"kind": each.kind, "start": each.start, "length": each.length, "bytes": bytes(each.data)}
        for each in sample.items
    ]


def foreign_table(samples: Sequence[MediaSample], media: Any = None, kind: Any = None) -> pa.Table:
    """Return the packs as a table of another program."""
    table = table_of([sample.pack for sample in samples])
    values = [rows_of(sample) for sample in samples] if media is None else media
    return table.append_column("media", pa.array(values, kind or pa.list_(STRUCT)))


def assert_holds_media(packs: Any, samples: Sequence[MediaSample]) -> None:
    assert len(packs) == len(samples)
    for number in random.Random(1).sample(range(len(samples)), len(samples)):
        pack = packs[number]
        assert_is(pack, samples[number].pack)
        assert as_plain(pack["media"]) == as_plain(samples[number].items)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(12))
def test_a_shard_comes_back_byte_for_byte(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(parquet, "_MAX_GROUP_MEDIA_NBYTES", draw.choice([1, 100, 1000, 1 << 20]))
    samples = media_samples(seed, draw.choice([1, 7, 40]))
    options = {"capacity": 64, "pad_id": 3, "metadata": {"tokenizer": {"fingerprint": "t"}}}
    write_media(tmp_path / "x", samples, **options)
    for name in ("a", "b"):
        writer = {"row_group_size": draw.choice([1, 3, 1000])} if name == "b" else {}
        report = convert(tmp_path / "x", tmp_path / f"{name}.parquet", "parquet", ConvertOptions(writer=writer))
        assert report.verified
        assert report.lost == []
        convert(tmp_path / f"{name}.parquet", tmp_path / name, "sft-idx")
        assert seven_files(tmp_path / name) == seven_files(tmp_path / "x")
    assert_holds_media(open_dataset(tmp_path / "a.parquet"), samples)
    assert_holds_media(Shard(tmp_path / "b"), samples)
    convert(tmp_path / "b.parquet", tmp_path / "c.parquet", "parquet")
    assert (tmp_path / "c.parquet").read_bytes() == (tmp_path / "a.parquet").read_bytes()


def test_a_shard_with_room_for_media_and_none_comes_back(tmp_path: Path) -> None:
    write_media(tmp_path / "x", [media_sample([5, 2], []), media_sample([3], [])])
    convert(tmp_path / "x", tmp_path / "x.parquet", "parquet")
    convert(tmp_path / "x.parquet", tmp_path / "y", "sft-idx")
    assert seven_files(tmp_path / "y") == seven_files(tmp_path / "x")
    write_media(tmp_path / "e", [], capacity=8)
    convert(tmp_path / "e", tmp_path / "e.parquet", "parquet")
    convert(tmp_path / "e.parquet", tmp_path / "f", "sft-idx")
    assert seven_files(tmp_path / "f") == seven_files(tmp_path / "e")


def test_a_row_can_be_read_by_itself(tmp_path: Path) -> None:
    samples = media_samples(4, 20)
    write_media(tmp_path / "x", samples)
    convert(tmp_path / "x", tmp_path / "x.parquet", "parquet")
    table = pq.read_table(tmp_path / "x.parquet")
    assert table["media"].to_pylist() == [rows_of(sample) for sample in samples]
    assert table["input_ids"].to_pylist() == [sample.pack.tokens for sample in samples]


def test_sources_with_and_without_media_become_one(tmp_path: Path) -> None:
    from sample_packs import demo_samples, write_samples

    samples = media_samples(2, 9)
    write_media(tmp_path / "a", samples)
    write_samples(tmp_path / "b", demo_samples())
    plain = [MediaSample(sample, []) for sample in demo_samples()]
    for to in ("parquet", "sft-idx"):
        for order in (["a", "b"], ["b", "a"]):
            path = tmp_path / f"{to}-{''.join(order)}"
            convert([tmp_path / name for name in order], path, to)
            parts = {"a": samples, "b": plain}
            assert_holds_media(open_dataset(path), [*parts[order[0]], *parts[order[1]]])


def test_row_groups_are_cut_by_the_bytes_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_MAX_GROUP_MEDIA_NBYTES", 1000)
    sizes = [400, 400, 400, 3000, 10, 990, 1]
    samples = [media_sample([4], [item_of("image", 1, 2, bytes([i]) * size)]) for i, size in enumerate(sizes)]
    write_media(tmp_path / "x", samples)
    convert(tmp_path / "x", tmp_path / "x.parquet", "parquet")
    groups = pq.read_metadata(tmp_path / "x.parquet")
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [2, 1, 1, 2, 1]


def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    """Only a fraction of 160 MB of files, in several row groups, is in memory at the same time."""
    noise = random.Random(0)
    big = [noise.randbytes(1 << 20) for _ in range(16)]
    items = [[item_of("image", 2 * k, 1, big[(i + k) % 16][i:]) for k in range(4)] for i in range(40)]
    write_media(tmp_path / "x", [media_sample([9], of_pack) for of_pack in items])
    convert(tmp_path / "x", tmp_path / "x.parquet", "parquet")
    assert (tmp_path / "x.parquet").stat().st_size > 150 << 20
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    largest = 0
    for run in Reader(tmp_path / "x.parquet").runs():
        largest = max(largest, pa.total_allocated_bytes() - before)
        assert run.media is not None
        del run
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert largest < 120 << 20
    assert peak < 60 << 20


# ---- files of other programs ----


@pytest.mark.parametrize("seed", range(8))
def test_files_of_others_are_read(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    samples = media_samples(seed, 11)
    members = [
        ("bytes", draw.choice([pa.binary(), pa.large_binary()])),
        ("path", pa.string()),
        ("length", draw.choice([pa.uint8(), pa.int16(), pa.uint64()])),
        ("kind", draw.choice([pa.string(), pa.large_string()])),
        ("start", draw.choice([pa.uint32(), pa.int32(), pa.uint16()])),
    ]
    draw.shuffle(members)
    kind = draw.choice([pa.list_, pa.large_list])(pa.struct(members))
    rows = [[{**row, "path": "a.png"} for row in rows_of(sample)] for sample in samples]
    table = foreign_table(samples, rows, kind)
    path = write_groups(tmp_path / "x.parquet", table, [1, 0, 6, 4], use_dictionary=draw.random() < 0.5)
    assert_holds_media(open_dataset(path), samples)
    convert(path, tmp_path / "y", "sft-idx")
    assert_holds_media(Shard(tmp_path / "y"), samples)
    assert not [*verify_findings(tmp_path / "y")]


def verify_findings(prefix: Path) -> list[Any]:
    found = command("verify", prefix, "--full")
    return [] if found.code == 0 else [found.out + found.err]


BAD = {
    "an unknown kind": ({"kind": "video"}, r"media\.kind is 'video', expected image or audio \(rule M8\)"),
    "no kind": ({"kind": None}, r"media\.kind contains a null"),
    "no start": ({"start": None}, r"media\.start contains a null"),
    "no length": ({"length": None}, r"media\.length contains a null"),
    "no bytes": ({"bytes": None}, r"media\.bytes contains a null"),
    "an empty file": ({"bytes": b""}, r"media\.bytes is empty, expected a file"),
    "a negative start": ({"start": -1}, r"media\.start is -1, expected positions of the pack \(rule M6\)"),
    "a huge start": ({"start": 1 << 62}, r"media\.start is 4611686018427387904, expected positions"),
    "a start behind the pack": ({"start": 9}, r"media: an item at positions 9 to 10, .*\(rule M6\)"),
    "no positions": ({"length": 0}, r"media: an item at positions 1 to 0, .*\(rule M6\)"),
    "two sequences": ({"length": 4}, r"media: an item at positions 1 to 4, .*\(rule M6\)"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_an_error_names_file_row_and_field(tmp_path: Path, name: str) -> None:
    good = media_sample([4, 5], [item_of("image", 1, 2)])
    change, expected = BAD[name]
    rows = [rows_of(good) for _ in range(6)]
    rows[4] = [{**rows[4][0], **change}]
    path = write_groups(tmp_path / "x.parquet", foreign_table([good] * 6, rows), [3, 3])
    with pytest.raises(SequenceError, match=expected) as caught:
        convert(path, tmp_path / "y", "sft-idx")
    assert str(caught.value).startswith(str(path))
    assert caught.value.position == 4
    assert not list(tmp_path.glob("y*"))
    with pytest.raises(SequenceError, match=expected):
        open_dataset(path)[4]


def test_order_and_masks_are_held_to_the_rules(tmp_path: Path) -> None:
    items = [item_of("image", 1, 2), item_of("audio", 4, 2)]
    good = media_sample([8], items)
    swapped = [rows_of(good), rows_of(good)[::-1]]
    path = write_groups(tmp_path / "x.parquet", foreign_table([good] * 2, swapped), [2])
    with pytest.raises(SequenceError, match=r"1: media: .* \(rule M7\)"):
        convert(path, tmp_path / "y", "sft-idx")
    trained = media_sample([8], [])
    path = write_groups(tmp_path / "z.parquet", foreign_table([good, trained], [rows_of(good)] * 2), [2])
    with pytest.raises(SequenceError, match=r"1: media: .*a loss mask of 0 on its labels \(rule M12\)"):
        convert(path, tmp_path / "y", "sft-idx")
    assert not list(tmp_path.glob("y*"))


def test_null_lists_and_null_items_are_refused(tmp_path: Path) -> None:
    good = media_sample([4], [item_of("image", 1, 2)])
    for at, (value, expected) in enumerate(
        [(None, r"media is null; use an empty list"), ([*rows_of(good), None], r"media contains a null")]
    ):
        table = foreign_table([good] * 2, [rows_of(good), value])
        path = write_groups(tmp_path / f"{at}.parquet", table, [2])
        with pytest.raises(SequenceError, match=expected) as caught:
            convert(path, tmp_path / "y", "sft-idx")
        assert caught.value.position == 1


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.binary()),
        pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        pa.struct([("kind", pa.string())]),
        pa.list_(
            pa.struct([("kind", pa.string()), ("start", pa.float64()), ("length", pa.int32()), ("bytes", pa.binary())])
        ),
        pa.string(),
    ],
)
def test_a_field_of_this_name_that_is_something_else_is_refused(tmp_path: Path, kind: Any) -> None:
    good = media_sample([4], [])
    path = write_groups(tmp_path / "x.parquet", foreign_table([good], [None], kind), [1])
    with pytest.raises(FormatError, match=r"column media is .*, expected a list of structs of kind"):
        convert(path, tmp_path / "y", "sft-idx", ConvertOptions(source_format="parquet"))


def test_media_that_are_announced_must_be_there(tmp_path: Path) -> None:
    write_media(tmp_path / "x", media_samples(1, 5))
    convert(tmp_path / "x", tmp_path / "x.parquet", "parquet")
    table = pq.read_table(tmp_path / "x.parquet")
    pq.write_table(table.drop_columns("media"), tmp_path / "y.parquet")
    with pytest.raises(FormatError, match="no column media, although its metadata lists one"):
        convert(tmp_path / "y.parquet", tmp_path / "y", "sft-idx", ConvertOptions(source_format="parquet"))


# ---- damage, and formats without a place ----


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_shard_makes_no_file(tmp_path: Path, seed: int) -> None:
    samples = [sample for sample in media_samples(seed, 20) if sample.items]
    write_media(tmp_path / "x", samples)
    path = Path(f"{tmp_path / 'x'}.media.data")
    raw = bytearray(path.read_bytes())
    raw[random.Random(seed).randrange(len(raw))] ^= 1
    path.write_bytes(raw)
    with pytest.raises(FormatError, match="rule M11"):
        convert(tmp_path / "x", tmp_path / "x.parquet", "parquet")
    assert not (tmp_path / "x.parquet").exists()


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_file_makes_no_shard(tmp_path: Path, seed: int) -> None:
    """Any changed byte before the footer is found, or is never read."""
    samples = media_samples(3, 12)
    write_media(tmp_path / "x", samples)
    convert(tmp_path / "x", tmp_path / "x.parquet", "parquet")
    raw = bytearray((tmp_path / "x.parquet").read_bytes())
    footer = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    raw[random.Random(seed).randrange(4, footer)] ^= 1 << seed % 8
    (tmp_path / "x.parquet").write_bytes(raw)
    try:
        convert(tmp_path / "x.parquet", tmp_path / "y", "sft-idx", ConvertOptions(source_format="parquet"))
    except SFTIndexError:
        assert not list(tmp_path.glob("y*"))
    else:
        assert seven_files(tmp_path / "y") == seven_files(tmp_path / "x")


@pytest.mark.parametrize("to", [name for name in WRITABLE if name not in ("sft-idx", "parquet")])
def test_formats_without_a_place_refuse(tmp_path: Path, to: str) -> None:
    write_media(tmp_path / "x", [sample for sample in media_samples(1, 5) if sample.items])
    for lossy in (False, True):
        with pytest.raises(FormatError, match=f"{to} cannot store images and audio"):
            convert(tmp_path / "x", tmp_path / "y", to, ConvertOptions(lossy=lossy))
    convert(tmp_path / "x", tmp_path / "x.parquet", "parquet")
    with pytest.raises(FormatError, match=f"{to} cannot store images and audio"):
        convert(tmp_path / "x.parquet", tmp_path / "y", to)
    assert not list(tmp_path.glob("y*"))


def test_bridge_and_training_on_text_refuse(tmp_path: Path) -> None:
    write_media(tmp_path / "x", [sample for sample in media_samples(1, 5) if sample.items])
    assert (
        command("convert", tmp_path / "x", tmp_path / "b.parquet", "--to", "parquet", "--pad-seq-to-mult", 8).code == 1
    )
    convert(tmp_path / "x", tmp_path / "x.parquet", "parquet")
    with pytest.raises(FormatError, match="contains images or audio"):
        as_torch(open_dataset(tmp_path / "x.parquet"))


def test_copies_of_packs_have_copies_of_files(tmp_path: Path) -> None:
    samples = media_samples(6, 6)
    write_media(tmp_path / "x", samples)
    packs = open_dataset(tmp_path / "x", copy=True)
    assert_holds_media(packs, samples)
    assert all(isinstance(item.data, bytes) for pack in packs for item in pack["media"])
