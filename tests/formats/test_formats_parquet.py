"""Packed Parquet, written by this package and by pyarrow like other tools."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_trips import any_packs, assert_reads, write_packs
from hypothesis import given, settings
from hypothesis import strategies as st
from parquet_tables import table_of, write_groups
from sample_packs import Sample, assert_is, demo_samples, sample_of

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats import parquet
from megatron_sft_idx.formats.parquet import Reader, Writer

# ---- trips ----


@given(any_packs(), st.integers(1, 3), st.integers(1, 4), st.sampled_from([np.uint16, np.int32]))
@settings(max_examples=40, deadline=None)
def test_packs_come_back(packs: list[Sample], pieces: int, group: int, dtype: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.parquet")
        spec = {"token_dtype": np.dtype(dtype), "capacity": 5000, "pad_id": 3, "metadata": {"tokenizer": "t"}}
        written = write_packs(Writer, path, packs, pieces=pieces, row_group_size=group, spec=spec)
        reader = Reader(path)
        assert_reads(reader, packs)
        assert reader.spec == written
        assert reader.notes == []


def test_same_packs_same_bytes_however_they_come(tmp_path: Path) -> None:
    packs = demo_samples(23)
    for pieces in (1, 2, 23):
        write_packs(Writer, tmp_path / f"{pieces}", packs, pieces=pieces, row_group_size=5)
    first, *others = [(tmp_path / f"{pieces}").read_bytes() for pieces in (1, 2, 23)]
    assert all(other == first for other in others)
    groups = pq.read_metadata(tmp_path / "1")
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [5, 5, 5, 5, 3]
    assert groups.row_group(0).column(0).compression == "ZSTD"


def test_long_packs_make_smaller_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sft_idx.formats.parquet._MAX_GROUP_TOKENS", 10)
    lengths = [4, 4, 4, 30, 2, 9]
    packs = [sample_of([n], lambda p: p % 2, lambda p: p) for n in lengths]
    for pieces in (1, 3):
        write_packs(Writer, tmp_path / f"{pieces}", packs, pieces=pieces)
        groups = pq.read_metadata(tmp_path / f"{pieces}")
        assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [2, 1, 1, 1, 1]
    assert_reads(Reader(tmp_path / "3"), packs)


def test_the_file_is_what_bridge_and_nemotron_read(tmp_path: Path) -> None:
    packs = demo_samples()
    write_packs(Writer, tmp_path / "x", packs)
    table = pq.read_table(tmp_path / "x")
    assert [(f.name, str(f.type.value_type)) for f in table.schema] == [
        ("input_ids", "int32"),
        ("loss_mask", "uint8"),
        ("seq_start_id", "int32"),
    ]
    assert table["loss_mask"].to_pylist() == [p.label_mask for p in packs]


# ---- files of other tools ----


@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "none"])
def test_int64_lists_in_uneven_row_groups(tmp_path: Path, compression: str) -> None:
    packs = demo_samples(12)
    table = table_of(packs).append_column("source", pa.array(["x"] * 12))
    path = write_groups(tmp_path / "x.parquet", table, [1, 0, 7, 4], compression=compression)
    reader = Reader(path)
    assert_reads(reader, packs)
    assert (reader.spec.token_dtype, reader.spec.capacity) == (np.int32, max(len(p.tokens) for p in packs))


@pytest.mark.parametrize(
    ("ids", "mask", "starts"),
    [
        (pa.list_(pa.int32()), pa.list_(pa.uint8()), pa.list_(pa.int32())),
        (pa.large_list(pa.uint32()), pa.large_list(pa.int64()), pa.large_list(pa.uint32())),
        (pa.list_(pa.uint16()), pa.list_(pa.bool_()), pa.list_(pa.uint8())),
    ],
)
def test_every_list_of_numbers_is_read(tmp_path: Path, ids: Any, mask: Any, starts: Any) -> None:
    packs = demo_samples()
    masks = [[bool(v) for v in p.label_mask] for p in packs] if mask.value_type == pa.bool_() else None
    pq.write_table(table_of(packs, ids, mask, starts, masks), tmp_path / "x", row_group_size=3)
    assert_reads(Reader(tmp_path / "x"), packs)


def test_float_masks_are_weights(tmp_path: Path) -> None:
    packs = [sample_of([3, 2], lambda p: p / 4, lambda p: p)]
    pq.write_table(table_of(packs, mask=pa.list_(pa.float64())), tmp_path / "x")
    reader = Reader(tmp_path / "x")
    assert reader.spec.mask_dtype == np.float32
    assert_is(reader.read(0), packs[0])


def test_rolled_masks_are_rolled_back_and_this_is_said(tmp_path: Path) -> None:
    packs = [sample_of([3, 4], lambda p: int(p in (1, 2, 4)), lambda p: p)]
    pq.write_table(table_of(packs, masks=[[0, *packs[0].mask[:-1]]]), tmp_path / "x")
    reader = Reader(tmp_path / "x", mask_alignment="rolled-right")
    assert_reads(reader, packs)
    assert "rolled right" in reader.notes[0]


def test_a_stated_alignment_is_not_shifted_again(tmp_path: Path) -> None:
    write_packs(Writer, tmp_path / "x", demo_samples())
    with pytest.raises(FormatError, match="label-aligned, so mask alignment 'token' would shift them twice"):
        Reader(tmp_path / "x", mask_alignment="token")


def test_masks_set_at_sequence_ends_are_cleared_and_counted(tmp_path: Path) -> None:
    packs = demo_samples()
    masks = [[1] * len(p.tokens) for p in packs]
    masks[-1][-1] = 0  # otherwise all sequences would end in 1, as in a token-aligned mask
    pq.write_table(table_of(packs, masks=masks), tmp_path / "x")
    reader = Reader(tmp_path / "x")
    ends = sum(len(p.starts) for p in packs) - 1
    assert not any(run.loss_mask[-1] for run in reader.runs())
    list(reader.runs())
    assert [note for note in reader.notes if note.startswith(f"{ends} ")] == reader.notes


def test_metadata_of_other_rows_is_counted_again(tmp_path: Path) -> None:
    packs = demo_samples(9)
    write_packs(Writer, tmp_path / "x", packs, spec={"capacity": 77, "pad_id": 5})
    pq.write_table(pq.read_table(tmp_path / "x").slice(2, 3), tmp_path / "y")
    reader = Reader(tmp_path / "y")
    assert_reads(reader, packs[2:5])
    assert (reader.spec.capacity, reader.spec.pad_id) == (77, 5)
    assert "so the rows were counted" in reader.notes[0]


# ---- reading ----


def test_runs_are_bounded_whatever_the_row_groups_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sft_idx.formats.parquet.RUN_TOKENS", 12)
    lengths = [1] * 40 + [3] * 6 + [5] + [1] * 3 + [30] + [2] * 2
    packs = [sample_of([n], lambda p: p % 2, lambda p: p) for n in lengths]
    write_groups(tmp_path / "x", table_of(packs), [40, 6, 1, 0, 3, 1, 2])
    reader = Reader(tmp_path / "x")
    assert_reads(reader, packs)
    assert all(len(run.tokens) <= 12 or len(run.pack_lengths) == 1 for run in reader.runs())
    assert len(list(reader.runs())) < 20


def test_the_cache_is_bounded_and_keeps_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = [sample_of([100], lambda p: p % 2, lambda p: p) for _ in range(8)]
    write_groups(tmp_path / "x", table_of(packs), [2] * 4)
    decoded: list[int] = []
    decode = Reader._decode_group

    def noting(self: Reader, group: int) -> Any:
        decoded.append(group)
        return decode(self, group)

    monkeypatch.setattr(Reader, "_decode_group", noting)
    monkeypatch.setattr(parquet, "_CACHE_NBYTES", 0)
    one = Reader(tmp_path / "x")
    for i in (0, 1, 2, 0, 7, 6):
        one.read(i)
    assert decoded == [0, 1, 0, 3]
    decoded.clear()
    monkeypatch.setattr(parquet, "_CACHE_NBYTES", 2 * 1100 + 500)
    two = Reader(tmp_path / "x")
    for i in (0, 2, 0, 4, 0, 2):
        two.read(i)
    assert decoded == [0, 1, 2, 1]


def test_views_are_read_only_and_identity_is_of_the_content(tmp_path: Path) -> None:
    packs = demo_samples()
    for name, these in (("a", packs), ("b", packs), ("c", demo_samples(8))):
        write_packs(Writer, tmp_path / name, these)
    reader = Reader(tmp_path / "a")
    assert not any(reader.read(3)[key].flags.writeable for key in ("input_ids", "loss_mask"))
    assert reader.identity == Reader(tmp_path / "b").identity != Reader(tmp_path / "c").identity
