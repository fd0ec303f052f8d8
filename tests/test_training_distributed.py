"""Two processes with torch.distributed build one data set together, or fail together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blends import CAPACITY, build, config_of, keys_of, packs_of, write_packs
from packs import write_samples

from megatron_sft_idx.training.sampler import PackedBatchSampler

PROGRAM = """
import json, sys
import torch
from datetime import timedelta
from blends import build, config_of, keys_of
from megatron_sft_idx.training.sampler import PackedBatchSampler

job = json.loads(sys.argv[1])
torch.distributed.init_process_group(
    "gloo", init_method=job["meet"], rank=job["rank"], world_size=2, timeout=timedelta(seconds=60)
)
try:
    datasets = build(config_of(job["blend"], job["split"], **job["options"]), job["sizes"])
except ValueError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
train = datasets[0]
mine = PackedBatchSampler(
    train, consumed_samples=job["consumed"], micro_batch_size=2, data_parallel_rank=job["rank"], data_parallel_size=2
)
samples = [sample for batch in mine for sample in batch]
print(json.dumps({"samples": samples, "keys": keys_of(train, samples), "sizes": [d and len(d) for d in datasets]}))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def run(folder: Path, **job: Any) -> list[dict[str, Any]]:
    """What each of two ranks printed."""
    meet = folder / "meet"
    meet.unlink(missing_ok=True)
    processes = []
    for rank in range(2):
        whole = {"meet": f"file://{meet}", "rank": rank, "consumed": 0, "split": None, "options": {}, **job}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(whole)]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
    found = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


def test_a_cached_blend_is_the_same_on_two_ranks_and_resumes_on_one(tmp_path: Path) -> None:
    paths = [write_packs(tmp_path / "a", 30, 0), write_packs(tmp_path / "b", 50, 1)]
    cache = str(tmp_path / "cache")
    job = {"blend": (paths, [0.7, 0.3]), "split": "90,10,0", "sizes": [60, 8, 0]}
    options = {"path_to_cache": cache, "num_dataset_builder_threads": 2}
    ranks = run(tmp_path, **job, options=options)
    assert [rank["sizes"] for rank in ranks] == [[60, 8, None]] * 2
    assert len(list((tmp_path / "cache").glob("*-BlendedDataset-train-dataset_index.npy"))) == 1
    found = {s: tuple(key) for rank in ranks for s, key in zip(rank["samples"], rank["keys"], strict=True)}
    alone = build(config_of((paths, [0.7, 0.3]), "90,10,0"), (60, 8, 0))[0]
    assert [found[i] for i in range(60)] == keys_of(alone)
    again = run(tmp_path, **job, options=options, consumed=24)
    rest = {s: tuple(key) for rank in again for s, key in zip(rank["samples"], rank["keys"], strict=True)}
    assert rest == {i: found[i] for i in range(24, 60)}


def test_two_ranks_share_one_packing_plan(tmp_path: Path) -> None:
    write_samples(tmp_path / "a", packs_of(80), capacity=CAPACITY)
    cache = tmp_path / "cache"
    options = {"index_only_packing": True, "path_to_cache": str(cache)}
    ranks = run(tmp_path, blend=([str(tmp_path / "a")], None), split="1,0,0", sizes=[64, 0, 0], options=options)
    assert len(list(cache.glob("sft-plan-*.bin"))) == 1
    found = {s: tuple(key) for rank in ranks for s, key in zip(rank["samples"], rank["keys"], strict=True)}
    alone = build(config_of(str(tmp_path / "a"), index_only_packing=True), (64, 0, 0))[0]
    assert [found[i] for i in range(64)] == keys_of(alone)
    assert PackedBatchSampler(
        alone, consumed_samples=0, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1
    ).total_samples == len(found)


@pytest.mark.parametrize("index_only", [False, True])
def test_an_error_reaches_every_rank(tmp_path: Path, index_only: bool) -> None:
    prefix = write_packs(tmp_path / "a", 30)
    options = {"sequence_length": 8, "index_only_packing": index_only}
    ranks = run(tmp_path, blend=([prefix], None), split="1,0,0", sizes=[8, 0, 0], options=options)
    assert all("8" in rank["error"] for rank in ranks)
    assert ranks[0] == ranks[1]
