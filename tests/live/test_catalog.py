"""The catalog's folder and its two documents: names, numbers, and all possible errors in documents."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest
from bad_looks import hurry
from hypothesis import given
from hypothesis import strategies as st
from kills import killed_at
from sample_packs import demo_samples, write_samples

from megatron_sft_idx.errors import FormatError, UnsupportedVersionError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.live import Catalog, Limits, ProducerState, documents, shard_name
from megatron_sft_idx.produce import keeper
from megatron_sft_idx.shard import remove_shard

STATE = ProducerState(
    Limits(1024, 64, 2, "uint16", 2, 5, 10**9, 0), 7, "waiting for input", None, 12, 3, {"a": [1]}, {"rows": 5}
)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors here are permanent, so waits between retries are skipped."""
    hurry(monkeypatch)


@pytest.fixture
def catalog(tmp_path) -> Catalog:
    return Catalog(tmp_path)


def test_numbers_are_sorted_as_numbers_past_six_digits(catalog):
    for number in (1_000_000, 99_999, 100_000, 3):
        write_samples(catalog.shard_prefix(number), demo_samples(2))
    assert catalog.numbers() == [3, 99_999, 100_000, 1_000_000]
    assert shard_name(1_000_000) == "shard-1000000"
    assert catalog.is_published(1_000_000)
    assert not catalog.is_published(4)


def test_what_is_no_shard_is_passed_over(catalog):
    write_samples(catalog.shard_prefix(3), demo_samples(2))
    for name in ("shard-3.seq.idx", "shard-0000004.seq.idx", "shard-000005", "shard-000006.bin", "shard-x.seq.idx"):
        Path(catalog.folder, name).touch()
    assert catalog.numbers() == [3]
    assert catalog.present() == [3, 6]


def test_a_shard_that_is_being_removed_is_none(catalog):
    write_samples(catalog.shard_prefix(0), demo_samples(2))
    nbytes = catalog.shard_nbytes(0)
    assert nbytes == sum(os.path.getsize(path) for path in ShardPaths.of(catalog.shard_prefix(0)).all)
    paths, unlink = ShardPaths.of(catalog.shard_prefix(0)), os.unlink

    def dies():
        def counted(path, *arguments, **named):
            if str(path) in paths.all and not os.path.exists(paths.seq_idx):
                os.kill(os.getpid(), signal.SIGKILL)
            return unlink(path, *arguments, **named)

        os.unlink = counted
        remove_shard(paths)

    assert killed_at(10**9, dies)
    assert (catalog.numbers(), catalog.present()) == ([], [0])
    remove_shard(ShardPaths.of(catalog.shard_prefix(0)))
    assert (catalog.present(), catalog.shard_nbytes(0)) == ([], 0)


def test_documents_are_read_as_they_were_written(catalog):
    assert (catalog.producer(), catalog.end()) == (None, None)
    catalog.write_producer(STATE)
    catalog.write_end(12)
    assert (catalog.producer(), catalog.end()) == (STATE, 12)
    assert sorted(os.listdir(catalog.folder)) == ["_END.json", "_producer.json"]


def test_there_is_no_time_of_day_in_any_of_them(catalog):
    catalog.write_producer(STATE)
    content = json.loads(Path(catalog.folder, "_producer.json").read_text())
    assert sorted(content) == sorted(
        ["version", "beat", "state", "reason", "published", "freed", "limits", "options", "input"]
    )


def test_a_folder_that_is_not_there_is_an_empty_catalog(tmp_path):
    catalog = Catalog(tmp_path / "not yet")
    assert (catalog.numbers(), catalog.producer(), catalog.end()) == ([], None, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"beat": -1}, "beat is -1, expected a whole number of at least 0"),
        ({"beat": 2**80}, "beat is "),
        ({"beat": "7"}, "beat is '7'"),
        ({"state": "asleep"}, "state is 'asleep', expected running | "),
        ({"state": ["running"]}, "state is ['running'], expected running | waiting for consumers"),
        ({"reason": 3}, "reason is 3, expected a string"),
        ({"published": None}, "published is None"),
        ({"freed": 13}, "freed is 13, expected at most the 12 published shards"),
        ({"limits": None}, "limits is None, expected an object"),
        ({"options": 1}, "options is 1, expected an object"),
        ({"input": []}, "input is [], expected an object"),
        ({"version": None}, "version is None"),
        ({"version": True}, "version is True"),
    ],
)
def test_what_is_wrong_is_named(catalog, change, said):
    catalog.write_producer(STATE)
    path = Path(catalog.folder, "_producer.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FormatError) as error:
        catalog.producer()
    assert str(error.value).startswith(f"{path}: {said}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"capacity": 0}, "limits.capacity is 0, expected a whole number of at least 1"),
        ({"max_sequences_per_pack": 1.5}, "limits.max_sequences_per_pack is 1.5"),
        ({"token_dtype": "float64"}, "limits.token_dtype is 'float64', expected uint16 or int32"),
        ({"consumers": 0}, "limits.consumers is 0"),
        ({"max_ahead_shards": 0}, "limits.max_ahead_shards is 0"),
        ({"keep_recent": -1}, "limits.keep_recent is -1"),
    ],
)
def test_limits_that_are_wrong_are_named(catalog, change, said):
    catalog.write_producer(STATE)
    path = Path(catalog.folder, "_producer.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "limits": {**content["limits"], **change}}))
    with pytest.raises(FormatError) as error:
        catalog.producer()
    assert said in str(error.value)


def test_another_version_is_an_error_of_its_own(catalog):
    Path(catalog.folder, "_END.json").write_text('{"version": 2, "shards": "as text"}')
    with pytest.raises(UnsupportedVersionError, match="format version 2, but this package reads 1"):
        catalog.end()


def test_a_torn_document_is_refused_at_every_length(catalog):
    catalog.write_producer(STATE)
    path = Path(catalog.folder, "_producer.json")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=str(path)):
            catalog.producer()


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_anything_else_is_a_format_error(tmp_path_factory, content):
    catalog = Catalog(tmp_path_factory.mktemp("hostile"))
    for name, read in (("_producer.json", catalog.producer), ("_END.json", catalog.end)):
        Path(catalog.folder, name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(FormatError):
            read()


@given(st.data())
def test_a_document_with_any_field_replaced_is_read_or_refused(tmp_path_factory, data):
    catalog = Catalog(tmp_path_factory.mktemp("hostile"))
    values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.just([])
    content = {"version": 1, **STATE.to_json()}
    content[data.draw(st.sampled_from(sorted(content)))] = data.draw(values | st.just({}))
    Path(catalog.folder, "_producer.json").write_text(json.dumps(content))
    with contextlib.suppress(FormatError):
        assert isinstance(catalog.producer(), ProducerState)


def test_a_huge_document_is_not_read_whole(catalog, monkeypatch):
    monkeypatch.setattr(documents, "MAX_NBYTES", 1 << 20)
    with open(Path(catalog.folder, "_END.json"), "wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(FormatError, match="more than 1048576 bytes"):
        catalog.end()


def test_deep_nesting_is_refused(catalog):
    Path(catalog.folder, "_END.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(FormatError, match="not a JSON document"):
        catalog.end()


@pytest.mark.parametrize(
    ("make", "words"),
    [(os.mkfifo, "expected a file, found something that is neither"), (os.mkdir, "a folder, expected a file")],
)
def test_what_is_no_file_is_refused_and_not_waited_for(catalog, make, words):
    make(Path(catalog.folder, "_END.json"))
    with pytest.raises(FormatError, match=f"_END.json: {words}"):
        catalog.end()


def test_readers_see_the_old_document_or_the_new_one(catalog):
    catalog.write_producer(STATE)
    if (writer := os.fork()) == 0:
        try:
            while True:
                catalog.write_producer(STATE)
        finally:
            os._exit(1)
    try:
        for _ in range(2000):
            assert catalog.producer() == STATE
    finally:
        os.kill(writer, 9)
        os.waitpid(writer, 0)
    catalog.write_end(1)  # the remains of a killed writer do not matter
    catalog.write_producer(STATE)
    assert sorted(os.listdir(catalog.folder)) == ["_END.json", "_producer.json"]


def test_a_heart_goes_on_beating_when_a_beat_was_not_written(tmp_path, monkeypatch):
    """The disk may be full for a moment; consumers would take the producer for dead."""
    monkeypatch.setattr(keeper, "_SECONDS_BETWEEN_BEATS", 0.01)
    catalog, left = Catalog(tmp_path), [3]
    write = Catalog.write_producer

    def full(self: Catalog, state: ProducerState) -> None:
        if state.beat > 1 and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, state)

    monkeypatch.setattr(Catalog, "write_producer", full)
    with keeper.StateKeeper(catalog, ProducerState(Limits(64, 8))) as beating:
        deadline = time.monotonic() + 300
        while catalog.producer().beat < 6:
            assert time.monotonic() < deadline, "no beat"
            time.sleep(0.01)
        beating.update(published=1)
    assert catalog.producer().published == 1


def test_a_state_that_was_not_written_is_not_taken_for_written(tmp_path, monkeypatch):
    catalog = Catalog(tmp_path)
    kept = keeper.StateKeeper(catalog, ProducerState(Limits(64, 8)))
    kept.update(published=1)
    with monkeypatch.context() as full:
        full.setattr(Catalog, "write_producer", lambda self, state: os.stat(tmp_path / "nothing"))
        with pytest.raises(FileNotFoundError):
            kept.update(published=2)
    assert kept.state == catalog.producer()
    kept.update()
    assert (kept.state, kept.state.published) == (catalog.producer(), 1)


@pytest.mark.parametrize("folder", ["s3://bucket/live", "msc://profile/live"])
def test_a_catalog_in_an_object_store_is_refused(folder: str) -> None:
    with pytest.raises(
        FormatError,
        match="on a file system that producer and trainers share; finished shards can be copied to a bucket",
    ):
        Catalog(folder)
