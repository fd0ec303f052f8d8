"""Make batches the slow, obvious way, and a tiny model to train on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from gpt_model import connect, megatron_device
from megatron.core import parallel_state

Pair = tuple[np.ndarray, np.ndarray]  # ids and label-aligned mask of one sequence


def batch_of(rows: Sequence[Sequence[Pair]], length: int, width: int, pad_id: int = 0) -> dict[str, torch.Tensor]:
    """Return rows of concatenated sequences as Megatron's dictionary of tensors."""
    batch: dict[str, list[list[float]]] = {
        key: [] for key in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen")
    }
    for sequences in rows:
        tokens, labels, mask, positions, bounds = [], [], [], [], [0]
        for ids, weights in sequences:
            tokens += ids.tolist()
            labels += [*ids.tolist()[1:], pad_id]
            mask += weights.tolist()
            positions += range(len(ids))
            bounds.append(len(tokens))
        rest = length - len(tokens)
        batch["tokens"].append(tokens + [pad_id] * rest)
        batch["labels"].append(labels + [pad_id] * rest)
        batch["loss_mask"].append(mask + [0] * rest)
        batch["position_ids"].append(positions + list(range(rest)))
        bounds += [length] * (width - len(bounds))
        batch["cu_seqlens"].append(bounds)
        batch["max_seqlen"].append(max(b - a for a, b in pairwise(bounds)))
    types: dict[str, Any] = {"loss_mask": torch.float32, "cu_seqlens": torch.int32, "max_seqlen": torch.int32}
    return {key: torch.tensor(rows, dtype=types.get(key, torch.int64)) for key, rows in batch.items()}


def random_sequences(rng: np.random.Generator, lengths: Sequence[int], vocabulary: int) -> list[Pair]:
    """Return sequences with about half of their labels trained, never the last one."""
    pairs = []
    for length in lengths:
        mask = rng.integers(0, 2, length).astype(np.float32)
        mask[-1] = 0
        pairs.append((rng.integers(0, vocabulary, length).astype(np.int32), mask))
    return pairs


def pretrain_script() -> ModuleType:
    """Import tools/pretrain_sft.py as a module."""
    import pretrain_sft

    return pretrain_sft


@contextlib.contextmanager
def lone_process() -> Iterator[ModuleType]:
    """Provide the training script in a process group of one process, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with megatron_device():
        connect()
        parallel_state.initialize_model_parallel()
        yield pretrain_script()
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    torch.set_num_threads(threads)
