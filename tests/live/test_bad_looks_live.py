"""A single failed read of a catalog or of chunks does not matter to a consumer; tested with faults at every read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_looks import Look, failing, hurry, reports_lasting_faults, survives_bad_looks, torn
from live_catalogs import CAPACITY, all_names, loader, make_catalog, names_of

from megatron_sft_idx.live import Ack, Catalog, Deal, Limits, Waiter, read_acks, write_ack
from megatron_sft_idx.live.catalog_shards import CatalogShards
from megatron_sft_idx.live.chunks import LiveChunks

WAITER = Waiter("rank 0", lambda seconds: None, lambda line: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provide a finished catalog of two shards, and an unfinished folder of two chunks."""
    make_catalog(tmp_path / "catalog", [3, 2], max_ahead_shards=4)
    write_ack(str(tmp_path / "catalog/_acks"), Ack("train", 0, Deal(1, seed=1234), 0, 1, 3))
    (tmp_path / "chunks").mkdir()
    for number in range(2):
        line = '{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "seq_lengths": [3]}\n'
        (tmp_path / f"chunks/chunk_{number:05d}.jsonl").write_text(line * 3)
    Catalog(tmp_path / "chunks").write_end(2)
    return tmp_path


def shards(folder: Path) -> CatalogShards:
    return CatalogShards(str(folder / "catalog"), max_wait=None)


def prepared(folder: Path) -> CatalogShards:
    """Return shards with known limits, as in a loader."""
    known = shards(folder)
    known.limits(WAITER)
    return known


def chunks(folder: Path) -> LiveChunks:
    place = str(folder / "chunks")
    return LiveChunks(place, Limits(CAPACITY, 3), end_folders=(place,), settle_seconds=0.0)


def opened(folder: Path) -> Any:
    packs = shards(folder).open(1)
    return packs.num_packs, packs.num_tokens


def without_end(folder: Path) -> CatalogShards:
    (folder / "catalog/_END.json").unlink(missing_ok=True)
    return prepared(folder)


def trained_on(folder: Path) -> list[int]:
    with loader(shards(folder), shuffle=False) as batches:
        return names_of(batches)


STATE, END, ACK = "catalog/_producer.json", "catalog/_END.json", "catalog/_acks/train/rank-00000.json"
LOOKS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "limits": (STATE, lambda folder: shards(folder).limits(WAITER)),
    "least packs": (STATE, lambda folder: shards(folder).least_packs()),
    "wait for what is there": ("catalog/shard-000001.seq.idx", lambda folder: shards(folder).wait(1, WAITER)),
    "wait, state": (STATE, lambda folder: shards(folder).wait(2, WAITER)),
    "wait, end": (END, lambda folder: shards(folder).wait(2, WAITER)),
    "may not come": (END, lambda folder: prepared(folder).may_not_come([0, 1])),
    "header": ("catalog/shard-000001.seq.idx", lambda folder: shards(folder).header(1).num_packs),
    "count": ("catalog/shard-000001.seq.idx", lambda folder: shards(folder).count(1)),
    "open": ("catalog/shard-000001.seq.idx", opened),
    "open, tokens": ("catalog/shard-000001.bin", opened),
    "newest": ("catalog", lambda folder: shards(folder).newest(lambda number: number)),
    "train, state": (STATE, trained_on),
    "train, end": (END, trained_on),
    "train, folder": ("catalog", trained_on),
    "train, acknowledgements": (ACK, trained_on),
    "numbers of chunks": ("chunks", lambda folder: chunks(folder).numbers()),
    "end of chunks": ("chunks/_END.json", lambda folder: chunks(folder).end()),
    "whole chunk": ("chunks/chunk_00001.jsonl", lambda folder: chunks(folder).is_whole(1, 2)),
    "count of chunk": ("chunks/chunk_00000.jsonl", lambda folder: chunks(folder).count(0)),
    "wait for chunk": ("chunks/chunk_00001.jsonl", lambda folder: chunks(folder).wait(1, WAITER)),
    "wait for no chunk": ("chunks/_END.json", lambda folder: chunks(folder).wait(2, WAITER)),
}


def look(folder: Path, what: str) -> Look:
    path, value = LOOKS[what]
    return Look(folder / path, lambda: value(folder), path.endswith(".json"))


@pytest.mark.parametrize("what", LOOKS)
def test_one_bad_look_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    survives_bad_looks(look(folder, what), monkeypatch)


@pytest.mark.parametrize("what", LOOKS)
def test_a_lasting_fault_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    reports_lasting_faults(look(folder, what), monkeypatch)


def test_chunks_are_marked_by_the_next_commit_where_one_could_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    live = chunks(folder)
    live.acks, live._may_mark = str(folder / "chunks/_acks"), True
    write_ack(live.acks, Ack("train", 0, Deal(1, seed=1234), 0, 2, 6))
    mark = folder / "chunks/chunk_00000.jsonl.completed"
    with failing(mark, errno.EIO, 1):
        live.committed()
    assert not mark.exists()
    live.committed()
    assert mark.exists()


def test_a_shard_that_is_seen_before_the_state_is_no_folder_without_producer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, away = folder / STATE, folder / "away"
    os.rename(state, away)
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 3 and away.exists():
            os.rename(away, state)

    waiter = Waiter("rank 0", pause, lambda line: None, lambda: now[0])
    assert shards(folder).limits(waiter)[0].capacity == CAPACITY
    hurry(monkeypatch)
    with torn(state, 0, monkeypatch, heals=True):
        assert shards(folder).limits(waiter)[0].capacity == CAPACITY


def test_all_is_read_and_acknowledged_on_a_disk_that_fails_now_and_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    for path in (STATE, END, ACK, "catalog", "catalog/_acks/train", "catalog/shard-000000.seq.idx"):
        for number in (errno.EIO, errno.ESTALE):
            with failing(folder / path, number, 3), loader(shards(folder), shuffle=False) as batches:
                assert names_of(batches) == all_names([3, 2])
                batches.commit(batches.state_dict())
    assert [ack.items_done for ack in read_acks(str(folder / "catalog/_acks"))["train"]] == [2]
