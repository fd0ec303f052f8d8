"""With a memory limit smaller than the shard, the second epoch reads the disk again."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from bench_read import BenchOptions, bench_read
from medium import memory_limit
from read_worker import Setting

from megatron_sft_idx.shard import ShardWriter

LENGTH, PACKS, LIMIT = 4096, 6000, 32 << 20


@pytest.mark.slow
def test_over_a_limit_second_epochs_read_the_disk_again(tmp_path: Path) -> None:
    mask = np.zeros(LENGTH, np.uint8)
    with ShardWriter(tmp_path / "x", token_dtype=np.int32, capacity=LENGTH, durable=False) as writer:
        for _ in range(PACKS):
            writer.add_pack(np.zeros(LENGTH, np.int32), mask, [0])
    with ExitStack() as stack:
        try:
            limit = stack.enter_context(memory_limit(LIMIT))
        except OSError as refused:
            pytest.skip(str(refused))
        settings = (Setting("pread", "random"), Setting(advice="random", schedule=True))
        report = bench_read(str(tmp_path / "x"), BenchOptions(packs=PACKS, settings=settings, limit=limit))
    if not report.cold:
        pytest.skip("the test folder's file system keeps its cache")
    for one in report.settings:
        assert one.refused is None
        (run,) = one.rounds
        assert run.second.nbytes > 3 * LIMIT
        assert run.second.disk_nbytes > 0.5 * run.second.nbytes
    assert not report.subject.fits
