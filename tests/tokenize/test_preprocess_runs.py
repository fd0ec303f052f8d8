"""Runs of ``preprocess``: errors, progress, lists of files, and interruptions."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from chats import CHATS, ROOT, TOKENIZER, command, files_of, preprocess, remains, sequences_of, write_rows

from megatron_sft_idx.shard import Shard
from megatron_sft_idx.tokenize import cut, dry_run


@pytest.fixture(scope="module")
def chats():
    return [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def long(tmp_path_factory, chats):
    """Return input for a run long enough to interrupt, and the shard from an uninterrupted run."""
    folder = tmp_path_factory.mktemp("long")
    given = write_rows(folder / "rows.jsonl", chats * 60)
    done = preprocess(folder / "calm", "--input", given)
    assert done.code == 0, done
    return given, files_of(folder / "calm")


def test_refuses_to_overwrite(tmp_path):
    assert preprocess(tmp_path / "x").code == 0
    before = files_of(tmp_path / "x")
    refused = preprocess(tmp_path / "x", "--seed", 5)
    assert refused.code == 1
    assert "packing seed was 0, is 5; use another prefix, or pass --overwrite" in refused.err
    assert files_of(tmp_path / "x") == before
    assert preprocess(tmp_path / "x", "--seed", 5, "--overwrite").code == 0
    assert files_of(tmp_path / "x") != before


def test_dry_run_shows_and_writes_nothing(tmp_path):
    done = preprocess(tmp_path / "new" / "x", "--dry-run")
    assert done.code == 0, done
    assert "[[" in done.out
    assert "nothing was written" in done.out
    assert not (tmp_path / "new").exists()


def why_stopped(done):
    return done.err.splitlines()[-1].removeprefix("megatron-sft-idx: error: ")


@pytest.mark.parametrize("name", ["x.idx", "x.source.col", "x.building", "x.building/notes.txt"])
def test_dry_run_says_what_would_be_in_the_way(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    refused, dry = (preprocess(tmp_path / "x", *more) for more in ((), ("--dry-run",)))
    assert (refused.code, dry.code) == (1, 1)
    assert f"would stop      {why_stopped(refused)}" in dry.out


@pytest.mark.parametrize("more", [(), ("--output-shards", 2), ("--seed", 5, "--full")])
def test_dry_run_works_where_a_shard_is(tmp_path, more):
    assert preprocess(tmp_path / "x", "--output-shards", 3 if "--output-shards" in more else 1).code == 0
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    dry = preprocess(tmp_path / "x", *more, "--dry-run")
    assert (dry.code, "[[" in dry.out) == (int(bool(more)), True), dry
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before
    again = preprocess(tmp_path / "x", *(word for word in more if word != "--full"))
    assert again.code == (1 if more else 0)
    assert ("would stop" in dry.out) == bool(more)
    assert not more or f"would stop      {why_stopped(again)}" in dry.out
    if "--output-shards" not in more:
        assert "would stop" not in preprocess(tmp_path / "x", "--dry-run", "--overwrite").out


@pytest.mark.parametrize("more", [(), ("--full",)])
def test_dry_run_needs_no_prefix(tmp_path, monkeypatch, more):
    given = (
        "preprocess",
        "--tokenizer",
        TOKENIZER,
        "--seq-length",
        1024,
        "--earlier-reasoning",
        "drop",
        "--workers",
        0,
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with_prefix = preprocess(tmp_path / "x", "--dry-run", *more)
    assert command(*given, "--input", CHATS, "--dry-run", *more) == with_prefix
    with open(CHATS) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        piped = command(*given, "--input", "-", "--dry-run", "--output-prefix", "new/x", *more)
    given_lines, piped_lines = with_prefix.out.splitlines(), piped.out.splitlines()
    assert piped_lines[1:] == [line.replace(str(CHATS), "standard input") for line in given_lines[1:]]
    assert [*tmp_path.rglob("*")] == [tmp_path / "temporary"]
    refused = command(*given, "--input", CHATS)
    assert (refused.code, "required: --output-prefix" in refused.err) == (2, True)


def test_dry_run_refuses_options_that_the_run_would_refuse(tmp_path):
    options = ("--repeat", "other.jsonl=2")
    refused = [preprocess(tmp_path / "x", *options, *more) for more in ((), ("--dry-run",))]
    assert [(done.code, done.err) for done in refused] == [(1, refused[0].err)] * 2


def test_dry_run_looks_at_every_file_and_says_what_would_stop_a_run(tmp_path, chats):
    good, bad = write_rows(tmp_path / "good.jsonl", chats), write_rows(tmp_path / "bad.jsonl", [{"messages": []}])
    given = ("--input", good, bad, "--seq-length", 64)
    done = preprocess(tmp_path / "x", *given, "--dry-run")
    assert done.code == 1, done
    assert done.out.count("  first rows    ") == 2
    assert "  first rows    1 (1 cannot be used): 0 sequences, 0 tokens, 0 trained" in done.out
    assert f"bad row         {bad}:1: messages is empty" in done.out
    assert "would stop      1 row cannot be used; correct the input, or pass --on-bad-row skip" in done.out
    assert re.search(
        r"\d+ of \d+ sequences are longer than 64 tokens: good.jsonl:\d+ \(\d+ tokens\), good.jsonl:\d+ \(\d+ tokens\),"
        r" good.jsonl:\d+ \(\d+ tokens\) and \d+ more; choose --overlong drop, truncate or split",
        done.out,
    )
    assert preprocess(tmp_path / "x", *given).code == 1
    more = ("--on-bad-row", "skip", "--overlong", "split")
    assert "would stop" not in preprocess(tmp_path / "x", *given, *more, "--dry-run").out
    assert remains(tmp_path) == ["bad.jsonl", "good.jsonl"]


def test_full_dry_run_knows_what_only_the_last_rows_hold_and_the_packs_there_would_be(tmp_path, chats, monkeypatch):
    monkeypatch.setattr(dry_run, "_MAX_FILE_NBYTES", 2000)
    monkeypatch.setattr(cut, "PIECE_NBYTES", 1500)
    first_token_masked = {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}
    source = write_rows(tmp_path / "rows.jsonl", [*chats, first_token_masked, {"messages": []}])
    assert "would stop" not in preprocess(tmp_path / "x", "--input", source, "--dry-run").out
    seen = {}
    for workers in (0, 2):
        given = ("--input", source, "--workers", workers, "--dry-run", "--full")
        stopped = preprocess(tmp_path / "x", *given)
        seen[workers] = stopped.out
        assert (stopped.code, "would stop      1 row cannot be used" in stopped.out) == (1, True)
    assert seen[0] == seen[2]
    assert f"bad row         {source}:{len(chats) + 2}: messages is empty" in seen[0]
    done = preprocess(tmp_path / "x", "--input", source, "--on-bad-row", "skip", "--summary", tmp_path / "s.json")
    assert done.code == 0
    packing = json.loads((tmp_path / "s.json").read_text())["packing"]
    counts = f"{packing['sequences']:,} sequences, {packing['tokens']:,} tokens, {packing['trained_tokens']:,} trained"
    assert f"  all rows      {len(chats) + 2} (1 cannot be used): {counts}" in seen[0]
    assert f"packs           {packing['packs']:,} ({packing['method']}), {100 * packing['fill']:.3f}% filled" in seen[0]
    assert preprocess(tmp_path / "y", "--full").code == 2


def test_a_full_dry_run_shows_every_bad_row_and_others_how_many_there_are(tmp_path, chats):
    rows = write_rows(tmp_path / "rows.jsonl", [chats[0], *[{"messages": []}] * 33])
    dry = preprocess(tmp_path / "x", "--input", rows, "--dry-run", "--full")
    every = [f"bad row         {rows}:{line}: messages is empty" for line in range(2, 35)]
    assert [line for line in dry.out.splitlines() if line.startswith("bad row ")] == every
    dry = preprocess(tmp_path / "x", "--input", rows, "--dry-run")
    more = "bad row         13 more bad rows; --full lists all bad rows of the input"
    assert [line for line in dry.out.splitlines() if line.startswith("bad row ")] == [*every[:20], more]
    made = preprocess(tmp_path / "x", "--input", rows, "--on-bad-row", "skip", "--summary", tmp_path / "s.json")
    assert "skipped more rows; the file of --summary lists them" in made.err
    assert len(json.loads((tmp_path / "s.json").read_text())["corpus"]["bad_rows"]) == 33


def test_a_dry_run_refuses_a_summary_which_it_would_not_write(tmp_path):
    refused = preprocess(tmp_path / "x", "--dry-run", "--summary", tmp_path / "s.json")
    assert (refused.code, "--summary cannot be combined with --dry-run" in refused.err) == (2, True)


def test_bad_rows_can_be_skipped_and_are_listed(tmp_path, chats):
    rows = [chats[0], {"messages": []}, chats[1], {"text": "?"}, {"input_ids": [1, 10**6], "loss_mask": [1, 1]}]
    done = preprocess(tmp_path / "x", "--on-bad-row", "skip", "--summary", tmp_path / "s.json", rows=rows)
    assert done.code == 0, done
    listed = json.loads((tmp_path / "s.json").read_text())["corpus"]["bad_rows"]
    assert [line.split(":")[1] for line in listed] == ["2", "4", "5"]
    assert [line.split("rows.jsonl:")[1][0] for line in done.err.splitlines()] == ["2", "4", "5"]
    assert len(sequences_of(tmp_path / "x")) == 2
    assert Shard(tmp_path / "x").header.metadata["sources"]["skipped"] == 3


def test_progress_is_plain_lines_without_a_terminal(tmp_path, chats):
    done = preprocess(tmp_path / "x", "--log-interval", 1000, rows=chats * 25)
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if line.startswith("tokenising: ")]
    assert len(lines) >= 3
    assert all(" rows/s" in line and " left" in line for line in lines)
    assert "100.0%" in lines[-1]
    assert "\r" not in done.err


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_interrupted_runs_keep_what_is_done(tmp_path, long, sent, code):
    given, calm = long
    arguments = [
        "preprocess",
        "--earlier-reasoning",
        "drop",
        "--input",
        given,
        "--tokenizer-model",
        TOKENIZER,
        "--seq-length",
        1024,
    ]
    arguments += ["--output-prefix", tmp_path / "x", "--log-interval", 1000]
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_sft_idx", *map(str, arguments), "--workers", "2"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("tokenising: "), first
        os.killpg(process.pid, sent)
        rest = process.stderr.read()
    assert process.returncode == code, rest
    assert "Traceback" not in rest
    assert " kept in " in rest
    assert "run the same command again" in rest
    resumed = command(*arguments, "--workers", 0)
    assert resumed.code == 0, resumed
    assert "parts reused" in resumed.err
    assert files_of(tmp_path / "x") == calm


def test_a_killed_worker_changes_no_byte(tmp_path, long):
    given, calm = long
    arguments = [
        "preprocess",
        "--earlier-reasoning",
        "drop",
        "--input",
        given,
        "--tokenizer-model",
        TOKENIZER,
        "--seq-length",
        "1024",
    ]
    arguments += ["--output-prefix", tmp_path / "shot", "--workers", "2", "--log-interval", "1000"]
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_sft_idx", *map(str, arguments)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("tokenising: ")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        worker = next(pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(worker), signal.SIGKILL)
        rest = process.stderr.read()
    assert process.returncode == 0, rest
    assert files_of(tmp_path / "shot") == calm
