"""Input that may still grow to a catalog of shards, which training reads meanwhile.

How chats become packs is what ``tokenize`` does, how the catalog looks is told in ``live``; here is what keeps one
producer going: its place in the input, the room it has, what it says of itself. Nothing here trains.
"""

from megatron_sft_idx.produce.production import ProduceOptions, own_files, produce
