"""Images and audio in FORMAT.md: tables, plain reader and golden shard; each rule is broken singly and at random."""

from __future__ import annotations

import contextlib
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from golden.make import make as make_golden
from media_samples import (
    MediaSample,
    Places,
    array_places,
    array_values,
    as_plain,
    broken_media_rules,
    item_of,
    media_field,
    media_sample,
    media_samples,
    reseal_media,
    set_media_fields,
    seven_files,
    with_entry,
    write_media,
)
from reseal import Files, field, put, set_fields, set_item
from test_format import GOLDEN, SPECIFICATION, TYPES, plain_reader

from megatron_sft_idx.check import media_rules, verify_shard
from megatron_sft_idx.errors import CorruptShardError, SFTIndexError, ShardNotFoundError, UnsupportedVersionError
from megatron_sft_idx.layout.files import MAX_COUNT, MAX_HEADER_NBYTES
from megatron_sft_idx.layout.media_layout import ARRAYS, KINDS, MEDIA
from megatron_sft_idx.shard import Shard, ShardWriter

SECTION = SPECIFICATION.split("## Images and audio")[1].split("\n## ")[0]
Change = Callable[[Files], Files]

# ---- the tables, the plain reader, the golden shard ----


def test_the_field_table_of_media_is_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| (?:`(\w+)` )?\|", SECTION, re.MULTILINE)
    table = [(name, int(offset), TYPES.get(kind) or f"{kind.removesuffix(' bytes')}s") for offset, kind, name in rows]
    nameless = {"zeros": "", "reserved": ""}
    assert table == [(nameless.get(each.name, each.name), each.offset, each.format) for each in MEDIA.fields]
    assert sum(struct.calcsize("<" + each.format) for each in MEDIA.fields) == MEDIA.fixed_nbytes == 128
    assert f"`{MEDIA.magic.hex(' ')}`" in SECTION


def test_the_array_table_is_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+(?: bytes)?) \[(\w+)(?: \+ (\d))?\] \|", SECTION, re.MULTILINE)
    dtypes = {"16 bytes": np.dtype("V16")}
    table = [(name, dtypes.get(kind) or np.dtype(kind), of, int(more or 0)) for name, kind, of, more in rows]
    assert table == [tuple(each) for each in ARRAYS]
    assert all(each.dtype.newbyteorder("<") == each.dtype for each in ARRAYS)


def test_the_kinds_are_those_of_the_code() -> None:
    (row,) = re.findall(r"^\| `kinds` \|[^|]*\| (.*) \|$", SECTION, re.MULTILINE)
    assert row == ", ".join(f"{code} {kind}" for kind, code in KINDS.items())


@pytest.mark.parametrize("backend", ["mmap", "pread", "reopen"])
@pytest.mark.parametrize("count", [0, 1, 30])
def test_the_plain_reader_reads_images_and_audio(tmp_path: Path, count: int, backend: Any) -> None:
    samples = media_samples(count, count)
    write_media(tmp_path / "x", samples)
    names = {code: kind for kind, code in KINDS.items()}
    plain = plain_reader("read_media")(str(tmp_path / "x"))
    found = [[(names[kind], *rest) for kind, *rest in items] for items in plain]
    ours = [as_plain(pack["media"]) for pack in Shard(tmp_path / "x", backend=backend)]
    assert found == ours == [as_plain(sample.items) for sample in samples]


def test_the_golden_images_and_audio_are_written_again_and_stay_readable(tmp_path: Path) -> None:
    make_golden(tmp_path)
    assert seven_files(tmp_path / "media") == seven_files(GOLDEN / "media")
    shard = Shard(GOLDEN / "media")
    assert [as_plain(pack["media"]) for pack in shard] == [
        [("image", 0, 2, b"\xff\xd8\xff\xd9"), ("audio", 2, 1, b"RIFF")],
        [("image", 3, 1, b"\xff\xd8\xff\xd9")],
    ]
    assert shard.media is not None
    assert len(shard.media) == 2
    assert shard[0]["loss_mask"].tolist() == [0, 0, 1, 0, 0]
    assert verify_shard(GOLDEN / "media", full=True).ok


# ---- one test per rule ----

# Items 0 to 3 have the files 0, 0, 1, 2; the last pack has none.
PACKS = [
    media_sample([4, 3], [item_of("image", 0, 2, b"AAAA"), item_of("image", 4, 1, b"AAAA")]),
    media_sample([6], [item_of("audio", 1, 2, b"BB"), item_of("image", 3, 1, b"CCC")], first_id=10),
    media_sample([2], [], first_id=20),
]


def without(suffix: str) -> Change:
    return lambda files: {each: data for each, data in files.items() if each != suffix}


def entries(name: str, values: dict[int, Any]) -> Change:
    """Return a change of entries of one array, with correct checksums."""

    def change(files: Files) -> Files:
        for at, value in values.items():
            files = with_entry(files, name, at, value)
        return reseal_media(files)

    return change


def both(*changes: tuple[str, dict[int, Any]]) -> Change:
    def change(files: Files) -> Files:
        for name, values in changes:
            files = entries(name, values)(files)
        return files

    return change


def fields(**values: Any) -> Change:
    """Return a change of fields in the header of ``.media.items``, with a correct checksum."""
    return lambda files: reseal_media(files, media=values)


def byte(at: int, value: int | bytes) -> Change:
    """Return a change of bytes of ``.media.items``, with a correct header checksum."""

    def change(files: Files) -> Files:
        data = bytes([value]) if isinstance(value, int) else value
        raw = files[".media.items"]
        return reseal_media({**files, ".media.items": raw[:at] + data + raw[at + len(data) :]})

    return change


def unsealed(at: int) -> Change:
    """Return a change of a byte of ``.media.items``, with wrong checksums."""

    def change(files: Files) -> Files:
        raw = bytearray(files[".media.items"])
        raw[at] ^= 1
        return {**files, ".media.items": bytes(raw)}

    return change


def listed_by_another(files: Files) -> Files:
    right = media_field(files[".media.items"], "arrays_checksum")
    return reseal_media(files, sums={"items": b"a" * 16}, media={"arrays_checksum": right})


def listed_as_no_checksum(files: Files) -> Files:
    """Replace the checksum in the JSON block by another value, and the id by that of a shard without media."""
    raw = re.sub(rb'"items":"\w{32}"', b'"items":"' + b"z" * 32 + b'"', files[".seq.idx"])
    sums = [field(raw, f"{name}_checksum") for name in ("tokens", "loss", "idx", "starts")]
    return {**files, ".seq.idx": set_fields(raw, shard_id=xxhash.xxh3_128_digest(b"".join(sums)))}


def fewer_packs(files: Files) -> Files:
    """Reduce the number of packs by one. The last pack has no items, so the arrays begin at the same offsets."""
    return reseal_media(files, media={"num_packs": 2})


def gap(files: Files) -> Files:
    begin, _, _ = array_places(files[".media.items"])["lengths"]
    return byte(begin - 1, 1)(files)


def damaged_data(files: Files) -> Files:
    return reseal_media({**files, ".media.data": b"AxAA" + files[".media.data"][4:]})


def equal_files(files: Files) -> Files:
    """Make two blobs equal, with correct hashes."""
    hashes = array_values(files[".media.items"], "blob_hashes")
    files = with_entry(with_entry(files, "blob_hashes", 2, hashes[1]), "blob_offsets", 3, 8)
    return reseal_media({**files, ".media.data": b"AAAABBBB"}, media={"data_nbytes": 8})


def trained_placeholder(at: int) -> Change:
    """Return a change that sets the mask of one token, with correct counts."""

    def change(files: Files) -> Files:
        trained = field(files[".seq.idx"], "num_trained_tokens") + 1
        mask = set_item(files[".loss.bin"], "u1", at, 1)
        return reseal_media({**files, ".loss.bin": mask}, num_trained_tokens=trained)

    return change


ITEMS, DATA, INDEX = ".media.items", ".media.data", ".seq.idx"
# rule, change that breaks it, file in the message, other rules that break too
BROKEN: list[tuple[str, Change, str, set[str]]] = [
    ("M1", without(DATA), DATA, set()),
    ("M1", without(ITEMS), ITEMS, set()),
    ("M1", listed_by_another, ITEMS, set()),
    ("M1", listed_as_no_checksum, INDEX, set()),
    ("M2", byte(0, b"\x89SFTCOL\n"), ITEMS, set()),
    ("M2", byte(7, b"\r"), ITEMS, set()),
    ("M2", fields(version=2), ITEMS, set()),
    ("M2", lambda files: {**files, ITEMS: files[ITEMS][:100]}, ITEMS, set()),
    ("M2", lambda files: {**files, ITEMS: files[ITEMS][:180]}, ITEMS, set()),
    ("M2", lambda files: {**files, ITEMS: b""}, ITEMS, set()),
    *(
        ("M2", (lambda files, n=n: {**files, ITEMS: files[ITEMS][:12] + struct.pack("<I", n) + files[ITEMS][16:]}),
         ITEMS, set())
        for n in (0, 128, 200, MAX_HEADER_NBYTES, MAX_HEADER_NBYTES + 64)
    ),
    ("M2", unsealed(191), ITEMS, set()),
    ("M3", fields(num_packs=MAX_COUNT), ITEMS, {"M4"}),
    ("M3", fields(num_items=MAX_COUNT), ITEMS, set()),
    ("M3", fields(num_blobs=5), ITEMS, set()),
    ("M3", fields(num_blobs=0), ITEMS, set()),
    ("M3", fields(num_items=0), ITEMS, set()),
    ("M3", fields(num_items=2**34, num_blobs=2**32 + 1, data_nbytes=2**40), ITEMS, set()),
    ("M3", fields(data_nbytes=2), ITEMS, set()),
    ("M3", fields(data_nbytes=2**64 - 1), ITEMS, set()),
    ("M3", fields(zeros=b"\0\1"), ITEMS, set()),
    ("M3", fields(reserved=b"\1"), ITEMS, set()),
    ("M3", fields(json_nbytes=1000), ITEMS, set()),
    ("M3", byte(128, b"[]"), ITEMS, set()),
    ("M3", byte(128, b"}{"), ITEMS, set()),
    ("M3", byte(130, 32), ITEMS, set()),
    ("M4", fields(shard_id=b"b" * 16), ITEMS, set()),
    ("M4", fewer_packs, ITEMS, set()),
    ("M4", gap, ITEMS, set()),
    ("M5", entries("item_offsets", {0: 1}), ITEMS, set()),
    ("M5", entries("item_offsets", {0: -1}), ITEMS, set()),
    ("M5", entries("item_offsets", {2: 1}), ITEMS, set()),
    ("M5", entries("item_offsets", {3: 3}), ITEMS, set()),
    ("M5", entries("item_offsets", {3: 5}), ITEMS, set()),
    ("M5", entries("item_offsets", {3: -(2**63)}), ITEMS, set()),
    ("M5", entries("item_offsets", {1: 2**63 - 1}), ITEMS, set()),
    ("M5", entries("item_offsets", {1: 2**63 - 1, 2: -2}), ITEMS, set()),
    ("M6", entries("lengths", {0: 0}), ITEMS, set()),
    ("M6", entries("lengths", {1: 4}), ITEMS, set()),
    ("M6", entries("lengths", {1: 2**32 - 1}), ITEMS, set()),
    ("M6", entries("starts", {3: 6}), ITEMS, set()),
    ("M6", entries("starts", {3: 2**32 - 1}), ITEMS, set()),
    ("M6", both(("starts", {1: 3}), ("lengths", {1: 2})), ITEMS, set()),
    ("M7", entries("starts", {3: 2}), ITEMS, set()),
    ("M7", entries("starts", {3: 1}), ITEMS, set()),
    ("M7", entries("starts", {2: 2, 3: 1}), ITEMS, set()),
    *(("M8", entries("kinds", {2: kind}), ITEMS, set()) for kind in (0, 3, 255)),
    ("M9", entries("blobs", {2: 2, 3: 1}), ITEMS, set()),
    ("M9", entries("blobs", {0: 1}), ITEMS, set()),
    ("M9", entries("blobs", {3: 3}), ITEMS, set()),
    ("M9", entries("blobs", {3: 2**32 - 1}), ITEMS, set()),
    ("M9", entries("blobs", {3: 1}), ITEMS, set()),
    ("M10", entries("blob_offsets", {0: 1}), ITEMS, {"M11"}),
    ("M10", entries("blob_offsets", {1: 7}), ITEMS, set()),
    ("M10", entries("blob_offsets", {1: 6}), ITEMS, set()),
    ("M10", entries("blob_offsets", {3: 8}), ITEMS, {"M11"}),
    ("M10", entries("blob_offsets", {3: 10}), ITEMS, set()),
    ("M10", entries("blob_offsets", {3: -(2**63)}), ITEMS, set()),
    ("M11", damaged_data, DATA, set()),
    ("M11", entries("blob_hashes", {1: b"c" * 16}), DATA, set()),
    ("M11", equal_files, ITEMS, set()),
    ("M12", trained_placeholder(0), ITEMS, set()),
    ("M12", trained_placeholder(7), ITEMS, set()),
    ("M12", trained_placeholder(8), ITEMS, set()),
    ("M12", trained_placeholder(9), ITEMS, set()),
    ("M13", lambda files: reseal_media(files, sums={"data": b"d" * 16}), DATA, set()),
    ("M13", lambda files: reseal_media(files, sums={"items": b"e" * 16}), ITEMS, set()),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Files:
    prefix = tmp_path_factory.mktemp("whole") / "x"
    write_media(prefix, PACKS)
    return seven_files(prefix)


@pytest.mark.parametrize(("rule", "breaks", "suffix", "others"), BROKEN)
def test_a_broken_rule_of_media_is_named(
    tmp_path: Path, whole: Files, rule: str, breaks: Change, suffix: str, others: set[str]
) -> None:
    prefix = put(tmp_path, breaks(whole))
    findings = verify_shard(prefix, full=True).findings
    found = [each for each in findings if each.rule == rule]
    assert {rule} <= {each.rule for each in findings} <= {rule} | others, findings
    assert {each.path for each in found} == {prefix + suffix}
    assert re.fullmatch(rf"{re.escape(prefix + suffix)}(: byte \d+)?: (pack \d+: )?(expected .+, found )?.+"
                        rf" \(rule {rule}\); .+", str(found[0]))  # fmt: skip
    quick = {each.rule for each in verify_shard(prefix).findings}
    assert quick <= {rule} | others
    assert (rule in quick) >= (rule in ("M1", "M2", "M3", "M4"))


def refused(prefix: str, backend: Any) -> SFTIndexError | None:
    """Return the error of opening a shard and reading its packs, or None."""
    try:
        assert len(list(Shard(prefix, backend=backend))) == len(PACKS)
    except SFTIndexError as error:
        return error
    return None


@pytest.mark.parametrize("backend", ["mmap", "pread", "reopen"])
@pytest.mark.parametrize(("rule", "breaks", "suffix", "others"), BROKEN)
def test_readers_refuse_a_broken_rule_of_media_or_give_packs(
    tmp_path: Path, whole: Files, rule: str, breaks: Change, suffix: str, others: set[str], backend: Any
) -> None:
    prefix = put(tmp_path, breaks(whole))
    refusal = refused(prefix, backend)
    if isinstance(refusal, CorruptShardError):
        assert refusal.rule in {rule} | others
        assert refusal.path == prefix + suffix
    elif isinstance(refusal, ShardNotFoundError):
        assert refusal.missing == [prefix + suffix]
    elif refusal is not None:
        assert isinstance(refusal, UnsupportedVersionError)
    else:
        assert rule not in ("M1", "M2", "M3")


def test_every_rule_of_media_is_broken_here() -> None:
    assert {rule for rule, *_ in BROKEN} == set(re.findall(r"^- \*\*(M\d+)\*\* ", SPECIFICATION, re.MULTILINE))


def test_the_forge_of_media_itself_breaks_nothing(tmp_path: Path, whole: Files) -> None:
    assert reseal_media(whole) == whole
    assert set_media_fields(whole[ITEMS], num_packs=3) == whole[ITEMS]
    assert verify_shard(put(tmp_path, whole), full=True).ok


@pytest.mark.parametrize("suffix", [ITEMS, DATA])
def test_a_media_file_of_another_size_is_rule_f2(tmp_path: Path, whole: Files, suffix: str) -> None:
    header = media_field(whole[ITEMS], "header_nbytes") if suffix == ITEMS else 0
    for size in [*range(header, len(whole[suffix]), 3), len(whole[suffix]) + 1]:
        prefix = put(tmp_path, {**whole, suffix: whole[suffix][:size].ljust(size, b"\0")})
        with pytest.raises(CorruptShardError, match=r"bytes, expected .*\(rule F2\)"):
            Shard(prefix)
        for full in (False, True):
            assert "F2" in {each.rule for each in verify_shard(prefix, full=full).findings}, size


def test_other_damage_is_no_damage_to_media(tmp_path: Path, whole: Files) -> None:
    """Damaged boundaries are a finding about sequences only."""
    files = reseal_media({**whole, ".seq.bin": set_item(whole[".seq.bin"], "<u4", 1, 0)})
    assert {each.rule for each in verify_shard(put(tmp_path, files), full=True).findings} == {"P3"}


def test_files_beside_a_shard_without_media_are_no_part_of_it(tmp_path: Path, whole: Files) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack([1, 2], [1, 0], [0])
    (tmp_path / "x.media.items").write_bytes(b"somebody else's")
    assert verify_shard(tmp_path / "x", full=True).ok
    assert "media" not in Shard(tmp_path / "x")[0]


# ---- random damage, compared with the rules in plain Python ----


def _other_value(draw: random.Random, code: str, value: Any, values: list[Any]) -> Any:
    if code == "16s":
        return draw.choice([draw.randbytes(16), *values])
    least, most = {"q": (-(2**63), 2**63 - 1), "I": (0, 2**32 - 1), "B": (0, 255)}[code]
    near = draw.choice([value - 2, value - 1, value + 1, value + 2, 0, 1, 2, 3, -1, least, most, *values])
    return min(max(near, least), most)


def damaged(draw: random.Random, files: Files, samples: list[MediaSample]) -> Files:
    """Change one array entry, or the mask of a token that is not the last of its sequence, and correct checksums."""
    if draw.random() < 0.2:
        ends, mask = set(), bytearray(files[".loss.bin"])
        total = 0
        for sample in samples:
            ends |= {total + bound - 1 for bound in sample.pack.bounds[1:]}
            total += len(sample.pack.tokens)
        if inner := sorted({*range(total)} - ends):
            mask[draw.choice(inner)] ^= 1
        masked, at = 0, 0
        for sample in samples:
            masked += not any(mask[at : at + len(sample.pack.tokens)])
            at += len(sample.pack.tokens)
        changed = {**files, ".loss.bin": bytes(mask)}
        return reseal_media(changed, num_trained_tokens=sum(mask), num_masked_packs=masked)
    name = draw.choice(["item_offsets", "starts", "starts", "lengths", "kinds", "blobs", "blob_offsets", "blob_hashes"])
    values = array_values(files[ITEMS], name)
    at = draw.randrange(len(values))
    code = array_places(files[ITEMS])[name][1]
    return reseal_media(with_entry(files, name, at, _other_value(draw, code, values[at], values)))


@pytest.mark.parametrize("seed", range(6))
def test_random_damage_is_what_the_rules_in_loops_say(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several runs of packs, items and blobs, so that the first and last of a run are damaged too.
    monkeypatch.setattr(media_rules, "_CHUNK", (1 << 15, 5)[seed % 2])
    samples, draw = media_samples(seed), random.Random(seed)
    write_media(tmp_path / "made", samples)
    files = seven_files(tmp_path / "made")
    assert not broken_media_rules(Places.of(files, samples))
    told = set()
    for number in range(30):
        harmed = damaged(draw, files, samples)
        prefix = put(tmp_path, harmed)
        expected = broken_media_rules(Places.of(harmed, samples))
        report = verify_shard(prefix, full=True)
        found = {each.rule for each in report.findings}
        assert report.ok == (not expected)
        assert found <= expected
        told |= found
        with contextlib.suppress(CorruptShardError):
            assert len(list(Shard(prefix))) == len(samples)
        if number % 3:
            continue
        # Copying the packs gives a valid shard, or an error.
        with contextlib.suppress(SFTIndexError):
            with ShardWriter(tmp_path / "copy", media=True, durable=False, overwrite=True) as writer:
                writer.add_shard(Shard(prefix))
            assert verify_shard(tmp_path / "copy", full=True).ok
    assert len(told) > 3
