"""Columns in ``inspect``: their kinds, the values of a pack, and differences between two shards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from columned import SOURCE, SPECS, write_columned
from sample_packs import demo_samples

from megatron_sft_idx.cli.main import main
from megatron_sft_idx.inspect.diff import compare_shards
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard import Shard, write_column

PACKS = demo_samples()
GRADE, PAIR = ColumnSpec("pack", "f4"), ColumnSpec("sequence", "u1", 12)


def _told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["inspect", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_summary_lists_every_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(tmp_path / "x")
    write_columned(prefix, PACKS)
    write_column(prefix, "late", np.zeros(len(PACKS), "f2"), per="pack")
    told = _told(capsys, prefix)["columns"]
    assert sorted(told) == sorted([*SPECS, "late"])
    for name, spec in SPECS.items():
        kind = {"per": spec.per, "dtype": spec.dtype.name, "width": spec.width, "alignment": spec.alignment}
        assert told[name] == {**kind, "nbytes": (tmp_path / f"x.{name}.col").stat().st_size, "listed": True}
    assert told["late"]["listed"] is False
    assert main(["inspect", prefix]) == 0
    lines = capsys.readouterr().out.splitlines()
    nbytes = (tmp_path / "x.late.col").stat().st_size
    assert f"{'column late':22}float16 x 1 per pack, {nbytes:,} bytes, attached" in lines
    assert all(
        any(line.split()[:3] == ["column", name, spec.dtype.name] for line in lines) for name, spec in SPECS.items()
    )
    assert any(line.endswith("bytes, written with the shard") and "uint32 x 2 per sequence" in line for line in lines)
    assert main(["inspect", prefix, "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert all(f"column {name}" in page for name in told)


def test_a_pack_is_shown_with_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(tmp_path / "x")
    write_columned(prefix, PACKS, {"grade": GRADE, "marks": PAIR, "source": SOURCE, "topk": ColumnSpec("token", "i4")})
    shard = Shard(prefix, columns=["grade", "marks"])
    for number in (0, len(PACKS) - 1):
        told = _told(capsys, prefix, "--pack", str(number))
        pack: Any = shard[number]
        assert told["columns"] == {"grade": pack["grade"].item()}
        assert [each["columns"] for each in told["sequences"]] == [{"marks": row} for row in pack["marks"].tolist()]
        assert main(["inspect", prefix, "--pack", str(number)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert f"columns of the pack: grade {pack['grade'].item()}" in lines
        few = ", ".join(map(str, pack["marks"][0][:8].tolist()))
        assert f"columns of sequence 0: marks [{few}, ... 12 values]" in lines


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_what_differs_in_columns_is_said(tmp_path: Path, backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    specs = {**SPECS, "grade": GRADE}
    write_columned(tmp_path / "x", PACKS, specs)
    write_columned(tmp_path / "same", PACKS, specs)
    write_columned(tmp_path / "y", PACKS, {"grade": ColumnSpec("pack", "f8"), "source": SOURCE})
    here = Shard(tmp_path / "x", backend=backend)
    assert compare_shards(here, Shard(tmp_path / "same", backend=backend)).same
    found = compare_shards(here, Shard(tmp_path / "y", backend=backend))
    assert not found.same
    assert found.columns.pop("grade") == "float32 x 1 per pack here, float64 x 1 per pack there"
    assert set(found.columns) == specs.keys() - {"grade", "source"}
    assert set(found.columns.values()) == {"only here"}
    assert main(["inspect", str(tmp_path / "y"), "--diff", str(tmp_path / "x")]) == 1
    said = capsys.readouterr().out
    assert "column grade: float64 x 1 per pack here, float32 x 1 per pack there" in said
    assert "only there" in said
    assert re.search(
        r"^the packs are equal: .* boundaries; the shards are not, because columns differ$", said, re.MULTILINE
    )
    assert main(["inspect", str(tmp_path / "x"), "--diff", str(tmp_path / "same")]) == 0
    assert capsys.readouterr().out.endswith(" packs, ids, masks and boundaries\n")


def test_the_first_row_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_sft_idx.inspect import diff

    monkeypatch.setattr(diff, "_CHUNK_NBYTES", 16)
    for name, start in (("x", 0), ("y", 1)):
        write_columned(tmp_path / name, PACKS, {})
        values = np.full((Shard(tmp_path / name).header.num_sequences, 2), np.nan, "f4")
        values[3] = start
        values[5, 1] = -start
        write_column(tmp_path / name, "p", values, per="sequence")
        write_column(tmp_path / name, "q", values[:, 0] * 0 + 1, per="sequence", metadata={"by": name})
    found = compare_shards(Shard(tmp_path / "x"), Shard(tmp_path / "y"))
    rows = len(values)
    assert found.columns["p"] == f"2 rows of {rows} differ, the first is 3: [0.0, 0.0] here, [1.0, 1.0] there"
    assert found.columns["q"] == "same values, different metadata"
    write_columned(tmp_path / "z", PACKS[:-1], {})
    write_column(tmp_path / "z", "p", values[: Shard(tmp_path / "z").header.num_sequences], per="sequence")
    assert "rows here" in compare_shards(Shard(tmp_path / "x"), Shard(tmp_path / "z")).columns["p"]
