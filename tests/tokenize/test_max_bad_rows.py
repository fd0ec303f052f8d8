"""``--max-bad-rows``: a run stops if more rows are bad, and continues its work with a larger limit."""

from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from chats import Outcome, files_of, preprocess, remains, write_rows
from productions import produced, shards_of

import megatron_sft_idx
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.tokenize import cut
from megatron_sft_idx.tokenize.bad_rows import BadRowLimit

SKIP = ("--on-bad-row", "skip", "--seq-length", 64, "--packing", "sequential")


def rows_of(count: int, bad: int, seed: int = 0) -> list[Any]:
    where = set(random.Random(seed).sample(range(count), bad))
    good = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
    return [{"messages": []} if number in where else good for number in range(count)]


def why(done: Outcome) -> str:
    assert done.code == 1, done
    return done.err.splitlines()[-1].removeprefix("megatron-sft-idx: error: ")


@pytest.mark.parametrize(
    ("value", "bad", "rows", "allowed"),
    [
        *[(3, 3, 9, True), (3, 4, 9, False), ("0", 0, 9, True), (0, 1, 9, False), ("1", 1, 2, True), (1, 2, 2, False)],
        *[(0.29, 29, 100, True), ("29%", 29, 100, True), ("29 %", 1, 1, None), ("28.9%", 29, 100, False)],
        *[(0.0, 1, 9, False), ("0%", 0, 9, True), (1.0, 9, 9, True), ("100%", 9, 9, True), ("0.07", 7, 100, True)],
        *[(value, 0, 0, None) for value in (-1, "-1", "x", "", "1.5", 1.5, "101%", True, "nan", float("inf"), "1e-3")],
    ],
)
def test_a_limit(value: Any, bad: int, rows: int, allowed: bool | None) -> None:
    given = {"max_bad_rows": value, "on_bad_row": "skip"}
    if allowed is None:
        with pytest.raises(FormatError, match=r"^--max-bad-rows .*: expected a number of rows, such as 10"):
            BadRowLimit.of(given)
        return
    limit = BadRowLimit.of(given)
    assert limit is not None
    assert limit.allows(bad, rows) == allowed
    with pytest.raises(FormatError, match="needs --on-bad-row skip"):
        BadRowLimit.of(given | {"on_bad_row": "error"})


@pytest.mark.parametrize(("limit", "seed"), [("5", 0), ("1.9%", 1), ("0%", 2)])
def test_a_run_stops_and_a_larger_limit_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, seed: int
) -> None:
    monkeypatch.setattr(cut, "PIECE_NBYTES", 500)
    source = write_rows(tmp_path / "rows.jsonl", rows_of(400, 8, seed))
    given = ("--input", source, *SKIP)
    assert preprocess(tmp_path / "calm", *given).code == 0
    stops = []
    for workers in (0, 2):
        prefix = tmp_path / f"x{workers}"
        done = preprocess(prefix, *given, "--workers", workers, "--max-bad-rows", limit)
        stops.append(why(done))
        assert not prefix.with_suffix(".idx").exists()
        assert "run the same command again" not in done.err
        continues = "with a larger --max-bad-rows, the command continues from there" in done.err
        assert continues or limit.startswith("0")
        more = ("--workers", 0, "--max-bad-rows", 8 if seed else "2%")
        resumed = preprocess(prefix, *given, *more)
        assert resumed.code == 0, resumed
        assert "parts reused" in resumed.err or limit.startswith("0")
        assert files_of(prefix) == files_of(tmp_path / "calm")
    bad = [number for number, row in enumerate(rows_of(400, 8, seed), 1) if "messages" in row]
    assert stops[0] == stops[1]
    found = re.match(r"(.*): (\d+) of (\d+) rows cannot be used, more than --max-bad-rows (\S+) allows: (.*)", stops[0])
    assert found
    assert (found[1], found[4]) == (str(source), limit)
    assert found[5].startswith(f"{source}:{bad[0]}: ")
    assert stops[0].endswith("; correct the rows, or raise --max-bad-rows")
    assert (int(found[3]) == 400) == (limit == "1.9%")
    assert int(found[2]) == sum(number <= int(found[3]) for number in bad)
    assert preprocess(tmp_path / "y", *given, "--max-bad-rows", 8).code == 0


def test_a_share_that_cannot_be_kept_any_more_stops_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "PIECE_NBYTES", 500)
    source = write_rows(tmp_path / "rows.jsonl", [*[{"messages": []}] * 200, *rows_of(400, 0)])
    given = ("--input", source, *SKIP, "--max-rows", 100)
    assert "cannot be used" in (stopped := why(preprocess(tmp_path / "x", *given, "--max-bad-rows", "10%")))
    assert " 200 of " not in stopped
    assert preprocess(tmp_path / "y", *given, "--max-bad-rows", "67%").code == 0


def test_shards_and_corpora_that_were_made_without_a_limit_are_held_to_it(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", rows_of(40, 8))
    given = ("--input", source, *SKIP, "--keep-corpus")
    assert preprocess(tmp_path / "x", *given).code == 0
    for more in ((), ("--overwrite", "--seq-length", 32)):
        stopped = why(preprocess(tmp_path / "x", *given, *more, "--max-bad-rows", 7))
        assert stopped.startswith(f"{tmp_path / 'x'}: 8 of 40 rows cannot be used, more than --max-bad-rows 7 allows; ")
        assert preprocess(tmp_path / "x", *given, *more, "--max-bad-rows", 8).code == 0


@pytest.mark.parametrize("verb", ["preprocess", "produce"])
@pytest.mark.parametrize(
    ("more", "said"), [((), "needs --on-bad-row skip"), (("--on-bad-row", "skip"), "expected a number of rows")]
)
def test_wrong_usage(tmp_path: Path, verb: str, more: tuple[str, ...], said: str) -> None:
    source = write_rows(tmp_path / "rows.jsonl", rows_of(3, 0))
    limit = ("--max-bad-rows", "150%" if more else "3")
    if verb == "preprocess":
        done = preprocess(tmp_path / "x", "--input", source, *more, *limit)
    else:
        done = produced(tmp_path / "x", "--input", source, *more, *limit)
    assert (done.code, said in done.err) == (2, True), done
    assert remains(tmp_path) == []


def test_from_python_and_from_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, job = rows_of(40, 8), {"tokenizer": "tools/demo/tokenizer", "seq_length": 64, "workers": 0}
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SequenceError, match=r"^rows: 8 of 40 rows cannot .*: rows:\d+: messages is empty; rows:"):
        megatron_sft_idx.preprocess(rows, output_prefix=tmp_path / "x", on_bad_row="skip", max_bad_rows=0.1, **job)
    summary = megatron_sft_idx.preprocess(
        rows, output_prefix=tmp_path / "x", on_bad_row="skip", max_bad_rows=0.2, **job
    )
    assert summary.options["max_bad_rows"] == "0.2"
    with pytest.raises(FormatError, match="needs --on-bad-row skip"):
        megatron_sft_idx.preprocess(rows, output_prefix=tmp_path / "y", max_bad_rows=1, **job)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    done = preprocess(tmp_path / "z", "--input", "-", *SKIP, "--max-bad-rows", 7)
    assert why(done).startswith("standard input: 8 of 40 rows")


@pytest.mark.parametrize(("limit", "full", "stops"), [("7", True, True), ("8", True, False), ("1%", False, False)])
def test_a_dry_run_says_that_a_run_would_stop(tmp_path: Path, limit: str, full: bool, stops: bool) -> None:
    source = write_rows(tmp_path / "rows.jsonl", rows_of(40, 8))
    more = ("--full",) if full else ()
    done = preprocess(tmp_path / "x", "--input", source, *SKIP, "--max-bad-rows", limit, "--dry-run", *more)
    assert ("would stop      the input: 8 of 40 rows cannot be used" in done.out) == stops, done


@pytest.mark.parametrize("limit", ["5", "1.5%"])
def test_a_catalog_stops_and_a_larger_limit_goes_on(tmp_path: Path, limit: str) -> None:
    rows = rows_of(800, 0)
    for number in random.Random(1).sample(range(400, 800), 40):
        rows[number] = {"messages": []}
    source = write_rows(tmp_path / "rows.jsonl", rows)
    given = ("--input", source, "--on-bad-row", "skip", "--tokens-per-shard", 1000, "--seq-length", 64)
    assert produced(tmp_path / "calm", *given).code == 0
    stops = []
    for workers in (0, 2 if limit == "5" else 0):
        catalog = tmp_path / f"live{len(stops)}"
        stops.append(why(produced(catalog, *given, "--workers", workers, "--max-bad-rows", limit)))
        published = shards_of(catalog)
        assert published
        assert published.items() < shards_of(tmp_path / "calm").items()
        assert produced(catalog, *given, "--workers", 0, "--max-bad-rows", 40).code == 0
        assert shards_of(catalog) == shards_of(tmp_path / "calm")
    assert stops[0].replace("live0", "live1") == stops[1]
    assert f"more than --max-bad-rows {limit} allows: {source}:" in stops[0]
