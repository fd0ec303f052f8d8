"""Catalogs that a real process fills while they are read, with failures on both sides."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_catalogs import all_names, copies, loader, make_catalog, names, names_in, names_of
from live_producers import PATIENCE, producing

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.live import Deal, completed, read_acks, shard_name
from megatron_sft_idx.live.catalog_shards import CatalogShards
from megatron_sft_idx.live.live_loader import LiveLoader
from megatron_sft_idx.live.live_order import RankState

COUNTS = [4, 3, 5, 2, 6, 4]


class Taking:
    """A loader whose batches another thread takes."""

    def __init__(self, batches: LiveLoader) -> None:
        self.batches, self.names, self.error = batches, [], None
        self.steps = 0
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    names: list[int]
    error: BaseException | None

    def _take(self) -> None:
        try:
            for batch in self.batches:
                self.names += names_in(batch)
                self.steps += 1
        except BaseException as error:
            self.error = error

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition is true."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline, f"{len(self.names)} packs, {self.error}"
            time.sleep(0.01)

    def ended(self) -> list[int]:
        """Wait for the end and return everything that was taken."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "no end"
        if self.error is not None:
            raise self.error
        return self.names


def impatient(folder: Path, **options: Any) -> CatalogShards:
    return CatalogShards(str(folder), **{"max_wait": PATIENCE, "producer_timeout": PATIENCE, **options})


def test_training_starts_before_the_producer_ends(tmp_path: Path) -> None:
    with producing(tmp_path / "c") as producer:
        producer("publish", *COUNTS[:2])
        ranks = [Taking(loader(impatient(tmp_path / "c"), 0, 2))]
        ranks[0].until(lambda: len(ranks[0].names) == 4)
        ranks.append(Taking(loader(impatient(tmp_path / "c"), 1, 2)))
        ranks[1].until(lambda: len(ranks[1].names) == 3)
        producer("publish", *COUNTS[2:])
        producer("end")
        found = [rank.ended() for rank in ranks]
    assert Counter(found[0] + found[1]) == Counter(all_names(COUNTS))
    assert ranks[0].steps == ranks[1].steps == 15


def test_a_trainer_that_is_there_before_the_producer(tmp_path: Path) -> None:
    taking = Taking(loader(impatient(tmp_path / "c")))
    with producing(tmp_path / "c") as producer:
        producer("publish", *COUNTS)
        producer("end")
        assert Counter(taking.ended()) == Counter(all_names(COUNTS))


def test_batches_that_are_ready_are_not_held_back(tmp_path: Path) -> None:
    """With back-pressure it would never end: the next shard comes only after this one is acknowledged."""
    with producing(tmp_path / "c", max_ahead_shards=2) as producer:
        producer("publish", 4)
        with loader(impatient(tmp_path / "c"), micro_batch_size=2) as batches:
            assert len(names_in(next(batches)) + names_in(next(batches))) == 4
            batches.commit(batches.state_dict())
            assert completed(read_acks(str(tmp_path / "c" / "_acks")), 1, [0, 1]) == [0]


def test_a_window_waits_until_it_is_whole(tmp_path: Path) -> None:
    with producing(tmp_path / "c") as producer:
        taking = Taking(loader(impatient(tmp_path / "c"), window=3))
        producer("publish", 4, 3)
        time.sleep(0.3)
        assert taking.names == []
        producer("publish", 5, 2)
        taking.until(lambda: len(taking.names) == 12)
        producer("end")
        found = taking.ended()
    assert sorted(found[:12]) == all_names([4, 3, 5])
    assert sorted(found[12:]) == names(3, 2)


def test_dropping_serves_what_all_ranks_have(tmp_path: Path) -> None:
    with producing(tmp_path / "c") as producer:
        taking = Taking(loader(impatient(tmp_path / "c"), 0, 2, at_end="drop"))
        producer("publish", 4)
        time.sleep(0.3)
        assert taking.names == []  # rank 1 has nothing yet, and may never get a pack
        producer("publish", 3)
        taking.until(lambda: len(taking.names) == 3)
        producer("end")
        assert len(taking.ended()) == 3


# ---- waits that end with an error, or without one ----


@pytest.mark.parametrize(
    ("commands", "options", "says"),
    [
        ([("become", "failed", "the tokenizer is gone")], {}, "producer failed: the tokenizer is gone"),
        ([("hush",)], {"producer_timeout": 0.5}, "the producer is dead"),
        ([("become", "stopped", "Ctrl-C"), ("hush",)], {"producer_timeout": 0.5}, r"stopped \(Ctrl-C\)"),
        ([], {"max_wait": 0.5}, "the maximum wait"),
        ([("become", "waiting for consumers")], {"producer_timeout": 0.5}, "save checkpoints more often, or let"),
        ([("lose", True), ("publish", 3)], {}, "shards below 2 were removed"),
        ([("lose", False), ("publish", 3), ("end",)], {}, "was published, but somebody removed it"),
    ],
)
def test_a_shard_that_will_not_come_is_an_error_that_says_why(
    tmp_path: Path, commands: list[tuple[Any, ...]], options: dict[str, Any], says: str
) -> None:
    with producing(tmp_path / "c", max_ahead_shards=2) as producer:
        producer("publish", 4)
        with loader(impatient(tmp_path / "c", **options), shuffle=False) as batches:
            assert [names_in(next(batches)) for _ in range(4)] == [[name] for name in names(0, 4)]
            for command in commands:
                producer(*command)
            with pytest.raises(SFTIndexError, match=f"rank 0 waits for shard-000001: .*{says}"):
                next(batches)


def test_no_producer_at_all(tmp_path: Path) -> None:
    with (
        loader(impatient(tmp_path / "nowhere", producer_timeout=0.3)) as batches,
        pytest.raises(SFTIndexError, match="nowhere: rank 0 waits for shard-000000: no producer has used this folder"),
    ):
        next(batches)


def test_a_wait_can_be_ended_from_another_thread_at_once(tmp_path: Path) -> None:
    with producing(tmp_path / "c") as producer:
        producer("publish", 4)
        taking = Taking(loader(impatient(tmp_path / "c")))
        taking.until(lambda: len(taking.names) == 4)
        taking.batches.close()
        assert len(taking.ended()) == 4
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]


def test_a_save_may_take_longer_than_any_wait(tmp_path: Path) -> None:
    """During the save, the loader's thread waits for a shard that the producer publishes only after the commit."""
    with producing(tmp_path / "c", max_ahead_shards=1) as producer:
        producer("publish", 4)
        with loader(impatient(tmp_path / "c", max_wait=0.5, producer_timeout=0.5)) as batches:
            assert sorted(names_of(copies(batches, 4))) == names(0, 4)
            producer("become", "waiting for consumers")
            time.sleep(1.5)
            batches.commit(batches.state_dict())
            producer("become", "running")
            producer("publish", 3)
            producer("end")
            assert sorted(names_of(batches)) == names(1, 3)


def test_a_wait_says_so_once_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_sft_idx.live")
    with producing(tmp_path / "c") as producer:
        producer("publish", 4)
        taking = Taking(loader(impatient(tmp_path / "c"), 3, 4))
        taking.until(lambda: any("waits" in line for line in caplog.messages))
        taking.batches.close()
        taking.ended()
    waits = [line for line in caplog.messages if "waits" in line]
    assert len(waits) == 1
    assert waits[0].startswith("rank 3 waits 0 s for shard 3; last sign of life of the producer 0 s ago, 1 published")


def test_a_shard_that_is_listed_and_not_there_is_no_hang(tmp_path: Path) -> None:
    make_catalog(tmp_path / "c", [3, 2])
    for path in (tmp_path / "c").glob("shard-000001.*"):
        path.unlink()
    (tmp_path / "c" / "shard-000001.seq.idx").symlink_to(tmp_path / "nowhere")
    taking = Taking(loader(impatient(tmp_path / "c")))
    with pytest.raises(SFTIndexError, match="shard-000001: it was published, but somebody removed it"):
        taking.ended()
    assert sorted(taking.names) == names(0, 3)


# ---- kills and restarts ----


def test_a_producer_that_is_killed_and_started_again(tmp_path: Path) -> None:
    taking = Taking(loader(impatient(tmp_path / "c")))
    with producing(tmp_path / "c") as producer:
        producer("publish", *COUNTS[:3])
        taking.until(lambda: len(taking.names) == 12)
        producer.kill()
    with producing(tmp_path / "c") as producer:
        producer("publish", *COUNTS[3:])
        producer("end")
        assert Counter(taking.ended()) == Counter(all_names(COUNTS))


def train(folder: Path, out: Path, rank: int, size: int, die_after: int | None) -> None:
    """Run a rank that records what it trained on, and saves and commits a checkpoint every three steps."""
    checkpoint = out / f"checkpoint-{rank}.json"
    with loader(impatient(folder), rank, size, micro_batch_size=2) as batches:
        trained: list[int] = []
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            trained = saved["trained"]
            batches.load_state_dict(saved["state"])
        for step, batch in enumerate(batches, 1):
            if step == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            trained += names_in(batch)
            if step % 3 == 0:
                state = batches.state_dict()
                fresh = checkpoint.with_suffix(".tmp")
                fresh.write_text(json.dumps({"trained": trained, "state": state}))
                fresh.replace(checkpoint)
                batches.commit(state)
    (out / f"done-{rank}.json").write_text(json.dumps(trained))


def test_a_consumer_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    counts = [8, 6, 7, 9, 5, 8]

    def run(rank: int, die_after: int | None) -> Any:
        process = context.Process(target=train, args=(tmp_path / "c", tmp_path, rank, 2, die_after))
        process.start()
        return process

    with producing(tmp_path / "c") as producer:
        ranks = [run(0, None), run(1, 5)]
        producer("publish", *counts[:4])
        ranks[1].join(PATIENCE)
        assert ranks[1].exitcode == -signal.SIGKILL
        ranks[1] = run(1, None)
        producer("publish", *counts[4:])
        producer("end")
        for process in ranks:
            process.join(PATIENCE)
            assert process.exitcode == 0
    found = [json.loads((tmp_path / f"done-{rank}.json").read_text()) for rank in range(2)]
    assert Counter(found[0] + found[1]) == Counter(all_names(counts))


def test_shards_freed_behind_the_consumers_leave_nothing_out(tmp_path: Path) -> None:
    """The producer keeps the minimum: completed shards are removed at once, and only shards that ranks need exist."""
    counts = [4] * 12
    with producing(tmp_path / "c", max_ahead_shards=3, keep_recent=0) as producer:
        found: list[int] = []
        published, freed, states = 0, 0, [None, None]
        while freed < len(counts):
            while published < min(len(counts), freed + 3):
                producer("publish", counts[published])
                published += 1
            if published == len(counts):
                producer("end")
            for rank in range(2):
                with loader(impatient(tmp_path / "c"), rank, 2) as batches:
                    if states[rank] is not None:
                        batches.load_state_dict(states[rank])
                    for _, batch in zip(range(4), batches, strict=False):
                        found += names_in(batch)
                    states[rank] = batches.state_dict()
                    batches.commit(states[rank])
            done = completed(read_acks(str(tmp_path / "c" / "_acks")), 1, range(freed, published))
            producer("free", *done)
            freed += len(done)
            assert done
    assert Counter(found) == Counter(all_names(counts))


def test_numbers_above_five_and_six_digits(tmp_path: Path) -> None:
    with producing(tmp_path / "c") as producer:
        producer("publish", *COUNTS[:3])
        producer("hush")
    for shard in range(3):
        for path in (tmp_path / "c").glob(f"{shard_name(shard)}.*"):
            shutil.move(path, path.with_name(path.name.replace(shard_name(shard), shard_name(999_998 + shard))))
    (tmp_path / "c" / "_END.json").write_text('{"version": 1, "shards": 1000001}')
    with loader(tmp_path / "c", shuffle=False) as batches:
        state = RankState(Deal(size=1, seed=1234, shuffle=False, frontier=999_998), rank=0)
        batches.load_state_dict(state.to_json())
        assert names_of(batches) == all_names(COUNTS[:3])
