"""Memory use at the size of real corpora, in separate processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_sft_idx.shard import ShardWriter

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
pytestmark = pytest.mark.slow


def measure(program: str, *arguments: str) -> list[int]:
    """Run a program from the checkout and return the numbers that it prints."""
    source = "import sys; sys.path.insert(0, '.')\n" + program
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


def write_many(prefix: Path, packs: int, *, length: int = 3) -> None:
    """Write equal packs of one sequence, a million at a time."""
    with ShardWriter(prefix, token_dtype=np.uint16, durable=False) as writer:
        for first in range(0, packs, 10**6):
            count = min(10**6, packs - first)
            writer.add_packs(
                np.arange(count * length, dtype=np.int32) % 65536,
                np.zeros(count * length, np.uint8),
                np.zeros(count, np.int64),
                np.full(count, length),
                np.ones(count, np.int64),
            )


OPEN = """
import gc
from megatron_sft_idx.shard import Shard

def memory(kind):
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(kind))

def read(shard):
    for i in range(0, len(shard), len(shard) // 100):
        shard[i], shard.get(-i), shard.sequences(i)

small, large, backend = sys.argv[1:]
read(Shard(small, backend=backend))  # warm: code, caches of the allocator
gc.collect()
private, anonymous = memory("Private"), memory("Anonymous")
shard = Shard(large, backend=backend)
print(len(shard), memory("Private") - private)
read(shard)
# Pages of the maps are the page cache's, though they count as private while no other process has them mapped.
print(memory("Anonymous") - anonymous)
"""


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_opening_ten_million_packs_takes_under_a_mebibyte(tmp_path: Path, backend: str) -> None:
    write_many(tmp_path / "small", 1000)
    write_many(tmp_path / "large", 10**7)
    packs, private, anonymous = measure(OPEN, str(tmp_path / "small"), str(tmp_path / "large"), backend)
    assert packs == 10**7
    assert private < MIB
    assert anonymous < MIB


WRITE = """
import numpy as np
from megatron_sft_idx.shard import ShardWriter

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

def build(prefix, count):
    ids, starts = np.arange(20, dtype=np.int32), np.array([0, 7, 15])
    mask = np.ones(20, np.uint8)
    mask[[6, 14, 19]] = 0
    with ShardWriter(prefix, durable=False) as writer:
        for _ in range(count):
            writer.add_pack(ids, mask, starts)

build(sys.argv[1], 100)  # warm
before = peak()
build(sys.argv[2], 10**6)
print(peak() - before)
"""


def test_writing_a_million_packs_stays_under_64_mebibytes(tmp_path: Path) -> None:
    (extra,) = measure(WRITE, str(tmp_path / "small"), str(tmp_path / "large"))
    assert extra < 64 * MIB


RECOVER = """
from megatron_sft_idx.shard import recover

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

small, large = sys.argv[1:]
recover(small)  # warm
before = peak()
print(recover(large).num_packs)
print(peak() - before)
"""


def leave_many(prefix: Path, packs: int) -> None:
    """Leave an interrupted build of many small packs."""
    writer = ShardWriter(prefix, token_dtype=np.uint16, durable=False)
    for _ in range(0, packs, 10**4):
        ones = np.ones(10**4, np.int64)
        writer.add_packs(np.zeros(3 * 10**4, np.int32), np.zeros(3 * 10**4, np.uint8), 0 * ones, 3 * ones, ones)
    writer.flush()
    writer.suspend()


def test_recovering_ten_million_packs_stays_under_32_mebibytes(tmp_path: Path) -> None:
    leave_many(tmp_path / "small", 10**5)
    leave_many(tmp_path / "large", 10**7)
    packs, recovered = measure(RECOVER, str(tmp_path / "small"), str(tmp_path / "large"))
    assert packs == 10**7
    assert recovered < 32 * MIB
