"""Training on packs: sources of packs, batches, loaders, and Megatron's dataset face."""

from megatron_sft_idx.training.batch import BatchAssembler, Form, Tensors
from megatron_sft_idx.training.loader import BatchIterator, BatchLoader, Wanted, whole_rows
from megatron_sft_idx.training.sources import PackSource, Segments, interleaved

# Megatron's face is not here: it takes seconds to import, and worker processes do without it.
__all__ = [
    "BatchAssembler",
    "BatchIterator",
    "BatchLoader",
    "Form",
    "PackSource",
    "Segments",
    "Tensors",
    "Wanted",
    "interleaved",
    "whole_rows",
]
