"""Columns of live shards: equal batches to finished shards, also after a resume, and errors if shards differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from columned import SPECS as ALL_SPECS
from columned import write_columned
from live_catalogs import (
    CAPACITY,
    all_names,
    copies,
    loader,
    make_catalog,
    names_of,
    packs_of,
    publish,
    remove,
)

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.layout.column import PAIR, ColumnSpec
from megatron_sft_idx.live import Catalog
from megatron_sft_idx.live.catalog import Limits
from megatron_sft_idx.live.chunks import LiveChunks
from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.sources import StoredPacks

COUNTS = [5, 3, 0, 7, 4, 6]
# ``source`` is rejected.
SPECS = {name: spec for name, spec in ALL_SPECS.items() if name != "source"}
A_SEQUENCE = next(name for name, spec in SPECS.items() if spec.per == "sequence" and spec.width == 1)
Tensors = dict[str, torch.Tensor]


def write(folder: Path, shard: int, packs: int, specs: dict[str, ColumnSpec] = ALL_SPECS) -> None:
    """Publish a shard with columns. Values count from another number in each shard."""
    prefix = Catalog(folder).shard_prefix(shard)
    write_columned(prefix, packs_of(shard, packs), specs, first=17 * shard, capacity=CAPACITY, pad_id=0)


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    folder = tmp_path / "catalog"
    make_catalog(folder, COUNTS)
    for shard, packs in enumerate(COUNTS):
        remove(folder, shard)
        write(folder, shard, packs)
    return folder


def finished(folder: Path) -> BatchAssembler:
    source = StoredPacks(ShardSet.open(folder, columns=list(SPECS)))
    return BatchAssembler(source, 16, width=5, pad_id=0, columns=list(SPECS))


@pytest.mark.parametrize("window", [1, 2, 3])
def test_batches_have_what_those_of_finished_shards_have(catalog: Path, window: int) -> None:
    """Compares every tensor of every batch, with packs in stored order."""
    options: dict[str, Any] = {"shuffle": False, "micro_batch_size": 5, "window": window, "columns": list(SPECS)}
    with loader(catalog, **options) as batches:
        taken = copies(batches)
    assembler = finished(catalog)
    for number, batch in enumerate(taken):
        expected = assembler.assemble(np.arange(5 * number, 5 * number + 5))
        assert batch.keys() == expected.keys() >= SPECS.keys()
        for name, tensor in batch.items():
            assert torch.equal(tensor, expected[name]), (number, name)
    assert len(taken) == sum(COUNTS) // 5


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1)])
def test_every_pack_keeps_its_values_where_a_run_goes_on_with_other_ranks(
    catalog: Path, sizes: tuple[int, int]
) -> None:
    """The run is shuffled, and resumed on another number of ranks with other micro-batches."""
    assembler = finished(catalog)
    rows = {name: assembler.sample(pack) for pack, name in enumerate(all_names(COUNTS))}
    options: dict[str, Any] = {"window": 2, "columns": list(SPECS)}
    states, seen = [], []
    for rank in range(sizes[0]):
        with loader(catalog, rank, sizes[0], micro_batch_size=2, **options) as batches:
            seen += copies(batches, 2)
            states.append(batches.state_dict())
    for rank in range(sizes[1]):
        with loader(catalog, rank, sizes[1], micro_batch_size=3, **options) as batches:
            batches.load_state_dict(states)
            seen += copies(batches)
    assert sorted(names_of(seen)) == all_names(COUNTS)
    for batch in seen:
        for row, (name, *_) in enumerate(batch["tokens"].tolist()):
            for column in SPECS:
                assert torch.equal(batch[column][row], rows[name][column]), (name, column)


def read(folder: Path, *columns: str) -> list[Tensors]:
    with loader(folder, shuffle=False, columns=columns) as batches:
        return copies(batches)


def test_judged_answers_are_not_trained_on_as_if_they_were_not(tmp_path: Path) -> None:
    catalog = make_catalog(tmp_path / "catalog", [])
    with ShardWriter(catalog.shard_prefix(0), capacity=CAPACITY, columns={"pair": PAIR}) as writer:
        writer.add_pack([1, 2, 3, 4], [1, 0, 1, 0], [0, 2], columns={"pair": [[0, 0], [0, 1]]})
    catalog.write_end(1)
    with pytest.raises(FormatError, match=r"holds preference pairs .column 'pair'.*; request .*columns="):
        read(Path(catalog.folder))
    assert read(Path(catalog.folder), "pair")[0]["pair"].tolist() == [[[0, 0], [0, 1], [0, 0], [0, 0]]]


def test_a_column_of_ones_own_that_is_called_label_may_be_left_out(tmp_path: Path) -> None:
    catalog = make_catalog(tmp_path / "catalog", [])
    with ShardWriter(
        catalog.shard_prefix(0), capacity=CAPACITY, columns={"label": ColumnSpec("token", "f4")}
    ) as writer:
        writer.add_pack([1, 2], [1, 0], [0], columns={"label": [0.5, 1]})
    catalog.write_end(1)
    assert "label" not in read(Path(catalog.folder))[0]


@pytest.mark.parametrize("odd", [0, 3, 5])
def test_a_shard_without_a_column_is_named(catalog: Path, odd: int) -> None:
    remove(catalog, odd)
    publish(catalog, odd, COUNTS[odd])
    with pytest.raises(SFTIndexError, match=f"shard-{odd:06d}.*no column {A_SEQUENCE}"):
        read(catalog, A_SEQUENCE)
    assert sorted(names_of(read(catalog))) == all_names(COUNTS)


def test_a_shard_with_a_column_of_another_kind_is_named(catalog: Path) -> None:
    remove(catalog, 3)
    write(catalog, 3, COUNTS[3], {A_SEQUENCE: ColumnSpec("sequence", np.int64)})
    with pytest.raises(
        FormatError, match=rf"shard 3: column {A_SEQUENCE} is int64 x 1 per sequence, but int32 x 1 per .*shard 5;"
    ):
        read(catalog, A_SEQUENCE)


def test_source_is_refused_because_each_shard_numbers_its_own_files(catalog: Path) -> None:
    with pytest.raises(FormatError, match="columns: the column source refers to the file list of each shard"):
        read(catalog, "source")


def test_what_has_no_columns_says_so(tmp_path: Path) -> None:
    (tmp_path / "chunk_00000.jsonl").write_text("")
    (tmp_path / "_SUCCESS").write_text("")
    with pytest.raises(FormatError, match="columns grade: chunks have no columns"):
        read(LiveChunks(str(tmp_path), Limits(CAPACITY, 3), num_chunks=1), "grade")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="column 'tokens'"):
        read(tmp_path, "tokens")
