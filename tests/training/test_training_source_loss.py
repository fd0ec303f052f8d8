"""The loss by source equals the loss of the file's single sequences, for any rows, shards and attention."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from blends import build, config_of
from columned import unchecked
from gpt_model import model_inputs, seed_everything
from sample_packs import Sample
from torch.utils.data import default_collate
from training_twin import batch_of, lone_process

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.losses import file_names, files_of, mean_by_file, sums_by_file
from megatron_sft_idx.training.rows import rows_of
from megatron_sft_idx.training.sources import PlannedPacks, PlanOptions, StoredPacks

LENGTH = 64
A, B, C = ({"name": f"{letter}.jsonl", "fingerprint": letter * 32} for letter in "abc")
# The tables of two shards, with common files at different places.
TABLES = [[A, B], [C, B, A]]


def write_shards(folder: Path, packs: int = 6) -> None:
    """Write two shards in which the first token of a sequence is the number of its file: 1, 2 or 3."""
    rng = np.random.default_rng(0)
    for number, table in enumerate(TABLES):
        spec = ColumnSpec("sequence", np.uint32, 2, metadata={"files": table})
        with ShardWriter(folder / f"x-{number}", capacity=LENGTH, durable=False, columns={"source": spec}) as writer:
            row = 0
            for _ in range(packs):
                sizes = rng.integers(2, 13, rng.integers(2, 6)).tolist()
                files = rng.integers(0, len(table), len(sizes))
                bounds = np.cumsum([0, *sizes]).tolist()
                ids, mask = rng.integers(4, 200, bounds[-1]), rng.integers(0, 2, bounds[-1])
                ids[bounds[:-1]] = ["abc".index(table[file]["name"][0]) + 1 for file in files]
                pack = Sample(ids.tolist(), mask.tolist(), bounds[:-1])
                source = np.stack([files, np.arange(row, row + len(files))], 1)
                writer.add_pack(pack.tokens, pack.label_mask, pack.starts, columns={"source": source})
                row += len(files)


def sequences(batch: dict[str, torch.Tensor]) -> Iterator[tuple[int, slice]]:
    """Yield row and slice of each sequence."""
    bounds = batch.get("cu_seqlens_padded", batch["cu_seqlens"])
    for row, starts in enumerate(bounds.tolist()):
        for a, b in pairwise(starts):
            if a < b and batch["tokens"][row, a] in (1, 2, 3):  # the tail begins with padding
                yield row, slice(a, b)


@pytest.mark.parametrize("planned", [False, True])
def test_members_of_a_blend_number_files_as_the_blend_does(tmp_path: Path, planned: bool) -> None:
    """Also if a DataLoader reads rows one by one, and in worker processes."""
    write_shards(tmp_path)
    paths = [str(tmp_path / "x-1"), str(tmp_path / "x-0")]
    options: dict[str, Any] = {"sequence_length": LENGTH, "columns": ("source",), "index_only_packing": planned}
    blend = build(config_of((paths, None), **options))[0]
    names = file_names(rows_of(blend).assembler.source_files)
    assert names == ["c.jsonl", "b.jsonl", "a.jsonl"]
    members = [*blend.datasets, *(pickle.loads(pickle.dumps(member)) for member in blend.datasets)]
    for rows in (blend, *members):
        batch = default_collate([rows[i] for i in range(len(rows))])
        files = files_of(batch)
        for row, place in sequences(batch):
            first = int(batch["tokens"][row, place.start])
            assert {names[file] for file in files[row, place].tolist()} == {"abc"[first - 1] + ".jsonl"}


@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("planned", [False, True])
def test_sums_are_those_of_each_files_sequences(tmp_path: Path, planned: bool, multiple: int) -> None:
    write_shards(tmp_path)
    shards = ShardSet.open(tmp_path, columns=("source",))
    options = PlanOptions(LENGTH, multiple)
    source = PlannedPacks(shards, options) if planned else StoredPacks(shards)
    length = LENGTH + 8 * (multiple - 1)
    assembler = BatchAssembler(source, length, sequence_multiple=multiple, columns=("source",))
    assert assembler.source_files == [A, B, C]
    names = file_names(assembler.source_files)
    assert names == ["a.jsonl", "b.jsonl", "c.jsonl"]
    batch = assembler.assemble(np.random.default_rng(1).permutation(source.num_packs))
    losses = torch.rand(batch["tokens"].shape).masked_fill(batch["loss_mask"] == 0, torch.inf)
    found = mean_by_file(sums_by_file(losses, batch["loss_mask"], files_of(batch), 3), names)
    slow: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, place in sequences(batch):
        name = names[int(batch["tokens"][row, place.start]) - 1]
        slow[name] += zip(losses[row, place].tolist(), batch["loss_mask"][row, place].tolist(), strict=True)
    assert sum(len(values) for values in slow.values()) >= shards.total("num_tokens")
    for name, values in slow.items():
        trained = [(loss, weight) for loss, weight in values if weight]
        expected = sum(loss * weight for loss, weight in trained) / sum(weight for _, weight in trained)
        assert found[name] == pytest.approx(expected, rel=1e-6)


def test_rows_stay_what_the_shards_say(tmp_path: Path) -> None:
    """With several tables, the file's number refers to the joined table, and the row's number stays.

    With one, both stay.
    """
    write_shards(tmp_path)
    for path, tables in ((tmp_path, TABLES), (tmp_path / "x-1", TABLES[1:])):
        shards = ShardSet.open(path, columns=("source",))
        assembler = BatchAssembler(StoredPacks(shards), LENGTH, columns=("source",))
        batch, files = assembler.assemble(range(len(shards))), assembler.source_files
        at = 0
        for prefix, table in zip(shards.prefixes, tables, strict=True):
            for pack in Shard(prefix, columns=("source",)):
                own = pack["source"].tolist()  # type: ignore[typeddict-item]
                made = batch["source"][at].tolist()
                assert [(files[file], row) for file, row in made[: len(own)]] == [(table[f], row) for f, row in own]
                assert not any(map(any, made[len(own) :]))
                at += 1


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    for name, spec in (
        ("kind", ColumnSpec("sequence", np.int32, 2, metadata={"files": [A]})),
        ("table", ColumnSpec("sequence", np.uint32, 2)),
    ):
        options = {"capacity": 8, "durable": False, "columns": {"source": spec}}
        with unchecked(), ShardWriter(tmp_path / name, **options) as writer:
            writer.add_pack([1, 2], [1, 0], [0], columns={"source": [[5, 6]]})
        assembler = BatchAssembler(
            StoredPacks(ShardSet.open(tmp_path / name, columns=("source",))), 8, columns=("source",)
        )
        assert assembler.assemble([0])["source"].tolist() == [[[5, 6]] + [[0, 0]] * (assembler.width - 2)]
        with pytest.raises(FormatError, match="column source: expected two uint32 per sequence and a table of files"):
            _ = assembler.source_files
    plain = BatchAssembler(StoredPacks(ShardSet.open(tmp_path / "kind")), 8)
    with pytest.raises(FormatError, match="the batch has no column source"):
        _ = plain.source_files


def test_files_of_one_name_are_told_apart() -> None:
    assert file_names([{"name": "a"}, {"name": "b"}, {"name": "a"}]) == ["a (0)", "b", "a (2)"]
    assert file_names([{"name": "a"}, {"name": "a"}, {"name": "a (0)"}]) == ["a (0)", "a (1)", "a (0) (2)"]
    assert mean_by_file(torch.tensor([[2.0, 4.0], [0.0, 0.0]]), ["a", "b"]) == {"a": 0.5}


# ---- the script ----


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with lone_process() as module:
        yield module


def options(folder: Path, *more: object) -> list[str]:
    size = ["--hidden-size", 32, "--seq-length", LENGTH, "--vocab-size", 256, "--log-interval", 1000]
    taken = ["--train-iters", 3, "--global-batch-size", 4, "--loss-by-source", "--data-path", folder]
    return [str(option) for option in (*size, *taken, *more)]


@pytest.mark.parametrize("attention", ["thd", "mask", "unpacked"])
def test_the_script_tells_the_loss_of_each_file(script: ModuleType, tmp_path: Path, attention: str) -> None:
    """It equals the model's loss on single sequences of each file."""
    write_shards(tmp_path)
    assembler = BatchAssembler(StoredPacks(ShardSet.open(tmp_path, columns=("source",))), LENGTH, columns=("source",))
    batches = [assembler.assemble(range(i, i + 2)) for i in (0, 6)]
    args = script.parse_arguments([*options(tmp_path, "--attention", attention), "--micro-batch-size", "2"])
    seed_everything(args.seed)
    model = script.build_model(args)
    by_source = dict.fromkeys(file_names(assembler.source_files), 0.0)
    with torch.no_grad():
        loss = script.run_step(args, model, iter(batches), forward_only=True, by_source=by_source)
        total = np.zeros((3, 2))
        for batch in batches:
            for row, place in sequences(batch):
                ids, mask = batch["tokens"][row, place].numpy(), batch["loss_mask"][row, place].numpy()
                inputs, loss_mask = model_inputs(batch_of([[(ids, mask)]], len(ids), 3), attention)
                alone = (model.module(**inputs) * loss_mask).sum(), loss_mask.sum()
                total[int(ids[0]) - 1] += [float(value) for value in alone]
    assert list(by_source.values()) == pytest.approx((total[:, 0] / total[:, 1]).tolist(), rel=1e-5)
    assert loss == pytest.approx(total[:, 0].sum() / total[:, 1].sum(), rel=1e-5)


def test_metrics_hold_it_for_every_step(script: ModuleType, tmp_path: Path) -> None:
    write_shards(tmp_path)
    log = tmp_path / "metrics.jsonl"
    script.pretrain(script.parse_arguments(options(tmp_path, "--metrics", log)))
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 3
    told = [{name: value for name, value in line.items() if name.startswith("loss of ")} for line in lines]
    for line, by_file in zip(lines, told, strict=True):
        assert min(by_file.values()) <= line["loss"] <= max(by_file.values())
    # A step reports no loss for a file that it does not train on; over an epoch, all files occur.
    assert {name for by_file in told for name in by_file} == {f"loss of {letter}.jsonl" for letter in "abc"}


def test_without_the_column_the_script_says_so(script: ModuleType, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", capacity=8, durable=False) as writer:
        writer.add_pack([1, 2], [1, 0], [0])
    with pytest.raises(ShardNotFoundError, match=r"x.*column source"):
        script.pretrain(script.parse_arguments(options(tmp_path)))
