"""Attention on the CPU across context-parallel ranks, and ``HYBRID``, the layers of ``HybridModel`` with it.

``pretrain_hybrid.py --spec megatron_attention HYBRID`` uses these layers. ``HYBRID`` does not exist before
megatron-core 0.18, which has no ``HybridModel``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from gpt_model import SegmentAttention, layer_spec
from megatron.core import mpu
from torch import Tensor
from torch.distributed.nn.functional import all_gather

gather: Callable[..., tuple[Tensor, ...]] = all_gather


class Attention(SegmentAttention):
    """Replaces Transformer Engine: causal attention inside each segment, over all context-parallel ranks."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
        group = mpu.get_context_parallel_group()
        ranks = group.size()
        if ranks == 1:
            return super().forward(query, key, value, *args, **named)
        params = named["packed_seq_params"]
        each = [partitioned(params.cu_seqlens_q_padded, len(query) * ranks, ranks, rank) for rank in range(ranks)]
        order = torch.cat(each).argsort()
        whole = (torch.cat(gather(x.contiguous(), group=group))[order] for x in (query, key, value))
        return super().forward(*whole, *args, **named)[each[group.rank()]]


def partitioned(bounds: Tensor, total: int, ranks: int, rank: int) -> Tensor:
    """Transformer Engine's ``thd_get_partitioned_indices``.

    Each segment has 2 * ranks chunks; a rank gets chunk ``rank`` and its mirror image.
    """
    picked = []
    for start, stop in pairwise(sorted(set(bounds.tolist()))):
        if (stop - start) % (2 * ranks):
            raise ValueError(f"a segment of {stop - start} positions does not divide among {ranks} ranks")
        chunks = torch.arange(start, stop).chunk(2 * ranks)
        picked += [chunks[rank], chunks[2 * ranks - 1 - rank]]
    indices = torch.cat(picked)
    if len(indices) * ranks != total:
        raise ValueError(f"segments of {len(indices) * ranks} positions in all, the row has {total}")
    return indices


if find_spec("megatron.core.models.hybrid"):
    from hybrid_model import stack_spec

    layer = layer_spec("thd")
    layer.submodules.self_attention.submodules.core_attention = Attention
    HYBRID = stack_spec(layer)
