"""Data that is still being made: a live catalog, a folder of numbered shards that training reads as they appear.

Chunks of JSON lines, from anybody's producer, are read in the same way. Whoever reads here must expect that everything
may be gone, torn or hostile a moment later. What producers and consumers share is offered here and knows no torch; what
trains is imported from its module: ``live_loader``, and ``live_training`` for scripts with Megatron's arguments.
"""

from megatron_sft_idx.live.acks import (
    Ack,
    Base,
    Leftover,
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
    Record,
    State,
    Stopped,
    Unchanged,
    Waiter,
    default_max_sequences,
    looks,
    patiently,
    shard_name,
    status_of,
)
