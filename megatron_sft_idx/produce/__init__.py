"""Convert input that may still grow to a catalog of shards, while training already reads it.

``tokenize`` makes packs of chats, and ``live`` defines a catalog. This folder has everything for running a producer:
its position in the input, how far it may run ahead of training, and its published state. Nothing here trains. Begin
with ``production``. ``input_kinds`` and ``feed`` are the input; ``cursor`` and ``keeper`` are the state that survives a
kill.
"""

from megatron_sft_idx.produce.produce_options import ProduceOptions
from megatron_sft_idx.produce.production import own_files, produce
