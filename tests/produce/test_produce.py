"""``produce``: the same shards for any workers and kind of input; errors; and the contents of its state."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from chats import CHATS, command, preprocess, sequences_of, write_rows
from interrupted_runs import be_quick, some_rows
from productions import (
    acknowledge,
    assert_clean,
    ended,
    piped,
    produced,
    producing,
    shards_of,
    state_of,
    tokens_of,
    until,
)

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.live import Catalog
from megatron_sft_idx.produce.cursor import Cursor
from megatron_sft_idx.shard import Shard


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch)
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("input") / "rows.jsonl", some_rows(120))


@pytest.fixture(scope="module")
def calm(tmp_path_factory, rows) -> Path:
    """Provide a catalog from an uninterrupted run."""
    folder = tmp_path_factory.mktemp("calm") / "catalog"
    done = produced(folder, "--input", rows, "--on-bad-row", "skip")
    assert done.code == 0, done.err
    return folder


def make(folder: Path, rows: Path, *more: object):
    return produced(folder, "--input", rows, "--on-bad-row", "skip", *more)


def test_every_shard_is_whole_and_every_row_is_in_one(calm, rows, tmp_path):
    numbers = Catalog(calm).numbers()
    assert len(numbers) > 5
    assert_clean(calm, len(numbers))
    for number in numbers:
        assert verify_shard(Catalog(calm).shard_prefix(number), full=True).ok
    one = tmp_path / "one"
    assert preprocess(one, "--input", rows, "--on-bad-row", "skip", "--overlong", "split", capacity=512).code == 0
    assert sum(tokens_of(calm).values()) == len(sequences_of(one))
    assert set(tokens_of(calm)) == {tuple(ids.tolist()) for ids, _ in sequences_of(one)}


@pytest.mark.parametrize("weight_at", [0, 7, 20])
def test_weights_make_the_masks_of_their_shard_float32_from_its_first_row_on(tmp_path, weight_at):
    """This includes a piece in the middle; the shard equals the result of packing all of its rows at once."""
    rows = [{"input_ids": [5, 6, 7 + i], "loss_mask": [1, 1, 1]} for i in range(100)]
    rows[4 * weight_at]["loss_mask"] = [0, 0.5, 1]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    packing = ("--packing", "sequential", "--seq-length", 16)
    done = produced(tmp_path / "catalog", "--input", path, "--tokens-per-shard", 300, *packing)
    assert done.code == 0, done
    assert preprocess(tmp_path / "one", "--input", path, *packing).code == 0
    made, whole = Shard(Catalog(tmp_path / "catalog").shard_prefix(0)), Shard(tmp_path / "one")
    assert made.header.mask_dtype == whole.header.mask_dtype == np.float32
    assert made.header.digests == whole.header.digests
    assert made.header.metadata["notes"] == whole.header.metadata["notes"] == {"first_token_masks_dropped": 99}
    assert not (tmp_path / "catalog" / "_work").exists()


def test_shards_end_at_the_first_piece_that_fills_them(calm):
    tokens = [Shard(Catalog(calm).shard_prefix(number)).header.num_tokens for number in Catalog(calm).numbers()]
    assert all(2000 <= count < 4000 for count in tokens[:-1])


def test_limits_are_declared_and_kept(calm):
    limits = state_of(calm).limits
    assert (limits.capacity, limits.max_sequences_per_pack, limits.token_dtype) == (512, 64, "uint16")
    assert max(Shard(Catalog(calm).shard_prefix(n)).header.most_sequences for n in Catalog(calm).numbers()) <= 64


def test_a_limit_of_sequences_a_pack_is_enforced(rows, tmp_path):
    assert make(tmp_path, rows, "--max-sequences-per-pack", 2).code == 0
    assert state_of(tmp_path).limits.max_sequences_per_pack == 2
    assert max(Shard(Catalog(tmp_path).shard_prefix(n)).header.most_sequences for n in Catalog(tmp_path).numbers()) == 2


def test_worker_processes_change_no_byte(calm, rows, tmp_path):
    assert make(tmp_path, rows, "--workers", 2).code == 0
    assert shards_of(tmp_path) == shards_of(calm)


def test_a_growing_folder_and_a_pipe_give_the_same_shards(calm, rows, tmp_path):
    watched = tmp_path / "watched"
    watched.mkdir()
    shutil.copy(rows, watched)
    (watched / "_END").touch()
    done = produced(tmp_path / "grown", "--watch", watched, "--on-bad-row", "skip")
    assert done.code == 0, done.err
    assert shards_of(tmp_path / "grown") == shards_of(calm)
    assert piped(rows, tmp_path / "piped", "--on-bad-row", "skip").code == 0
    assert shards_of(tmp_path / "piped") == shards_of(calm)


def test_nothing_that_changes_from_run_to_run_is_in_a_shard(calm, rows):
    for number in Catalog(calm).numbers():
        text = json.dumps(Shard(Catalog(calm).shard_prefix(number)).header.metadata)
        assert rows.name not in text
        assert os.sep not in text


def test_the_cursor_of_every_shard_is_behind_it(calm):
    cursors = [Shard(Catalog(calm).shard_prefix(n)).header.metadata["cursor"] for n in Catalog(calm).numbers()]
    rows = [cursor["rows"] for cursor in cursors]
    assert rows == sorted(set(rows))
    assert state_of(calm).input == cursors[-1]


def test_a_complete_catalog_is_found(calm, rows):
    before = shards_of(calm)
    again = make(calm, rows)
    assert (again.code, again.out.startswith(f"found {calm}: already complete, ")) == (0, True)
    assert f"; contents not checked: megatron-sft-idx verify --full {calm}\n" in again.out
    assert shards_of(calm) == before
    assert_clean(calm, len(before))
    assert state_of(calm).state == "stopped"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--seed", 3), "packing seed was 0, is 3"),
        (("--tokens-per-shard", 3000), "tokens per shard was 2000, is 3000"),
        (("--train-on", "all"), "train on was 'assistant', is 'all'"),
        (("--seq-length", 1024), "packing capacity was 512, is 1024"),
        (("--on-bad-row", "error"), "on bad row was 'skip', is 'error'"),
    ],
)
def test_other_options_are_refused_and_named(calm, rows, more, said):
    before = {path.name: path.read_bytes() for path in calm.iterdir()}
    refused = make(calm, rows, *more)
    assert refused.code == 1
    assert said in refused.err
    assert "choose another folder" in refused.err
    assert {path.name: path.read_bytes() for path in calm.iterdir()} == before


def cut_back(calm: Path, folder: Path, shards: int) -> None:
    """Leave a catalog of a producer that was killed after ``shards`` shards, before writing its state."""
    shutil.copytree(calm, folder)
    (folder / "_END.json").unlink()
    for number in Catalog(folder).numbers()[shards:]:
        for path in folder.glob(f"shard-{number:06d}.*"):
            path.unlink()
    catalog = Catalog(folder)
    state = dataclasses.replace(state_of(folder), published=0, input=Cursor().to_json(), state="running")
    catalog.write_producer(state)


def test_other_input_is_refused_and_named(calm, rows, tmp_path):
    cut_back(calm, tmp_path / "c", 3)
    text = rows.read_text()
    for changed, said in (
        (text.replace("e", "i", 1), "differs from the input that the existing shards were made from"),
        (text + "\n", f"file 1 was {rows} of {len(text.encode()):,} bytes, is "),
    ):
        other = tmp_path / "other.jsonl"
        other.write_text(changed)
        refused = make(tmp_path / "c", other)
        assert (refused.code, said in refused.err) == (1, True), refused.err
    refused = produced(tmp_path / "c", "--input", rows, CHATS, "--on-bad-row", "skip")
    assert (refused.code, "input was '1 files', is '2 files'" in refused.err) == (1, True), refused.err
    assert make(tmp_path / "c", rows).code == 0
    assert shards_of(tmp_path / "c") == shards_of(calm)


def test_before_there_is_a_shard_options_may_change(rows, tmp_path):
    failed = make(tmp_path, rows, "--overlong", "error", "--seq-length", 64, "--tokens-per-shard", 2000)
    assert (failed.code, "choose --overlong drop, truncate or split" in failed.err) == (1, True)
    assert state_of(tmp_path).state == "failed"
    assert make(tmp_path, rows).code == 0


def test_a_failure_is_told_to_consumers(rows, tmp_path):
    failed = produced(tmp_path, "--input", rows)
    assert failed.code == 1
    state = state_of(tmp_path)
    assert state.state == "failed"
    assert f"{rows}:41: " in (state.reason or "")
    assert Catalog(tmp_path).end() is None


def test_shards_past_five_digits(calm, rows, tmp_path):
    catalog = Catalog(tmp_path)
    begun = dataclasses.replace(state_of(calm), published=99_998, freed=99_998, input=Cursor().to_json())
    catalog.write_producer(begun)
    assert make(tmp_path, rows).code == 0
    numbers = catalog.numbers()
    assert numbers[:4] == [99_998, 99_999, 100_000, 100_001]
    assert list(shards_of(tmp_path).values()) == list(shards_of(calm).values())
    assert catalog.end() == 99_998 + len(numbers)


def test_a_million_shards(calm, rows, tmp_path):
    catalog = Catalog(tmp_path)
    begun = dataclasses.replace(state_of(calm), published=999_999, freed=999_999, input=Cursor().to_json())
    catalog.write_producer(begun)
    acknowledge(tmp_path, 1_000_001)
    assert make(tmp_path, rows, "--keep-recent", 1).code == 0
    assert catalog.numbers()[0] == 1_000_000
    assert state_of(tmp_path).freed == 1_000_000


def test_two_producers_at_a_time_are_one_too_many(rows, tmp_path):
    first = producing(tmp_path, "--input", "-", stdin=-1)
    until(lambda: Catalog(tmp_path).producer() is not None, first)
    refused = make(tmp_path, rows)
    assert (
        refused.code,
        "another producer is writing here; wait for it, or choose another folder" in refused.err,
    ) == (1, True)
    first.kill()
    first.communicate()


def test_one_that_is_terminated_says_so_and_goes_on_later(calm, rows, tmp_path):
    lines = rows.read_text().splitlines(keepends=True)
    run = producing(tmp_path, "--input", "-", "--on-bad-row", "skip", stdin=-1)
    assert run.stdin is not None
    run.stdin.write("".join(lines[:90]))
    run.stdin.flush()
    until(lambda: Catalog(tmp_path).is_published(1), run)
    run.send_signal(signal.SIGTERM)
    run.wait()
    with contextlib.suppress(BrokenPipeError):
        run.communicate()
    assert (state_of(tmp_path).state, state_of(tmp_path).reason) == ("stopped", "interrupted")
    again = piped(rows, tmp_path, "--on-bad-row", "skip")
    assert (again.code, "continuing after" in again.err) == (0, True), again.err
    assert shards_of(tmp_path) == shards_of(calm)


def test_another_stream_is_refused(rows, calm, tmp_path):
    cut_back(calm, tmp_path / "c", 2)
    state = state_of(tmp_path / "c")
    state.options["input"] = {"input": "a pipe"}
    Catalog(tmp_path / "c").write_producer(state)
    other = tmp_path / "other.jsonl"
    for changed in (rows.read_text().replace("e", "i", 1), "", rows.read_text()[:5000]):
        other.write_text(changed)
        refused = piped(other, tmp_path / "c", "--on-bad-row", "skip")
        assert refused.code == 1
        assert "differs from the input that the existing shards were made from; pass the same input" in refused.err
    other.write_text(rows.read_text())
    assert piped(other, tmp_path / "c", "--on-bad-row", "skip").code == 0
    assert shards_of(tmp_path / "c") == shards_of(calm)


def test_slow_input_does_not_hold_back_what_is_there(rows, calm, tmp_path):
    """The pipe stays open without data; shards of earlier rows are published anyway."""
    text = rows.read_text()
    run = producing(tmp_path, "--input", "-", "--on-bad-row", "skip", "--workers", 1, stdin=-1)
    assert run.stdin is not None
    run.stdin.write(text[: 2 * len(text) // 3])
    run.stdin.flush()
    until(lambda: Catalog(tmp_path).is_published(2), run)
    until(lambda: state_of(tmp_path).state == "waiting for input", run)
    run.stdin.write(text[2 * len(text) // 3 :])
    _, err = ended(run)
    assert err.count("waiting for input for ") == 1
    assert shards_of(tmp_path) == shards_of(calm)


def test_compressed_data_in_a_pipe_is_named(tmp_path):
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    refused = piped(tmp_path / "rows.jsonl.gz", tmp_path / "c")
    assert (refused.code, "standard input: gzip data; decompress it in the pipe" in refused.err) == (1, True)


def test_input_without_a_row_is_an_error(tmp_path):
    failed = produced(tmp_path / "c", "--input", write_rows(tmp_path / "empty.jsonl", []))
    assert (failed.code, "no row of the input can be used" in failed.err) == (1, True)


def test_rows_that_are_all_dropped_make_no_shard(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1] * 40, "loss_mask": [1] * 40}] * 5)
    failed = produced(tmp_path / "c", "--input", rows, "--overlong", "drop", "--seq-length", 32)
    assert (failed.code, "no row of the input can be used" in failed.err) == (1, True)


def test_a_folder_of_other_shards_is_refused(tmp_path, rows):
    assert preprocess(tmp_path / "shard-000003", capacity=1024).code == 0
    before = sorted(os.listdir(tmp_path))
    refused = make(tmp_path, rows)
    assert (refused.code, "no _producer.json, which records how they were made" in refused.err) == (1, True)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    "content", [{}, {"position": {}}, {"position": 3}, {"position": {"file": -1}, "rows": 0, "skipped": 0}]
)
def test_a_damaged_cursor_is_named(calm, rows, tmp_path, content):
    shutil.copytree(calm, tmp_path / "c")
    Catalog(tmp_path / "c").write_producer(dataclasses.replace(state_of(calm), input=content))
    refused = make(tmp_path / "c", rows)
    assert refused.code == 1
    assert f"{tmp_path / 'c' / '_producer.json'}: cursor." in refused.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--input", "-", CHATS), "remove the other inputs"),
        (("--input", CHATS, "--end-after", 3), "--end-after needs --watch"),
        (("--input", CHATS, "--watch", "x"), "not allowed with argument"),
        ((), "one of the arguments --input --watch is required"),
        (("--input", CHATS, "--tokens-per-shard", 100), "below --seq-length"),
        (("--input", CHATS, "--max-ahead-gb", "nan"), "expected a number of gigabytes above 0"),
        (("--input", CHATS, "--max-ahead-shards", 0), "expected a whole number from 1"),
        (("--input", CHATS, "--keep-recent", -1), "expected a whole number from 0"),
    ],
)
def test_wrong_usage(tmp_path, more, said):
    refused = produced(tmp_path / "c", *more)
    assert (refused.code, said in refused.err) == (2, True), refused.err
    assert not (tmp_path / "c").exists()


def test_help_teaches():
    shown = command("produce", "--help")
    assert shown.code == 0
    for said in ("examples:", "--watch raw", "--input -", "--max-ahead-shards 20 --keep-recent 0", "continues"):
        assert said in shown.out
    assert max(map(len, shown.out.partition("examples:")[2].splitlines())) <= 120
