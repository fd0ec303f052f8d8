"""``PackedShard``: shards as Megatron-Bridge's packed data set, memory-mapped instead of unpickled or decoded.

Needs Megatron-Bridge 0.3 or later. From 0.6 on, use it through ``bridge_config.BridgePackedConfig``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.packs.run import has_weights
from megatron_sft_idx.shard.judged import require_shard_judged
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.sources import StoredPacks, require_text

try:
    from megatron.bridge.data.packing.gpt_sft import GPTSFTPackedDataset
except ImportError:  # before 0.6
    from megatron.bridge.data.datasets.sft import GPTSFTPackedDataset

# Advice in the error about shards with preference pairs.
ON_REJECTED = (
    "Bridge would also train on the rejected answers; use dpo_loss in your own training loop (docs/preferences.md)"
)


class PackedShard(GPTSFTPackedDataset):  # type: ignore[misc]
    """Packs of shards as Bridge's packed data set; Bridge's own ``collate_fn`` makes the batches.

    ``file_path`` is a prefix, folder or glob of shards. See ``GPTSFTPackedDataset`` for all other arguments.

    Raises:
        ShardNotFoundError: there is no such shard.
        FormatError: packs may be longer than ``max_seq_length``; they hold preference pairs, KTO labels, images or
            audio; or come from different tokenizers.
    """

    def _load_dataset(self) -> None:
        shards = ShardSet.open(self.file_path)
        for prefix, header in zip(shards.prefixes, shards.headers, strict=True):
            require_shard_judged(prefix, header, (), ON_REJECTED)
            require_text(prefix, header.has_media, False, "use BridgeVLMConfig (docs/media.md)")
        stored = StoredPacks(shards)
        if stored.capacity > self.max_seq_length:
            raise FormatError(
                f"{shards.prefixes[0]}: packs of up to {stored.capacity} tokens, but the sequence length of the run is"
                f" {self.max_seq_length}; raise it, or pack again with --seq-length {self.max_seq_length}"
            )
        self.indexed_dataset = shards

    def __getitem__(self, idx: int) -> Pack:
        """Return one pack.

        Bridge fills up its last batch with negative indices; their packs are returned with a loss mask of zeros.

        SequenceError: the mask has weights other than 0 and 1, which Bridge's collate would turn into integers.
        """
        number = int(idx if self.samples_mapping is None else self.samples_mapping[idx])
        pack = self.indexed_dataset[number]
        mask: Any = pack["loss_mask"]
        if has_weights(mask):
            raise SequenceError(
                self.indexed_dataset.prefixes[0],
                number,
                "its loss mask has weights other than 0 and 1, which Megatron-Bridge does not support",
            )
        return pack if idx >= 0 else {**pack, "loss_mask": np.zeros_like(mask)}
