"""Run tools/pretrain_sft.py and keep its batches. As a program under torchrun, execute the runs of a JSON file.

A run has ``options`` for the script. It may also have ``rows``, another source of the same packs, which are read in the
order of ``--data-path``: ``legacy`` with its file, or ``planned`` with the prefix of the unpacked shard.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpt_model import connect, megatron_device, seed_everything
from training_twin import pretrain_script

from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.provider import build_datasets
from megatron_sft_idx.training.rows import PackedRows
from megatron_sft_idx.training.sources import LegacySource, PlannedPacks, PlanOptions

Rows = list[dict[str, np.ndarray]]


class Curve(NamedTuple):
    """The result of a run: the loss of every step, and every row that this process trained on."""

    losses: list[float]
    rows: Rows


class KilledError(Exception):
    """Raised to end a run as a kill would."""


def run(
    script: Any, options: list[str], rows: list[str] | None = None, kill_at: int | None = None, diary: str | None = None
) -> Curve:
    """Train with these options.

    Args:
        script: tools/pretrain_sft.py.
        options: options of the script.
        rows: another source of the same packs.
        kill_at: number of the micro-batch at which the run dies.
        diary: a file to which the tokens of each micro-batch up to the last trained one are appended, one line of JSON
            each. The number of the rank is appended to its name.
    """
    args = script.parse_arguments(options)
    seen: Rows = []

    def observe(batch: dict[str, torch.Tensor]) -> None:
        count = len(batch["tokens"])
        if diary is not None:
            write_diary(f"{diary}.{torch.distributed.get_rank()}", batch)
        seen.extend({key: value[i].numpy().copy() for key, value in batch.items()} for i in range(count))
        if kill_at is not None and len(seen) > kill_at:
            raise KilledError

    try:
        losses = script.pretrain(args, observe) if rows is None else from_rows(script, args, rows, observe)
    except KilledError:
        losses = []
    return Curve(losses, seen)


def write_diary(path: str, batch: dict[str, torch.Tensor]) -> None:
    trained = [int(np.flatnonzero(mask)[-1]) + 2 if mask.any() else 0 for mask in batch["loss_mask"].numpy()]
    lines = [row[:end].tolist() for row, end in zip(batch["tokens"], trained, strict=True)]
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(lines) + "\n")


def from_rows(script: Any, args: Any, rows: list[str], observe: Any) -> list[float]:
    samples = args.train_iters * args.global_batch_size
    dataset = build_datasets(args, [samples, 0, 0])[0]
    stored, args.vocab_size = dataset.rows, script.vocabulary_of(dataset)
    kind, path = rows
    source: Any
    if kind == "legacy":
        source = LegacySource(path, capacity=args.seq_length, pad_id=stored.source.pad_id)
    else:
        source = PlannedPacks(ShardSet.open(path, same_capacity=False), PlanOptions(args.seq_length))
    assert source.num_packs == stored.source.num_packs
    data = PackedRows(source, 0, "train", samples, **stored.shape)
    data.order = stored.order
    seed_everything(args.seed)
    model = script.build_model(args)
    return script.train(
        args, model, script.build_optimizer(args, model), script.load_batches(args, data, 0), observe=observe
    )


def main(plan: str, out: str) -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("megatron_sft_idx").setLevel(logging.INFO)
    with megatron_device():
        connect()
        parallel_state.initialize_model_parallel()
        for name, wanted in json.loads(Path(plan).read_text()).items():
            curve = run(pretrain_script(), **wanted)
            stem = Path(out) / f"{name}.{torch.distributed.get_rank()}"
            stem.with_suffix(stem.suffix + ".json").write_text(json.dumps(curve.losses))
            np.save(stem.with_suffix(stem.suffix + ".npy"), np.array(curve.rows, dtype=object), allow_pickle=True)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
