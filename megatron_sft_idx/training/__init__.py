"""Batches from packs: the order of samples, sources of packs, batch assembler and loader, and data sets for Megatron.

Nothing here writes a shard. Modules that import Megatron are not re-exported here, because that import takes seconds
and worker processes do not need it. The modules that make batches (``rows``, ``sources``, ``fetch``, ``batch``,
``loader``) can therefore import torch, but not Megatron.
"""

from megatron_sft_idx.training.batch import BatchAssembler, Form, Tensors, parallel_multiple
from megatron_sft_idx.training.loader import BatchIterator, BatchLoader, Wanted
from megatron_sft_idx.training.media import MediaStep, check_media_options
from megatron_sft_idx.training.sources import CARRIED_BY, Arrays, Index, ItemFinder, Segments, located, require_text
