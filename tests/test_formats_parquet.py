"""Packed Parquet: ours, and as pyarrow writes it for others."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_trips import any_packs, assert_reads, run_of, spec_of, write_packs
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import Sample, assert_is, demo_samples, folder_of, sample_of

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.parquet import Reader, Writer, recognise


def table_of(
    packs: Sequence[Sample], ids: Any = None, mask: Any = None, starts: Any = None, masks: Any = None
) -> pa.Table:
    """The three columns, of Bridge's types unless told otherwise."""
    return pa.table(
        {
            "input_ids": pa.array([p.tokens for p in packs], ids or pa.list_(pa.int64())),
            "loss_mask": pa.array(masks or [p.label_mask for p in packs], mask or pa.list_(pa.int8())),
            "seq_start_id": pa.array([p.starts for p in packs], starts or pa.list_(pa.int64())),
        }
    )


def write_groups(path: Path, table: pa.Table, sizes: Sequence[int], **options: Any) -> Path:
    """Row groups of these sizes, 0 among them."""
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        first = 0
        for size in sizes:
            writer.write_table(table.slice(first, size), row_group_size=max(size, 1))
            first += size
    return path


# ---- trips ----


@given(any_packs(), st.integers(1, 3), st.integers(1, 4), st.sampled_from([np.uint16, np.int32]))
@settings(max_examples=40)
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
    monkeypatch.setattr("megatron_sft_idx.formats.parquet.writer._MOST_GROUP_TOKENS", 10)
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


# ---- files of others ----


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
    with pytest.raises(FormatError, match="once more"):
        Reader(tmp_path / "x", mask_alignment="token")


def test_masks_set_at_sequence_ends_are_cleared_and_counted(tmp_path: Path) -> None:
    packs = demo_samples()
    pq.write_table(table_of(packs, masks=[[1] * len(p.tokens) for p in packs]), tmp_path / "x")
    reader = Reader(tmp_path / "x")
    ends = sum(len(p.starts) for p in packs)
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
    assert "counted again" in reader.notes[0]


# ---- reading ----


class Counting(io.FileIO):
    """Counts what is read."""

    nbytes = 0

    def read(self, size: int | None = -1) -> Any:
        data = super().read(-1 if size is None else size)
        Counting.nbytes += len(data or b"")
        return data


def test_an_opener_supplies_the_bytes_and_groups_are_read_once(tmp_path: Path) -> None:
    packs = demo_samples(20)
    write_groups(tmp_path / "x", table_of(packs), [5, 5, 10])
    opened: list[str] = []

    def opener(path: str) -> Any:
        opened.append(path)
        return Counting(tmp_path / "x")

    reader = Reader("elsewhere://x", opener=opener)
    assert opened == ["elsewhere://x"]
    reader.read(7)
    before = Counting.nbytes
    for i in (5, 9, 6, 8):
        assert_is(reader.read(i), packs[i])
    assert Counting.nbytes == before
    assert_is(reader.read(10), packs[10])
    assert Counting.nbytes > before
    assert_reads(reader, packs)


def test_the_cache_is_bounded_and_keeps_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = [sample_of([100], lambda p: p % 2, lambda p: p) for _ in range(8)]
    write_groups(tmp_path / "x", table_of(packs), [2] * 4)
    decoded: list[int] = []
    decode = Reader._decode

    def noting(self: Reader, group: int) -> Any:
        decoded.append(group)
        return decode(self, group)

    monkeypatch.setattr(Reader, "_decode", noting)
    one = Reader(tmp_path / "x", cache_nbytes=0)
    for i in (0, 1, 2, 0, 7, 6):
        one.read(i)
    assert decoded == [0, 1, 0, 3]
    decoded.clear()
    two = Reader(tmp_path / "x", cache_nbytes=2 * 1100 + 500)
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


# ---- what is refused ----

BAD: list[tuple[str, Callable[[], pa.Table], str]] = []


def bad(reason: str) -> Callable[[Callable[[], pa.Table]], Callable[[], pa.Table]]:
    def keep(make: Callable[[], pa.Table]) -> Callable[[], pa.Table]:
        BAD.append((make.__name__, make, reason))
        return make

    return keep


def broken(**columns: Any) -> pa.Table:
    """Two good packs, then one with these columns in place of its own."""
    good = [sample_of([2, 1], lambda p: 0, lambda p: p)] * 2
    values = {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 0], "seq_start_id": [0], **columns}
    rows = {
        "input_ids": [*(p.tokens for p in good), values["input_ids"]],
        "loss_mask": [*(p.label_mask for p in good), values["loss_mask"]],
        "seq_start_id": [*(p.starts for p in good), values["seq_start_id"]],
    }
    return pa.table({name: pa.array(value, pa.list_(pa.int64())) for name, value in rows.items()})


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"input_ids": None}, "input_ids is null"),
        ({"loss_mask": None}, "loss_mask is null"),
        ({"input_ids": [7, None, 9]}, "input_ids holds a null"),
        ({"seq_start_id": [0, None]}, "seq_start_id holds a null"),
        ({"loss_mask": [0, 1]}, "3 in input_ids, 2 in loss_mask"),
        ({"input_ids": [], "loss_mask": []}, "P1"),
        ({"seq_start_id": []}, "P2"),
        ({"seq_start_id": [1]}, "P2"),
        ({"seq_start_id": [0, 2, 2]}, "P3"),
        ({"seq_start_id": [0, 3]}, "P4"),
        ({"seq_start_id": [0, -1]}, "P3"),
        ({"seq_start_id": [0, 2**62]}, "P3"),
        ({"loss_mask": [0, 2, 0]}, "P7"),
        ({"input_ids": [7, -1, 9]}, "P8"),
        ({"input_ids": [7, 2**31, 9]}, "P8"),
        ({"input_ids": [7, 2**63 - 1, 9]}, "P8"),
    ],
)
def test_a_broken_pack_is_named(tmp_path: Path, columns: dict[str, Any], reason: str) -> None:
    pq.write_table(broken(**columns), tmp_path / "x", row_group_size=2)
    reader = Reader(tmp_path / "x")
    reader.read(0)
    for use in (lambda: reader.read(2), lambda: list(reader.runs())):
        with pytest.raises(SequenceError, match=reason) as caught:
            use()
        assert (caught.value.source, caught.value.position) == (str(tmp_path / "x"), 2)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (pa.table({"messages": ["hello"]}), "no column input_ids, loss_mask, seq_start_id.*preprocess"),
        (table_of(demo_samples()).drop_columns(["loss_mask"]), "no column loss_mask"),
        (table_of(demo_samples()).append_column("loss_mask", pa.array([1] * 7)), "more than one"),
        (table_of(demo_samples(), ids=pa.list_(pa.float32())), "column input_ids is list<.*float"),
        (pa.table({n: [1, 2] for n in ("input_ids", "loss_mask", "seq_start_id")}), "is int64, expected a list"),
    ],
)
def test_other_columns_are_refused(tmp_path: Path, table: pa.Table, reason: str) -> None:
    pq.write_table(table, tmp_path / "x")
    with pytest.raises(FormatError, match=reason):
        Reader(tmp_path / "x")
    assert recognise(str(tmp_path / "x")) is None


def test_weights_are_refused_unless_loss_is_allowed(tmp_path: Path) -> None:
    packs = [demo_samples()[0], sample_of([3], lambda p: 0.5, lambda p: p)]
    spec = {"mask_dtype": np.dtype(np.float32)}
    with pytest.raises(FormatError, match=r"pack 1 has a loss weight of 0\.5.*allow-loss"):
        write_packs(Writer, tmp_path / "x", packs, spec=spec)
    assert folder_of(tmp_path) == []
    write_packs(Writer, tmp_path / "x", packs, spec=spec, allow_loss=True)
    assert Reader(tmp_path / "x").read(1)["loss_mask"].tolist() == [1, 1, 0]


def test_weights_of_0_and_1_lose_nothing(tmp_path: Path) -> None:
    packs = demo_samples()
    write_packs(Writer, tmp_path / "x", packs, spec={"mask_dtype": np.dtype(np.float32)})
    assert_is(Reader(tmp_path / "x").read(3), packs[3])


def test_nothing_is_left_where_writing_ends_early(tmp_path: Path) -> None:
    packs = demo_samples()
    with (
        pytest.raises(FormatError, match=r"7 packs.*expected 9"),
        Writer(tmp_path / "x", spec_of(demo_samples(9))) as out,
    ):
        out.write(run_of(packs))
    assert folder_of(tmp_path) == []
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FormatError, match="--overwrite"):
        Writer(tmp_path / "x", spec_of(packs))
    assert (tmp_path / "x").read_text() == "mine"
    write_packs(Writer, tmp_path / "x", packs, overwrite=True)
    assert_reads(Reader(tmp_path / "x"), packs)
    with pytest.raises(FormatError, match="compression 'best'"):
        Writer(tmp_path / "y", spec_of(packs), compression="best")


def outcome(path: Path) -> list[Any] | None:
    """What a file reads as; None where an error of ours says that it does not."""
    try:
        reader = Reader(path)
        packs = [{k: v.tolist() for k, v in reader.read(i).items()} for i in range(len(reader))]
        assert len(list(reader.runs())) <= len(packs)
        assert reader.spec.num_packs == len(packs)
    except (FormatError, SequenceError):
        return None
    return packs


@given(st.data())
@settings(max_examples=150)
def test_damaged_files_fail_cleanly(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x")
        write_packs(Writer, path, demo_samples(5), row_group_size=2)
        raw = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        else:
            for _ in range(data.draw(st.integers(1, 4))):
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw)
        outcome(path)
        recognise(str(path))


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


@pytest.mark.parametrize("claim", [2**31 - 1, 2**40, 2**63 - 1, -1, -(2**63)])
def test_a_footer_that_claims_any_number_of_rows_is_refused(tmp_path: Path, claim: int) -> None:
    # One pack of 300 tokens: 300 in the footer, zigzag and base 128, is the number of values of its columns.
    packs = [sample_of([300], lambda p: 0, lambda p: p)]
    write_packs(Writer, tmp_path / "x", packs, compression="none")
    raw = (tmp_path / "x").read_bytes()
    nbytes = int.from_bytes(raw[-8:-4], "little")
    body, footer = raw[: -8 - nbytes], raw[-8 - nbytes : -8]
    zigzag = claim << 1 if claim >= 0 else (-claim << 1) - 1
    forged = footer.replace(b"\x16" + varint(600), b"\x16" + varint(zigzag))
    assert forged != footer
    (tmp_path / "x").write_bytes(body + forged + len(forged).to_bytes(4, "little") + b"PAR1")
    assert outcome(tmp_path / "x") is None


def test_it_is_recognised_by_content(tmp_path: Path) -> None:
    write_packs(Writer, tmp_path / "nameless", demo_samples())
    assert "PAR1" in (recognise(str(tmp_path / "nameless")) or "")
    for path in (tmp_path, tmp_path / "missing"):
        assert recognise(str(path)) is None
    (tmp_path / "y.parquet").write_bytes(b"PAR1" + bytes(20) + b"PAR1")
    assert recognise(str(tmp_path / "y.parquet")) is None


def test_an_empty_file_of_others(tmp_path: Path) -> None:
    pq.write_table(table_of([]), tmp_path / "x")
    assert_reads(Reader(tmp_path / "x"), [])
