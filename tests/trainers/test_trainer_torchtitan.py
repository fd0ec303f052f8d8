"""torchtitan: our data set in its own data loader, resumed from its state, and boundaries found by its attention."""

from __future__ import annotations

import sys
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from doc_blocks import blocks_of
from trainer_shards import SEQ_LENGTH, Trained, told, trained_of

from megatron_sft_idx import Shard

pytest.importorskip("torchtitan", reason="torchtitan is not installed; make test-trainers has an environment for it")

from torchtitan.models.common.attention import create_varlen_metadata_for_document

SHARED = {"dp_world_size": 2, "tokenizer": None, "seq_len": SEQ_LENGTH, "local_batch_size": 2}


def loader(prefix: Path, rank: int, **options: Any) -> Any:
    """Return the loader of the page, built as in torchtitan's trainer."""
    (block,) = (block for block in blocks_of("docs/trainers.md") if block.kind == "python torchtitan")
    module = sys.modules.setdefault("pack_loader", ModuleType("pack_loader"))  # dataclasses look up names in it
    exec(block.text, vars(module))
    return module.PackLoader.Config(dataset_path=str(prefix), **options).build(dp_rank=rank, **SHARED)


def sequences_of(batch: Any) -> list[list[Trained]]:
    """Return the sequences of each row of a batch, without padding."""
    inputs, labels = batch
    rows = []
    for ids, positions, row_labels in zip(inputs["input"], inputs["positions"], labels, strict=True):
        assert {ids.dtype, positions.dtype, row_labels.dtype} == {torch.int64}
        bounds = create_varlen_metadata_for_document(positions[None]).cu_seq_q.tolist()
        rows.append([])
        for start, stop in pairwise(bounds):
            own_ids, own_labels = ids[start:stop].tolist(), row_labels[start:stop].tolist()
            assert own_labels[-1] == -100
            assert all(b in (-100, a) for a, b in zip(own_ids[1:], own_labels, strict=False))
            rows[-1].append(Trained(own_ids, [False, *(label != -100 for label in own_labels[:-1])]))
    return rows


def rows_of_shard(prefix: Path) -> list[list[Trained]]:
    """Return the sequences of each pack, with padding as one more."""
    rest, rows = iter(trained_of(prefix)), []
    for pack in Shard(prefix):
        rows.append(list(islice(rest, len(pack["seq_boundaries"]) - 1)))
        if padding := SEQ_LENGTH - len(pack["input_ids"]):
            rows[-1].append(Trained([0] * padding, [False] * padding))
    return rows


def epoch(prefix: Path) -> list[list[Trained]]:
    """Return the rows that both ranks get in one epoch, sorted by their first token ids."""
    packs = len(Shard(prefix))
    taken = [list(islice(loader(prefix, rank), packs)) for rank in (0, 1)]
    rows = [[row for batch in batches for row in sequences_of(batch)] for batches in taken]
    mixed = [row for both in zip(*rows, strict=True) for row in both]
    return sorted(mixed[:packs])


@pytest.mark.parametrize("workers", [0, 2])
def test_torchtitan_goes_on_where_it_was(shards: tuple[Path, Path], workers: int) -> None:
    whole = [sequences_of(batch) for batch in islice(loader(shards[0], 1, num_workers=workers), 9)]
    first = loader(shards[0], 1, num_workers=workers)
    taken = iter(first)
    begun = [sequences_of(next(taken)) for _ in range(4)]
    second = loader(shards[0], 1, num_workers=workers)
    second.load_state_dict(first.state_dict())
    assert begun + [sequences_of(batch) for batch in islice(second, 5)] == whole


def test_torchtitan_trains_what_the_shard_says(shards: tuple[Path, Path]) -> None:
    train, later = shards
    assert epoch(train) == sorted(rows_of_shard(train))
    assert epoch(later) != sorted(rows_of_shard(train))
    told("torchtitan", trained_of(train))
