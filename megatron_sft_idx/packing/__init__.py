"""Plan from their lengths which sequences share a pack, with the kernels of ``csrc/packing``.

Positions of a row without a token waste compute, so plans have as few packs as possible. Nothing here knows tokens or
files, and only the caller's seed makes anything random.
"""

from megatron_sft_idx.packing.pack import METHODS, Effort, Method, PackPlan, WindowPacker, csr_rows, pack_sequences
