"""Columns in every format: supported ones come back unchanged, and others are an error or reported as lost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from columned import SOURCE, SPECS, values_of, write_columned
from sample_packs import assert_holds, demo_samples, write_samples

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats import registry
from megatron_sft_idx.formats.bridge import Padding
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.formats.packed_dataset import open_dataset
from megatron_sft_idx.formats.registry import READABLE, WRITABLE, open_reader
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.packs import run as run_module
from megatron_sft_idx.shard import Shard, write_column

PACKS = demo_samples(40)
_WRITERS = {name: registry._module(name).Writer for name in WRITABLE}
CARRYING = [name for name, made in _WRITERS.items() if made.stores_columns]
OTHERS = [name for name in WRITABLE if name not in CARRYING]
# Values that text or rounding can change.
FLOATS = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 0.1, 3.4028235e38])


def _columned(folder: Path) -> str:
    """Write a shard with a column of every kind. Columns of packs and of wide floats are attached to it."""
    write_columned(folder / "x", PACKS, {name: spec for name, spec in SPECS.items() if spec.per != "pack"})
    shard = Shard(folder / "x")
    for name, spec in SPECS.items():
        if spec.per == "pack":
            values = values_of(spec, 0, len(shard))
            write_column(folder / "x", name, values, per="pack", metadata=spec.metadata)
    for dtype in ("f2", "f4", "f8"):
        with np.errstate(over="ignore"):
            floats = FLOATS.astype(dtype)
        values = np.resize(floats, (shard.header.num_sequences, 7))
        write_column(folder / "x", f"odd_{dtype}", values, per="sequence")
    write_column(folder / "x", "odd", np.resize(FLOATS, len(shard)).astype("f4"), per="pack")
    return str(folder / "x")


def _assert_same_columns(here: Shard, there: Shard) -> None:
    assert sorted(here.columns) == sorted(there.columns)
    for name, column in here.columns.items():
        other = there.columns[name]
        assert other.spec == column.spec, name
        np.testing.assert_array_equal(np.asarray(other.values[:]), np.asarray(column.values[:]), strict=True)


@pytest.mark.parametrize("name", CARRYING)
@pytest.mark.parametrize("run_tokens", [1 << 20, 16])
def test_all_kinds_come_back(tmp_path: Path, name: str, run_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, dtypes, widths, alignments and metadata survive a round trip, for listed and attached columns."""
    source = _columned(tmp_path)
    for module in (run_module, *(registry._module(one) for one in CARRYING)):
        monkeypatch.setattr(module, "RUN_TOKENS", run_tokens, raising=False)
    monkeypatch.setattr(run_module, "COPIED_TOKENS", run_tokens)
    there, back = str(tmp_path / f"there.{name}"), tmp_path / "back"
    report = convert(source, there, name)
    assert report.lost == []
    assert report.verified
    assert convert(there, str(back), "sft-idx").lost == []
    assert verify_shard(back, full=True).ok
    assert_holds(Shard(back), PACKS)
    _assert_same_columns(Shard(source), Shard(back))
    # Single packs have only the requested columns.
    reader, shard = open_reader(there, name, columns=None), Shard(source, columns=list(Shard(source).columns))
    for i in (0, len(shard) - 1):
        pack, expected = reader.read(i), shard[i]
        assert pack.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_array_equal(pack[key], values)  # type: ignore[literal-required]
    assert open_reader(there, name).read(0).keys() == {"input_ids", "loss_mask", "seq_boundaries"}
    assert "source" in open_reader(there, name, columns=("source",)).read(0)
    with pytest.raises((FormatError, Exception), match="no column other"):
        open_reader(there, name, columns=("other",))
    # Overwrite the existing output.
    convert(source, there, name, ConvertOptions(overwrite=True))


@pytest.mark.parametrize("name", CARRYING)
def test_without_columns_a_file_is_what_it_was_before_there_were_any(tmp_path: Path, name: str) -> None:
    write_samples(tmp_path / "x", PACKS)
    convert(str(tmp_path / "x"), str(tmp_path / "y"), name)
    raw = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name[0] == "y"]
    assert not any(b'"columns"' in each for each in raw)
    assert open_reader(str(tmp_path / "y"), name, columns=None).columns == {}


@pytest.mark.parametrize("name", [*OTHERS, "padded parquet"])
@pytest.mark.parametrize("packs", [PACKS, []])
def test_formats_without_a_place_refuse_or_say_what_is_lost(tmp_path: Path, name: str, packs: Sequence[Any]) -> None:
    if not packs and name == "padded parquet":
        pytest.skip("Megatron-Bridge cannot read an empty file")
    write_columned(tmp_path / "x", packs, {"source": SOURCE, "grade": ColumnSpec("pack", "f4")}, capacity=256)
    options = ConvertOptions(padding=Padding(8, 2), lossy=False) if "padded" in name else ConvertOptions()
    to, there = name.removeprefix("padded "), str(tmp_path / "there")
    # Masks and packs are lost here too, with another message.
    words = f"{to}{' padded for Megatron-Bridge' * ('padded' in name)} cannot store columns: grade, source"
    with pytest.raises(FormatError, match=f": {words}|stores no loss masks"):
        convert(str(tmp_path / "x"), there, to, options)
    assert not (tmp_path / "there").exists()
    report = convert(str(tmp_path / "x"), there, to, dataclasses.replace(options, lossy=True))
    assert "columns grade, source: the format cannot store them" in report.lost
    if packs and to != "pbin":
        assert len(open_reader(there, to)) == len(packs)


@pytest.mark.parametrize("name", [name for name in OTHERS if name in READABLE])
def test_columns_are_asked_for_in_vain_of_formats_that_have_none(tmp_path: Path, name: str) -> None:
    write_samples(tmp_path / "x", PACKS)
    convert(str(tmp_path / "x"), there := str(tmp_path / "there"), name, ConvertOptions(lossy=True))
    for columns, back in (("source",), None), ((), "none"), (None, "all"):
        options = ConvertOptions(reader={"columns": columns} | ({"mask_rule": "all"} if name == "pbin" else {}))
        if back is None:
            with pytest.raises(
                FormatError, match=f"there.*: columns source: {name} sources have no columns; leave the option out"
            ):
                convert(there, str(tmp_path / "back"), "sft-idx", options)
        else:
            assert convert(there, str(tmp_path / back), "sft-idx", options).verified
    assert not (tmp_path / "back.seq.idx").exists()


@pytest.mark.parametrize("name", [name for name in CARRYING if name != "sft-idx"])
@pytest.mark.parametrize("value", [1 << 64, functools.reduce(lambda inner, _: [inner], range(300), [])])
def test_metadata_that_a_format_cannot_store_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    write_columned(tmp_path / "x", PACKS, {"grade": ColumnSpec("pack", "f4", metadata={"a": value})})
    with pytest.raises(FormatError, match="there: the metadata cannot be stored as JSON"):
        convert(str(tmp_path / "x"), str(tmp_path / "there"), name)
    assert not [path for path in tmp_path.iterdir() if "there" in path.name]


@pytest.mark.parametrize("name", READABLE)
def test_every_format_reads_the_columns_that_it_writes(name: str) -> None:
    """Every format, also a future one, must support columns for reading and writing, or for neither."""
    reads = "columns" in registry.options_of_reader(name)
    assert reads == (name in CARRYING)


def test_several_sources_are_one_where_their_columns_are(tmp_path: Path) -> None:
    grade = ColumnSpec("pack", "f4")
    write_columned(tmp_path / "a", PACKS[:20], {"source": SOURCE, "grade": grade})
    write_columned(tmp_path / "b", PACKS[20:], {"source": SOURCE, "grade": ColumnSpec("pack", "f8")})
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    for to in CARRYING:
        with pytest.raises(FormatError, match="column grade differs between the sources"):
            convert(both, str(tmp_path / to), to)
        report = convert(both, str(tmp_path / to), to, ConvertOptions(lossy=True))
        assert any("column grade differs between the sources" in sentence for sentence in report.lost)
        convert(str(tmp_path / to), str(tmp_path / f"{to}-back"), "sft-idx")
        assert list(Shard(tmp_path / f"{to}-back").columns) == ["source"]
        assert verify_shard(tmp_path / f"{to}-back", full=True).ok


def test_pairs_of_several_sources_are_not_mixed_up(tmp_path: Path) -> None:
    for name in "ab":
        write_columned(tmp_path / name, PACKS[:4], {"pair": ColumnSpec("sequence", "u4", 2)})
    with pytest.raises(FormatError, match=r"column pair .* begin again in each source; .*sft-idx merge\)"):
        convert([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "c"), "sft-idx")


@pytest.mark.parametrize("name", [name for name in CARRYING if name != "sft-idx"])
def test_a_column_that_was_changed_is_found_or_read_as_it_is(tmp_path: Path, name: str) -> None:
    """The description of columns in a file is compared with the data."""
    spec = ColumnSpec("token", "f4", 3)
    write_columned(tmp_path / "x", PACKS[:4], {"topk": spec})
    there = tmp_path / "there"
    convert(str(tmp_path / "x"), str(there), name)
    stated = {"memmap": there / "manifest.json", "jsonl-chunks": there / "columns.json"}.get(name, there)
    good = stated.read_bytes()
    if name == "parquet":
        import pyarrow.parquet as pq

        table = pq.read_table(there)
        metadata = dict(table.schema.metadata)
    for old, new in (
        (b'"width"', b'"wodth"'),
        (b'"dtype"', b'"dtope"'),
        (b'"topk"', b'"tupk"'),
        (b'"width":3', b'"width":2'),
    ):
        if name == "parquet":
            key = b"megatron_sft_idx"
            changed = metadata[key].replace(old, new)
            assert changed != metadata[key]
            pq.write_table(table.replace_schema_metadata({**metadata, key: changed}), there)
        else:
            raw = good.replace(b'": ', b'":').replace(old, new)
            assert raw != good
            stated.write_bytes(raw)
        with pytest.raises((FormatError, SequenceError)):
            list(open_reader(str(there), name, columns=None).runs())


@pytest.mark.parametrize("value", ["1e300", '"nan"', "null", "true", "[1]", '"1"'])
def test_json_values_that_the_column_does_not_hold_are_refused(tmp_path: Path, value: str) -> None:
    write_columned(
        tmp_path / "x", PACKS[:2], {"grade": ColumnSpec("pack", "f4"), "label": ColumnSpec("sequence", "u1")}
    )
    convert(str(tmp_path / "x"), str(tmp_path / "y"), "jsonl-chunks")
    chunk = tmp_path / "y" / "chunk_00000.jsonl"
    good = chunk.read_text()
    assert '"grade":0.0' in good
    for bad in (good.replace('"grade":0.0', f'"grade":{value}'), good.replace('"label":[0', f'"label":[{value}')):
        assert bad != good
        chunk.write_text(bad)
        with pytest.raises(SequenceError, match="pack 0"):
            list(open_reader(str(tmp_path / "y"), "jsonl-chunks", columns=None).runs())


def test_a_shard_that_is_read_as_a_stock_dataset_says_what_is_left_out(tmp_path: Path) -> None:
    write_columned(tmp_path / "x", PACKS[:4], {"source": SOURCE})
    options = ConvertOptions(source_format="megatron", reader={"mask_rule": "all"})
    report = convert(str(tmp_path / "x"), str(tmp_path / "y"), "sft-idx", options)
    assert any("without masks and columns" in note for note in report.notes)


def test_without_a_choice_packs_come_with_all_columns(tmp_path: Path) -> None:
    for name in "xy":
        write_columned(tmp_path / name, PACKS[:4], {"grade": ColumnSpec("pack", "f4")})
    for source in (tmp_path / "x", tmp_path):
        assert "grade" in open_dataset(source, columns=None)[0]
        assert "grade" not in open_dataset(source)[0]


def test_a_result_with_other_values_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_columned(tmp_path / "x", PACKS[:4], {"grade": ColumnSpec("pack", "f4")})
    write_columned(tmp_path / "y", PACKS[:4], {"grade": ColumnSpec("pack", "f4")}, first=1)
    writer = registry._module("memmap").Writer
    monkeypatch.setattr(writer, "reread", lambda self: open_reader(str(tmp_path / "y"), "sft-idx", columns=None))
    with pytest.raises(FormatError, match="column grade differ from the source"):
        convert(str(tmp_path / "x"), str(tmp_path / "z"), "memmap")
    assert not (tmp_path / "z").exists()
