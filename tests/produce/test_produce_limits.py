"""``produce`` during training: how far ahead it runs, and removal of shards that training has completed."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path

import pytest
from bad_looks import hurry
from chats import write_rows
from interrupted_runs import be_quick
from productions import acknowledge, ended, produced, producing, state_of, until

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.live import PRODUCER, Ack, Catalog, Deal, Limits, ProducerState, Waiter, ack_folder, write_ack
from megatron_sft_idx.live.catalog_shards import CatalogShards
from megatron_sft_idx.produce import ProduceOptions
from megatron_sft_idx.produce.keeper import Backpressure, StateKeeper
from megatron_sft_idx.shard import Shard, read_header
from megatron_sft_idx.tokenize import NOT_YET, EncodingOptions, NotYet, PackOptions

PACKS = ("--seq-length", 40, "--tokens-per-shard", 400, "--packing", "sequential")


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch)
        yield


class SaidError(Exception):
    """Raised to end a wait, with its message."""


def numbered_rows(path: Path, count: int) -> Path:
    """Write rows whose first token is their number."""
    ids = ([number, *[1] * 39] for number in range(count))
    return write_rows(path, [{"input_ids": row, "loss_mask": [1] * 40} for row in ids])


@pytest.fixture
def rows(tmp_path) -> Path:
    return numbered_rows(tmp_path / "rows.jsonl", 120)


@pytest.fixture
def catalog(tmp_path) -> Catalog:
    return Catalog(tmp_path / "catalog")


def consume(catalog: Catalog, seen: int) -> None:
    """Consume and commit every shard when it appears, like a training rank, with a pipe instead of a model."""
    watch = CatalogShards(catalog.folder, max_wait=100)
    number = 0
    while watch.wait(number, Waiter("rank 0")):
        shard = Shard(catalog.shard_prefix(number))
        first = [int(ids[0]) for i in range(len(shard)) for ids, _ in shard.sequences(i)]
        os.write(seen, "".join(f"{row}\n" for row in first).encode())
        number += 1
        ack = Ack("trainer", 0, Deal(1), rank=0, items_done=number, packs_done=number)
        write_ack(ack_folder(catalog), ack)
        write_ack(ack_folder(catalog), ack)  # repetition has no effect


def consuming(catalog: Catalog, seen: Path) -> int:
    """Run ``consume`` in a separate process."""
    if child := os.fork():
        return child
    status = 1
    try:
        consume(catalog, os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def test_fifty_shards_through_a_catalog_of_five(tmp_path, catalog):
    limit = 5
    rows = numbered_rows(tmp_path / "rows.jsonl", 600)
    run = producing(Path(catalog.folder), "--input", rows, *PACKS, "--max-ahead-shards", limit, "--keep-recent", 0)
    until(lambda: catalog.producer() is not None, run)
    consumer = consuming(catalog, tmp_path / "seen")
    most, looks = 0, 0
    while run.poll() is None:
        most = max(most, len(catalog.present()))
        looks += 1
    out, _ = ended(run)
    assert os.waitstatus_to_exitcode(os.waitpid(consumer, 0)[1]) == 0
    assert (catalog.end() or 0) >= 50, out
    assert looks > 100
    assert 0 < most <= limit + 1
    assert list(map(int, (tmp_path / "seen").read_text().split())) == list(range(600))
    # The last shards were completed after the producer ended: the same command removes them.
    again = produced(Path(catalog.folder), "--input", rows, *PACKS, "--keep-recent", 0)
    assert (again.code, catalog.present()) == (0, []), again.err


def test_without_acknowledgements_it_stops_at_the_limit_and_says_why(rows, catalog):
    run = producing(Path(catalog.folder), "--input", rows, *PACKS, "--max-ahead-shards", 2)
    until(lambda: state_of(Path(catalog.folder)).state == "waiting for consumers" if catalog.producer() else 0, run)
    assert catalog.present() == [0, 1]
    assert state_of(Path(catalog.folder)).limits.max_ahead_shards == 2
    beat = state_of(Path(catalog.folder)).beat
    until(lambda: state_of(Path(catalog.folder)).beat > beat, run)  # alive, with a heartbeat
    acknowledge(Path(catalog.folder), 1)
    until(lambda: catalog.is_published(2), run)
    until(lambda: state_of(Path(catalog.folder)).state == "waiting for consumers", run)
    assert catalog.present() == [0, 1, 2]
    run.send_signal(signal.SIGTERM)
    _, err = ended(run, 143)
    assert "2 shards are ahead of training, the first is 0; a shard is completed when a checkpoint" in err
    assert "only 0 of 1 consumers have acknowledged any shard in " in err


def test_a_limit_in_bytes(rows, catalog):
    folder = Path(catalog.folder)
    nbytes = 6000
    run = producing(folder, "--input", rows, *PACKS, "--max-ahead-gb", nbytes / 1e9)
    until(lambda: state_of(folder).state == "waiting for consumers" if catalog.producer() else 0, run)
    ahead = sum(map(catalog.shard_nbytes, catalog.numbers()))
    assert 0 < ahead <= nbytes
    run.kill()
    run.communicate()
    refused = produced(folder, "--input", rows, *PACKS, "--max-ahead-gb", 1000 / 1e9)
    assert refused.code == 1
    assert "raise --max-ahead-gb, or lower --tokens-per-shard" in refused.err
    assert state_of(folder).state == "failed"


def test_a_limit_in_bytes_is_not_for_what_is_dropped(tmp_path, catalog):
    ids = [[1] * (4000 if number % 10 else 40) for number in range(100)]
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": row, "loss_mask": [1] * len(row)} for row in ids])
    options = ("--input", rows, *PACKS, "--overlong", "drop", "--max-ahead-gb", 10_000 / 1e9)
    assert produced(Path(catalog.folder), *options).code == 0
    assert sum(map(catalog.shard_nbytes, catalog.numbers())) < 10_000


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_a_shard_has_as_many_tokens_as_were_asked_for(overlong, tmp_path, catalog):
    ids = [[1] * (4000 if number % 10 else 40) for number in range(60)]
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": row, "loss_mask": [1] * len(row)} for row in ids])
    assert produced(Path(catalog.folder), "--input", rows, *PACKS, "--overlong", overlong).code == 0
    counts = [read_header(catalog.shard_prefix(number)).num_tokens for number in catalog.numbers()]
    assert len(counts) > (overlong != "drop")
    assert min(counts[:-1], default=400) >= 400


def test_what_is_left_out_since_it_trains_nothing_fills_no_shard(tmp_path, catalog):
    masks = [[0, number % 10 == 0] * 20 for number in range(100)] + [[0] * 40] * 100
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1] * 40, "loss_mask": mask} for mask in masks])
    done = produced(Path(catalog.folder), "--input", rows, *PACKS, "--drop-untrained")
    assert done.code == 0, done.err
    assert [read_header(catalog.shard_prefix(number)).num_tokens for number in catalog.numbers()] == [400]


def test_as_many_completed_shards_are_kept_as_were_asked_for(rows, catalog):
    folder = Path(catalog.folder)
    assert produced(folder, "--input", rows, *PACKS).code == 0
    shards = len(catalog.numbers())
    acknowledge(folder, 6)
    assert produced(folder, "--input", rows, *PACKS).code == 0
    assert len(catalog.present()) == shards  # off by default
    for keep in (100, 8, 6, 4, 1, 0):
        assert produced(folder, "--input", rows, *PACKS, "--keep-recent", keep).code == 0
        first = max(6 - keep, 0)
        assert catalog.present() == list(range(first, shards))
        assert state_of(folder).freed == first


def test_every_consumer_counts(rows, catalog):
    folder = Path(catalog.folder)
    options = ("--input", rows, *PACKS, "--keep-recent", 0)
    assert produced(folder, *options).code == 0
    shards = len(catalog.numbers())
    acknowledge(folder, 6, "one")
    assert produced(folder, *options, "--consumers", 2).code == 0
    assert len(catalog.present()) == shards
    acknowledge(folder, 4, "other")
    assert produced(folder, *options, "--consumers", 2).code == 0
    assert catalog.present() == list(range(4, shards))


def test_acknowledgements_elsewhere(rows, catalog, tmp_path):
    options = ("--input", rows, *PACKS, "--keep-recent", 0, "--ack-dir", tmp_path / "acks")
    ack = Ack("one", 0, Deal(1), rank=0, items_done=3, packs_done=3)
    write_ack(ack_folder(catalog, tmp_path / "acks"), ack)
    assert produced(Path(catalog.folder), *options).code == 0
    assert catalog.numbers()[0] == 3


def test_shards_are_removed_out_of_order_where_ranks_are(rows, catalog):
    folder = Path(catalog.folder)
    for rank, items in ((0, 0), (1, 3)):
        ack = Ack("one", 0, Deal(2), rank=rank, items_done=items, packs_done=items)
        write_ack(ack_folder(catalog), ack)
    assert produced(folder, "--input", rows, *PACKS, "--keep-recent", 0).code == 0
    assert catalog.numbers()[:5] == [0, 2, 4, 6, 7]
    assert state_of(folder).freed == 0


def test_a_damaged_acknowledgement_stops_it_and_is_named(rows, catalog, monkeypatch):
    hurry(monkeypatch)
    folder = Path(catalog.folder)
    acknowledge(folder, 1)
    path = folder / "_acks/one/rank-00000.json"
    path.write_text(path.read_text()[:-5])
    refused = produced(folder, "--input", rows, *PACKS, "--keep-recent", 0)
    assert refused.code == 1
    assert f"{path}: not a JSON document" in refused.err
    assert str(path) in (state_of(folder).reason or "")


def test_the_folder_is_not_listed_again_for_every_shard(catalog, rows, monkeypatch):
    """The folder can hold hundreds of thousands of files."""
    listings = []
    numbers = Catalog.numbers
    monkeypatch.setattr(Catalog, "numbers", lambda self: listings.append(self) or numbers(self))
    acknowledge(Path(catalog.folder), 1000)
    given = (Path(catalog.folder), "--input", rows, *PACKS)
    assert produced(*given, "--keep-recent", 2, "--max-ahead-shards", 3).code == 0
    assert len(listings) == 1
    assert numbers(catalog) == [8, 9]


@pytest.mark.parametrize("option", ["--catalog", "--ack-dir"])
def test_a_bucket_is_no_folder_for_shards_that_come_and_go(catalog, rows, option):
    refused = produced(Path(catalog.folder), "--input", rows, *PACKS, option, "s3://bucket/live")
    assert refused.code == 2
    assert "s3://bucket/live: a" in refused.err
    assert "needs files on a local disk" in refused.err


def test_a_consumer_that_holds_everything_up_is_named(catalog):
    """For example, the consumer of an earlier run with another name that will never return."""
    Path(catalog.folder).mkdir()
    catalog.write_producer(ProducerState(Limits(40, 8, max_ahead_shards=1), published=1))
    from live_catalogs import publish

    publish(Path(catalog.folder), 0, 2)
    acknowledge(Path(catalog.folder), 1, "present")
    acknowledge(Path(catalog.folder), 0, "of-last-week")

    def said(line: str) -> None:
        raise SaidError(line)

    state = catalog.producer()
    backpressure = Backpressure(catalog, StateKeeper(catalog, state), None, said)
    with pytest.raises(SaidError, match="it is not yet completed by of-last-week; if a consumer no longer reads"):
        backpressure.wait_for(1)


def test_an_error_during_a_wait_is_not_hidden_by_a_state_that_cannot_be_written(catalog):
    Path(catalog.folder).mkdir()
    keeper = StateKeeper(catalog, ProducerState(Limits(40, 8)))

    def look() -> NotYet:
        if keeper.state.state != "waiting for input":
            return NOT_YET
        path = Path(catalog.folder, PRODUCER)
        path.unlink()
        path.mkdir()  # a file cannot replace a folder
        raise ValueError("the input is torn")

    with pytest.raises(ValueError, match="the input is torn"):
        keeper.wait_for(look, "waiting for input", lambda line: None, lambda: "")


@pytest.mark.parametrize(
    ("name", "value"), [("max_ahead_shards", 0), ("max_ahead_nbytes", 0), ("consumers", 0), ("keep_recent", -1)]
)
def test_limits_out_of_range_are_refused_before_anything_is_made(catalog, name, value):
    """The command line checks these itself; for Python callers, this is the only check."""
    packing = PackOptions(40, max_sequences_per_pack=8)
    with pytest.raises(FormatError, match=f"{name} {value}: expected {value + 1} or more"):
        ProduceOptions(["rows.jsonl"], None, catalog.folder, EncodingOptions(""), packing, 400, **{name: value})
