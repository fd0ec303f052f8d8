"""Run ``produce``, in this process and in separate ones, and check the catalogs that it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chats import SUFFIXES, TOKENIZER, Outcome, command, files_of, sequences_of, write_rows
from interrupted_runs import some_rows
from sample_packs import opens

from megatron_sft_idx.live import Ack, Catalog, Deal, ProducerState, ack_folder, shard_name, write_ack
from megatron_sft_idx.shard.shard_set import find_prefixes

SMALL = ("--seq-length", 512, "--tokens-per-shard", 2000, "--overlong", "split", "--earlier-reasoning", "drop")
# A generous limit: waits take a second, or ten on a busy machine.
PATIENCE = 300.0


def arguments(catalog: Path, *more: object) -> list[str]:
    given = ["produce", "--catalog", catalog, "--tokenizer-model", TOKENIZER, *SMALL, *more]
    if "--workers" not in more:
        given += ["--workers", 0]
    return [str(argument) for argument in given]


def produced(catalog: Path, *more: object) -> Outcome:
    """Run ``produce`` in this process."""
    return command(*arguments(catalog, *more))


def piped(stream: Path, catalog: Path, *more: object) -> Outcome:
    """Run ``produce --input -`` in this process, with this file as standard input."""
    before = os.dup(0)
    with open(stream, "rb") as file:
        os.dup2(file.fileno(), 0)
    try:
        return produced(catalog, "--input", "-", *more)
    finally:
        os.dup2(before, 0)
        os.close(before)


def producing(catalog: Path, *more: object, **options: Any) -> subprocess.Popen[str]:
    """Start ``produce`` as a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_sft_idx", *arguments(catalog, *more)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def ended(run: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Wait for a process, check its exit code, and return its output."""
    out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == code, err
    return out, err


def until(happened: Callable[[], object], run: subprocess.Popen[str] | None = None) -> None:
    """Wait until ``happened`` returns a true value. Fail if that takes too long, or if ``run`` ends before."""
    give_up = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < give_up, "it never happened"
        assert run is None or run.poll() is None, run.communicate()
        time.sleep(0.01)


def shards_of(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the bytes of every shard, by name."""
    return {shard_name(number): files_of(folder / shard_name(number)) for number in Catalog(folder).numbers()}


def tokens_of(folder: Path) -> Counter[tuple[int, ...]]:
    """Return the sequences of all shards, with the number of occurrences of each."""
    prefixes = (folder / shard_name(number) for number in Catalog(folder).numbers())
    return Counter(tuple(ids.tolist()) for prefix in prefixes for ids, _ in sequences_of(prefix))


def state_of(folder: Path) -> ProducerState:
    state = Catalog(folder).producer()
    assert state is not None
    return state


def assert_clean(folder: Path, shards: int) -> None:
    """Check that the catalog has this number of shards, its documents, and nothing else."""
    names = [f"{shard_name(number)}{suffix}" for number in range(shards) for suffix in SUFFIXES]
    assert sorted(os.listdir(folder)) == sorted([*names, "_END.json", "_inputs.jsonl", "_producer.json"])
    assert Catalog(folder).end() == shards


def acknowledge(folder: Path, shards: int, consumer: str = "one") -> None:
    """Acknowledge the first ``shards`` shards, as a consumer of one rank."""
    ack = Ack(consumer, 0, Deal(1), rank=0, items_done=shards, packs_done=shards)
    write_ack(ack_folder(Catalog(folder)), ack)


class Production:
    """One input, and the shards from an uninterrupted run.

    Attributes:
        shards: the shards if the input is one file.
        grown: the shards if the input is a growing folder, where pieces end with its files.
        seconds: duration of a run.
    """

    def __init__(self, folder: Path, rows: int = 48) -> None:
        self.folder = folder
        self.rows = write_rows(folder / "rows.jsonl", some_rows(rows))
        self.watched = folder / "watched"
        self.watched.mkdir()
        # The same rows as files of a growing folder.
        lines = self.rows.read_text().splitlines(keepends=True)
        for number, first in enumerate(range(0, len(lines), 7)):
            (self.watched / f"{number}.jsonl").write_text("".join(lines[first : first + 7]))
        (self.watched / "_END").touch()
        assert self.run(folder / "calm").code == 0
        self.shards = shards_of(folder / "calm")
        begin = time.monotonic()
        assert self.run(folder / "grown", "--watch").code == 0
        self.seconds = time.monotonic() - begin
        self.grown = shards_of(folder / "grown")

    def run(self, catalog: Path, source: str = "--input", *more: object) -> Outcome:
        if source == "-":
            return piped(self.rows, catalog, "--on-bad-row", "skip", *more)
        given = self.watched if source == "--watch" else self.rows
        return produced(catalog, source, given, "--on-bad-row", "skip", *more)

    def check_what_is_left(self, catalog: Path) -> None:
        """Check that every existing shard is complete and expected, and that none is skipped."""
        numbers = Catalog(catalog).numbers()
        assert numbers == list(range(len(numbers)))
        for number in numbers:
            assert opens(Catalog(catalog).shard_prefix(number))
        found = shards_of(catalog)
        assert any(found.items() <= whole.items() for whole in (self.shards, self.grown))
        if numbers:  # the lock left by a kill is not a shard
            assert f"{catalog}/_producer" not in find_prefixes(catalog, incomplete=True)

    def assert_ends_the_same(self, catalog: Path, source: str = "--input", *more: object) -> None:
        done = self.run(catalog, source, *more)
        assert done.code == 0, done.err
        whole = self.grown if source == "--watch" else self.shards
        assert shards_of(catalog) == whole
        if source != "-":
            assert_clean(catalog, len(whole))
