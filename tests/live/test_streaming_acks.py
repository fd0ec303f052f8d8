"""Acknowledgements: when a shard is completed, who may write that, and information about removed shards."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bad_looks import hurry
from disks import NOBODY, in_a_child
from live_catalogs import all_names, copies, loader, make_catalog, names, names_in, names_of, remove

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.live import completed, read_acks
from megatron_sft_idx.live.catalog_shards import CatalogShards

COUNTS = [5, 3, 0, 7, 4, 6]


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    make_catalog(tmp_path / "catalog", COUNTS)
    return tmp_path / "catalog"


def shards_completed(catalog: Path, ack_dir: Path | None = None) -> list[int]:
    return completed(read_acks(str(ack_dir or catalog / "_acks")), 1, range(len(COUNTS)))


def test_a_shard_is_complete_when_a_checkpoint_is_committed_not_when_it_was_read(catalog: Path) -> None:
    with loader(catalog) as batches:
        copies(batches, 8)
        state = batches.state_dict()
        copies(batches, 3)
        assert shards_completed(catalog) == []
        for _ in range(2):  # repetition is harmless
            batches.commit(json.loads(json.dumps(state)))
            assert shards_completed(catalog) == [0, 1]


def test_nothing_is_complete_before_the_last_epoch(catalog: Path) -> None:
    with loader(catalog, epochs=2, micro_batch_size=5) as batches:
        found = []
        for _ in batches:
            batches.commit(batches.state_dict())
            found.append(len(shards_completed(catalog)))
    assert found[:5] == [0] * 5
    assert found[-1] == len(COUNTS)


def test_an_epoch_that_completes_nothing_does_not_wait_for_ever(tmp_path: Path) -> None:
    """A producer that may be three shards ahead never makes a fourth one in the first of two epochs."""
    catalog = make_catalog(tmp_path / "c", [2, 2, 2], ended=False, max_ahead_shards=3)
    said = catalog.producer()
    assert said is not None
    catalog.write_producer(replace(said, state="waiting for consumers"))
    shards = CatalogShards(catalog.folder, producer_timeout=0.5, max_wait=4.0)
    beats = threading.Event()

    def beat() -> None:
        while not beats.wait(0.1):
            now = catalog.producer()
            assert now is not None
            catalog.write_producer(replace(now, beat=now.beat + 1))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with loader(shards, epochs=2) as batches:
            copies(batches, 6)
            batches.commit(batches.state_dict())
            with pytest.raises(SFTIndexError, match="only the last one completes shards"):
                next(batches)
    finally:
        beats.set()
        thread.join()


def test_ranks_that_are_ahead_are_counted_by_their_acknowledgements(catalog: Path) -> None:
    """Rank 0 is done and its shards are freed when rank 1 begins; rank 1 still takes the same number of steps."""
    with loader(catalog, 0, 2) as ahead:
        steps = len(copies(ahead))
        ahead.commit(ahead.state_dict())
    remove(catalog, *shards_completed(catalog))
    assert not list(catalog.glob("shard-000000*"))
    with loader(catalog, 1, 2) as behind:
        taken = copies(behind)
    assert len(taken) == steps == 16
    assert sorted(names_of(taken)) == [name for shard in (1, 3, 5) for name in names(shard, COUNTS[shard])]


def test_freed_shards_that_nobody_acknowledged_cannot_be_counted(catalog: Path) -> None:
    remove(catalog, 0)
    with (
        loader(catalog, 1, 2) as batches,
        pytest.raises(SFTIndexError, match="shard-000000: it was published, but"),
    ):
        copies(batches)


def test_a_run_that_was_given_up_does_not_mix_with_the_next(catalog: Path) -> None:
    """Two runs with other sizes resume from one checkpoint.

    Acknowledgements of the first do not count for the second.
    """
    with loader(catalog) as batches:
        copies(batches, 2)
        states = [batches.state_dict()]
    for size in (3, 2):
        for rank in range(size):
            with loader(catalog, rank, size) as batches:
                batches.load_state_dict(states)
                copies(batches, 4 if size == 3 else 1)
                batches.commit(batches.state_dict())
        acks = read_acks(str(catalog / "_acks"))["train"]
        assert {(ack.generation, ack.deal.size) for ack in acks} == {(1, 3) if size == 3 else (2, 2)}


def test_what_is_wrong_with_another_consumer_is_its_own_matter(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    torn = catalog / "_acks/other/rank-00000.json"
    torn.parent.mkdir(parents=True)
    torn.write_text("{")
    with loader(catalog) as batches:
        copies(batches)
        batches.commit(batches.state_dict())
    with pytest.raises(FormatError, match=f"{torn}: not a JSON document"):
        shards_completed(catalog)


def test_empty_shards_at_the_end_are_complete_too(tmp_path: Path) -> None:
    """No micro-batch follows them, so they are done only when a rank reaches the end."""
    counts = [3, 0, 2, 1, 0, 0]
    make_catalog(tmp_path / "c", counts)
    for rank in range(2):
        with loader(tmp_path / "c", rank, 2) as batches:
            copies(batches)
            batches.commit(batches.state_dict())
    assert completed(read_acks(str(tmp_path / "c" / "_acks")), 1, range(6)) == list(range(6))


def test_a_run_from_an_older_checkpoint_takes_back_what_is_complete(catalog: Path) -> None:
    """Otherwise the producer would remove shards that the run still has to read."""
    with loader(catalog) as batches:
        copies(batches, 6)
        older = batches.state_dict()
        copies(batches, 6)
        batches.commit(batches.state_dict())
    assert shards_completed(catalog) == [0, 1, 2]
    with loader(catalog) as batches:
        batches.load_state_dict(older)
        batches.commit()
        assert shards_completed(catalog) == [0]
    with loader(catalog) as batches:
        batches.commit()
        assert shards_completed(catalog) == []


def test_a_first_run_says_nothing_before_its_first_checkpoint(catalog: Path) -> None:
    with loader(catalog) as batches:
        batches.commit()
        assert not (catalog / "_acks").exists()
        copies(batches, 3)


def test_shards_that_are_completed_may_go_after_every_batch(tmp_path: Path) -> None:
    counts = [1] * 9
    make_catalog(tmp_path / "c", counts, keep_recent=0)
    found = []
    with loader(tmp_path / "c") as batches:
        for batch in batches:
            found += names_in(batch)
            batches.commit(batches.state_dict())
            remove(tmp_path / "c", *completed(read_acks(str(tmp_path / "c" / "_acks")), 1, range(9)))
        batches.commit(batches.state_dict())
    assert sorted(found) == all_names(counts)
    assert completed(read_acks(str(tmp_path / "c" / "_acks")), 1, range(9)) == list(range(9))


def test_acknowledgements_go_where_they_are_told_to(catalog: Path, tmp_path: Path) -> None:
    with loader(catalog, ack_dir=tmp_path / "acks", consumer="run-1") as batches:
        copies(batches)
        batches.commit(batches.state_dict())
    assert shards_completed(catalog, tmp_path / "acks") == list(range(len(COUNTS)))
    assert not (catalog / "_acks").exists()


@pytest.mark.parametrize("consumer", ["", "../others", "a/b", ".hidden"])
def test_a_name_that_is_no_folders_is_refused_before_training(catalog: Path, consumer: str) -> None:
    with pytest.raises(FormatError, match="expected up to 100 letters"):
        loader(catalog, consumer=consumer)


@pytest.fixture
def readable() -> Iterator[Path]:
    """Provide a folder that another user can access."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


def test_a_catalog_that_consumers_may_not_write_to(readable: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_catalog(readable / "limited", COUNTS, max_ahead_shards=5)
    make_catalog(readable / "free", COUNTS)
    (readable / "acks").mkdir(mode=0o777)
    (readable / "acks").chmod(0o777)

    def as_another() -> None:
        with (
            loader(readable / "limited") as batches,
            pytest.raises(SFTIndexError, match=r"cannot be written.*--ack-dir"),
        ):
            next(batches)
        with loader(readable / "limited", ack_dir=readable / "acks") as batches:
            assert names_of(copies(batches)) != []
            batches.commit(batches.state_dict())
        assert shards_completed(readable / "limited", readable / "acks") == list(range(len(COUNTS)))
        caplog.set_level(logging.INFO)
        with loader(readable / "free") as batches:
            copies(batches)
            batches.commit(batches.state_dict())
        assert sum("is not writable; this has no effect on training" in line for line in caplog.messages) == 1

    in_a_child(as_another, user=NOBODY)
