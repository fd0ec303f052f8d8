"""The loader on finished catalogs: its batches, resuming and acknowledgements."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from live_catalogs import (
    CAPACITY,
    all_names,
    copies,
    loader,
    make_catalog,
    names,
    names_in,
    names_of,
    publish,
    remove,
)
from sample_packs import sample_of, write_samples
from training_source import StoredRows

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.live import Catalog, catalog_shards
from megatron_sft_idx.live.live_loader import LiveConfig, LiveLoader
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.training.batch import BatchAssembler

COUNTS = [5, 3, 0, 7, 4, 6]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    make_catalog(tmp_path / "catalog", COUNTS)
    return tmp_path / "catalog"


def same(some: list[Tensors], others: list[Tensors]) -> bool:
    return len(some) == len(others) and all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(some, others, strict=True)
    )


def test_batches_are_the_assemblers(catalog: Path) -> None:
    """Compares every tensor of every batch, with packs in stored order."""
    source = StoredRows(*(Shard(Catalog(catalog).shard_prefix(number)) for number in range(len(COUNTS))), pad_id=0)
    assembler = BatchAssembler(source, 16, width=5)
    with loader(catalog, shuffle=False, micro_batch_size=5) as batches:
        taken = copies(batches)
    assert same(taken, [assembler.assemble(range(first, first + 5)) for first in range(0, 25, 5)])


@pytest.mark.parametrize("form", ["narrow", "narrow-weighted"])
def test_forms_and_padded_sequences(catalog: Path, form: Any) -> None:
    options = {"form": form, "micro_batch_size": 5, "seq_length": 24, "sequence_multiple": 2}
    with loader(catalog, **options) as batches:
        taken = copies(batches)
    assert names_of(taken) == names_of(loader(catalog, micro_batch_size=5, seq_length=24))
    assert all(batch["cu_seqlens_padded"].shape == (5, 5) for batch in taken)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("window", [1, 2])
def test_ranks_read_everything_once_an_epoch_and_take_equal_steps(catalog: Path, size: int, window: int) -> None:
    ranks = [copies(loader(catalog, rank, size, micro_batch_size=2, window=window, epochs=2)) for rank in range(size)]
    assert len({len(batches) for batches in ranks}) == 1
    assert Counter(name for batches in ranks for name in names_of(batches)) == Counter(2 * all_names(COUNTS))
    for rank, batches in enumerate(ranks):
        own = {name for shard in range(rank, len(COUNTS), size) for name in names(shard, COUNTS[shard])}
        assert set(names_of(batches)) == own
        assert all(batch["tokens"].shape == (2, 16) and batch["tokens"][:, 0].min() >= 1000 for batch in batches)


def test_dropping_takes_no_masked_rows(catalog: Path) -> None:
    ranks = [names_of(loader(catalog, rank, 2, micro_batch_size=2, at_end="drop")) for rank in range(2)]
    assert [len(found) for found in ranks] == [8, 8]
    assert len(set(ranks[0] + ranks[1])) == 16


def test_shuffling_stays_inside_the_window(catalog: Path) -> None:
    stored = names_of(loader(catalog, shuffle=False))
    assert stored == all_names(COUNTS)
    shuffled = names_of(loader(catalog))
    assert shuffled != stored
    assert [name // 100 for name in shuffled] == [name // 100 for name in stored]
    wide = names_of(loader(catalog, window=6))
    assert sorted(wide) == stored
    assert [name // 100 for name in wide] != [name // 100 for name in stored]
    assert names_of(loader(catalog, seed=2)) != shuffled


# ---- resuming ----


@pytest.mark.parametrize("at_end", ["pad", "drop"])
def test_the_same_size_goes_on_bit_for_bit(catalog: Path, at_end: str) -> None:
    options = {"micro_batch_size": 2, "window": 2, "epochs": 2, "at_end": at_end}
    whole = copies(loader(catalog, 1, 2, **options))
    for steps in (0, 1, 3, len(whole) - 1, len(whole)):
        with loader(catalog, 1, 2, **options) as first:
            taken = copies(first, steps)
            state = json.loads(json.dumps(first.state_dict()))
        with loader(catalog, 1, 2, **options) as second:
            second.load_state_dict(state)
            assert second.state_dict() == state
            assert same(taken + copies(second), whole)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (1, 3), (3, 2, 5, 1)])
def test_another_number_of_ranks_goes_on_exactly_once(catalog: Path, sizes: tuple[int, ...]) -> None:
    found: list[str | int] = []
    states: list[Any] = []
    for size in sizes:
        after = []
        for rank in range(size):
            with loader(catalog, rank, size, window=2) as batches:
                if states:
                    batches.load_state_dict(states)
                found += names_of(copies(batches, None if size == sizes[-1] else 2))
                after.append(batches.state_dict())
        states = json.loads(json.dumps(after))
    assert Counter(found) == Counter(all_names(COUNTS))


def test_a_state_that_does_not_fit_is_refused(catalog: Path) -> None:
    with loader(catalog, 0, 2) as batches:
        next(batches)
        state = batches.state_dict()
    for options, says in (
        ({"rank": 1}, "rank 0, but this run has 1"),
        ({"size": 3}, "data-parallel size 2, but this run has 3"),
        ({"window": 2}, "window 1, but this run has 2"),
        ({"micro_batch_size": 2}, "micro-batch size 1, but this run has 2"),
        ({"micro_batches": 2}, "rows per step 1, but this run has 2"),
        ({"seed": 2}, "seed 1234"),
        ({"shuffle": False}, "shuffle True"),
    ):
        given: dict[str, Any] = {"rank": 0, "size": 2, **options}
        with pytest.raises(FormatError, match=says):
            loader(catalog, **given).load_state_dict(state)
    with pytest.raises(FormatError, match="the state is in epoch 2, but this run has only 1"):
        # Its acknowledgements would look damaged, and stop the producer.
        loader(catalog, 0, 2).load_state_dict({**state, "deal": {**state["deal"], "epoch": 1}})
    with loader(catalog, 0, 2) as batches:
        next(batches)
        with pytest.raises(SFTIndexError, match="into a new loader"):
            batches.load_state_dict(state)


def test_resuming_where_shards_were_freed_is_refused(catalog: Path) -> None:
    with loader(catalog) as batches:
        next(batches)
        state = batches.state_dict()
    remove(catalog, 1, 3)
    with loader(catalog) as batches:
        batches.load_state_dict(state)
        with pytest.raises(
            SFTIndexError, match=r"shard-000001: .*somebody removed it\. Resume from the newest checkpoint"
        ):
            copies(batches)
        with pytest.raises(StopIteration):
            next(batches)


# ---- refusals, limits, logs ----


def test_what_a_live_catalog_cannot_serve_is_refused_with_the_reason(catalog: Path) -> None:
    with pytest.raises(FormatError, match="catalog: a list, expected a string"):
        LiveLoader([str(catalog), str(catalog)], LiveConfig(rank=0, size=1, seq_length=16))  # type: ignore[arg-type]
    for options, says in (
        ({"rank": 2, "size": 2}, "rank 2, expected 0 to 1 .there are 2 ranks."),
        ({"window": 0}, "window 0, expected at least 1"),
        ({"epochs": 0}, "epochs 0, expected at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size 0, expected at least 1"),
        ({"seed": -1}, "seed -1, expected at least 0"),
        ({"at_end": "stop"}, "at_end 'stop', expected 'pad' or 'drop'"),
    ):
        given: dict[str, Any] = {"rank": 0, "size": 1, **options}
        with pytest.raises(FormatError, match=says):
            loader(catalog, **given)
    with loader(catalog, seq_length=8) as batches, pytest.raises(FormatError, match="packs of up to 12 tokens"):
        next(batches)


def test_limits_with_which_training_must_stop_are_refused_at_the_start(tmp_path: Path) -> None:
    make_catalog(tmp_path / "c", COUNTS, max_ahead_shards=4)
    for size, window, fits in ((4, 1, True), (5, 1, False), (1, 2, True), (2, 2, False)):
        with loader(tmp_path / "c", 0, size, window=window) as batches:
            if fits:
                next(batches)
            else:
                with pytest.raises(FormatError, match=r"--max-ahead-shards 5 or more"):
                    next(batches)


def test_a_shard_that_breaks_the_promise_is_named(catalog: Path) -> None:
    wide = [sample_of([1] * 5, lambda p: 0, lambda p: 1)]
    write_samples(Catalog(catalog).shard_prefix(1), wide, capacity=CAPACITY, pad_id=0, overwrite=True)
    with (
        loader(catalog) as batches,
        pytest.raises(
            FormatError, match=r"shard-000001: 5 sequences in a pack, but the limit of the catalog's producer is 3"
        ),
    ):
        copies(batches)


@pytest.mark.parametrize("window", [1, 3])
def test_a_shard_with_a_broken_index_is_named(catalog: Path, window: int) -> None:
    starts = Path(Catalog(catalog).shard_prefix(1) + ".seq.bin")
    starts.write_bytes(b"\x09" + starts.read_bytes()[1:])
    with (
        loader(catalog, window=window) as batches,
        pytest.raises(
            FormatError,
            match=r"shard-000001\.seq\.bin: byte 0: pack 0: the first sequence does not start at 0; .*verify",
        ),
    ):
        copies(batches)


def test_shards_without_a_producer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_shards, "_LAG_SECONDS", 0.1)
    for shard, packs in enumerate(COUNTS):
        publish(tmp_path, shard, packs)
    with loader(tmp_path) as batches, pytest.raises(SFTIndexError, match=r"no _producer\.json"):
        next(batches)


def test_the_log_says_who_reads_what(catalog: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_sft_idx.live")
    with loader(catalog, 1, 2, micro_batch_size=2) as batches:
        copies(batches)
        batches.commit(batches.state_dict())
    lines = caplog.messages
    assert lines[0] == (f"data-parallel rank 1 of 2: catalog {catalog}, window 1, shuffled, epoch 1 of 1, from row 0")
    tokens = [Shard(Catalog(catalog).shard_prefix(shard)).header.num_tokens for shard in range(len(COUNTS))]
    opened = [line for line in lines if ": shard " in line]
    assert opened == [f"rank 1: shard {s}, {COUNTS[s]} packs, {tokens[s]} tokens" for s in (1, 3, 5)]
    assert "rank 1: epoch 1 ends after 8 steps of 2 rows, 16 packs; 0 rows of padding" in lines
    assert lines[-1] == "rank 1: committed epoch 1, 3 items, 16 packs of shards that are complete"


def test_a_dropped_loader_leaves_no_thread(catalog: Path) -> None:
    batches = loader(catalog)
    assert names_in(next(batches))
    batches.close()
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]
    with pytest.raises(StopIteration):
        next(batches)
