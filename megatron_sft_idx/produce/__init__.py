"""Input that may still grow to a catalog of shards, which training reads meanwhile.

``tokenize`` makes packs of chats, and ``live`` says how a catalog looks. This folder has what keeps one producer going:
its position in the input, how far it may run ahead of training, and the state that it publishes. Nothing here trains.
Begin with ``production``; ``input_kinds`` and ``feed`` are the input, ``cursor`` and ``keeper`` what outlives a kill.
"""

from megatron_sft_idx.produce.produce_options import ProduceOptions
from megatron_sft_idx.produce.production import own_files, produce
