"""Packs to batches: an order, sources of packs, the assembler and its loader, and what Megatron is handed of these.

Nothing here writes a shard. What imports Megatron is imported from its own module and not offered here: that takes
seconds, and worker processes do without it. So what batches are made by (``rows``, ``sources``, ``fetch``, ``batch``,
``loader``) may import torch and not Megatron.
"""

from megatron_sft_idx.training.batch import BatchAssembler, Form, Tensors, parallel_multiple
from megatron_sft_idx.training.loader import BatchIterator, BatchLoader, Wanted
from megatron_sft_idx.training.media import CARRIED_BY, MediaStep
from megatron_sft_idx.training.sources import Arrays, Index, ItemFinder, Segments, located, require_text
