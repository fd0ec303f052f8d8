"""The heap of a full verification does not grow with the number of packs, of sequences, or the size of one pack."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_shard_scale import MIB, measure, write_many

from megatron_sft_idx.shard import ShardWriter

pytestmark = pytest.mark.slow

VERIFY = """
from megatron_sft_idx.check import verify_shard

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

assert verify_shard(sys.argv[1], full=True).ok  # warm
before = peak()
report = verify_shard(sys.argv[2], full=True)
print(len(report.findings), peak() - before)
"""
LIMIT = 64 * MIB


def test_ten_million_packs(tmp_path: Path) -> None:
    write_many(tmp_path / "small", 1000)
    write_many(tmp_path / "large", 10**7)
    findings, grown = measure(VERIFY, str(tmp_path / "small"), str(tmp_path / "large"))
    assert findings == 0
    assert grown < LIMIT


@pytest.mark.parametrize("sequences", [1, 50_000_000])
def test_one_pack_of_a_hundred_million_tokens(tmp_path: Path, sequences: int) -> None:
    write_many(tmp_path / "small", 1000)
    length = 100_000_000
    with ShardWriter(tmp_path / "large", token_dtype=np.uint16, durable=False) as writer:
        starts = np.arange(0, length, length // sequences)
        writer.add_pack(np.zeros(length, np.uint16), np.zeros(length, np.uint8), starts)
    findings, grown = measure(VERIFY, str(tmp_path / "small"), str(tmp_path / "large"))
    assert findings == 0
    assert grown < LIMIT


def test_a_finding_in_every_token(tmp_path: Path) -> None:
    write_many(tmp_path / "small", 1000)
    write_many(tmp_path / "large", 10**7)
    Path(tmp_path / "large.loss.bin").write_bytes(b"\7" * 3 * 10**7)
    findings, grown = measure(VERIFY, str(tmp_path / "small"), str(tmp_path / "large"))
    assert findings == 10 + 10 + 1  # P6, P7 and F3; the header's counts of masks are right
    assert grown < LIMIT
