"""Batches of more shards than may be mapped equal batches of mapped shards, also under limits of files and maps."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sample_packs import write_samples
from shard_folders import PACKS, is_held, rewritten, write

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard import shard_set
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage import Backend, ReopenedArray
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.sources import PlannedPacks, PlanOptions, StoredPacks


def batches_of(source: StoredPacks | PlannedPacks, order: list[list[int]]) -> list[dict[str, list[object]]]:
    assembler = BatchAssembler(source, 64)
    return [{name: tensor.tolist() for name, tensor in assembler.assemble(packs).items()} for packs in order]


def planned(shards: ShardSet) -> PlannedPacks:
    return PlannedPacks(shards, PlanOptions(32, seed=3))


@pytest.mark.parametrize("source_of", [StoredPacks, planned])
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_batches_are_those_of_mapped_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source_of: Callable[..., StoredPacks], backend: Backend
) -> None:
    write(tmp_path)
    write_samples(tmp_path / "weights", PACKS[:5], capacity=64, mask_dtype=np.float32)
    made = []
    for most in (10**6, 0):
        monkeypatch.setattr(shard_set, "MAPPED_SHARDS", most)
        source = source_of(ShardSet.open(tmp_path, backend=backend, same_capacity=False))
        order = [[i, source.num_packs - 1 - i, i // 2] for i in range(source.num_packs)]
        made.append(batches_of(source, [*order, []]))
    assert made[0] == made[1]


@pytest.mark.parametrize("source_of", [StoredPacks, planned])
def test_batches_of_many_shards(tmp_path: Path, many: str, source_of: Callable[..., StoredPacks]) -> None:
    write(tmp_path)
    reference = source_of(ShardSet.open(tmp_path))
    order = [[i, reference.num_packs - 1 - i] for i in range(reference.num_packs)]
    assert is_held(reference.shards) == many
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_set, "MAPPED_SHARDS", 10**6)
        mapped = source_of(ShardSet.open(tmp_path))
        assert batches_of(mapped, order) == batches_of(reference, order)
    loader = BatchLoader(BatchAssembler(pickle.loads(pickle.dumps(reference)), 64), order, copy=True)
    assert [batch["tokens"].tolist() for batch in loader] == [b["tokens"] for b in batches_of(reference, order)]


def test_a_batch_meets_a_changed_shard(tmp_path: Path, no_maps: None) -> None:
    write(tmp_path)
    source = StoredPacks(ShardSet.open(tmp_path, backend="reopen"))
    before = batches_of(source, [[0, 8, 1, 20]])
    rewritten(tmp_path / "s3.bin")
    rewritten(tmp_path / "s0.loss.bin")
    assert batches_of(source, [[0, 8, 1, 20]]) == before
    write_samples(tmp_path / "s3", PACKS[20:32], capacity=64, overwrite=True)
    with pytest.raises(FormatError, match=r"s3: .*another shard has replaced it"):
        batches_of(source, [[0, 8, 1, 20]])


def test_a_file_that_never_rests_is_an_error(tmp_path: Path, no_maps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    shards = ShardSet.open(tmp_path, backend="reopen")
    source = StoredPacks(shards)
    look = ReopenedArray.look_again
    monkeypatch.setattr(ReopenedArray, "look_again", lambda *all: (look(*all), rewritten(tmp_path / "s0.bin"))[0])
    batches_of(source, [[0]])
    rewritten(tmp_path / "s0.bin")
    with pytest.raises(FormatError, match="changed during each of"):
        shards[0]
    with pytest.raises(FormatError, match="changed during each of"):
        batches_of(source, [[0]])


# ---- under limits ----

_UNDER_LIMITS = """
import resource, sys
from pathlib import Path
import numpy as np
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.sources import StoredPacks

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
folder = sys.argv[1]
for backend in ("mmap", "reopen"):
    shards = ShardSet.open(folder, backend=backend)
    assert (shards.in_memory is None) == (backend == "reopen")
    order = np.random.default_rng(0).permutation(len(shards))
    kept = [shards[int(i)] for i in order]
    assembler = BatchAssembler(StoredPacks(shards), 64)
    total = sum(int(assembler.assemble(order[i : i + 8])["tokens"].sum()) for i in range(0, len(order), 8))
    assert total == sum(int(pack["input_ids"].sum()) for pack in kept)
    print(len(shards), total, Path("/proc/self/maps").read_text().count(folder + "/"))
"""


@pytest.mark.parametrize("shards", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_shards_need_no_maps_and_no_descriptors(tmp_path: Path, shards: int) -> None:
    for number in range(shards):
        write_samples(tmp_path / f"s{number}", [PACKS[number % len(PACKS)]], capacity=64)
    command = [sys.executable, "-W", "ignore", "-c", _UNDER_LIMITS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    total = sum(sum(PACKS[number % len(PACKS)].tokens) for number in range(shards))
    assert done.stdout.split() == [str(shards), str(total), "0"] * 2, done.stderr
