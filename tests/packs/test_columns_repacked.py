"""Columns during repacking: values of tokens and sequences are kept, and losing values of packs is reported."""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from columned import SOURCE, SPECS, assert_columns, values_of, write_columned
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_packs import Sample, demo_samples, samples

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.cli.main import main
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard import Shard, write_column
from megatron_sft_idx.tokenize import PackOptions, gather, pack_shard
from megatron_sft_idx.tokenize.corpus import CorpusReader

CARRIED = {name: spec for name, spec in SPECS.items() if spec.per != "pack"}
# Columns with the token and the sequence of the source that a row belongs to.
PLACES = {
    "token_number": ColumnSpec("token", np.int64),
    "token_numbers": ColumnSpec("token", np.int32, 3, "label"),
    "number": ColumnSpec("sequence", np.int64),
}


def _write(prefix: Path, packs: list[Sample], *, attach: bool = False) -> Shard:
    write_columned(prefix, packs, {} if attach else CARRIED)
    shard = Shard(prefix)
    counts = {"token": shard.header.num_tokens, "sequence": shard.header.num_sequences}
    for name, spec in (CARRIED if attach else {}).items():
        values = values_of(spec, 0, counts[spec.per])
        write_column(prefix, name, values, per=spec.per, alignment=spec.alignment, metadata=spec.metadata)
    for name, spec in PLACES.items():
        values = np.arange(counts[spec.per] * spec.width, dtype=spec.dtype).reshape(spec.shape(counts[spec.per]))
        write_column(prefix, name, values, per=spec.per, alignment=spec.alignment)
    return Shard(prefix)


def _assert_goes_with_its_sequence(source: Shard, packed: Shard, overlong: str) -> None:
    """Check that every sequence of the packed shard has its values in the source, column by column."""
    bounds, theirs = packed.sequence_bounds(), source.sequence_bounds()
    numbers = packed.columns["number"].values[:]
    assert sorted(source.columns) == sorted(packed.columns)
    if overlong == "error":
        assert sorted(numbers.tolist()) == list(range(source.header.num_sequences))
    tokens = packed.columns["token_number"].values[:]
    for name, column in packed.columns.items():
        mine, values = source.columns[name], column.values[:]
        assert column.spec == mine.spec
        at = tokens if column.spec.per == "token" else numbers
        np.testing.assert_array_equal(values, np.asarray(mine.values[:])[at], strict=True)
    np.testing.assert_array_equal(packed.files.tokens[:], source.files.tokens[:][tokens])
    # The tokens belong to the sequence, in order.
    for number, start, stop in zip(numbers.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        first = tokens[start]
        assert theirs[number] <= first
        assert first + stop - start <= theirs[number + 1]
        np.testing.assert_array_equal(tokens[start:stop], np.arange(first, first + stop - start))


@settings(max_examples=60)
@given(
    samples(least=1),
    st.integers(1, 40),
    st.sampled_from(["drop", "truncate", "split"]),
    st.sampled_from(["auto", "none", "sequential"]),
    st.booleans(),
)
def test_what_belongs_to_a_sequence_goes_with_it(
    packs: list[Sample], capacity: int, overlong: Any, method: str, attach: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = _write(Path(folder) / "x", packs, attach=attach)
        options = PackOptions(capacity=capacity, overlong=overlong, method=method)
        try:
            report = pack_shard(source, f"{folder}/y", options)
        except FormatError:
            assert all(stop - start > capacity for pack in packs for start, stop in pairwise(pack.bounds))
            return
        packed = Shard(f"{folder}/y")
        assert report.lost_columns == []
        _assert_goes_with_its_sequence(source, packed, overlong)
        assert verify_shard(f"{folder}/y", full=True).ok


def test_several_shards_and_a_small_window_bring_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _write(tmp_path / "x", demo_samples(40))
    monkeypatch.setattr(CorpusReader, "window_tokens", 8)
    pack_shard(source, str(tmp_path / "y"), PackOptions(capacity=64), shards=3)
    for number in range(3):
        prefix = tmp_path / f"y-{number:05d}-of-00003"
        _assert_goes_with_its_sequence(source, Shard(prefix), "split")
        assert verify_shard(prefix, full=True).ok


@pytest.mark.parametrize("backend", ["mmap", "pread", "reopen"])
def test_every_backend_packs_the_same_columns(tmp_path: Path, backend: Any) -> None:
    _write(tmp_path / "x", demo_samples(40))
    for name, how in (("y", "mmap"), ("z", backend)):
        pack_shard(Shard(tmp_path / "x", backend=how), str(tmp_path / name), PackOptions(capacity=64))
    for path in sorted(tmp_path.glob("y.*")):
        assert path.read_bytes() == (tmp_path / path.name.replace("y.", "z.")).read_bytes()


def test_columns_of_packs_are_lost_only_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grades = {"grade": ColumnSpec("pack", "f4"), "mood": ColumnSpec("pack", "u1", 3)}
    write_columned(tmp_path / "x", demo_samples(), {"source": SOURCE, **grades})
    words = ["pack", str(tmp_path / "x"), "--seq-length", "64", "--output-prefix", str(tmp_path / "y")]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "columns grade, mood have one row per pack, so they do not fit the new packs" in said
    assert "--lossy" in said
    assert not list(tmp_path.glob("y.*"))
    assert main([*words, "--lossy", "--summary", str(tmp_path / "summary.json")]) == 0
    assert "lost            columns grade, mood: one row per pack" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["packing"]["lost_columns"] == ["grade", "mood"]
    assert list(Shard(tmp_path / "y").columns) == ["source"]
    assert "lost" not in Shard(tmp_path / "y").header.metadata
    assert verify_shard(tmp_path / "y", full=True).ok


def test_nothing_is_said_to_be_lost_where_nothing_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_columned(tmp_path / "x", demo_samples(), {"source": SOURCE})
    words = ["pack", str(tmp_path / "x"), "--seq-length", "64", "--output-prefix", str(tmp_path / "y"), "--lossy"]
    assert main(words) == 0
    assert "lost" not in capsys.readouterr().out
    write_columned(tmp_path / "z", demo_samples(), {"source": SOURCE})
    assert_columns(Shard(tmp_path / "z"), {"source": SOURCE})


def test_a_column_that_was_attached_meanwhile_is_in_all_shards_of_a_resumed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_columned(tmp_path / "x", demo_samples(), {})
    options, write_shard, written = PackOptions(capacity=40), gather.write_shard, []

    def interrupted(*arguments: Any, **more: Any) -> Any:
        if written:
            raise KeyboardInterrupt
        written.append(arguments)
        return write_shard(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(gather, "write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pack_shard(Shard(tmp_path / "x"), str(tmp_path / "y"), options, shards=2)
    write_column(tmp_path / "x", "late", np.arange(Shard(tmp_path / "x").header.num_sequences), per="sequence")
    pack_shard(Shard(tmp_path / "x"), str(tmp_path / "y"), options, shards=2)
    shards = [Shard(tmp_path / f"y-0000{number}-of-00002") for number in range(2)]
    assert [list(shard.columns) for shard in shards] == [["late"], ["late"]]
