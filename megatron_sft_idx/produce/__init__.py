"""Input that may still grow to a catalog of shards, which training reads meanwhile.

``tokenize`` makes packs of chats, and ``live`` says how a catalog looks. This folder has what keeps one producer going:
its position in the input, how far it may run ahead of training, and the state that it publishes. Nothing here trains.
"""

from megatron_sft_idx.produce.production import ProduceOptions, own_files, produce
