"""Tiny transformers models with random weights, and their losses on single sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_sft_idx.shard import Pack


def tiny_llama(vocab_size: int, seed: int = 1, **options: Any) -> Any:
    """Return a model of two layers, with weights so large that every attended token changes the loss."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.5,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def sequence_parts(pack: Pack) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids int64 and label-aligned mask of each sequence of a pack."""
    for start, stop in pairwise(pack["seq_boundaries"].tolist()):
        ids, mask = pack["input_ids"][start:stop], pack["loss_mask"][start:stop]
        yield torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.astype(np.float32))


def logp_alone(model: Any, ids: Tensor) -> Tensor:
    """Return the log-probability of each token except the first, for a single sequence without others in its row."""
    logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, ids[1:, None])[:, 0]  # type: ignore[no-any-return]


def loss_alone(model: Any, packs: Iterable[Pack]) -> Tensor:
    """Return the mean loss by the masks, with each sequence passed to the model by itself."""
    total, weight = torch.zeros(()), torch.zeros(())
    for pack in packs:
        for ids, mask in sequence_parts(pack):
            total, weight = total - (logp_alone(model, ids) * mask[:-1]).sum(), weight + mask.sum()
    return total / weight
