"""Break each rule of FORMAT.md by itself: verification reports the rule, the file, the place and the pack."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reseal import Files, arrays_of, field, put, reseal, set_fields, set_item
from sample_packs import Sample, demo_samples, five_files, sample_of, write_samples

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import files as layout_files
from megatron_sft_idx.layout.files import MAX_HEADER_NBYTES
from megatron_sft_idx.shard import build_options, writer

SPECIFICATION = (Path(__file__).parents[2] / "megatron_sft_idx" / "FORMAT.md").read_text(encoding="utf-8")
Change = Callable[[Files], Files]

# Three packs of tokens 0 to 4, 5 to 11, 12 to 13. The first position of each sequence except the last is trained on.
PACKS = [
    sample_of([2, 3], lambda p: p in (1, 3), lambda p: 10 + p),
    sample_of([3, 2, 2], lambda p: p in (1, 4, 6), lambda p: 20 + p),
    sample_of([2], lambda p: 0, lambda p: 30 + p),
]


def make(folder: Path, **options: Any) -> Files:
    metadata = {"tokenizer": {"vocab_size": 100}}
    defaults = {"capacity": 12, "sequence_multiple": 2, "metadata": metadata, "token_dtype": np.int32}
    write_samples(folder / "made", PACKS, **{**defaults, **options})
    return five_files(folder / "made")


def header(**fields: Any) -> Change:
    """Return a change of fields of the header."""
    return lambda files: {**files, ".seq.idx": set_fields(files[".seq.idx"], **fields)}


def item(suffix: str, dtype: str, index: int, value: Any, offset: int = 0) -> Change:
    """Return a change of one item of a data file, with correct checksums."""
    return lambda files: reseal({**files, suffix: set_item(files[suffix], dtype, index, value, offset)})


def array(which: int, index: int, value: int) -> Change:
    """Return a change of one entry of an array of ``.seq.idx``, with correct checksums."""

    def change(files: Files) -> Files:
        raw = files[".seq.idx"]
        return reseal({**files, ".seq.idx": set_item(raw, "<i8", index, value, arrays_of(raw)[which])})

    return change


def bytes_at(suffix: str, offset: int, data: bytes) -> Change:
    def change(files: Files) -> Files:
        raw = files[suffix]
        at = offset % len(raw)
        return {**files, suffix: raw[:at] + data + raw[at + len(data) :]}

    return change


def block(text: bytes) -> Change:
    """Return a change of the JSON block to one of the same length."""

    def change(files: Files) -> Files:
        raw = files[".seq.idx"]
        size = field(raw, "json_nbytes")
        assert len(text) <= size
        return {**files, ".seq.idx": set_fields(raw[:256] + text.ljust(size, b" ") + raw[256 + size :])}

    return change


def gap(files: Files) -> Files:
    """Set a byte between the two arrays, with correct checksums."""
    raw = bytearray(files[".seq.idx"])
    raw[arrays_of(bytes(raw))[1] - 1] = 1
    return reseal({**files, ".seq.idx": bytes(raw)})


def longer_than_capacity(files: Files) -> Files:
    """Set a capacity in the header that packs exceed. Rule H6 would find it, so longest_pack is wrong too."""
    return reseal(files, capacity=6, longest_pack=6, sequence_multiple=1)


ANY = -1
# rule, change that breaks it, file, byte offset or None, pack, other rules that break too
BROKEN: list[tuple[str, Change, str, int | None, int | None, set[str]]] = [
    ("F1", lambda files: {s: files[s] for s in files if s != ".loss.bin"}, ".loss.bin", None, None, set()),
    ("F2", lambda files: {**files, ".bin": files[".bin"][:-1]}, ".bin", 55, None, set()),
    ("F2", lambda files: {**files, ".seq.idx": files[".seq.idx"] + b"\0"}, ".seq.idx", ANY, None, set()),
    ("F2", header(tokens_nbytes=57), ".seq.idx", 104, None, set()),
    ("F3", bytes_at(".bin", 0, b"\x0b"), ".bin", None, None, set()),
    ("F3", lambda f: {**f, ".seq.idx": set_fields(f[".seq.idx"], arrays_checksum=b"a" * 16)}, ".seq.idx", None,
     None, set()),
    ("H1", bytes_at(".seq.idx", 7, b"\r"), ".seq.idx", 0, None, set()),
    ("H2", header(version=2), ".seq.idx", 8, None, set()),
    ("H3", lambda files: {**files, ".seq.idx": files[".seq.idx"][:300]}, ".seq.idx", 300, None, set()),
    ("H3", bytes_at(".seq.idx", 12, (MAX_HEADER_NBYTES + 64).to_bytes(4, "little")), ".seq.idx", 12, None, set()),
    ("H4", bytes_at(".seq.idx", 383, b"\0"), ".seq.idx", 368, None, set()),
    ("H5", header(flags=6), ".seq.idx", 75, None, set()),
    ("H5", header(reserved=b"\0\1"), ".seq.idx", 216, None, set()),
    ("H5", header(pad_id=-7), ".seq.idx", 96, None, set()),
    ("H5", gap, ".seq.idx", 416, None, set()),
    ("H6", header(most_sequences=13, longest_pack=12), ".seq.idx", 88, None, {"H9"}),
    ("H7", block(b'{"format_writer": 1}'), ".seq.idx", 256, None, set()),
    ("H7", block(b'{"a":"' + b"b" * 42 + b'"}'), ".seq.idx", 256, None, set()),
    ("H7", block(b'{"a":"' + b"b" * 21 + b'","format_writer":true}'), ".seq.idx", 256, None, set()),
    ("H8", header(shard_id=bytes(16)), ".seq.idx", 16, None, set()),
    ("H9", header(num_trained_tokens=4), ".seq.idx", 56, None, set()),
    ("H9", header(num_masked_packs=2), ".seq.idx", 64, None, set()),
    ("H9", header(longest_pack=8), ".seq.idx", 84, None, set()),
    ("H9", header(most_sequences=4), ".seq.idx", 88, None, set()),
    ("O1", array(0, 0, 1), ".seq.idx", 384, None, {"P2"}),
    ("O1", array(0, 1, 5), ".seq.idx", 384 + 16, 1, set()),
    ("O1", array(0, 3, 2**62), ".seq.idx", 384 + 24, None, set()),
    ("O2", array(1, 0, -1), ".seq.idx", 448, None, {"I1"}),
    ("O2", array(1, 2, 5), ".seq.idx", 448 + 16, 1, {"I1"}),
    ("O2", array(1, 3, -(2**63)), ".seq.idx", 448 + 24, None, {"I1"}),
    ("I1", item(".idx", "u1", 9, 2), ".idx", 9, None, set()),
    ("I1", item(".idx", "<i4", 1, 8, 34), ".idx", 38, 1, set()),
    ("I1", item(".idx", "<i8", 1, 21, 46), ".idx", 54, 1, set()),
    ("I1", item(".idx", "<i8", 1, 0, 70), ".idx", 78, 1, set()),
    ("I1", item(".idx", "<i8", 3, 0, 70), ".idx", 94, 3, set()),
    ("P1", longer_than_capacity, ".seq.idx", 448 + 8, 1, {"H9"}),
    ("P2", item(".seq.bin", "<u4", 2, 1), ".seq.bin", 8, 1, set()),
    ("P3", item(".seq.bin", "<u4", 3, 0), ".seq.bin", 12, 1, set()),
    ("P4", item(".seq.bin", "<u4", 4, 7), ".seq.bin", 16, 1, set()),
    ("P4", item(".seq.bin", "<u4", 5, 2**32 - 1), ".seq.bin", 20, 2, {"P2"}),
    ("P5", header(capacity=7), ".seq.idx", 448 + 8, 1, set()),
    ("P6", item(".loss.bin", "u1", 7, 1), ".loss.bin", 7, 1, {"H9"}),
    ("P7", item(".loss.bin", "u1", 2, 2), ".loss.bin", 2, 0, set()),
    ("P8", item(".bin", "<i4", 5, -1), ".bin", 20, 1, set()),
    ("P9", item(".bin", "<i4", 13, 100), ".bin", 52, 2, set()),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "breaks", "suffix", "offset", "pack", "others"), BROKEN)
def test_a_broken_rule_is_named(
    tmp_path: Path, rule: str, breaks: Change, suffix: str, offset: int | None, pack: int | None, others: set[str]
) -> None:
    prefix = put(tmp_path, breaks(make(tmp_path)))
    report = verify_shard(prefix, full=True)
    found = [finding for finding in report.findings if finding.rule == rule]
    assert {finding.rule for finding in report.findings} == {rule} | others, report.findings
    assert found[0].path == prefix + suffix
    assert offset in (found[0].offset, ANY)
    assert pack == found[0].pack
    where = re.escape(prefix + suffix) + ("" if offset is None else r": byte \d+")
    assert re.fullmatch(rf"{where}: (pack \d+: )?(expected .+, found )?[^:]+ \(rule {rule}\); .+", str(found[0]))
    assert not report.ok


def test_every_rule_that_files_at_rest_can_break_is_broken_here() -> None:
    # Rules for columns are tested in test_columns.py, rules for images and audio in test_media_format.py.
    rules = set(re.findall(r"^- \*\*([^CM]\d+)\*\* ", SPECIFICATION, re.MULTILINE))
    assert {rule for rule, *_ in BROKEN} == {rule for rule in rules if rule[0] != "W"}


# Errors that are found without reading every byte: all of the header, sizes, and the ends of the arrays.
QUICK = [
    case for case in BROKEN
    if case[0] in ("F1", "F2", "H1", "H2", "H3", "H4", "H5", "H6", "H7", "H8")
    or (case[0] in ("O1", "O2") and case[4] is None)
]  # fmt: skip


@pytest.mark.parametrize(("rule", "breaks", "suffix", "offset", "pack", "others"), QUICK)
def test_the_quick_look_finds_what_it_reads(
    tmp_path: Path, rule: str, breaks: Change, suffix: str, offset: int | None, pack: int | None, others: set[str]
) -> None:
    prefix = put(tmp_path, breaks(make(tmp_path)))
    report = verify_shard(prefix)
    assert rule in {finding.rule for finding in report.findings}
    assert {finding.rule for finding in report.findings} <= {rule} | others
    assert any(finding.path == prefix + suffix and offset in (finding.offset, ANY) for finding in report.findings)


@pytest.mark.parametrize(
    ("rule", "breaks"),
    [
        ("I1", item(".idx", "<i4", 0, 6, 34)),
        ("I1", item(".idx", "<i4", 2, 3, 34)),
        ("I1", item(".idx", "<i8", 2, 0, 46)),
        ("I1", item(".idx", "<i8", 3, 0, 70)),
        ("P2", item(".seq.bin", "<u4", 0, 1)),
        ("P4", item(".seq.bin", "<u4", 5, 2)),
        ("P6", item(".loss.bin", "u1", 13, 1)),
    ],
)
def test_the_quick_look_sees_the_corners(tmp_path: Path, rule: str, breaks: Change) -> None:
    assert {finding.rule for finding in verify_shard(put(tmp_path, breaks(make(tmp_path)))).findings} == {rule}


@pytest.mark.parametrize("weight", [-0.5, float("nan"), float("inf"), -float("inf")])
def test_weights_that_cannot_be(tmp_path: Path, weight: float) -> None:
    files = item(".loss.bin", "<f4", 3, weight)(make(tmp_path, mask_dtype=np.float32))
    report = verify_shard(put(tmp_path, files), full=True)
    assert ("P7", 12, 0, f"mask {weight}") in [(f.rule, f.offset, f.pack, f.found) for f in report.findings]


def test_weights_at_a_sequences_end(tmp_path: Path) -> None:
    files = item(".loss.bin", "<f4", 4, 0.25)(make(tmp_path, mask_dtype=np.float32))
    report = verify_shard(put(tmp_path, files), full=True)
    assert [(f.rule, f.offset, f.pack, f.found) for f in report.findings] == [
        ("H9", 56, None, "num_trained_tokens 5"),
        ("P6", 16, 0, "mask 0.25 at a sequence's end"),
    ]


def test_negative_zero_is_no_weight(tmp_path: Path) -> None:
    files = item(".loss.bin", "<f4", 13, -0.0)(make(tmp_path, mask_dtype=np.float32))
    assert verify_shard(put(tmp_path, files), full=True).ok


def test_all_findings_are_told_and_those_of_a_kind_counted(tmp_path: Path) -> None:
    packs = [Sample([1, 2, 3], [0, 0, 0], [0]) for _ in range(50)]
    write_samples(tmp_path / "made", packs, token_dtype=np.int32)
    files = five_files(tmp_path / "made")
    files[".loss.bin"] = bytes([0, 0, 1] * 50)
    files[".bin"] = np.full(150, -5, "<i4").tobytes()
    files[".seq.bin"] = np.full(50, 9, "<u4").tobytes()
    prefix = put(tmp_path, reseal(files))
    report = verify_shard(prefix, full=True)
    assert report.omitted == {"P2": 40, "P4": 40, "P6": 40, "P8": 140}
    assert [f.offset for f in report.findings if f.rule == "P6"] == list(range(2, 30, 3))
    assert [f.pack for f in report.findings if f.rule == "P8"] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert report.num_findings == 2 + 50 + 50 + 50 + 150
    assert "140 more like these (rule P8)" in "\n".join(report.lines())
    assert verify_shard(prefix, full=True, most=1000).omitted == {}


def test_an_option_overrides_the_vocabulary_of_the_shard(tmp_path: Path) -> None:
    prefix = put(tmp_path, make(tmp_path))
    assert verify_shard(prefix, full=True, vocab_size=32).ok
    found = verify_shard(prefix, full=True, vocab_size=31).findings
    assert [(f.rule, f.offset, f.found, f.expected) for f in found] == [("P9", 52, "id 31", "0 to 30")]


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "32000", [1]])
def test_a_vocabulary_that_is_no_size_is_a_finding(tmp_path: Path, size: object) -> None:
    metadata = {"tokenizer": {"vocab_size": size}}
    with pytest.raises(FormatError, match=r"tokenizer.vocab_size is .*, expected a whole number of at least 1"):
        write_samples(tmp_path / "x", demo_samples(), metadata=metadata)
    assert os.listdir(tmp_path) == []
    with pytest.MonkeyPatch.context() as another_writer:
        for module in (layout_files, build_options, writer):
            another_writer.setattr(module, "vocab_size_of", lambda metadata: None)
        write_samples(tmp_path / "x", demo_samples(), metadata=metadata)
    for full in (False, True):
        found = verify_shard(tmp_path / "x", full=full).findings
        assert [(f.rule, f.expected) for f in found] == [("P9", "a whole number of at least 1")]
        assert f"vocab_size {size!r}" in found[0].found
