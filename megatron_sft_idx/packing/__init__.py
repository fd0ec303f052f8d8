"""Lengths to packs: which sequences share a training row, planned by the kernels of ``csrc/packing``.

Numbers in, numbers out: neither tokens nor files are known here. Whatever is drawn at random comes of a
seed that is handed in.
"""

from megatron_sft_idx.packing.pack import METHODS, Effort, Method, PackPlan, WindowPacker, csr_rows, pack_sequences
