"""Conversion needs the same memory for any amount of data, except for reading a pickled .npy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_sft_idx.shard import ShardWriter

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
LENGTH, PACKS = 4096, 25_000  # half a gigabyte: several times the limit
MOST_HEAP = 256 << 20

# Only anonymous memory: pages of mapped files belong to the page cache.
CONVERT = """
import sys, threading, time
from megatron_sft_idx.cli.main import main

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.02)

import pyarrow.parquet
before = anonymous()
peak = [before]
threading.Thread(target=watch, daemon=True).start()
code = main(sys.argv[1:])
print(code, peak[0] - before)
"""


def heap_of(*arguments: str) -> int:
    """Return the peak heap of a conversion in bytes, without its imports."""
    command = [sys.executable, "-c", CONVERT, "convert", *arguments, "--log-interval", "0", "--overwrite"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    code, heap = run.stdout.splitlines()[-1].split()
    assert code == "0", run.stderr
    return int(heap)


def write_shard(prefix: Path, length: int, packs: int) -> Path:
    rng = np.random.default_rng(0)
    starts = np.arange(0, length, 512)
    with ShardWriter(prefix, durable=False) as writer:
        for _ in range(packs):
            mask = rng.integers(0, 2, length, np.uint8)
            mask[511::512] = 0
            writer.add_pack(rng.integers(0, 150_000, length, np.int32), mask, starts)
    return prefix


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shard(tmp_path_factory.mktemp("big") / "x", LENGTH, PACKS)


@pytest.mark.parametrize("name", ["memmap", "parquet", "jsonl-chunks", "pbin"])
def test_memory_is_bounded_both_ways(tmp_path: Path, shard: Path, name: str) -> None:
    there = heap_of(str(shard), str(tmp_path / "y"), "--to", name, "--lossy")
    rule = ["--mask-rule", "all"] if name == "pbin" else []
    again = heap_of(str(tmp_path / "y"), str(tmp_path / "z"), "--to", "sft-idx", *rule)
    assert (there < MOST_HEAP, again < MOST_HEAP) == (True, True), (there, again)


def test_a_pickled_npy_is_written_in_bounded_memory(tmp_path: Path, shard: Path) -> None:
    heap = heap_of(str(shard), str(tmp_path / "y.npy"), "--to", "npy", "--no-verify")
    assert heap < MOST_HEAP


def test_long_packs_take_no_more(tmp_path: Path) -> None:
    """A whole row group is in memory during encoding, and a thousand long packs are a large one."""
    long = write_shard(tmp_path / "x", 32_768, 800)
    there = heap_of(str(long), str(tmp_path / "y"), "--to", "parquet")
    again = heap_of(str(tmp_path / "y"), str(tmp_path / "z"), "--to", "sft-idx")
    assert (there < MOST_HEAP, again < MOST_HEAP) == (True, True), (there, again)
