"""``--max-rows N`` gives the same result and output as an input with only the first rows."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from chats import Outcome, files_of, preprocess, write_rows
from interrupted_runs import be_quick
from kills import killed_at

from megatron_sft_idx.shard import read_header
from megatron_sft_idx.tokenize import encoding


def rows_of(count: int) -> list[Any]:
    """Return rows with unusable ones, rows that are counted in notes, and rows with weights."""
    chance, rows = random.Random(0), []
    for number in range(count):
        answer: dict[str, Any] = {"role": "assistant", "content": f"It is {number}." * chance.randrange(1, 9)}
        row = {"messages": [{"role": "user", "content": f"What is {number}?"}, answer]}
        kind = chance.randrange(8)
        if kind == 0:
            row = {"messages": []}
        elif kind == 1:
            row = {"messages": [row["messages"][0]]}
        elif kind == 2:
            answer["content"] += "<|im_end|>"  # kept as text and counted
        elif kind == 3:
            answer["tool_calls"] = [{"name": "f", "arguments": {"x": None}}]
        elif kind == 4 and number > count // 2:
            answer["weight"] = 0.5
        rows.append(row)
    return rows


def is_usable(row: Any) -> bool:
    return len(row["messages"]) == 2


def first_rows(rows: list[Any], most: int) -> list[Any]:
    """Return the rows up to the last of ``most`` usable ones."""
    ends = [number + 1 for number, row in enumerate(rows) if is_usable(row)]
    return rows[: ends[most - 1]] if most <= len(ends) else rows


def outcome(prefix: Path, done: Outcome) -> Any:
    """Return all results and output without paths and the input's fingerprint, which covers whole pieces."""
    assert done.code == 0, done.err
    header = read_header(prefix).metadata
    said = [
        re.sub(r"first in .*\.jsonl(\.gz)?:", "first in ", line)
        for line in done.out.splitlines()
        if not line.startswith(("wrote", "seconds", "  first", "  to train on"))
    ]
    skipped = [line.partition("jsonl")[2] for line in done.err.splitlines() if line.startswith("skipped")]
    files = {
        suffix: raw for suffix, raw in files_of(prefix).items() if suffix in (".bin", ".loss.bin", ".seq.bin", ".idx")
    }
    counts = {name: header["sources"][name] for name in ("rows", "skipped")}
    return files, said, skipped, counts, header["notes"], read_header(prefix).mask_dtype


@pytest.mark.parametrize("most", [1, 7, 41, 1000])
@pytest.mark.parametrize("compressed", [False, True])
def test_nothing_behind_the_last_row_is_used_counted_or_said(
    most: int, compressed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_quick(monkeypatch)
    rows = rows_of(220)
    source = write_rows(tmp_path / "in.jsonl", rows)
    (tmp_path / "first").mkdir()
    first = write_rows(tmp_path / "first/in.jsonl", first_rows(rows, most))
    if compressed:  # distributed in pieces instead of ranges
        source = tmp_path / "in.jsonl.gz"
        source.write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    skip = ("--on-bad-row", "skip", "--packing", "sequential")
    wanted = outcome(tmp_path / "w", preprocess(tmp_path / "w", "--input", first, *skip))
    for workers, batch in ((0, 128), (0, 1), (0, 5), (2, 128)):
        monkeypatch.setattr(encoding, "_BATCH_ROWS", batch)
        prefix = tmp_path / f"x{workers}-{batch}"
        done = preprocess(prefix, "--input", source, *skip, "--max-rows", most, "--workers", workers)
        made = outcome(prefix, done)
        if compressed:
            made = (*made[:2], [line.removeprefix(".gz") for line in made[2]], *made[3:])
        assert made == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_behind_the_last_one_is_no_error(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_quick(monkeypatch)
    rows = [row for row in rows_of(220) if is_usable(row)]
    for bad_at in (60,) if workers else (1, 60, 61, 100):
        source = write_rows(tmp_path / f"{bad_at}.jsonl", [*rows[:bad_at], {"messages": []}, *rows[bad_at:]])
        for most in (bad_at - 1, bad_at, bad_at + 1):
            if not most:
                continue
            prefix = tmp_path / f"{bad_at}-{most}"
            done = preprocess(prefix, "--input", source, "--max-rows", most, "--workers", workers)
            if most <= bad_at:
                assert done.code == 0, done.err
                assert read_header(prefix).metadata["sources"]["rows"] == most
            else:
                assert (done.code, f"{source}:{bad_at + 1}: messages is empty" in done.err) == (1, True)


def test_the_last_rows_are_made_again_by_no_other_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed run continues with its parts; the last part has only the rows that are taken."""
    be_quick(monkeypatch)
    source = write_rows(tmp_path / "in.jsonl", rows_of(220))
    given = ("--input", source, "--on-bad-row", "skip", "--max-rows", 100)
    assert preprocess(tmp_path / "calm/x", *given).code == 0
    calm = files_of(tmp_path / "calm/x")
    for step in range(3, 60, 5):
        at = tmp_path / f"step-{step}"
        at.mkdir()
        if not killed_at(step, lambda at=at: preprocess(at / "x", *given)):
            break
        assert preprocess(at / "x", *given).code == 0
        assert files_of(at / "x") == calm


@pytest.mark.parametrize("full", [False, True])
def test_a_dry_run_says_nothing_of_rows_that_are_not_taken(full: bool, tmp_path: Path) -> None:
    rows = rows_of(220)
    sources = [write_rows(tmp_path / f"{number}.jsonl", rows[number::2]) for number in range(2)]
    options = ("--dry-run", *(["--full"] if full else []), "--input", *sources)
    for most in (1, 10, 90, 120):
        done = preprocess(tmp_path / "x", *options, "--max-rows", most)
        taken = [first_rows(rows[::2], most)]
        left = most - sum(map(is_usable, taken[0]))
        taken.append(first_rows(rows[1::2], left) if left else [])
        for some in taken:
            if some:
                bad = sum(not is_usable(row) for row in some)
                said = f"{len(some):,}" + (f" ({bad} cannot be used)" if bad else "")
                assert said + ": " in done.out, json.dumps([most, done.out])
        bad = sum(not is_usable(row) for some in taken for row in some)
        assert done.out.count("bad row         " + str(tmp_path)) == (bad if full else min(bad, 20))
