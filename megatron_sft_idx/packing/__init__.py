"""Lengths to packs: which sequences share a training row, planned by the kernels of ``csrc/packing``.

A position of a row that holds no token is computed in vain, so plans have as few packs as can be found. Neither tokens
nor files are known here, and nothing random is drawn but by the caller's seed.
"""

from megatron_sft_idx.packing.pack import METHODS, Effort, Method, PackPlan, WindowPacker, csr_rows, pack_sequences
