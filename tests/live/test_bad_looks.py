"""A single failed read of a catalog does not matter to its producer; tested with faults at everything that it reads."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bad_looks import Look, failing, hurry, reports_lasting_faults, survives_bad_looks, torn
from sample_packs import demo_samples, write_samples

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import Ack, Catalog, Deal, Limits, ProducerState, ack_folder, read_acks, write_ack
from megatron_sft_idx.live.acks import newest_acks
from megatron_sft_idx.produce import keeper
from megatron_sft_idx.produce.growing_folder import GrowingFolder
from megatron_sft_idx.produce.taken_files import TakenFiles
from megatron_sft_idx.tokenize import NotYet

STATE = ProducerState(Limits(1024, 64, max_ahead_shards=5, keep_recent=1), 7, "running", None, 2, 0, {"a": [1]})


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """Provide a catalog of two shards, one of them completed, with all documents."""
    catalog = Catalog(tmp_path / "catalog")
    Path(catalog.folder).mkdir()
    for number in range(2):
        write_samples(catalog.shard_prefix(number), demo_samples(2), capacity=1024)
    catalog.write_producer(STATE)
    catalog.write_end(2)
    for rank in range(2):
        write_ack(ack_folder(catalog), Ack("a", 3, Deal(2), rank, 1 - rank, 2 - 2 * rank))
    (folder := Path(catalog.folder, "input")).mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl", "_END"):
        (folder / name).write_text('{"text": "x"}\n')
    return catalog


def watched(folder: Path) -> list[tuple[str, int]]:
    """Return the files of a growing folder in the order in which they are taken."""
    (folder.parent / "inputs").unlink(missing_ok=True)
    taken = TakenFiles(str(folder.parent / "inputs"))
    files = GrowingFolder(str(folder), 1024, taken, settle=0, end_after=None, log=lambda line: None).files(0)
    for pieces in files:
        if not isinstance(pieces, NotYet):
            list(pieces)
    return [(file.name, file.num_bytes) for file in taken.files]


def freed(catalog: Catalog) -> list[int]:
    """Return the shards that the producer counts as ahead of its consumers; it removes nothing here."""
    kept = keeper.StateKeeper(catalog, replace(STATE, published=2))
    return keeper.Backpressure(catalog, kept, None, lambda line: None).free_completed()


LOOKS: dict[str, Callable[[Catalog], Look]] = {
    "producer": lambda c: Look(Path(c.folder, "_producer.json"), c.producer, True),
    "end": lambda c: Look(Path(c.folder, "_END.json"), c.end, True),
    "numbers": lambda c: Look(Path(c.folder), c.numbers),
    "present": lambda c: Look(Path(c.folder), c.present),
    "published": lambda c: Look(Path(c.shard_prefix(1) + ".seq.idx"), lambda: c.is_published(1)),
    "bytes": lambda c: Look(Path(c.shard_prefix(1) + ".bin"), lambda: c.shard_nbytes(1)),
    "acks": lambda c: Look(Path(ack_folder(c), "a/rank-00001.json"), lambda: read_acks(ack_folder(c)), True),
    "acks of one": lambda c: Look(
        Path(ack_folder(c), "a/rank-00000.json"), lambda: newest_acks(ack_folder(c), "a"), True
    ),
    "consumers": lambda c: Look(Path(ack_folder(c)), lambda: read_acks(ack_folder(c))),
    "ranks": lambda c: Look(Path(ack_folder(c), "a"), lambda: read_acks(ack_folder(c))),
    "ahead": lambda c: Look(Path(ack_folder(c), "a/rank-00000.json"), lambda: freed(c), True),
    "input": lambda c: Look(Path(c.folder, "input"), lambda: watched(Path(c.folder, "input"))),
    "file": lambda c: Look(Path(c.folder, "input/b.jsonl"), lambda: watched(Path(c.folder, "input"))),
}


@pytest.mark.parametrize("what", LOOKS)
def test_one_bad_look_changes_nothing(catalog: Catalog, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    survives_bad_looks(LOOKS[what](catalog), monkeypatch)


@pytest.mark.parametrize("what", [what for what in LOOKS if what != "file"])
def test_a_lasting_fault_is_named(catalog: Catalog, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    reports_lasting_faults(LOOKS[what](catalog), monkeypatch)


def test_an_acknowledgement_that_is_not_seen_brings_no_older_generation_back(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older run may have completed shards that the newer one needs, and the producer would remove them."""
    hurry(monkeypatch)
    folder = ack_folder(catalog)
    write_ack(folder, Ack("a", 4, Deal(1), 0, 0, 0))
    assert [ack.generation for ack in newest_acks(folder, "a")] == [4]
    for looks in (1, 2, 5):
        with failing(Path(folder, "a/rank-00000.json"), errno.ENOENT, looks):
            assert [ack.generation for ack in newest_acks(folder, "a")] == [4]
    with (
        failing(Path(folder, "a/rank-00000.json"), errno.ENOENT, float("inf")),
        pytest.raises(FormatError, match=r"rank-00000\.json: listed in its folder, but missing"),
    ):
        read_acks(folder)


WRITES: dict[str, Callable[[Catalog], tuple[Path, Callable[[], Any]]]] = {
    "state": lambda c: (Path(c.folder, "_producer.json"), lambda: keeper.StateKeeper(c, STATE).update()),
    "acknowledgement": lambda c: (
        Path(ack_folder(c), "a/rank-00000.json"),
        lambda: write_ack(ack_folder(c), Ack("a", 3, Deal(2), 0, 2, 4)),
    ),
    "end": lambda c: (Path(c.folder, "_END.json"), lambda: c.write_end(2)),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_writer_replaces_its_document_whatever_it_sees_of_the_old_one(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path, write = WRITES[what](catalog)
    write()
    written = path.read_bytes()
    hurry(monkeypatch)
    for number in (errno.EIO, errno.ESTALE, errno.ENOENT):
        for looks in (1, 2, 3):
            with failing(path, number, looks):
                write()
            assert path.read_bytes() == written
    for nbytes in range(len(written)):
        with torn(path, nbytes, monkeypatch, heals=False):
            write()
            assert path.read_bytes() == written


def test_a_writer_replaces_nothing_that_is_not_its_own(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    path = Path(catalog.folder, "_END.json")
    for content in ("notes", "{", '{"shards": 2}', '{"version": 1}', '{"version":2,"shards":1}', "[1]"):
        path.write_text(content)
        if content == "{":  # every document begins like this
            continue
        with pytest.raises(FormatError, match="which is never replaced"):
            catalog.write_end(2)
        assert path.read_text() == content


def test_a_heart_goes_on_beating_whatever_is_seen_of_its_state(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread must not end with an error; the next beat repairs a torn state."""
    monkeypatch.setattr(keeper, "_SECONDS_BETWEEN_BEATS", 0.005)
    path = Path(catalog.folder, "_producer.json")

    def beats(kept: keeper.StateKeeper) -> None:
        before, give_up = kept.state.beat, time.monotonic() + 60
        while kept.state.beat < before + 3:
            assert time.monotonic() < give_up
            assert any(thread.name == "heartbeat" for thread in threading.enumerate())
            time.sleep(0.001)

    with keeper.StateKeeper(catalog, STATE) as kept:
        for nbytes in (0, 1, 5, 50):
            with kept._lock:
                path.write_bytes(path.read_bytes()[:nbytes])
            beats(kept)
        with kept._lock:
            path.write_text("somebody else's")
        time.sleep(0.1)
        path.unlink()
        beats(kept)
        for number in (errno.EIO, errno.ESTALE):
            with failing(path, number, 2):
                beats(kept)
    assert catalog.producer() == kept.state


def test_what_is_no_document_is_refused_at_once(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files that can be half a document are read again."""
    waits: list[None] = []
    hurry(monkeypatch, lambda: waits.append(None))
    path = Path(catalog.folder, "_END.json")
    for content in (b"notes", b"{'version'}", b"[", b"[" * 100_000, b'{"shards":', b'{"version":2}', b"\xff"):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"_END\.json: "):
            catalog.end()
    assert not waits
    for content in (b"", b"{", b'{"version":1,"sha', b"\0" * 22, b"\0" * 5 + b'n":1,"shards":2}'):
        path.write_bytes(content)
        before = len(waits)
        with pytest.raises(FormatError, match=r"_END\.json: not a JSON document"):
            catalog.end()
        assert len(waits) > before + 2
