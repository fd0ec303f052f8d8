"""Waiting for shards: messages, and an error with the reason for every wait that can never end."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_looks import hurry, torn
from sample_packs import demo_samples, write_samples

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.live import Catalog, Limits, ProducerState, Waiter
from megatron_sft_idx.live.catalog_shards import CatalogShards

STATE = ProducerState(Limits(1024, 64, max_ahead_shards=5))


class Scene:
    """A catalog, a clock that advances only during sleeps, and the events at each second."""

    def __init__(self, folder: Path) -> None:
        self.catalog = Catalog(folder)
        self.now = 1000.0
        self.lines: list[str] = []
        self.events: list[tuple[float, Callable[[], object]]] = []
        self.beats_until = float("inf")
        self.state: ProducerState | None = None
        self.watch = CatalogShards(str(folder), max_wait=None)
        self.waiter = Waiter("rank 3", self._pause, self.lines.append, lambda: self.now)

    def say(self, **changes: object) -> None:
        beat = self.state.beat + 1 if self.state else 1
        self.state = dataclasses.replace(self.state or STATE, beat=beat, **changes)
        self.catalog.write_producer(self.state)

    def publish(self, number: int) -> None:
        write_samples(self.catalog.shard_prefix(number), demo_samples(2))
        self.say(published=number + 1)

    def at(self, second: float, happens: Callable[[], object]) -> None:
        self.events.append((1000.0 + second, happens))

    def wait(self, number: int, unacknowledged: Callable[[], int] = lambda: 0, **limits: float) -> str:
        vars(self.watch).update(limits)
        return "published" if self.watch.wait(number, self.waiter, unacknowledged) else "ended"

    def refused(self, number: int, **more: Any) -> str:
        with pytest.raises(SFTIndexError) as error:
            self.wait(number, **more)
        return str(error.value)

    def _pause(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        for second, happens in [event for event in self.events if before < event[0] <= self.now]:
            self.events.remove((second, happens))
            happens()
        if self.state and int(before / 2) != int(self.now / 2) and self.now < self.beats_until:
            self.say()


@pytest.fixture
def scene(tmp_path) -> Scene:
    return Scene(tmp_path)


def test_a_shard_that_is_there_is_not_waited_for(scene):
    scene.publish(0)
    assert scene.wait(0) == "published"
    assert (scene.lines, scene.now) == ([], 1000.0)


def test_one_line_at_once_and_one_a_minute(scene):
    scene.say(published=10)
    scene.at(150, lambda: scene.publish(11))
    assert scene.wait(11) == "published"
    assert len(scene.lines) == 3
    assert scene.lines[0] == "rank 3 waits 0 s for shard 11; last sign of life of the producer 0 s ago, 10 published"
    assert re.fullmatch(
        r"rank 3 waits 6\d s for shard 11; last sign of life of the producer [0-2] s ago, 10 published", scene.lines[1]
    )
    assert scene.now - 1150 < 1.1


def test_the_line_says_what_the_producer_does(scene):
    scene.say(state="waiting for input", published=2)
    scene.at(1, lambda: scene.publish(2))
    scene.wait(2)
    assert scene.lines == [
        "rank 3 waits 0 s for shard 2; last sign of life of the producer 0 s ago, waiting for input, 2 published"
    ]


def test_the_silence_of_a_producer_that_died_long_ago_is_told(scene):
    scene.say(published=1)
    scene.beats_until = 0
    scene.refused(1, producer_timeout=150)
    waited = [
        re.fullmatch(r".* waits (\d+) s for shard 1; last sign of life of the producer (\d+) s ago, 1 published", line)
        for line in scene.lines
    ]
    assert [line[1] == line[2] for line in waited] == [True] * 3


def test_the_end_is_the_end(scene):
    scene.publish(0)
    scene.at(5, lambda: scene.catalog.write_end(1))
    assert scene.wait(1) == "ended"
    assert scene.wait(7) == "ended"


def test_a_producer_that_failed_is_named_with_its_reason(scene):
    scene.say()
    scene.at(3, lambda: scene.say(state="failed", reason="chats.jsonl:7: no messages"))
    assert "the producer failed: chats.jsonl:7: no messages" in scene.refused(0)
    assert scene.now < 1010


def test_a_dead_producer_is_noticed_by_its_silence(scene):
    scene.say(published=10)
    scene.beats_until = 1100
    said = scene.refused(11, producer_timeout=30)
    assert "the producer is dead: no sign of life for 3" in said
    assert "10 published; run the same command again" in said
    assert 1125 < scene.now < 1135


def test_silence_before_the_wait_does_not_count(scene):
    scene.publish(0)
    assert scene.wait(0) == "published"
    scene.now += 1000  # training on shard 0, without a look at the catalog
    scene.at(1020, lambda: scene.publish(1))
    scene.beats_until = 0
    assert scene.wait(1, producer_timeout=30) == "published"


@pytest.mark.parametrize("years", [-30, 30])
def test_a_clock_that_is_wrong_changes_nothing(scene, years):
    """Tests a living and a dead producer on a machine or file server with a clock that is decades off."""

    def wrong_times() -> None:
        for name in os.listdir(scene.catalog.folder):
            stamp = 1.8e9 + years * 3.15e7
            os.utime(Path(scene.catalog.folder, name), (stamp, stamp))

    for second in range(200):
        scene.at(second, wrong_times)
    scene.say()
    scene.at(90, lambda: scene.publish(0))
    assert scene.wait(0, producer_timeout=30) == "published"
    scene.beats_until = 0
    assert "no sign of life for 3" in scene.refused(1, producer_timeout=30)


def test_no_producer_at_all(scene):
    assert "no producer has used this folder for 31 s; start one: megatron-sft-idx produce" in scene.refused(
        0, producer_timeout=30
    )
    assert scene.lines == ["rank 3 waits 0 s for shard 0; no producer has used this folder yet"]


def test_a_producer_that_was_stopped_may_come_back(scene):
    scene.say(state="stopped", reason="interrupted")
    scene.beats_until = 0
    scene.at(20, lambda: scene.publish(0))
    assert scene.wait(0, producer_timeout=30) == "published"
    scene.say(state="stopped", reason="interrupted")
    assert "the producer was stopped (interrupted)" in scene.refused(1, producer_timeout=30)


def test_a_restarted_producer_is_alive_though_its_beat_went_back(scene):
    for _ in range(5):
        scene.say()
    scene.beats_until = 0
    scene.at(20, lambda: scene.catalog.write_producer(dataclasses.replace(STATE, beat=1)))
    assert "no sign of life for 3" in scene.refused(0, producer_timeout=30)
    assert scene.now > 1048


def test_a_shard_that_was_freed_is_not_waited_for(scene):
    scene.publish(4)
    scene.say(freed=3)
    said = scene.refused(2)
    assert "shard-000002" in said
    assert "shards below 3 were removed" in said
    assert "Resume from the newest checkpoint" in said


def test_a_missing_shard_in_the_middle_is_not_waited_for(scene):
    for number in (0, 2):
        scene.publish(number)
    assert "it was published, but somebody removed it" in scene.refused(1)
    scene.catalog.write_end(3)
    assert "it was published, but somebody removed it" in scene.refused(1)
    assert scene.now < 1015


def test_a_shard_that_is_seen_late_is_not_missing(scene):
    """A network file system can show the producer's document before the shard that it counts."""
    scene.say(published=12)
    scene.at(3, lambda: scene.publish(11))
    assert scene.wait(11) == "published"


def test_the_longest_wait_is_kept(scene):
    scene.say(published=3)
    said = scene.refused(5, max_wait=90)
    assert "the maximum wait (90 s); last sign of life" in said
    assert 1090 <= scene.now < 1092


def test_waiting_for_each_other_is_an_error_and_not_a_hang(scene):
    scene.say(state="waiting for consumers", published=5)
    said = scene.refused(5, unacknowledged=lambda: 5, producer_timeout=30)
    assert "no checkpoint of this consumer includes the 5 items before this shard" in said
    assert "save checkpoints more often, or let the producer run further ahead" in said


def test_a_commit_on_its_way_is_waited_for(scene):
    scene.say(state="waiting for consumers", published=5)
    scene.at(20, lambda: scene.say(state="running"))
    scene.at(25, lambda: scene.say(state="waiting for consumers"))
    scene.at(50, lambda: scene.publish(5))
    assert scene.wait(5, unacknowledged=lambda: 5, producer_timeout=30) == "published"


def test_a_commit_during_a_long_wait_is_seen(scene):
    """Other ranks keep committing and the producer continues, although every look finds it waiting again."""
    left = [5]
    scene.say(state="waiting for consumers", published=5)
    for second in range(10, 300, 10):
        scene.at(second, lambda: left.append(left[-1] % 5 + 1))
    scene.at(300, lambda: scene.publish(5))
    assert scene.wait(5, unacknowledged=lambda: left[-1], producer_timeout=30) == "published"


def test_others_that_do_not_commit_are_waited_for(scene):
    scene.say(state="waiting for consumers", published=5)
    scene.at(200, lambda: scene.publish(5))
    assert scene.wait(5, unacknowledged=lambda: 0, producer_timeout=30) == "published"


def test_a_damaged_document_is_named(scene, monkeypatch):
    hurry(monkeypatch)
    Path(scene.catalog.folder, "_producer.json").write_text("{")
    with pytest.raises(FormatError, match="not a JSON document"):
        scene.wait(0)


def test_a_living_producer_whose_state_is_not_seen_for_a_while_is_not_dead(scene, monkeypatch):
    """Its document is torn or missing at every look, for a minute or for all looks except one."""
    path = Path(scene.catalog.folder, "_producer.json")
    scene.say(published=1)
    with torn(path, 10, monkeypatch, heals=True):
        scene.at(80, lambda: scene.publish(1))
        for second in range(2, 60, 2):
            scene.at(second + 0.5, lambda: path.write_bytes(b""))
        assert scene.wait(1, producer_timeout=30) == "published"


def test_a_dead_producer_is_no_less_dead_where_its_state_comes_and_goes(scene):
    scene.say(published=1)
    scene.beats_until = 0
    path = Path(scene.catalog.folder, "_producer.json")
    for second in range(1, 60, 2):
        scene.at(second, lambda: path.rename(path.with_name("away")))
        scene.at(second + 1, lambda: path.with_name("away").rename(path))
    assert "the producer is dead: no sign of life for 3" in scene.refused(1, producer_timeout=30)


def test_time_in_which_nobody_could_look_is_not_silence(scene):
    """A file system that hangs delays a look for minutes, and also the producer, whose next beat comes later."""

    def hang() -> None:
        scene.now, scene.beats_until = scene.now + 300, 0

    scene.say(published=1)
    scene.at(50, hang)
    scene.at(353, lambda: setattr(scene, "beats_until", float("inf")))
    scene.at(400, lambda: scene.publish(1))
    assert scene.wait(1, producer_timeout=30) == "published"
