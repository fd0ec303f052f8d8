"""Training with every read backend gives the same batches, and blocks are read ahead."""

from __future__ import annotations

import argparse
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blends import build, config_of, digest_of, key_of, pack_keys, write_packs
from shard_folders import write

from megatron_sft_idx.cli.options import add_read_options, read_options
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage import BackendName, ReadOptions
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.provider import config_from_args
from megatron_sft_idx.training.rows import rows_of
from megatron_sft_idx.training.sources import PlannedPacks, PlanOptions, StoredPacks

OPTIONS = [
    ReadOptions("mmap", advice="random"),
    ReadOptions("pread"),
    ReadOptions("pread", advice="random"),
    ReadOptions("reopen"),
    ReadOptions("reopen", advice="random"),
]


def planned(shards: ShardSet) -> PlannedPacks:
    return PlannedPacks(shards, PlanOptions(32, seed=3))


def loaded(source: StoredPacks | PlannedPacks, order: list[list[int]], **options: Any) -> list[dict[str, list[Any]]]:
    loader = BatchLoader(BatchAssembler(source, 64, **options), order)
    return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in loader]


@pytest.mark.parametrize("source_of", [StoredPacks, planned])
@pytest.mark.parametrize("options", OPTIONS)
def test_batches_are_the_same_whatever_the_backend(
    tmp_path: Path, source_of: Callable[..., StoredPacks], options: ReadOptions
) -> None:
    write(tmp_path)
    expected = source_of(ShardSet.open(tmp_path))
    order = [[i, expected.num_packs - 1 - i, i // 2] for i in range(expected.num_packs)]
    source = source_of(ShardSet.open(tmp_path, backend=options))
    for _ in range(2):
        assert loaded(source, order) == loaded(expected, order)
    assert loaded(pickle.loads(pickle.dumps(source)), order) == loaded(expected, order)


@pytest.mark.parametrize("backend", ["mmap", "pread", "reopen"])
def test_shards_of_several_dtypes_make_one_blend(tmp_path: Path, backend: BackendName) -> None:
    kinds = itertools.product([np.uint16, np.int32], [np.uint8, np.float32])
    paths = [
        write_packs(tmp_path / f"x{i}", 6, i, token_dtype=token_dtype, mask_dtype=mask_dtype)
        for i, (token_dtype, mask_dtype) in enumerate(kinds)
    ]
    blend = build(config_of((paths, None), read=ReadOptions(backend)))[0]
    rows = rows_of(blend).__getitems__(range(24))
    assert {key_of(row) for row in rows} == {key for i in range(4) for key in pack_keys(6, i)}
    for i, row in enumerate(rows):
        assert digest_of(row) == digest_of({name: blend[i][name] for name in row})


def test_megatrons_flag_against_maps_reads_by_pread(tmp_path: Path) -> None:
    prefix = write_packs(tmp_path / "x", 40)
    config = config_of(prefix, split="80,20,0", mmap_bin_files=False)
    assert config.read == ReadOptions("pread")
    for found, expected in zip(
        build(config, (60, 8, 0))[:2], build(config_of(prefix, split="80,20,0"), (60, 8, 0))[:2], strict=True
    ):
        assert found.source.shards.shard(0).backend == "pread"
        assert [digest_of(found[i]) for i in range(len(found))] == [digest_of(expected[i]) for i in range(len(found))]
    kept = config_of(prefix, mmap_bin_files=False, read=ReadOptions("reopen"))
    assert kept.read.backend == "reopen"
    maps: Any = "os"
    assert config_of(prefix, mmap_bin_files=False, read=maps).read.backend == "pread"
    with pytest.raises(FormatError, match="read: backend 'direct', choose one of"):
        config_of(prefix, read=ReadOptions("direct"))  # type: ignore[arg-type]


def test_megatrons_arguments_reach_the_configuration(tmp_path: Path) -> None:
    prefix = write_packs(tmp_path / "x", 4)
    args = argparse.Namespace(
        seed=1, seq_length=32, data_path=[prefix], split="1,0,0", data_cache_path=None, mmap_bin_files=False
    )
    assert config_from_args(args).read.backend == "pread"
    args.mmap_bin_files = True
    assert config_from_args(args).read.backend == "mmap"


# ---- the command line ----


def parsed(*arguments: str) -> ReadOptions:
    parser = argparse.ArgumentParser()
    add_read_options(parser)
    return read_options(parser.parse_args(arguments), parser)


def test_options_are_parsed() -> None:
    assert parsed() == ReadOptions()
    assert parsed("--no-mmap-bin-files") == ReadOptions("pread")
    assert parsed("--no-mmap-bin-files", "--read-backend", "reopen") == ReadOptions("reopen")
    assert parsed("--read-backend", "os").backend == "mmap"
    full = parsed("--read-backend", "reopen", "--read-advice", "random", "--read-huge-pages")
    assert full == ReadOptions("reopen", advice="random", huge_pages=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--read-backend", "direct"], "--read-backend: backend 'direct', choose one of mmap, os, pread, reopen"),
        (["--read-backend", "process"], "--read-backend: backend 'process' was removed"),
        (["--read-advice", "willneed"], "invalid choice: 'willneed'"),
        (["--no-mmap-bin-files", "--read-backend", "os"], "leave one of them out"),
    ],
)
def test_options_that_cannot_be_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
