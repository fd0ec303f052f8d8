"""FORMAT.md is the specification: its table, hexdump, reader and rules are compared with the code."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from golden.make import make as make_golden
from media_samples import MediaSample, item_of, seven_files, write_media
from sample_packs import Sample, assert_is, demo_samples, five_files, write_samples

from megatron_sft_idx.errors import CorruptShardError, FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.layout import FIELDS, HEADER_FIXED_NBYTES
from megatron_sft_idx.layout.column import COLUMN_DTYPES, num_rows_in
from megatron_sft_idx.layout.files import (
    MAX_CAPACITY,
    MAX_COUNT,
    MAX_HEADER_NBYTES,
    RESERVED_NAMES,
    SEQ_IDX,
    SUFFIXES,
    encode_metadata,
)
from megatron_sft_idx.shard import Shard, ShardWriter, write_column

ROOT = Path(__file__).parents[2]
SPECIFICATION = (ROOT / "megatron_sft_idx" / "FORMAT.md").read_text(encoding="utf-8")
GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
TYPES = {"uint8": "B", "uint32": "I", "uint64": "Q", "int64": "q"}
OFFSETS = {field.name: field for field in FIELDS}


def block(language: str) -> str:
    return "".join(re.findall(rf"^```{language}\n(.*?)^```$", SPECIFICATION, re.MULTILINE | re.DOTALL))


def plain_reader(name: str = "read_shard") -> Callable[..., tuple[Any, Any]]:
    names: dict[str, Any] = {}
    exec(block("python"), names)
    return names[name]


# ---- the table, the hexdump, the plain reader, the golden shards ----


def test_the_field_table_is_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| `(\w+)` \|", SPECIFICATION.split("## Columns")[0], re.MULTILINE)
    table = [(name, int(offset), TYPES.get(kind) or f"{kind.removesuffix(' bytes')}s") for offset, kind, name in rows]
    assert table == [tuple(field) for field in FIELDS]
    assert sum(struct.calcsize("<" + field.format) for field in FIELDS) == HEADER_FIXED_NBYTES


def test_the_names_that_no_column_has_are_those_of_the_code() -> None:
    names = SPECIFICATION.split("has already:")[1].split(".\n")[0]
    assert set(re.findall(r"`(\w+)`", names)) == RESERVED_NAMES


def test_the_tiny_shard_has_the_bytes_of_the_hexdump(tmp_path: Path) -> None:
    dumped: dict[str, bytearray] = {}
    data = bytearray()
    for line in block("hexdump").splitlines():
        if re.match(r"[0-9a-f]{8}  ", line):
            assert int(line[:8], 16) == len(data)
            data += bytes.fromhex(line[10:])
        else:
            data = dumped[line.removeprefix("tiny")] = bytearray()
    packs = [Sample([11, 12, 13, 14, 15], [0, 0, 1, 0, 1], [0, 3]), Sample([21, 22], [0, 1], [0])]
    options = {"capacity": 8, "token_dtype": np.uint16, "pad_id": 0, "metadata": {"tokenizer": "demo"}}
    write_samples(tmp_path / "tiny", packs, **options)
    write_column(tmp_path / "tiny", "grade", np.array([0.5, 1, 2], np.float32), per="sequence")
    column = {".grade.col": (tmp_path / "tiny.grade.col").read_bytes()}
    items = [[item_of("image", 0, 2, b"\xff\xd8\xff\xd9")], [item_of("audio", 0, 1, b"RIFF")]]
    write_media(tmp_path / "shown", list(map(MediaSample, packs, items)), **options)
    shown = seven_files(tmp_path / "shown")
    media = {suffix: shown.pop(suffix) for suffix in (".media.data", ".media.items")}
    assert five_files(tmp_path / "tiny") | column | media == dumped
    assert {suffix for suffix in shown if shown[suffix] != dumped[suffix]} == {".seq.idx"}


def test_the_plain_reader_is_thirty_lines() -> None:
    lines = block("python").split("def read_shard", 1)[1].split("\n\n\n")[0].splitlines()
    assert len(lines) <= 30


@pytest.mark.parametrize("token_dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("mask_dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("count", [0, 1, 30])
def test_the_plain_reader_reads_what_ours_does(tmp_path: Path, token_dtype: Any, mask_dtype: Any, count: int) -> None:
    prefix, samples = str(tmp_path / "x"), demo_samples(count)
    metadata = {"source": "ü" * (count + 1)}
    write_samples(prefix, samples, token_dtype=token_dtype, mask_dtype=mask_dtype, metadata=metadata)
    packs, found = plain_reader()(prefix)
    shard = Shard(prefix)
    assert len(packs) == len(shard) == count
    assert found == shard.header.metadata == {**metadata, "format_writer": 1}
    for plain, ours, sample in zip(packs, shard, samples, strict=True):
        assert_is(ours, sample)
        for name, array in ours.items():
            np.testing.assert_array_equal(plain[name], array, strict=True)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("per", "code"), [("token", 1), ("sequence", 2), ("pack", 3)])
def test_the_plain_reader_reads_columns(tmp_path: Path, per: Any, code: int, width: int) -> None:
    write_samples(tmp_path / "x", demo_samples(5))
    header = Shard(tmp_path / "x").header
    for number, dtype in COLUMN_DTYPES.items():
        values = np.arange(num_rows_in(header, per) * width).reshape(-1, width).astype(dtype)
        write_column(tmp_path / "x", f"c{number}", values[:, 0] if width == 1 else values, per=per)
        found, kind = plain_reader("read_column")(str(tmp_path / "x"), f"c{number}")
        assert kind == code
        np.testing.assert_array_equal(found, values, strict=True)


@pytest.mark.parametrize("name", ["flags", "weights"])
def test_the_golden_shard_is_written_again_byte_for_byte(tmp_path: Path, name: str) -> None:
    make_golden(tmp_path)
    assert five_files(tmp_path / name) == five_files(GOLDEN / name)


def test_the_golden_columns_are_written_again_and_stay_readable(tmp_path: Path) -> None:
    make_golden(tmp_path)
    assert five_files(tmp_path / "columns") == five_files(GOLDEN / "columns")
    for path in GOLDEN.glob("columns.*.col"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    shard = Shard(GOLDEN / "columns", columns=("source", "grade", "topk"))
    assert sorted(shard.columns) == ["attached", "grade", "source", "topk"]
    assert shard[0]["source"].tolist() == [[0, 3], [1, 0]]
    assert shard[1]["grade"] == np.float16(1.5)
    assert shard[1]["topk"].tolist() == [[10, 11, 12]]
    assert shard.columns["attached"].values.tolist() == [-1, -2, -3]
    assert shard.columns["source"].spec.metadata == {"files": [{"name": "a.jsonl"}, {"name": "é.jsonl"}]}


def test_the_golden_shards_stay_readable() -> None:
    flags, weights = Shard(GOLDEN / "flags"), Shard(GOLDEN / "weights")
    assert flags.header.metadata == {"format_writer": 1, "tokenizer": "demo", "é": [1, 2.5, None, True]}
    assert [pack["input_ids"].tolist() for pack in flags] == [
        *([11, 12, 13, 14, 15], [65535, 0, 1, 2, 3, 4, 5], [9], list(range(100, 116)))
    ]
    assert [pack["loss_mask"].tolist() for pack in flags] == [
        *([0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0, 0], [0], [1] * 15 + [0])
    ]
    assert [pack["seq_boundaries"].tolist() for pack in flags] == [[0, 3, 5], [0, 1, 4, 7], [0, 1], [0, 16]]
    assert (flags.header.capacity, flags.header.sequence_multiple, flags.header.pad_id) == (16, 2, 0)
    assert weights[0]["input_ids"].tolist() == [2**31 - 1, 0, 70000]
    assert weights[0]["loss_mask"].tolist() == [0.5, 1.25, 0.0]
    assert weights.header.num_trained_tokens == 2 + 298
    assert weights.header.num_masked_packs == 1
    assert weights.header.pad_id is None


# ---- one test per malformed header ----


def forge(raw: bytes, **fields: Any) -> bytes:
    """Return the header with these fields set and its checksum corrected."""
    (size,) = struct.unpack_from("<I", raw, 12)
    out = bytearray(raw)
    for name, value in fields.items():
        struct.pack_into("<" + OFFSETS[name].format, out, OFFSETS[name].offset, value)
    out[size - 16 : size] = xxhash.xxh3_128_digest(bytes(out[: size - 16]))
    return bytes(out)


def with_json(raw: bytes, text: bytes) -> bytes:
    """Return the header with another JSON block of the same size class."""
    assert len(text) <= 48
    return forge(raw[:256] + text.ljust(48, b"\0") + raw[304:], json_nbytes=len(text))


def with_offsets(raw: bytes, array: int, index: int, value: int) -> bytes:
    """Return the header with one changed entry of an offsets array: array 0 of sequences, 1 of tokens."""
    out = bytearray(raw)
    packs = struct.unpack_from("<Q", raw, 32)[0]
    base = 320 if array == 0 else -(-(320 + 8 * (packs + 1)) // 64) * 64
    struct.pack_into("<q", out, base + 8 * index, value)
    return bytes(out)


# rule, change of the bytes of .seq.idx, a word of the message
HEADERS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("H1", lambda raw: b"", "magic"),
    ("H1", lambda raw: b"MMIDIDX\0" + raw[8:], "magic"),
    ("H1", lambda raw: raw.replace(b"\n", b"\r\n", 1), "magic"),
    ("H2", lambda raw: forge(raw, version=0), "version 0"),
    ("H2", lambda raw: forge(raw, version=2), "version 2"),
    ("H3", lambda raw: raw[:100], "ends after 100"),
    ("H3", lambda raw: raw[:300], "ends inside"),
    ("H3", lambda raw: raw[:12] + struct.pack("<I", 256) + raw[16:], "header size 256"),
    ("H3", lambda raw: raw[:12] + struct.pack("<I", 330) + raw[16:], "header size 330"),
    ("H3", lambda raw: raw[:12] + struct.pack("<I", MAX_HEADER_NBYTES + 64) + raw[16:], "header size"),
    ("H3", lambda raw: raw[:12] + struct.pack("<I", MAX_HEADER_NBYTES) + raw[16:], "ends inside"),
    ("H4", lambda raw: raw[:40] + b"\xff" + raw[41:], "checksum"),
    ("H4", lambda raw: raw[:310] + bytes([raw[310] ^ 1]) + raw[311:], "checksum"),
    ("H5", lambda raw: forge(raw, token_dtype=5), "token_dtype 5"),
    ("H5", lambda raw: forge(raw, mask_dtype=4), "mask_dtype 4"),
    ("H5", lambda raw: forge(raw, mask_alignment=0), "mask_alignment 0"),
    ("H5", lambda raw: forge(raw, flags=2), "flags 2"),
    ("H5", lambda raw: forge(raw, reserved=b"\1"), "reserved"),
    ("H5", lambda raw: forge(raw, pad_id=-2), "pad_id -2"),
    ("H5", lambda raw: forge(raw, pad_id=2**31), "pad_id"),
    ("H5", lambda raw: forge(raw[:303] + b" " + raw[304:]), "zeros"),
    ("H6", lambda raw: forge(raw, num_packs=10**6), "num_packs"),
    ("H6", lambda raw: forge(raw, num_packs=0), "num_tokens"),
    ("H6", lambda raw: forge(raw, num_sequences=10**6), "num_sequences"),
    ("H6", lambda raw: forge(raw, num_tokens=MAX_COUNT), "num_tokens"),
    ("H6", lambda raw: forge(raw, num_tokens=2**64 - 1, num_sequences=2**63), "num_tokens"),
    ("H6", lambda raw: forge(raw, num_trained_tokens=10**6), "num_trained_tokens"),
    ("H6", lambda raw: forge(raw, num_masked_packs=10**6), "num_masked_packs"),
    ("H6", lambda raw: forge(raw, sequence_multiple=0), "sequence_multiple"),
    ("H6", lambda raw: forge(raw, capacity=MAX_CAPACITY + 1), "capacity"),
    ("H6", lambda raw: forge(raw, capacity=1), "longest_pack"),
    ("H6", lambda raw: forge(raw, longest_pack=0), "longest_pack"),
    ("H6", lambda raw: forge(raw, most_sequences=0), "most_sequences"),
    ("H6", lambda raw: forge(raw, most_sequences=10**6), "most_sequences"),
    ("H7", lambda raw: forge(raw, json_nbytes=10**6), "json_nbytes"),
    ("H7", lambda raw: with_json(raw, b"[]"), "canonical"),
    ("H7", lambda raw: with_json(raw, b"[" + b" " * 40 + b"]"), "canonical"),
    ("H7", lambda raw: with_json(raw, b'{"a":1,                                  "b":2}'), "canonical"),
    ("H7", lambda raw: with_json(raw, b'{"bbbbbbbbbbbbbbbbbbb":1,"aaaaaaaaaaaaaaaaa":2}'), "canonical"),
    ("H7", lambda raw: with_json(raw, b'{"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa":NaN}'), "canonical"),
    ("H7", lambda raw: with_json(raw, b'{"\xff":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}'), "canonical"),
    ("H7", lambda raw: with_json(raw, b"[" * 48), "canonical"),
    ("H8", lambda raw: forge(raw, shard_id=bytes(16)), "shard_id"),
    ("H8", lambda raw: forge(raw, tokens_checksum=bytes(16)), "shard_id"),
    ("F2", lambda raw: forge(raw, tokens_nbytes=1), "tokens_nbytes"),
    ("F2", lambda raw: forge(raw, loss_nbytes=1), "loss_nbytes"),
    ("F2", lambda raw: forge(raw, idx_nbytes=1), "idx_nbytes"),
    ("F2", lambda raw: forge(raw, starts_nbytes=1), "starts_nbytes"),
    ("F2", lambda raw: raw[:-1], "cut short"),
    ("F2", lambda raw: raw + b"\0", "bytes, expected"),
    ("O1", lambda raw: with_offsets(raw, 0, 3, 0), "pack 2"),
    ("O1", lambda raw: with_offsets(raw, 0, 3, -(2**63)), "pack 2"),
    ("O1", lambda raw: with_offsets(raw, 0, 3, 2**63 - 1), "pack 2"),
    ("O2", lambda raw: with_offsets(raw, 1, 3, 0), "pack 2"),
    ("O2", lambda raw: with_offsets(raw, 1, 3, -(2**63)), "pack 2"),
    ("O2", lambda raw: with_offsets(raw, 1, 3, 2**63 - 1), "pack 2"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    prefix = tmp_path_factory.mktemp("whole") / "x"
    # 24 bytes of our own JSON almost fill the header's first size class.
    write_samples(prefix, demo_samples(), token_dtype=np.uint16, metadata={"tokenizer": "a" * 8})
    return five_files(prefix)


def put(folder: Path, files: dict[str, bytes]) -> str:
    prefix = str(folder / "x")
    for suffix, data in files.items():
        Path(prefix + suffix).write_bytes(data)
    return prefix


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize(("rule", "breaks", "word"), HEADERS)
def test_a_broken_header_or_index_names_its_rule(
    tmp_path: Path, whole: dict[str, bytes], rule: str, breaks: Callable[[bytes], bytes], word: str, backend: Any
) -> None:
    prefix = put(tmp_path, {**whole, ".seq.idx": breaks(whole[".seq.idx"])})
    with pytest.raises(FormatError, match=rf"(?s){re.escape(word)}.*\(rule {rule}\)") as caught:
        list(Shard(prefix, backend=backend))
    assert str(caught.value).startswith(prefix + ".seq.idx")
    if rule != "H2":
        assert isinstance(caught.value, CorruptShardError)
        assert caught.value.rule == rule


def test_the_forge_itself_breaks_nothing(tmp_path: Path, whole: dict[str, bytes]) -> None:
    prefix = put(tmp_path, {**whole, ".seq.idx": forge(whole[".seq.idx"], flags=1, pad_id=5)})
    assert Shard(prefix).header.rebuilt
    assert Shard(prefix).header.pad_id == 5
    assert next(iter(Shard(prefix)))["input_ids"].tolist() == demo_samples()[0].tokens


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_missing_file_is_rule_f1(tmp_path: Path, whole: dict[str, bytes], suffix: str, kind: str) -> None:
    prefix = put(tmp_path, whole)
    Path(prefix + suffix).unlink()
    if kind == "folder":
        Path(prefix + suffix).mkdir()
    with pytest.raises(FileNotFoundError, match=r"\(rule F1\)") as caught:
        Shard(prefix)
    assert isinstance(caught.value, SFTIndexError)
    assert caught.value.missing == [prefix + suffix]


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""])
@pytest.mark.parametrize("suffix", [".bin", ".loss.bin", ".idx", ".seq.bin"])
def test_a_file_of_another_size_is_rule_f2(
    tmp_path: Path, whole: dict[str, bytes], suffix: str, change: Callable[[bytes], bytes], backend: Any
) -> None:
    prefix = put(tmp_path, {**whole, suffix: change(whole[suffix])})
    with pytest.raises(CorruptShardError, match=r"bytes, expected .*\(rule F2\)") as caught:
        Shard(prefix, backend=backend)
    assert caught.value.path == prefix + suffix


def test_a_header_that_readers_would_refuse_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="rule H3"):
        ShardWriter(tmp_path / "x", metadata={"a": "b" * MAX_HEADER_NBYTES})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), b"bytes", {1, 2}, object(), {1: 2, "a": 3}, "\ud800", np.int64(3)]
)
def test_metadata_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(FormatError, match="metadata"):
        ShardWriter(tmp_path / "x", metadata={"key": value})
    assert list(tmp_path.iterdir()) == []


def test_metadata_is_stored_in_canonical_form() -> None:
    assert encode_metadata({"b": [1, 2.5], "a": {"ü": None}}) == '{"a":{"ü":null},"b":[1,2.5]}'.encode()
    raw = SEQ_IDX.encode({}, {"steps": {9: "a", 10: "b"}})
    assert b'{"steps":{"10":"b","9":"a"}}' in raw
    decoded = SEQ_IDX.metadata(raw)
    assert decoded == {"steps": {"9": "a", "10": "b"}}
    decoded.clear()  # the caller owns it, and no other header may lose it
    assert SEQ_IDX.metadata(raw) == {"steps": {"9": "a", "10": "b"}}


# ---- one test per rule for writers ----

# rule, tokens, mask, starts, a word of the message
PACKS: list[tuple[str, Any, Any, Any, str]] = [
    ("P1", [], [], [0], "0 tokens"),
    ("P1", range(17), [0] * 17, [0], "the capacity is 16"),
    ("P2", [1, 2], [0, 0], [], "no sequence starts"),
    ("P2", [1, 2], [0, 0], [1], "starts at 1, expected 0"),
    ("P2", [1, 2], [0, 0], [-1], "starts at -1, expected 0"),
    ("P3", [1, 2, 3], [0, 0, 0], [0, 0], "after 0"),
    ("P3", [1, 2, 3, 4], [0] * 4, [0, 2, 1], "after 2"),
    ("P3", [1, 2, 3, 4], [0] * 4, [0, -5], "after 0"),
    ("P4", [1, 2], [0, 0], [0, 2], "the pack has 2 tokens"),
    ("P4", [1, 2], [0, 0], [0, 2**63 - 1], "the pack has 2 tokens"),
    ("P5", range(9), [0] * 9, [0, 1, 2, 3, 4], "24 positions"),
    ("P6", [1, 2, 3], [0, 0, 1], [0], "position 2"),
    ("P6", [1, 2, 3], [1, 0, 0], [0, 1], "position 0"),
    ("P7", [1, 2], [2, 0], [0], "loss mask 2"),
    ("P7", [1, 2], [-1, 0], [0], "loss mask -1"),
    ("P7", [1, 2], [0.5, 0], [0], "loss mask 0.5"),
    ("P7", [1, 2], [float("nan"), 0], [0], "loss mask"),
    ("P7", [1, 2], np.array([256, 0]), [0], "loss mask 256"),
    ("P8", [1, 70000], [0, 0], [0], "id 70000"),
    ("P8", [1, -1], [0, 0], [0], "id -1"),
    ("P8", np.array([65536 + 2**32, 1]), [0, 0], [0], "id 4295032832"),
]


@pytest.mark.parametrize(("rule", "tokens", "mask", "starts", "word"), PACKS)
def test_a_broken_pack_names_its_rule_and_leaves_nothing(
    tmp_path: Path, rule: str, tokens: Any, mask: Any, starts: Any, word: str
) -> None:
    good = demo_samples(3)
    options = {"capacity": 16, "sequence_multiple": 4, "token_dtype": np.uint16}
    with ShardWriter(tmp_path / "x", durable=False, **options) as writer:
        for count, pack in enumerate(good):
            with pytest.raises(SequenceError, match=rf"pack {count}: .*{re.escape(word)}.*\(rule {rule}\)"):
                writer.add_pack(tokens, mask, starts)
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
    write_samples(tmp_path / "y", good, **options)
    assert five_files(tmp_path / "x") == five_files(tmp_path / "y")


@pytest.mark.parametrize("weight", [-0.5, float("nan"), float("inf"), 1e39])
def test_weights_are_finite_and_not_negative(tmp_path: Path, weight: float) -> None:
    with (
        ShardWriter(tmp_path / "x", mask_dtype=np.float32, durable=False) as writer,
        pytest.raises(SequenceError, match="rule P7"),
    ):
        writer.add_pack([1, 2], [weight, 0], [0])


def test_every_rule_is_broken_somewhere() -> None:
    # Rules for columns are tested in test_columns.py, rules for images and audio in test_media_format.py.
    rules = set(re.findall(r"^- \*\*([^CM]\d+)\*\* ", SPECIFICATION, re.MULTILINE))
    # Rules about all bytes of a shard or the order of writing do not occur in messages of readers or writers.
    # Verification reports them, see test_verify_rules.py.
    silent = {"F3", "H9", "I1", "P9", "W1", "W2", "W3", "W4"}
    broken = {"F1"} | {rule for rule, *_ in HEADERS} | {rule for rule, *_ in PACKS}
    assert broken | silent == rules
    assert not broken & silent
