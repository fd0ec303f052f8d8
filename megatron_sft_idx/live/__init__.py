"""Data that is still being made: a live catalog, a folder of numbered shards that training reads as they appear.

Chunks of JSON lines, from anybody's producer, are read in the same way. Whoever reads here must expect that everything
may be gone, torn or hostile a moment later. What producers and consumers share is offered here and knows no torch; what
trains is imported from its module, ``live_loader``.
"""

from megatron_sft_idx.live.acks import (
    Ack,
    ack_folder,
    completed,
    read_acks,
    require_consumer,
    write_ack,
)
from megatron_sft_idx.live.catalog import (
    END,
    PRODUCER,
    Catalog,
    Limits,
    ProducerState,
    State,
    default_max_sequences,
    shard_name,
)
from megatron_sft_idx.live.documents import Record
from megatron_sft_idx.live.live_order import Deal, Item
from megatron_sft_idx.live.waiting import Settling, Stopped, Unchanged, Waiter, looks, patiently, status_of
