"""Two processes with torch.distributed build their data sets together or fail together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blends import CAPACITY, build, config_of, digest_of, packs_of, write_documents, write_packs
from sample_packs import write_samples

# Each process does all jobs, because starting one takes seconds.
PROGRAM = """
import json, sys
import torch
from argparse import Namespace
from datetime import timedelta
from blends import build, config_of, digest_of
from megatron_sft_idx.training.provider import build_datasets
from megatron_sft_idx.training.rows import PackedBatchSampler

meet, rank, jobs = json.loads(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=timedelta(seconds=300))
found = {}
for name, job in jobs.items():
    try:
        if "args" in job:
            cache = job["args"]["data_cache_path"].format(rank=rank)
            datasets = build_datasets(Namespace(**{**job["args"], "data_cache_path": cache}), job["sizes"])
        else:
            datasets = build(config_of(job["blend"], job["split"], **job["options"]), job["sizes"])
    except ValueError as error:
        found[name] = {"error": str(error)}
        continue
    mine = PackedBatchSampler(
        datasets[0],
        consumed_samples=job["consumed"],
        micro_batch_size=2,
        data_parallel_rank=rank,
        data_parallel_size=2,
    )
    samples = [sample for batch in mine for sample in batch]
    rows = [digest_of(datasets[0][sample]) for sample in samples]
    found[name] = {"samples": samples, "rows": rows, "sizes": [dataset and len(dataset) for dataset in datasets]}
print(json.dumps(found))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def run(folder: Path, jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Run jobs on two ranks. Return the results of each rank, by job."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps([f"file://{folder}/meet", rank, jobs])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


# Caches of two ranks: one folder; a folder per node; and the latter again, with the files of the first run.
CACHES = {"shared": "shared", "of nodes": "node-{rank}", "of nodes again": "node-{rank}"}
BLEND_SIZES: dict[str, Any] = {"sizes": [60, 8, 0], "consumed": 0}


def arguments(folder: Path, cache: str) -> dict[str, Any]:
    """Return Megatron's arguments for the blend."""
    paths = ["0.7", str(folder / "a"), "0.3", str(folder / "b")]
    path = {"data_path": paths, "split": "90,10,0", "data_cache_path": str(folder / cache)}
    return {**path, "seq_length": CAPACITY, "seed": 7}


def mixed(folder: Path, cache: str) -> dict[str, Any]:
    """Return the same with pretraining data."""
    return {
        **arguments(folder, f"mixed-{cache}"),
        "data_path": ["0.7", str(folder / "a"), "0.3", f"pretrain:{folder}/web"],
    }


def mixed_sets(folder: Path) -> dict[str, Any]:
    sets = [([str(folder / "a"), f"pretrain:{folder}/web"], [0.7, 0.3]), None, None]
    return {"blend_per_split": sets, "path_to_cache": str(folder / "mixed")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_packs(folder / "a", 30, 0)
    write_packs(folder / "b", 50, 1)
    write_samples(folder / "corpus", packs_of(80), capacity=CAPACITY)
    write_documents(folder / "web", [40] * 50)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    a, b, corpus = (str(folder / name) for name in ("a", "b", "corpus"))
    cached = {"path_to_cache": str(folder / "cache"), "num_dataset_builder_threads": 2}
    blend = {"blend": ([a, b], [0.7, 0.3]), "split": "90,10,0", "sizes": [60, 8, 0], "options": cached, "consumed": 0}
    sets = {"blend_per_split": [([a, b], [0.7, 0.3]), ([a, b], None), None]}
    each = {"blend": None, "split": None, "sizes": [60, 40, 0], "consumed": 0}
    single = {"blend": ([corpus], None), "split": "1,0,0", "sizes": [64, 0, 0], "consumed": 0}
    jobs = {
        "blend": blend,
        "resumed": {**blend, "consumed": 24},
        "each": {**each, "options": {**cached, **sets}},
        "each, fast": {**each, "options": {**cached, **sets, "fast_cache_load": True, "defer_npy_index_mmap": True}},
        "planned": {**single, "options": {**cached, "index_only_packing": True}},
        "too long": {**single, "options": {"sequence_length": 8}},
        "too long to pack": {**single, "options": {"sequence_length": 8, "index_only_packing": True}},
        "after": {**single, "options": {}},
        **{name: {"args": arguments(folder, cache), **BLEND_SIZES} for name, cache in CACHES.items()},
        **{f"mixed, {name}": {"args": mixed(folder, cache), **BLEND_SIZES} for name, cache in CACHES.items()},
        "mixed, fast": {
            "blend": None, "split": None, "sizes": [30, 0, 0], "consumed": 0,
            "options": {**cached, **mixed_sets(folder), "fast_cache_load": True, "defer_npy_index_mmap": True},
        },
    }  # fmt: skip
    jobs["mixed, slow"] = {**jobs["mixed, fast"], "options": {**cached, **mixed_sets(folder)}}
    jobs["mixed, fast"] = jobs.pop("mixed, fast")  # reads the cache that "mixed" wrote
    return run(folder, jobs)


def of_all(ranks: list[dict[str, Any]], job: str) -> dict[int, str]:
    """Return the digest of each sample's row, from whichever rank read it."""
    pairs = [pair for rank in ranks for pair in zip(rank[job]["samples"], rank[job]["rows"], strict=True)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def rows_of(dataset: Any) -> dict[int, str]:
    return {i: digest_of(dataset[i]) for i in range(len(dataset))}


def test_a_cached_blend_is_the_same_on_two_ranks_as_on_one(folder: Path, ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["blend"]["sizes"] == ranks[1]["blend"]["sizes"]
    names = [path.name for path in (folder / "cache").glob("*-BlendedDataset-train-dataset_index.npy")]
    assert len(names) == 2  # for this job and for "each"
    found = of_all(ranks, "blend")
    paths = [str(folder / "a"), str(folder / "b")]
    alone = build(config_of((paths, [0.7, 0.3]), "90,10,0"), (60, 8, 0))[0]
    assert found == rows_of(alone)
    assert of_all(ranks, "resumed") == {i: row for i, row in found.items() if i >= 24}


@pytest.mark.parametrize("cache", CACHES)
def test_a_blend_needs_no_cache_that_nodes_share(folder: Path, ranks: list[dict[str, Any]], cache: str) -> None:
    assert of_all(ranks, cache) == of_all(ranks, "blend")
    left = sorted(path.name for path in (folder / CACHES[cache].format(rank=0)).iterdir())
    assert len([name for name in left if name.endswith("-BlendedDataset-train-dataset_index.npy")]) == 1
    assert not [name for name in left if "BlendedDataset" not in name]  # no files of the search are left


def test_the_ways_to_load_caches_fast_give_the_same_rows(ranks: list[dict[str, Any]]) -> None:
    assert of_all(ranks, "each") == of_all(ranks, "each, fast")
    assert ranks[0]["each"]["sizes"] == ranks[0]["each, fast"]["sizes"]


def test_two_ranks_share_one_packing_plan(folder: Path, ranks: list[dict[str, Any]]) -> None:
    assert len(list((folder / "cache").glob("sft-plan-*.bin"))) == 1
    alone = build(config_of(str(folder / "corpus"), index_only_packing=True), (64, 0, 0))[0]
    assert of_all(ranks, "planned") == rows_of(alone)


@pytest.mark.parametrize("job", ["too long", "too long to pack"])
def test_an_error_reaches_every_rank_and_nobody_waits(ranks: list[dict[str, Any]], job: str) -> None:
    assert "8" in ranks[0][job]["error"]
    assert ranks[0][job] == ranks[1][job]
    assert len(of_all(ranks, "after")) == 64


def test_pretraining_data_is_the_same_on_two_ranks_as_on_one(folder: Path, ranks: list[dict[str, Any]]) -> None:
    found, paths = of_all(ranks, "mixed, shared"), [str(folder / "a"), f"pretrain:{folder}/web"]
    alone = build(config_of((paths, [0.7, 0.3]), "90,10,0", path_to_cache=str(folder / "alone")), (60, 8, 0))[0]
    assert found == rows_of(alone)
    assert of_all(ranks, "mixed, slow") == of_all(ranks, "mixed, fast")


@pytest.mark.parametrize("cache", ["of nodes", "of nodes again"])
def test_pretraining_data_needs_a_cache_that_nodes_share(ranks: list[dict[str, Any]], cache: str) -> None:
    for rank in ranks:
        assert "use a folder that all nodes share" in rank[f"mixed, {cache}"]["error"]
