"""Ctrl-C and SIGTERM end every command within seconds: in a long call, and while a worker does not answer."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from chats import CHATS, TOKENIZER, command, files_of, preprocess, write_rows
from interruptions import ended_within, held_in, started, wait_for_line, workers_of
from productions import arguments as produce_arguments
from productions import until

from megatron_sft_idx.live import Catalog

PATIENCE = 20
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
COMMON = ("--tokenizer-model", TOKENIZER, "--seq-length", 1024, "--earlier-reasoning", "drop")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide enough rows to interrupt a job, and the results of uninterrupted runs."""
    folder = tmp_path_factory.mktemp("calm")
    chats = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    write_rows(folder / "rows.jsonl", chats * 40)
    assert preprocess(folder / "shard", "--input", folder / "rows.jsonl").code == 0
    return folder


def recipe(verb: str, made: Path, out: Path) -> list[object]:
    rows = made / "rows.jsonl"
    return {
        "preprocess": ["preprocess", "--input", rows, "--output-prefix", out, *COMMON],
        "pack": ["pack", made / "shard", "--seq-length", 2048, "--output-prefix", out],
        "convert": ["convert", "--no-columns", "--to", "npy", made / "shard", out],
        "verify": ["verify", made / "shard", "--full"],
        "produce": [*produce_arguments(out, "--input", rows)],
    }[verb]


HELD = [
    # A call with many sequences, which may be all of packing.
    ("preprocess", "megatron_sft_idx._native:packing_plan", ["--workers", 1], signal.SIGINT),
    ("preprocess", "megatron_sft_idx.tokenize.encoding:RowEncoder.encode", ["--workers", 0], signal.SIGTERM),
    ("pack", "megatron_sft_idx._native:packing_plan", [], signal.SIGTERM),
    ("verify", "megatron_sft_idx.storage.local:StreamHash.update", [], signal.SIGINT),
    ("convert", "megatron_sft_idx.storage.local:StreamHash.update", [], signal.SIGINT),
    ("produce", "megatron_sft_idx._native:packing_plan", ["--workers", 1], signal.SIGINT),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("verb", "place", "more", "sent"), HELD)
def test_a_long_call_does_not_hold_a_signal_back(
    made: Path, tmp_path: Path, verb: str, place: str, more: list[object], sent: signal.Signals
) -> None:
    with started(*held_in(place, *recipe(verb, made, tmp_path / "x"), *more)) as process:
        wait_for_line(process, "held")
        process.send_signal(sent)
        said = ended_within(process, PATIENCE)
    assert process.returncode == CODES[sent], said
    assert "interrupted, before it could clean up\n" in said
    assert "Traceback" not in said


def test_a_thread_in_a_long_call_does_not_hold_the_end_back(made: Path) -> None:
    """The main thread has noticed the signal, but another thread is blocked, for example by a hanging file system."""
    place, arguments = "megatron_sft_idx.check.verify:check_ids", recipe("verify", made, made)
    with started(*held_in(place, *arguments, seconds=(0.3, 0.5))) as process:
        wait_for_line(process, "held")
        process.send_signal(signal.SIGINT)
        said = ended_within(process, PATIENCE)
    assert (process.returncode, said) == (130, "interrupted, before it could clean up\n")


def test_a_run_that_was_ended_in_a_long_call_is_resumed(made: Path, tmp_path: Path) -> None:
    arguments = [*recipe("preprocess", made, tmp_path / "x"), "--workers", 0]
    with started(*held_in("megatron_sft_idx._native:packing_plan", *arguments)) as process:
        wait_for_line(process, "held")
        process.send_signal(signal.SIGTERM)
        ended_within(process, PATIENCE)
    again = command(*arguments)
    assert (again.code, "parts reused" in again.err) == (0, True), again
    assert files_of(tmp_path / "x") == files_of(made / "shard")


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_preprocess_ends_though_a_worker_is_stopped(made: Path, tmp_path: Path, sent: signal.Signals) -> None:
    arguments = recipe("preprocess", made, tmp_path / "x")
    with started("-m", "megatron_sft_idx", *arguments, "--workers", 2, "--log-interval", 1000) as process:
        wait_for_line(process, "tokenising: ")
        os.kill(workers_of(process.pid)[0], signal.SIGSTOP)
        time.sleep(0.2)
        process.send_signal(sent)
        said = ended_within(process, PATIENCE)
    assert process.returncode == CODES[sent], said
    assert " kept in " in said
    again = command(*arguments, "--workers", 0)
    assert again.code == 0, again
    assert files_of(tmp_path / "x") == files_of(made / "shard")


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_produce_ends_though_a_worker_is_stopped(made: Path, tmp_path: Path, sent: signal.Signals) -> None:
    arguments = produce_arguments(tmp_path, "--input", made / "rows.jsonl", "--workers", 2)
    with started("-m", "megatron_sft_idx", *arguments) as process:
        until(lambda: Catalog(tmp_path).is_published(0))
        os.kill(workers_of(process.pid)[0], signal.SIGSTOP)
        time.sleep(0.2)
        process.send_signal(sent)
        said = ended_within(process, PATIENCE)
    assert process.returncode == CODES[sent], said
    state = Catalog(tmp_path).producer()
    assert state is not None
    assert (state.state, state.reason) == ("stopped", "interrupted")
