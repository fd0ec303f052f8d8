"""Parquet that breaks a rule, is damaged or malicious; and a writer that must leave no files after an error."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_trips import assert_reads, run_of, spec_of, write_packs
from hypothesis import given, settings
from hypothesis import strategies as st
from parquet_tables import table_of
from sample_packs import assert_is, demo_samples, folder_of, sample_of

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats import parquet
from megatron_sft_idx.formats.parquet import Reader, Writer, recognise


def broken(**columns: Any) -> pa.Table:
    """Return a table of two valid packs and one with these columns replaced."""
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
        ({"input_ids": [7, None, 9]}, "input_ids contains a null"),
        ({"seq_start_id": [0, None]}, "seq_start_id contains a null"),
        ({"loss_mask": [0, 1]}, "3 in input_ids, 2 in loss_mask"),
        ({"input_ids": [], "loss_mask": []}, "P1"),
        ({"seq_start_id": []}, "P2"),
        ({"seq_start_id": [1]}, "P2"),
        ({"seq_start_id": [0, 2, 2]}, "P3"),
        ({"seq_start_id": [0, 3]}, "P4"),
        ({"seq_start_id": [0, -1]}, "P3"),
        ({"seq_start_id": [0, 2**62]}, "P4"),
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
    assert not recognise(str(tmp_path / "x"))


def test_weights_are_refused_unless_loss_is_allowed(tmp_path: Path) -> None:
    packs = [demo_samples()[0], sample_of([3], lambda p: 0.5, lambda p: p)]
    spec = {"mask_dtype": np.dtype(np.float32)}
    with pytest.raises(FormatError, match=r"pack 1 has a loss weight of 0\.5.*lossy"):
        write_packs(Writer, tmp_path / "x", packs, spec=spec)
    assert folder_of(tmp_path) == []
    write_packs(Writer, tmp_path / "x", packs, spec=spec, lossy=True)
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
    for overwrite in (False, True):
        with pytest.raises(
            FormatError, match=r"expected a Parquet file .*, found a file of 4 bytes that begins with b'mine'"
        ):
            Writer(tmp_path / "x", spec_of(packs), overwrite=overwrite)
    assert (tmp_path / "x").read_text() == "mine"
    (tmp_path / "x").unlink()
    write_packs(Writer, tmp_path / "x", packs[:1])
    with pytest.raises(FormatError, match="--overwrite"):
        Writer(tmp_path / "x", spec_of(packs))
    write_packs(Writer, tmp_path / "x", packs, overwrite=True)
    assert_reads(Reader(tmp_path / "x"), packs)


def outcome(path: Path) -> list[Any] | None:
    """Return the content of a file, or None if reading it is one of our errors."""
    try:
        reader = Reader(path)
        packs = [{k: v.tolist() for k, v in reader.read(i).items()} for i in range(len(reader))]
        assert len(list(reader.runs())) <= len(packs)
        assert reader.spec.num_packs == len(packs)
    except (FormatError, SequenceError):
        return None
    return packs


@given(st.data())
@settings(max_examples=120, deadline=None)
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
    write_packs(Writer, tmp_path / "x", packs)
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
    assert recognise(str(tmp_path / "nameless"))
    for path in (tmp_path, tmp_path / "missing"):
        assert not recognise(str(path))
    (tmp_path / "y.parquet").write_bytes(b"PAR1" + bytes(20) + b"PAR1")
    assert not recognise(str(tmp_path / "y.parquet"))


def test_an_empty_file_of_others(tmp_path: Path) -> None:
    pq.write_table(table_of([]), tmp_path / "x")
    assert_reads(Reader(tmp_path / "x"), [])


def test_a_longest_pack_that_is_not_the_longest_is_seen_in_either_way_of_reading(tmp_path: Path) -> None:
    packs = [sample_of([2, 1], lambda p: 0, lambda p: p), sample_of([9], lambda p: 0, lambda p: p)]
    write_packs(Writer, tmp_path / "x", packs, spec={"capacity": 9})
    table = pq.read_table(tmp_path / "x")
    stated = orjson.loads(table.schema.metadata[parquet.KEY]) | {"longest_pack": 3, "capacity": 8}
    pq.write_table(table.replace_schema_metadata({parquet.KEY: orjson.dumps(stated)}), tmp_path / "x")
    reader = Reader(tmp_path / "x")
    for use in (lambda: reader.read(1), lambda: list(reader.runs())):
        with pytest.raises(SequenceError, match=r"x:1: 9 tokens, but the capacity of the file is 8 \(rule P1\)"):
            use()


def test_a_field_whose_name_begins_like_one_of_packs_is_ignored(tmp_path: Path) -> None:
    packs = demo_samples()
    notes = pa.array(["a note that is longer than its pack" * 9] * len(packs))
    fields = {"input_ids.source": pa.array([[1, 2]] * len(packs)), "input_ids.note": notes, "loss_mask.note": notes}
    table = table_of(packs)
    pq.write_table(pa.table(fields | {name: table[name] for name in table.column_names}), tmp_path / "x")
    assert_reads(Reader(tmp_path / "x"), packs)
